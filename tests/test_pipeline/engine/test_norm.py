"""The gradient norm over flat pieces, compared with numpy in float64."""

import math

import numpy as np
import pytest
import torch

from pipeline.engine.engine import ROW, clipping, sum_of_squares

pytestmark = pytest.mark.quick

SIZES = {"one": [1], "a row": [ROW], "rows and a tail": [3 * ROW + 5], "many": [7, ROW - 1, 2 * ROW, 0, 33 * 12]}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sum_of_squares_matches_numpy_however_the_gradient_is_split(sizes: list[int]):
    values = np.random.default_rng(0).normal(scale=1e-3, size=sum(sizes)).astype(np.float32)
    gradients = list(torch.from_numpy(values).split(sizes))
    found = sum_of_squares(gradients)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(np.square(values.astype(np.float64)).sum()), rel=1e-6)


def test_norm_of_a_long_gradient_is_as_accurate_as_that_of_a_short_one():
    """On a CPU torch sums 16 million squares in a few running fp32 sums, with an error of 7e-4."""
    gradient = torch.randn(2**24, generator=torch.Generator().manual_seed(0))
    expected = float(np.linalg.norm(gradient.numpy().astype(np.float64)))
    assert math.sqrt(float(sum_of_squares([gradient]))) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, ROW, 2 * ROW + 2])
def test_one_non_finite_element_makes_the_sum_non_finite(value: float, place: int):
    gradient = torch.ones(2 * ROW + 3)
    gradient[place] = value
    assert not math.isfinite(float(sum_of_squares([torch.ones(3), gradient])))


def test_gradient_is_clipped_to_the_limit_and_never_enlarged():
    assert 5.0 * clipping(5.0, 1.0) == pytest.approx(1.0, rel=1e-6)
    assert (clipping(0.5, 1.0), clipping(1e9, 0.0)) == (1.0, 1.0), "clip: 0 is off"
