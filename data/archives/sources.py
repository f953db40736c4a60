"""The data sets that are read from their owners' archives, by the name that a recipe gives them.

Each is a row of `ARCHIVES`: what reads its samples, what names its classes, its splits, and what it is known to hold.
A reader gets the path that the recipe gives, an archive or the folder in which several lie as they were downloaded, and
the name of a split; it gives the same samples in the same order every time, so that packing can be killed and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from data.archives import flowers, pets
from data.archives.published import Published
from data.shards.names import Names
from data.shards.sources import Sample


class Archive(NamedTuple):
    """A data set as its owners distribute it."""

    samples: Callable[[Path, str], Iterator[Sample]]  # of the archive, or the folder of archives, and a split
    classes: Callable[[Path], Names]  # in the order of their ids
    published: dict[str, Published]  # split → what it is known to hold; other splits there are none


ARCHIVES: dict[str, Archive] = {
    "pets": Archive(pets.samples, pets.classes, pets.PUBLISHED),
    "flowers102": Archive(flowers.samples, flowers.classes, flowers.PUBLISHED),
}
