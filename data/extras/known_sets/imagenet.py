"""ImageNet-1k (ILSVRC 2012), from its archives or from folders, and ReaL, other labels for its validation images.

1. Training images: ILSVRC2012_img_train.tar, a tar of one tar a class, or a folder of these tars, or one of a folder a
   class. All three give the same samples in the same order, since images are sorted by the hash of their names.
2. Validation images: ILSVRC2012_img_val.tar or a folder of its files, with their classes from the devkit's archive, a
   text file or real.json; or folders of one class each, as most people keep them.
3. A class's id is its image among the sorted WordNet ids, 0 … 999, as everywhere but in the devkit itself.

    ILSVRC2012_img_train.tar
      n01440764.tar: n01440764_10026.JPEG …     →     Sample("n01440764_10026", b"\\xff\\xd8…", (0,))
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.extras.known_sets.archive import read_members, warn_of
from data.extras.sources.members import is_compressed
from data.index.index import Refusals
from data.index.names import Names, preview
from data.index.shard import IMAGES, is_image
from data.index.tar import mapped, members
from data.sources.folders import folder_classes
from data.sources.samples import Published, Sample

PAGE = "https://image-net.org/download.php"
SOURCE = "Russakovsky et al. 2015, table 2"
PUBLISHED = {"train": Published(1_281_167, 1_000, SOURCE)}
PUBLISHED_VALIDATION = Published(50_000, 1_000, SOURCE)
PUBLISHED_REAL = Published(46_837, 1_000, "Beyer et al. 2020; their real.json has 50,000 lists, 3,163 of them empty")
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


class Stored(NamedTuple):
    """Where an image lies, or the tar of a class: in a tar from an offset on, or in a file of its own."""

    name: str  # n01440764_10026.JPEG, n01440764.tar
    place: Path  # the tar, or the folder of the image's file
    label: int = -1  # of a training image
    offset: int = 0  # bytes from the beginning of the tar
    size: int = -1  # bytes; −1 for a file of its own

    def sample(self, labels: Sequence[int]) -> Sample:
        """Return the sample of this image, read from its tar; a file of its own is left to be read later."""
        key = self.name.partition(".")[0]
        if self.size < 0:
            return Sample(key, self.place / self.name, tuple(labels))
        # Opened anew for each image: a thousand tars are more than a process may hold open everywhere.
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
    """Return the tars of the classes, sorted by name, from a tar or a folder of them; none of class folders."""
    if not path.is_dir():
        return stored_in(path)
    tars = []
    for file in sorted(path.glob("[!.]*.tar")):
        tars.append(Stored(file.name, file, size=file.stat().st_size))
    return tars


def train(path: Path, split: str = "train") -> Iterator[Sample]:
    """Give the training images, mixed by the hash of their names; raises DataError where a tar is damaged."""
    images: list[Stored] = []
    tars = class_tars(path)
    for label, tar in enumerate(tars):
        name = f"{path}: {tar.name}" if tar.place == path else str(tar.place)
        with open(tar.place, "rb") as file, mapped(file) as content:
            for member, offset, size in members(content[tar.offset : tar.offset + tar.size], name, Refusals()):
                images.append(Stored(member.decode(), tar.place, label, tar.offset + offset, size))
    # A folder of one folder a class.
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
        warn_of(path, skipped)
    # In the order of the hash of their names all classes mix, wherever the images lie.
    images.sort(key=lambda image: sha256(os.fsencode(image.name)).digest())
    for image in images:
        yield image.sample([image.label])


def train_classes(path: Path) -> Names:
    """Return the WordNet ids of the training images, sorted, by which the tars or the folders of the classes go."""
    tars = class_tars(path)
    if path.is_dir() and not tars:
        return folder_classes(path)
    return tuple(tar.name.removesuffix(".tar") for tar in tars)


# ---------------------------------------------------------------------------------------- validation images


def validation(wnids: Path | None, path: Path, split: str = "validation") -> Iterator[Sample]:
    """Give the validation images in the order of their names, with classes from `wnids`: the devkit, or a text file.

    Without it the classes are those of the folders in which the images lie. Raises DataError where there are neither,
    or where there are both and they differ.
    """
    truth = validation_truth(wnids, path)
    if not truth:
        raise DataError(
            f"{path}: nothing says of which classes these images are\n"
            f"  expected one folder a class, or --wnids {DEVKIT} (or a text file of one WordNet id a line)"
        )
    _, labels = np.unique(truth, return_inverse=True)  # places among the sorted WordNet ids
    return labelled_images(path, labels.reshape(-1, 1).tolist(), wnids or path)


def validation_classes(wnids: Path | None, path: Path) -> Names:
    """Return the WordNet ids of the validation images, each once, sorted; none where nothing says them."""
    return tuple(sorted(set(validation_truth(wnids, path))))


def validation_truth(wnids: Path | None, path: Path) -> Sequence[str]:
    """Return the WordNet id of each validation image, in the order of their names; none where nothing says them."""
    in_folders: list[Stored] = []  # of a class each
    if path.is_dir():
        images = validation_images(path)
        if all(image.place != path for image in images):
            in_folders = images
    if wnids is None:
        return [image.place.name for image in in_folders]
    truth = validation_wnids(wnids)
    # Where there are more of the one than of the other, `labelled_images` says so.
    for image, wnid in zip(in_folders, truth, strict=False):
        if image.place.name != wnid:
            raise DataError(
                f"{path}: {image.name} lies in the folder {image.place.name}, {wnids} says {wnid}\n"
                "  expected both to agree: sort the images into folders again, or leave wnids out"
            )
    return truth


def real(labels: Path, path: Path, split: str = "validation") -> Iterator[Sample]:
    """Give the validation images that have labels in real.json, which lists all of each (Beyer et al. 2020).

    Images with an empty list are not part of the protocol; a prediction is right when it is any of the labels.
    """
    try:
        truth = json.loads(labels.read_bytes())
        is_list = isinstance(truth, list) and all(isinstance(entry, list) for entry in truth)
    except ValueError:
        is_list = False
    if not is_list:
        raise DataError(f"{labels}: expected real.json, a list of one list of class ids an image; download it again")
    for sample in labelled_images(path, truth, labels):
        if sample.labels:
            yield sample


def labelled_images(path: Path, labels: Sequence[Sequence[int]], source: str | os.PathLike[str]) -> Iterator[Sample]:
    """Give samples of a tar or folder of images and the labels of each, in the order of the image names.

    Raises DataError unless there are as many labels as images; `source` is where the labels are from.
    """
    images = validation_images(path)
    if len(images) != len(labels):
        raise DataError(f"{path}: {len(images)} images, {source}: {len(labels)} labels; they must be as many")
    for image, image_labels in zip(images, labels, strict=True):
        yield image.sample(image_labels)


def validation_images(path: Path) -> list[Stored]:
    """Return the images of a tar, or of a folder and the class folders in it, in the order of their names."""
    if not path.is_dir():
        return stored_in(path)
    images = []
    for file in path.rglob("[!.]*"):
        if is_image(file) and file.is_file():
            images.append(Stored(file.name, file.parent))
    return sorted(images, key=attrgetter("name"))


# --------------------------------------------------------------------------------------------------- devkit


def validation_wnids(path: Path) -> list[str]:
    """Return the WordNet id of each validation image, from the devkit's archive or folder, or from a text file.

    The devkit numbers the synsets from 1 on in an order of its own, the 1,000 without children first; of the 1,860 in
    meta.mat only these are classes. Raises DataError where it holds others.
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
    # scipy raises whatever its parser stumbles over in a file that is torn.
    except (ValueError, TypeError, KeyError, IndexError, NotImplementedError, OSError) as error:
        raise DataError(f"{path}: meta.mat has no table of synsets ({error}); download it again from {PAGE}") from None
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
        raise DataError(f"{path}: {GROUND_TRUTH} has {names}, no class of its meta.mat; download it again")
    return wnids
