"""Read ImageNet-21k from winter21_whole.tar.gz, fall11_whole.tar, or a folder of class tars or class folders.

The archives (1.1 and 1.3 TB) contain one tar per class. They are read as a stream, class after class, without unpacking
to disk. Each shard therefore holds only a few classes, and the training order mixes them as well as if the samples had
been shuffled first (docs/design/order.md, "How good is the shuffle?").

    winter21_whole.tar.gz
      winter21_whole/n00004475.tar: n00004475_6590.JPEG …     →     Sample("n00004475_6590", b"\\xff\\xd8…", (0,))

A class id is the index in the sorted list of WordNet ids, so all ids must be known before the first sample. In a
folder, they are the names of the entries. An archive must be read once more to collect them, unless a text file lists
them (`wnids`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from data.errors import DataError
from data.extras.known_sets.archive import log_notes
from data.extras.sources.members import Member, members, tar_members
from data.extras.sources.refusals import Refusals
from data.extras.sources.samples import Published, Sample, kind_of
from data.index.names import Names, preview

WNID = re.compile(r"n\d{8}")
WINTER21 = Published(13_153_500, 19_167, "the winter 2021 release, image-net.org/update-sep-17-2019")
# image-net.org reports 14,197,122 images; the tar contains 35 fewer (according to MXNet's ImageNet-21k tutorial).
FALL11 = Published(14_197_122, 21_841, "the fall 2011 release, image-net.org", also=(14_197_087,))


def samples(wnids: Path | None, path: Path, split: str = "train") -> Iterator[Sample]:
    """Yield the images class by class, in the order of the archive or of the sorted names in a folder.

    Raises DataError if a class is not listed in `wnids`, or occurs twice.
    """
    names = classes(wnids, path)
    ids = {wnid: label for label, wnid in enumerate(names)}
    finished: set[str] = set()
    current = ""
    skipped = Refusals()
    for wnid, image in images(path, skipped):
        if wnid != current:
            if wnid not in ids:
                raise DataError(f"{path}: {wnid} is not one of the {len(names)} classes {preview(names)}")
            if wnid in finished:
                raise DataError(f"{path}: class {wnid} occurs twice; expected one tar or folder per class")
            finished.add(wnid)
            current = wnid
        raw = image.read()
        yield Sample(image.base.partition(".")[0], raw, (ids[wnid],), kind_of(raw))
    log_notes(path, skipped)
    missing = [wnid for wnid in names if wnid not in finished]
    if missing:
        logging.getLogger(__name__).warning("%s: %d classes have no images: %s", path, len(missing), preview(missing))


def images(path: Path, skipped: Refusals) -> Iterator[tuple[str, Member]]:
    """Yield each image with the WordNet id of its class, taken from the name of the class tar or class folder."""
    for member in members(path):
        wnid, is_tar = class_of(member.name)
        if is_tar:
            for image in tar_members(member.opened(), f"{path}: {wnid}.tar"):
                yield wnid, image
        elif wnid:
            yield wnid, member
        else:
            skipped.add("file outside the class tars and class folders", member.name)


def class_of(member: str) -> tuple[str, bool]:
    """Return the WordNet id in a member's name, and whether the member is a class tar.

    The id is the name of a class tar, or of the folder that contains the member; "" if neither is a WordNet id.
    """
    folder, _, base = member.rpartition("/")
    stem, _, extension = base.partition(".")
    if extension == "tar" and WNID.fullmatch(stem):
        return stem, True
    last_folder = folder.rpartition("/")[2]
    if WNID.fullmatch(last_folder):
        return last_folder, False
    return "", False


def classes(wnids: Path | None, path: Path) -> Names:
    """Return the sorted WordNet ids of the classes; raises DataError if there are none.

    They come from the text file `wnids`, from the names in a folder, or from a complete pass over the archive.
    """
    if wnids is not None:
        names = tuple(sorted(set(wnids.read_text().split())))
    elif path.is_dir():
        # Class tars and class folders may be in the folder itself or one level below.
        class_names = set()
        for pattern in ("n*", "*/n*"):
            for entry in path.glob(pattern):
                is_class = WNID.fullmatch(entry.stem) and (entry.is_dir() or entry.suffix == ".tar")
                if is_class:
                    class_names.add(entry.stem)
        names = tuple(sorted(class_names))
    else:
        state = path.stat()
        names = archive_names(path, state.st_size, state.st_mtime_ns)
    if not names:
        raise DataError(f"{path}: expected one tar or folder per class, named by WordNet id, such as n00004475.tar")
    return names


@lru_cache(maxsize=2)
def archive_names(path: Path, size: int, changed: int) -> Names:
    """Collect the WordNet ids of an archive's classes; `size` and `changed` (mtime) are part of the cache key."""
    logging.getLogger(__name__).warning(
        "%s: reading the whole archive to list its classes; to skip this pass, list them in a text file: --wnids FILE",
        path,
    )
    names = set()
    for member in members(path):
        wnid, _ = class_of(member.name)
        if wnid:
            names.add(wnid)
    return tuple(sorted(names))
