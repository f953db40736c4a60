"""Image files that other programs write: animated PNGs, CMYK JPEGs with and without an Adobe marker, stray bytes."""

import io
import random
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from data.images.decode import BadImage, Box, decode, decode_crop, read_header

pytestmark = pytest.mark.quick

SIDE = 24
COLOURS = {0: ("grey", 1), 2: ("RGB", 3), 3: ("palette", 1), 4: ("grey and alpha", 2), 6: ("RGBA", 4)}
# Colour types and bit depths that PNG allows (PNG specification, table 11.1).
KINDS = [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (2, 8), (2, 16), (3, 1), (3, 2), (3, 4), (3, 8), (4, 8), (4, 16)]
KINDS += [(6, 8), (6, 16)]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def pixels_of(rng: np.random.Generator, colour: int, depth: int) -> bytes:
    """Return random rows of an image, each after the byte of filter 0, compressed."""
    row_bytes = (SIDE * COLOURS[colour][1] * depth + 7) // 8
    rows = [b"\0" + rng.integers(0, 256, row_bytes, np.uint8).tobytes() for _ in range(SIDE)]
    return zlib.compress(b"".join(rows))


def png(colour: int, depth: int, *, is_animated: bool, still: bytes | None = None, seed: int = 0) -> bytes:
    """Return a PNG; if animated, its frames are other pixels than the still image, which belongs to no frame."""
    rng = np.random.default_rng(seed)
    content = pixels_of(rng, colour, depth) if still is None else still
    palette = rng.integers(0, 256, 3 << depth, np.uint8).tobytes() if colour == 3 else b""
    chunks = [chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, depth, colour, 0, 0, 0))]
    if palette:
        chunks.append(chunk(b"PLTE", palette))
    if is_animated:
        chunks.append(chunk(b"acTL", struct.pack(">II", 2, 0)))
    chunks.append(chunk(b"IDAT", content))
    for frame in range(2 if is_animated else 0):
        control = struct.pack(">IIIIIHHBB", 2 * frame, SIDE, SIDE, 0, 0, 1, 10, 0, 0)
        chunks.append(chunk(b"fcTL", control))
        other = pixels_of(np.random.default_rng(100 + frame), colour, depth)
        chunks.append(chunk(b"fdAT", struct.pack(">I", 2 * frame + 1) + other))
    chunks.append(chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(("colour", "depth"), KINDS)
def test_the_still_image_of_an_animated_png_is_decoded(colour: int, depth: int) -> None:
    animated = png(colour, depth, is_animated=True)
    still = decode(png(colour, depth, is_animated=False))
    np.testing.assert_array_equal(decode(animated), still)
    np.testing.assert_array_equal(decode_crop(animated, read_header(animated), Box(3, 4, 10, 9), 0), still[3:13, 4:13])
    if depth == 8:
        with Image.open(io.BytesIO(png(colour, depth, is_animated=False))) as image:
            # Alpha is dropped, not blended.
            expected = np.asarray(image.convert("RGBA"))[..., :3]
        np.testing.assert_array_equal(still, expected)


@pytest.mark.parametrize("damage", ["half of the rows", "no zlib stream", "one flipped byte", "no pixels at all"])
def test_a_damaged_animated_png_is_refused_like_the_same_damage_in_a_plain_one(damage: str) -> None:
    content = pixels_of(np.random.default_rng(0), 2, 8)
    half = zlib.compress(zlib.decompress(content)[: SIDE * (3 * SIDE + 1) // 2])
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]
    damaged = {"half of the rows": half, "no zlib stream": b"\1" * 99, "one flipped byte": flipped}.get(damage, b"")
    for is_animated in (False, True):
        with pytest.raises(BadImage, match="not decodable"):
            decode(png(2, 8, is_animated=is_animated, still=damaged))


# ------------------------------------------------------------------------------------------------ JPEGs


def segments(jpeg: bytes) -> tuple[list[bytes], bytes]:
    """Return the segments of a JPEG before its first scan, and the rest."""
    parts = [jpeg[:2]]
    at = 2
    while jpeg[at + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", jpeg, at + 2)
        parts.append(jpeg[at : at + 2 + length])
        at += 2 + length
    return parts, jpeg[at:]


def flat_cmyk(stored: tuple[int, int, int, int], *, has_adobe_marker: bool) -> bytes:
    """Return a CMYK JPEG of one colour, given the values that are stored in it."""
    # Pillow stores 255 minus its pixels, and always writes the marker.
    pixels = 255 - np.full((16, 16, 4), stored, np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels, "CMYK").save(out, "JPEG", quality=100, subsampling=0)
    parts, scan = segments(out.getvalue())
    kept = [part for part in parts if has_adobe_marker or part[:2] != b"\xff\xee"]
    return b"".join(kept) + scan


@pytest.mark.parametrize("stored", [(0, 0, 0, 255), (255, 10, 120, 200), (40, 80, 160, 255), (7, 255, 33, 90)])
def test_cmyk_becomes_rgb_by_the_formula_of_tensorflow(stored: tuple[int, int, int, int]) -> None:
    *cmy, k = stored
    with_marker = [k * value // 255 for value in cmy]
    without_marker = [(255 - k) * (255 - value) // 255 for value in cmy]
    # A value of a flat block of quality 100 moves by one at most.
    for has_adobe_marker, expected in ((True, with_marker), (False, without_marker)):
        image = decode(flat_cmyk(stored, has_adobe_marker=has_adobe_marker))
        assert np.abs(image.astype(int) - expected).max() <= 2, (has_adobe_marker, image[0, 0], expected)


STRAY = {
    "zeros": b"\0" * 7,
    "text": b"written by a camera",
    "a stuffed byte": b"\xff\0\xff\0",
    "fill bytes": b"\xff" * 5,
    "a restart marker": b"\xff\xd0",
    "TEM": b"\xff\x01",
}


@pytest.mark.parametrize("is_progressive", [False, True])
@pytest.mark.parametrize("stray", STRAY)
def test_stray_bytes_between_segments_are_skipped_as_libjpeg_skips_them(stray: str, is_progressive: bool) -> None:
    image = np.random.default_rng(1).integers(0, 256, (40, 56, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(image).save(out, "JPEG", quality=90, progressive=is_progressive)
    clean = out.getvalue()
    expected = decode(clean)
    parts, scan = segments(clean)
    for place in range(1, len(parts) + 1):
        data = b"".join(parts[:place]) + STRAY[stray] + b"".join(parts[place:]) + scan
        header = read_header(data)
        assert (header.height, header.width) == (40, 56)
        np.testing.assert_array_equal(decode(data), expected, err_msg=f"before segment {place}")
        crop = decode_crop(data, header, Box(8, 16, 16, 24), 0)
        np.testing.assert_array_equal(crop, expected[8:24, 16:40])


def test_a_header_and_a_decoder_never_disagree_on_damaged_jpegs() -> None:
    rng = random.Random(5)
    image = np.random.default_rng(2).integers(0, 256, (32, 48, 3), np.uint8)
    clean = cv2.imencode(".jpg", image)[1].tobytes()
    decoded = 0
    for _ in range(400):
        data = bytearray(clean)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(2, 640)] = rng.choice([0, 1, 0xFF, 0xC0, 0xD0, 0xD8, 0xDA, rng.randrange(256)])
        try:
            header = read_header(bytes(data))
            pixels = decode(bytes(data))
        except BadImage:
            continue
        assert pixels.shape == (header.height, header.width, 3)
        decoded += 1
    assert decoded >= 50, "the damage is too heavy to show anything"
