"""Boxes of training crops compared with their sampling rule, and pixels with NumPy."""

import os
import subprocess
import sys

import cv2
import numpy as np
import pytest

from data.draws import Draws
from data.errors import ConfigError
from data.files import import_path
from data.images.augment import AugmentConfig, augment, draw, fit, inception_box
from data.images.decode import Header

pytestmark = pytest.mark.quick


def png(image: np.ndarray) -> bytes:
    return cv2.imencode(".png", image[..., ::-1])[1].tobytes()


@pytest.mark.parametrize("sides", [(300, 400), (50, 500), (7, 5)])
def test_boxes_lie_inside_and_keep_area_and_aspect(sides):
    height, width = sides
    cfg = AugmentConfig(min_area=0.2)
    for seed in range(300):
        y, x, h, w = inception_box(height, width, Draws(seed), cfg)
        assert 0 <= y <= height - h
        assert 0 <= x <= width - w
        assert h * w >= 0.2 * height * width
        if (h, w) != sides:
            assert round(h * 0.75) - 1 <= w <= round(h * 1.33) + 1


def test_a_box_that_cannot_be_drawn_is_the_whole_image():
    cfg = AugmentConfig(min_area=1.0, min_aspect=1.0, max_aspect=1.0)
    assert inception_box(10, 100, Draws(0), cfg) == (0, 0, 10, 100)


def test_half_of_all_images_are_mirrored_and_none_if_flip_is_off():
    header = Header("png", 10, 10)
    flips = [draw(header, Draws(seed), AugmentConfig())[1] for seed in range(1000)]
    assert 400 < sum(flips) < 600
    assert not any(draw(header, Draws(seed), AugmentConfig(flip=False))[1] for seed in range(100))


@pytest.mark.parametrize("flip", [False, True])
def test_an_image_of_the_right_size_keeps_its_pixels(flip):
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    out = np.empty_like(image)
    fit(image, flip, out)
    np.testing.assert_array_equal(out, image[:, ::-1] if flip else image)


def test_the_whole_image_is_only_resized():
    image = np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)
    out = np.empty((8, 8, 3), np.uint8)
    augment(png(image), 8, Draws(0), AugmentConfig(crop="none", flip=False), out)
    np.testing.assert_array_equal(out, cv2.resize(image, (8, 8), interpolation=cv2.INTER_LINEAR))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_area": 1.5}, "augment.min_area is 1.5"),
        ({"min_aspect": 2.0}, "augment.min_aspect is 2.0"),
        ({"squash": 64}, "no effect with augment.crop=inception"),
        ({"randaug_magnitude": 31}, "expected 0 to 30"),
        ({"min_area": 0}, "augment.min_area is 0, expected more than 0"),
    ],
)
def test_impossible_crop_settings_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        AugmentConfig(**values)


PIXELS = """
import hashlib, io
import cv2, numpy as np
from PIL import Image
from data.draws import Draws
from data.images.augment import AugmentConfig, augment
from data.images.decode import decode
from data.images.preprocess import preprocess

rng = np.random.default_rng(3)
digest = hashlib.sha256()
for number, (height, width) in enumerate([(375, 500), (301, 347), (33, 300)]):
    coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
    image = coarse.resize((width, height), Image.Resampling.NEAREST)
    for form, mode, options in (
        ("JPEG", "RGB", {}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("JPEG", "RGB", {"progressive": True, "subsampling": 0}),
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "L", {}),
        ("WEBP", "RGB", {}),
    ):
        file = io.BytesIO()
        image.convert(mode).save(file, form, **options)
        encoded = file.getvalue()
        for side in (32, 224):
            for key, cfg in enumerate((AugmentConfig(), AugmentConfig(crop="random"), AugmentConfig(crop="none"))):
                out = np.empty((side, side, 3), np.uint8)
                augment(encoded, side, Draws(number + 10 * key), cfg, out)
                digest.update(out)
        digest.update(preprocess(decode(encoded), "resize_small(64)|central_crop(56)").tobytes())
print(digest.hexdigest())
"""
# What older processors lack: Intel's IPP inside OpenCV chooses its code by processor, OpenCV and libjpeg-turbo theirs.
PROCESSORS: dict[str, dict[str, str]] = {
    "this one": {},
    "IPP for SSE4.2": {"OPENCV_IPP": "sse42"},
    "without IPP": {"OPENCV_IPP": "disabled"},
    "OpenCV without AVX": {"OPENCV_CPU_DISABLE": "AVX512-SKX,AVX2,FP16,AVX"},
    "libjpeg-turbo without SIMD": {"JSIMD_FORCENONE": "1"},
    "NumPy without AVX": {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX"},
}


def pixels(variables: dict[str, str]) -> str:
    """Return the digest of PIXELS in a process with these environment variables."""
    environment = {**os.environ, "PYTHONPATH": import_path(), **variables}
    command = [sys.executable, "-W", "ignore", "-c", PIXELS]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_pixels_of_training_and_evaluation_do_not_depend_on_the_processor() -> None:
    oldest: dict[str, str] = {}
    for variables in PROCESSORS.values():
        oldest |= variables
    assert pixels(oldest) == pixels(PROCESSORS["this one"])


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_pixels_do_not_depend_on_a_single_feature_of_the_processor(processor: str) -> None:
    assert pixels(PROCESSORS[processor]) == pixels(PROCESSORS["this one"])
