"""The sets of VTAB whose images are files in an archive, labelled by their folders or by lists.

Each archive is as its owners distribute it, or unpacked to the folder that it makes, and lies in the folder that the
recipe names. An archive is read as a stream, from which the chosen images are taken.

    101_ObjectCategories.tar.gz        one folder a class, BACKGROUND_Google among them: 102 classes
    dtd-r1.0.1.tar.gz                  images, and labels/train1.txt, val1.txt, test1.txt: the first of ten folds
    102flowers.tgz imagelabels.mat setid.mat
    images.tar.gz annotations.tar.gz   of Oxford-IIIT Pets
    SUN397.tar.gz                      with TensorFlow Datasets' sun397_tfds_{tr,va,te}.txt beside it
    EuroSAT.zip                        one folder a class
    NWPU-RESISC45                      a folder or a zip; its owners' rar has to be unpacked

Those with a table or an annotation of each image are in `data.vtab.scenes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.archives import flowers, pets
from data.archives.images import as_image, tell
from data.archives.members import first_present, members, read_members
from data.errors import DataError
from data.index.names import Names, some
from data.index.refusals import Refusals
from data.shards.sources import Sample
from data.vtab.order import Entry
from data.vtab.tasks import Task

CALTECH_PAGE = "https://doi.org/10.22002/D1.20086"
CALTECH = ("101_ObjectCategories.tar.gz", "101_ObjectCategories", "caltech-101/101_ObjectCategories.tar.gz")
CALTECH_TRAINED = 30  # images of a class
CALTECH_SEED = 1234

DTD_PAGE = "https://www.robots.ox.ac.uk/~vgg/data/dtd/"
DTD = ("dtd-r1.0.1.tar.gz", "dtd")
DTD_LISTS = {"train": "train1.txt", "validation": "val1.txt", "test": "test1.txt"}

SUN_PAGE = "https://vision.princeton.edu/projects/2010/SUN/"
SUN = ("SUN397.tar.gz", "SUN397")
SUN_LISTS = {"train": "sun397_tfds_tr.txt", "validation": "sun397_tfds_va.txt", "test": "sun397_tfds_te.txt"}
SUN_PIXELS = 120_000  # that an image has at most

EUROSAT_PAGE = "https://github.com/phelber/eurosat"
EUROSAT = ("EuroSAT.zip", "EuroSAT_RGB.zip", "2750", "EuroSAT_RGB")
RESISC_PAGE = "https://gcheng-nwpu.github.io"
RESISC = ("NWPU-RESISC45.zip", "NWPU-RESISC45", "NWPU-RESISC45.rar")

Remake = Callable[[bytes, str], tuple[bytes, str]]  # a file and its name to an encoded image and its extension


class Tree(NamedTuple):
    """A set of image files: what there is, where it lies, and what becomes of an image."""

    entries: Callable[[Path, Task, str], list[Entry]]  # of a split of the set, for a task
    archive: Callable[[Path, str], Path]  # the one that holds the images of a split
    place: Callable[[str], str]  # the path of a member → the place of an entry
    remake: Remake | None = None


def samples(tree: Tree, folder: Path, chosen: Mapping[str, Sequence[Entry]]) -> Iterator[Sample]:
    """The chosen images, in the order of their archive; raises DataError where one is not there."""
    wanted: dict[Path, dict[str, int]] = {}  # archive → place → class id
    for split, entries in chosen.items():
        places = wanted.setdefault(tree.archive(folder, split), {})
        places.update((entry.place, entry.label) for entry in entries)

    for archive, places in wanted.items():
        changed = Refusals()
        for member in members(archive):
            place = tree.place(member.name)
            if place not in places:
                continue
            label = places.pop(place)
            raw = member.read()
            image, kind = tree.remake(raw, place) if tree.remake else as_image(raw, place, changed)
            parts, dot, _ = place.strip("/").rpartition(".")
            yield Sample((parts if dot else place).replace(".", "_"), image, (label,), kind)
            # What follows need not be unpacked.
            if not places:
                break
        tell(archive, changed)
        if places:
            raise DataError(f"{archive}: lacks {len(places)} images: {some(sorted(places))}; download it again")


def last_parts(count: int) -> Callable[[str], str]:
    """What takes the last so many parts of a path: `2750/River/River_1.jpg` → `River/River_1.jpg`."""
    return lambda name: "/".join(name.split("/")[-count:])


def in_archive(alternatives: Sequence[str], page: str) -> Callable[[Path, str], Path]:
    """What finds the archive that holds all splits."""
    return lambda folder, split: first_present(folder, alternatives, page)


def files_by_class(archive: Path, suffix: str = ".jpg") -> dict[str, list[str]]:
    """The names of the files in each class folder of an archive, sorted both."""
    files: dict[str, list[str]] = {}
    for member in members(archive):
        parts = member.name.split("/")
        if len(parts) >= 2 and parts[-1].endswith(suffix):
            files.setdefault(parts[-2], []).append(parts[-1])
    return {name: sorted(files[name]) for name in sorted(files)}


# ------------------------------------------------------------------------------------------------- class folders


def caltech_entries(folder: Path, task: Task, split: str) -> list[Entry]:
    """30 images of each class to train on, the others to test on.

    TensorFlow Datasets draws the 30 from each folder's files as the file system lists them, which no archive tells.
    The same draw is made here from their sorted names: these are other images than the original's.
    """
    files = files_by_class(first_present(folder, CALTECH, CALTECH_PAGE))
    draws = np.random.RandomState(CALTECH_SEED)
    entries = []
    # Ids follow the names in small letters, where BACKGROUND_Google comes after ant.
    for label, class_name in enumerate(sorted(files, key=str.lower)):
        if len(files[class_name]) < CALTECH_TRAINED:
            raise DataError(
                f"{folder}: {class_name} has {len(files[class_name])} images, expected {CALTECH_TRAINED} or more\n"
                f"  download it again from {CALTECH_PAGE}"
            )
        trained = set(draws.choice(files[class_name], CALTECH_TRAINED, replace=False).tolist())
        for name in files[class_name]:
            if (name in trained) == (split == "train"):
                entries.append(Entry(f"{class_name}/{name}", f"{class_name}/{name}", label))
    return entries


def caltech_names(folder: Path) -> Names:
    """The folders in small letters, as TensorFlow Datasets names the classes."""
    return tuple(sorted(name.lower() for name in files_by_class(first_present(folder, CALTECH, CALTECH_PAGE))))


def folder_entries(alternatives: Sequence[str], page: str) -> Callable[[Path, Task, str], list[Entry]]:
    """What lists the images of one folder a class, all of them in one split."""

    def entries(folder: Path, task: Task, split: str) -> list[Entry]:
        listed = []
        for label, (class_name, files) in enumerate(files_by_class(first_present(folder, alternatives, page)).items()):
            for name in files:
                listed.append(Entry(f"{class_name}_{name}", f"{class_name}/{name}", label))
        return listed

    return entries


def folder_names(alternatives: Sequence[str], page: str) -> Callable[[Path], Names]:
    """What names the classes by their folders."""
    return lambda folder: tuple(files_by_class(first_present(folder, alternatives, page)))


# ------------------------------------------------------------------------------------------------- lists


def dtd_entries(folder: Path, task: Task, split: str) -> list[Entry]:
    """The images that a split's list of the first fold names, a line each: `banded/banded_0002.jpg`."""
    lists = dtd_lists(folder)
    names = textures(lists)
    return [Entry(line, line, names.index(line.partition("/")[0])) for line in lists[split]]


