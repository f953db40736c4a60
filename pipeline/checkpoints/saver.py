"""Writing checkpoints while training goes on: one save in flight, committed by rank 0 when every file is whole.

A save, in order:
1. `Saver.begin`: every worker copies its fragments into host memory, the only part the training loop waits for, and
   rank 0 looks whether the disk has room: a save that cannot fit has failed before a byte of rank 0 is written;
2. a thread of each worker writes its file under `.tmp-<step>-<attempt>/` and fsyncs it; while the disk works, another
   takes the digests of the same memory;
3. the loop's per-step status tells every worker that all threads have ended (`Saver.written`);
4. `Saver.finish`: sizes and digests are gathered, and rank 0 alone commits: it checks that its attempt still owns the
   run and that it sees every worker's file, writes the manifest, fsyncs, renames the folder and fsyncs its parent;
5. rank 0 reports the checkpoint and deletes old ones.

In:  checkpoints/.tmp-0000001200-000007/rank-00000.safetensors …
Out: checkpoints/step-0000001200/rank-00000.safetensors … MANIFEST.json     (checkpoint.py reads them)

A save that fails costs that checkpoint, not the run; `max_failed_saves` in a row end the run.

Where the nodes share no folder, the thread of step 2 puts the file into an object store, and rank 0 commits there
(stored.py, `commit_in_store`).
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import CheckpointError, StorageError
from data.files import DISK_BLOCK, make_folder, refusal, sync, write_durably
from pipeline.checkpoints.checkpoint import prune
from pipeline.checkpoints.manifest import MANIFEST, FileRecord, Manifest, committed, digest, newest_attempt, seal
from pipeline.checkpoints.room import shortage
from pipeline.checkpoints.sight import WrittenFile, unseen_files
from pipeline.checkpoints.stored import StoredCheckpoints, newest_attempt_in
from pipeline.engine import Engine
from pipeline.monitoring.telemetry import Telemetry


@dataclass(frozen=True)
class Decision:
    """Holds what rank 0 has decided about a save; every worker is told."""

    manifest: Manifest | None  # None: nothing was committed, for the reason in `failure`
    failure: str = ""
    has_newer_owner: bool = False


class Saver:
    """Saves in the background, one save at a time.

    `begin` costs the loop a copy in host memory; `finish` commits what the threads of all workers have written.
    """

    def __init__(
        self,
        folder: Path,
        run: Path,
        telemetry: Telemetry,
        *,
        keep: int,
        keep_every: int,
        max_failed_saves: int,
        expected_bytes: int = 0,
        remote: StoredCheckpoints | None = None,
        needed: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.folder = folder  # of the stage's checkpoints
        self.remote = remote  # where they are committed instead, when the nodes share no folder
        self.run = run
        self.telemetry = telemetry
        self.keep = keep
        self.keep_every = keep_every
        self.max_failed_saves = max_failed_saves
        self.needed = needed  # steps whose checkpoints stay until they have been judged
        self.expected_bytes = expected_bytes  # of a checkpoint; from the first commit on, those of the last one

        self.last_committed: int | None = None  # step
        self.failures_in_a_row = 0
        self.failure = ""  # of the last save that failed
        self.stalled_s = 0.0  # that the loop has waited for saves since its last report

        self.thread: threading.Thread | None = None
        self.snapshot = torch.empty(0, dtype=torch.uint8)  # kept for the next save, which has the same size
        self.snapshot_s = 0.0  # that the loop waited for the snapshot in flight
        self.began = 0.0  # of the save in flight, on the monotonic clock
        make_folder(folder, run)

    @property
    def in_flight(self) -> bool:
        """Return whether a save has begun and is not committed yet."""
        return self.thread is not None

    @property
    def written(self) -> bool:
        """Return whether this worker's thread has ended, well or badly."""
        return self.thread is not None and not self.thread.is_alive()

    def begin(self, engine: Engine, manifest: Manifest) -> None:
        """Copy the state to host memory and start writing it; the caller has finished the save before."""
        assert not self.in_flight
        self.began = time.monotonic()
        self.manifest = manifest
        # The attempt is part of the name: a frozen owner that wakes up cannot write into the folder of its successor.
        self.temporary = self.folder / f".tmp-{manifest.step:010d}-{manifest.attempt:06d}"
        path = self.temporary / f"rank-{dist.get_rank():05d}.safetensors"
        content = self.take_snapshot(engine)
        # `write` puts its own result in place of this one. Where its thread dies of what it does not catch, this one
        # stays, and the save counts as failed.
        self.result = WrittenFile(path.name, error=f"{path.name}: the thread that writes it has died, see stderr")
        # A daemon, so that a worker that ends with an error does not stay until a slow disk has taken the file.
        self.thread = threading.Thread(target=self.write, args=(path, content), name="checkpoint", daemon=True)
        self.thread.start()
        self.snapshot_s = time.monotonic() - self.began
        self.stalled_s += self.snapshot_s

    def take_snapshot(self, engine: Engine) -> memoryview:
        """Copy this worker's fragments, once, into the kept host memory, which then is a safetensors file."""
        views: dict[str, Tensor] = {}
        for fragment in engine.fragments():
            for kind, view in fragment.tensors.items():
                views[f"{fragment.name}|{kind}|{fragment.start}"] = view
        # The header is made here, because safetensors' own writer would copy all of the state a second time.
        header, spans = safetensors_header(views)
        header_bytes = len(header)
        total_bytes = header_bytes + sum(view.nbytes for view in views.values())
        # The memory is kept from save to save; on a GPU it is pinned, so that the copy is not staged once more.
        if self.snapshot.numel() != total_bytes:
            self.snapshot = host_memory(total_bytes)
        self.snapshot[:header_bytes] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        data = self.snapshot[header_bytes:].view(torch.float32)
        for key, view in views.items():
            data[spans[key]].copy_(view.detach())
        return self.snapshot.numpy().data

    def write(self, path: Path, content: memoryview) -> None:
        """Do the thread's work: leave the record of the written file in `result`, or why there is none."""
        try:
            missing = self.missing_room()
            if missing:
                self.result = WrittenFile(path.name, error=f"{path.name}: {missing}")
            else:
                self.result = WrittenFile(path.name, self.write_and_digest(path, content))
        except OSError as error:
            self.result = WrittenFile(path.name, error=f"{path.name}: {refusal(error)}")
        except StorageError as error:
            self.result = WrittenFile(path.name, error=str(error))  # which names the object

    def missing_room(self) -> str:
        """Say what the disk lacks for this save; "" where it fits. Raises OSError where the disk does not tell."""
        # Rank 0 looks for all: one worker that fails is enough to fail the save. A store has room.
        if dist.get_rank() != 0 or self.remote is not None:
            return ""
        return shortage(self.temporary, self.expected_bytes)

    def write_and_digest(self, path: Path, content: memoryview) -> FileRecord:
        """Write this worker's file, or put it into the store, and take its digests meanwhile.

        Raises OSError or StorageError where it could not be written.
        """
        # Both read the same memory, which nobody changes until the next save, and do without Python's lock.
        with ThreadPoolExecutor(1, "digest") as beside:
            digesting = beside.submit(digest, content)
            if self.remote is None:
                # Whichever worker comes first makes the folder; rank 0 makes its name durable with the commit.
                path.parent.mkdir(exist_ok=True)
                write_durably(path, content)
            else:
                self.remote.put(path.name, content, self.manifest, is_first=dist.get_rank() == 0)
        return digesting.result()

    def finish(self) -> Manifest | None:
        """Collective: wait for every worker's file, commit, report and prune.

        Returns the manifest, or None on every worker where the save failed. Raises CheckpointError, on all workers
        alike, where a newer attempt owns the run and after `max_failed_saves` failures in a row.
        """
        assert self.thread is not None
        finish_began = time.monotonic()
        self.thread.join()
        self.thread = None
        results = [self.result] * dist.get_world_size()
        # Gathered in the loop's thread: a thread of its own inside a collective would wait for ever for a dead worker.
        dist.all_gather_object(results, self.result)
        decision = [Decision(None)]
        if dist.get_rank() == 0:
            self.telemetry.sync()  # a commit implies its metrics: the loop wrote them before this save began
            if self.remote is None:
                decision = [commit(self.folder, self.temporary, self.run, self.manifest, results, self.telemetry.say)]
            else:
                decision = [commit_in_store(self.remote, self.manifest, results)]
        dist.broadcast_object_list(decision, src=0)

        now = time.monotonic()
        took_s = now - self.began
        stalled_s = self.snapshot_s + now - finish_began
        # Every worker heard the same decision, so what is raised below is raised on all of them.
        self.failure = decision[0].failure
        if decision[0].has_newer_owner:
            raise CheckpointError(self.failure)
        if decision[0].manifest is None:
            self.count_failure(stalled_s, took_s)
        else:
            self.failures_in_a_row = 0
            self.last_committed = decision[0].manifest.step
            self.expected_bytes = bytes_of(decision[0].manifest)
            if dist.get_rank() == 0:
                self.report(decision[0].manifest, stalled_s, took_s)
                self.delete_old()
        self.stalled_s += time.monotonic() - finish_began
        return decision[0].manifest

    def report(self, manifest: Manifest, stalled_s: float, took_s: float) -> None:
        """Acknowledge a checkpoint: from here on the run may rely on it."""
        size = bytes_of(manifest)
        self.telemetry.report(
            "checkpoint",
            {
                "step": manifest.step,
                "stalled_s": stalled_s,
                "took_s": took_s,
                "bytes": size,
                "ledger": manifest.ledger,
            },
            f"checkpoint step {manifest.step} committed: {len(manifest.files)} files, {size / 1e6:.1f} MB, "
            f"loop stalled {stalled_s:.2f}s of {took_s:.2f}s, ledger {manifest.ledger[:12]}",
        )

    def count_failure(self, stalled_s: float, took_s: float) -> None:
        """Report a failed save; raise CheckpointError when too many have failed in a row."""
        # One failed save is no reason to stop: the weights are in memory, and the storage may have room again.
        step = self.manifest.step
        self.failures_in_a_row += 1
        self.telemetry.report(
            "checkpoint_failed",
            {"step": step, "stalled_s": stalled_s, "took_s": took_s, "error": self.failure},
            f"checkpoint step {step} FAILED ({self.failure}); training goes on from memory, the one "
            f"before it stays; {self.failures_in_a_row} of {self.max_failed_saves} failures in a row",
        )
        if self.failures_in_a_row >= self.max_failed_saves:
            raise CheckpointError(
                f"{self.failures_in_a_row} saves in a row failed, the last: {self.failure}\n"
                f"  expected: a disk that can be written, with room for keep={self.keep} checkpoints and one more\n"
                f"  make room under {self.folder}, or lower keep, then run the same command again"
            )

    def delete_old(self) -> None:
        """Delete old checkpoints; one that cannot be deleted costs room, not the run."""
        try:
            if self.remote is None:
                prune(self.folder, self.keep, self.keep_every, self.needed())
            else:
                self.remote.prune(self.keep, self.keep_every)
        except (OSError, StorageError) as error:
            self.telemetry.say(f"old checkpoints stay: {error}")

    def newest(self) -> Path:
        """Return the folder of the newest checkpoint, or of a copy of it; rank 0 alone."""
        if self.remote is None:
            return committed(self.folder)[0]
        return self.remote.fetch_newest().folder


