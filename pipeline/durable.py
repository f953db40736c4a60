"""Writes that survive a power cut: a name is visible only when what it names is whole, and durable when we say so."""

import errno
import os
from contextlib import suppress
from pathlib import Path


def write_file(path: Path, blob: bytes | memoryview) -> None:
    """Write and fsync; the name is not final, the caller renames the folder."""
    with open(path, "wb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no fsync of folders
            raise
    finally:
        os.close(handle)


def make_folder(path: Path, top: Path) -> None:
    """Create a folder below `top` and make its name, and that of every folder up to `top`, durable.

    A folder that is there may have been made a moment ago by somebody who did not care.
    """
    path.mkdir(parents=True, exist_ok=True)
    for parent in path.parents:
        sync_folder(parent)
        if parent == top.parent:
            break


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`, visible only when whole and durable."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_file(temporary, text.encode())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)
