"""Decoding only the crop gives the same pixels as a full decode; broken files are refused with the reason."""

import contextlib
import ctypes
import io
import itertools
import math
import os
import struct
import tarfile
import zlib
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from data.errors import ConfigError
from data.images import augment as augmentation
from data.images import decode as decoding
from data.images.augment import AugmentConfig, Draws, augment, inception_box
from data.images.decode import (
    MAX_SCANS,
    BadImage,
    Header,
    decode,
    decode_crop,
    decode_region,
    library,
    read_header,
    reduced_box,
)
from data.images.preprocess import bilinear, resize_small

pytestmark = pytest.mark.quick

IMAGES = Path(__file__).parents[3].parent / "shared" / "images"
needs_binding = pytest.mark.skipif(library() is None, reason="no C++ compiler, or Pillow is not the wheel")


def scene(height: int, width: int, grain: int = 16) -> np.ndarray:
    """Return a smooth image with some texture, so that its JPEG has coefficients of every frequency."""
    rng = np.random.default_rng(grain)
    coarse = rng.integers(0, 256, (height // grain + 2, width // grain + 2, 3), dtype=np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(int)
    return np.clip(smooth + rng.integers(-20, 21, (height, width, 3)), 0, 255).astype(np.uint8)


def encoded(image: np.ndarray, kind: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, kind, **options)
    return buffer.getvalue()


def with_restarts(data: bytes) -> bytes | None:
    """Return a JPEG with restart markers, as `pack --restarts` stores it; None if libjpeg warns."""
    binding = library()
    out = ctypes.c_void_p()
    size = ctypes.c_ulong()
    failed = binding.add_restarts(data, len(data), ctypes.byref(out), ctypes.byref(size))
    jpeg = None if failed else ctypes.string_at(out, size.value)
    binding.release(out)
    return jpeg


KINDS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
}


@needs_binding
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restarts", [False, True])
def test_a_region_has_the_pixels_of_the_whole_at_every_scale(kind, restarts, monkeypatch):
    height = 203
    width = 171  # 11 or 22 blocks per row: restart markers after each row, or after every second one
    data = encoded(scene(height, width), quality=85, **KINDS[kind])
    if restarts:
        data = with_restarts(data)
    rng = np.random.default_rng(1)
    for denominator in (1, 2, 4, 8):
        H = -(-height // denominator)
        W = -(-width // denominator)
        for number in range(30):  # anywhere, and slivers at the left and the right edge
            h = int(rng.integers(1, H + 1))
            w = int(rng.integers(1, 4 if number % 3 else W + 1))
            anywhere = int(rng.integers(0, W - w + 1))
            y = int(rng.integers(0, H - h + 1))
            region = y, (anywhere, 0, W - w)[number % 3], h, w
            fast = decode_region(data, denominator, region)
            with monkeypatch.context() as patch:
                patch.setattr(decoding, "library", lambda: None)
                assert np.array_equal(fast, decode_region(data, denominator, region))


@needs_binding
@pytest.mark.skipif(not IMAGES.is_dir(), reason="shared/images is not beside this checkout")
def test_photographs_decode_to_the_same_pixels_with_and_without_the_binding(monkeypatch):
    with tarfile.open(IMAGES / "imagenet1k-000000.tar") as tar:
        photos = [tar.extractfile(member).read() for member in tar if member.name.endswith(".jpg")][:60]
    fast, slow = (np.empty((224, 224, 3), np.uint8) for _ in range(2))
    for number, photo in enumerate(photos):
        packed = with_restarts(photo) or photo
        assert np.array_equal(decode(photo), decode(packed))
        augment(photo if number % 2 else packed, 224, Draws(number), AugmentConfig(), fast)
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "library", lambda: None)
            augment(photo, 224, Draws(number), AugmentConfig(), slow)
        assert np.array_equal(fast, slow)


def test_the_training_crop_is_the_reference_crop_to_within_a_level():
    """At full scale, the reference decodes, crops and resizes bilinearly without antialiasing."""
    data = encoded(scene(300, 400))
    cfg = AugmentConfig(flip=False, reduced=False)
    out = np.empty((96, 96, 3), np.uint8)
    for number in range(20):
        augment(data, 96, Draws(number), cfg, out)
        y, x, h, w = boxes(number, 300, 400, cfg)
        assert np.abs(out - bilinear(decode(data)[y : y + h, x : x + w], 96, 96)).max() <= 1.5


def test_a_reduced_decode_stays_close_to_the_average_of_what_it_merges():
    """A 1/d decode averages d×d pixels: on average within 5 levels of an area resize."""
    data = encoded(scene(1200, 1600, grain=128), quality=92)
    cfg = AugmentConfig(flip=False)
    out = np.empty((96, 96, 3), np.uint8)
    for number in range(10):
        augment(data, 96, Draws(number), cfg, out)
        y, x, h, w = boxes(number, 1200, 1600, cfg)
        crop = decode(data)[y : y + h, x : x + w]
        expected = cv2.resize(crop, (96, 96), interpolation=cv2.INTER_AREA)
        assert np.abs(out.astype(int) - expected).mean() < 5


def boxes(number: int, height: int, width: int, cfg: AugmentConfig) -> tuple[int, int, int, int]:
    return inception_box(height, width, Draws(number), cfg)


def test_example_in_the_module_docstring_is_correct(monkeypatch):
    story = augmentation.__doc__
    y, x, h, w = boxes(8, 300, 400, AugmentConfig())
    assert f"the box has y {y}, x {x}, height {h}, width {w}, and the image will be flipped" in story
    shapes = []

    def noted(encoded: bytes, denominator: int, region: tuple[int, int, int, int]) -> np.ndarray:
        shapes.append((denominator, *region[2:]))
        return decode_region(encoded, denominator, region)

    monkeypatch.setattr(decoding, "decode_region", noted)
    plain, mirrored = (np.empty((64, 64, 3), np.uint8) for _ in range(2))
    augment(encoded(scene(300, 400)), 64, Draws(8), AugmentConfig(flip=False), plain)
    augment(encoded(scene(300, 400)), 64, Draws(8), AugmentConfig(), mirrored)
    assert np.array_equal(plain[:, ::-1], mirrored)
    denominator, height, width = shapes[0]
    assert f"decoded at 1/{denominator} scale, to {height} × {width} pixels; at 1/4, its {h // 4} rows" in story


def test_decoding_continues_with_a_warning_without_a_compiler(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    library.cache_clear()
    try:
        out = np.empty((32, 32, 3), np.uint8)
        augment(encoded(scene(60, 60)), 32, Draws(0), AugmentConfig(), out)
        assert library() is None
        assert "no-such-compiler" in caplog.text
    finally:
        library.cache_clear()


@pytest.mark.slow
@needs_binding
def test_altered_cached_binding_is_recompiled(monkeypatch, tmp_path, caplog):
    """A bit flip in its code changed pixels without an error in 6 of 200 cases."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path))
    path = decoding.compile_binding()
    whole = path.read_bytes()
    rng = np.random.default_rng(5)
    for place in rng.integers(0, len(whole), 3).tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        assert decoding.compile_binding() == path
        assert f"{path}: truncated or altered" in caplog.text
        assert sha256(path.read_bytes()[:-32]).digest() == path.read_bytes()[-32:]
        caplog.clear()
    # An intact binding is reused.
    written_at = path.stat().st_mtime_ns
    assert decoding.compile_binding() == path
    assert path.stat().st_mtime_ns == written_at
    assert not caplog.text


@needs_binding
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_binding_of_another_user_is_never_loaded(monkeypatch, tmp_path):
    """Otherwise a user of a shared cache folder could run code as any other user who decodes images."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path))
    path = decoding.compile_binding()
    compiled = path.read_bytes()
    attack = b"code of another user"
    path.write_bytes(attack + sha256(attack).digest())
    os.chown(path, 65534, 65534)
    assert decoding.compile_binding() == path
    assert path.read_bytes() == compiled
    assert path.stat().st_uid == 0


def test_flipping_mirrors_the_same_crop():
    data = encoded(scene(120, 90))
    flipped = 0
    for number in range(20):
        plain, either = (np.empty((32, 32, 3), np.uint8) for _ in range(2))
        augment(data, 32, Draws(number), AugmentConfig(flip=False), plain)
        augment(data, 32, Draws(number), AugmentConfig(), either)
        flipped += np.array_equal(either, plain[:, ::-1])
        assert np.array_equal(either, plain) or np.array_equal(either, plain[:, ::-1])
    assert 4 <= flipped <= 16


def test_an_image_that_needs_no_resize_is_mirrored_too():
    image = scene(32, 32)
    mirrored = 0
    for number in range(20):
        out = np.empty((32, 32, 3), np.uint8)
        augment(encoded(image, "PNG"), 32, Draws(number), AugmentConfig(crop="none"), out)
        mirrored += np.array_equal(out, image[:, ::-1])
        assert np.array_equal(out, image) or np.array_equal(out, image[:, ::-1])
    assert 4 <= mirrored <= 16


def test_the_last_offset_is_never_drawn():
    """TensorFlow's sampler draws offsets below `height - h`, although that offset would be valid too."""
    for number in range(300):
        y, x, h, w = boxes(number, 12, 15, AugmentConfig())
        assert y == 0 or y + h < 12
        assert x == 0 or x + w < 15


def test_random_crops_cover_the_whole_image():
    image = np.zeros((32, 32, 3), np.uint8)  # already of the target size; each pixel encodes its position
    image[..., 0] = np.arange(32)[:, None]
    image[..., 1] = np.arange(32)
    offsets = set()
    for number in range(200):
        out = np.empty((28, 28, 3), np.uint8)
        augment(encoded(image, "PNG"), 28, Draws(number), AugmentConfig(crop="random", flip=False), out)
        y, x, _ = out[0, 0].tolist()
        assert np.array_equal(out, image[y : y + 28, x : x + 28])
        offsets.add((y, x))
    assert len(offsets) == 25, "five rows and five columns"


def test_random_crops_cover_the_whole_wide_image():
    wide = np.zeros((9, 16, 3), np.uint8) + 15 * np.arange(16, dtype=np.uint8)[:, None]
    whole = resize_small(wide, 8)  # 8/7 of a crop of 7
    assert whole.shape == (8, 14, 3)
    offsets = set()
    for number in range(300):
        out = np.empty((7, 7, 3), np.uint8)
        augment(encoded(wide, "PNG"), 7, Draws(number), AugmentConfig(crop="random", flip=False), out)
        offsets |= {x for x in range(8) if np.array_equal(out, whole[:7, x : x + 7])}
    assert offsets == set(range(8))


def test_a_squashed_crop_is_a_window_of_the_whole_image_as_a_square():
    """BiT-HyperRule resizes both sides to the same number, ignoring the aspect ratio, then crops at random."""
    image = scene(40, 70)
    squashed = cv2.resize(image, (20, 20), interpolation=cv2.INTER_LINEAR).astype(int)  # equal to ours up to rounding
    offsets = set()
    for number in range(200):
        out = np.empty((16, 16, 3), np.uint8)
        augment(encoded(image, "PNG"), 16, Draws(number), AugmentConfig(crop="random", squash=20, flip=False), out)
        errors = {}
        for y, x in itertools.product(range(5), range(5)):
            errors[y, x] = np.abs(squashed[y : y + 16, x : x + 16] - out).max()
        place = min(errors, key=errors.__getitem__)
        assert errors[place] <= 1
        offsets.add(place)
    assert len(offsets) == 25
    with pytest.raises(
        ConfigError,
        match=r"augment\.squash is 20, expected null, because it has no effect with augment\.crop=inception; set",
    ):
        AugmentConfig(squash=20)


def test_a_reduced_box_lies_inside_and_moves_by_half_a_pixel_at_most():
    header = Header("jpeg", 203, 171)
    for number in range(200):
        box = inception_box(203, 171, Draws(number), AugmentConfig())
        for denominator in (2, 4, 8):
            reduced = reduced_box(box, header, denominator)
            assert reduced.y + reduced.height <= math.ceil(203 / denominator)
            assert reduced.x + reduced.width <= math.ceil(171 / denominator)
            moved = np.array(reduced) - np.array(box) / denominator
            assert np.abs(moved[2:]).max() <= 0.5
            # At the far edges there may be no pixel to round up to.
            assert moved[:2].max() <= 0.5
            assert moved[:2].min() >= -1


@pytest.mark.parametrize("size", [24, 200])
def test_a_small_crop_after_a_resize_covers_only_the_image(size):
    out = np.zeros((size, size, 3), np.uint8)
    augment(encoded(np.full((40, 60, 3), 200, np.uint8)), size, Draws(1), AugmentConfig(crop="random"), out)
    assert np.abs(out.astype(int) - 200).max() <= 2


def test_every_kind_of_image_becomes_rgb():
    image = scene(40, 50)
    grey = image[..., 1]
    deep = (grey.astype(np.uint16) << 8) | 7
    alpha = np.dstack([image, grey])
    for data, expected, bound in [
        (encoded(image, "PNG"), image, 0),
        (encoded(grey, "PNG"), np.dstack([grey] * 3), 0),
        (cv2.imencode(".png", deep)[1].tobytes(), np.dstack([grey] * 3), 0),
        (encoded(alpha, "PNG"), image, 0),
        (encoded(image, "WEBP", lossless=True), image, 0),
        (encoded(alpha, "WEBP", lossless=True, exact=True), image, 0),
        (encoded(image, "WEBP", quality=95), image, 70),
        (encoded(grey, quality=95), np.dstack([grey] * 3), 40),
        (encoded(image, quality=95, subsampling=0), image, 60),
    ]:
        header = read_header(data)
        assert (header.height, header.width) == (40, 50)
        assert np.abs(decode(data).astype(int) - expected).max() <= bound
        crop = decode_crop(data, header, (3, 4, 20, 30), 0)
        assert np.array_equal(crop, decode(data)[3:23, 4:34])


def test_cmyk_is_converted_and_orientation_ignored():
    buffer = io.BytesIO()
    Image.fromarray(np.full((20, 30, 3), (200, 100, 50), np.uint8)).convert("CMYK").save(buffer, "JPEG", quality=95)
    assert np.abs(decode(buffer.getvalue()).reshape(-1, 3).mean(0) - (200, 100, 50)).max() < 6
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(scene(20, 30), exif=exif)).shape == (20, 30, 3)


def png_claiming(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"IEND"


BROKEN = {
    "no image": b"",
    "not a JPEG, PNG or WebP": b"GIF89a" + bytes(100),
    "image too large": png_claiming(60_000, 60_000),
    "image file too large": bytes(100_000_001),
    "image without pixels": png_claiming(0, 10),
    "truncated": encoded(scene(60, 60))[:1000],
    "not decodable": png_claiming(10, 10),
}


@pytest.mark.parametrize("marker", [0x02, 0xBF, 0xD8, 0xD9, 0xF0, 0xFD])
def test_markers_that_libjpeg_refuses_before_the_scan_are_refused(marker):
    """Reserved markers, a second start, and an end without a scan."""
    good = encoded(scene(60, 60))
    with pytest.raises(BadImage, match="broken JPEG header"):
        read_header(good[:2] + bytes([0xFF, marker]) + good[2:])


def segment(marker: int, height: int, width: int) -> bytes:
    """Return a JPEG segment with these sides and three channels, like a frame header."""
    return struct.pack(">BBHBHHB", 0xFF, marker, 17, 8, height, width, 3) + bytes(9)


@pytest.mark.parametrize("marker", [*range(0xDA), *range(0xDB, 0xFF)])
def test_the_sides_are_those_of_the_last_frame_header_of_any_kind(marker):
    """Writes a segment with each marker of ITU T.81, table B.1, after a frame header of 60 × 40."""
    scan = b"\xff\xda" + struct.pack(">HB", 12, 3) + bytes(9) + b"\xff\xd9"
    data = b"\xff\xd8" + segment(0xC0, 60, 40) + segment(marker, 30, 20) + scan
    if marker in (*range(2, 0xC0), 0xD8, 0xD9, *range(0xF0, 0xFE)):
        with pytest.raises(BadImage, match="broken JPEG header"):
            read_header(data)
        return
    is_frame = marker in (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
    assert read_header(data) == Header("jpeg", *((30, 20) if is_frame else (60, 40)), 3)


@pytest.mark.parametrize("denominator", [1, 2, 8])
def test_undecodable_region_is_a_bad_image_without_the_binding(denominator, monkeypatch):
    monkeypatch.setattr(decoding, "library", lambda: None)
    for data in (b"", b"junk", encoded(scene(60, 60))[:20]):
        with pytest.raises(BadImage, match="not decodable"):
            decode_region(data, denominator, (0, 0, 4, 4))


@needs_binding
def test_libjpeg_is_not_asked_for_more_pixels_than_a_header_may_claim():
    small = encoded(scene(16, 16), progressive=True)
    at = small.index(b"\xff\xc2") + 5
    bomb = small[:at] + struct.pack(">HH", 40_000, 40_000) + small[at + 4 :]
    with pytest.raises(BadImage, match="not decodable"):
        decode_region(bomb, 1, (0, 0, 8, 8))
    assert with_restarts(bomb) is None


def empty_scan(blocks: int) -> bytes:
    """Return a scan in which no block of the first component has a coefficient above the first.

    Its one Huffman code, the bit 0, is EOB14 (ITU-T T.81, table G.1): with 14 bits 0 it means 2¹⁴ blocks.
    """
    table = b"\xff\xc4" + struct.pack(">HB", 20, 0x10) + bytes([1, *[0] * 15]) + bytes([0xE0])
    header = b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([1, 0x00, 1, 63, 0])
    bits = 15 * math.ceil(blocks / 2**14)
    return table + header + bytes(math.ceil(bits / 8))


@needs_binding
def test_image_with_too_many_scans_is_rejected_before_decoding():
    image = scene(375, 500)
    good = encoded(image, progressive=True)
    assert good.count(b"\xff\xda") == 10, "what libjpeg writes"
    blocks = math.ceil(375 / 8) * math.ceil(500 / 8)

    def with_scans(count: int) -> bytes:
        return good[:-2] + empty_scan(blocks) * (count - 10) + b"\xff\xd9"

    at_the_limit = with_scans(MAX_SCANS)
    bomb = with_scans(2000)
    np.testing.assert_array_equal(decode(at_the_limit), decode(good))
    with pytest.raises(BadImage, match="too many scans"):
        read_header(bomb)
    # The reason for the limit: libjpeg itself has none. These scans take 16 times as long as the image's own, and as
    # many as the limit allows 1.1 times (CPU-seconds on an AVX-512 Xeon).
    assert decode_region(bomb, 1, (0, 0, 375, 500)).shape == (375, 500, 3)


@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=["sequential", "progressive"])
def test_a_thumbnail_and_comments_are_no_scans(options):
    # An application segment may hold whole JPEGs: 40 thumbnails are as many markers of scans.
    thumbnails = encoded(scene(16, 16)) * 40
    segment = b"\xff\xe5" + struct.pack(">H", 2 + len(thumbnails)) + thumbnails
    photograph = encoded(scene(60, 60), **options)
    assert decode(photograph[:2] + segment + photograph[2:]).shape == (60, 60, 3)


def test_a_sequential_image_with_a_scan_for_each_component_is_counted_too():
    good = encoded(scene(64, 64, grain=8), subsampling=0)
    # Declare one component in the first scan: libjpeg then reads all later scans.
    at = good.index(b"\xff\xda")
    scans = b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([1, 0x00, 0, 63, 0])
    bomb = good[:at] + scans * 40 + b"\xff\xd9"
    with pytest.raises(BadImage, match="too many scans"):
        read_header(bomb)
    # These stray bytes look like a scan of all three components. libjpeg skips them, to the next 0xFF.
    disguised = good[:at] + b"\x00\xda\x00\x0c\x03" + scans * 40 + b"\xff\xd9"
    with pytest.raises(BadImage, match="too many scans"):
        read_header(disguised)


def test_image_with_a_wrong_header_is_a_bad_image():
    data = encoded(scene(16, 16), "PNG")
    with pytest.raises(BadImage, match="size differs from the header"):
        decode_crop(data, replace(read_header(data), height=3000), (100, 0, 50, 16), 0)


def test_a_resize_out_of_all_proportion_is_a_bad_image():
    with pytest.raises(BadImage, match="too narrow"):
        resize_small(np.zeros((1, 65_500, 3), np.uint8), 256)


@pytest.mark.parametrize("reason", BROKEN)
def test_broken_images_are_refused_by_reason(reason):
    with pytest.raises(BadImage, match=reason):
        decode(BROKEN[reason])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_truncated_file_is_refused(kind):
    """Decoders would silently fill the rest with grey or with old memory."""
    whole = encoded(scene(60, 60), kind)
    for share in (0.5, 0.9, 0.99):
        with pytest.raises(BadImage, match="truncated"):
            decode(whole[: int(share * len(whole))])


def test_no_bytes_however_mangled_do_more_than_raise_bad_image():
    rng = np.random.default_rng(0)
    jpg = encoded(scene(90, 90))
    jpg = with_restarts(jpg) if library() else jpg
    whole = [jpg, encoded(scene(40, 40), "PNG"), encoded(scene(40, 40), "WEBP")]
    out = np.empty((16, 16, 3), np.uint8)
    for number in range(300):
        data = bytearray(whole[number % 3])
        for at in rng.integers(0, len(data) if number % 2 else 200, 4):
            data[at] = rng.integers(0, 256)
        cut = int(rng.integers(1, len(data) + 1)) if number % 5 == 0 else len(data)
        with contextlib.suppress(BadImage):
            augment(bytes(data[:cut]), 16, Draws(number), AugmentConfig(), out)
