"""What ends a run early or deserves a look: spikes, stretches of non-finite steps, too many bad samples."""

import json
import math
import statistics
import sys
from collections import deque
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.errors import DataError, Diverged, WentBack
from data.files import write_whole
from data.loader import Batch
from pipeline import checkpoint
from pipeline.telemetry import Telemetry
from pipeline.training_config import TrainConfig

LEFT_OUT = "left-out.json"  # stretches [first, stop) of steps, counted from 0, that went non-finite; not tried again
RECENT = 64  # steps kept in mind, for the record of a spike
SPIKE, SPIKE_AFTER = 10.0, 16  # a spike is so many times the median norm of at least so many steps
BAD_GRACE = 10_000  # samples before max_bad_fraction is judged


class Health:
    """Judges every step on every worker alike; `left_out` are the stretches that earlier attempts gave up."""

    def __init__(self, cfg: TrainConfig, directory: Path, checkpoints: Path, telemetry: Telemetry) -> None:
        self.cfg, self.directory, self.checkpoints, self.telemetry = cfg, directory, checkpoints, telemetry
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.skipped = 0  # in a row
        self.bad_here = 0  # bad samples of this worker
        self.left_out = self._left_out()

    def _left_out(self) -> list[range]:
        """Collective: the lead's reading of the file; empty where there is none."""
        path = self.directory / LEFT_OUT
        found: list[list[list[int]]] = [[]]
        if dist.get_rank() == 0 and path.exists():
            found = [json.loads(path.read_text())]
        dist.broadcast_object_list(found, src=0)
        return [range(*stretch) for stretch in found[0]]

    def next_step(self, step: int) -> int:
        """`step`, or the first after it that is not left out."""
        while step in (stretch := next((one for one in self.left_out if step in one), range(0))):
            step = stretch.stop
        return step

    def judge(self, step: int, loss: float, norm: float, ledger: str, ids: list[list[int]]) -> None:
        """Name a step whose gradient jumps; count skipped ones: a non-finite gradient never reaches the weights, too
        many in a row end the run."""
        usual = [one["grad_norm"] for one in self.recent if math.isfinite(one["grad_norm"])]
        limit = SPIKE * statistics.median(usual) if len(usual) >= SPIKE_AFTER else sys.float_info.max
        calm = not self.recent or self.recent[-1]["grad_norm"] <= limit  # of a stretch, the first step tells it all
        self.recent.append({"step": step, "loss": loss, "grad_norm": norm, "ledger": ledger[:12]})
        if calm and not norm <= limit:
            usually = f", usual is up to {limit:.3g}" if len(usual) >= SPIKE_AFTER else ""
            self.telemetry.report(
                "spike",
                {"step": step, "grad_norm": norm, "limit": limit, "recent": list(self.recent), "ids": ids},
                f"step {step}: gradient norm {norm:.3g}{usually}; look at the batch: "
                f"python -m jobs replay {self.directory} step={step}",
            )
        if math.isfinite(norm):
            self.skipped = 0
            return
        self.skipped += 1
        self.telemetry.say(
            f"step {step}: gradient not finite, step skipped, weights unchanged; "
            f"first samples (epoch, shard, sample) {ids[:4]}"
        )
        if self.skipped >= self.cfg.max_skipped:
            self._go_back_or_end(step)

    def _go_back_or_end(self, step: int) -> None:
        """Collective: raise WentBack once for a stretch of steps, Diverged when that has not helped."""
        decided = [0]  # by the lead: others may still see an older listing of a shared folder
        if dist.get_rank() == 0 and (found := checkpoint.committed(self.checkpoints)):
            decided = [checkpoint.step_of(found[0])]
        dist.broadcast_object_list(decided, src=0)
        last, what = decided[0], f"{self.skipped} steps in a row up to {step} had a non-finite gradient"
        newest = self.left_out[-1] if self.left_out else range(-1)
        if last <= newest.stop:  # nothing was committed since we went back
            raise Diverged(
                f"{what}, and leaving out steps {newest.start + 1} … {newest.stop} had not helped\n"
                f"  the last good weights are in {self.checkpoints}\n"
                "  lower optim.lr, or lengthen optim.schedule.warmup_steps"
            )
        if dist.get_rank() == 0:
            stretches = [*self.left_out, range(last, step)]
            write_whole(self.directory / LEFT_OUT, json.dumps([[one.start, one.stop] for one in stretches]))
        dist.barrier()
        raise WentBack(f"{what}: back to step {last}, steps {last + 1} … {step} are left out")

    def count_bad(self, batch: Batch) -> int:
        """How many samples of the batch were replaced; this worker's first and every thousandth are named."""
        for bad in batch.bad:
            self.bad_here += 1
            if self.bad_here == 1 or self.bad_here % 1000 == 0:
                self.telemetry.say(f"bad sample {self.bad_here} replaced: {bad.shard} {bad.key}: {bad.reason}")
        return len(batch.bad)

    def check_bad(self, bad: int, seen: int, sets: list[str]) -> None:
        """Raise DataError when more of the samples seen were bad than a healthy set can have."""
        allowed = self.cfg.data.max_bad_fraction
        if bad > allowed * max(seen, BAD_GRACE):
            raise DataError(
                f"{bad} bad samples among {seen} seen, more than max_bad_fraction {allowed} allows\n"
                f"  see log.txt for names; python -m jobs data check {' or '.join(sets)} counts them by reason"
            )
