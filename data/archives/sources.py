"""The data sets that are read from their owners' archives, by the name that a recipe gives them.

Each is an `Archive`: what reads its samples, what names its classes, and what each of its splits is known to hold. A
reader gets the path that the recipe gives, an archive or the folder in which several lie as they were downloaded, and
the name of a split; it gives the same samples in the same order every time, so that packing can be killed and go on.

    samples_of_archive(ARCHIVES["pets"], Path("downloads"), "test", "pets, test")
    →   3,669 samples, or DataError saying how many there are
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial as with_arguments
from pathlib import Path
from typing import NamedTuple

from data.archives import cifar, flowers, imagenet, imagenet21k, objectnet, pets
from data.archives.published import Published, checked
from data.index.names import Names
from data.shards.sources import Sample


class Archive(NamedTuple):
    """A data set as its owners distribute it."""

    samples: Callable[[Path, str], Iterator[Sample]]  # of the archive, or the folder of archives, and a split
    classes: Callable[[Path], Names]  # in the order of their ids
    published: dict[str, Published]  # split → what it is known to hold; other splits there are none
    counted: Callable[[Path], Names] | None = None  # the classes that are published, where they are others than those


ARCHIVES: dict[str, Archive] = {
    "imagenet-train": Archive(imagenet.train, imagenet.train_classes, imagenet.PUBLISHED),
    "cifar10": Archive(cifar.cifar10_samples, cifar.cifar10_classes, cifar.PUBLISHED_10),
    "cifar100": Archive(cifar.cifar100_samples, cifar.cifar100_classes, cifar.PUBLISHED_100),
    "pets": Archive(pets.samples, pets.classes, pets.PUBLISHED),
    "flowers102": Archive(flowers.samples, flowers.classes, flowers.PUBLISHED),
    "objectnet": Archive(objectnet.samples, objectnet.classes, objectnet.PUBLISHED, objectnet.objects),
}
IMAGENET_21K: dict[str, Published] = {
    "imagenet-21k": imagenet21k.WINTER21,
    "imagenet-21k-fall11": imagenet21k.FALL11,
}
ANY_SPLIT = ("train", "validation", "test")  # words that a set with no choice of them takes


def known_archive(source: str, wnids: Path | None = None, real: Path | None = None) -> Archive | None:
    """The known data set of this name, with its labels or its classes from other files; None where it is none."""
    if source == "imagenet-validation" and real is not None:
        # real.json holds ids; whoever wants the names takes the numbering of another set.
        samples = with_arguments(imagenet.real, real)
        return Archive(samples, imagenet.no_names, dict.fromkeys(ANY_SPLIT, imagenet.PUBLISHED_REAL))
    if source == "imagenet-validation":
        samples = with_arguments(imagenet.validation, wnids)
        names = with_arguments(imagenet.validation_classes, wnids)
        return Archive(samples, names, dict.fromkeys(ANY_SPLIT, imagenet.PUBLISHED_VALIDATION))
    if source in IMAGENET_21K:
        samples = with_arguments(imagenet21k.samples, wnids)
        names = with_arguments(imagenet21k.classes, wnids)
        return Archive(samples, names, {"train": IMAGENET_21K[source]})
    return ARCHIVES.get(source)


def samples_of_archive(
    archive: Archive, path: Path, split: str, name: str, *, partial: bool = False
) -> Iterator[Sample]:
    """The samples of a known data set, counted and compared with what is published, unless it is `partial` on purpose.

    `name` is the set's, for messages. Raises DataError where they differ, and where the archive is damaged or another.
    """
    names = (archive.counted or archive.classes)(path)
    return checked(archive.samples(path, split), names, archive.published[split], name, partial=partial)
