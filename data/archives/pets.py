"""Oxford-IIIT Pets: 37 breeds of cats and dogs (Parkhi et al. 2012), from images.tar.gz and annotations.tar.gz.

The images lie in one flat folder; which of them are trained on and which are tested on stands in trainval.txt and
test.txt, a line each: `Abyssinian_201 1 1 1`, the image, its class from 1 on, its species and its breed.

    samples(Path("downloads"), "test")      Sample("Abyssinian_201", b"\\xff\\xd8…", (0,))

The archive holds more than the lists name: 41 images, and .mat files that were left in it. A few files that are called
.jpg are GIFs, which become PNGs. Both are said.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data.archives.images import as_image, tell
from data.archives.members import first_present, members, read_members
from data.archives.published import Published
from data.errors import DataError
from data.index.names import Names, some
from data.index.refusals import Refusals
from data.shards.sources import Sample

PAGE = "https://www.robots.ox.ac.uk/~vgg/data/pets/"
IMAGES = ("images.tar.gz", "images.tar", "images")
ANNOTATIONS = ("annotations.tar.gz", "annotations.tar", "annotations")
LISTS = {"train": "trainval.txt", "test": "test.txt"}
SOURCE = "Parkhi et al. 2012; the owners' trainval.txt and test.txt"
PUBLISHED = {"train": Published(3_680, 37, SOURCE), "test": Published(3_669, 37, SOURCE)}


def samples(folder: Path, split: str) -> Iterator[Sample]:
    """The images of a split, in the order of the archive; raises DataError where one of its list is not there."""
    lists = read_lists(folder)
    listed = lists[split]
    archive = first_present(folder, IMAGES, PAGE)
    passed_over = Refusals()
    seen: set[str] = set()
    in_lists = lists["train"].keys() | lists["test"].keys()
    for member in members(archive):
        key, _, extension = member.base.partition(".")
        if extension.lower() != "jpg":
            passed_over.add_type(extension, member.base)
        elif key not in in_lists:
            passed_over.add("image that no list names", member.base)
        elif key in listed:
            seen.add(key)
            image, kind = as_image(member.read(), member.base, passed_over)
            yield Sample(key, image, (listed[key],), kind)
    tell(archive, passed_over)
    lacking = sorted(listed.keys() - seen)
    if lacking:
        raise DataError(f"{archive}: lacks {len(lacking)} images of {LISTS[split]}: {some(lacking)}\n  {PAGE}")


def classes(folder: Path) -> Names:
    """The breeds, in the order of their ids: an image is called by its breed and a number."""
    names: dict[int, str] = {}
    for listed in read_lists(folder).values():
        for key, label in listed.items():
            names[label] = key.rpartition("_")[0]
    return tuple(names[label] for label in sorted(names))


def read_lists(folder: Path) -> dict[str, dict[str, int]]:
    """Of each split the images that its list names, with their class ids from 0 on.

    Raises DataError where a line is no such.
    """
    archive = first_present(folder, ANNOTATIONS, PAGE)
    contents = read_members(archive, list(LISTS.values()))
    lists: dict[str, dict[str, int]] = {}
    for split, name in LISTS.items():
        lists[split] = {}
        for line in contents[name].decode().splitlines():
            if not line or line.startswith("#"):
                continue
            words = line.split()
            if len(words) < 2 or not words[1].isdigit() or words[1] == "0":
                raise DataError(f"{archive}: {name}: {line!r}, expected an image and its class from 1 on")
            lists[split][words[0]] = int(words[1]) - 1
    return lists
