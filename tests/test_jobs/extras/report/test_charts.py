"""Curves of a page: reduced to buckets, and smoothed."""

import numpy as np
import pytest

from jobs.extras.report.charts import smooth, thin

pytestmark = pytest.mark.quick


def test_a_smoothed_curve_is_the_mean_of_each_bucket_with_gaps_for_non_finite_values():
    y = np.random.default_rng(0).normal(size=1000)
    y[3] = np.inf
    y[28:42] = np.nan
    x, means, size = smooth(np.arange(1000.0), y)
    assert size == 14
    assert len(x) == len(means) == 72
    assert means[0] == pytest.approx(np.delete(y[:14], 3).mean())
    assert means[-1] == pytest.approx(y[994:].mean())
    assert np.flatnonzero(np.isnan(means)).tolist() == [2]
    assert x[0] == 6.5


def test_a_reduced_curve_keeps_the_minimum_and_maximum_of_each_bucket():
    y = np.random.default_rng(0).normal(size=10_007)
    y[5000:5100] = np.nan
    x, reduced = thin(np.arange(len(y)), y, buckets=50)
    assert len(x) <= 102
    assert (reduced[~np.isnan(reduced)] == y[x.astype(int)][~np.isnan(reduced)]).all()
    for low in range(0, 10_000, 2000):
        part = (x >= low) & (x < low + 2000)
        assert np.nanmax(reduced[part]) == np.nanmax(y[low : low + 2000])
        assert np.nanmin(reduced[part]) == np.nanmin(y[low : low + 2000])
