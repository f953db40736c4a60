"""The checkpoints of one stage: which there are, how one is committed, refused, deleted. The rules stand here once.

They lie under `<stage>/checkpoints/` of the run's storage, each a set that appears at once (data/storage.py). A set
without a valid manifest is no checkpoint. On a disk:
    step-0000001200/           committed: a valid MANIFEST.json lies in it, written last
    .tmp-0000001250-000007/    a save in flight, or one that died; swept by the next attempt
    bad-0000001100-000007/     quarantined: a digest did not match; never loaded, never deleted by us

A commit is made by rank 0 alone, when all workers have written their files (`commit`, in numbered steps).

In:  .tmp-0000001200-000007/ with rank-00000.safetensors …, and what every worker says of its file
Out: step-0000001200/ with MANIFEST.json too; or nothing, and the reason in the decision that all workers are told

On a folder that is not shared every worker writes happily onto the disk of its own node, and only a look tells: before
a commit rank 0 looks for the files of all workers (`check_seen`), after a wait, because a network file system may be
some seconds late.

A start takes the newest checkpoint that is whole (`choose`); pipeline/checkpoints/restore.py loads it.
"""

import os
import shutil
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.errors import CheckpointError, RunOwned, StorageError
from data.files import MANIFEST, error_text, size_text, wait_until_seen, write_atomically
from data.storage import Folder, Storage
from pipeline.checkpoints.manifest import (
    ChunkedRecord,
    Manifest,
    NewerSchema,
    inspect_checkpoint,
    manifest_in,
    newest_attempt,
    sealed,
    sizes_in,
    step_of,
)

LEAST_KEPT = 2  # the newest may turn out to be damaged when it is read
SOON_S = 1.0  # a wait beyond it is logged

Log = Callable[[str], None]


@dataclass(frozen=True)
class WrittenFile:
    """Describes what one worker's thread has left: a file with its size and digests, or an error."""

    name: str
    record: ChunkedRecord | None = None  # None where there is an error
    error: str = ""
    node: str = field(default_factory=socket.gethostname)  # where it was written

    @property
    def bytes(self) -> int:
        """Return the size of the file; 0 where none was written."""
        return self.record["bytes"] if self.record else 0


@dataclass(frozen=True)
class Decision:
    """Holds what rank 0 has decided about a save; every worker is told."""

    manifest: Manifest | None  # None: nothing was committed, for the reason in `failure`
    failure: str = ""
    has_newer_owner: bool = False


class Chosen(NamedTuple):
    """Holds the checkpoint that an attempt goes on from."""

    name: str
    folder: Path  # of its files, on every node
    manifest: Manifest


