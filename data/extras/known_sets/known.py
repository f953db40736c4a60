"""The data sets that are known by name: each with what reads it and what its splits are published to hold.

A reader gets the path that the recipe gives, an archive or the folder in which several lie as they were downloaded, and
the name of a split; it gives the same samples in the same order every time, so that packing can be killed and go on.
ImageNet's and ObjectNet's readers are modules of their own. The sets that the paper's table 4 fine-tunes on are read
here, by two readers and a table:

    cifar-10-binary.tar.gz              records of a label and pixels     →  Sample("test_batch-00000", PNG, (3,))
    images.tar.gz annotations.tar.gz    images, and lists that label them →  Sample("Abyssinian_201", JPEG, (0,))

    samples_of_archive(known_archive("pets"), Path("downloads"), "test", "pets, test")
    →   3,669 samples, or DataError saying how many there are
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.extras.known_sets import imagenet, imagenet21k, objectnet
from data.extras.known_sets.archive import as_image, encode, first_present, read_members, text_of, warn_of
from data.extras.known_sets.vtab_prepared import VTAB
from data.extras.sources.members import members
from data.index.index import Refusals
from data.index.names import Names, preview
from data.sources.samples import Archive, Published, Sample

# ------------------------------------------------------------------------------------------------ CIFAR

CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR_PIXELS = 3 * 32 * 32  # bytes of an image: planes of red, green and blue


class Cifar(NamedTuple):
    """What the files of the binary version of a CIFAR are called."""

    archive: str
    batches: dict[str, tuple[str, ...]]  # split → files
    names: str  # the file of class names, a line each
    label_bytes: int  # before the pixels of a record; the last of them is the label


CIFAR10 = Cifar(
    "cifar-10-binary.tar.gz",
    {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)},
    "batches.meta.txt",
    1,
)
# Its records begin with the coarse label, then the fine label.
CIFAR100 = Cifar("cifar-100-binary.tar.gz", {"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt", 2)


def cifar_samples(cifar: Cifar, path: Path, split: str) -> Iterator[Sample]:
    """Give the images of a split, batch after batch; raises DataError where a batch is missing or damaged."""
    contents = cifar_files(cifar, path, cifar.batches[split])
    for name in cifar.batches[split]:
        content = contents[name]
        record_bytes = cifar.label_bytes + CIFAR_PIXELS
        if len(content) % record_bytes:
            raise DataError(f"{path}: {name}: {len(content):,} bytes are no whole number of records; download it again")
        records = np.frombuffer(content, np.uint8).reshape(-1, record_bytes)
        for number, record in enumerate(records):
            pixels = record[cifar.label_bytes :].reshape(3, 32, 32).transpose(1, 2, 0)
            label = int(record[cifar.label_bytes - 1])
            yield Sample(f"{name.removesuffix('.bin')}-{number:05d}", encode(pixels), (label,), "png")


def cifar_classes(cifar: Cifar, path: Path) -> Names:
    """Return the class names that lie beside the images, in the order of their ids."""
    content = cifar_files(cifar, path, (cifar.names,))[cifar.names]
    return tuple(text_of(content, f"{path}: {cifar.names}").split())


def cifar_files(cifar: Cifar, path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return files of an archive, of the folder in which it lies, or of the folder that it was unpacked to.

    Raises DataError where one is missing.
    """
    if (path / cifar.archive).is_file():
        path = path / cifar.archive
    return read_members(
        path,
        names,
        f"\n  expected the binary version, {cifar.archive}, which holds the same images as the python version\n"
        f"  download it from {CIFAR_PAGE}",
    )


# ------------------------------------------------------------------------------- one archive, and its lists

PETS_PAGE = "https://www.robots.ox.ac.uk/~vgg/data/pets/"
PETS_ANNOTATIONS = ("annotations.tar.gz", "annotations.tar", "annotations")
PETS_LISTS = {"train": "trainval.txt", "test": "test.txt"}
FLOWERS_PAGE = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
FLOWERS_LISTS = {"train": ("trnid",), "validation": ("valid",), "trainval": ("trnid", "valid"), "test": ("tstid",)}


