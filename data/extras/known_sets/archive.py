"""Shared parts of the readers of public data sets: archive members, PNG encoding, and sample counts.

Archives are downloaded by hand and may be truncated, mixed up or incomplete, and an accuracy on half a test set is
meaningless. Packing therefore counts the samples and classes of each public set, and compares the counts with the
published ones before it writes the index.

    encode(pixels)                                   an array of RGB pixels, or of grey pixels → PNG
    as_image(raw, "cat_1.jpg", others)               a JPEG is kept whatever its file name; a GIF is converted to PNG
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
from data.extras.sources.refusals import Refusals, refusal_lines
from data.extras.sources.samples import Archive, Sample, kind_of

MAX_LIST_BYTES = 1 << 30  # largest size in bytes of a file that is not an image; CIFAR-100's train.bin has 154 MB


def read_members(
    path: str | os.PathLike[str],
    bases: Collection[str],
    way_out: str = "; check that this is the original archive",
) -> dict[str, bytes]:
    """Read files of a small archive, selected by the last component of their paths.

    Raises DataError, with `way_out` at the end of the message, if a file is missing.
    """
    contents: dict[str, bytes] = {}
    for member in members(path):
        if member.base in bases:
            contents[member.base] = member.read(MAX_LIST_BYTES)
    missing = [base for base in bases if base not in contents]
    if missing:
        raise DataError(f"{path}: missing {', '.join(missing)}{way_out}")
    return contents


def text_of(content: bytes, name: str) -> str:
    """Decode an archive member as UTF-8 text; raises DataError if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: invalid UTF-8 at byte {error.start}; download the archive again") from None


def first_present(folder: str | os.PathLike[str], names: Collection[str], page: str) -> Path:
    """Return the path of the first of these names that exists in a folder.

    Raises DataError if none exists; the message refers to `page`.
    """
    folder = Path(folder)
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise DataError(f"{folder}: expected one of {', '.join(names)}\n  download it from {page}")


def encode(pixels: np.ndarray) -> bytes:
    """Encode uint8 pixels, (H, W, 3) in RGB or (H, W) in grey, as PNG; the result is deterministic."""
    # OpenCV encodes BGR.
    ordered = pixels[..., ::-1] if pixels.ndim == 3 else pixels
    return cv2.imencode(".png", np.ascontiguousarray(ordered))[1].tobytes()


def as_image(raw: bytes, name: str, changed: Refusals) -> tuple[bytes, str]:
    """Return an encoded image and the extension of its actual format; unsupported formats are converted to PNG.

    Conversions are counted in `changed`. Raises DataError if the bytes are not an image.
    """
    kind = kind_of(raw)
    if kind != "jpg" or raw.startswith(b"\xff\xd8"):
        return raw, kind

    try:
        with Image.open(io.BytesIO(raw)) as image:
            # Use the first frame of an animated GIF, like TensorFlow Datasets and Pillow.
            pixels = np.asarray(image.convert("RGB"))
            changed.add(f"{image.format} converted to PNG without loss", name)
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{printable(name)}: not an image ({error}); download the archive again") from None
    return encode(pixels), "png"


def log_notes(source: Path, notes: Refusals) -> None:
    """Log a warning for each reason why files in a source were skipped or converted."""
    log = logging.getLogger(__name__)
    for line in refusal_lines(notes):
        log.warning("%s: %s", source, line)


def samples_of_archive(
    archive: Archive, path: Path, split: str, name: str, *, partial: bool = False
) -> Iterator[Sample]:
    """Yield the samples of a public data set, and compare their number with the published one.

    `name` is the name of the set in messages. Raises DataError if the number of classes differs (before the first
    sample), if the number of samples differs (after the last one), or if the archive is damaged or of another data set.
    With `partial=True`, differences are only logged.
    """
    published = archive.published[split]
    expected = f"expected {published.samples:,} samples of {published.classes:,} classes ({published.source})"
    way_out = (
        "\n  compare the archive's size or checksum with the published one, and download it again\n"
        "  if you want to use part of the set: pass --partial, or set partial: true in a recipe"
    )
    log = logging.getLogger(__name__)

    names = (archive.counted or archive.classes)(path)
    samples = archive.samples(path, split)  # this may raise a more specific error than the comparison of counts
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