def host_memory(size: int) -> Tensor:
    """Return so many bytes of host memory, pinned where there is a GPU, from which a disk can be written directly."""
    memory = torch.empty(size + DISK_BLOCK, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    first = -memory.data_ptr() % DISK_BLOCK
    return memory[first : first + size]


def bytes_of(manifest: Manifest) -> int:
    """Return the size of a checkpoint's files."""
    return sum(file["bytes"] for file in manifest.files.values())


def safetensors_header(views: dict[str, Tensor]) -> tuple[bytes, dict[str, slice]]:
    """Return the head of a safetensors file that holds these flat fp32 views one after the other.

    Returns it with where each view's elements lie in the data behind it. The format is 8 bytes of length, little
    endian, and so much JSON (https://huggingface.co/docs/safetensors).
    """
    described = {}
    spans = {}
    first_byte = 0
    for key, view in views.items():
        assert view.dtype == torch.float32 and view.dim() == 1, (key, view.dtype, view.shape)
        end_byte = first_byte + view.nbytes
        described[key] = {"dtype": "F32", "shape": [view.numel()], "data_offsets": [first_byte, end_byte]}
        spans[key] = slice(first_byte // 4, end_byte // 4)
        first_byte = end_byte
    text = json.dumps(described).encode()
    # Padded to 8 bytes, so that the data behind it can be viewed as fp32 in place.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans


def commit(
    folder: Path,
    temporary: Path,
    run: Path,
    manifest: Manifest,
    results: Sequence[WrittenFile],
    say: Callable[[str], None],
) -> Decision:
    """Make a whole checkpoint visible under its final name, if every file was written and the run is still ours.

    Runs on rank 0 alone. Where something fails before the renaming, the temporary folder is deleted.
    """
    try:
        # A driver that was frozen may wake up after another has taken the run over: it must not write any more.
        newest = newest_attempt(run)
        if newest > manifest.attempt:
            shutil.rmtree(temporary, ignore_errors=True)
            message = (
                f"step {manifest.step} is not committed: attempt {newest} owns {run} now, this is "
                f"attempt {manifest.attempt}\n  nothing of the newer attempt was touched; this process should end"
            )
            return Decision(None, message, has_newer_owner=True)

        # One worker's full disk makes the whole save fail: a checkpoint that lacks a file could not be loaded anywhere.
        errors = [result.error for result in results if result.error]
        if errors:
            shutil.rmtree(temporary, ignore_errors=True)
            return Decision(None, "; ".join(errors))

        # Whoever resumes reads all files in this one folder: what is not seen here would be missing then.
        unseen = unseen_files(temporary, results, say)
        if unseen:
            shutil.rmtree(temporary, ignore_errors=True)
            return Decision(None, unseen)

        # The manifest is written last of all files, and fsynced: where it is valid, what it names is on the disk.
        manifest = replace(manifest, files=records_of(results))
        write_durably(temporary / MANIFEST, seal(manifest).encode())
        sync(temporary)
        final = folder / f"step-{manifest.step:010d}"
        # A former owner of the run, unfrozen after our start, may have committed this step: both stay, and the later
        # attempt comes first in `checkpoint.committed`.
        if final.exists():
            final = final.with_name(f"{final.name}-{manifest.attempt:06d}")
        os.rename(temporary, final)  # refused by the kernel where another folder has come there meanwhile
        # A rename is durable only once the folder that holds the name is flushed.
        sync(folder)
    except OSError as error:
        # Said before the room is free again that the save has taken.
        failure = refusal(error)
        shutil.rmtree(temporary, ignore_errors=True)
        return Decision(None, failure)
    return Decision(manifest)


def commit_in_store(remote: StoredCheckpoints, manifest: Manifest, results: Sequence[WrittenFile]) -> Decision:
    """Do in an object store what `commit` does in a folder: the last put makes the checkpoint exist.

    Runs on rank 0 alone.
    """
    try:
        # For the message alone: what nobody can pass is that the manifest's name is taken (`StoredCheckpoints.sweep`).
        newest = newest_attempt_in(remote.store)
        if newest > manifest.attempt:
            return newer_owner(manifest, f"attempt {newest} owns {remote.store.address('')} now")
        errors = [result.error for result in results if result.error]
        if errors:
            remote.discard(manifest)
            return Decision(None, "; ".join(errors))
        manifest = replace(manifest, files=records_of(results))
        if not remote.commit(manifest):
            return newer_owner(manifest, "a newer attempt has taken its place")
    except CheckpointError as error:
        remote.discard(manifest)
        return Decision(None, str(error))
    except (OSError, StorageError) as error:
        # Nothing is deleted: the manifest may be there, and only the answer was lost.
        return Decision(None, str(error))
    return Decision(manifest)


def records_of(results: Sequence[WrittenFile]) -> dict[str, FileRecord]:
    """Return what a manifest says of the files that were written, by name."""
    records: dict[str, FileRecord] = {}
    for result in results:
        assert result.record is not None, "a save with an error is not committed"
        records[result.name] = result.record
    return records


def newer_owner(manifest: Manifest, reason: str) -> Decision:
    """Return the decision about a save of an attempt that does not own the run any more."""
    message = (
        f"step {manifest.step} is not committed: {reason}, this is attempt {manifest.attempt}\n"
        "  nothing of the newer attempt was touched; this process should end"
    )
    return Decision(None, message, has_newer_owner=True)
