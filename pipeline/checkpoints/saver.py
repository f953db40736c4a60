"""Saves checkpoints in the background: one save at a time, which rank 0 commits when all files are written.

A save consists of these steps:
1. `Saver.begin`: every worker copies its fragments into host memory, which blocks the training loop, and starts a
   thread.
2. Rank 0's thread fsyncs the metrics and checks the free disk space, so that a save that cannot fit fails before rank 0
   writes anything. Each thread writes its worker's file under `.tmp-<step>-<attempt>/` and fsyncs it, while a second
   thread computes the digests from the same memory.
3. The training loop's per-step reduction tells every worker when all threads have ended (`Saver.written`).
4. `Saver.finish`: the workers exchange sizes and digests, and rank 0 commits: it checks that its attempt still owns the
   run and that it sees every worker's file, writes the manifest, fsyncs, renames the folder and fsyncs its parent.
5. Rank 0 reports the checkpoint, and deletes old checkpoints in a thread during training. If the disk has no room for
   another checkpoint before that deletion, the other workers learn of the commit only after it.

In:  checkpoints/.tmp-0000001200-000007/rank-00000.safetensors …
Out: checkpoints/step-0000001200/rank-00000.safetensors … MANIFEST.json     (reader.py reads them)

A failed save loses that checkpoint but does not stop the run; `max_failed_saves` consecutive failures end it.

The free disk space is checked before each save (`check_room`) and before a run (`check_disk_space`). For example, 5,000
parameters with Adam and keep=3 are refused if 99.9 kB are free:
    276.4 kB needed under /runs/x/pretrain-…/checkpoints (4 checkpoints of 64.1 kB, …), 99.9 kB free

Step 4 is implemented in stage_checkpoints.py. If the nodes share no folder, the thread of step 2 uploads the file to an
object store and rank 0 commits there (data/storage.py).
"""

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import models
from data.errors import CheckpointError, RunOwned, StorageError
from data.files import DISK_BLOCK, error_text, free_bytes, make_folder, size_text
from data.storage import Folder
from models import ModelConfig
from pipeline.checkpoints.manifest import Manifest, digest, newest_attempt, step_of
from pipeline.checkpoints.stage_checkpoints import MIN_KEPT, Chosen, Decision, StageCheckpoints, WrittenFile
from pipeline.monitoring.telemetry import Telemetry
from pipeline.monitoring.watchdog import Phases
from pipeline.optimization import STATE
from pipeline.training_config import SavingConfig, TrainConfig
from pipeline.training_data import BYTES_FP32
from pipeline.values import amount

METRICS = "metrics.jsonl"
HEADER_BYTES = 4096  # approximate size of a worker's header and of the manifest
DELETING_S = 60.0  # longest wait for a deletion, so that a hanging storage does not block the run


