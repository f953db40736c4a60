"""The images of archives as shards hold them: JPEG, PNG and WebP as they are, arrays and other kinds as PNG.

encode(pixels)                                   an array of RGB pixels, or of grey ones → PNG
as_image(raw, "cat_1.jpg", others)               a JPEG stays as it is, whatever its name says; a GIF becomes a PNG
"""

from __future__ import annotations

import io
import logging
from pathlib import Path

import numpy as np

from data.checks import printable
from data.errors import DataError
from data.index.refusals import Refusals

JPEG_START = b"\xff\xd8"
PNG_START = b"\x89PNG"
WEBP_MARK = b"WEBP"  # at byte 8


def encode(pixels: np.ndarray) -> bytes:
    """A PNG of uint8 pixels of shape (H, W, 3) in RGB, or (H, W) in grey; the same pixels give the same bytes."""
    import cv2

    # OpenCV encodes BGR.
    ordered = pixels[..., ::-1] if pixels.ndim == 3 else pixels
    return cv2.imencode(".png", np.ascontiguousarray(ordered))[1].tobytes()


def as_image(raw: bytes, name: str, changed: Refusals) -> tuple[bytes, str]:
    """An encoded image and its extension, by what its bytes are; kinds that no decoder here reads become PNG.

    Each change is counted in `changed`. Raises DataError where it is no image at all.
    """
    if raw.startswith(JPEG_START):
        return raw, "jpg"
    if raw.startswith(PNG_START):
        return raw, "png"
    if raw[8:12] == WEBP_MARK:
        return raw, "webp"

    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(raw)) as image:
            # Of a GIF with several frames, the first: what TensorFlow's data sets and Pillow show of it.
            pixels = np.asarray(image.convert("RGB"))
            kind = image.format
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{printable(name)}: no image ({error}); download the archive again") from None
    changed.add(f"{kind} made a PNG, pixel by pixel", name)
    return encode(pixels), "png"


def tell(archive: Path, notes: Refusals) -> None:
    """Say in a warning what was passed over in an archive, or changed, a line a reason."""
    log = logging.getLogger(__name__)
    for line in notes.lines():
        log.warning("%s: %s", archive, line.removeprefix("refused: "))
