"""The commit of a save: rank 0 makes a checkpoint exist, whole, or says why it does not.

1. its attempt still owns the run, every worker has written its file, and rank 0 sees all of them in their sizes;
2. the manifest, which names them with their digests, is written last and fsynced, and so is the folder;
3. the folder gets its final name, and the folder above is fsynced. From here on it is a checkpoint (`commit`).
In an object store, which has no renames, the creation of the manifest is the commit (`commit_in_store`).

In:  .tmp-0000001200-000007/ with rank-00000.safetensors …, and what every worker says of its file
Out: step-0000001200/ with MANIFEST.json too; or nothing, and the reason in the decision that all workers are told
"""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.errors import CheckpointError, StorageError
from data.files import refusal, sync, write_durably
from pipeline.checkpoints.manifest import MANIFEST, FileRecord, Manifest, newest_attempt, seal
from pipeline.checkpoints.shared_storage_check import WrittenFile, unseen_files
from pipeline.checkpoints.stored import StoredCheckpoints, newest_attempt_in


@dataclass(frozen=True)
class Decision:
    """Holds what rank 0 has decided about a save; every worker is told."""

    manifest: Manifest | None  # None: nothing was committed, for the reason in `failure`
    failure: str = ""
    has_newer_owner: bool = False


def commit(
    folder: Path,
    temporary: Path,
    run: Path,
    manifest: Manifest,
    results: Sequence[WrittenFile],
    say: Callable[[str], None],
) -> Decision:
    """Make a whole checkpoint visible under its final name, if every file was written and the run is still ours.

    Runs on rank 0 alone. Where something fails, the temporary folder is deleted, also where it had its final name
    already: what is said to have failed is not there.
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
        try:
            sync(folder)
        except OSError:
            os.rename(final, temporary)
            raise
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
        # First of all: a store that has not taken a file in all its attempts is asked nothing else with such patience,
        # for which a run that was told to stop would wait.
        errors = [result.error for result in results if result.error]
        if errors:
            remote.discard(manifest)
            return Decision(None, "; ".join(errors))
        # For the message alone: what nobody can pass is that the manifest's name is taken (`StoredCheckpoints.sweep`).
        newest = newest_attempt_in(remote.store)
        if newest > manifest.attempt:
            return newer_owner(manifest, f"attempt {newest} owns {remote.store.address('')} now")
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
