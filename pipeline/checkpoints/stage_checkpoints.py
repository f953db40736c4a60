"""Lists, commits, quarantines and deletes the checkpoints of one stage, in any kind of storage.

They are in `<stage>/checkpoints/` in the run's storage, each a set of files that appears atomically (data/storage.py).
A set without a valid manifest is not a checkpoint. On a disk:
    step-0000001200/           committed: contains a valid MANIFEST.json, written last
    .tmp-0000001250-000007/    a save in flight, or an interrupted save; deleted by the next attempt
    bad-0000001100-000007/     quarantined after a digest mismatch; never loaded, never deleted automatically

Only rank 0 commits, after all workers have written their files (the numbered steps in `commit`).

In:  .tmp-0000001200-000007/ with rank-00000.safetensors …, and each worker's report about its file
Out: step-0000001200/, now with MANIFEST.json; or nothing, and the reason in the decision that all workers receive

If the folder is not shared, every worker writes to the disk of its own node without an error. Before a commit, rank 0
therefore checks that it sees the files of all workers (`check_seen`), and waits if necessary, because a network file
system may lag by some seconds.

A new attempt uses the newest complete checkpoint (`choose`); pipeline/checkpoints/restore.py loads it.
"""

import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.errors import CheckpointError, RunOwned, StorageError
from data.files import error_text, size_text, wait_until_seen
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

MIN_KEPT = 2  # because the newest may turn out to be damaged when it is read
SOON_S = 1.0  # a longer wait is logged

Log = Callable[[str], None]


@dataclass(frozen=True)
class WrittenFile:
    """The result of one worker's write: the file name with its size and digests, or an error."""

    name: str
    record: ChunkedRecord | None = None  # None if there was an error
    error: str = ""
    node: str = field(default_factory=socket.gethostname)  # the node that wrote it

    @property
    def bytes(self) -> int:
        """Return the size of the file; 0 if no file was written."""
        return self.record["bytes"] if self.record else 0


@dataclass(frozen=True)
class Decision:
    """Rank 0's decision about a save, sent to every worker."""

    manifest: Manifest | None  # None: not committed, for the reason in `failure`
    failure: str = ""
    has_newer_owner: bool = False


class Chosen(NamedTuple):
    """The checkpoint that an attempt resumes from."""

    name: str
    folder: Path  # on every node: its files
    manifest: Manifest


