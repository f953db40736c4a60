"""Eye images as VTAB takes them: `btgraham-300` of TensorFlow Datasets, after the winner of Kaggle's contest of 2015.

1. The eye's radius is measured along the middle row: half of its pixels that are brighter than a tenth of their mean;
2. the image is scaled so that the radius is 300 pixels;
3. the local mean (a Gaussian of radius / 30) is subtracted, four times what remains is laid around grey 128;
4. outside of nine tenths of the radius it is set to grey, and cropped to that; a JPEG of quality 72 keeps it.

    an image 3888 × 2592 with an eye of radius 1,250  →  540 × 540, or less high where the eye is cut off

The steps are those of TensorFlow Datasets; other versions of OpenCV round otherwise, so that pixels differ a little.
"""

from __future__ import annotations

import cv2
import numpy as np

from data.errors import DataError

RADIUS = 300  # pixels
KEPT = 0.9  # of the radius
BLUR = RADIUS / 30  # deviation of the Gaussian, in pixels
GREY = 128
QUALITY = 72  # of the JPEG


def fundus(raw: bytes, name: str) -> tuple[bytes, str]:
    """The processed image as a JPEG; raises DataError where `name` is none."""
    image = cv2.imdecode(np.frombuffer(raw, np.uint8), cv2.IMREAD_COLOR)  # (H, W, 3) BGR
    if image is None:
        raise DataError(f"{name}: no image that can be decoded; download the archive again")
    scale = RADIUS / eye_radius(image)
    image = cv2.resize(image, dsize=None, fx=scale, fy=scale)
    blurred = cv2.GaussianBlur(image, (0, 0), BLUR)
    image = cv2.addWeighted(image, 4, blurred, -4, GREY)
    encoded = cv2.imencode(".jpg", masked(image), [int(cv2.IMWRITE_JPEG_QUALITY), QUALITY])[1]
    return encoded.tobytes(), "jpg"


def eye_radius(image: np.ndarray) -> float:
    """The radius of the bright disc in an image (H, W, 3), in pixels; half the height where there is none to see."""
    middle = image[image.shape[0] // 2].sum(axis=1)
    radius = float((middle > middle.mean() / 10).sum()) / 2
    return radius if radius >= 1 else image.shape[0] / 2


def masked(image: np.ndarray) -> np.ndarray:
    """The disc of nine tenths of the radius in the middle of an image (H, W, 3), grey around it, cropped to it."""
    height, width = image.shape[:2]
    radius = int(RADIUS * KEPT)
    disc = np.zeros(image.shape, np.uint8)
    cv2.circle(disc, center=(width // 2, height // 2), radius=radius, color=(1, 1, 1), thickness=-1)
    grey = np.full_like(image, GREY)
    image = np.where(disc == 1, image, grey)
    top = max(height // 2 - radius, 0)
    left = max(width // 2 - radius, 0)
    return image[top : height // 2 + radius, left : width // 2 + radius]
