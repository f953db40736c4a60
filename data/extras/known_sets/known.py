"""Table of the public data sets: the reader of each set, and the published size of each split.

A reader takes the path from the recipe (an archive, or a folder of the downloaded archives) and the name of a split. It
yields the same samples in the same order every time, so that an interrupted packing can resume. ImageNet and ObjectNet
have separate modules. This module reads the fine-tuning sets of the ViT paper's table 4:

    cifar-10-binary.tar.gz              records of a label and pixels     →  Sample("test_batch-00000", PNG, (3,))
    images.tar.gz annotations.tar.gz    images, and lists that label them →  Sample("Abyssinian_201", JPEG, (0,))

    samples_of_archive(known_archive("pets"), Path("downloads"), "test", "pets, test")
    →   3,669 samples, or DataError if the archive has a different number
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.extras.known_sets import imagenet, imagenet21k, objectnet
from data.extras.known_sets.archive import as_image, encode, first_present, log_notes, read_members, text_of
from data.extras.known_sets.vtab_prepared import VTAB
from data.extras.sources.members import members
from data.extras.sources.refusals import Refusals
from data.extras.sources.samples import Archive, Published, Sample
from data.index.names import Names, preview

# ------------------------------------------------------------------------------------------------ CIFAR

CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR_PIXELS = 3 * 32 * 32  # bytes of an image: planes of red, green and blue


class Cifar(NamedTuple):
    """File names and record layout of the binary version of CIFAR-10 or CIFAR-100."""

    archive: str
    batches: dict[str, tuple[str, ...]]  # split → files
    names: str  # the file of class names, one per line
    label_bytes: int  # label bytes before the pixels of a record; the last one is the class id


CIFAR10 = Cifar(
    "cifar-10-binary.tar.gz",
    {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)},
    "batches.meta.txt",
    1,
)
# CIFAR-100 records begin with the coarse label and the fine label.
CIFAR100 = Cifar("cifar-100-binary.tar.gz", {"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt", 2)


def cifar_samples(cifar: Cifar, path: Path, split: str) -> Iterator[Sample]:
    """Yield the images of a split, batch after batch; raises DataError if a batch is missing or damaged."""
    contents = cifar_files(cifar, path, cifar.batches[split])
    for name in cifar.batches[split]:
        content = contents[name]
        record_bytes = cifar.label_bytes + CIFAR_PIXELS
        if len(content) % record_bytes:
            raise DataError(
                f"{path}: {name}: {len(content):,} bytes are not a multiple of the record size of {record_bytes:,} "
                "bytes; "
                "download it again"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, record_bytes)
        for number, record in enumerate(records):
            pixels = record[cifar.label_bytes :].reshape(3, 32, 32).transpose(1, 2, 0)
            label = int(record[cifar.label_bytes - 1])
            yield Sample(f"{name.removesuffix('.bin')}-{number:05d}", encode(pixels), (label,), "png")


def cifar_classes(cifar: Cifar, path: Path) -> Names:
    """Return the class names from the archive, in the order of their ids."""
    content = cifar_files(cifar, path, (cifar.names,))[cifar.names]
    return tuple(text_of(content, f"{path}: {cifar.names}").split())


def cifar_files(cifar: Cifar, path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Read files of the CIFAR archive; `path` is the archive, its folder, or the folder of its unpacked files.

    Raises DataError if a file is missing.
    """
    if (path / cifar.archive).is_file():
        path = path / cifar.archive
    return read_members(
        path,
        names,
        f"\n  expected the binary version, {cifar.archive}, which has the same images as the Python version\n"
        f"  download it from {CIFAR_PAGE}",
    )


# ------------------------------------------------------------------------------- one archive, and its lists

PETS_PAGE = "https://www.robots.ox.ac.uk/~vgg/data/pets/"
PETS_ANNOTATIONS = ("annotations.tar.gz", "annotations.tar", "annotations")
PETS_LISTS = {"train": "trainval.txt", "test": "test.txt"}
FLOWERS_PAGE = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
FLOWERS_LISTS = {"train": ("trnid",), "validation": ("valid",), "trainval": ("trnid", "valid"), "test": ("tstid",)}


class ListedSet(NamedTuple):
    """A data set distributed as an archive of .jpg images and separate lists of the splits."""

    images: tuple[str, ...]  # possible names of the archive, or of the folder of its unpacked files
    page: str
    lists: Callable[[Path], dict[str, dict[str, int]]]  # folder → split → image name without .jpg → class id from 0


