"""Encoded bytes to RGB pixels, whole or only the crop that training wants; a bad image is refused with a reason.

Orientation tags are ignored, as TensorFlow's decoders do; 16-bit images lose their low byte, alpha is
dropped, grey becomes three equal channels, CMYK is converted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from data.images.jpeg import decode_region

MAX_BYTES = 100_000_000  # of one encoded image
MAX_PIXELS = 100_000_000  # what a header may claim: 300 MB decoded

# Scans of one JPEG. libjpeg writes 10 into a progressive photograph and 18 into a CMYK one. A scan without content is
# 20 bytes that make libjpeg walk over all blocks again: 500 of them in 68 kB cost 4 times the image, 2,000 cost 13.
MAX_SCANS = 32

# Bytes that follow 0xFF in a JPEG (ITU-T T.81, table B.1).
START_OF_SCAN = 0xDA
SEQUENTIAL = {0xC0, 0xC1, 0xC9}  # frames whose scans hold whole blocks: baseline, extended, arithmetic
FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # what holds the image's sides
END_OF_IMAGE = b"\xff\xd9"


class Box(NamedTuple):
    """A rectangle in pixels of the whole image."""

    y: int
    x: int
    height: int
    width: int


class BadImage(Exception):
    """This image cannot be used; the message is a short reason that groups well."""


@dataclass(frozen=True)
class Header:
    """What an image says of itself before any of it is decoded."""

    kind: str
    height: int
    width: int
    channels: int = 3


# ----------------------------------------------------------------------------- headers


def read_header(data: bytes) -> Header:
    """Read format and size from the first bytes; raises BadImage where odd, too large, or without an end."""
    if not data:
        raise BadImage("no image")
    if len(data) > MAX_BYTES:
        raise BadImage("image file too large")
    try:
        if data[:3] == b"\xff\xd8\xff":
            header = read_jpeg(data)
        elif data[:8] == b"\x89PNG\r\n\x1a\n":
            # The sides stand in the first chunk.
            width, height = struct.unpack_from(">II", data, 16)
            if data.rfind(b"IEND") < 0:
                raise BadImage("truncated")
            header = Header("png", height, width)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            header = read_webp(data)
        else:
            raise BadImage("not a JPEG, PNG or WebP")
    # The parsers read past the end where a header is cut; one place here instead of a check at every field.
    except (struct.error, IndexError):
        raise BadImage("truncated") from None

    # Refused before decoding: a few bytes may claim an image that fills the memory.
    pixels = header.height * header.width
    if pixels == 0:
        raise BadImage("image without pixels")
    if pixels > MAX_PIXELS:
        raise BadImage("image too large")
    return header


def read_jpeg(data: bytes) -> Header:
    """Return the sides from the last frame header before the scan; raises BadImage, struct.error and IndexError."""
    header = None
    frame = 0
    at = 2  # behind the marker that every JPEG begins with
    while data[at + 1] != START_OF_SCAN:
        marker = data[at + 1]
        if data[at] != 0xFF:
            raise BadImage("broken JPEG header")
        if marker == 0xFF:  # any number of these may fill up before a marker
            at += 1
            continue
        # What has no length has no business here: readers that differ on it would see frames of different sides.
        if marker < 0xC0 or 0xD0 <= marker <= 0xD9:
            raise BadImage("broken JPEG header")
        if marker in FRAMES:
            height, width, channels = struct.unpack_from(">HHB", data, at + 5)
            header = Header("jpeg", height, width, channels)
            frame = marker
        (length,) = struct.unpack_from(">H", data, at + 2)
        at += 2 + length
    # libjpeg would pass over a byte that is no 0xFF, and find its scan further on.
    if header is None or header.channels not in (1, 3, 4) or data[at] != 0xFF:
        raise BadImage("broken JPEG header")
    # libjpeg decodes a file that was cut short and fills up with grey, with no more than a warning.
    if data.rfind(END_OF_IMAGE) < at:
        raise BadImage("truncated")
    # A sequential image whose first scan has all components has no other: libjpeg reads none after it.
    channels_in_scan = data[at + 4]
    if frame in SEQUENTIAL and channels_in_scan == header.channels:
        return header
    # Inside a scan's data 0xFF is followed by 0x00 or a restart marker, so the two bytes of a marker mean a scan, but
    # for the rare table that contains them: never fewer are counted than a decoder would see. NumPy takes 13 µs for
    # 50 kB; `bytes.count` takes four times as long.
    bytes_from_scan = np.frombuffer(data, np.uint8, offset=at)
    places = np.flatnonzero(bytes_from_scan[1:] == START_OF_SCAN)
    if np.count_nonzero(bytes_from_scan[places] == 0xFF) > MAX_SCANS:
        raise BadImage("too many scans")
    return header


def read_webp(data: bytes) -> Header:
    """Read the sides from the first chunk (RFC 9649: extended, lossless or lossy); raises BadImage and struct.error."""
    (riff_bytes,) = struct.unpack_from("<I", data, 4)
    if len(data) < 8 + riff_bytes:
        raise BadImage("truncated")
    chunk = data[12:16]
    if chunk == b"VP8X":  # 24 bits each, less one
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
    elif chunk == b"VP8L":  # 14 bits each, less one
        (bits,) = struct.unpack_from("<I", data, 21)
        width = 1 + (bits & 0x3FFF)
        height = 1 + (bits >> 14 & 0x3FFF)
    else:  # 14 bits each, below two of a scale
        width_field, height_field = struct.unpack_from("<HH", data, 26)
        width = width_field & 0x3FFF
        height = height_field & 0x3FFF
    return Header("webp", height, width)


# ----------------------------------------------------------------------------- pixels


def decode(data: bytes) -> np.ndarray:
    """Return the whole image as RGB (H, W, 3) uint8; raises BadImage."""
    read_header(data)
    return decode_whole(data)


def decode_whole(data: bytes) -> np.ndarray:
    """Decode bytes whose header has been read; otherwise as `decode`."""
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        image = None
    if image is None:
        raise BadImage("not decodable")
    return image


def decode_crop(data: bytes, header: Header, box: Box, covering: int) -> np.ndarray:
    """Return the pixels inside `box`; of JPEGs at 1/2, 1/4 or 1/8 scale where `covering` pixels remain a side.

    Only the box is decoded; at a reduced scale its edges move by at most half a reduced pixel. `covering` 0
    keeps full scale. Raises BadImage.
    """
    y, x, h, w = box
    # The binding knows JPEGs of one or three channels; anything else is decoded whole and cut.
    if header.kind != "jpeg" or header.channels == 4:
        image = decode_whole(data)
        # The box was drawn from the header; in an image of other sides it would lie elsewhere or outside.
        if image.shape[:2] != (header.height, header.width):
            raise BadImage("sides other than in its header")
        return image[y : y + h, x : x + w]

    denominator = reduction(min(h, w), covering)
    region = Box(y, x, h, w)
    if denominator > 1:
        region = reduced_box(region, header, denominator)
    pixels = decode_region(data, denominator, region)
    if pixels is None:
        raise BadImage("not decodable")
    return pixels


def reduction(side: int, covering: int) -> int:
    """Return the largest denominator that leaves `side` at `covering` pixels or more; 1 where `covering` is 0."""
    if covering:
        for denominator in (8, 4, 2):
            if side >= denominator * covering:
                return denominator
    return 1


def reduced_box(box: Box, header: Header, denominator: int) -> Box:
    """Round the box to pixels of the image at 1/denominator scale, moved so that it lies inside."""
    half = denominator // 2
    height = (box.height + half) // denominator
    width = (box.width + half) // denominator
    y = (box.y + half) // denominator
    x = (box.x + half) // denominator
    # The reduced image has ⌈side / denominator⌉ pixels.
    max_y = -(-header.height // denominator) - height
    max_x = -(-header.width // denominator) - width
    return Box(min(y, max_y), min(x, max_x), height, width)
