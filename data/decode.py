"""Encoded bytes to RGB pixels, whole or only the crop that training wants."""

from __future__ import annotations

import cv2
import numpy as np

MAX_PIXELS = 100_000_000  # what an image may claim in its header; the largest of ImageNet-1k has 31 million


class BadImage(Exception):
    """This image cannot be used; the message is a short reason that groups well."""


def decode(data: bytes) -> np.ndarray:
    """The whole image as RGB (H, W, 3) uint8; raises BadImage."""
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flags) if data else None
    if image is None:
        raise BadImage("not decodable" if data else "no image")
    return image
