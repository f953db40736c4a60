"""The data report page has charts of the classes and of each measure."""

from collections import Counter
from itertools import islice

import pytest

from data.extras.doctor import page
from data.extras.doctor.doctor import check
from data.extras.doctor.page import write_page
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits

pytestmark = pytest.mark.quick

GOOD = list(islice(digits(True), 60))


def test_page_has_charts_of_classes_and_of_each_measure(tmp_path, monkeypatch):
    report = check(pack(GOOD[:20], tmp_path / "set", classes=10))
    figures = []
    monkeypatch.setattr(page.Figure, "savefig", lambda figure, file, **_: figures.append(figure))
    write_page(report, tmp_path / "page.html")
    classes, *measures = [axes for figure in figures for axes in figure.axes]
    (area,) = classes.collections
    assert area.get_paths()[0].vertices[:, 1].max() == max(Counter(s.labels[0] for s in GOOD[:20]).values())
    names = [axis.get_title(loc="left").partition(" of an image, median ")[0] for axis in measures]
    assert names == ["shorter side", "width / height", "kB"]
    assert all(sum(bar.get_height() for bar in axis.patches) >= 20 for axis in measures)
