"""Candidate pairs and their similarity agree with a plain loop."""

import cv2
import numpy as np
import pytest
from scipy import stats

from benchmarks.leaks import bound_of_pairs
from data.extras.leaks.matching import ALIKE, TestSignatures, best_of, candidates, likeness
from data.extras.leaks.signature import BOXES, MIRRORED, signature

pytestmark = pytest.mark.quick


def painting(seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=(200, 260, 3))
    fine = cv2.GaussianBlur(noise, (0, 0), 4) * 300
    return np.clip(cv2.GaussianBlur(noise, (0, 0), 12) * 700 + fine + 120, 0, 255).astype(np.uint8)


def signature_of(image: np.ndarray):
    return signature(cv2.imencode(".png", image)[1].tobytes())


@pytest.fixture(scope="module")
def images():
    return [painting(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def tests(images):
    signatures = [signature_of(image) for image in images]
    return TestSignatures(
        np.stack([each.crops for each in signatures]),
        np.stack([each.picture for each in signatures]),
        np.array([each.proportion for each in signatures], np.float32),
    )


def test_best_crop_of_each_pair_equals_a_plain_loop():
    alike = np.random.default_rng(0).uniform(0, 1, (3, 4, BOXES))
    alike[1, 2] = 0
    expected = []
    for first in range(3):
        for second in range(4):
            crop = int(alike[first, second].argmax())
            if alike[first, second, crop] > ALIKE:
                expected.append((first, second, crop, alike[first, second, crop]))
    assert list(best_of(alike)) == expected


def test_candidates_have_large_inner_products(images, tests):
    train = np.stack([signature_of(images[2][:, ::-1]).crops, signature_of(painting(9)).crops]).astype(np.float32)
    expected = set()
    for number in range(2):
        for test in range(4):
            for sign in (1, MIRRORED):
                products = tests.crops[test].astype(np.float32) @ (train[number, 0] * sign)
                if products.max() > ALIKE:
                    expected.add((number, test, True, sign is MIRRORED))
    found = {(c.train, c.test, c.is_whole_train, c.is_mirrored) for c in candidates(train, tests) if c.is_whole_train}
    assert found == expected
    assert (0, 2, True, True) in found


def test_copy_has_high_likeness_and_other_image_does_not(images, tests):
    copy = signature_of(cv2.resize(images[1], (130, 100), interpolation=cv2.INTER_AREA))
    pairs = list(candidates(copy.crops[None], tests))
    values = {pair.test: likeness(pair, copy, tests) for pair in pairs if pair.is_whole_train and not pair.is_mirrored}
    assert values[1] > 0.9
    assert all(value < 0.88 for test, value in values.items() if test != 1)


def test_the_bound_of_false_pairs_counts_photographs_and_not_pairs():
    # Without a false pair, 150 independent trials bound the rate p by (1 - p)^150 = 5 %.
    assert bound_of_pairs(0, 300) == pytest.approx(1 - 0.05 ** (1 / 150))
    # 1 % of 44,850 pairs is 1.5 of 150 trials, which counts as 2.
    assert bound_of_pairs(448, 300) == pytest.approx(stats.binomtest(2, 150).proportion_ci(0.9).high)
