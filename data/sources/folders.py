"""Samples of files: a folder of one folder a class, images without classes, or listed files.

photos/train/cat/1.jpg       Sample("cat/1", Path("photos/train/cat/1.jpg"), (0,), "jpg")
photos/train/dog/7.png  →    Sample("dog/7", Path("photos/train/dog/7.png"), (1,), "png")
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from data.checks import printable
from data.errors import DataError
from data.index.names import Names
from data.index.shard import IMAGES, is_image
from data.sources.samples import Sample

MOST_KINDS = 10  # of files that were passed over, that a warning names
HIDDEN = "hidden file"  # or a file in a hidden folder, as .ipynb_checkpoints: a kind of files that are passed over


class ListedFile(NamedTuple):
    """An image in a list of files: its path below some root, and its class ids."""

    name: str
    labels: tuple[int, ...] | None  # None: there are none, on purpose


# ----------------------------------------------------------------------------------------------- folders


def class_folders(root: str | os.PathLike[str]) -> Iterator[Sample]:
    """Give samples of a folder with one sub-folder a class; ids follow the sorted names (`folder_classes`).

    Raises DataError where a class has no images; files that are no images are named in a warning.
    """
    entries: list[ListedFile] = []
    skipped: Counter[str] = Counter()
    for label, class_name in enumerate(folder_classes(root)):
        folder = Path(root, class_name)
        paths = images_below(folder, skipped)
        if not paths:
            raise DataError(f"{folder}: class {label} has no images; remove the folder or fill it")
        for path in paths:
            entries.append(ListedFile(str(path.relative_to(root)), (label,)))
    warn_of_others(root, skipped)
    yield from read_files(root, entries)


def unlabelled_folder(root: str | os.PathLike[str]) -> Iterator[Sample]:
    """Give samples without labels of all images below a folder; raises DataError where there are none."""
    skipped: Counter[str] = Counter()
    paths = images_below(Path(root), skipped)
    if not paths:
        raise DataError(f"{root}: no images here or below; expected {', '.join(IMAGES)}")
    warn_of_others(root, skipped)
    yield from read_files(root, [ListedFile(str(path.relative_to(root)), None) for path in paths])


def images_below(folder: Path, skipped: Counter[str]) -> list[Path]:
    """Return the images of a folder and of those below, sorted; count what is none or hidden, by kind."""
    paths = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        # macOS leaves a `._1.jpg` beside a 1.jpg, which is no image; a notebook copies of images in .ipynb_checkpoints.
        if "/." in f"/{path.relative_to(folder)}":
            skipped[HIDDEN] += 1
        elif not path.is_file():
            skipped["link that leads nowhere, or device"] += 1
        elif is_image(path):
            paths.append(path)
        else:
            skipped[path.suffix or path.name] += 1
    return paths


def warn_of_others(root: str | os.PathLike[str], skipped: Counter[str]) -> None:
    """Log a warning of what `images_below` has passed over, if anything."""
    if skipped:
        kinds = ", ".join(f"{count} × {printable(kind)}" for kind, count in skipped.most_common(MOST_KINDS))
        message = "%s: not packed, being hidden or no %s: %s"
        logging.getLogger(__name__).warning(message, root, ", ".join(IMAGES), kinds)


def folder_classes(root: str | os.PathLike[str]) -> Names:
    """Return the class names of a folder of class folders, in the order of ids; raises DataError where it has none."""
    names = []
    if Path(root).is_dir():
        names = sorted(path.name for path in Path(root).glob("[!.]*") if path.is_dir())
    for name in names:
        refuse_loop(Path(root, name))
    if not names:
        files = list(Path(root).glob("[!.]*.*"))
        images = sum(map(is_image, files))
        tars = sum(path.suffix == ".tar" for path in files)
        what_is_there = f"; found {images} images, {tars} tars" if images or tars else ""
        way_out = f"sort the images into folders of their classes, as {root}/cat/1.jpg; --unlabelled packs them without"
        if tars:
            way_out = f"tars are used as they are: python -m jobs index {root}"
        raise DataError(f"{root}: expected one sub-folder a class, found none{what_is_there}\n  {way_out}")
    return tuple(names)


def refuse_loop(folder: Path) -> None:
    """Raise DataError where the folder of a class is a link to a folder that it lies in: all images would be in it."""
    if folder.absolute().parent.resolve().is_relative_to(folder.resolve()):
        raise DataError(
            f"{folder} is a link to a folder above it, and would be a class of all images\n  remove the link"
        )


def read_files(root: str | os.PathLike[str], entries: Iterable[ListedFile]) -> Iterator[Sample]:
    """Give samples of listed files, in the order of the hash of their names; raises DataError where one is no image."""
    for name, labels in sorted(entries, key=lambda entry: sha256(os.fsencode(entry.name)).digest()):
        path = Path(root, name)
        # A file name is bytes to Linux; a key has to be text.
        is_utf8 = os.fsencode(name).decode("utf-8", "replace") == name
        if not is_utf8:
            raise DataError(f"{os.fsencode(path)!r}: its name is not UTF-8, and would be a sample's key; rename it")
        extension = path.suffix[1:].lower()
        if not path.exists():
            raise DataError(f"there is no file {path}\n  expected paths relative to {root}, or whole ones")
        if extension not in IMAGES or not path.is_file():
            raise DataError(f"{path}: expected an image file, one of {', '.join(IMAGES)}")
        # A dot in the key would be taken for the beginning of the extension, but only in its last part.
        folder, slash, base = name.removesuffix(path.suffix).lstrip("/").rpartition("/")
        yield Sample(folder + slash + base.replace(".", "_"), path, labels, extension)


def files_of(source: str | os.PathLike[str], pattern: str) -> list[Path]:
    """Return the files of a folder, those that a path like a/train-*.tar stands for, or the file itself.

    Raises DataError where there are none.
    """
    path = Path(source)
    if path.is_dir():
        paths = sorted(path.glob(f"[!.]{pattern}"))
    elif "*" in path.name and not path.exists():
        paths = sorted(path.parent.glob(path.name))
    else:
        paths = [path]
    if not paths:
        raise DataError(f"{path}: no {pattern} here")
    return paths
