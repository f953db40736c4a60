"""The storage of a run: a folder that all nodes share, or a bucket of an object store, behind one interface.

    storage = open_storage(Path("/runs/x"))                         `Folder`
    storage = open_storage(Path("/scratch/x"), "s3://bucket/x")     `Bucket`; the path is local to this node

Names are relative to the run, with "/" as separator. Small files:
    storage.create_once("attempts/000007.json", b"{…}")   → True    False if the name exists
    storage.put("status.json", b"{}")                               replaces an existing file
    storage.read("status.json")                           → b"{}"   None if the file is missing
    storage.list("attempts")                              → {"attempts/000007.json": 41}, sizes in bytes
    storage.delete(["status.json"])                                 missing files are ignored

A *set* is a folder of large files that appears atomically: a checkpoint. Its name contains the step, and the attempt if
needed: step-0000001200, step-0000001200-000007. The life cycle of a set:
1. `staging_name` returns the name under which its files are written (`write`); readers ignore staged sets;
2. `publish` turns it into a set. The manifest is the last file written. A folder is then renamed; a bucket creates the
   manifest only if no newer attempt has created one;
3. `published` lists the sets; `fetch_set` copies the files of a set to this node's disk;
4. `set_aside` keeps a bad set so that no later attempt tries it; `delete_set` deletes an old one; `sweep` deletes the
   unpublished sets of earlier attempts and prevents their later publication.
Neither a kill nor a power failure leaves an incomplete set under a valid name.
To add a third kind of storage, write a class with the methods of `Folder`, and add a line to `open_storage`. If nodes
do not see each other's files (`is_shared` is False), jobs/run/sync.py copies them.

This module implements the shared folder, which every node mounts at the same path; data/bucket.py implements the
bucket. A folder of sets contains:
    step-0000001200/                  published; "-000007" is appended if another attempt has published that step
    .tmp-0000001250-000007/           staged, or left by a dead process; deleted by the next attempt
    .tmp-old-step-0000001100/         an old set during its deletion; the next attempt completes the deletion
    bad-0000001100-000007/            set aside; never tried again, never deleted by us
"""

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from data.files import (
    MANIFEST,
    SET_NAME,
    create_exclusively,
    make_folder,
    rename,
    sync,
    write_atomically,
    write_durably,
)

if TYPE_CHECKING:  # importing it loads object-store clients, which a run in a folder does not need
    from data.bucket import Bucket

Storage: TypeAlias = "Folder | Bucket"


def open_storage(local: Path, url: str | None = None) -> Storage:
    """Return the storage of a run, given the run's folder on this node and, for an object store, its URL."""
    if url is None:
        return Folder(local)
    from data.bucket import Bucket

    return Bucket(url, local)