class Saver:
    """Saves checkpoints in the background, one at a time.

    `begin` blocks the loop while it copies the state into host memory; `finish` commits the files of all workers;
    `end` waits for pending deletions.
    """

    def __init__(
        self,
        checkpoints: StageCheckpoints,
        telemetry: Telemetry,
        phases: Phases,
        saving: SavingConfig,
        *,
        saves_evaluated: bool = False,
        expected_bytes: int = 0,
    ) -> None:
        self.checkpoints = checkpoints
        self.telemetry = telemetry
        self.phases = phases
        self.saving = saving
        self.saves_evaluated = saves_evaluated  # whether every evaluated step becomes a checkpoint
        # Each function returns steps whose checkpoints must be kept: not evaluated yet, or the best so far.
        self.needed: list[Callable[[], Collection[int]]] = []
        self.expected_bytes = expected_bytes  # size of a checkpoint; after the first commit, the real size

        self.last_committed: int | None = None  # last committed step
        self.failures_in_a_row = 0
        self.failure = ""  # error of the last failed save
        self.stalled_s = 0.0  # time that saves blocked the loop since its last report

        self.thread: threading.Thread | None = None  # writes this worker's file
        self.deleting: threading.Thread | None = None  # deletes old checkpoints, only on rank 0
        self.snapshot = torch.empty(0, dtype=torch.uint8)  # reused by the next save, which has the same size
        self.snapshot_s = 0.0  # time that the snapshot of the save in flight blocked the loop
        self.began = 0.0  # start of the save in flight, monotonic clock
        make_folder(checkpoints.local, checkpoints.storage.local)

    @property
    def in_flight(self) -> bool:
        """Return whether a save has begun but has not been committed yet."""
        return self.thread is not None

    @property
    def written(self) -> bool:
        """Return whether this worker's writing thread has ended, whether or not it succeeded."""
        return self.thread is not None and not self.thread.is_alive()

    def is_due(self, step: int, *, is_evaluated: bool, is_finite: bool) -> bool:
        """Return whether to save this step; `is_finite` tells whether the step's gradient was finite."""
        is_planned = step % self.saving.save_every == 0 or (is_evaluated and self.saves_evaluated)
        # Do not commit while steps are non-finite: the run would count that commit as progress and never roll back
        # past it.
        return is_planned and is_finite

    def ensure_committed(self, step: int, begin: Callable[[], None], *, retries: bool = False) -> bool:
        """Collective: commit this step unless it is already committed; return whether it is committed now.

        `begin` starts a save of this step. It is called if no save of this step has been attempted; with `retries`, it
        is called again after each failed save. Raises the same errors as `finish`.
        """
        was_tried = self.in_flight and self.manifest.step == step
        self.finish(step)
        while self.last_committed != step and (retries or not was_tried):
            begin()
            self.finish(step)
            was_tried = True
        return self.last_committed == step

    def begin(self, fragments: Iterable[tuple[str, int, Mapping[str, Tensor]]], manifest: Manifest) -> None:
        """Copy this worker's fragments to host memory and start writing them; the previous save must be finished.

        A fragment is (parameter name, its first element on this worker, {kind: flat fp32 view}); kinds are "master",
        "exp_avg", …
        """
        assert not self.in_flight
        self.phases.enter("save", manifest.step)
        self.began = time.monotonic()
        self.manifest = manifest
        file = f"rank-{dist.get_rank():05d}.safetensors"
        self.snapshot = copy_to_host(fragments, self.snapshot)
        # `write` replaces this result. If its thread dies unexpectedly, this one stays and the save counts as failed.
        self.result = WrittenFile(file, error=f"{file}: the thread writing it has died; see stderr")
        # A daemon thread, so that a slow disk does not keep a failed worker from exiting.
        arguments = (file, self.snapshot.numpy().data)
        self.thread = threading.Thread(target=self.write, args=arguments, name="checkpoint", daemon=True)
        self.thread.start()
        self.snapshot_s = time.monotonic() - self.began
        self.stalled_s += self.snapshot_s

    def write(self, file: str, content: memoryview) -> None:
        """Write this worker's file in a thread; store its record, or the error, in `result`."""
        is_rank_0 = dist.get_rank() == 0
        storage = self.checkpoints.storage
        try:
            # 1. Rank 0 prepares for all: it fsyncs the metrics, because a committed step must have its metrics, and
            #    checks the disk space, because a single failing worker is enough to fail the save.
            if is_rank_0:
                self.telemetry.sync()
                try:
                    check_room(self.checkpoints, self.manifest, self.expected_bytes)
                except CheckpointError:
                    # Wait for pending deletions: their disk space is not free yet.
                    self.wait_for_deleting()
                    check_room(self.checkpoints, self.manifest, self.expected_bytes)

            # 2. Write and digest in parallel. Both read the same memory, which does not change until the next save,
            #    and both release Python's lock.
            with ThreadPoolExecutor(1, "digest") as executor:
                digesting = executor.submit(digest, content)
                storage.write(f"{self.checkpoints.staged_name(self.manifest)}/{file}", content)
            record = digesting.result()

            # 3. If the other nodes do not see this disk, upload the metrics too. A previous owner that was suspended
            #    must not do so: its lines would replace newer ones.
            if is_rank_0 and self.checkpoints.sends_metrics and newest_attempt(storage) <= self.manifest.attempt:
                storage.upload(f"{self.checkpoints.stage}/{METRICS}")
            self.result = WrittenFile(file, record)
        except CheckpointError as error:
            self.result = WrittenFile(file, error=f"{file}: {error}")
        except OSError as error:
            self.result = WrittenFile(file, error=f"{file}: {error_text(error)}")
        except StorageError as error:
            self.result = WrittenFile(file, error=str(error))  # the error names the object

    def finish(self, step: int) -> Manifest | None:
        """Collective: commit the save in flight, if any, after waiting for all files; then delete old checkpoints.

        `step` is the loop's current step. Returns the manifest, or None on every worker if the save failed. On all
        workers, raises RunOwned if a newer attempt owns the run, or CheckpointError after `max_failed_saves`
        consecutive failures.
        """
        if self.thread is None:
            return None
        # 1. Wait until every worker's file is written. The results are gathered in the loop's thread: in a collective
        #    of another thread, nothing would end the wait for a dead worker.
        self.phases.enter("save", step)
        finish_began = time.monotonic()
        self.thread.join()
        self.thread = None
        results = [self.result] * dist.get_world_size()
        dist.all_gather_object(results, self.result)

        # 2. Only rank 0 commits.
        decision = Decision(None)
        if dist.get_rank() == 0:
            decision = self.checkpoints.commit(self.manifest, results, self.telemetry.log)
        now = time.monotonic()
        took_s = now - self.began
        stalled_s = self.snapshot_s + now - finish_began

        # 3. Rank 0 reports the checkpoint, on which the run may rely from here on, and then deletes old ones.
        if dist.get_rank() == 0 and decision.manifest is not None:
            saved = decision.manifest
            self.telemetry.report(
                "checkpoint",
                {
                    "step": saved.step,
                    "stalled_s": stalled_s,
                    "took_s": took_s,
                    "bytes": saved.total_bytes,
                    "ledger": saved.ledger,
                },
                f"checkpoint step {saved.step} committed: {amount(saved.total_bytes)}B, "
                f"stalled {stalled_s:.2f}s of {took_s:.2f}s, ledger {saved.ledger[:12]}",
            )
            # Deleting may take a third of the time of writing, so a thread does it. A daemon, because a storage that
            # hangs must not keep a worker from exiting.
            before = (self.deleting,)
            self.deleting = threading.Thread(target=self.delete_old, args=before, name="old checkpoints", daemon=True)
            self.deleting.start()
            # The other workers begin the next save as soon as they learn of this commit, without checking for room. So
            # if there is no room next to the old checkpoints, or it is unknown, inform them only after the deletion.
            try:
                check_room(self.checkpoints, saved, saved.total_bytes)
            except (CheckpointError, OSError):
                self.wait_for_deleting()

        # 4. All workers get the same decision, so they all raise the same error below.
        decisions = [decision]
        dist.broadcast_object_list(decisions, src=0)
        committed = decisions[0].manifest
        self.failure = decisions[0].failure
        if decisions[0].has_newer_owner:
            raise RunOwned(self.failure)

        # 5. Count a failed save. It does not stop the run: the weights are in memory and the storage may recover. Too
        #    many consecutive failures do.
        if committed is None:
            self.failures_in_a_row += 1
            failed_step = self.manifest.step
            self.telemetry.report(
                "checkpoint_failed",
                {"step": failed_step, "stalled_s": stalled_s, "took_s": took_s, "error": self.failure},
                f"checkpoint step {failed_step} FAILED ({self.failure}); the weights are still in memory and the "
                f"previous checkpoint is kept; consecutive failures: {self.failures_in_a_row} of at most "
                f"{self.saving.max_failed_saves}",
            )
            if self.failures_in_a_row >= self.saving.max_failed_saves:
                remedy = "  remove that cause, then run the same command again"
                if self.checkpoints.storage.keeps_sets_locally:
                    remedy = (
                        "  expected: a writable disk with room, inodes and quota for "
                        f"keep={self.saving.keep} checkpoints and one more\n"
                        "  remove that cause (if bytes are missing: free space under "
                        f"{self.checkpoints.address}, or lower keep), then run the same command again"
                    )
                raise CheckpointError(
                    f"{self.failures_in_a_row} consecutive saves failed, the last with: {self.failure}\n{remedy}"
                )
        else:
            self.failures_in_a_row = 0
            self.last_committed = committed.step
            self.expected_bytes = committed.total_bytes
        self.stalled_s += time.monotonic() - finish_began
        return committed

    def end(self, step: int) -> None:
        """Collective: wait until rank 0 has deleted the old checkpoints.

        When a worker ends, the others are killed a moment later. This wait lets the deletion finish first.
        """
        with self.phases.rank_0_phase("save", step, dist.get_rank() == 0):
            self.wait_for_deleting()
        dist.barrier()

    def wait_for_deleting(self) -> None:
        """Wait for the deletion of old checkpoints; log if it has not finished after DELETING_S."""
        if self.deleting is None:
            return
        self.deleting.join(DELETING_S)
        if self.deleting.is_alive():
            self.telemetry.log(
                f"old checkpoints are still being deleted under {self.checkpoints.address} after {DELETING_S:.0f} s; "
                "the run continues, but the disk space that they use is not free yet"
            )

    def delete_old(self, before: threading.Thread | None) -> None:
        """Delete old checkpoints after the previous deletion has ended; log failures without stopping the run."""
        try:
            if before is not None:
                before.join()
            steps = {step for needed in self.needed for step in needed()}
            self.checkpoints.prune(self.saving.keep, self.saving.keep_every, steps)
        except (OSError, StorageError) as error:
            self.telemetry.log(f"could not delete old checkpoints: {error}")
        except Exception as error:  # an exception in this thread would go unnoticed
            self.telemetry.log(f"could not delete old checkpoints: {type(error).__name__}: {error}")

    def checkpoint_of(self, step: int) -> Chosen:
        """Return the checkpoint of a committed step, readable on this node; rank 0 only.

        Raises CheckpointError if the checkpoint is damaged, or StorageError or OSError if the storage fails.
        """
        # For equal steps the later attempt comes first.
        name = next(name for name in self.checkpoints.committed() if step_of(Path(name)) == step)
        return Chosen(name, self.checkpoints.fetch(name), self.checkpoints.manifest(name))


