"""Read samples from files: a folder with one sub-folder per class, images without classes, or listed files.

photos/train/cat/1.jpg       Sample("cat/1", Path("photos/train/cat/1.jpg"), (0,), "jpg")
photos/train/dog/7.png  →    Sample("dog/7", Path("photos/train/dog/7.png"), (1,), "png")
"""

from __future__ import annotations

import logging
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from data.checks import printable
from data.errors import DataError
from data.extras.sources.samples import Sample
from data.extras.sources.walk import class_folders_in, files_below, matching
from data.index.names import Names, preview
from data.index.shard import IMAGES, is_image

MAX_KINDS = 10  # kinds of skipped files that a warning lists


class ListedFile(NamedTuple):
    """An image in a list of files: its path below a root folder, and its class ids."""

    name: str
    labels: tuple[int, ...] | None  # None: intentionally without labels


# ----------------------------------------------------------------------------------------------- folders


def class_folders(root: str | os.PathLike[str]) -> Iterator[Sample]:
    """Yield the samples of a folder with one sub-folder per class; ids follow the sorted names (`folder_classes`).

    Raises DataError if a class has no images; logs a warning about other files.
    """
    entries: list[ListedFile] = []
    skipped: Counter[str] = Counter()
    sub_folders: dict[str, list[str]] = {}
    for label, class_name in enumerate(folder_classes(root, skipped)):
        folder = Path(root, class_name)
        others: Counter[str] = Counter()
        paths = images_below(folder, others)
        if not paths:
            contents = f"; it contains {in_words(others)}" if others else ""
            raise DataError(
                f"{folder}: class {label} has no images{contents}\n"
                f"  expected {', '.join(IMAGES)}: convert the files, or remove the folder"
            )
        skipped += others
        sub_folders[class_name] = sub_folders_with_images(folder, paths)
        for path in paths:
            entries.append(ListedFile(str(path.relative_to(root)), (label,)))
    warn_of_others(root, skipped)
    merged = merged_folders(sub_folders)
    if merged:
        logging.getLogger(__name__).warning("%s: %s", root, merged)
    yield from read_files(root, entries)


def unlabelled_folder(root: str | os.PathLike[str]) -> Iterator[Sample]:
    """Yield all images below a folder as samples without labels; raises DataError if there are none."""
    skipped: Counter[str] = Counter()
    paths = images_below(Path(root), skipped)
    if not paths:
        raise DataError(f"{root}: no images in this folder or below; expected {', '.join(IMAGES)}")
    warn_of_others(root, skipped)
    yield from read_files(root, [ListedFile(str(path.relative_to(root)), None) for path in paths])


def images_below(folder: Path, skipped: Counter[str]) -> list[Path]:
    """Return all images below a folder, following links; count other files in `skipped` by kind (see `files_below`)."""
    paths = []
    for path in files_below(folder, skipped):
        if is_image(path):
            paths.append(path)
        else:
            skipped[path.suffix or path.name] += 1
    return paths


def sub_folders_with_images(folder: Path, images: Iterable[Path]) -> list[str]:
    """Return the names of a class folder's direct sub-folders that contain some of these images, in order."""
    names: dict[str, None] = {}
    for path in images:
        first, *below = path.relative_to(folder).parts
        if below:
            names[first] = None
    return list(names)


def merged_folders(sub_folders: Mapping[str, Sequence[str]]) -> str:
    """Return a note on class folders with several sub-folders, which may be the intended classes; "" if there are none.

    `sub_folders` maps each class to its sub-folders with images.
    """
    merged = {name: folders for name, folders in sub_folders.items() if len(folders) > 1}
    if not merged:
        return ""
    examples = [f"{printable(name)}: {preview(folders)}" for name, folders in list(merged.items())[:3]]
    more = f"; and {len(merged) - 3} more" if len(merged) > 3 else ""
    return f"images in sub-folders count for the class of the folder above ({'; '.join(examples)}{more})"


def warn_of_others(root: str | os.PathLike[str], skipped: Counter[str]) -> None:
    """Log a warning about files that `images_below` has skipped, if any."""
    if skipped:
        kinds = in_words(skipped)
        message = "%s: some files are not packed, because they are hidden or not %s: %s"
        logging.getLogger(__name__).warning(message, root, ", ".join(IMAGES), kinds)


def in_words(kinds: Counter[str]) -> str:
    """Return counts of files by kind as text: "3 × .tif, 1 × hidden file"."""
    return ", ".join(f"{count} × {printable(kind)}" for kind, count in kinds.most_common(MAX_KINDS))


