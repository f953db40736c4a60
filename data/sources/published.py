"""What a known data set is, what it is published to hold, and whether what was read is that.

Archives are downloaded by hand, cut short, mixed up and thinned out; a number on half a test set is no number. So the
samples and classes of every known set are counted while they are packed, and compared before there is an index.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data.errors import DataError
from data.index.names import Names
from data.sources.samples import Sample


@dataclass(frozen=True)
class Published:
    """How many samples and classes a split has, and who says so."""

    samples: int
    classes: int
    source: str
    also: tuple[int, ...] = ()  # other numbers of samples that others have counted in the same archive

    def __str__(self) -> str:
        """Return `3,680 samples of 37 classes (Parkhi et al. 2012)`."""
        return f"{self.samples:,} samples of {self.classes:,} classes ({self.source})"


class Archive(NamedTuple):
    """A data set as its owners distribute it."""

    samples: Callable[[Path, str], Iterator[Sample]]  # of the archive, or the folder of archives, and a split
    classes: Callable[[Path], Names]  # in the order of their ids
    published: dict[str, Published]  # split → what it is known to hold; other splits there are none
    counted: Callable[[Path], Names] | None = None  # the classes that are published, where they are others than those


def samples_of_archive(
    archive: Archive, path: Path, split: str, name: str, *, partial: bool = False
) -> Iterator[Sample]:
    """Give the samples of a known data set, counted and compared with what is published.

    `name` is the set's, for messages. Raises DataError where they differ: before the first sample in the classes, after
    the last in the samples; and where the archive is damaged or another. Of a `partial` set what differs is logged.
    """
    published = archive.published[split]
    log = logging.getLogger(__name__)

    def compare(is_as_published: bool, text: str) -> None:
        if is_as_published:
            return
        line = f"{name}: found {text}, expected {published}"
        if not partial:
            raise DataError(
                f"{line}\n"
                "  compare the archive's size or checksum with its owners', and download it again\n"
                "  if it is a part on purpose: --partial, in a recipe partial: true"
            )
        log.warning("%s", line)

    names = (archive.counted or archive.classes)(path)
    samples = archive.samples(path, split)  # which may refuse what lies there, in better words than a count
    compare(not names or len(names) == published.classes, f"{len(names):,} classes")
    count = 0
    seen: set[int] = set()
    for sample in samples:
        count += 1
        seen.update(sample.labels)
        yield sample
    compare(count in (published.samples, *published.also), f"{count:,} samples of {len(seen):,} classes")