def dtd_names(folder: Path) -> Names:
    """The textures, sorted."""
    return textures(dtd_lists(folder))


def textures(lists: Mapping[str, Sequence[str]]) -> Names:
    """The textures that the lists name, sorted."""
    names: set[str] = set()
    for lines in lists.values():
        names.update(line.partition("/")[0] for line in lines)
    return tuple(sorted(names))


def dtd_lists(folder: Path) -> dict[str, list[str]]:
    """The lines of the lists of the first fold, by the split."""
    contents = read_members(first_present(folder, DTD, DTD_PAGE), list(DTD_LISTS.values()))
    return {split: contents[name].decode().split() for split, name in DTD_LISTS.items()}


def flowers_entries(folder: Path, task: Task, split: str) -> list[Entry]:
    """The images whose numbers setid.mat lists for a split."""
    class_ids = flowers.numbers_in(folder / flowers.LABELS, "labels")
    entries = []
    for number in flowers.numbers_in(folder / flowers.SPLITS_FILE, flowers.LISTS[split][0]):
        if number > len(class_ids):
            raise DataError(
                f"{folder}: {flowers.SPLITS_FILE} lists image {number}, and {flowers.LABELS} has {len(class_ids)} "
                f"labels; download both again from {flowers.PAGE}"
            )
        name = f"image_{number:05d}.jpg"
        entries.append(Entry(name, name, class_ids[number - 1] - 1))
    return entries


