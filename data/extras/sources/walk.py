"""Find the files below a folder; every source of images uses this walk.

Links are followed, as in torchvision and timm, with two exceptions: links to a folder above themselves, and, in a
linked folder, links to a folder already read. Without the second, n folders linked to each other have n! paths. Hidden
files, and folders that operating systems and storage devices create, are skipped and counted, never read as images or
classes.

    photos/cat/1.jpg                        photos/cat/1.jpg
    photos/cat/more -> /store/more    →     photos/cat/more/7.jpg       (from the link)
    photos/cat/@eaDir/1.jpg/thumb.jpg       skipped["file in a system folder (@eaDir)"] == 1
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from braceexpand import braceexpand

Identity: TypeAlias = tuple[int, int]  # device and inode of a folder

# Thumbnails, recycle bins, snapshots and indexes of: Synology, QNAP, Windows, ext4, zip files made on macOS, AFP.
SYSTEM_FOLDERS = frozenset(
    {
        *("@eaDir", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot"),
        *("$RECYCLE.BIN", "RECYCLER", "System Volume Information", "lost+found"),
        *("__MACOSX", "Network Trash Folder", "Temporary Items"),
    }
)
HIDDEN = "hidden file"  # includes files in hidden folders, such as .ipynb_checkpoints
LOOP = "link to a folder above it"
READ_BEFORE = "link to a folder already read, in a linked folder"
NO_FILE = "broken link or device"


def files_below(folder: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield the files below a folder, sorted by name in each folder; count skipped files by kind in `skipped`.

    Raises OSError if a folder cannot be listed.
    """
    # Parents count as folders above too: a link in a class folder may lead to the folder of all classes.
    parents = {*folder.absolute().parents, *folder.resolve().parents}
    yield from _walk(folder, skipped, tuple(map(_identity, parents)), set(), 0)


def matching(pattern: str | os.PathLike[str]) -> list[Path]:
    """Expand `{000..999}` in a path, and `*` in its last part, as for remote URLs, and return the files.

    The path of an existing file, and a pattern that matches nothing, are returned unchanged.
    """
    if Path(pattern).exists():
        return [Path(pattern)]
    paths: list[Path] = []
    for name in braceexpand(os.fspath(pattern), escape=False):
        path = Path(name)
        # Only `*` is a pattern; `?` and `[` are letters of a name.
        literal = path.name.replace("[", "[[]").replace("?", "[?]")
        matches = sorted(path.parent.glob(literal)) if "*" in path.name and not path.exists() else []
        paths += matches or [path]
    return paths


def class_folders_in(root: Path, skipped: Counter[str] | None = None) -> list[str]:
    """Return the sorted names of a folder's sub-folders, except hidden and system folders.

    Files in system folders are counted in `skipped`.
    """
    names = []
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if not entry.is_dir() or entry.name.startswith("."):
            continue
        if entry.name not in SYSTEM_FOLDERS:
            names.append(entry.name)
        elif skipped is not None:
            _count_skipped(Path(entry.path), skipped)
    return names


def _walk(
    folder: Path, skipped: Counter[str], above: tuple[Identity, ...], read: set[Identity], links: int
) -> Iterator[Path]:
    """Yield the files below a folder; `links` is the number of links in its path.

    `read` is the set of folders that this walk has read so far; it is updated in place.
    """
    identity = _identity(folder)
    if identity in above:
        skipped[LOOP] += 1
        return
    if links > 1 and folder.is_symlink() and identity in read:
        skipped[READ_BEFORE] += 1
        return
    read.add(identity)
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        try:
            is_folder = entry.is_dir()
            is_file = entry.is_file()
        except OSError as error:
            # Linux follows at most 40 links in a path; a link to itself needs more.
            if error.errno != errno.ELOOP:
                raise
            is_folder = False
            is_file = False
        if is_folder and (entry.name.startswith(".") or entry.name in SYSTEM_FOLDERS):
            _count_skipped(path, skipped)
        elif is_folder:
            yield from _walk(path, skipped, (*above, identity), read, links + entry.is_symlink())
        # macOS writes a `._1.jpg` next to a 1.jpg on foreign file systems; it is not an image.
        elif entry.name.startswith("."):
            skipped[HIDDEN] += 1
        elif is_file:
            yield path
        else:
            skipped[NO_FILE] += 1


def _identity(folder: Path) -> Identity:
    """Return the identity of a folder, which is the same under all its names."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def _count_skipped(folder: Path, skipped: Counter[str]) -> None:
    """Add the number of files below a hidden or system folder to `skipped`, without following links."""
    kind = HIDDEN if folder.name.startswith(".") else f"file in a system folder ({folder.name})"
    for _, _, names in os.walk(folder):
        if names:
            skipped[kind] += len(names)
