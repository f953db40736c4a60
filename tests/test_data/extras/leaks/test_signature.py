"""Invariances of image signatures, and the crops that they cover."""

import cv2
import numpy as np
import pytest

from data.extras.leaks.signature import (
    BOXES,
    COEFFICIENTS,
    MIRRORED,
    STEP,
    boxes_of,
    grey_of,
    intervals,
    pixel_digest,
    signature,
    trimmed,
)

pytestmark = pytest.mark.quick


def painting(seed: int, height: int = 200, width: int = 260) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=(height, width, 3))
    return np.clip(cv2.GaussianBlur(noise, (0, 0), 12) * 900 + 120, 0, 255).astype(np.uint8)


def encoded(image: np.ndarray, kind: str = ".png") -> bytes:
    return cv2.imencode(kind, image)[1].tobytes()


def test_every_crop_has_a_row_of_length_1():
    crops = signature(encoded(painting(0))).crops.astype(np.float32)
    assert crops.shape == (BOXES, COEFFICIENTS)
    np.testing.assert_allclose(np.linalg.norm(crops, axis=1), 1, atol=2e-3)


def test_brightness_contrast_and_encoding_hardly_change_the_signature():
    image = painting(1)
    whole = signature(encoded(image)).crops[0].astype(np.float32)
    for other in (encoded((image * 0.6 + 30).astype(np.uint8)), encoded(image, ".jpg")):
        assert float(whole @ signature(other).crops[0].astype(np.float32)) > 0.99
    assert abs(float(whole @ signature(encoded(painting(2))).crops[0].astype(np.float32))) < 0.7


def test_mirroring_flips_the_sign_of_odd_coefficients():
    image = painting(3)
    whole = signature(encoded(image)).crops[0].astype(np.float32)
    mirrored = signature(encoded(image[:, ::-1])).crops[0].astype(np.float32)
    np.testing.assert_allclose(mirrored, whole * MIRRORED, atol=0.02)


@pytest.mark.parametrize("scale", [1.0, 0.94, 0.82, 0.775])
def test_crops_of_a_scale_reach_both_edges_in_equal_steps(scale):
    parts = intervals(scale)
    assert parts[0][0] == 0
    assert parts[-1][0] + scale == pytest.approx(1)
    steps = np.diff([start for start, _ in parts])
    assert (steps <= STEP + 1e-9).all()


@pytest.mark.parametrize("proportion", [0.5, 1.0, 2.0])
def test_crops_are_inside_the_image_and_the_last_two_are_square(proportion):
    boxes = boxes_of(proportion)
    assert len(boxes) == BOXES
    for box in boxes:
        assert min(box) >= 0
        assert max(box.y + box.height, box.x + box.width) <= 1 + 1e-9
    for box in boxes[-2:]:
        assert box.width * proportion == pytest.approx(box.height)


def test_border_is_trimmed_and_flat_image_is_unchanged():
    inner = painting(4)[..., 0]
    framed = np.pad(inner, ((10, 20), (0, 30)), constant_values=255)
    np.testing.assert_array_equal(trimmed(framed), inner)
    flat = np.full((40, 40), 9, np.uint8)
    assert trimmed(flat).shape == flat.shape
    assert signature(encoded(np.full((40, 40, 3), 9, np.uint8))).is_flat


def test_pixel_digest_does_not_depend_on_lossless_encoding():
    image = painting(5)
    uncompressed = cv2.imencode(".png", image, [cv2.IMWRITE_PNG_COMPRESSION, 0])[1].tobytes()
    assert pixel_digest(encoded(image)) == pixel_digest(uncompressed)
    assert pixel_digest(encoded(image)) != pixel_digest(encoded(image[:-1]))


@pytest.mark.parametrize("denominator", [1, 2, 4, 8])
def test_a_large_jpeg_is_decoded_at_a_reduced_scale_and_keeps_its_signature(denominator):
    """A signature needs 128 pixels."""
    image = cv2.resize(painting(3), (160 * denominator, 128 * denominator), interpolation=cv2.INTER_CUBIC)
    assert grey_of(encoded(image, ".jpg")).shape == (128, 160)
    jpeg = signature(encoded(image, ".jpg")).crops[0].astype(np.float32)
    png = signature(encoded(image)).crops[0].astype(np.float32)
    assert jpeg @ png > 0.99