def folder_classes(root: str | os.PathLike[str], skipped: Counter[str] | None = None) -> Names:
    """Return the names of the class folders in a folder, in the order of ids; raises DataError if there are none.

    Files in system folders, such as @eaDir, are counted in `skipped`.
    """
    if Path(root).is_file():
        raise DataError(
            f"{root} is a file, expected a folder of class folders\n  for a list of paths, use the source table"
        )
    names = class_folders_in(Path(root), skipped) if Path(root).is_dir() else []
    for name in names:
        refuse_loop(Path(root, name))
    if not names:
        files = list(Path(root).glob("[!.]*.*"))
        images = sum(map(is_image, files))
        tars = sum(path.suffix == ".tar" for path in files)
        contents = f"; found {images} images, {tars} tars" if images or tars else ""
        remedy = f"sort the images into class folders, as in {root}/cat/1.jpg, or add --unlabelled"
        if tars:
            remedy = f"tars need no packing: python -m jobs index {shlex.quote(str(root))}"
        raise DataError(f"{root}: expected one sub-folder per class, found none{contents}\n  {remedy}")
    return tuple(names)


def refuse_loop(folder: Path) -> None:
    """Raise DataError if a class folder is a link to one of its parents, because the class would contain all images."""
    if folder.absolute().parent.resolve().is_relative_to(folder.resolve()):
        raise DataError(
            f"{folder} links to a folder above it, so this class would contain all images\n  remove the link"
        )


def refuse_undecodable(name: str, path: Path, reason: str) -> None:
    """Raise DataError if a name in the path of a file is not UTF-8; `reason` says why it must be."""
    # On Linux, file names are bytes; keys and tables are text.
    is_utf8 = os.fsencode(name).decode("utf-8", "replace") == name
    if not is_utf8:
        raise DataError(f"{os.fsencode(path)!r}: its name must be UTF-8, because {reason}; rename it")


def loose_images(root: Path) -> tuple[list[Path], str]:
    """Return the images directly in a folder of class folders, and a note that they are excluded; "" if none."""
    images = [path for path in sorted(root.glob("[!.]*")) if path.is_file() and is_image(path)]
    if not images:
        return [], ""
    return images, f"{len(images):,} images outside the class folders are excluded, first {images[0].name}"


def read_files(root: str | os.PathLike[str], entries: Iterable[ListedFile]) -> Iterator[Sample]:
    """Yield samples of listed files, ordered by the hash of their names; raises DataError for an invalid file.

    Each sample gets a unique key (`keys_of`).
    """
    listed = sorted(entries, key=lambda entry: sha256(os.fsencode(entry.name)).digest())
    for entry, key in zip(listed, keys_of([entry.name for entry in listed]), strict=True):
        path = Path(root, entry.name)
        refuse_undecodable(entry.name, path, "it becomes the key")
        extension = path.suffix[1:].lower()
        if not path.exists():
            raise DataError(f"the file {path} does not exist\n  expected paths relative to {root}, or absolute ones")
        if extension not in IMAGES or not path.is_file():
            raise DataError(f"{path}: expected an image file, one of {', '.join(IMAGES)}")
        yield Sample(key, path, entry.labels, extension)


def keys_of(names: Sequence[str]) -> list[str]:
    """Return a distinct key for each file name; raises DataError if a file is listed twice.

        cat/1.jpg  cat/v1.2.jpg  ../im/3.jpg  /im/4.jpg     →    cat/1  cat/v1_2  im/3  im/4
        cat/5.jpg  cat/5.png                                →    cat/5_jpg  cat/5_png

    A key has no components `.` and `..`: other programs refuse to extract a tar with such names. In its last component,
    a dot would start the extension.
    """
    keys = [key_of(name) for name in names]
    times = Counter(keys)
    if len(times) == len(keys):
        return keys
    for number, name in enumerate(names):
        if times[keys[number]] > 1:
            keys[number] += "_" + Path(name).suffix[1:]
    first: dict[str, str] = {}
    for key, name in zip(keys, names, strict=True):
        if key in first:
            same = "are the same file" if os.path.normpath(first[key]) == os.path.normpath(name) else "get the same key"
            raise DataError(
                f"{printable(first[key])} and {printable(name)} {same}, {printable(key)}\n"
                "  expected each image once, with a unique key; remove or rename one of the two"
            )
        first[key] = name
    return keys


def key_of(name: str) -> str:
    """Return the key of one file name, without its extension; two files may have the same key."""
    path = os.path.normpath(name.removesuffix(Path(name).suffix)).lstrip("/")
    while path.startswith("../"):
        path = path[3:]
    folder, slash, base = path.rpartition("/")
    return folder + slash + base.replace(".", "_")


def files_of(source: str | os.PathLike[str], pattern: str) -> list[Path]:
    """Return the files in a folder, the files that match a pattern such as a/train-*.tar, or the file itself.

    Raises DataError if there are none.
    """
    path = Path(source)
    if path.is_dir():
        paths = sorted(path.glob(f"[!.]{pattern}"))
    else:
        paths = matching(path)
        missing = [str(file) for file in paths if not file.exists()]
        if missing:
            raise DataError(f"{preview(missing)}: file not found")
    if not paths:
        raise DataError(f"{path}: no files match {pattern}")
    return paths
