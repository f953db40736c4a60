"""Image files of other programs: animated PNGs, CMYK JPEGs with and without an Adobe marker, stray bytes."""

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
    """Return a CMYK JPEG of a single colour with these stored values."""
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


# ------------------------------------------------------------------------- files of cameras, phones and programs

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)).resize((72, 48))
NOISE = np.random.default_rng(1).integers(0, 256, (48, 72), np.uint8)


def saved(form: str, image: Image.Image = PHOTO, **options: object) -> bytes:
    """Return an image as Pillow saves it."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def segment(marker: int, content: bytes) -> bytes:
    """Return a segment of a JPEG."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def with_segment(marker: int, content: bytes, jpeg: bytes, *, without_jfif: bool = False) -> bytes:
    """Return a JPEG with another first segment; optionally without JFIF's."""
    parts, scan = segments(jpeg)
    rest = [part for part in parts[1:] if not (without_jfif and part[:2] == b"\xff\xe0")]
    return parts[0] + segment(marker, content) + b"".join(rest) + scan


def with_chunks(png: bytes, *chunks: bytes) -> bytes:
    """Return a PNG with further chunks after its first."""
    return png[:33] + b"".join(chunks) + png[33:]


def rotated(form: str, orientation: int) -> bytes:
    """Return an image whose metadata asks to show it rotated, as phones write it."""
    exif = Image.Exif()
    exif[0x112] = orientation
    return saved(form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))


def with_alpha() -> Image.Image:
    """Return an image of random alpha."""
    image = PHOTO.convert("RGBA")
    image.putalpha(Image.fromarray(NOISE))
    return image


def stereo() -> bytes:
    """Return a camera's MPO: a JPEG, followed by another one of other size and colours."""
    return saved("MPO", save_all=True, append_images=[PHOTO.resize((36, 24)).convert("L")])


def interlaced() -> bytes:
    """Return an Adam7 PNG: seven passes, each a smaller image (PNG specification, 8.2)."""
    pixels = np.asarray(PHOTO)
    starts = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    rows = [b"\0" + row.tobytes() for y, x, dy, dx in starts for row in pixels[y::dy, x::dx]]
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 72, 48, 8, 2, 0, 0, 1))
    content = chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + content


def by_opencv(sampling: int) -> bytes:
    """Return a JPEG with these sampling factors, of which 4:4:0 and 4:1:1 are rare."""
    return cv2.imencode(".jpg", np.asarray(PHOTO), [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling])[1].tobytes()


