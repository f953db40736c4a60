"""Explain errors of the operating system to people: the problem, what was expected, and what to type next.

OSError(28, "No space left on device", "run/log.txt")  →  three lines, of which the last one says how to continue
"""

import errno
import os
import resource
import shlex
import tempfile
from contextlib import suppress
from pathlib import Path

from data.files import NO_ROOM, NOT_OURS_TO_WRITE, OUT_OF_HANDLES, error_text, existing_folder, has_no_inodes


def explain(error: OSError, elsewhere: str | None = ": run=/elsewhere") -> str:
    """Describe an OSError in the format of all our errors: the problem, the expectation and the remedy.

    `elsewhere` ends the advice to use another folder or disk: how to type it. None omits the advice.
    """
    advice = "" if elsewhere is None else f", or use another {{}}{elsewhere}"
    line = error_text(error)
    if error.errno in OUT_OF_HANDLES:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        command = f"ulimit -n {'1048576' if hard == resource.RLIM_INFINITY else hard}"
        if error.errno == errno.ENFILE:
            command = "sudo sysctl fs.file-max=9223372036854775807"
        return (
            f"{line}\n"
            "  expected: a limit above the number of shards and connections in use\n"
            f"  run {command}; then run the same command again"
        )
    if error.errno in NO_ROOM:
        return f"{line}\n{room_remedy(error, advice.format('disk'))}"
    if error.errno == errno.EROFS and error.filename is not None:
        return (
            f"{line}\n"
            "  expected: a disk mounted read-write; after a disk error, Linux mounts it read-only\n"
            f"  run findmnt -T {shlex.quote(str(existing_folder(Path(error.filename))))} to see the mount"
            f"{advice.format('disk')}"
        )
    if error.errno in NOT_OURS_TO_WRITE and error.filename is not None:
        unreadable = unreadable_path(Path(error.filename)) if error.errno == errno.EACCES else None
        if unreadable is not None:
            kind = "folder" if os.path.isdir(unreadable) else "file"
            return (
                f"{line}\n"
                f"  expected: a {kind} that this user may read\n"
                f"  run ls -ld {shlex.quote(str(unreadable))} to see its owner and mode, and ask the owner for access"
            )
        folder = shlex.quote(str(existing_folder(Path(error.filename))))
        return (
            f"{line}\n"
            "  expected: a folder that this user may write to\n"
            f"  run ls -ld {folder} to see its owner and mode{advice.format('folder')}"
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and error.filename is not None:
        return f"{line}\n  expected an existing file or folder, or a path that can be created; check the path"
    if error.errno == errno.EISDIR and error.filename is not None:
        return f"{line}\n  expected a file with this name\n  restore the file from a copy, or move the folder away"
    return line


def room_remedy(error: OSError, advice: str) -> str:
    """Return two lines for an error in NO_ROOM: the expectation and the remedy; `advice` is to use another disk."""
    folder = shlex.quote(str(existing_folder(Path(error.filename or "."))))
    again = f"{advice}; then run the same command again"
    if error.errno == errno.EDQUOT:
        return (
            "  expected: a quota with room for the files of a run, in bytes and in number\n"
            f"  run quota -s to see this user's quota; delete files, or have the quota raised{again}"
        )
    if error.errno == errno.EFBIG:
        return (
            f"  expected: no limit on the size of a file below that of a checkpoint\n  run ulimit -f unlimited{again}"
        )
    is_without_inodes = False
    with suppress(OSError):
        is_without_inodes = has_no_inodes(Path(error.filename or "."))
    if is_without_inodes:
        return (
            "  expected: free inodes; deleting large files does not help, deleting many small ones does\n"
            f"  run df -i {folder} to see them{again}"
        )
    return f"  expected: free space on that disk, and in the quota, for the files of a run\n  free some space{again}"


def check_creatable(path: Path) -> None:
    """Raise OSError, naming the path, if no file can be created in its folder or, if missing, in the nearest one above.

    Called before long computations, so that their result is not lost at the end.
    """
    folder = existing_folder(path.parent)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        error.filename = str(path)
        raise


def unreadable_path(path: Path) -> Path | None:
    """Return what denies this user to read a path: the path itself or a folder above it; None if nothing does."""
    path = path.absolute()
    for folder in reversed(path.parents):
        if os.path.isdir(folder) and not os.access(folder, os.X_OK):
            return folder
    if os.path.lexists(path) and not os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)):
        return path
    return None