class StageCheckpoints:
    """Commits, finds, refuses and deletes the checkpoints of one stage, whatever storage the run has.

    `sends_metrics`: the metrics.jsonl of this node is the stage's, and a commit sends it where others see it.
    """

    def __init__(
        self, storage: Storage, stage: str, folder: str = "checkpoints", *, sends_metrics: bool = False
    ) -> None:
        self.storage = storage
        self.stage = stage
        self.sends_metrics = sends_metrics
        self.folder = f"{stage}/{folder}"  # in the storage
        self.address = storage.address(self.folder)  # where the checkpoints are, for people
        self.local = storage.local / stage / folder  # on this node
        self.refused = 0  # by this start

    # ------------------------------------------------------------------------ which there are

    def committed(self) -> Sequence[str]:
        """List the checkpoints, newest step first, and of one step the later attempt first."""
        return self.storage.published(self.folder)

    def committed_steps(self) -> list[int]:
        """Return the steps of the checkpoints, newest first, by their names alone."""
        return [step_of(Path(name)) for name in self.committed()]

    def manifest(self, name: str) -> Manifest:
        """Read what a checkpoint says about itself, as `read_manifest` does."""
        return manifest_in(self.storage, f"{self.folder}/{name}")

    def fetch(self, name: str) -> Path:
        """Return a folder on this node with a checkpoint's files; what was copied there was compared.

        Raises CheckpointError where it is bad in the storage, StorageError, OSError.
        """
        from pipeline.checkpoints.reader import verify  # not above: a recipe is checked without torch

        return self.storage.fetch_set(self.folder, name, verify)

    def verify(self, name: str) -> Path:
        """Read every byte of a checkpoint in the storage; returns a folder with its files. Raises as `fetch` does."""
        from pipeline.checkpoints.reader import verify

        return self.storage.fetch_set(self.folder, name, verify, anew=True)

    # ------------------------------------------------------------------------ a commit

    def staged_name(self, manifest: Manifest) -> str:
        """Return where the files of a save are written, by its name in the storage."""
        return self.storage.staging_name(self.folder, manifest.name, manifest.attempt)

    def commit(self, manifest: Manifest, results: Sequence[WrittenFile], log: Log) -> Decision:
        """Make a checkpoint of a save, if every file was written and the run is still ours. Runs on rank 0 alone.

        Where something fails the staged files are deleted: what is reported as failed is not there.
        """
        newer_owner = ""
        try:
            # 1. Every worker has written its file. One full disk makes the whole save fail: a checkpoint that lacks a
            #    file could not be loaded anywhere. And a store that has not taken a file in all its attempts is asked
            #    nothing else with such patience, for which a run that was told to stop would wait.
            errors: list[str] = []
            files: dict[str, ChunkedRecord] = {}
            for result in results:
                if result.record is not None:
                    files[result.name] = result.record
                else:
                    errors.append(result.error)
            if errors:
                raise CheckpointError("; ".join(errors))

            # 2. The run is ours. A driver that was frozen may wake up after another has taken the run over: it must not
            #    write any more.
            newest = newest_attempt(self.storage)
            if newest > manifest.attempt:
                newer_owner = f"attempt {newest} owns {self.storage.address()} now"
            else:
                # 3. Rank 0 sees all files, whole: a start reads them all in this place, and would miss them then.
                check_seen(self.storage, self.staged_name(manifest), results, log)

                # 4. The manifest names them with their digests, and makes the checkpoint exist.
                manifest = replace(manifest, files=files)
                if self.storage.publish(self.folder, manifest.name, manifest.attempt, sealed(manifest)):
                    return Decision(manifest)
                newer_owner = "a newer attempt has taken its place"
            failure = (
                f"step {manifest.step} is not committed: {newer_owner}, this is attempt {manifest.attempt}\n"
                "  nothing of the newer attempt was touched; this process should end"
            )
        except StorageError as error:
            # Nothing is deleted: the checkpoint may be there, and only the answer was lost.
            return Decision(None, str(error))
        except OSError as error:
            # Put into words before the disk space is free again that the save has taken.
            failure = error_text(error)
        except CheckpointError as error:
            failure = str(error)

        # What was staged goes, and nothing else.
        self.storage.discard(self.folder, manifest.name, manifest.attempt)
        return Decision(None, failure, has_newer_owner=newer_owner != "")

    def prune(self, keep: int, keep_every: int, needed: Collection[int] = ()) -> list[str]:
        """Delete old checkpoints: the newest `keep` (2 at least), multiples of `keep_every` and steps `needed` stay.

        Returns their names. Raises OSError or StorageError where one cannot be deleted, and nothing is half deleted
        under a valid name then; or OSError in the end, where something is left of one that is none any more.
        """
        removed = []
        left = []
        for name in self.committed()[max(keep, LEAST_KEPT) :]:
            step = step_of(Path(name))
            is_milestone = keep_every > 0 and step % keep_every == 0
            if is_milestone or step in needed:
                continue
            rest = self.storage.delete_set(self.folder, name)
            if rest is not None:
                left.append(str(rest))
            removed.append(name)
        if left:
            raise OSError(f"{', '.join(left)}: could not be deleted whole, the next start tries again")
        return removed

    def adopt(self, source: Path, key: str | None = None) -> None:
        """Make a checkpoint of another folder of this disk one of these, whole or not at all; of the stage `key`.

        Its files have two names from then on: nobody writes into them. Raises CheckpointError, OSError.
        """
        manifest = inspect_checkpoint(Folder(source.parent), source.name)
        staged = self.local / f".tmp-{source.name}-linked"
        try:
            shutil.copytree(source, staged, copy_function=os.link)
        except OSError:  # another disk, one that knows no second names, or what a killed start has left
            shutil.rmtree(staged, ignore_errors=True)
            shutil.copytree(source, staged)
        if key is not None:
            # Written beside the old one, and renamed: the other folder keeps its own.
            write_atomically(staged / MANIFEST, sealed(replace(manifest, key=key)))
        staged.rename(self.local / source.name)

    # ------------------------------------------------------------------------ a start

    def choose(self, attempt: int, log: Log) -> tuple[str, Manifest] | None:
        """Return the newest checkpoint that is there with all its files; bad ones are refused. Rank 0 alone.

        None where nothing was ever committed. Leftovers of saves that never committed are swept first: what is swept
        cannot be committed any more. Raises RunOwned where a newer attempt owns the run, CheckpointError where a
        checkpoint is of a newer schema, and where all are bad: to start from nothing again is a person's decision.
        Raises OSError, StorageError where the storage fails, which says nothing about a checkpoint.
        """
        newest = newest_attempt(self.storage)
        if newest > attempt:
            raise RunOwned(
                f"attempt {newest} owns {self.storage.address()} now, this is attempt {attempt}\n"
                "  nothing of the newer attempt was touched; this process should end"
            )
        self.storage.sweep(self.folder, attempt)
        for name in self.committed():
            try:
                return name, inspect_checkpoint(self.storage, f"{self.folder}/{name}")
            except NewerSchema:
                raise
            except CheckpointError as error:
                self.refuse(name, attempt, str(error), log)
        if self.refused:
            raise CheckpointError(
                f"none of {self.refused} checkpoints in {self.address} is whole; they are kept "
                f"{self.storage.set_aside_as}\n"
                f"  {self.storage.restore_hint}, or run the same command again to start from step 0"
            )
        return None

    def refuse(self, name: str, attempt: int, problem: str, log: Log) -> None:
        """Quarantine a checkpoint: a person may still want to read it, and no later attempt tries it again."""
        kept = self.storage.set_aside(self.folder, name, attempt, problem)
        self.refused += 1
        log(f"checkpoint refused: {problem}; {kept}, trying the one before it")


