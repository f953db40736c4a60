"""Find training images that match a test image, with a cheap filter and then a precise comparison.

1. `candidates` selects pairs with similar low frequencies: the full training image against every crop of the test
   image and vice versa, each also mirrored. About one in 10,000 pairs of unrelated photographs passes this filter.
2. `likeness` registers the two pictures (it shifts and scales one until it fits the other), and correlates their fine
   structure. Two pictures of the same image reach 0.95 or more; unrelated ones rarely exceed 0.7.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import cv2
import numpy as np

from data.extras.leaks.signature import BOXES, COEFFICIENTS, MIRRORED, PICTURE, Signature, boxes_of

# B: training images per batch, T: test images, K: crops per image, D: coefficients per crop

ALIKE = 0.78  # a pair is a candidate if the inner product is larger
BLOCK = 512  # test images compared at once: 15 MB of products with 64 training images
EDGE = 3  # pixels ignored along the edges of pictures, because their neighbourhood is unknown
FINE = 0.8  # pixels; smaller details are encoding noise
MAX_ROTATION = 0.04  # radians of rotation, or the same amount of shear: 2.5 pixels from edge to edge
MAX_SCALING = 1.5  # relative to the sides of the nearest crop; allows copies with different aspect ratios
COARSE = 4.0  # pixels; larger structures add nothing to the filter of `candidates`


class Candidate(NamedTuple):
    """A pair that passed the filter: one image in full, and a crop of the other."""

    train: int  # number of the training image in the batch
    test: int
    is_whole_train: bool  # True: the training image in full and a crop of the test image; False: vice versa
    crop: int
    is_mirrored: bool
    similarity: float


class TestSignatures(NamedTuple):
    """Signatures of all test images, memory-mapped."""

    crops: np.ndarray  # (T, K, D) float16
    pictures: np.ndarray  # (T, PICTURE, PICTURE) uint8
    proportions: np.ndarray  # (T,) float32


def candidates(batch: np.ndarray, tests: TestSignatures) -> Iterator[Candidate]:
    """Yield the pairs that may show the same image, for the signatures (B, K, D) of a batch of training images.

    Each pair is yielded at most once per direction and mirroring, with the most similar crop.
    """
    crops = batch.astype(np.float32)
    images = len(crops)
    for start in range(0, len(tests.crops), BLOCK):
        block = tests.crops[start : start + BLOCK].astype(np.float32)
        for is_mirrored in (False, True):
            sign = MIRRORED if is_mirrored else np.float32(1)
            # The full training image against every crop of the test images.
            similarities = (crops[:, 0] * sign) @ block.reshape(-1, COEFFICIENTS).T
            for train, test, crop, value in best_of(similarities.reshape(images, len(block), BOXES)):
                yield Candidate(train, start + test, True, crop, is_mirrored, value)
            # Every crop of the training images against the full test image.
            similarities = (block[:, 0] * sign) @ crops.reshape(-1, COEFFICIENTS).T
            for test, train, crop, value in best_of(similarities.reshape(len(block), images, BOXES)):
                yield Candidate(train, start + test, False, crop, is_mirrored, value)


def best_of(similarities: np.ndarray) -> Iterator[tuple[int, int, int, float]]:
    """Yield (first, second, crop, value) with the most similar crop, for each pair of similar images."""
    places = np.flatnonzero(similarities > ALIKE)
    if len(places) == 0:
        return
    values = similarities.reshape(-1)[places]
    pairs = places // BOXES
    # Sort by pair and then by decreasing similarity, so that the first entry of each pair is its best crop.
    order = np.lexsort((-values, pairs))
    _, firsts = np.unique(pairs[order], return_index=True)
    for place, value in zip(places[order][firsts].tolist(), values[order][firsts].tolist(), strict=True):
        pair, crop = divmod(place, BOXES)
        first, second = divmod(pair, similarities.shape[1])
        yield first, second, crop, value


def likeness(candidate: Candidate, train: Signature, tests: TestSignatures) -> float:
    """Register the two pictures of a candidate, and return the correlation of their fine structure, −1 to 1."""
    test_picture = np.asarray(tests.pictures[candidate.test])
    if candidate.is_whole_train:
        whole, other = train.picture, test_picture
        y, x, height, width = boxes_of(float(tests.proportions[candidate.test]))[candidate.crop]
    else:
        whole, other = test_picture, train.picture
        y, x, height, width = boxes_of(train.proportion)[candidate.crop]
    if candidate.is_mirrored:
        whole = whole[:, ::-1]
    whole = np.ascontiguousarray(whole, np.float32)
    other = other.astype(np.float32)

    # The box of the crop is the starting point: ECC (Evangelidis & Psarakis, PAMI 2008) refines it to the best affine
    # map from pixel centres of `whole` to pixel centres of `other`.
    begin = np.array(
        [[width, 0, x * PICTURE + (width - 1) / 2], [0, height, y * PICTURE + (height - 1) / 2]], np.float32
    )
    until = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 20, 1e-3)
    smooth = cv2.GaussianBlur(whole, (0, 0), 1)
    smooth_other = cv2.GaussianBlur(other, (0, 0), 1)
    fitting = begin
    # ECC raises an error if it does not converge, or if the pictures no longer overlap: then use the box as it is.
    with suppress(cv2.error):
        _, fitting = cv2.findTransformECC(smooth, smooth_other, begin.copy(), cv2.MOTION_AFFINE, until, None, 1)

    # Copies are cropped and resized, but not rotated or sheared, and have about the size of the box. With unlimited
    # rotation, the dark outline of one aeroplane would fit that of another.
    is_straight = abs(fitting[0, 1]) < MAX_ROTATION and abs(fitting[1, 0]) < MAX_ROTATION
    is_as_wide = 1 / MAX_SCALING < fitting[0, 0] / width < MAX_SCALING
    is_as_high = 1 / MAX_SCALING < fitting[1, 1] / height < MAX_SCALING
    if not (is_straight and is_as_wide and is_as_high):
        fitting = begin
    moved = cv2.warpAffine(
        other,
        fitting,
        (PICTURE, PICTURE),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )

    # Pearson correlation without the edges; 0 if either picture has no structure.
    middle = slice(EDGE, -EDGE)
    first = band(whole)[middle, middle]
    second = band(moved)[middle, middle]
    first = first - first.mean()
    second = second - second.mean()
    lengths = float(np.sqrt((first * first).sum() * (second * second).sum()))
    if lengths <= 1e-3:
        return 0.0
    return float((first * second).sum()) / lengths


def band(picture: np.ndarray) -> np.ndarray:
    """Band-pass-filter a picture to remove encoding noise and coarse structure."""
    return cv2.GaussianBlur(picture, (0, 0), FINE) - cv2.GaussianBlur(picture, (0, 0), COARSE)