JPEG = saved("JPEG", quality=92)
PNG = saved("PNG")
THUMBNAIL = saved("JPEG", PHOTO.resize((16, 12)))
EXIF_WITH_THUMBNAIL = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + THUMBNAIL
DEPTH = saved("PNG", Image.fromarray(NOISE.astype(np.uint16) * 257))
# Facebook's and WhatsApp's servers leave such a segment in the JPEGs that they compress again.
PHOTOSHOP = b"Photoshop 3.0\x008BIM\x04\x04\0\0\0\0\0\x10\x1c\x02(\0\x0bFBMD0100\xff\xd9\xff\xd8"
FOREIGN: dict[str, bytes] = {
    **{f"4:{ratio} by OpenCV": by_opencv(s) for ratio, s in (("1:1", 0x411111), ("4:0", 0x121111), ("2:0", 0x221111))},
    **{f"subsampling {s}": saved("JPEG", subsampling=s, progressive=s == 1) for s in (0, 1, 2, "4:1:1")},
    **{f"{form} rotated {o}": rotated(form, o) for form in ("JPEG", "PNG", "WEBP") for o in range(2, 9)},
    "MPO": stereo(),
    "JPEG before a depth map": JPEG + DEPTH,
    "JPEG before a JPEG": JPEG + THUMBNAIL,
    "JPEG before text": JPEG + b"motion photo" * 100,
    "JPEG before zeros": JPEG + bytes(5000),
    "JPEG with a thumbnail": with_segment(0xE1, EXIF_WITH_THUMBNAIL, JPEG),
    "JPEG of WhatsApp": with_segment(0xED, PHOTOSHOP, saved("JPEG", progressive=True)),
    "JPEG with markers in comments": with_segment(0xFE, b"\xff\xda\xff\xd9" * 16000, JPEG),
    "grey JPEG with a profile": saved("JPEG", PHOTO.convert("L"), icc_profile=b"x" * 3000),
    "JPEG with a profile in four segments": saved("JPEG", icc_profile=b"x" * 200_000),
    "JPEG of RGB": saved("JPEG", keep_rgb=True, quality=95),
    "JPEG without JFIF": with_segment(0xFE, b"no JFIF", JPEG, without_jfif=True),
    "JPEG with restart markers": saved("JPEG", restart_marker_blocks=1),
    "JPEG with restart markers per row": saved("JPEG", restart_marker_rows=1),
    **{
        f"Adobe transform {t}, {'without' if bare else 'with'} JFIF": with_segment(
            0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([t]), JPEG, without_jfif=bare
        )
        for t in (0, 1, 2)
        for bare in (False, True)
    },
    **{f"PNG of {mode}": saved("PNG", PHOTO.convert(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")},
    "PNG of a palette with a transparent colour": saved("PNG", PHOTO.convert("P"), transparency=3),
    "PNG of a palette with alpha": saved("PNG", PHOTO.convert("P"), transparency=bytes(range(256))),
    "grey PNG with a transparent colour": saved("PNG", PHOTO.convert("L"), transparency=100),
    "PNG with a transparent colour": saved("PNG", transparency=tuple(np.asarray(PHOTO)[0, 0].tolist())),
    "PNG with alpha": saved("PNG", with_alpha()),
    "PNG with alpha and a background": with_chunks(saved("PNG", with_alpha()), chunk(b"bKGD", b"\0\xff\0\0\0\0")),
    "interlaced PNG": interlaced(),
    "PNG with gamma": with_chunks(PNG, chunk(b"gAMA", struct.pack(">I", 20_000))),
    "PNG of sRGB": with_chunks(PNG, chunk(b"sRGB", b"\0")),
    "PNG with a profile": saved("PNG", icc_profile=b"x" * 500),
    "PNG with 2,000 texts": with_chunks(PNG, *[chunk(b"tEXt", b"k\0v")] * 2000),
    "PNG with a large text": with_chunks(PNG, chunk(b"iTXt", b"k\0\0\0\0\0" + b"a" * 9_000_000)),
    "PNG before text": PNG + b"junk" * 1000,
    "lossy WebP": saved("WEBP"),
    "lossless WebP": saved("WEBP", lossless=True),
    "WebP with a profile": saved("WEBP", icc_profile=b"x" * 400),
    "WebP with alpha": saved("WEBP", with_alpha()),
    "lossless WebP with alpha": saved("WEBP", with_alpha(), lossless=True, exact=True),
    "WebP before text": saved("WEBP") + b"junk" * 50,
    "animated WebP": saved("WEBP", save_all=True, append_images=[PHOTO.rotate(90)], duration=100),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_other_programs_have_the_pixels_of_libjpeg_libpng_and_libwebp(name: str) -> None:
    data = FOREIGN[name]
    with Image.open(io.BytesIO(data)) as image:
        # Alpha is dropped, not blended; orientation is ignored, as by the original's decoder.
        has_alpha = image.mode in ("LA", "RGBA") or "transparency" in image.info
        expected = np.asarray(image.convert("RGBA" if has_alpha else "RGB"))[..., :3]
    pixels = decode(data)
    np.testing.assert_array_equal(pixels, expected)
    header = read_header(data)
    assert (header.height, header.width) == expected.shape[:2] == (48, 72)
    np.testing.assert_array_equal(decode_crop(data, header, Box(3, 5, 20, 21), 0), expected[3:23, 5:26])


@pytest.mark.parametrize("name", [name for name in FOREIGN if "animated" not in name and "palette" not in name])
def test_files_of_other_programs_have_the_pixels_of_torchvision(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch = pytest.importorskip("torch")
    encoded = torch.frombuffer(bytearray(FOREIGN[name]), dtype=torch.uint8)
    expected = torchvision.io.decode_image(encoded, mode=torchvision.io.ImageReadMode.RGB).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(decode(FOREIGN[name]), expected)


def with_size(webp: bytes) -> bytes:
    """Return a truncated WebP whose header has the size of what remains, as some downloaders write it."""
    return webp[:4] + struct.pack("<I", len(webp) - 8) + webp[8:]


def with_frame(marker: int, bits: int = 8) -> bytes:
    """Return a JPEG whose frame header has another marker or precision."""
    at = JPEG.find(b"\xff\xc0")
    return JPEG[: at + 1] + bytes([marker]) + JPEG[at + 2 : at + 4] + bytes([bits]) + JPEG[at + 5 :]


WEBP = FOREIGN["WebP with a profile"]
REFUSED: dict[str, tuple[bytes, str]] = {
    "lossless JPEG": (with_frame(0xC3), "lossless JPEG"),
    "lossless arithmetic JPEG": (with_frame(0xCB), "lossless JPEG"),
    "hierarchical JPEG": (with_frame(0xC5), "hierarchical JPEG"),
    "JPEG of 12 bits": (with_frame(0xC1, 12), "JPEG of 12 bits"),
    "half of a JPEG": (JPEG[: len(JPEG) // 2], "truncated"),
    "half of a JPEG with a thumbnail": (FOREIGN["JPEG with a thumbnail"][:-300], "truncated"),
    "JPEG without its end": (JPEG[:-2], "truncated"),
    "half of a PNG": (PNG[: len(PNG) // 2], "truncated"),
    "half of a PNG with an end": (PNG[: len(PNG) // 2] + PNG[-12:], "not decodable"),
    "PNG with a damaged header": (PNG[:29] + bytes(4) + PNG[33:], "not decodable"),
    "PNG with a damaged checksum": (PNG[:-16] + bytes(4) + PNG[-12:], "not decodable"),
    "half of a WebP": (WEBP[: len(WEBP) // 2], "truncated"),
    "half of a WebP with its size": (with_size(WEBP[: len(WEBP) // 2]), "not decodable"),
    "WebP without its last bytes, with its size": (with_size(WEBP[:-40]), "not decodable"),
    "half of an animated WebP with its size": (with_size(FOREIGN["animated WebP"][:-100]), "not decodable"),
    "nothing": (b"", "no image"),
    "zeros": (bytes(3000), "not a JPEG, PNG or WebP"),
    "GIF": (saved("GIF"), "not a JPEG, PNG or WebP"),
    "TIFF": (saved("TIFF"), "not a JPEG, PNG or WebP"),
    "an error page": (b"<html><body>404 Not Found</body></html>", "not a JPEG, PNG or WebP"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_read_completely_are_refused_with_the_reason(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(BadImage, match=f"^{reason}$"):
        decode(data)
