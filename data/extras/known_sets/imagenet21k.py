"""ImageNet-21k: winter21_whole.tar.gz, fall11_whole.tar, or a folder of their class tars or class folders.

The archives hold one tar a class, 1.1 and 1.3 TB in all. They are read from the beginning to the end, class after
class, and nothing of them is unpacked to disk: shards hold a few classes each, which the order of training mixes as
well as if they were shuffled (docs/design/order.md, "How good is the shuffle?").

    winter21_whole.tar.gz
      winter21_whole/n00004475.tar: n00004475_6590.JPEG …     →     Sample("n00004475_6590", b"\\xff\\xd8…", (0,))

A class's id is its place among the sorted WordNet ids, so that all of them have to be known before the first sample. A
folder tells them at once; an archive is read through once for them, unless a text file lists them (`wnids`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from data.errors import DataError
from data.extras.known_sets.archive import warn_of
from data.extras.sources.members import Member, members, tar_members
from data.index.index import Refusals
from data.index.names import Names, preview
from data.sources.samples import Published, Sample, kind_of

WNID = re.compile(r"n\d{8}")
WINTER21 = Published(13_153_500, 19_167, "the winter 2021 release, image-net.org/update-sep-17-2019")
# image-net.org counts 14,197,122 images; those who list what the tar holds count 35 less (MXNet's tutorial of it).
FALL11 = Published(14_197_122, 21_841, "the fall 2011 release, image-net.org", also=(14_197_087,))


def samples(wnids: Path | None, path: Path, split: str = "train") -> Iterator[Sample]:
    """Give the images, class after class in the order of the archive, or of the sorted names of a folder.

    Raises DataError where a class is not among those that `wnids` lists, or comes twice.
    """
    names = classes(wnids, path)
    ids = {wnid: label for label, wnid in enumerate(names)}
    finished: set[str] = set()
    current = ""
    skipped = Refusals()
    for wnid, image in images(path, skipped):
        if wnid != current:
            if wnid not in ids:
                raise DataError(f"{path}: {wnid} is not among its {len(names)} classes: {preview(names)}")
            if wnid in finished:
                raise DataError(f"{path}: the class {wnid} comes twice; expected one tar or folder a class")
            finished.add(wnid)
            current = wnid
        raw = image.read()
        yield Sample(image.base.partition(".")[0], raw, (ids[wnid],), kind_of(raw))
    warn_of(path, skipped)
    lacking = [wnid for wnid in names if wnid not in finished]
    if lacking:
        logging.getLogger(__name__).warning("%s: no images of %d classes: %s", path, len(lacking), preview(lacking))


def images(path: Path, skipped: Refusals) -> Iterator[tuple[str, Member]]:
    """Give every image with the WordNet id of its class, which its tar or its folder is called."""
    for member in members(path):
        wnid, is_tar = class_of(member.name)
        if is_tar:
            for image in tar_members(member.opened(), f"{path}: {wnid}.tar"):
                yield wnid, image
        elif wnid:
            yield wnid, member
        else:
            skipped.add("file that is of no class", member.name)


def class_of(member: str) -> tuple[str, bool]:
    """Return the WordNet id by which a tar, or the folder of a file, is called, or ""; and whether it is the tar."""
    folder, _, base = member.rpartition("/")
    stem, _, extension = base.partition(".")
    if extension == "tar" and WNID.fullmatch(stem):
        return stem, True
    last_folder = folder.rpartition("/")[2]
    if WNID.fullmatch(last_folder):
        return last_folder, False
    return "", False


def classes(wnids: Path | None, path: Path) -> Names:
    """Return the WordNet ids of the classes, sorted; raises DataError where there is none.

    A text file `wnids` lists them, or a folder tells them by its names; or else an archive is read through to its end.
    """
    if wnids is not None:
        names = tuple(sorted(set(wnids.read_text().split())))
    elif path.is_dir():
        # The tars or folders of the classes lie in the folder, or one level below.
        found_names = set()
        for pattern in ("n*", "*/n*"):
            for entry in path.glob(pattern):
                is_class = WNID.fullmatch(entry.stem) and (entry.is_dir() or entry.suffix == ".tar")
                if is_class:
                    found_names.add(entry.stem)
        names = tuple(sorted(found_names))
    else:
        state = path.stat()
        names = archive_names(path, state.st_size, state.st_mtime_ns)
    if not names:
        raise DataError(f"{path}: expected one tar or folder a class, called by its WordNet id, as n00004475.tar")
    return names


@lru_cache(maxsize=2)
def archive_names(path: Path, size: int, changed: int) -> Names:
    """Return the WordNet ids of the classes of an archive; its size and its time tell that it is still the same."""
    logging.getLogger(__name__).warning(
        "%s: read through once for the names of its classes; a text file of them spares this: --wnids FILE", path
    )
    names = set()
    for member in members(path):
        wnid, _ = class_of(member.name)
        if wnid:
            names.add(wnid)
    return tuple(sorted(names))
