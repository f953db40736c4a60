"""What readers of known data sets share: files out of archives, images as PNG, and the count of what was read.

Archives are downloaded by hand, cut short, mixed up and thinned out; a number on half a test set is no number. So the
samples and classes of every known set are counted while they are packed, and compared before there is an index.

    encode(pixels)                                   an array of RGB pixels, or of grey pixels → PNG
    as_image(raw, "cat_1.jpg", others)               a JPEG stays as it is, whatever its name says; a GIF becomes a PNG
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from data.checks import printable
from data.errors import DataError
from data.extras.sources.members import members
from data.index.index import Refusals
from data.sources.samples import Archive, Sample, kind_of

MOST_OF_A_LIST = 1 << 30  # bytes of a file that is no image; CIFAR-100's train.bin has 154 MB


def read_members(
    path: str | os.PathLike[str],
    bases: Collection[str],
    way_out: str = "; is this the archive that its owners call so?",
) -> dict[str, bytes]:
    """Read the files of a small archive by the last parts of their paths.

    Raises DataError, which ends with `way_out`, where one is missing.
    """
    contents: dict[str, bytes] = {}
    for member in members(path):
        if member.base in bases:
            contents[member.base] = member.read(MOST_OF_A_LIST)
    lacking = [base for base in bases if base not in contents]
    if lacking:
        raise DataError(f"{path}: has no {', '.join(lacking)}{way_out}")
    return contents


def text_of(content: bytes, name: str) -> str:
    """Return the text of a file of an archive; raises DataError where it is none."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 at byte {error.start}; download the archive again") from None


def first_present(folder: str | os.PathLike[str], names: Collection[str], page: str) -> Path:
    """Return the first of these files or folders that lies in a folder; raises DataError saying where to get them."""
    folder = Path(folder)
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise DataError(f"{folder}: has none of {', '.join(names)}\n  download it from {page}")


def encode(pixels: np.ndarray) -> bytes:
    """Return a PNG of uint8 pixels of shape (H, W, 3) in RGB, or (H, W) in grey; same pixels give the same bytes."""
    # OpenCV encodes BGR.
    ordered = pixels[..., ::-1] if pixels.ndim == 3 else pixels
    return cv2.imencode(".png", np.ascontiguousarray(ordered))[1].tobytes()


def as_image(raw: bytes, name: str, changed: Refusals) -> tuple[bytes, str]:
    """Return an encoded image and its extension, by what its bytes are; kinds that no decoder here reads become PNG.

    Each change is counted in `changed`. Raises DataError where it is no image at all.
    """
    kind = kind_of(raw)
    if kind != "jpg" or raw.startswith(b"\xff\xd8"):
        return raw, kind

    try:
        with Image.open(io.BytesIO(raw)) as image:
            # Of a GIF with several frames, the first: what TensorFlow's data sets and Pillow show of it.
            pixels = np.asarray(image.convert("RGB"))
            changed.add(f"{image.format} made a PNG, pixel by pixel", name)
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{printable(name)}: no image ({error}); download the archive again") from None
    return encode(pixels), "png"


def warn_of(source: Path, notes: Refusals) -> None:
    """Log a warning of what was passed over in a source, or changed, a line a reason."""
    log = logging.getLogger(__name__)
    for line in notes.lines():
        log.warning("%s: %s", source, line)


def samples_of_archive(
    archive: Archive, path: Path, split: str, name: str, *, partial: bool = False
) -> Iterator[Sample]:
    """Give the samples of a known data set, counted and compared with what is published.

    `name` is the set's, for messages. Raises DataError where they differ: before the first sample in the classes, after
    the last in the samples; and where the archive is damaged or another. Of a `partial` set what differs is logged.
    """
    published = archive.published[split]
    expected = f"expected {published.samples:,} samples of {published.classes:,} classes ({published.source})"
    way_out = (
        "\n  compare the archive's size or checksum with its owners', and download it again\n"
        "  if it is a part on purpose: --partial, in a recipe partial: true"
    )
    log = logging.getLogger(__name__)

    names = (archive.counted or archive.classes)(path)
    samples = archive.samples(path, split)  # which may refuse what lies there, in better words than a count
    if names and len(names) != published.classes:
        difference = f"{name}: found {len(names):,} classes, {expected}"
        if not partial:
            raise DataError(difference + way_out)
        log.warning("%s", difference)

    count = 0
    seen: set[int] = set()
    for sample in samples:
        count += 1
        seen.update(sample.labels or ())
        yield sample
    if count not in (published.samples, *published.also):
        difference = f"{name}: found {count:,} samples of {len(seen):,} classes, {expected}"
        if not partial:
            raise DataError(difference + way_out)
        log.warning("%s", difference)
