"""Writing checkpoints while training goes on: one save in flight, committed by rank 0 when every file is whole.

A save, in order:
1. `Saver.begin`: every worker copies its fragments into host memory, for which the training loop waits, and starts a
   thread;
2. the thread of rank 0 fsyncs the metrics and looks whether the disk has room: a save that cannot fit has failed before
   a byte of rank 0 is written. Each thread writes its worker's file under `.tmp-<step>-<attempt>/` and fsyncs it; while
   the disk works, another takes the digests of the same memory;
3. the loop's per-step status tells every worker that all threads have ended (`Saver.written`);
4. `Saver.finish`: sizes and digests are gathered, and rank 0 alone commits: it checks that its attempt still owns the
   run and that it sees every worker's file, writes the manifest, fsyncs, renames the folder and fsyncs its parent;
5. rank 0 reports the checkpoint, and a thread of its own deletes old ones while training goes on. Where the disk has
   no room for one more beside them, the others hear of the commit only when they are gone.

In:  checkpoints/.tmp-0000001200-000007/rank-00000.safetensors …
Out: checkpoints/step-0000001200/rank-00000.safetensors … MANIFEST.json     (reader.py reads them)

A save that fails costs that checkpoint, not the run; `max_failed_saves` in a row end the run.

Whether the disk has room is looked at before each save (`check_room`), and before a run (`check_disk_space`): 5,000
parameters under Adam with keep 3 and 99.9 kB free are refused,
    276.4 kB needed under /runs/x/pretrain-…/checkpoints (4 checkpoints of 64.1 kB, …), 99.9 kB free

Step 4 itself is in stage_checkpoints.py. Where the nodes share no folder, the thread of step 2 puts the
file into an object store, and rank 0 commits there: all of that is in data/storage.py.
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
from pipeline.checkpoints.stage_checkpoints import LEAST_KEPT, Chosen, Decision, StageCheckpoints, WrittenFile
from pipeline.monitoring.telemetry import Telemetry
from pipeline.monitoring.watchdog import Phases
from pipeline.optimization import STATE
from pipeline.training_config import SavingConfig, TrainConfig
from pipeline.training_data import BYTES_FP32
from pipeline.values import amount

METRICS = "metrics.jsonl"
HEADER_BYTES = 4096  # of a worker's file and of the manifest, roughly
DELETING_S = 60.0  # the longest wait for a deletion: a storage that hangs in one must not hold up the run


class Saver:
    """Saves in the background, one save at a time.

    `begin` costs the loop a copy in host memory; `finish` commits what the threads of all workers have written;
    `end` waits for what is deleted.
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
        self.saves_evaluated = saves_evaluated  # each evaluated step becomes a checkpoint
        # Each returns steps whose checkpoints stay for now: until they have been evaluated, or as the best.
        self.needed: list[Callable[[], Collection[int]]] = []
        self.expected_bytes = expected_bytes  # of a checkpoint; from the first commit on, those of the last one

        self.last_committed: int | None = None  # step
        self.failures_in_a_row = 0
        self.failure = ""  # of the last save that failed
        self.stalled_s = 0.0  # that the loop has waited for saves since its last report

        self.thread: threading.Thread | None = None  # writes this worker's file
        self.deleting: threading.Thread | None = None  # deletes old checkpoints; on rank 0 alone
        self.snapshot = torch.empty(0, dtype=torch.uint8)  # kept for the next save, which has the same size
        self.snapshot_s = 0.0  # that the loop waited for the snapshot in flight
        self.began = 0.0  # of the save in flight, on the monotonic clock
        make_folder(checkpoints.local, checkpoints.storage.local)

    @property
    def in_flight(self) -> bool:
        """Return whether a save has begun and is not committed yet."""
        return self.thread is not None

    @property
    def written(self) -> bool:
        """Return whether this worker's thread has ended, well or badly."""
        return self.thread is not None and not self.thread.is_alive()

    def is_due(self, step: int, *, is_evaluated: bool, is_finite: bool) -> bool:
        """Return whether to save this step, which is evaluated or not, and whose gradient was finite or not."""
        is_planned = step % self.saving.save_every == 0 or (is_evaluated and self.saves_evaluated)
        # A commit amid non-finite steps would pass for progress since the last time that the run went back.
        return is_planned and is_finite

    def ensure_committed(self, step: int, begin: Callable[[], None], *, retries: bool = False) -> bool:
        """Collective: commit this step unless it is; return whether that has succeeded.

        `begin` begins a save of this step, if none has been tried; with `retries` until one succeeds. Raises as
        `finish`.
        """
        was_tried = self.in_flight and self.manifest.step == step
        self.finish(step)
        while self.last_committed != step and (retries or not was_tried):
            begin()
            self.finish(step)
            was_tried = True
        return self.last_committed == step

    def begin(self, fragments: Iterable[tuple[str, int, Mapping[str, Tensor]]], manifest: Manifest) -> None:
        """Copy this worker's fragments to host memory and start writing them; the caller has finished the save before.

        A fragment is (parameter, its first element here, flat fp32 views by kind: "master", "exp_avg", …).
        """
        assert not self.in_flight
        self.phases.enter("save", manifest.step)
        self.began = time.monotonic()
        self.manifest = manifest
        file = f"rank-{dist.get_rank():05d}.safetensors"
        self.snapshot = copy_to_host(fragments, self.snapshot)
        # `write` puts its own result in place of this one. Where its thread dies of what it does not catch, this one
        # stays, and the save counts as failed.
        self.result = WrittenFile(file, error=f"{file}: the thread that writes it has died, see stderr")
        # A daemon, so that a worker that ends with an error does not stay until a slow disk has taken the file.
        arguments = (file, self.snapshot.numpy().data)
        self.thread = threading.Thread(target=self.write, args=arguments, name="checkpoint", daemon=True)
        self.thread.start()
        self.snapshot_s = time.monotonic() - self.began
        self.stalled_s += self.snapshot_s

    def write(self, file: str, content: memoryview) -> None:
        """Do the thread's work: leave the record of the written file in `result`, or why there is none."""
        is_rank_0 = dist.get_rank() == 0
        storage = self.checkpoints.storage
        try:
            # 1. Rank 0 prepares for all. A commit implies its metrics, which the loop wrote before this save began. And
            #    one worker that fails is enough to fail the save, so that one alone looks whether there is room.
            if is_rank_0:
                self.telemetry.sync()
                try:
                    check_room(self.checkpoints, self.manifest, self.expected_bytes)
                except CheckpointError:
                    # What is on its way out is no room yet.
                    self.wait_for_deleting()
                    check_room(self.checkpoints, self.manifest, self.expected_bytes)

            # 2. Write and digest at once. Both read the same memory, which does not change until the next save, and do
            #    without Python's lock.
            with ThreadPoolExecutor(1, "digest") as beside:
                digesting = beside.submit(digest, content)
                storage.write(f"{self.checkpoints.staged_name(self.manifest)}/{file}", content)
            record = digesting.result()

            # 3. Where other nodes do not see this disk, the metrics go where they see them. Not those of a former owner
            #    that was frozen, whose lines would take the place of newer ones.
            if is_rank_0 and self.checkpoints.sends_metrics and newest_attempt(storage) <= self.manifest.attempt:
                storage.upload(f"{self.checkpoints.stage}/{METRICS}")
            self.result = WrittenFile(file, record)
        except CheckpointError as error:
            self.result = WrittenFile(file, error=f"{file}: {error}")
        except OSError as error:
            self.result = WrittenFile(file, error=f"{file}: {error_text(error)}")
        except StorageError as error:
            self.result = WrittenFile(file, error=str(error))  # which names the object

    def finish(self, step: int) -> Manifest | None:
        """Collective: commit the save in flight, if there is one: wait for all files, commit, report and prune.

        The loop is at this step. Returns the manifest, or None on every worker if the save failed. Raises, on all
        workers alike, RunOwned if a newer attempt owns the run, CheckpointError after `max_failed_saves` failures in a
        row.
        """
        if self.thread is None:
            return None
        # 1. Every worker's file is written. The results are gathered in the loop's thread: a thread of its own inside a
        #    collective would wait for ever for a dead worker.
        self.phases.enter("save", step)
        finish_began = time.monotonic()
        self.thread.join()
        self.thread = None
        results = [self.result] * dist.get_world_size()
        dist.all_gather_object(results, self.result)

        # 2. Rank 0 alone commits.
        decision = Decision(None)
        if dist.get_rank() == 0:
            decision = self.checkpoints.commit(self.manifest, results, self.telemetry.log)
        now = time.monotonic()
        took_s = now - self.began
        stalled_s = self.snapshot_s + now - finish_began

        # 3. Rank 0 acknowledges the checkpoint: from here on the run may rely on it. Then the old ones may go.
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
            # Deleting may take a third of the time that it took to write them, so a thread does it. A daemon: a storage
            # that hangs in a deletion must not keep a worker from ending.
            before = (self.deleting,)
            self.deleting = threading.Thread(target=self.delete_old, args=before, name="old checkpoints", daemon=True)
            self.deleting.start()
            # The others begin the next save as soon as they hear of this one, and do not look for room: where it has
            # none beside the old checkpoints, or the disk does not tell, they hear later.
            try:
                check_room(self.checkpoints, saved, saved.total_bytes)
            except (CheckpointError, OSError):
                self.wait_for_deleting()

        # 4. Every worker hears the same decision, so what is raised below is raised on all of them.
        decisions = [decision]
        dist.broadcast_object_list(decisions, src=0)
        committed = decisions[0].manifest
        self.failure = decisions[0].failure
        if decisions[0].has_newer_owner:
            raise RunOwned(self.failure)

        # 5. A save that failed is counted. It is no reason to stop: the weights are in memory, and the storage may have
        #    room again. Too many in a row are one.
        if committed is None:
            self.failures_in_a_row += 1
            failed_step = self.manifest.step
            self.telemetry.report(
                "checkpoint_failed",
                {"step": failed_step, "stalled_s": stalled_s, "took_s": took_s, "error": self.failure},
                f"checkpoint step {failed_step} FAILED ({self.failure}); the weights are still in memory, the one "
                f"before it stays; {self.failures_in_a_row} of {self.saving.max_failed_saves} failures in a row",
            )
            if self.failures_in_a_row >= self.saving.max_failed_saves:
                raise CheckpointError(
                    f"{self.failures_in_a_row} saves in a row failed, the last: {self.failure}\n"
                    "  expected: a disk that can be written, with room for "
                    f"keep={self.saving.keep} checkpoints and one more\n"
                    f"  make room under {self.checkpoints.address}, or lower keep, then run the same command again"
                )
        else:
            self.failures_in_a_row = 0
            self.last_committed = committed.step
            self.expected_bytes = committed.total_bytes
        self.stalled_s += time.monotonic() - finish_began
        return committed

    def end(self, step: int) -> None:
        """Collective: wait until rank 0 has deleted what the commits have made superfluous.

        Where one worker ends, the others are killed a moment later: no old checkpoint is left half deleted by that.
        """
        with self.phases.rank_0_phase("save", step, dist.get_rank() == 0):
            self.wait_for_deleting()
        dist.barrier()

    def wait_for_deleting(self) -> None:
        """Wait until the old checkpoints are gone that a commit has made superfluous, or say that they are not yet."""
        if self.deleting is None:
            return
        self.deleting.join(DELETING_S)
        if self.deleting.is_alive():
            self.telemetry.log(
                f"old checkpoints are still being deleted under {self.checkpoints.address} after {DELETING_S:.0f} s; "
                "the run goes on, and does not have their room yet"
            )

    def delete_old(self, before: threading.Thread | None) -> None:
        """Delete old checkpoints, after the deletion before; one that cannot be deleted costs room, not the run."""
        try:
            if before is not None:
                before.join()
            steps = {step for needed in self.needed for step in needed()}
            self.checkpoints.prune(self.saving.keep, self.saving.keep_every, steps)
        except (OSError, StorageError) as error:
            self.telemetry.log(f"old checkpoints stay: {error}")
        except Exception as error:  # a thread has no caller that would hear of it
            self.telemetry.log(f"old checkpoints stay: {type(error).__name__}: {error}")

    def checkpoint_of(self, step: int) -> Chosen:
        """Return a committed step, its files on this node; rank 0 alone. Raises CheckpointError, StorageError."""
        # Of one step the later attempt comes first.
        name = next(name for name in self.checkpoints.committed() if step_of(Path(name)) == step)
        return Chosen(name, self.checkpoints.fetch(name), self.checkpoints.manifest(name))


