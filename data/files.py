"""Atomic file writes, and locks that end with their process; all other code relies on this module for both.

A file is written atomically in four steps:
1. write its bytes under a temporary name in the same folder, `.tmp-<pid>-<thread and process>-<name>`;
2. flush them to the disk (fsync);
3. rename the temporary name to the final one, which is atomic;
4. flush the folder, so that a power failure cannot undo the rename.
A reader therefore finds the old file, the new file or no file, but never a partial one.

Every file gets the mode given by the umask, regardless of the library that writes it. Disk errors name the file;
`explain` turns an error into a message with the free space and a remedy.

A network file system may show files of other nodes some seconds late: `look_for` waits for them.
"""

import errno
import fcntl
import os
import re
import resource
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_native_id

from data.errors import ConfigError, StorageError

ROOT = Path(__file__).parents[1]
# The last file written of a set of files such as a checkpoint; its presence makes the set valid (data/storage.py).
MANIFEST = "MANIFEST.json"
SET_NAME = re.compile(r"step-\d{10}(-\d{6})?")
# Error codes of file systems that lack an operation; any other code is about the individual file.
NOT_SUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
OUT_OF_HANDLES = {errno.EMFILE, errno.ENFILE}
NOT_OURS_TO_WRITE = {errno.EROFS, errno.EACCES, errno.EPERM}
# Files of this size or more bypass the page cache, because the kernel's copy costs CPU time and memory.
LARGE = 8 << 20
DIRECT = getattr(os, "O_DIRECT", 0)  # not available on every system
DISK_BLOCK = 4096  # direct writes must start and end at multiples of this, in memory and in the file
AT_ONCE = 32 << 20  # bytes of one direct write
# Error codes of write and fcntl if a file system, or a kind of memory, does not support direct writes.
NOT_DIRECT = {errno.EINVAL, errno.EFAULT, errno.ENOTTY, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
# Error codes of write and fsync. Other errors, such as network errors, are not about the file being written.
OF_THE_DISK = {errno.EIO, errno.ESTALE, *NO_ROOM, *NOT_OURS_TO_WRITE}
SEEN_WITHIN_S = 30.0  # NFS may cache a folder's contents this long (mount option acdirmin)
POLL_S = 0.1
# Identifies this process and its forks: on shared storage, processes of two hosts or pods may have equal pids.
OWN = secrets.token_hex(4)
SAME_STORAGE = "expected: a run directory on storage that every node mounts at the same path\n  set run=/shared/NAME"


def import_path() -> str:
    """Return PYTHONPATH for a child process: the repository first, then this process's own PYTHONPATH."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def state_folder() -> Path:
    """Return the folder for cached data of this node: `PATCHLINE_CACHE`, or the user's cache folder."""
    base = os.environ.get("PATCHLINE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    if base:
        return with_home(base) / "patchline"
    return home() / ".cache" / "patchline"


def home() -> Path:
    """Return the user's home folder. Raises ConfigError if the user has none.

    Containers often run as a user without HOME and without an entry in /etc/passwd. A folder with a predictable name in
    the shared /tmp would not be safe: code is loaded from the cache, and another user may have created the folder.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError(
            f"user {os.geteuid()} has no home folder: HOME is not set, and /etc/passwd has no entry for this user\n"
            "  expected a folder owned by this user for caches and Ray's token\n"
            "  to set one, run export HOME=/a/folder/of/this/user and run the same command again"
        ) from None


def with_home(path: str) -> Path:
    """Replace a leading ~ with the user's home folder. Raises ConfigError if ~NAME has no home folder."""
    if path == "~" or path.startswith("~/"):
        return home() / path[2:]
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: this user has no home folder on this machine\n  use an absolute path") from None


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write and fsync a file under its final name, in a folder that will be renamed when complete.

    A large file is written directly to the disk, past the page cache, if the file system supports it and the content is
    aligned in memory to 4,096 bytes (`DISK_BLOCK`). It would otherwise evict data that will be read again.
    """
    left = memoryview(content)
    with path_in_errors(path, len(content)), open(path, "wb", buffering=0) as file:
        if len(left) >= LARGE:
            handle = file.fileno()
            flags = fcntl.fcntl(handle, fcntl.F_GETFL)
            end = len(left) // DISK_BLOCK * DISK_BLOCK  # whole blocks only
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
        # A small file, the end of a large one, or all of it if direct writes are not supported.
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot fsync a folder and make its entries durable anyway.
        if error.errno not in {errno.EINVAL, *NOT_SUPPORTED} or not path.is_dir():
            raise
    finally:
        os.close(handle)


def make_folder(path: Path, top: Path) -> None:
    """Create a folder below `top`, and flush the entries of all its parents up to `top`.

    Existing folders are flushed too: another process may have just created them without a flush.
    """
    path.mkdir(parents=True, exist_ok=True)
    for parent in path.parents:
        sync(parent)
        if parent == top.parent:
            break


def temporary_name(path: Path) -> Path:
    """Return the temporary name under which this thread writes the file `path`."""
    return path.with_name(f".tmp-{os.getpid()}-{get_native_id()}{OWN}-{path.name}")


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, even if NFS repeats the rename after a lost response (docs/design/stores.md)."""
    renamed = source.stat()
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if not target.exists() or not os.path.samestat(target.stat(), renamed):
            raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary path to write; on success the file appears at `path`, flushed.

    If the block raises or the disk fails, the temporary file is removed and `path` is unchanged.
    """
    temporary = temporary_name(path)
    try:
        with path_in_errors(path, instead_of=temporary):
            # Create the file here to learn the mode given by the umask: safetensors replaces it by a file that only its
            # owner may read.
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            if stat.S_IMODE(temporary.stat().st_mode) != mode:
                temporary.chmod(mode)
            sync(temporary)
            rename(temporary, path)
    # BaseException: remove the temporary file after Ctrl-C too.
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of the file at `path`; readers see the old or the new file, never a mixture."""
    encoded = content.encode() if isinstance(content, str) else content
    with path_in_errors(path, len(encoded)), atomic_file(path) as temporary:
        temporary.write_bytes(encoded)


def write_with_reserve(path: Path, text: str, reserve_bytes: int) -> None:
    """Replace a small text file atomically, padded with blanks that reserve space for a later write.

    If the disk is full, the text overwrites the existing file in place, which needs no space. A run can thus record how
    it ended on a full disk; a simultaneous reader may see parts of both texts.
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
    """Create a file atomically; return False if the name exists, so that only one of several processes succeeds.

    Raises StorageError if the file system does not support hard links, which this function requires.
    """
    temporary = temporary_name(path)
    try:
        with path_in_errors(path, instead_of=temporary):
            write_durably(temporary, content.encode() if isinstance(content, str) else content)
        # A rename would silently replace an existing file, and O_EXCL would show an empty file first. A link fails if
        # the name exists, and the file is complete when it appears.
        os.link(temporary, path)
    except FileExistsError:
        # Two links: NFS created the link, lost the response and repeated the request (man 2 open). The name is ours.
        if temporary.stat().st_nlink != 2:
            return False
    except OSError as error:
        # Linux returns EPERM if a file system has no hard links (man 2 link), EMLINK if it allows one name per file.
        if error.errno in {errno.EPERM, errno.EMLINK, *NOT_SUPPORTED}:
            raise lacking(path, "hard links", error, "run=/elsewhere") from None
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return True


def open_regular(path: str, flags: int) -> int:
    """Open a regular file for `open(..., opener=open_regular)`; never follow a link, and never wait for a pipe.

    Use it for fixed names in folders that other users may write to: their link would redirect our writes to any file of
    ours, and opening their pipe would block for ever. Use mode "a", because "w" truncates the file before the check.
    Raises StorageError if the path is a link, a pipe or anything else that is not a regular file.
    """
    problem = StorageError(
        f"{path}: found a link, pipe or device, expected a regular file\n"
        "  another user may have placed it there\n"
        f"  inspect it with: ls -l {path}; then remove it, or use a folder that only you can write to"
    )
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # ELOOP: a link; ENXIO: a pipe without a reader, or a socket.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise problem from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise problem
    return handle


def is_own(path: Path) -> bool:
    """Return whether this user or root owns the file or folder at a path; for a link, the owner of the link counts."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid in (os.geteuid(), 0)


def refuse_planted(path: Path, remedy: str) -> None:
    """Raise StorageError if `path`, in a world-writable folder, is a link or belongs to another user.

    Its owner could read and replace all files that we write there; the message ends with `remedy`.
    """
    with suppress(OSError):
        is_shared = path.parent.stat().st_mode & stat.S_IWOTH != 0
        if is_shared and os.path.lexists(path) and not is_own(path):
            raise StorageError(
                f"{path}: this is a link or belongs to another user, and every user can write to {path.parent}\n"
                "  expected a folder owned by this user, or no such path: another owner could replace the run's files\n"
                f"  {remedy}"
            )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file at `path`; the kernel releases it when the process ends for any reason.

    Raises StorageError if the file system does not support locks, or if the path is a link or a pipe.
    """
    with open(path, "a", opener=open_regular) as file:
        take_lock(file.fileno(), path, wait=True)
        yield


def take_lock(handle: int, path: Path, *, wait: bool) -> bool:
    """Lock an open file until it is closed; return False if `wait` is False and another process holds the lock."""
    # flock, because a POSIX lock is lost as soon as this process closes any other handle of the same file.
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
    """Return the error for a file system without a required feature; `elsewhere` says how to use another folder."""
    return StorageError(
        f"the file system of {path.parent} has no {feature} ({error.strerror})\n"
        "expected: a local disk, NFS or Lustre (docs/run-storage.md lists the requirements)\n"
        f"choose another folder: {elsewhere}"
    )


# ------------------------------------------------------------------------ files written by other nodes


def look_for(folder: Path, names: Iterable[str]) -> tuple[dict[str, int | None], float]:
    """Wait up to 30 s until all names are visible in a folder.

    Returns the names still missing, and the seconds waited.
    """
    return wait_until_seen(lambda: dict.fromkeys(names_in(folder)), dict.fromkeys(names))


def wait_until_seen(
    sizes: Callable[[], Mapping[str, int | None]], expected: Mapping[str, int | None], *, is_patient: bool = True
) -> tuple[dict[str, int | None], float]:
    """Call `sizes` until all files have the expected size (None: any size), for up to 30 s.

    Calls `sizes` only once if `is_patient` is False. Returns the files without the expected size, each with the size
    seen (None: missing), and the seconds waited.
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
    """Return the names in a folder, freshly listed; an empty set if the folder does not exist."""
    # Listing a folder makes a network file system ask its server for new entries; looking up a name may not.
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


# ------------------------------------------------------------------------ messages about disk errors


@contextmanager
def path_in_errors(path: Path, content_bytes: int | None = None, *, instead_of: Path | None = None) -> Iterator[None]:
    """Context manager that adds the path, and the number of bytes to be written, to a disk error.

    Errors from write and fsync contain no path. `instead_of` is a temporary name to replace with `path`. Errors that
    name any other file are left unchanged.
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
    """Describe an OSError in one line: the reason, the file and any exhausted resource with its limit.

    For a full disk, the line states the free bytes or inodes; for a quota, a file-size limit or too many open files, it
    states the limit and how to display it.
    """
    if error.errno in OUT_OF_HANDLES:
        name = f": {error.filename}" if error.filename is not None else ""
        return f"{error.strerror}{name} ({open_files_text(error)})"
    if error.errno is None or error.filename is None:
        return str(error)
    line = f"{error.strerror}: {error.filename}"
    if error.errno in NO_ROOM:
        parts = list(getattr(error, "__notes__", ()))
        # The disk may be gone by now; then omit its state.
        with suppress(OSError):
            parts.append(room_text(error, Path(error.filename)))
        line += f" ({', '.join(parts)})"
    elif error.errno in (errno.EACCES, errno.EPERM):
        line += f" (this user: {os.geteuid()})"
    return line


def room_text(error: OSError, path: Path) -> str:
    """Describe the exhausted resource on the disk of a path: bytes, inodes, a quota, or the file-size limit."""
    free = f"{size_text(free_bytes(path))} free"
    if error.errno == errno.EDQUOT:
        return f"{free} on the disk, but this user's quota of bytes or files is used up"
    if error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit == resource.RLIM_INFINITY:
            return f"{free} on the disk, but this file system does not store such large files"
        return f"{free} on the disk, but this process may only write files up to {size_text(limit)} (ulimit -f)"
    if has_no_inodes(path):
        return f"{free}, but no inodes: this disk has reached its maximum number of files"
    return free


def has_no_inodes(path: Path) -> bool:
    """Return whether the disk of a path cannot hold more files. Raises OSError if the disk cannot be queried."""
    state = os.statvfs(existing_folder(path))
    return state.f_files > 0 and state.f_favail == 0  # btrfs, for example, has no limit and reports f_files 0


def open_files_text(error: OSError) -> str:
    """Describe the exhausted limit on open files: this process's limit or the machine's."""
    if error.errno == errno.ENFILE:
        return "the limit of the whole machine: sysctl fs.file-max"
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"the limit of this process is {limit}: ulimit -n"


def existing_folder(path: Path) -> Path:
    """Return the nearest existing folder among the path itself and its parents."""
    folder = path.absolute()
    # `Path.is_dir` raises PermissionError if a parent may not be searched; `os.path.isdir` returns False.
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def free_bytes(path: Path) -> int:
    """Return the free bytes for this user on the disk of a path; the path itself need not exist yet.

    Raises OSError if the disk cannot be queried.
    """
    return shutil.disk_usage(existing_folder(path)).free


def size_text(size_bytes: float, base: int = 1000, units: Sequence[str] = ("kB", "MB", "GB")) -> str:
    """Format a number of bytes in decimal units, as for disks and networks: 23.4 MB.

    Uses the largest unit in which the number is at least 1; each unit is `base` times the previous one.
    """
    size = size_bytes / base
    for unit in units[:-1]:
        if size < base:
            return f"{size:.1f} {unit}"
        size /= base
    return f"{size:.1f} {units[-1]}"


def memory_text(size_bytes: float) -> str:
    """Format a number of bytes in binary units, as for memory: 22.3 MiB."""
    return size_text(size_bytes, 1024, ("KiB", "MiB", "GiB"))
