"""Position embeddings against SciPy and plain loops."""

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

from models.positions import Relative, resize_positions, shrink, shrinking, sincos2d

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("old", "new"), [((3, 3), (6, 6)), ((4, 2), (2, 5)), ((5, 5), (2, 2)), ((1, 4), (1, 7))])
def test_a_table_is_resized_as_scipy_zooms_and_the_prefix_stays(old, new):
    table = torch.randn(2 + math.prod(old), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    resized = resize_positions(table, old, new, 2)
    factors = (new[0] / old[0], new[1] / old[1], 1)
    expected = zoom(table[2:].reshape(*old, 3).numpy(), factors, order=1)
    torch.testing.assert_close(resized[:2], table[:2], rtol=0, atol=0)
    np.testing.assert_allclose(resized[2:].reshape(*new, 3).numpy(), expected, atol=1e-12)


def test_a_table_of_another_grid_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="position table has 10 entries, but grid 3x3 with 2 prefix tokens needs 11"):
        resize_positions(torch.zeros(10, 4), (3, 3), (6, 6), 2)


def test_the_fixed_table_is_sine_and_cosine_of_column_and_row():
    rows, columns, width = 3, 2, 8
    table = sincos2d((rows, columns), width)
    for row in range(rows):
        for column in range(columns):
            omegas = [10_000.0 ** -(k / (width // 4 - 1)) for k in range(width // 4)]
            expected = [math.sin(column * omega) for omega in omegas]
            expected += [math.cos(column * omega) for omega in omegas]
            expected += [math.sin(row * omega) for omega in omegas]
            expected += [math.cos(row * omega) for omega in omegas]
            assert table[0, row * columns + column].tolist() == pytest.approx(expected, abs=1e-6)


def test_every_entry_has_a_share_in_the_smaller_table():
    weights = shrinking((8, 8), (3, 4))
    assert weights.sum(1).tolist() == pytest.approx([1.0] * 12, abs=1e-6)
    assert bool((weights.sum(0) > 0).all())


def test_shrinking_a_constant_table_keeps_it_and_the_slots():
    table = torch.cat([torch.full((1, 1, 2), 9.0), torch.full((1, 16, 2), 3.0)], dim=1)
    smaller = shrink(table, (4, 4), (2, 2), 1)
    assert smaller[0, 0].tolist() == [9.0, 9.0]
    torch.testing.assert_close(smaller[:, 1:], torch.full((1, 4, 2), 3.0))


def test_a_relative_bias_is_the_query_times_the_key_of_the_offset():
    module = Relative((2, 2), width=6, slots=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        module.table.copy_(torch.randn(module.table.shape, generator=generator))
    heads, dim, tokens = 2, 3, 6  # one prefix token has no entry
    q = torch.randn(1, heads, tokens, dim, generator=generator)
    bias = module(q).detach()
    keys = module.table.detach()[0].view(-1, heads, dim)
    for head in range(heads):
        for query in range(tokens):
            for key in range(tokens):
                expected = 0.0
                if query > 0 and key > 0:
                    offset = (query - key) + module.length - 1
                    expected = float(q[0, head, query] @ keys[offset, head]) * dim**-0.5
                assert float(bias[0, head, query, key]) == pytest.approx(expected, abs=1e-5)