def listed_samples(listed: ListedSet, folder: Path, split: str) -> Iterator[Sample]:
    """Yield the images of a split, in the order of the archive; raises DataError if a listed image is missing."""
    lists = listed.lists(folder)
    class_ids = lists[split]
    in_any_list = set().union(*lists.values())
    archive = first_present(folder, listed.images, listed.page)
    notes = Refusals()
    seen: set[str] = set()
    for member in members(archive):
        key, _, extension = member.base.partition(".")
        if extension.lower() != "jpg":
            notes.add_type(extension, member.base)
        elif key not in in_any_list:
            notes.add("image that is not in any list", member.base)
        elif key in class_ids:
            seen.add(key)
            image, kind = as_image(member.read(), member.base, notes)
            yield Sample(key, image, (class_ids[key],), kind)
    log_notes(archive, notes)
    missing = sorted(class_ids.keys() - seen)
    if missing:
        raise DataError(
            f"{archive}: {len(missing)} images of split {split} are missing: {preview(missing)}\n"
            f"  download it again from {listed.page}"
        )


def pets_lists(folder: Path) -> dict[str, dict[str, int]]:
    """Return {split: {image name: class id}} from trainval.txt and test.txt of Oxford-IIIT Pets.

    Each line holds an image name, class, species and breed, for example `Abyssinian_201 1 1 1`.
    Raises DataError if a line has a different format.
    """
    archive = first_present(folder, PETS_ANNOTATIONS, PETS_PAGE)
    contents = read_members(archive, list(PETS_LISTS.values()))
    lists: dict[str, dict[str, int]] = {}
    for split, name in PETS_LISTS.items():
        lists[split] = {}
        for line in text_of(contents[name], f"{archive}: {name}").splitlines():
            if not line or line.startswith("#"):
                continue
            words = line.split()
            if len(words) < 2 or not words[1].isdigit() or words[1] == "0":
                raise DataError(f"{archive}: {name}: expected an image name and a class number ≥ 1, found {line!r}")
            lists[split][words[0]] = int(words[1]) - 1
    return lists


def pets_classes(folder: Path) -> Names:
    """Return the breeds in the order of their class ids; an image's name consists of its breed and a number."""
    names: dict[int, str] = {}
    for class_ids in pets_lists(folder).values():
        for key, label in class_ids.items():
            names[label] = key.rpartition("_")[0]
    return tuple(names[label] for label in sorted(names))


def flowers_lists(folder: Path) -> dict[str, dict[str, int]]:
    """Return {split: {image name: class id}} from setid.mat and imagelabels.mat of Oxford Flowers-102.

    The files number images and classes from 1. Raises DataError if a file is damaged or the two do not match.
    """
    labels = matlab_numbers(folder / "imagelabels.mat", "labels")
    lists: dict[str, dict[str, int]] = {}
    for split, arrays in FLOWERS_LISTS.items():
        lists[split] = {}
        for array in arrays:
            for number in matlab_numbers(folder / "setid.mat", array):
                if number > len(labels):
                    raise DataError(
                        f"{folder}: setid.mat lists image {number}, but imagelabels.mat has only {len(labels)} labels\n"
                        f"  download both again from {FLOWERS_PAGE}"
                    )
                lists[split][f"image_{number:05d}"] = labels[number - 1] - 1
    return lists


def matlab_numbers(path: Path, name: str) -> list[int]:
    """Return the integers of an array in a MATLAB file; raises DataError if the file has no array of this name."""
    from scipy.io import loadmat

    if not path.is_file():
        raise DataError(f"{path}: file not found\n  download it from {FLOWERS_PAGE}")
    try:
        return [int(number) for number in loadmat(path, variable_names=[name])[name].ravel()]
    # For a truncated file, scipy raises many kinds of exceptions.
    except (ValueError, TypeError, KeyError, NotImplementedError, OSError) as error:
        raise DataError(f"{path}: no array {name!r} ({error}); download it again from {FLOWERS_PAGE}") from None