def copy_to_host(fragments: Iterable[tuple[str, int, Mapping[str, Tensor]]], memory: Tensor) -> Tensor:
    """Copy this worker's fragments into host memory that is kept from save to save, and return it: bytes (n,), uint8.

    The bytes are those of a safetensors file with an entry "name|kind|first element" for each view. A fragment is as in
    `Saver.begin`. Where the memory has another size than the file will have, new memory is returned.
    """
    # 1. The header: 8 bytes of length, little endian, and so much JSON (https://huggingface.co/docs/safetensors). It is
    #    made here, because safetensors' own writer would copy all of the state a second time.
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
    # Padded to 8 bytes, so that the data behind it can be viewed as fp32 in place.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text

    # 2. The data: all views, one behind the other.
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
    """Return so many bytes of host memory, pinned where there is a GPU, from which a disk can be written directly."""
    # The copy from a GPU would be staged once more in memory that is not pinned.
    memory = torch.empty(size + DISK_BLOCK, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    first = -memory.data_ptr() % DISK_BLOCK
    return memory[first : first + size]


# ------------------------------------------------------------------------ room on the disk


def checkpoint_bytes(cfg: TrainConfig, model: ModelConfig) -> int:
    """Return the size of a checkpoint, all workers' files together: fp32 masters, moments and average."""
    copies = 1 + len(STATE[cfg.optim.name])
    if cfg.polyak:
        copies += 1
    return models.parameters_of(model) * BYTES_FP32 * copies + HEADER_BYTES


def check_disk_space(cfg: TrainConfig, model: ModelConfig, checkpoints: StageCheckpoints) -> None:
    """Raise CheckpointError where a stage's checkpoints and weights will not fit on this node's disk."""
    needed, parts = bytes_to_come(cfg, model, checkpoints)
    free = free_bytes(checkpoints.local)
    if free < needed:
        raise CheckpointError(
            f"{size_text(needed)} needed under {checkpoints.local} ({parts}), {size_text(free)} free\n"
            f"  expected: room for keep={cfg.keep} checkpoints, for one more while it is written, and for the weights\n"
            "  make room there, lower keep, or give the run another disk: run=/elsewhere"
        )


def bytes_to_come(cfg: TrainConfig, model: ModelConfig, checkpoints: StageCheckpoints) -> tuple[int, str]:
    """Return the bytes that a stage will still need for checkpoints and weights, and of what they are, in words.

    At its fullest the disk holds one checkpoint more than are kept there: the oldest goes only when the newest is
    whole. What the next start sweeps away before its first save is room already.
    """
    kept = max(cfg.keep, LEAST_KEPT) if checkpoints.storage.keeps_sets_locally else 1
    # On this disk alone: what lies in an object store needs no room here.
    kept += cfg.exempt_checkpoints
    existing = Folder(checkpoints.local).published("")
    to_come = kept + 1 - min(len(existing), kept)
    # A short stage makes fewer.
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
            # A run that goes on meanwhile may delete it.
            with suppress(FileNotFoundError):
                if path.is_file():
                    swept += path.stat().st_size
    if swept:
        parts += f", less {size_text(swept)} of .tmp-* there, which the start deletes"
    return max(to_come * one_checkpoint + weights - swept, 0), parts


def check_room(checkpoints: StageCheckpoints, manifest: Manifest, needed_bytes: int) -> None:
    """Raise CheckpointError where the disk has no room for a save of so many bytes, OSError where it does not tell.

    What the workers have written already counts as room: they do not wait for each other. A store has room for all.
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