def checkpoints_in(folder: Path) -> StageCheckpoints:
    """Return the checkpoints that lie in a folder of a disk, <run>/<stage>/checkpoints or a copy of it."""
    return StageCheckpoints(Folder(folder.parents[1]), folder.parent.name, folder.name)


# ------------------------------------------------------------------------ is it the same storage for all?


def check_seen(storage: Storage, staged: str, written: Sequence[WrittenFile], log: Callable[[str], None]) -> None:
    """Raise CheckpointError unless rank 0 sees the files of all workers in a staged set, whole.

    It names the workers whose files are not seen, by rank. Raises StorageError, OSError where the storage fails.
    """
    expected = {file.name: file.bytes for file in written}
    # What rank 0 has written itself it sees at once: where that is gone, another start has swept the folder.
    is_patient = not storage.is_consistent and written[0].name in sizes_in(storage, staged)
    sizes = partial(sizes_in, storage, staged)
    unseen, waited_s = wait_until_seen(sizes, expected, is_patient=is_patient)
    address = storage.address(staged)
    if not unseen:
        if waited_s > SOON_S:
            log(f"rank 0 saw the files of all workers in {address} only after {waited_s:.1f} s")
        return

    ranks = [rank for rank, file in enumerate(written) if file.name in unseen]
    first = written[ranks[0]]
    bytes_seen = unseen[first.name]
    seen = "no such file" if bytes_seen is None else f"{bytes_seen:,} bytes"
    others = ""
    if len(ranks) > 1:
        others = f", nor the files of {len(ranks) - 1} more workers ({', '.join(map(str, ranks[1:9]))} …)"
    raise CheckpointError(
        f"worker {ranks[0]} on {first.node} has written {address}/{first.name} ({size_text(first.bytes)}), rank 0 on "
        f"{socket.gethostname()} sees {seen} there after {waited_s:.0f} s{others}; "
        f"{address.rpartition('/')[0]} must be the same storage on all nodes"
    )
