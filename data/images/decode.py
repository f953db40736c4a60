"""Encoded bytes to RGB pixels, whole or only the crop that training wants; what is odd is refused by reason.

Orientation tags are ignored, as TensorFlow's decoders do; 16-bit images lose their low byte, alpha is
dropped, grey becomes three equal channels, CMYK is converted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import cv2
import numpy as np

from data.images.jpeg import decode_region

MAX_BYTES = 100_000_000  # of one encoded image
MAX_PIXELS = 100_000_000  # what a header may claim: 300 MB decoded
FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG markers that hold the image's sides

Box = tuple[int, int, int, int]  # y, x, h, w in pixels of the whole image


class BadImage(Exception):
    """This image cannot be used; the message is a short reason that groups well."""


@dataclass(frozen=True)
class Header:
    """What an image says of itself before any of it is decoded."""

    kind: str
    height: int
    width: int
    channels: int = 3


def read_header(data: bytes) -> Header:
    """Format and size from the first bytes; raises BadImage where odd, too large, or without an end."""
    if not data or len(data) > MAX_BYTES:
        raise BadImage("image file too large" if data else "no image")
    try:
        if data[:3] == b"\xff\xd8\xff":
            header = read_jpeg(data)
        elif data[:8] == b"\x89PNG\r\n\x1a\n":
            header = read_png(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            header = read_webp(data)
        else:
            raise BadImage("not a JPEG, PNG or WebP")
    except (struct.error, IndexError):
        raise BadImage("truncated") from None
    if not 0 < header.height * header.width <= MAX_PIXELS:
        raise BadImage("image too large" if header.height * header.width else "image without pixels")
    return header


def read_jpeg(data: bytes) -> Header:
    at, header = 2, None
    while data[at + 1] != 0xDA:  # start of scan
        if data[at] != 0xFF:
            raise BadImage("broken JPEG header")
        if data[at + 1] == 0xFF:
            at += 1
            continue
        if data[at + 1] < 0xC0 or 0xD0 <= data[at + 1] <= 0xD9:  # what has no length has no business here
            raise BadImage("broken JPEG header")
        if data[at + 1] in FRAMES:
            header = Header("jpeg", *struct.unpack_from(">HHB", data, at + 5))
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    if header is None or header.channels not in (1, 3, 4):
        raise BadImage("broken JPEG header")
    if data.rfind(b"\xff\xd9") < at:
        raise BadImage("truncated")
    return header


def read_png(data: bytes) -> Header:
    width, height = struct.unpack_from(">II", data, 16)
    if data.rfind(b"IEND") < 0:
        raise BadImage("truncated")
    return Header("png", height, width)


def read_webp(data: bytes) -> Header:
    if len(data) < 8 + struct.unpack_from("<I", data, 4)[0]:
        raise BadImage("truncated")
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
    elif chunk == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    return Header("webp", height, width)


def decode(data: bytes) -> np.ndarray:
    """The whole image as RGB (H, W, 3) uint8; raises BadImage."""
    read_header(data)
    return decode_whole(data)


def decode_whole(data: bytes) -> np.ndarray:
    """As `decode`, for bytes whose header has been read."""
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        image = None
    if image is None:
        raise BadImage("not decodable")
    return image


def decode_crop(data: bytes, header: Header, box: Box, covering: int) -> np.ndarray:
    """The pixels inside `box`; of JPEGs at 1/2, 1/4 or 1/8 scale where `covering` pixels remain a side.

    Only the box is decoded; at a reduced scale its edges move by at most half a reduced pixel. `covering` 0
    keeps full scale. Raises BadImage.
    """
    y, x, h, w = box
    if header.kind != "jpeg" or header.channels == 4:
        image = decode_whole(data)
        if image.shape[:2] != (header.height, header.width):
            raise BadImage("sides other than in its header")
        return image[y : y + h, x : x + w]
    d = reduction(min(h, w), covering)
    if d > 1:
        y, x, h, w = (y + d // 2) // d, (x + d // 2) // d, (h + d // 2) // d, (w + d // 2) // d
        y, x = min(y, -(-header.height // d) - h), min(x, -(-header.width // d) - w)
    pixels = decode_region(data, d, (y, x, h, w))
    if pixels is None:
        raise BadImage("not decodable")
    return pixels


def reduction(side: int, covering: int) -> int:
    """The largest denominator that leaves `side` at `covering` pixels or more."""
    return next((d for d in (8, 4, 2) if covering and side >= d * covering), 1)
