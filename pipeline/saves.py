"""Saves as the training loop has them: one in flight, what it stalls, how many failed in a row, which may go."""

import time

import torch.distributed as dist

from data.errors import CheckpointError
from pipeline import checkpoint
from pipeline.engine import Engine
from pipeline.telemetry import Telemetry, Window
from pipeline.training_config import TrainConfig


class Saves:
    """`begin` snapshots, `finish` commits; both add what the loop waited to the window of the next report."""

    def __init__(self, cfg: TrainConfig, saver: checkpoint.Saver, telemetry: Telemetry, window: Window) -> None:
        self.cfg, self.saver, self.telemetry, self.window = cfg, saver, telemetry, window
        self.failed = 0  # in a row
        self.last = -1  # step of the newest commit

    def begin(self, engine: Engine, manifest: checkpoint.Manifest) -> None:
        """Snapshot now; a save still in flight is finished first."""
        if self.saver.in_flight:
            self.finish()
        self.saver.begin(engine, manifest)
        self.window.stalled_s += self.saver.stalled_s

    def finish(self) -> None:
        """Collective: commit the save in flight and prune; too many failures in a row raise CheckpointError."""
        began = time.monotonic()
        try:
            self._finish(began)
        finally:
            self.window.stalled_s += time.monotonic() - began

    def _finish(self, began: float) -> None:
        done = self.saver.finish()
        stalled = self.saver.stalled_s + time.monotonic() - began  # snapshot and commit
        if done is None:
            self._count_failure(stalled)
            return
        self.failed, self.last = 0, done.step
        if dist.get_rank() == 0:
            size = sum(file["bytes"] for file in done.files.values())
            self.telemetry.report(
                "checkpoint",
                {**self._values(stalled), "bytes": size, "ledger": done.ledger},
                f"checkpoint step {done.step} committed: {len(done.files)} files, {size / 1e6:.1f} MB, "
                f"loop stalled {stalled:.2f}s of {self.saver.took_s:.2f}s, ledger {done.ledger[:12]}",
            )
            self._prune()

    def _values(self, stalled_s: float) -> dict[str, float]:
        return {"step": self.saver.manifest.step, "stalled_s": stalled_s, "took_s": self.saver.took_s}

    def _count_failure(self, stalled_s: float) -> None:
        self.failed += 1
        failure, allowed = self.saver.failure, self.cfg.max_failed_saves
        self.telemetry.report(
            "checkpoint_failed",
            {**self._values(stalled_s), "error": failure},
            f"checkpoint step {self.saver.manifest.step} FAILED ({failure}); training goes on from memory, the one "
            f"before it stays; {self.failed} of {allowed} failures in a row",
        )
        if self.failed >= allowed:
            raise CheckpointError(
                f"{self.failed} saves in a row failed, the last: {failure}\n"
                f"  make room under {self.saver.folder}, then run the same command again"
            )

    def _prune(self) -> None:
        """Delete old checkpoints; one that cannot be deleted costs room, not the run."""
        try:
            checkpoint.prune(self.saver.folder, self.cfg.keep, self.cfg.keep_every)
        except OSError as error:
            self.telemetry.say(f"old checkpoints stay: {error}")
