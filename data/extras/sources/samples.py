"""Samples to pack: encoded images with class ids; the digits data set; descriptions of known data sets.

A source is a generator of `Sample` in a fixed order. Lists of files are ordered by the hash of their names, so that
every shard mixes classes. Nothing is unpickled. The function `…_classes` next to a source returns its class names, in
the order of their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.extras.sources.numbering import Numbering
from data.images.decode import MAX_BYTES
from data.index.names import Names

# scikit-learn's copy of UCI's "Optical Recognition of Handwritten Digits", byte for byte; see digits.LICENSE.
DIGITS_FILE = Path(__file__).with_name("digits.csv.gz")
DIGITS: Names = tuple("0123456789")  # class names


@dataclass(frozen=True)
class Sample:
    """An encoded image, in memory or in a file, with its class ids; `key` identifies the sample and contains no dot.

    `labels` is None in a data set without labels; packing rejects empty `labels`.
    """

    key: str
    image: bytes | Path
    labels: tuple[int, ...] | None
    extension: str = "jpg"

    @property
    def size(self) -> int:
        """The size of the encoded image in bytes."""
        return len(self.image) if isinstance(self.image, bytes) else self.image.stat().st_size

    def read(self) -> bytes:
        """Return the encoded image; raises DataError if its file cannot be read or exceeds the decoder's limit."""
        if isinstance(self.image, bytes):
            return self.image
        try:
            if self.size > MAX_BYTES:
                raise DataError(
                    f"{self.image} has {self.size:,} bytes, expected at most {MAX_BYTES:,}; remove the file"
                )
            return self.image.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {self.image} ({error.strerror})") from None


class RawSample(NamedTuple):
    """A sample as stored in its tar; image and label are empty if the tar has none."""

    key: str
    image: bytes
    label: bytes
    is_intact: bool = True  # whether the table's digest matches; True without a table


def numbered(samples: Iterable[Sample], numbering: Numbering) -> Iterator[Sample]:
    """Yield the samples with renumbered class ids; skip samples whose classes the numbering excludes."""
    for sample in samples:
        if sample.labels is None:
            yield sample
            continue
        labels = numbering.labels(sample.labels, sample.key)
        # Keep samples without labels: packing rejects them with an error.
        if labels or not sample.labels:
            yield replace(sample, labels=labels) if labels != sample.labels else sample


# ------------------------------------------------------------------------------------------------ images


def kind_of(encoded: bytes) -> str:
    """Return the file extension for an encoded image, detected from its first bytes; "jpg" if the format is unknown."""
    if encoded[1:4] == b"PNG":
        return "png"
    if encoded[8:12] == b"WEBP":
        return "webp"
    return "jpg"


# ------------------------------------------------------------------------------------------------ digits


def digits(train: bool, image_size: int = 32) -> Iterator[Sample]:
    """Yield the training or test images of UCI's 1,797 handwritten digits, as RGB JPEGs.

    Every fifth image of each class is a test image.
    """
    import cv2

    table = np.loadtxt(DIGITS_FILE, np.uint8, delimiter=",")  # (1797, 65): 8 × 8 values of 0 … 16, then the digit
    seen = [0] * 10  # number of images of each digit so far
    for number, row in enumerate(table):
        label = int(row[-1])
        seen[label] += 1
        # Count per digit, so that both sets have about the same fraction of every digit.
        is_for_testing = seen[label] % 5 == 0
        if is_for_testing == train:
            continue
        grey = np.round(row[:-1].reshape(8, 8) * (255 / 16)).astype(np.uint8)
        # Disable Intel's IPP, whose result, and so the digest of the set, would depend on the processor.
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
    """The published numbers of samples and classes of a split, and their source."""

    samples: int
    classes: int
    source: str
    also: tuple[int, ...] = ()  # other numbers of samples reported for the same archive


class Archive(NamedTuple):
    """A data set as distributed by its owners."""

    samples: Callable[[Path, str], Iterator[Sample]]  # called with (archive or its folder, split)
    classes: Callable[[Path], Names]  # returns class names in the order of their ids
    published: dict[str, Published]  # split → its published properties; contains all splits
    counted: Callable[[Path], Names] | None = None  # the published classes, if they differ from `classes`
