"""Which training images show what a test image shows: many candidates, cheaply, and then a close look at each.

1. `candidates` compares the whole of one with every crop of the other, both ways round, straight and mirrored: pairs
   whose low frequencies are alike. Of unrelated photographs about one pair in 10,000 comes this far.
2. `likeness` lays the two pictures over each other, moves and scales the one until it fits, and correlates their finer
   structure. Two pictures of one image come to 0.95 and more, unrelated ones hardly above 0.7.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import cv2
import numpy as np

from data.extras.leaks.signature import BOXES, COEFFICIENTS, MIRRORED, PICTURE, Signature, boxes_of

# B training images of a batch, T test images, K crops of each, D coefficients of a crop

ALIKE = 0.78  # inner product from which on a pair is a candidate
BLOCK = 512  # test images that are compared at once: with 64 training images 15 MB of products
EDGE = 3  # pixels at the edge of pictures that are not compared: what lies beyond one is unknown there
FINE = 0.8  # pixels: details smaller than this are noise of encoding
MOST_TURNED = 0.04  # radians, or what is sheared by as much: 2.5 pixels from edge to edge
MOST_SCALED = 1.5  # from the sides of the nearest crop: copies of other proportions too
COARSE = 4.0  # pixels: what is larger says no more than the candidates did


class Candidate(NamedTuple):
    """A pair to look at closely: the whole of one image, and a crop of the other."""

    train: int  # number in the batch
    test: int
    is_whole_train: bool  # the whole one is the training image, the crop is of the test image; or the other way round
    crop: int
    is_synced: bool
    alike: float


class TestSignatures(NamedTuple):
    """Signatures of all test images, mapped from disk."""

    crops: np.ndarray  # (T, K, D) float16
    pictures: np.ndarray  # (T, PICTURE, PICTURE) uint8
    proportions: np.ndarray  # (T,) float32


def candidates(batch: np.ndarray, tests: TestSignatures) -> Iterator[Candidate]:
    """Give pairs that may show the same, for crops (B, K, D) of training images: of each pair and way the best crop."""
    crops = batch.astype(np.float32)
    images = len(crops)
    for start in range(0, len(tests.crops), BLOCK):
        block = tests.crops[start : start + BLOCK].astype(np.float32)
        for is_synced in (False, True):
            sign = MIRRORED if is_synced else np.float32(1)
            # The whole training image against every crop of the test images.
            alike = (crops[:, 0] * sign) @ block.reshape(-1, COEFFICIENTS).T
            for train, test, crop, value in best_of(alike.reshape(images, len(block), BOXES)):
                yield Candidate(train, start + test, True, crop, is_synced, value)
            # Every crop of the training images against the whole test image.
            alike = (block[:, 0] * sign) @ crops.reshape(-1, COEFFICIENTS).T
            for test, train, crop, value in best_of(alike.reshape(len(block), images, BOXES)):
                yield Candidate(train, start + test, False, crop, is_synced, value)


def best_of(alike: np.ndarray) -> Iterator[tuple[int, int, int, float]]:
    """Give (first, second, crop, value) of each pair in (first, second, crop) that is alike: its most similar crop."""
    places = np.flatnonzero(alike > ALIKE)
    if len(places) == 0:
        return
    values = alike.reshape(-1)[places]
    pairs = places // BOXES
    # By pair, and in it the most alike first: then each pair's first entry is the one.
    order = np.lexsort((-values, pairs))
    _, firsts = np.unique(pairs[order], return_index=True)
    for place, value in zip(places[order][firsts].tolist(), values[order][firsts].tolist(), strict=True):
        pair, crop = divmod(place, BOXES)
        first, second = divmod(pair, alike.shape[1])
        yield first, second, crop, value


def likeness(candidate: Candidate, train: Signature, tests: TestSignatures) -> float:
    """Correlate the fine structure of the two pictures of a candidate once they lie on each other: −1 to 1."""
    test_picture = np.asarray(tests.pictures[candidate.test])
    if candidate.is_whole_train:
        whole, other = train.picture, test_picture
        y, x, height, width = boxes_of(float(tests.proportions[candidate.test]))[candidate.crop]
    else:
        whole, other = test_picture, train.picture
        y, x, height, width = boxes_of(train.proportion)[candidate.crop]
    if candidate.is_synced:
        whole = whole[:, ::-1]
    whole = np.ascontiguousarray(whole, np.float32)
    other = other.astype(np.float32)

    # The box of the crop is only where the search begins: ECC (Evangelidis & Psarakis, PAMI 2008) finds the affine map
    # that fits, from the middle of a pixel of `whole` to that of its place in `other`.
    begin = np.array(
        [[width, 0, x * PICTURE + (width - 1) / 2], [0, height, y * PICTURE + (height - 1) / 2]], np.float32
    )
    until = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 20, 1e-3)
    smooth = cv2.GaussianBlur(whole, (0, 0), 1)
    smooth_other = cv2.GaussianBlur(other, (0, 0), 1)
    fitting = begin
    # It gives up where there is nothing to follow, or the pictures move out of each other: the box is then judged.
    with suppress(cv2.error):
        _, fitting = cv2.findTransformECC(smooth, smooth_other, begin.copy(), cv2.MOTION_AFFINE, until, None, 1)

    # A copy is cropped and resized alone, neither turned nor sheared, and of about the box's size: turned far enough,
    # the dark outline of one aeroplane fits that of another.
    is_straight = abs(fitting[0, 1]) < MOST_TURNED and abs(fitting[1, 0]) < MOST_TURNED
    is_as_wide = 1 / MOST_SCALED < fitting[0, 0] / width < MOST_SCALED
    is_as_high = 1 / MOST_SCALED < fitting[1, 1] / height < MOST_SCALED
    if not (is_straight and is_as_wide and is_as_high):
        fitting = begin
    moved = cv2.warpAffine(
        other,
        fitting,
        (PICTURE, PICTURE),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )

    # Pearson's correlation, without the edges; 0 where either picture has no structure.
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
    """Return what is neither noise nor coarse of a picture."""
    return cv2.GaussianBlur(picture, (0, 0), FINE) - cv2.GaussianBlur(picture, (0, 0), COARSE)
