"""Read ImageNet-1k (ILSVRC 2012) from its archives or from folders, and the ReaL labels of its validation images.

1. Training images: ILSVRC2012_img_train.tar (a tar that contains one tar per class), a folder of the class tars, or a
   folder with one sub-folder per class. All three give the same samples in the same order, because images are sorted by
   the hash of their names.
2. Validation images: ILSVRC2012_img_val.tar or a folder of its files, with the classes from the devkit archive, a text
   file or real.json; or the usual folder with one sub-folder per class.
3. A class id is the index in the sorted list of WordNet ids, 0 … 999. Only the devkit itself uses a different order.

    ILSVRC2012_img_train.tar
      n01440764.tar: n01440764_10026.JPEG …     →     Sample("n01440764_10026", b"\\xff\\xd8…", (0,))
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.extras.known_sets.archive import log_notes, read_members
from data.extras.sources.folders import folder_classes
from data.extras.sources.members import is_compressed
from data.extras.sources.refusals import Refusals
from data.extras.sources.samples import Published, Sample
from data.extras.sources.tar_offsets import mapped, members
from data.extras.sources.walk import files_below
from data.index.names import Names, preview
from data.index.shard import IMAGES, is_image

PAGE = "https://image-net.org/download.php"
SOURCE = "Russakovsky et al. 2015, table 2"
PUBLISHED = {"train": Published(1_281_167, 1_000, SOURCE)}
PUBLISHED_VALIDATION = Published(50_000, 1_000, SOURCE)
PUBLISHED_REAL = Published(46_837, 1_000, "Beyer et al. 2020; their real.json has 50,000 lists, 3,163 of them empty")
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


class Stored(NamedTuple):
    """Location of an image or class tar: an offset in a tar, or a separate file."""

    name: str  # n01440764_10026.JPEG, n01440764.tar
    place: Path  # the tar, or the folder of the separate file
    label: int = -1  # class id of a training image
    offset: int = 0  # bytes from the beginning of the tar
    size: int = -1  # bytes; −1 for a separate file

    def sample(self, labels: Sequence[int]) -> Sample:
        """Return this image as a sample: bytes read from the tar, or the path of a separate file."""
        key = self.name.partition(".")[0]
        if self.size < 0:
            return Sample(key, self.place / self.name, tuple(labels))
        # Open the tar for each image: a thousand open files exceed the limit of some systems.
        with open(self.place, "rb") as file:
            file.seek(self.offset)
            return Sample(key, file.read(self.size), tuple(labels))


def stored_in(tar: Path) -> list[Stored]:
    """List the files of a tar, sorted by name."""
    files = []
    with open(tar, "rb") as opened, mapped(opened) as content:
        for name, offset, size in members(content, str(tar), Refusals()):
            files.append(Stored(name.decode(), tar, offset=offset, size=size))
    return sorted(files, key=attrgetter("name"))


# ------------------------------------------------------------------------------------------ training images


def class_tars(path: Path) -> list[Stored]:
    """Return the class tars of a tar or a folder, sorted by name; an empty list for a folder of class folders."""
    if not path.is_dir():
        return stored_in(path)
    tars = []
    for file in sorted(path.glob("[!.]*.tar")):
        tars.append(Stored(file.name, file, size=file.stat().st_size))
    return tars


def train(path: Path, split: str = "train") -> Iterator[Sample]:
    """Yield the training images, shuffled by the hash of their names; raises DataError if a tar is damaged."""
    images: list[Stored] = []
    tars = class_tars(path)
    for label, tar in enumerate(tars):
        name = f"{path}: {tar.name}" if tar.place == path else str(tar.place)
        with open(tar.place, "rb") as file, mapped(file) as content:
            for member, offset, size in members(content[tar.offset : tar.offset + tar.size], name, Refusals()):
                images.append(Stored(member.decode(), tar.place, label, tar.offset + offset, size))
    # A folder with one sub-folder per class.
    if path.is_dir() and not tars:
        skipped = Refusals()
        for label, class_name in enumerate(folder_classes(path)):
            folder = path / class_name
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    extension = entry.name.rpartition(".")[2].lower()
                    if extension in IMAGES:
                        images.append(Stored(entry.name, folder, label))
                    else:
                        skipped.add_type(extension, f"{class_name}/{entry.name}")
        log_notes(path, skipped)
    # Sorting by the hash of the names mixes the classes, and does not depend on how the images are stored.
    images.sort(key=lambda image: sha256(os.fsencode(image.name)).digest())
    for image in images:
        yield image.sample([image.label])


def train_classes(path: Path) -> Names:
    """Return the sorted WordNet ids of the classes, which are the names of the class tars or class folders."""
    tars = class_tars(path)
    if path.is_dir() and not tars:
        return folder_classes(path)
    return tuple(tar.name.removesuffix(".tar") for tar in tars)


# ---------------------------------------------------------------------------------------- validation images


def validation(wnids: Path | None, path: Path, split: str = "validation") -> Iterator[Sample]:
    """Yield the validation images in the order of their names.

    The classes come from `wnids` (the devkit or a text file), or otherwise from the names of the class folders. Raises
    DataError if neither exists, or if both exist and disagree.
    """
    truth = validation_truth(wnids, path)
    if not truth:
        raise DataError(
            f"{path}: the classes of these images are unknown\n"
            f"  expected one folder per class, or --wnids {DEVKIT} (or a text file with one WordNet id per line)"
        )
    _, labels = np.unique(truth, return_inverse=True)  # indices in the sorted list of WordNet ids
    return labelled_images(path, labels.reshape(-1, 1).tolist(), wnids or path)


def validation_classes(wnids: Path | None, path: Path) -> Names:
    """Return the sorted, distinct WordNet ids of the validation images; an empty tuple if they are unknown."""
    return tuple(sorted(set(validation_truth(wnids, path))))


def validation_truth(wnids: Path | None, path: Path) -> Sequence[str]:
    """Return the WordNet id of each validation image, in the order of the names; an empty list if they are unknown."""
    in_folders: list[Stored] = []  # images in class folders
    if path.is_dir():
        images = validation_images(path)
        if all(image.place != path for image in images):
            in_folders = images
    if wnids is None:
        return [image.place.name for image in in_folders]
    truth = validation_wnids(wnids)
    # `labelled_images` raises an error if the numbers of images and labels differ.
    for image, wnid in zip(in_folders, truth, strict=False):
        if image.place.name != wnid:
            raise DataError(
                f"{path}: {image.name} is in folder {image.place.name}, but its class in {wnids} is {wnid}\n"
                "  move the images to the folders of their classes, or omit wnids"
            )
    return truth


def real(labels: Path, path: Path, split: str = "validation") -> Iterator[Sample]:
    """Yield the validation images with all their labels from real.json (ReaL, Beyer et al. 2020).

    The protocol excludes images without labels. A prediction is correct if it matches any of the labels.
    """
    try:
        truth = json.loads(labels.read_bytes())
        is_list = isinstance(truth, list) and all(isinstance(entry, list) for entry in truth)
    except ValueError:
        is_list = False
    if not is_list:
        raise DataError(f"{labels}: expected real.json, with a list of class ids for each image; download it again")
    for sample in labelled_images(path, truth, labels):
        if sample.labels:
            yield sample


def labelled_images(path: Path, labels: Sequence[Sequence[int]], source: str | os.PathLike[str]) -> Iterator[Sample]:
    """Yield the images of a tar or folder, in the order of their names, with the given labels.

    Raises DataError if the numbers of images and labels differ; the message names `source`, the origin of the labels.
    """
    images = validation_images(path)
    if len(images) != len(labels):
        raise DataError(
            f"{path}: {len(images)} images, but {len(labels)} labels in {source}; expected one label for each image"
        )
    for image, image_labels in zip(images, labels, strict=True):
        yield image.sample(image_labels)


def validation_images(path: Path) -> list[Stored]:
    """Return the images in a tar, or in a folder and its class subfolders, sorted by name."""
    if not path.is_dir():
        return stored_in(path)
    images = []
    for file in files_below(path, Counter()):
        if is_image(file):
            images.append(Stored(file.name, file.parent))
    return sorted(images, key=attrgetter("name"))


# --------------------------------------------------------------------------------------------------- devkit


def validation_wnids(path: Path) -> list[str]:
    """Return the WordNet id of each validation image, from the devkit (archive or folder) or from a text file.

    The devkit numbers the 1,860 synsets of meta.mat from 1, in its own order: first the 1,000 without children, which
    are the classes. Raises DataError if an image has any other number.
    """
    if not path.is_dir() and not is_compressed(path):
        return path.read_text().split()

    from scipy.io import loadmat

    contents = read_members(path, ["meta.mat", GROUND_TRUTH])
    wnid_of: dict[int, str] = {}
    try:
        for synset in loadmat(io.BytesIO(contents["meta.mat"]), squeeze_me=True)["synsets"]:
            if int(synset["num_children"]) == 0:
                wnid_of[int(synset["ILSVRC2012_ID"])] = str(synset["WNID"])
    # For a truncated file, scipy raises many kinds of exceptions.
    except (ValueError, TypeError, KeyError, IndexError, NotImplementedError, OSError) as error:
        raise DataError(
            f"{path}: meta.mat has no table of synsets ({error}); download the devkit again from {PAGE}"
        ) from None
    wnids = []
    unknown: set[str] = set()
    for word in contents[GROUND_TRUTH].split():
        number = int(word)
        if number in wnid_of:
            wnids.append(wnid_of[number])
        else:
            unknown.add(str(number))
    if unknown:
        names = preview(sorted(unknown))
        raise DataError(
            f"{path}: {GROUND_TRUTH} has {names}, but meta.mat has no such class; download the devkit again"
        )
    return wnids