# Class names in the order of the ids, from the data set's web page; the distributed files do not contain them. They are
# joined by "|" because one name per line would take a hundred lines.
FLOWER_NAMES = (
    "pink primrose|hard-leaved pocket orchid|canterbury bells|sweet pea|english marigold|tiger lily|"
    "moon orchid|bird of paradise|monkshood|globe thistle|snapdragon|colt's foot|king protea|"
    "spear thistle|yellow iris|globe-flower|purple coneflower|peruvian lily|balloon flower|"
    "giant white arum lily|fire lily|pincushion flower|fritillary|red ginger|grape hyacinth|"
    "corn poppy|prince of wales feathers|stemless gentian|artichoke|sweet william|carnation|"
    "garden phlox|love in the mist|mexican aster|alpine sea holly|ruby-lipped cattleya|cape flower|"
    "great masterwort|siam tulip|lenten rose|barbeton daisy|daffodil|sword lily|poinsettia|"
    "bolero deep blue|wallflower|marigold|buttercup|oxeye daisy|common dandelion|petunia|"
    "wild pansy|primula|sunflower|pelargonium|bishop of llandaff|gaura|geranium|orange dahlia|"
    "pink-yellow dahlia?|cautleya spicata|japanese anemone|black-eyed susan|silverbush|"
    "californian poppy|osteospermum|spring crocus|bearded iris|windflower|tree poppy|gazania|"
    "azalea|water lily|rose|thorn apple|morning glory|passion flower|lotus|toad lily|anthurium|"
    "frangipani|clematis|hibiscus|columbine|desert-rose|tree mallow|magnolia|cyclamen|watercress|"
    "canna lily|hippeastrum|bee balm|ball moss|foxglove|bougainvillea|camellia|mallow|"
    "mexican petunia|bromelia|blanket flower|trumpet creeper|blackberry lily"
)


PETS = ListedSet(("images.tar.gz", "images.tar", "images"), PETS_PAGE, pets_lists)
FLOWERS = ListedSet(("102flowers.tgz", "102flowers.tar", "jpg"), FLOWERS_PAGE, flowers_lists)


# ------------------------------------------------------------------------------------------------ the table

KRIZHEVSKY = "Krizhevsky 2009; the owner's page"
PARKHI = "Parkhi et al. 2012; the owners' trainval.txt and test.txt"
NILSBACK = "Nilsback and Zisserman 2008; the owners' setid.mat"


ARCHIVES: dict[str, Archive] = {
    "imagenet-train": Archive(imagenet.train, imagenet.train_classes, imagenet.PUBLISHED),
    "cifar10": Archive(
        partial(cifar_samples, CIFAR10),
        partial(cifar_classes, CIFAR10),
        {"train": Published(50_000, 10, KRIZHEVSKY), "test": Published(10_000, 10, KRIZHEVSKY)},
    ),
    "cifar100": Archive(
        partial(cifar_samples, CIFAR100),
        partial(cifar_classes, CIFAR100),
        {"train": Published(50_000, 100, KRIZHEVSKY), "test": Published(10_000, 100, KRIZHEVSKY)},
    ),
    "pets": Archive(
        partial(listed_samples, PETS),
        pets_classes,
        {"train": Published(3_680, 37, PARKHI), "test": Published(3_669, 37, PARKHI)},
    ),
    "flowers102": Archive(
        partial(listed_samples, FLOWERS),
        lambda folder: tuple(FLOWER_NAMES.split("|")),  # in the order of their ids
        {
            "train": Published(1_020, 102, NILSBACK),
            "validation": Published(1_020, 102, NILSBACK),
            "trainval": Published(2_040, 102, NILSBACK),
            "test": Published(6_149, 102, NILSBACK),
        },
    ),
    # ObjectNet labels are class ids of ImageNet-1k; the class names come from an ImageNet set.
    "objectnet": Archive(objectnet.samples, lambda folder: (), objectnet.PUBLISHED, objectnet.objects),
}
IMAGENET_21K: dict[str, Published] = {
    "imagenet-21k": imagenet21k.WINTER21,
    "imagenet-21k-fall11": imagenet21k.FALL11,
}
ANY_SPLIT = ("train", "validation", "test")  # split names accepted by a set that has only one split


def known_archive(
    source: str, wnids: Path | None = None, real: Path | None = None, task: str | None = None
) -> Archive | None:
    """Return the public data set with this name, or None if the name is unknown.

    `wnids` and `real` are files with classes or labels of ImageNet. `task` names the VTAB-1k task for source `vtab`.
    """
    if source == "vtab":
        return VTAB.get(task or "")
    if source == "imagenet-validation" and real is not None:
        # real.json contains only ids; the class names come from another set with the same ids.
        samples = partial(imagenet.real, real)
        return Archive(samples, lambda path: (), dict.fromkeys(ANY_SPLIT, imagenet.PUBLISHED_REAL))
    if source == "imagenet-validation":
        samples = partial(imagenet.validation, wnids)
        names = partial(imagenet.validation_classes, wnids)
        return Archive(samples, names, dict.fromkeys(ANY_SPLIT, imagenet.PUBLISHED_VALIDATION))
    if source in IMAGENET_21K:
        samples = partial(imagenet21k.samples, wnids)
        names = partial(imagenet21k.classes, wnids)
        return Archive(samples, names, {"train": IMAGENET_21K[source]})
    return ARCHIVES.get(source)
