"""Decode images to RGB pixels, completely or only a crop; bad images are rejected with a reason.

1. `read_header` returns format and size, and rejects unsupported, too large and truncated files.
2. `decode_whole` decodes a whole image with OpenCV; `decode_crop` decodes only a box, for JPEGs at a reduced scale.
3. For JPEGs, libjpeg-turbo decodes only the box, through a thin binding, `jpeg.cpp`. It is compiled at first use (in
   less than a second, cached in the user's cache folder) against the libjpeg-turbo inside Pillow's wheel. Without a
   compiler, OpenCV decodes the whole image at the same scale and the box is cropped: equal pixels, but slower.
   docs/design/decoding.md has the measurements.

Orientation tags are ignored, as in TensorFlow's decoders. 16-bit images are reduced to their high byte, alpha is
dropped, grey is copied to three channels, and CMYK is converted to RGB.
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from data.files import is_own, state_folder
from data.seal import read_entry, write_entry

MAX_BYTES = 100_000_000  # maximum size of an encoded image
MAX_PIXELS = 100_000_000  # maximum size of an image according to its header: 300 MB decoded

# Scans of a JPEG. libjpeg writes 10 for a progressive photograph and 18 for CMYK. An empty scan takes 20 bytes but
# makes libjpeg process all blocks again: 500 of them in 68 kB cost 4 times as much as the image, 2,000 cost 13 times.
MAX_SCANS = 32

# Bytes that follow 0xFF in a JPEG (ITU-T T.81, table B.1).
START_OF_SCAN = 0xDA
SEQUENTIAL = {0xC0, 0xC1, 0xC9}  # frames whose scans contain whole blocks: baseline, extended, arithmetic
# Frames that few programs write, for medical images, and that the original's decoder does not read.
UNSUPPORTED = {0xC3: "lossless JPEG", 0xCB: "lossless JPEG"}
UNSUPPORTED |= dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "hierarchical JPEG")
FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of frame headers, which contain the image size
JPEG_START = b"\xff\xd8"
END_OF_IMAGE = b"\xff\xd9"
WITH_LENGTH = frozenset(range(0xC0, 0xF0)) - {*range(0xD0, 0xDA)} | {0xFE}
WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD8)}  # not a marker after 0xFF; TEM; restart markers
APP14 = 0xEE
ADOBE_BYTES = 2 + 12  # length field of the Adobe marker; libjpeg ignores shorter ones

PNG_START = b"\x89PNG\r\n\x1a\n"
ANIMATION = b"acTL"  # the chunk that makes a PNG an animation (APNG)
LARGEST_TEXT = 8_000_000  # bytes of a chunk that OpenCV reads
PIXELS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")  # the chunks of a PNG that determine its pixels

SOURCE = Path(__file__).with_name("jpeg.cpp")
COMPILE_TIMEOUT_S = 120  # compiling takes 0.3 to 1.5 s

# OpenCV's flags for JPEGs at 1/2, 1/4 or 1/8 scale; the reduced ones return BGR.
REDUCED = {
    1: cv2.IMREAD_COLOR_RGB,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}


class Box(NamedTuple):
    """A rectangle in pixels of the full-size image."""

    y: int
    x: int
    height: int
    width: int


class BadImage(Exception):
    """The image cannot be used; the message is a short reason, suitable for grouping."""


@dataclass(frozen=True)
class Header:
    """Format and size of an image, according to its header."""

    kind: str
    height: int
    width: int
    channels: int = 3
    has_adobe_marker: bool = False  # determines how a JPEG with four channels is converted to RGB
    unsupported: str = field(default="", compare=False)  # why its pixels cannot be decoded; "" if they may be


# ----------------------------------------------------------------------------- headers


def read_header(data: bytes) -> Header:
    """Read format and size of an encoded image; raises BadImage if it is unsupported, too large or truncated."""
    if not data:
        raise BadImage("no image")
    if len(data) > MAX_BYTES:
        raise BadImage("image file too large")
    try:
        if data[:2] == JPEG_START:
            header = read_jpeg(data)
        elif data[:8] == PNG_START:
            # The first chunk contains the size.
            width, height = struct.unpack_from(">II", data, 16)
            if data.rfind(b"IEND") < 0:
                raise BadImage("truncated")
            header = Header("png", height, width)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            header = read_webp(data)
        else:
            raise BadImage("not a JPEG, PNG or WebP")
    # The parsers read past the end of a truncated header; catch that here instead of checking every field.
    except (struct.error, IndexError):
        raise BadImage("truncated") from None

    # Reject before decoding: a few bytes may claim an image that exhausts the memory.
    pixels = header.height * header.width
    if pixels == 0:
        raise BadImage("image without pixels")
    if pixels > MAX_PIXELS:
        raise BadImage("image too large")
    return header


def read_jpeg(data: bytes) -> Header:
    """Read the size of a JPEG from the last frame header before its first scan.

    Raises BadImage, struct.error or IndexError if the segments before that scan are damaged.

    Markers are found as libjpeg finds them (jdmarker.c), so that this header and the decoder never disagree: bytes
    between segments are skipped unless they are a marker, any number of 0xFF may precede a marker, and restart markers
    have no length.
    """
    height = width = channels = frame = bits = 0
    has_adobe_marker = False
    at = 2  # after the marker that starts every JPEG
    while True:
        if data[at] != 0xFF:  # bytes between segments
            at = data.find(b"\xff", at)
            if at < 0:
                raise BadImage("truncated")
        marker = data[at + 1]
        if marker == START_OF_SCAN:
            break
        if marker not in WITH_LENGTH:
            # libjpeg refuses a second start, an end without a scan, and reserved markers.
            if marker != 0xFF and marker not in WITHOUT_LENGTH:
                raise BadImage("broken JPEG header")
            at += 1 if marker == 0xFF else 2  # a fill byte, allowed before a marker
            continue
        length = data[at + 2] << 8 | data[at + 3]
        if marker in FRAMES:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, at + 4)
            frame = marker
        elif marker == APP14 and length >= ADOBE_BYTES and data[at + 4 : at + 9] == b"Adobe":
            has_adobe_marker = True
        at += 2 + length if length > 2 else 4
    if channels not in (1, 3, 4):
        raise BadImage("broken JPEG header")
    unsupported = UNSUPPORTED.get(frame, "") if bits == 8 else f"JPEG of {bits} bits"
    header = Header("jpeg", height, width, channels, has_adobe_marker, unsupported)
    # libjpeg decodes a truncated file with only a warning, and fills the missing part with grey.
    if data.rfind(END_OF_IMAGE) < at:
        raise BadImage("truncated")
    # A sequential image whose first scan contains all components has no further scans: libjpeg reads none.
    channels_in_scan = data[at + 4]
    if frame in SEQUENTIAL and channels_in_scan == channels:
        return header
    # Inside a scan, 0xFF is followed by 0x00 or a restart marker, so these two bytes indicate a scan, except in the
    # rare table that contains them. The count is therefore never too low. NumPy takes 13 µs for 50 kB, `bytes.count`
    # four times as long.
    bytes_from_scan = np.frombuffer(data, np.uint8, offset=at)
    places = np.flatnonzero(bytes_from_scan[1:] == START_OF_SCAN)
    if np.count_nonzero(bytes_from_scan[places] == 0xFF) > MAX_SCANS:
        raise BadImage("too many scans")
    return header


def read_webp(data: bytes) -> Header:
    """Read the size of a WebP from its first chunk (RFC 9649: extended, lossless or lossy).

    Raises BadImage or struct.error if that chunk is damaged.
    """
    (riff_bytes,) = struct.unpack_from("<I", data, 4)
    if len(data) < 8 + riff_bytes:
        raise BadImage("truncated")
    chunk = data[12:16]
    if chunk == b"VP8X":  # 24 bits each, minus one
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
    elif chunk == b"VP8L":  # 14 bits each, minus one
        (bits,) = struct.unpack_from("<I", data, 21)
        width = 1 + (bits & 0x3FFF)
        height = 1 + (bits >> 14 & 0x3FFF)
    else:  # 14 bits each, below 2 bits of scaling
        width_field, height_field = struct.unpack_from("<HH", data, 26)
        width = width_field & 0x3FFF
        height = height_field & 0x3FFF
    return Header("webp", height, width)


# ----------------------------------------------------------------------------- pixels


def decode(data: bytes) -> np.ndarray:
    """Return the whole image as RGB (H, W, 3) uint8; raises BadImage if it cannot be decoded."""
    return decode_whole(data, read_header(data))


def decode_whole(data: bytes, header: Header) -> np.ndarray:
    """Decode a whole image, given its checked header; otherwise the same as `decode`."""
    if header.unsupported:
        raise BadImage(header.unsupported)
    if header.channels == 4:
        return decode_cmyk(data, header)
    return opencv_decode(data, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)


def decode_cmyk(data: bytes, header: Header) -> np.ndarray:
    """Decode a four-channel JPEG to RGB, as TensorFlow's decode_jpeg does; raises BadImage if that fails.

    With an Adobe marker, the stored values are inverted: r = k · c / 255. Without a marker,
    r = (255 - k)(255 - c) / 255 (tensorflow/core/lib/jpeg/jpeg_mem.cc).
    """
    from PIL import Image  # rarely needed, and 50 ms to import

    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            # Pillow always inverts the values: these are 255 minus the stored ones.
            inverted = np.asarray(image, np.uint16)
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError):
        raise BadImage("not decodable") from None
    if inverted.shape != (header.height, header.width, 4):
        raise BadImage("size differs from the header")
    values = 255 - inverted if header.has_adobe_marker else inverted
    return (values[..., :3] * values[..., 3:] // 255).astype(np.uint8)


def without_metadata(png: bytes) -> bytes:
    """Return a PNG without its animation (APNG) and text chunks, so that its still image is decoded.

    OpenCV would decode the first frame of the animation, and return uninitialised memory if that frame is damaged. It
    rejects a file with a text chunk larger than 8 MB, which libpng skips.
    """
    kept = [png[:8]]
    at = 8
    while at + 8 <= len(png):
        (length,) = struct.unpack_from(">I", png, at)
        end = at + 12 + length  # length, type, content and CRC
        if png[at + 4 : at + 8] in PIXELS:
            kept.append(png[at:end])
        at = end
    return b"".join(kept)


def opencv_decode(data: bytes, flags: int) -> np.ndarray:
    """Decode an image with OpenCV and these flags; raises BadImage if OpenCV cannot decode it."""
    is_png = data.startswith(PNG_START)
    if is_png and (ANIMATION in data or len(data) > LARGEST_TEXT):
        data = without_metadata(data)
    # libjpeg skips stray bytes after the first marker; OpenCV would not recognize the file.
    elif data.startswith(JPEG_START) and data[2:3] != b"\xff":
        data = JPEG_START + data[data.find(b"\xff", 2) :]
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        image = None
    if image is None:
        raise BadImage("not decodable")
    return image


def decode_crop(data: bytes, header: Header, box: Box, covering: int) -> np.ndarray:
    """Return the pixels inside `box`, at a reduced scale if the image is a JPEG and the box is large enough.

    The scale is the smallest of 1, 1/2, 1/4 and 1/8 at which each side keeps at least `covering` pixels; it is 1 if
    `covering` is 0. Only the box is decoded; at a reduced scale, its edges move by at most half a reduced pixel. Raises
    BadImage if the image cannot be decoded.
    """
    y, x, h, w = box
    # The binding supports JPEGs of one or three channels; other images are decoded completely and cropped.
    if header.kind != "jpeg" or header.channels == 4 or header.unsupported:
        image = decode_whole(data, header)
        # The box was drawn for the size in the header; it does not apply to an image of another size.
        if image.shape[:2] != (header.height, header.width):
            raise BadImage("size differs from the header")
        return image[y : y + h, x : x + w]

    denominator = reduction(min(h, w), covering)
    return decode_region(data, denominator, reduced_box(Box(y, x, h, w), header, denominator))


def reduction(side: int, covering: int) -> int:
    """Return the largest denominator (8, 4, 2 or 1) at which `side` keeps `covering` pixels; 1 if `covering` is 0."""
    if covering:
        for denominator in (8, 4, 2):
            if side >= denominator * covering:
                return denominator
    return 1


def reduced_box(box: Box, header: Header, denominator: int) -> Box:
    """Round a box to pixels of the image at 1/denominator scale, and move it inside the image."""
    half = denominator // 2
    height = (box.height + half) // denominator
    width = (box.width + half) // denominator
    y = (box.y + half) // denominator
    x = (box.x + half) // denominator
    # The reduced image has ⌈side / denominator⌉ pixels.
    max_y = -(-header.height // denominator) - height
    max_x = -(-header.width // denominator) - width
    return Box(min(y, max_y), min(x, max_x), height, width)


# ----------------------------------------------------------------------------- libjpeg-turbo


@cache
def library() -> ctypes.CDLL | None:
    """Return the binding, compiled if needed; if that fails, log the reason and return None."""
    if os.environ.get("PATCHLINE_JPEG") == "opencv":
        return None
    try:
        path = compile_binding()
        binding = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError, PackageNotFoundError) as error:
        reason = f"{type(error).__name__} {error}".strip()
        logging.getLogger(__name__).warning("random crops are slower, because OpenCV decodes whole images: %s", reason)
        return None
    # Argument types of the C functions in jpeg.cpp; the first two functions return 0 on success.
    size = ctypes.c_size_t
    pointer = ctypes.c_void_p
    number = ctypes.c_uint
    binding.decode_region.argtypes = [ctypes.c_char_p, size, *[number] * 5, pointer]
    binding.add_restarts.argtypes = [ctypes.c_char_p, size, pointer, pointer]
    binding.release.argtypes = [pointer]
    return binding


def compile_binding() -> Path:
    """Return the path of the binding; compile it if the cache folder does not contain it yet.

    The file name includes a digest of all build inputs. Raises OSError or subprocess.SubprocessError if compiling
    fails, or PackageNotFoundError if Pillow is not installed.
    """
    # Find the libjpeg-turbo in Pillow's wheel.
    libjpeg = None
    for file in files("pillow") or ():
        if file.name.startswith("libjpeg-"):
            libjpeg = Path(str(file.locate())).resolve()
            break
    if libjpeg is None:
        raise FileNotFoundError("this build of Pillow does not contain libjpeg; install Pillow from its wheel")
    digest = sha256(SOURCE.read_bytes() + str(libjpeg).encode() + os.uname().machine.encode()).hexdigest()
    path = state_folder() / f"jpeg-{digest[:16]}.so"
    # Never load a library that another user has put into a shared cache folder. The sha256 at the end of the file does
    # not affect loading it.
    if is_own(path) and read_entry(path) is not None:
        return path

    path.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    # rpath, because the linker does not search Pillow's wheel, which contains libjpeg-turbo.
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", f"-Wl,-rpath,{libjpeg.parent}"]
    # Other processes may compile it at the same time: each writes a separate file, and the last one remains.
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / path.name
        command = [compiler, *flags, str(SOURCE), "-o", str(compiled), str(libjpeg)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        write_entry(path, compiled.read_bytes())
    return path


def decode_region(data: bytes, denominator: int, region: tuple[int, int, int, int]) -> np.ndarray:
    """Decode a region of a JPEG at 1/denominator scale (1, 2, 4 or 8) as RGB (h, w, 3).

    The region is (y, x, h, w) in pixels of the reduced image. Raises BadImage if it cannot be decoded.
    """
    y, x, h, w = region
    binding = library()
    if binding is not None:
        out = np.empty((h, w, 3), np.uint8)
        failed = binding.decode_region(data, len(data), denominator, x, y, w, h, out.ctypes.data)
        if failed:
            raise BadImage("not decodable")
        return out

    # Without the binding, OpenCV decodes the whole image. The pixels are bitwise equal, but it takes longer
    # (docs/design/decoding.md).
    image = opencv_decode(data, REDUCED[denominator] | cv2.IMREAD_IGNORE_ORIENTATION)
    # OpenCV has no flag for RGB at a reduced scale.
    if denominator > 1:
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return image[y : y + h, x : x + w]
