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
from pathlib import Path
from typing import NamedTuple

from data.errors import DataError
from data.index.names import Names, some
from data.index.refusals import Refusals
from data.index.tar import IMAGES, mapped, members
from data.sources.folders import folder_classes
from data.sources.members import GZIP_START, read_members
from data.sources.samples import Published, Sample, warn_of

PAGE = "https://image-net.org/download.php"
SOURCE = "Russakovsky et al. 2015, table 2"
PUBLISHED = {"train": Published(1_281_167, 1_000, SOURCE)}
PUBLISHED_VALIDATION = Published(50_000, 1_000, SOURCE)
PUBLISHED_REAL = Published(46_837, 1_000, "Beyer et al. 2020; their real.json has 50,000 lists, 3,163 of them empty")
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


# ------------------------------------------------------------------------------------------ training images


class TrainingImage(NamedTuple):
    """Where a training image lies: in a tar from an offset on, or in a file of its own."""

    name: str  # n01440764_10026.JPEG
    file: int  # its number among the files
    offset: int  # bytes from the beginning of the file
    size: int  # bytes; −1 for a file of its own
    label: int

    def sample(self, encoded: bytes | Path) -> Sample:
        """Return the sample of this image."""
        return Sample(self.name.partition(".")[0], encoded, (self.label,))


def train(path: Path, split: str = "train") -> Iterator[Sample]:
    """Give the training images, mixed by the hash of their names; raises DataError where a tar is damaged."""
    images: list[TrainingImage] = []

    # A tar of one tar a class.
    if not path.is_dir():
        with open(path, "rb") as file, mapped(file) as outer:
            class_tars = sorted(members(outer, str(path), Refusals()))
            for label, (class_name, class_offset, class_size) in enumerate(class_tars):
                class_tar = outer[class_offset : class_offset + class_size]
                for member, offset, size in members(class_tar, f"{path}: {class_name.decode()}", Refusals()):
                    images.append(TrainingImage(member.decode(), 0, class_offset + offset, size, label))
            for image in mixed(images):
                yield image.sample(bytes(outer[image.offset : image.offset + image.size]))
        return

    # A folder of one tar a class.
    tars = sorted(path.glob("[!.]*.tar"))
    if tars:
        for label, tar in enumerate(tars):
            with open(tar, "rb") as file, mapped(file) as content:
                for member, offset, size in members(content, str(tar), Refusals()):
                    images.append(TrainingImage(member.decode(), label, offset, size, label))
        for image in mixed(images):
            # Opened anew for each image: a thousand tars are more than a process may hold open everywhere.
            with open(tars[image.file], "rb") as file:
                file.seek(image.offset)
                yield image.sample(file.read(image.size))
        return

    # A folder of one folder a class.
    names = folder_classes(path)
    passed_over = Refusals()
    for label, name in enumerate(names):
        with os.scandir(path / name) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                extension = entry.name.rpartition(".")[2].lower()
                if extension in IMAGES:
                    images.append(TrainingImage(entry.name, label, 0, -1, label))
                else:
                    passed_over.add_type(extension, f"{name}/{entry.name}")
    warn_of(path, passed_over)
    for image in mixed(images):
        yield image.sample(path / names[image.label] / image.name)


def train_classes(path: Path) -> Names:
    """Return the WordNet ids of the training images, sorted: what the tars or the folders of the classes are called."""
    if not path.is_dir():
        with open(path, "rb") as file, mapped(file) as outer:
            inner = sorted(members(outer, str(path), Refusals()))
        return tuple(name.decode().removesuffix(".tar") for name, _, _ in inner)
    tars = sorted(path.glob("[!.]*.tar"))  # of one class each
    return tuple(tar.stem for tar in tars) if tars else folder_classes(path)


def mixed(images: list[TrainingImage]) -> list[TrainingImage]:
    """Return the images in the order of the hash of their names, in which all classes mix, wherever they lie."""
    return sorted(images, key=lambda image: sha256(os.fsencode(image.name)).digest())


