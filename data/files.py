"""Files that appear whole, and locks that end with their process: the only code that promises either.

How a file is written whole, in order:
1. its bytes go to a temporary name beside it, `.tmp-<pid>-<thread>-<name>`;
2. they are flushed to the disk (fsync);
3. the temporary name is renamed to the final one, which is atomic;
4. the folder is flushed, so that a power cut cannot take the name away again.
A reader therefore finds the old file, the new file or none, and never a part of one.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_native_id

from data.errors import StorageError

# What a file system answers when it has no such operation at all; any other error is about this one file.
NOT_SUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


def state_folder() -> Path:
    """Where a node keeps what it knows about data: `PATCHLINE_CACHE`, or the user's cache folder."""
    base = os.environ.get("PATCHLINE_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "patchline"


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write and fsync under the final name; for files in a folder that is itself renamed when it is whole."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file's bytes, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot fsync a folder, and keep names durable by themselves.
        if error.errno not in {errno.EINVAL, *NOT_SUPPORTED} or not path.is_dir():
            raise
    finally:
        os.close(handle)


def make_folder(path: Path, top: Path) -> None:
    """Create a folder below `top` and make its name durable, and that of every folder up to `top`.

    A folder that exists may have been made a moment ago by a process that did not flush it.
    """
    path.mkdir(parents=True, exist_ok=True)
    for parent in path.parents:
        sync(parent)
        if parent == top.parent:
            break


def temporary_name(path: Path) -> Path:
    """Where this thread of this process writes what will be called `path`."""
    return path.with_name(f".tmp-{os.getpid()}-{get_native_id()}-{path.name}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the block a temporary name to write; when it ends well, the file appears at `path`, whole and durable.

    When it raises, or the disk refuses, the temporary file is removed and `path` is as it was.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    # Ctrl-C too must not leave the temporary file behind.
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file at `path` by `content`; nobody ever reads a part of it."""
    encoded = content.encode() if isinstance(content, str) else content
    with whole_file(path) as temporary:
        temporary.write_bytes(encoded)


def create_exclusively(path: Path, content: str) -> bool:
    """Create a file that must not exist yet, whole from its first moment; False where somebody else was first.

    Raises StorageError where the file system has no hard links, which make this possible.
    """
    temporary = temporary_name(path)
    write_durably(temporary, content.encode())
    try:
        # A rename would replace the other's file in silence, and O_EXCL would show a file that is still empty. A link
        # fails where the name exists, and the file is whole when it appears.
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        # Linux answers EPERM where a file system has no hard links (man 2 link), EMLINK where one name is the limit.
        if error.errno in {errno.EPERM, errno.EMLINK, *NOT_SUPPORTED}:
            raise lacking(path, "hard links", error) from None
        raise
    finally:
        temporary.unlink()
    sync(path.parent)
    return True


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file at `path` among all processes; the kernel frees it when its process ends, however it ends.

    The block gets True when it has the lock; without `wait`, False where another process has it.
    Raises StorageError where the file system has no locks.
    """
    with open(path, "a") as file:
        yield take_lock(file.fileno(), path, wait=wait)


def take_lock(handle: int, path: Path, *, wait: bool) -> bool:
    """Lock an open file until it is closed; False where another process has it and we do not wait."""
    # flock, because a POSIX lock would go as soon as this process closes any other handle of the same file.
    operation = fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(handle, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NOT_SUPPORTED:
            raise lacking(path, "locks (flock)", error) from None
        raise
    return True


def lacking(path: Path, feature: str, error: OSError) -> StorageError:
    """The error about a file system that cannot do what a run needs of it."""
    return StorageError(
        f"the file system of {path.parent} has no {feature} ({error.strerror})\n"
        f"expected: a local disk, or a network file system with flock and hard links (NFS 4, Lustre with -o flock)\n"
        f"choose another run or cache directory: run=/elsewhere, data.cache.directory=/elsewhere"
    )
