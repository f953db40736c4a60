"""Read ObjectNet (Barbu et al. 2019), a test set of household objects, from objectnet-1.0.zip or its unpacked folder.

1. Each folder of images is one object. 113 of the 313 objects also occur in ImageNet-1k, most as one class and some as
   several. The files in mappings/ give the class ids: folder → ObjectNet name → ImageNet names → lines in the list of
   ImageNet names → class ids.
2. Only these 113 objects are packed, and each image has all class ids of its object: a prediction is correct if it
   matches any of them.
3. Each image has a red border of two pixels, which marks images that must not be used for training. It is cropped off.

    objectnet-1.0/images/alarm_clock/0123.png     →     Sample("alarm_clock/0123", PNG without its border, (409, 530))

The labels are class ids of ImageNet-1k, 0 … 999. The zip is encrypted (objectnet.dev publishes the password), and
decrypting it in Python would take days: unzip it first, and use the path of the folder. The licence permits use for
testing only (objectnet.dev).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.extras.known_sets.archive import encode, log_notes, read_members
from data.extras.sources.members import members
from data.extras.sources.refusals import Refusals
from data.extras.sources.samples import Published, Sample
from data.index.names import Names

FOLDERS = "folder_to_objectnet_label.json"
TO_IMAGENET = "objectnet_to_imagenet_1k.json"
IMAGENET_NAMES = "imagenet_to_label_2012_v2"  # one name per line
IMAGENET_LINES = "pytorch_to_imagenet_2012_id.json"  # class id → line number from 0
BORDER = 2  # pixels, objectnet.dev
SOURCE = "the 113 of 313 classes, 18,574 of 50,273 images, that are in ImageNet-1k: Barbu et al. 2019, objectnet.dev"
PUBLISHED = {"test": Published(18_574, 113, SOURCE)}


def samples(path: Path, split: str = "test") -> Iterator[Sample]:
    """Yield the images of objects that also occur in ImageNet-1k; raises DataError if a file cannot be read."""
    import cv2

    labels_of = labels_by_folder(path)
    notes = Refusals()
    for member in members(path):
        parts = member.name.split("/")
        if len(parts) < 3 or parts[-3] != "images":
            continue
        folder = parts[-2]
        if folder not in labels_of:
            raise DataError(f"{path}: the folder of {member.name} is not listed in {FOLDERS}; unpack the archive again")
        labels = labels_of[folder]
        if not labels:
            notes.add("image of an object that is not in ImageNet-1k", member.name)
            continue
        pixels = cv2.imdecode(np.frombuffer(member.read(), np.uint8), cv2.IMREAD_COLOR)  # H, W, BGR
        if pixels is None or min(pixels.shape[:2]) <= 2 * BORDER:
            raise DataError(f"{member.name}: not an image, or too small to remove its border; unpack the archive again")
        # Crop the border off, and count images whose border is not red.
        inside = pixels[BORDER:-BORDER, BORDER:-BORDER]
        red = np.full_like(pixels, (0, 0, 255))
        red[BORDER:-BORDER, BORDER:-BORDER] = inside
        if not np.array_equal(red, pixels):
            notes.add("image with a border that is not red, cropped anyway", member.name)
        image = encode(inside[..., ::-1])
        key = f"{folder}/{member.base.rpartition('.')[0].replace('.', '_')}"
        yield Sample(key, image, labels, "png")
    log_notes(path, notes)


def objects(path: Path) -> Names:
    """Return the folder names of the objects that also occur in ImageNet-1k."""
    return tuple(folder for folder, labels in labels_by_folder(path).items() if labels)


def labels_by_folder(path: Path) -> dict[str, tuple[int, ...]]:
    """Return {folder: sorted ImageNet-1k class ids}; the tuple is empty if ImageNet does not have the object.

    Raises DataError if the mapping files cannot be read or contradict each other.
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
        raise DataError(
            f"{path}: {IMAGENET_LINES} does not match the {len(lines)} lines of {IMAGENET_NAMES}; unpack the archive "
            "again"
        )
    ids: dict[str, list[int]] = {}
    for label, line in line_of.items():
        ids.setdefault(lines[line].strip(), []).append(label)
    labels: dict[str, tuple[int, ...]] = {}
    for folder, name in object_of.items():
        folder_ids = []
        for imagenet_name in imagenet_of.get(name, []):
            # ImageNet has two classes named "crane". An ambiguous name would count wrong predictions as correct.
            if len(ids.get(imagenet_name, [])) != 1:
                raise DataError(
                    f"{path}: {TO_IMAGENET}: {imagenet_name!r} is not the name of exactly one ImageNet class; unpack "
                    "the archive again"
                )
            folder_ids += ids[imagenet_name]
        labels[folder] = tuple(sorted(folder_ids))
    return labels