# ---------------------------------------------------------------------------------------- validation images


def validation(wnids: Path | None, path: Path, split: str = "validation") -> Iterator[Sample]:
    """Give the validation images in the order of their names, with classes from `wnids`: the devkit, or a text file.

    Without it the classes are those of the folders in which the images lie. Raises DataError where there are neither,
    or where there are both and they differ.
    """
    folders = folders_of_images(path)
    truth = folders
    if wnids is not None:
        truth = validation_wnids(wnids)
        # Where there are more of the one than of the other, `labelled_images` says so.
        for number, (folder, wnid) in enumerate(zip(folders, truth, strict=False)):
            if folder != wnid:
                raise DataError(
                    f"{path}: {validation_files(path)[number].name} lies in the folder {folder}, {wnids} says {wnid}\n"
                    "  expected both to agree: sort the images into folders again, or leave wnids out"
                )
    if not truth:
        raise DataError(
            f"{path}: nothing says of which classes these images are\n"
            f"  expected one folder a class, or --wnids {DEVKIT} (or a text file of one WordNet id a line)"
        )
    ids = {wnid: label for label, wnid in enumerate(sorted(set(truth)))}
    return labelled_images(path, [(ids[wnid],) for wnid in truth], wnids or path)


def validation_classes(wnids: Path | None, path: Path) -> Names:
    """Return the WordNet ids of the validation images, each once, sorted; none where nothing says them."""
    truth = folders_of_images(path) if wnids is None else validation_wnids(wnids)
    return tuple(sorted(set(truth)))


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
    if path.is_dir():
        files = validation_files(path)
        check_as_many(path, len(files), source, len(labels))
        for file, image_labels in zip(files, labels, strict=True):
            yield Sample(file.stem, file, tuple(image_labels))
        return
    with open(path, "rb") as opened, mapped(opened) as content:
        # The labels come in the order of the names, which need not be the order of the tar.
        images = sorted(members(content, str(path), Refusals()))
        check_as_many(path, len(images), source, len(labels))
        for (name, offset, size), image_labels in zip(images, labels, strict=True):
            key = name.decode().partition(".")[0]
            yield Sample(key, bytes(content[offset : offset + size]), tuple(image_labels))


def validation_files(folder: Path) -> list[Path]:
    """Return the images of a folder and of the class folders in it, in the order of their names."""
    files = []
    for path in folder.rglob("[!.]*"):
        if path.suffix.lower()[1:] in IMAGES and path.is_file():
            files.append(path)
    return sorted(files, key=lambda path: path.name)


def folders_of_images(path: Path) -> list[str]:
    """Return the class folder of each image, in the order of their names; none of a tar, or of images without any."""
    if not path.is_dir():
        return []
    files = validation_files(path)
    if any(file.parent == path for file in files):
        return []
    return [file.parent.name for file in files]


def check_as_many(path: Path, images: int, source: str | os.PathLike[str], labels: int) -> None:
    """Raise DataError unless there is a label an image."""
    if images != labels:
        raise DataError(f"{path}: {images} images, {source}: {labels} labels; they must be as many")


# --------------------------------------------------------------------------------------------------- devkit


def validation_wnids(path: Path) -> list[str]:
    """Return the WordNet id of each validation image, from the devkit's archive or folder, or from a text file.

    The devkit numbers the synsets from 1 on in an order of its own, the 1,000 without children first; of the 1,860 in
    meta.mat only these are classes. Raises DataError where it holds others.
    """
    if not path.is_dir():
        with open(path, "rb") as file:
            is_archive = file.read(len(GZIP_START)) == GZIP_START
        if not is_archive:
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
        names = some(sorted(unknown))
        raise DataError(f"{path}: {GROUND_TRUTH} has {names}, no class of its meta.mat; download it again")
    return wnids
