"""Where a run keeps its files: a folder that all nodes see, or a bucket of an object store. One interface for both.

    storage = open_storage(Path("/runs/x"))                         `Folder`
    storage = open_storage(Path("/scratch/x"), "s3://bucket/x")     `Bucket`; the path is this node's own

Names are relative to the run, with "/" between their parts. Small files:
    storage.create_once("attempts/000007.json", b"{…}")   → True    False where the name is taken
    storage.put("status.json", b"{}")                               replaces what is there
    storage.read("status.json")                           → b"{}"   None where there is none
    storage.list("attempts")                              → {"attempts/000007.json": 41}, with bytes
    storage.delete(["status.json"])                                 what is not there is deleted already

A *set* is a folder of large files that appears at once, whole, or not at all: a checkpoint. It is named by step, and by
attempt where that is needed: step-0000001200, step-0000001200-000007. Its life, in order:
1. `staged` says under which name its files are written (`write`): no reader takes them for a set there;
2. `publish` makes it a set: its manifest is written last of all files. A folder is then renamed, a bucket creates the
   manifest only where no newer attempt has taken its name;
3. `published` lists the sets; `fetch_set` has the files of one on this node's disk;
4. `set_aside` keeps a bad one where no later attempt tries it; `retire` deletes an old one; `sweep` deletes what
   earlier attempts have left unpublished, and makes sure that none of it is published any more.
Neither a kill nor a power cut leaves half a set under a valid name.
A third kind of storage is a third class with the methods of `Folder`, and a line in `open_storage`; where no node
sees the others' files (`is_shared` is False), jobs/run/sync.py brings them together.

A folder that every node mounts at the same path is the form that stands here; data/bucket.py is the other. In the
folder of its sets:
    step-0000001200/                  published; "-000007" is appended where another attempt has published that step
    .tmp-0000001250-000007/           staged, or died; swept by the next attempt
    .tmp-old-step-0000001100/         an old set on its way out; swept too, where its deletion was cut short
    bad-0000001100-000007/            set aside; never tried, never deleted by us
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

if TYPE_CHECKING:  # with it come the stores' clients, which a run in a folder does not need
    from data.bucket import Bucket

Storage: TypeAlias = "Folder | Bucket"


def open_storage(local: Path, url: str | None = None) -> Storage:
    """Return the storage of the run whose folder on this node is `local`, and whose URL is `url` if it has one."""
    if url is None:
        return Folder(local)
    from data.bucket import Bucket

    return Bucket(url, local)


class Folder:
    """Keeps the files of one run in a folder; the docstrings here are the contract of every form."""

    is_shared: Literal[True] = True  # every node sees the files under `local` as they are written
    is_consistent = False  # a network file system may show a file some seconds late
    keeps_sets_locally = (
        True  # they take room on this node's disk; of a store's only the one that a start has fetched does
    )
    set_aside_as = "as bad-*"  # how `set_aside` keeps a bad set, for people
    restore_hint = "bring one back from a copy as step-*"  # how a person makes it a set again

    def __init__(self, local: Path) -> None:
        self.local = local  # the run's folder on this node

    def address(self, name: str = "") -> str:
        """Return where a file is, for people."""
        return str(self.local / name)

    def create_once(self, name: str, content: bytes) -> bool:
        """Create a file that must not exist yet, whole from its first moment; False where another process was first.

        The content must be the caller's own. Raises StorageError where the storage cannot promise this, OSError.
        """
        path = self.local / name
        make_folder(path.parent, self.local)
        return create_exclusively(path, content)

    def check_exclusive_create(self, name: str) -> None:
        """Raise StorageError where a second creation of a name takes the place of the first: here hard links see to it.

        A file of this name may stay there.
        """

    def limit_retries(self) -> None:
        """Ask a storage that does not answer fewer times from now on: a command that ends must not wait for minutes."""

    def put(self, name: str, content: bytes) -> None:
        """Write a file whole, in the place of one that is there. Raises StorageError, OSError."""
        write_atomically(self.local / name, content)

    def renew(self, name: str, content: bytes) -> None:
        """Write a small file that is there anew, with as many bytes; a full disk, too, has the room for them.

        Raises StorageError, OSError.
        """
        # Neither flushed nor renamed: a busy disk would hold that up, and nothing is lost with it.
        with open(self.local / name, "r+b", buffering=0) as file:
            file.write(content)

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None where there is none. Raises StorageError, OSError."""
        try:
            return (self.local / name).read_bytes()
        except FileNotFoundError:
            return None

    def list(self, folder: str = "") -> dict[str, int]:
        """Return the bytes of every regular file below a folder, by name. Raises StorageError, OSError."""
        sizes: dict[str, int] = {}
        # What cannot be listed must not look as if it were not there: a checkpoint would be condemned for it.
        try:
            with os.scandir(self.local / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.is_dir():
                        sizes.update(self.list(name))
                    elif entry.is_file():
                        # A temporary file may go while we look.
                        with suppress(FileNotFoundError):
                            sizes[name] = entry.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return sizes

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; one that is not there is deleted already. Raises StorageError, OSError."""
        for name in names:
            (self.local / name).unlink(missing_ok=True)

    def upload(self, name: str) -> None:
        """Make a file that was written under `local` one of the run's: here it is that already."""

    def ensure_local(self, name: str, size: int, sha256: str) -> None:
        """Make sure that this node has a file of `size` bytes and this digest under `local`; all nodes see it here.

        Raises CheckpointError where the storage has other bytes, StorageError, OSError.
        """

    def staging_name(self, folder: str, name: str, attempt: int) -> str:
        """Return the name of the folder in which the files of a set are written before it is published."""
        # The attempt is part of the name: a frozen owner that wakes up cannot write into the folder of its successor.
        return f"{folder}/.tmp-{name.removeprefix('step-')}-{attempt:06d}"

    def write(self, name: str, content: memoryview) -> None:
        """Write a large file of a staged set durably. Raises StorageError, OSError."""
        path = self.local / name
        # Whichever worker comes first makes the folder; `publish` makes its name durable.
        path.parent.mkdir(exist_ok=True)
        write_durably(path, content)

    def publish(self, folder: str, name: str, attempt: int, manifest: bytes) -> bool:
        """Make a staged set, all of whose files are there, a published one; False where a newer attempt forbids it.

        Where it raises StorageError, the set may be published and the answer lost; where OSError, it is not.
        """
        temporary = self.local / self.staging_name(folder, name, attempt)
        # The manifest is written last of all files, and fsynced: where it is valid, what it names is on the disk.
        write_durably(temporary / MANIFEST, manifest)
        sync(temporary)
        final = self.local / folder / name
        # A former owner of the run, unfrozen after our start, may have published this step: both stay, and the later
        # attempt comes first in `published`.
        if final.exists():
            final = final.with_name(f"{name}-{attempt:06d}")
        rename(temporary, final)  # refused by the kernel where another folder has come there meanwhile
        # A rename is durable only once the folder that holds the name is flushed.
        try:
            sync(final.parent)
        except OSError:
            rename(final, temporary)
            raise
        return True

    def discard(self, folder: str, name: str, attempt: int) -> None:
        """Delete what was staged and not published; what cannot be deleted is left to `sweep`."""
        shutil.rmtree(self.local / self.staging_name(folder, name, attempt), ignore_errors=True)

    def published(self, folder: str) -> Sequence[str]:
        """List the sets of a folder, the newest step first, and of one step the later attempt first.

        By name, never by time: clocks of nodes differ, and a copy of a run has times of its own.
        """
        # A folder of any other name, such as a copy that somebody made, is no set.
        names = [path.name for path in (self.local / folder).glob("step-*") if SET_NAME.fullmatch(path.name)]
        return sorted(names, reverse=True)

    def unpublished(self, folder: str) -> Sequence[str]:
        """List what is no set (any more): "bad-…" that were set aside, ".tmp-…" that died or are in flight."""
        top = self.local / folder
        paths = [*sorted(top.glob("bad-*")), *sorted(top.glob(".tmp-*"))]
        return [path.name for path in paths]

    def fetch_set(self, folder: str, name: str, check: Callable[[Path], object], *, anew: bool = False) -> Path:
        """Return a local folder with the files of a set.

        Where they had to be copied there, `check` has read the copy; a bad copy is fetched once more. With `anew`
        `check` reads the files as they are in the storage now, wherever they are. Raises what `check` raises, of the
        second copy where there are copies, StorageError, OSError.
        """
        path = self.local / folder / name
        if anew:
            check(path)
        return path

    def set_aside(self, folder: str, name: str, attempt: int, problem: str) -> str:
        """Keep a bad set for a person to look at, where it is none any more; returns how it is kept, in words."""
        path = self.local / folder / name
        aside = path.with_name(f"bad-{name.removeprefix('step-')}-{attempt:06d}")
        rename(path, aside)
        return f"kept as {aside.name}"

    def delete_set(self, folder: str, name: str) -> Path | None:
        """Delete a set; returns what could not be deleted of it, None where all is gone.

        Where this raises OSError or StorageError, the set is whole, or it is none any more.
        """
        doomed = self.local / folder / f".tmp-old-{name}"
        rename(self.local / folder / name, doomed)
        sync(doomed.parent)
        # What is left of it when this fails is swept by the next attempt, as any temporary folder.
        shutil.rmtree(doomed, ignore_errors=True)
        return doomed if doomed.exists() else None

    def sweep(self, folder: str, attempt: int) -> None:
        """Delete what attempts before this one have staged, and make sure that they do not publish it any more."""
        # No save of ours is in flight yet, so whatever is temporary is of an attempt that died or lost the run. Its
        # owner, should it wake up, does not find what it has staged, and publishes nothing.
        for leftover in (self.local / folder).glob(".tmp-*"):
            # Renamed before, as in `retire`: NFS keeps a folder in which somebody has a file open.
            if not leftover.name.startswith(".tmp-old-"):
                with suppress(OSError):
                    leftover = leftover.rename(leftover.with_name(leftover.name.replace(".tmp-", ".tmp-old-")))
            shutil.rmtree(leftover, ignore_errors=True)