class ListedSet(NamedTuple):
    """An archive of .jpg images, and lists of them."""

    images: tuple[str, ...]  # what the archive may be called, or the folder that it was unpacked to
    page: str
    lists: Callable[[Path], dict[str, dict[str, int]]]  # of a folder: split → image without .jpg → class id from 0 on


def listed_samples(listed: ListedSet, folder: Path, split: str) -> Iterator[Sample]:
    """Give the images of a split, in the order of the archive; raises DataError where a listed image is not there."""
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
            notes.add("image that no list names", member.base)
        elif key in class_ids:
            seen.add(key)
            image, kind = as_image(member.read(), member.base, notes)
            yield Sample(key, image, (class_ids[key],), kind)
    warn_of(archive, notes)
    lacking = sorted(class_ids.keys() - seen)
    if lacking:
        raise DataError(f"{archive}: lacks {len(lacking)} images of {split}: {preview(lacking)}\n  {listed.page}")


def pets_lists(folder: Path) -> dict[str, dict[str, int]]:
    """Read trainval.txt and test.txt of Oxford-IIIT Pets: `Abyssinian_201 1 1 1`, image, class, species, breed.

    Raises DataError where a line is no such.
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
                raise DataError(f"{archive}: {name}: {line!r}, expected an image and its class from 1 on")
            lists[split][words[0]] = int(words[1]) - 1
    return lists


def pets_classes(folder: Path) -> Names:
    """Return the breeds, in the order of their ids: an image is called by its breed and a number."""
    names: dict[int, str] = {}
    for class_ids in pets_lists(folder).values():
        for key, label in class_ids.items():
            names[label] = key.rpartition("_")[0]
    return tuple(names[label] for label in sorted(names))


def flowers_lists(folder: Path) -> dict[str, dict[str, int]]:
    """Read setid.mat and imagelabels.mat of Oxford Flowers-102: numbers of images, and a class from 1 on for each.

    Raises DataError where one is damaged or they do not fit together.
    """
    labels = matlab_numbers(folder / "imagelabels.mat", "labels")
    lists: dict[str, dict[str, int]] = {}
    for split, arrays in FLOWERS_LISTS.items():
        lists[split] = {}
        for array in arrays:
            for number in matlab_numbers(folder / "setid.mat", array):
                if number > len(labels):
                    raise DataError(
                        f"{folder}: setid.mat lists image {number}, and imagelabels.mat has {len(labels)} labels\n"
                        f"  download both again from {FLOWERS_PAGE}"
                    )
                lists[split][f"image_{number:05d}"] = labels[number - 1] - 1
    return lists


def matlab_numbers(path: Path, name: str) -> list[int]:
    """Return the whole numbers of an array in a MATLAB file; raises DataError where it has none of this name."""
    from scipy.io import loadmat

    if not path.is_file():
        raise DataError(f"there is nothing at {path}\n  download it from {FLOWERS_PAGE}")
    try:
        return [int(number) for number in loadmat(path, variable_names=[name])[name].ravel()]
    # scipy raises whatever its parser stumbles over in a file that is torn.
    except (ValueError, TypeError, KeyError, NotImplementedError, OSError) as error:
        raise DataError(f"{path}: no array {name!r} ({error}); download it again from {FLOWERS_PAGE}") from None


# The owners' files name no classes, only their page does, in the order of the ids. With a stroke between them: a name a
# line would be a hundred lines.
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
    # Its labels are ids of ImageNet-1k, whose names an ImageNet set knows.
    "objectnet": Archive(objectnet.samples, lambda folder: (), objectnet.PUBLISHED, objectnet.objects),
}
IMAGENET_21K: dict[str, Published] = {
    "imagenet-21k": imagenet21k.WINTER21,
    "imagenet-21k-fall11": imagenet21k.FALL11,
}
ANY_SPLIT = ("train", "validation", "test")  # words that a set with no choice of them takes


def known_archive(
    source: str, wnids: Path | None = None, real: Path | None = None, task: str | None = None
) -> Archive | None:
    """Return the known data set of this name, with its labels or classes from other files; None if it is not known.

    `task` is a task of VTAB-1k, for source vtab.
    """
    if source == "vtab":
        return VTAB.get(task or "")
    if source == "imagenet-validation" and real is not None:
        # real.json holds ids; names are taken from the numbering of another set.
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
