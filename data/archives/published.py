"""What a data set is known to hold, and whether what was read is that.

Archives are downloaded by hand, cut short, mixed up and thinned out; a number on half a test set is no number. So the
samples and classes of every known set are counted while they are packed, and compared before there is an index.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data.errors import DataError
from data.index.names import Names
from data.shards.sources import Sample


@dataclass(frozen=True)
class Published:
    """How many samples and classes a split has, and who says so."""

    samples: int
    classes: int
    source: str
    also: tuple[int, ...] = ()  # other numbers of samples that those who hold the same archive have counted

    def __str__(self) -> str:
        """`3,680 samples of 37 classes (Parkhi et al. 2012)`."""
        return f"{self.samples:,} samples of {self.classes:,} classes ({self.source})"


def checked(
    samples: Iterable[Sample], names: Names, published: Published, name: str, *, partial: bool
) -> Iterator[Sample]:
    """The samples, counted; raises DataError before the first where the classes, at the end where the samples differ.

    `names` are the classes of the source, none where it does not know them; `name` is the set's, for messages. Where
    the set is a part on purpose, `partial`, what differs is said in a warning.
    """
    log = logging.getLogger(__name__)
    if names and len(names) != published.classes:
        text = f"{name}: found {len(names):,} classes, expected {published}"
        if not partial:
            raise DataError(f"{text}\n{WAY_OUT}")
        log.warning("%s", text)
    count = 0
    seen: set[int] = set()
    for sample in samples:
        count += 1
        seen.update(sample.labels)
        yield sample
    if count not in (published.samples, *published.also):
        text = f"{name}: found {count:,} samples of {len(seen):,} classes, expected {published}"
        if not partial:
            raise DataError(f"{text}\n{WAY_OUT}")
        log.warning("%s", text)


WAY_OUT = (
    "  compare the archive's size or checksum with its owners', and download it again\n"
    "  if it is a part on purpose: --partial, in a recipe partial: true"
)
