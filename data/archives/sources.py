"""The data sets that are read from their owners' archives, by the name that a recipe gives them.

Each is a row of `ARCHIVES`: what reads its samples, what names its classes, and what each of its splits is known to
hold. A reader gets the path that the recipe gives, an archive or the folder in which several lie as they were
downloaded, and the name of a split; it gives the same samples in the same order every time, so that packing can be
killed and go on. ImageNet's validation images and ImageNet-21k need more than a path, and stand below by themselves.

    known_samples("pets", Path("downloads"), "test")     3,669 samples, or DataError saying how many there are
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from data.archives import cifar, flowers, imagenet, imagenet21k, objectnet, pets
from data.archives.published import Published, checked
from data.shards.names import Names
from data.shards.sources import Sample


class Archive(NamedTuple):
    """A data set as its owners distribute it."""

    samples: Callable[[Path, str], Iterator[Sample]]  # of the archive, or the folder of archives, and a split
    classes: Callable[[Path], Names]  # in the order of their ids
    published: dict[str, Published]  # split → what it is known to hold; other splits there are none


ARCHIVES: dict[str, Archive] = {
    "imagenet-train": Archive(imagenet.train, imagenet.train_classes, imagenet.PUBLISHED),
    "cifar10": Archive(cifar.cifar10_samples, cifar.cifar10_classes, cifar.PUBLISHED_10),
    "cifar100": Archive(cifar.cifar100_samples, cifar.cifar100_classes, cifar.PUBLISHED_100),
    "pets": Archive(pets.samples, pets.classes, pets.PUBLISHED),
    "flowers102": Archive(flowers.samples, flowers.classes, flowers.PUBLISHED),
    "objectnet": Archive(objectnet.samples, objectnet.classes, objectnet.PUBLISHED),
}
IMAGENET_21K: dict[str, dict[str, Published]] = {
    "imagenet-21k": imagenet21k.PUBLISHED_WINTER21,
    "imagenet-21k-fall11": imagenet21k.PUBLISHED_FALL11,
}
VALIDATION = "imagenet-validation"
KNOWN = (*ARCHIVES, *IMAGENET_21K, VALIDATION)


def splits_of(source: str) -> tuple[str, ...]:
    """The splits of a known data set; none where it has no choice of them."""
    if source in ARCHIVES:
        return tuple(ARCHIVES[source].published)
    return tuple(IMAGENET_21K.get(source, ()))


def known_published(source: str, split: str, real: Path | None = None) -> Published:
    """What a split of a known data set holds, according to those who made it."""
    if source == VALIDATION:
        return imagenet.PUBLISHED_VALIDATION if real is None else imagenet.PUBLISHED_REAL
    if source in IMAGENET_21K:
        return IMAGENET_21K[source][split]
    return ARCHIVES[source].published[split]


def known_classes(source: str, path: Path, wnids: Path | None = None, real: Path | None = None) -> Names:
    """The class names of a known data set, in the order of their ids; none where its files do not tell them."""
    if source == VALIDATION:
        # real.json holds ids; whoever wants the names takes the numbering of another set.
        return imagenet.validation_classes(path, wnids) if real is None else ()
    if source in IMAGENET_21K:
        return imagenet.listed_classes(wnids) if wnids is not None else imagenet21k.classes(path)
    return ARCHIVES[source].classes(path)


def known_samples(
    source: str, path: Path, split: str, wnids: Path | None = None, real: Path | None = None, *, partial: bool = False
) -> Iterator[Sample]:
    """The samples of a known data set, counted and compared with what is published, unless it is `partial` on purpose.

    Raises DataError where they differ, and where the archive is damaged or is another one.
    """
    names = known_classes(source, path, wnids, real)
    if source == VALIDATION:
        samples = imagenet.validation(path, wnids) if real is None else imagenet.real(path, real)
    elif source in IMAGENET_21K:
        samples = imagenet21k.samples(path, names)
    else:
        samples = ARCHIVES[source].samples(path, split)
    # ObjectNet's images have ids of ImageNet's classes, and fewer objects than ids.
    counted = objectnet.objects(path) if source == "objectnet" else names
    label = f"{source}, {split}" if splits_of(source) else source
    return checked(samples, counted, known_published(source, split, real), label, partial=partial)
