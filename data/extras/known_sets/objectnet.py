"""ObjectNet (Barbu et al. 2019): a test set of household objects, from objectnet-1.0.zip or the folder it unpacks to.

1. Every folder of images is an object; 113 of the 313 are also in ImageNet-1k, most as one class, some as several. The
   files in mappings/ say which: folder → ObjectNet's name → names of ImageNet → lines of a list of them → class ids.
2. Only these 113 are packed, each image with all the class ids of its object: a prediction is right when it is any.
3. The two pixels of red border, which mark the images so that nobody trains on them unawares, are cut off.

    objectnet-1.0/images/alarm_clock/0123.png     →     Sample("alarm_clock/0123", PNG without its border, (409, 530))

The ids are those of ImageNet-1k, 0 … 999. The zip is encrypted with the password that its owners give, and Python would
take days to decrypt it: unzip it, and name the folder. It may be used for testing alone (objectnet.dev).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.extras.known_sets.archive import encode, read_members, warn_of
from data.extras.sources.members import members
from data.index.index import Refusals
from data.index.names import Names
from data.sources.samples import Published, Sample

FOLDERS = "folder_to_objectnet_label.json"
TO_IMAGENET = "objectnet_to_imagenet_1k.json"
IMAGENET_NAMES = "imagenet_to_label_2012_v2"  # a name a line
IMAGENET_LINES = "pytorch_to_imagenet_2012_id.json"  # class id → line, from 0 on
BORDER = 2  # pixels, objectnet.dev
SOURCE = "the 113 of 313 classes, 18,574 of 50,273 images, that are in ImageNet-1k: Barbu et al. 2019, objectnet.dev"
PUBLISHED = {"test": Published(18_574, 113, SOURCE)}


def samples(path: Path, split: str = "test") -> Iterator[Sample]:
    """Give the images of objects that ImageNet-1k has too; raises DataError where a file cannot be read."""
    import cv2

    labels_of = labels_by_folder(path)
    notes = Refusals()
    for member in members(path):
        parts = member.name.split("/")
        if len(parts) < 3 or parts[-3] != "images":
            continue
        folder = parts[-2]
        if folder not in labels_of:
            raise DataError(f"{path}: {member.name}: its folder is not in {FOLDERS}; unpack the archive again")
        labels = labels_of[folder]
        if not labels:
            notes.add("image of an object that ImageNet-1k lacks", member.name)
            continue
        pixels = cv2.imdecode(np.frombuffer(member.read(), np.uint8), cv2.IMREAD_COLOR)  # H, W, BGR
        if pixels is None or min(pixels.shape[:2]) <= 2 * BORDER:
            raise DataError(f"{member.name}: no image, or none that has a border; unpack the archive again")
        # The border is cut off; where it is not red, that is counted.
        inside = pixels[BORDER:-BORDER, BORDER:-BORDER]
        red = np.full_like(pixels, (0, 0, 255))
        red[BORDER:-BORDER, BORDER:-BORDER] = inside
        if not np.array_equal(red, pixels):
            notes.add("image whose border is not red, cut all the same", member.name)
        image = encode(inside[..., ::-1])
        key = f"{folder}/{member.base.rpartition('.')[0].replace('.', '_')}"
        yield Sample(key, image, labels, "png")
    warn_of(path, notes)


def objects(path: Path) -> Names:
    """Return the objects that ImageNet-1k has too, by their folders."""
    return tuple(folder for folder, labels in labels_by_folder(path).items() if labels)


def labels_by_folder(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the class ids of ImageNet-1k of every folder, sorted; none where ImageNet lacks the object.

    Raises DataError where the mapping files do not fit together.
    """
    contents = read_members(path, [FOLDERS, TO_IMAGENET, IMAGENET_NAMES, IMAGENET_LINES])
    try:
        lines = contents[IMAGENET_NAMES].decode().splitlines()
        line_of = {int(label): int(line) for label, line in json.loads(contents[IMAGENET_LINES]).items()}
        object_of = dict(json.loads(contents[FOLDERS]))
        imagenet_of = {name: names.split("; ") for name, names in json.loads(contents[TO_IMAGENET]).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{path}: mappings/ cannot be read ({error}); unpack the archive again") from None
    if sorted(line_of.values()) != list(range(len(lines))):
        raise DataError(f"{path}: {IMAGENET_LINES} and the {len(lines)} lines of {IMAGENET_NAMES} do not fit together")
    ids: dict[str, list[int]] = {}
    for label, line in line_of.items():
        ids.setdefault(lines[line].strip(), []).append(label)
    labels: dict[str, tuple[int, ...]] = {}
    for folder, name in object_of.items():
        folder_ids = []
        for imagenet_name in imagenet_of.get(name, []):
            # ImageNet has two cranes; a name that means two classes would count a wrong one as right.
            if len(ids.get(imagenet_name, [])) != 1:
                raise DataError(f"{path}: {TO_IMAGENET}: {imagenet_name!r} is the name of no one class of ImageNet")
            folder_ids += ids[imagenet_name]
        labels[folder] = tuple(sorted(folder_ids))
    return labels