def copy_to_host(fragments: Iterable[tuple[str, int, Mapping[str, Tensor]]], memory: Tensor) -> Tensor:
    """Copy this worker's fragments into host memory in the safetensors format; return the bytes (n,), uint8.

    `memory` is reused if it has the right size. There is an entry "name|kind|first element" for each view; fragments
    are described in `Saver.begin`.
    """
    # 1. The header: its length in 8 bytes, little endian, then JSON (https://huggingface.co/docs/safetensors). It is
    #    built here, because safetensors' own writer would copy all of the state a second time.
    views: dict[str, Tensor] = {}
    described: dict[str, dict[str, object]] = {}
    data_bytes = 0
    for name, start, tensors in fragments:
        for kind, view in tensors.items():
            key = f"{name}|{kind}|{start}"
            assert view.dtype == torch.float32 and view.dim() == 1, (key, view.dtype, view.shape)
            end_byte = data_bytes + view.nbytes
            described[key] = {"dtype": "F32", "shape": [view.numel()], "data_offsets": [data_bytes, end_byte]}
            views[key] = view
            data_bytes = end_byte
    text = json.dumps(described).encode()
    # Padded to a multiple of 8 bytes, so that the data after it can be viewed as fp32 in place.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text

    # 2. The data: all views, one after another.
    if memory.numel() != len(header) + data_bytes:
        memory = host_memory(len(header) + data_bytes)
    memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    data = memory[len(header) :].view(torch.float32)
    filled = 0
    for view in views.values():
        data[filled : filled + view.numel()].copy_(view.detach())
        filled += view.numel()
    return memory


