"""Samples on their way into shards: an encoded image with its class ids; the digits; what a known set is.

A source is a generator of `Sample`, always in the same order; lists of files are shuffled by the hash of their names,
so that a shard mixes classes whatever order the files were in. Nothing is unpickled. A function `…_classes` beside a
source gives the names of its classes, in the order of its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.images.decode import MAX_BYTES
from data.index.names import Names
from data.sources.numbering import Numbering

# scikit-learn's copy of UCI's "Optical Recognition of Handwritten Digits", byte for byte; digits.LICENSE beside it.
DIGITS_FILE = Path(__file__).with_name("digits.csv.gz")
DIGITS: Names = tuple("0123456789")  # what the digits' classes are called


@dataclass(frozen=True)
class Sample:
    """An encoded image, in memory or in a file, with its class ids; `key` names it, without a dot.

    `labels` are None in a set that has none on purpose; packing refuses an image whose labels are ().
    """

    key: str
    image: bytes | Path
    labels: tuple[int, ...] | None
    extension: str = "jpg"

    @property
    def size(self) -> int:
        """Return the bytes of the encoded image."""
        return len(self.image) if isinstance(self.image, bytes) else self.image.stat().st_size

    def read(self) -> bytes:
        """Return the encoded image; raises DataError where its file cannot be read, or no decoder would take it."""
        if isinstance(self.image, bytes):
            return self.image
        try:
            if self.size > MAX_BYTES:
                raise DataError(f"{self.image}: {self.size:,} bytes, expected {MAX_BYTES:,} at most; take it out")
            return self.image.read_bytes()
        except OSError as error:
            raise DataError(f"{self.image}: cannot read it ({error.strerror})") from None


class RawSample(NamedTuple):
    """A sample as it stands in its tar; image and label are empty where the tar has none."""

    key: str
    image: bytes
    label: bytes
    is_intact: bool = True  # as the table's digest tells; True without a table


def numbered(samples: Iterable[Sample], numbering: Numbering) -> Iterator[Sample]:
    """Give the samples with their classes numbered so, without those of classes that the numbering excludes."""
    for sample in samples:
        if sample.labels is None:
            yield sample
            continue
        labels = numbering.labels(sample.labels, sample.key)
        # A sample without labels stays as it is: packing refuses it by name.
        if labels or not sample.labels:
            yield replace(sample, labels=labels) if labels != sample.labels else sample


# ------------------------------------------------------------------------------------------------ images


def kind_of(encoded: bytes) -> str:
    """Return the extension that goes with an image's first bytes; "jpg" where they are of no kind that is known."""
    if encoded[1:4] == b"PNG":
        return "png"
    if encoded[8:12] == b"WEBP":
        return "webp"
    return "jpg"


# ------------------------------------------------------------------------------------------------ digits


def digits(train: bool, image_size: int = 32) -> Iterator[Sample]:
    """Give UCI's 1,797 handwritten digits as RGB JPEGs; every fifth of each class is for testing."""
    import cv2

    table = np.loadtxt(DIGITS_FILE, np.uint8, delimiter=",")  # (1797, 65): 8 × 8 values of 0 … 16, and the digit
    seen = [0] * 10  # images of each digit so far
    for number, row in enumerate(table):
        label = int(row[-1])
        seen[label] += 1
        # Counted within each digit, so that both parts have about the same share of every digit.
        is_for_testing = seen[label] % 5 == 0
        if is_for_testing == train:
            continue
        grey = np.round(row[:-1].reshape(8, 8) * (255 / 16)).astype(np.uint8)
        # Without Intel's IPP, whose result depends on the processor: the digest of the set would too.
        uses_ipp = cv2.ipp.useIPP()
        cv2.ipp.setUseIPP(False)
        large = cv2.resize(grey, (image_size, image_size), interpolation=cv2.INTER_CUBIC)
        cv2.ipp.setUseIPP(uses_ipp)
        colour = cv2.cvtColor(large, cv2.COLOR_GRAY2BGR)
        encoded = cv2.imencode(".jpg", colour, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
        yield Sample(f"digit{number:04d}", encoded, (label,))


# ------------------------------------------------------------------------------------------- known data sets


@dataclass(frozen=True)
class Published:
    """How many samples and classes a split has, and who says so."""

    samples: int
    classes: int
    source: str
    also: tuple[int, ...] = ()  # other numbers of samples that others have counted in the same archive


class Archive(NamedTuple):
    """A data set as its owners distribute it."""

    samples: Callable[[Path, str], Iterator[Sample]]  # of the archive, or the folder of archives, and a split
    classes: Callable[[Path], Names]  # in the order of their ids
    published: dict[str, Published]  # split → what it is known to hold; other splits there are none
    counted: Callable[[Path], Names] | None = None  # the classes that are published, where they are others than those