class StageCheckpoints:
    """Commits, lists, quarantines and deletes the checkpoints of one stage, in any storage.

    `sends_metrics`: this node holds the stage's complete metrics.jsonl, and each commit uploads it to remote storage.
    """

    def __init__(
        self, storage: Storage, stage: str, folder: str = "checkpoints", *, sends_metrics: bool = False
    ) -> None:
        self.storage = storage
        self.stage = stage
        self.sends_metrics = sends_metrics
        self.folder = f"{stage}/{folder}"  # path in the storage
        self.address = storage.address(self.folder)  # used in messages
        self.local = storage.local / stage / folder  # path on this node
        self.refused = 0  # checkpoints quarantined during this start

    # ------------------------------------------------------------------------ listing and reading

    def committed(self) -> Sequence[str]:
        """List the names of the checkpoints, newest step first; for equal steps, the later attempt comes first."""
        return self.storage.published(self.folder)

    def committed_steps(self) -> list[int]:
        """Return the steps of the checkpoints, newest first; only the checkpoints' names are read."""
        return [step_of(Path(name)) for name in self.committed()]

    def manifest(self, name: str) -> Manifest:
        """Read the manifest of a checkpoint. Raises the same errors as `read_manifest`."""
        return manifest_in(self.storage, f"{self.folder}/{name}")

    def fetch(self, name: str) -> Path:
        """Return a folder on this node that contains a checkpoint's files, downloaded and verified if necessary.

        Raises CheckpointError if the checkpoint is damaged in the storage, or StorageError or OSError if the storage
        fails.
        """
        from pipeline.checkpoints.reader import verify  # imported here, because recipes are checked without torch

        return self.storage.fetch_set(self.folder, name, verify)

    def verify(self, name: str) -> Path:
        """Verify every byte of a checkpoint in the storage, and return a folder with its files.

        Raises the same errors as `fetch`.
        """
        from pipeline.checkpoints.reader import verify

        return self.storage.fetch_set(self.folder, name, verify, recheck=True)

    # ------------------------------------------------------------------------ committing

    def staged_name(self, manifest: Manifest) -> str:
        """Return the name of the storage folder that a save is written to before it is committed."""
        return self.storage.staging_name(self.folder, manifest.name, manifest.attempt)

    def commit(self, manifest: Manifest, results: Sequence[WrittenFile], log: Log) -> Decision:
        """Commit a save as a checkpoint if every file was written and this attempt still owns the run; rank 0 only.

        After a failure, the staged files are deleted, so a save reported as failed leaves no files on disk.
        """
        newer_owner = ""
        try:
            # 1. Every worker has written its file. A single full disk fails the whole save, because a checkpoint with a
            #    missing file could not be loaded. This check comes first: if a store has already refused a file,
            #    retries of the next requests would delay a requested stop.
            errors: list[str] = []
            files: dict[str, ChunkedRecord] = {}
            for result in results:
                if result.record is not None:
                    files[result.name] = result.record
                else:
                    errors.append(result.error)
            if errors:
                raise CheckpointError("; ".join(errors))

            # 2. This attempt still owns the run. A frozen driver may wake up after another one has taken over the run:
            #    it must not write anything.
            newest = newest_attempt(self.storage)
            if newest > manifest.attempt:
                newer_owner = f"attempt {newest} now owns {self.storage.address()}"
            else:
                # 3. Rank 0 sees all files with their sizes: the next start must find all of them in this place.
                check_seen(self.storage, self.staged_name(manifest), results, log)

                # 4. The manifest lists the files with their digests; writing it makes the checkpoint exist.
                manifest = replace(manifest, files=files)
                if self.storage.publish(self.folder, manifest.name, manifest.attempt, sealed(manifest)):
                    return Decision(manifest)
                newer_owner = "a newer attempt has replaced it"
            failure = (
                f"step {manifest.step} is not committed: {newer_owner}; this process is attempt {manifest.attempt}\n"
                "  the newer attempt's files are unchanged; this process should exit"
            )
        except StorageError as error:
            # Nothing is deleted: the commit may have succeeded and only the response was lost.
            return Decision(None, str(error))
        except OSError as error:
            # The message is composed before the save's disk space is freed.
            failure = error_text(error)
        except CheckpointError as error:
            failure = str(error)

        # Delete only what was staged.
        self.storage.discard(self.folder, manifest.name, manifest.attempt)
        return Decision(None, failure, has_newer_owner=newer_owner != "")

    def prune(self, keep: int, keep_every: int, needed: Collection[int] = ()) -> list[str]:
        """Delete all checkpoints except the newest `keep` (at least 2), multiples of `keep_every`, and `needed` steps.

        Returns the deleted names. Raises OSError or StorageError if a checkpoint cannot be deleted; it stays valid.
        Raises OSError at the end if files of a deleted checkpoint remain.
        """
        removed = []
        leftovers = []
        for name in self.committed()[max(keep, MIN_KEPT) :]:
            step = step_of(Path(name))
            is_milestone = keep_every > 0 and step % keep_every == 0
            if is_milestone or step in needed:
                continue
            leftover = self.storage.delete_set(self.folder, name)
            if leftover is not None:
                leftovers.append(str(leftover))
            removed.append(name)
        if leftovers:
            raise OSError(f"could not delete all files of {', '.join(leftovers)}; the next start will try again")
        return removed

    # ------------------------------------------------------------------------ starting

    def choose(self, attempt: int, log: Log) -> tuple[str, Manifest] | None:
        """Return the newest complete checkpoint, and quarantine damaged ones; rank 0 only.

        Returns None if no checkpoint was ever committed. Leftover files of uncommitted saves are deleted first, so that
        they can no longer be committed. Raises RunOwned if a newer attempt owns the run. Raises CheckpointError if a
        checkpoint has a newer schema, or if all are damaged, because only a person should decide to start again from
        step 0. Raises OSError or StorageError if the storage fails; checkpoints may then be intact.
        """
        newest = newest_attempt(self.storage)
        if newest > attempt:
            raise RunOwned(
                f"attempt {newest} now owns {self.storage.address()}; this process is attempt {attempt}\n"
                "  the newer attempt's files are unchanged; this process should exit"
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
                f"all {self.refused} checkpoints in {self.address} are damaged; they are kept "
                f"{self.storage.set_aside_as}\n"
                f"  {self.storage.restore_hint}, or run the same command again to start from step 0"
            )
        return None

    def refuse(self, name: str, attempt: int, problem: str, log: Log) -> None:
        """Quarantine a damaged checkpoint: later attempts ignore it, but it remains available for inspection."""
        place = self.storage.set_aside(self.folder, name, attempt, problem)
        self.refused += 1
        log(f"checkpoint refused: {problem}; {place}; trying the previous checkpoint")


def checkpoints_in(folder: Path) -> StageCheckpoints:
    """Return the checkpoints in a local folder: <run>/<stage>/checkpoints, or a copy of it."""
    return StageCheckpoints(Folder(folder.parents[1]), folder.parent.name, folder.name)


# ------------------------------------------------------------------------ visibility of files


def check_seen(storage: Storage, staged: str, written: Sequence[WrittenFile], log: Callable[[str], None]) -> None:
    """Raise CheckpointError unless rank 0 sees the complete files of all workers in the staged checkpoint.

    The error names the workers whose files are not visible. Raises StorageError or OSError if the storage fails.
    """
    expected = {file.name: file.bytes for file in written}
    # Rank 0 always sees its own file. If even this is missing, another start has deleted the folder: do not wait.
    is_patient = not storage.is_consistent and written[0].name in sizes_in(storage, staged)
    sizes = partial(sizes_in, storage, staged)
    unseen, waited_s = wait_until_seen(sizes, expected, is_patient=is_patient)
    address = storage.address(staged)
    if not unseen:
        if waited_s > SOON_S:
            log(f"the files of all workers became visible to rank 0 in {address} only after {waited_s:.1f} s")
        return

    ranks = [rank for rank, file in enumerate(written) if file.name in unseen]
    first = written[ranks[0]]
    bytes_seen = unseen[first.name]
    visible = "no file" if bytes_seen is None else f"{bytes_seen:,} bytes"
    others = ""
    if len(ranks) > 1:
        others = f", and not the files of {len(ranks) - 1} more workers ({', '.join(map(str, ranks[1:9]))} …)"
    raise CheckpointError(
        f"worker {ranks[0]} on {first.node} wrote {address}/{first.name} ({size_text(first.bytes)}), but rank 0 on "
        f"{socket.gethostname()} sees {visible} there after {waited_s:.0f} s{others}; "
        f"{address.rpartition('/')[0]} must be the same storage on all nodes"
    )
