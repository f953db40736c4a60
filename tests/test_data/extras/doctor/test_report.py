"""Statistics of the data check agree with counts by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from data.extras.doctor.report import ShardReport, Spread
from data.images.decode import Header

pytestmark = pytest.mark.quick


def test_quantile_of_a_histogram_equals_that_of_the_expanded_values():
    values = [3.0, 1.0, 1.0, 2.0, 9.0, 9.0, 9.0, 4.0]
    spread = Spread(values)
    for q in (0.01, 0.25, 0.5, 0.75, 0.99, 1.0):
        assert spread.quantile(q) == np.quantile(values, q, method="inverted_cdf")


def test_repeated_label_counts_once_and_sizes_are_measured():
    report = ShardReport("a.tar")
    report.add_good(SimpleNamespace(height=30, width=60), b"x" * 1500, (2, 2, 5))
    report.add_good(SimpleNamespace(height=40, width=20), b"y" * 500, (5,))
    assert report.classes == {2: 1, 5: 2}
    assert (report.good, report.size, report.most_labels) == (2, 2000, 3)
    assert report.spreads["shorter side"] == {30: 1, 20: 1}
    assert report.spreads["width / height"] == {2.0: 1, 0.5: 1}
    assert report.spreads["kB"] == {1.5: 1, 0.5: 1}
    assert len(set(report.hashes)) == 2


@pytest.mark.parametrize(("height", "width", "ratio"), [(5000, 10, 0.002), (9, 16, 1.78), (10, 5000, 500)])
def test_a_narrow_image_has_no_ratio_of_zero(height: int, width: int, ratio: float) -> None:
    report = ShardReport("a.tar")
    report.add_good(Header("png", height, width), b"image", (0,))
    assert report.spreads["width / height"].quantile(0.5) == ratio