def host_memory(size: int) -> Tensor:
    """Allocate host memory of this size, aligned for direct writes to disk, and pinned if there is a GPU."""
    # A copy from the GPU to unpinned memory would be staged once more.
    memory = torch.empty(size + DISK_BLOCK, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    first = -memory.data_ptr() % DISK_BLOCK
    return memory[first : first + size]


# ------------------------------------------------------------------------ room on the disk


def checkpoint_bytes(cfg: TrainConfig, model: ModelConfig) -> int:
    """Return the total size of a checkpoint's files: fp32 master weights, moments and averaged weights."""
    copies = 1 + len(STATE[cfg.optim.name])
    if cfg.polyak:
        copies += 1
    return models.parameters_of(model) * BYTES_FP32 * copies + HEADER_BYTES


def check_disk_space(cfg: TrainConfig, model: ModelConfig, checkpoints: StageCheckpoints) -> None:
    """Raise CheckpointError if a stage's checkpoints and weights will not fit on this node's disk."""
    needed, parts = bytes_to_come(cfg, model, checkpoints)
    free = free_bytes(checkpoints.local)
    if free < needed:
        raise CheckpointError(
            f"{size_text(needed)} are needed under {checkpoints.local} ({parts}), but only {size_text(free)} are free\n"
            f"  expected: room for keep={cfg.keep} checkpoints, for one more while it is written, and for the weights\n"
            "  free space there, lower keep, or use another disk: run=/elsewhere"
        )


def bytes_to_come(cfg: TrainConfig, model: ModelConfig, checkpoints: StageCheckpoints) -> tuple[int, str]:
    """Return the bytes that a stage still needs for checkpoints and weights, and a description of the parts.

    At peak usage, the disk holds one checkpoint more than `keep`, because the oldest is deleted only after the newest
    is complete. Leftover files that the next start deletes before its first save count as free space.
    """
    most_kept = max(cfg.keep, MIN_KEPT) if checkpoints.storage.keeps_sets_locally else 1
    # Only on this disk: checkpoints in an object store need no room here.
    most_kept += cfg.exempt_checkpoints
    existing = Folder(checkpoints.local).published("")
    to_come = most_kept + 1 - min(len(existing), most_kept)
    # A short stage saves fewer checkpoints.
    if cfg.steps is not None:
        last_step = step_of(Path(existing[0])) if existing else 0
        saves = math.ceil((cfg.steps - last_step) / cfg.save_every)
        if cfg.saves_evaluated:
            saves += math.ceil((cfg.steps - last_step) / cfg.evaluate_every)
        to_come = min(to_come, saves)
    one_checkpoint = checkpoint_bytes(cfg, model)
    weights = models.parameters_of(model) * BYTES_FP32
    parts = f"{to_come} checkpoints of {size_text(one_checkpoint)}, weights of {size_text(weights)}"
    swept = 0
    for leftover in checkpoints.local.glob(".tmp-*"):
        for path in [leftover, *leftover.rglob("*")]:
            # A running stage may delete it in the meantime.
            with suppress(FileNotFoundError):
                if path.is_file():
                    swept += path.stat().st_size
    if swept:
        parts += f", minus {size_text(swept)} in .tmp-* folders there, which are deleted at start-up"
    return max(to_come * one_checkpoint + weights - swept, 0), parts


def check_room(checkpoints: StageCheckpoints, manifest: Manifest, needed_bytes: int) -> None:
    """Raise CheckpointError if the disk has no room for a save of this size, or OSError if its free space is unknown.

    Files of this save that other workers have already written count as free space, because the workers do not wait for
    each other. An object store always has room.
    """
    storage = checkpoints.storage
    if not storage.keeps_sets_locally:
        return
    staged = checkpoints.staged_name(manifest)
    free = free_bytes(storage.local / staged)
    if free < needed_bytes and free + sum(storage.list(staged).values()) < needed_bytes:
        raise CheckpointError(
            f"No space left on device: {checkpoints.address} ({size_text(needed_bytes)} needed, {size_text(free)} free)"
        )
