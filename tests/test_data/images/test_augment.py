"""Boxes of training crops against the rule that they are drawn by, and pixels against NumPy."""

import cv2
import numpy as np
import pytest

from data.draws import Draws
from data.errors import ConfigError
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


def test_half_of_all_images_are_mirrored_and_without_flip_none():
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
        ({"squash": 64}, "needs crop: random"),
        ({"randaug_magnitude": 31}, "expected 0 to 30"),
        ({"min_area": 0}, "augment.min_area is 0, expected more than 0"),
    ],
)
def test_settings_that_no_crop_can_have_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        AugmentConfig(**values)
