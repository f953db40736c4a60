"""Charts of a page: reduced and smoothed curves, marks, and room for titles and legends."""

import re

import numpy as np
import pytest

from data.extras.pages.page import charted
from jobs.extras.report.charts import Line, Mark, drawn, figure_of, line_chart, smooth, thin

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


def heights_of(chart: str) -> dict[str, float]:
    """Return the text elements of a chart, with their distance from its top in pixels."""
    texts = re.findall(r'<text [^>]* y="([\d.]+)"[^>]*>([^<]+)<', chart)
    assert texts
    return {text: float(height) for height, text in texts}


def test_each_kind_of_mark_is_listed_once_below_the_axis_label():
    line = Line("loss", np.arange(5.0), np.ones(5))
    marks = [Mark(1, "restart"), Mark(2, "spike", 1.0), Mark(3, "restart"), Mark(4, "restart")]
    chart = line_chart("loss", [line], marks)
    assert (chart.count(">restart<"), chart.count(">spike<")) == (1, 1)
    heights = heights_of(chart)
    assert heights["loss"] < heights["samples seen"] < heights["restart"]


def test_a_spike_has_another_colour_than_the_only_curve():
    line = Line("loss", np.arange(5.0), np.ones(5))
    without = line_chart("loss", [line])
    colours = set(re.findall(r"stroke: ([^;\"]+)", line_chart("loss", [line], [Mark(2, "spike", 1.0)])))
    assert colours - set(re.findall(r"stroke: ([^;\"]+)", without))


@pytest.mark.parametrize(("height", "below"), [(2.0, 0.3), (3.0, 0.7)])
def test_axes_leave_room_for_the_title_above_and_the_legend_below(height, below):
    with charted():
        figure, axes = figure_of()
        drawn(figure, axes, "loss", height, below=below)
    box = axes.get_position()
    assert box.y0 * height == pytest.approx(below)
    assert (1 - box.y1) * height == pytest.approx(0.28)