def pets_entries(folder: Path, task: Task, split: str) -> list[Entry]:
    """The images that trainval.txt or test.txt names."""
    class_ids = pets.read_lists(folder)[split]
    return [Entry(f"{key}.jpg", f"{key}.jpg", label) for key, label in class_ids.items()]


def sun_entries(folder: Path, task: Task, split: str) -> list[Entry]:
    """The images that TensorFlow Datasets' own lists name: they are none of the owners' ten partitions."""
    names = sun_names(folder)
    ids = {name: label for label, name in enumerate(names)}
    entries = []
    for path in sun_list(folder, split):
        entries.append(Entry(path, path, ids[path.rpartition("/")[0]]))
    return entries


def sun_names(folder: Path) -> Names:
    """The folders of the scenes, `/a/abbey` say, sorted."""
    names: set[str] = set()
    for split in SUN_LISTS:
        names.update(path.rpartition("/")[0] for path in sun_list(folder, split))
    return tuple(sorted(names))


def sun_list(folder: Path, split: str) -> list[str]:
    """The lines of a split's list; raises DataError saying where to get it."""
    path = folder / SUN_LISTS[split]
    if not path.is_file():
        raise DataError(
            f"there is nothing at {path}\n"
            "  VTAB's split of SUN397 is TensorFlow Datasets' own, which the owners' partitions are not: take the\n"
            f"  lists {', '.join(SUN_LISTS.values())} from its package,\n"
            "  tensorflow_datasets/image_classification/ in the wheel or at github.com/tensorflow/datasets"
        )
    return path.read_text().split()


def sun_image(raw: bytes, name: str) -> tuple[bytes, str]:
    """The image with 120,000 pixels at most, encoded anew as a JPEG, as TensorFlow Datasets does.

    Raises DataError where it is no image; some of the archive are GIF, PNG or BMP, whatever they are called.
    """
    import cv2

    encoded, _ = as_image(raw, name, Refusals())
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise DataError(f"{name}: no image that can be decoded; download the archive again")
    pixels = image.shape[0] * image.shape[1]
    if pixels > SUN_PIXELS:
        factor = float(np.sqrt(SUN_PIXELS / pixels))
        image = cv2.resize(image, dsize=None, fx=factor, fy=factor)
    return cv2.imencode(".jpg", image)[1].tobytes(), "jpg"


def sun_place(name: str) -> str:
    """`SUN397/a/abbey/sun_1.jpg`, or without the first part where it is unpacked → `/a/abbey/sun_1.jpg`."""
    return "/" + name.removeprefix("SUN397/")


# ------------------------------------------------------------------------------------------------- the table

TREES: dict[str, Tree] = {
    "caltech101": Tree(caltech_entries, in_archive(CALTECH, CALTECH_PAGE), last_parts(2)),
    "dtd": Tree(dtd_entries, in_archive(DTD, DTD_PAGE), last_parts(2)),
    "oxford_flowers102": Tree(flowers_entries, in_archive(flowers.IMAGES, flowers.PAGE), last_parts(1)),
    "oxford_iiit_pet": Tree(pets_entries, in_archive(pets.IMAGES, pets.PAGE), last_parts(1)),
    "sun397": Tree(sun_entries, in_archive(SUN, SUN_PAGE), sun_place, sun_image),
    "eurosat": Tree(folder_entries(EUROSAT, EUROSAT_PAGE), in_archive(EUROSAT, EUROSAT_PAGE), last_parts(2)),
    "resisc45": Tree(folder_entries(RESISC, RESISC_PAGE), in_archive(RESISC, RESISC_PAGE), last_parts(2)),
}
CLASS_NAMES: dict[str, Callable[[Path], Names]] = {
    "caltech101": caltech_names,
    "dtd": dtd_names,
    "oxford_flowers102": lambda folder: flowers.NAMES,
    "oxford_iiit_pet": pets.classes,
    "sun397": sun_names,
    "eurosat": folder_names(EUROSAT, EUROSAT_PAGE),
    "resisc45": folder_names(RESISC, RESISC_PAGE),
}
