"""Files that appear whole, and locks that end with their process: the only code that promises either.

How a file is written whole, in order:
1. its bytes go to a temporary name beside it, `.tmp-<pid>-<thread and process>-<name>`;
2. they are flushed to the disk (fsync);
3. the temporary name is renamed to the final one, which is atomic;
4. the folder is flushed, so that a power cut cannot take the name away again.
A reader therefore finds the old file, the new file or none, and never a part of one.

Every file gets the mode that the umask gives, by whatever code its bytes are written. An error of the disk names the
file; `explain` says it in words, with the room that there is.

A network file system may show some seconds late what another node has written: `look_for` waits for it.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_native_id

from data.errors import StorageError

ROOT = Path(__file__).parents[1]
# A set of files, such as a checkpoint, is whole when this file is there, the last of them (data/storage.py).
MANIFEST = "MANIFEST.json"
SET_NAME = re.compile(r"step-\d{10}(-\d{6})?")
# What a file system answers when it has no such operation at all; any other error is about this one file.
NOT_SUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
NOT_OURS_TO_WRITE = {errno.EROFS, errno.EACCES, errno.EPERM}
# From so many bytes on a file is written past the kernel's copy in memory, whose making costs a core's time and room.
LARGE = 8 << 20
DIRECT = getattr(os, "O_DIRECT", 0)  # which not every system has
DISK_BLOCK = 4096  # what goes to the disk directly must begin and end at a multiple of it, in memory and in the file
AT_ONCE = 32 << 20  # bytes of one direct write
# What write and fcntl answer where a file system, or a kind of memory, cannot be written directly.
NOT_DIRECT = {errno.EINVAL, errno.EFAULT, errno.ENOTTY, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
# What write and fsync answer. An error of the network, say, is not about the file that was being written.
OF_THE_DISK = {errno.EIO, errno.EFBIG, errno.ESTALE, *NO_ROOM, *NOT_OURS_TO_WRITE}
SEEN_WITHIN_S = 30.0  # NFS keeps what it knows of a folder for up to 30 s (acdirmin of its mount) unless it asks anew
POLL_S = 0.1
# Of this process, or of the one that it is a fork of: on shared storage the pids of two hosts or pods may be equal.
OWN = secrets.token_hex(4)
SAME_STORAGE = "expected: a run directory on storage that every node mounts at the same path\n  type run=/shared/NAME"


def import_path() -> str:
    """Return PYTHONPATH for a process that this one starts: the repository first, then this process's own folders."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def state_folder() -> Path:
    """Return where a node keeps what it knows about data: `PATCHLINE_CACHE`, or the user's cache folder."""
    base = os.environ.get("PATCHLINE_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "patchline"


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write and fsync under the final name; for files in a folder that is itself renamed when it is whole.

    A large file goes to the disk directly, where the file system can do that and the content lies in memory at a
    multiple of 4,096 bytes (`DISK_BLOCK`): past the page cache, in which it would only take the place of what is read.
    """
    left = memoryview(content)
    with path_in_errors(path, len(content)), open(path, "wb", buffering=0) as file:
        if len(left) >= LARGE:
            handle = file.fileno()
            flags = fcntl.fcntl(handle, fcntl.F_GETFL)
            end = len(left) // DISK_BLOCK * DISK_BLOCK  # of the whole blocks
            written = 0
            try:
                fcntl.fcntl(handle, fcntl.F_SETFL, flags | DIRECT)
                while written < end:
                    written += os.write(handle, left[written : min(written + AT_ONCE, end)])
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
            finally:
                fcntl.fcntl(handle, fcntl.F_SETFL, flags)
            left = left[written:]
        # A small content, the rest of a large one, or all of it where the file system cannot write directly.
        while left:
            left = left[file.write(left) :]
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
    """Return where this thread of this process writes what will be called `path`."""
    return path.with_name(f".tmp-{os.getpid()}-{get_native_id()}{OWN}-{path.name}")


def rename(source: Path, target: Path) -> None:
    """Rename; NFS, whose first answer was lost, may find no source when it is asked again (docs/design/stores.md)."""
    renamed = source.stat()
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if not target.exists() or not os.path.samestat(target.stat(), renamed):
            raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give the block a temporary name to write; when it ends well, the file appears at `path`, whole and durable.

    When it raises, or the disk refuses, the temporary file is removed and `path` is as it was.
    """
    temporary = temporary_name(path)
    try:
        with path_in_errors(path, instead_of=temporary):
            # We create the file, so that we know the mode that the umask gives: safetensors puts a file of its own
            # in its place, which only its owner may read.
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            if stat.S_IMODE(temporary.stat().st_mode) != mode:
                temporary.chmod(mode)
            sync(temporary)
            rename(temporary, path)
    # Ctrl-C too must not leave the temporary file behind.
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file at `path` by `content`; no reader ever finds a part of it."""
    encoded = content.encode() if isinstance(content, str) else content
    with path_in_errors(path, len(encoded)), atomic_file(path) as temporary:
        temporary.write_bytes(encoded)


def write_with_reserve(path: Path, text: str, reserve_bytes: int) -> None:
    """Replace a small text file as `write_atomically` does, and keep room in it, as blanks, for what is written later.

    Where the disk is full the text goes into the file that is there, in place, which needs no room: so a run can say
    on a full disk how it ended. Who reads at that very moment may find a part of each.
    """
    encoded = text.encode()
    try:
        write_atomically(path, encoded + b" " * reserve_bytes)
    except OSError as error:
        room = path.stat().st_size if path.is_file() else 0
        if error.errno not in NO_ROOM or len(encoded) > room:
            raise
        with open(path, "r+b") as file:
            file.write(encoded.ljust(room))
            file.flush()
            os.fsync(file.fileno())


def create_exclusively(path: Path, content: str | bytes) -> bool:
    """Create a file that must not exist yet, whole from its first moment; False where another process was first.

    Raises StorageError where the file system has no hard links, which make this possible.
    """
    temporary = temporary_name(path)
    try:
        with path_in_errors(path, instead_of=temporary):
            write_durably(temporary, content.encode() if isinstance(content, str) else content)
        # A rename would replace the other's file in silence, and O_EXCL would show a file that is still empty. A link
        # fails where the name exists, and the file is whole when it appears.
        os.link(temporary, path)
    except FileExistsError:
        # The name is ours where NFS made the link, its answer was lost, and the kernel has asked again (man 2 open).
        if temporary.stat().st_nlink != 2:
            return False
    except OSError as error:
        # Linux answers EPERM where a file system has no hard links (man 2 link), EMLINK where one name is the limit.
        if error.errno in {errno.EPERM, errno.EMLINK, *NOT_SUPPORTED}:
            raise lacking(path, "hard links", error, "run=/elsewhere") from None
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path` among all processes; the kernel frees it when its process ends, however it ends.

    Raises StorageError where the file system has no locks.
    """
    with open(path, "a") as file:
        take_lock(file.fileno(), path, wait=True)
        yield


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
            raise lacking(path, "locks (flock)", error, "data.cache.directory=/elsewhere, PATCHLINE_CACHE") from None
        raise
    return True


def lacking(path: Path, feature: str, error: OSError, elsewhere: str) -> StorageError:
    """Return the error about a file system that cannot do what is needed of it, and how another one is named."""
    return StorageError(
        f"the file system of {path.parent} has no {feature} ({error.strerror})\n"
        "expected: a local disk, NFS or Lustre (docs/run-storage.md says what each must do)\n"
        f"choose another folder: {elsewhere}"
    )


# ------------------------------------------------------------------------ files that other nodes have written


def look_for(folder: Path, names: Iterable[str]) -> tuple[dict[str, int | None], float]:
    """Look for names in a folder until all are seen, or 30 s are over.

    Returns those that are not seen, and the seconds it took.
    """
    return wait_until_seen(lambda: dict.fromkeys(names_in(folder)), dict.fromkeys(names))


def wait_until_seen(
    sizes: Callable[[], Mapping[str, int | None]], expected: Mapping[str, int | None], *, is_patient: bool = True
) -> tuple[dict[str, int | None], float]:
    """Ask for the sizes of files until they are as expected, None for any size, or 30 s are over.

    Without patience they are asked for once. Returns the files that are not seen so, each with the size that was seen,
    None for no file; and the seconds it took.
    """
    patience_s = SEEN_WITHIN_S if is_patient else 0.0
    began = time.monotonic()
    while True:
        seen = sizes()
        unseen: dict[str, int | None] = {}
        for name, size in expected.items():
            if name not in seen or (size is not None and seen[name] != size):
                unseen[name] = seen.get(name)
        waited_s = time.monotonic() - began
        if not unseen or waited_s >= patience_s:
            return unseen, waited_s
        time.sleep(POLL_S)


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder, listed anew; none where there is no such folder."""
    # To open a folder makes a network file system ask its server what is new there; to ask for a name may not.
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


# ------------------------------------------------------------------------ what the disk refuses, in words


@contextmanager
def path_in_errors(path: Path, content_bytes: int | None = None, *, instead_of: Path | None = None) -> Iterator[None]:
    """Name the file, and how much was to be written, in an error of the disk.

    write and fsync know no name, so their errors come without one. `instead_of` is a temporary name of the same file;
    an error that names any other file is left alone.
    """
    try:
        yield
    except OSError as error:
        names_no_file = error.errno in OF_THE_DISK and error.filename is None
        if names_no_file or (instead_of is not None and str(error.filename) == str(instead_of)):
            error.filename = str(path)
        if content_bytes is not None and error.errno in NO_ROOM:
            error.add_note(f"{size_text(content_bytes)} needed")
        raise


def error_text(error: OSError) -> str:
    """Say an error of the operating system in one line: why, which file, and of a full disk how much is free."""
    if error.errno is None or error.filename is None:
        return str(error)
    line = f"{error.strerror}: {error.filename}"
    if error.errno in NO_ROOM:
        parts = list(getattr(error, "__notes__", ()))
        # The disk may be gone by now; then the reason alone has to do.
        with suppress(OSError):
            parts.append(f"{size_text(free_bytes(Path(error.filename)))} free")
        line += f" ({', '.join(parts)})"
    return line


def explain(error: OSError) -> str:
    """Say an error of the operating system as all our errors are said: found, expected, what to type next."""
    line = error_text(error)
    if error.errno in NO_ROOM:
        return (
            f"{line}\n"
            "  expected: room on that disk, and in the quota, for what a run writes\n"
            "  make room there, or give the run another disk: run=/elsewhere; then run the same command again"
        )
    if error.errno in NOT_OURS_TO_WRITE and error.filename is not None:
        return (
            f"{line}\n"
            "  expected: a disk that is not mounted read-only, and a folder that this user may write\n"
            "  see to the mount or the folder's mode, or name another folder: run=/elsewhere"
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and error.filename is not None:
        return f"{line}\n  expected a file or folder there, or one that can be made there; see to the path"
    if error.errno == errno.EISDIR and error.filename is not None:
        return f"{line}\n  expected a file of this name\n  bring the file back from a copy, or move the folder away"
    return line


def free_bytes(path: Path) -> int:
    """Return how many bytes a user may still write on the disk of a path, which need not exist yet.

    Raises OSError where the disk does not say.
    """
    folder = path
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def size_text(size_bytes: float, base: int = 1000, units: Sequence[str] = ("kB", "MB", "GB")) -> str:
    """Return a number of bytes as people say it of disks and links: 23.4 MB.

    It is in the largest of the units, each `base` of the one before, that it has at least one of.
    """
    size = size_bytes / base
    for unit in units[:-1]:
        if size < base:
            return f"{size:.1f} {unit}"
        size /= base
    return f"{size:.1f} {units[-1]}"


def memory_text(size_bytes: float) -> str:
    """Return a number of bytes as people say it of memory: 22.3 MiB."""
    return size_text(size_bytes, 1024, ("KiB", "MiB", "GiB"))