class Folder:
    """A run's files in a shared folder; the docstrings of this class define the interface of every storage.

    Methods that access files raise StorageError or OSError if that fails; their docstrings name only other errors.
    """

    is_shared: Literal[True] = True  # every node sees files under `local` as soon as they are written
    is_consistent = False  # a network file system may show a file some seconds late
    keeps_sets_locally = True  # sets use this node's disk; for a bucket, only the set fetched at the start does
    set_aside_as = "as bad-*"  # used in messages: how `set_aside` marks a bad set
    restore_hint = "restore one from a copy as step-*"  # used in messages: how to make a marked set valid again

    def __init__(self, local: Path) -> None:
        self.local = local  # the run's folder on this node

    def address(self, name: str = "") -> str:
        """Return the full path or URL of a file, for messages."""
        return str(self.local / name)

    def create_once(self, name: str, content: bytes) -> bool:
        """Create a file atomically; return False if the name exists, so that only one of several processes succeeds.

        The content must be unique to the calling process: it identifies the winner if an object store's response is
        lost. Raises StorageError if the storage lacks this feature.
        """
        path = self.local / name
        make_folder(path.parent, self.local)
        return create_exclusively(path, content)

    def check_exclusive_create(self, name: str) -> None:
        """Raise StorageError if a second `create_once` can replace a file; may leave a file with this name.

        In a shared folder, hard links guarantee exclusive creation, so there is nothing to check.
        """

    def limit_retries(self) -> None:
        """Reduce the number of retries from now on: an exiting command must not wait minutes for the storage."""

    def put(self, name: str, content: bytes) -> None:
        """Write or replace a file atomically."""
        write_atomically(self.local / name, content)

    def renew(self, name: str, content: bytes) -> None:
        """Overwrite an existing small file with content of equal length; this also works on a full disk."""
        # Neither flushed nor renamed: a busy disk would delay that, and losing this content does no harm.
        with open(self.local / name, "r+b", buffering=0) as file:
            file.write(content)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        try:
            return (self.local / name).read_bytes()
        except FileNotFoundError:
            return None

    def list(self, folder: str = "") -> dict[str, int]:
        """Return {name: size in bytes} of all regular files below a folder."""
        sizes: dict[str, int] = {}
        # A listing error must not look like a missing file: the checkpoint would be treated as damaged.
        try:
            with os.scandir(self.local / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.is_dir():
                        sizes.update(self.list(name))
                    elif entry.is_file():
                        # Temporary files may disappear during the listing.
                        with suppress(FileNotFoundError):
                            sizes[name] = entry.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return sizes

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing files are ignored."""
        for name in names:
            (self.local / name).unlink(missing_ok=True)

    def upload(self, name: str) -> None:
        """Upload a file written under `local`; a shared folder needs no upload."""

    def ensure_local(self, name: str, size: int, sha256: str) -> None:
        """Ensure that `local` has this file with this size and digest; a shared folder always contains its files.

        Raises CheckpointError if the storage has different bytes.
        """

    def staging_name(self, folder: str, name: str, attempt: int) -> str:
        """Return the name of the folder in which the files of a set are written before `publish`."""
        # The name includes the attempt: a suspended owner that wakes up cannot write into its successor's folder.
        return f"{folder}/.tmp-{name.removeprefix('step-')}-{attempt:06d}"

    def write(self, name: str, content: memoryview) -> None:
        """Write a large file to a staged set and flush it to the disk."""
        path = self.local / name
        # The first worker creates the folder; `publish` makes its name durable.
        path.parent.mkdir(exist_ok=True)
        write_durably(path, content)

    def publish(self, folder: str, name: str, attempt: int, manifest: bytes) -> bool:
        """Publish a completely written set; return False if a newer attempt prevents it.

        After StorageError, the set may or may not be published; after OSError, it is not.
        """
        temporary = self.local / self.staging_name(folder, name, attempt)
        # The manifest is written last and fsynced: a valid manifest implies that all its files are on the disk.
        write_durably(temporary / MANIFEST, manifest)
        sync(temporary)
        final = self.local / folder / name
        # A former owner of the run that woke up after our start may have published this step. Keep both sets; the
        # later attempt comes first in `published`.
        if final.exists():
            final = final.with_name(f"{name}-{attempt:06d}")
        rename(temporary, final)  # the kernel refuses if another folder has appeared under this name
        # A rename is durable only after the parent folder is flushed.
        try:
            sync(final.parent)
        except OSError:
            rename(final, temporary)
            raise
        return True

    def discard(self, folder: str, name: str, attempt: int) -> None:
        """Delete a staged set that will not be published; if that fails, `sweep` deletes it later."""
        shutil.rmtree(self.local / self.staging_name(folder, name, attempt), ignore_errors=True)

    def published(self, folder: str) -> Sequence[str]:
        """List the published sets in a folder, newest step first; for equal steps, the later attempt first.

        Sorted by name, because the clocks of nodes differ and copying a run changes file times.
        """
        # Ignore folders with other names, such as a copy that a user made.
        names = [path.name for path in (self.local / folder).glob("step-*") if SET_NAME.fullmatch(path.name)]
        return sorted(names, reverse=True)

    def unpublished(self, folder: str) -> Sequence[str]:
        """List the folders that are not published: "bad-…" (bad sets), ".tmp-…" (unfinished or abandoned sets)."""
        top = self.local / folder
        paths = [*sorted(top.glob("bad-*")), *sorted(top.glob(".tmp-*"))]
        return [path.name for path in paths]

    def fetch_set(self, folder: str, name: str, check: Callable[[Path], object], *, recheck: bool = False) -> Path:
        """Return a local folder with the files of a set.

        If the files are copied from the storage, `check` must accept the copy; a bad copy is fetched once more. With
        `recheck`, `check` always reads the current files of the storage. Raises the errors of `check`; if both copies
        are bad, the error for the second one.
        """
        path = self.local / folder / name
        if recheck:
            check(path)
        return path

    def set_aside(self, folder: str, name: str, attempt: int, problem: str) -> str:
        """Exclude a bad set and keep it for inspection; return a phrase for messages that describes how it is kept."""
        path = self.local / folder / name
        aside = path.with_name(f"bad-{name.removeprefix('step-')}-{attempt:06d}")
        rename(path, aside)
        return f"kept as {aside.name}"

    def delete_set(self, folder: str, name: str) -> Path | None:
        """Delete a set; return the remaining path if files could not be deleted, else None.

        After OSError or StorageError, the set is either complete or no longer a set.
        """
        doomed = self.local / folder / f".tmp-old-{name}"
        rename(self.local / folder / name, doomed)
        sync(doomed.parent)
        # Files that remain after an error are deleted by the next `sweep`, like any temporary folder.
        shutil.rmtree(doomed, ignore_errors=True)
        return doomed if doomed.exists() else None

    def sweep(self, folder: str, attempt: int) -> None:
        """Delete the staged sets of earlier attempts, and prevent their publication."""
        # None of our saves has started yet, so every temporary folder belongs to an earlier attempt. If its owner wakes
        # up, it does not find its staged files and cannot publish.
        for leftover in (self.local / folder).glob(".tmp-*"):
            # Rename first, as in `delete_set`: NFS keeps a folder that contains an open file.
            if not leftover.name.startswith(".tmp-old-"):
                with suppress(OSError):
                    leftover = leftover.rename(leftover.with_name(leftover.name.replace(".tmp-", ".tmp-old-")))
            shutil.rmtree(leftover, ignore_errors=True)
