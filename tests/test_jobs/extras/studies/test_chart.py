"""The chart of a study: one panel for our results and one for the paper's, with one line per series."""

import pytest

from jobs.extras.studies.chart import study_figure, write_study_chart

pytestmark = pytest.mark.quick


def panel(*series: str) -> dict:
    points = []
    for name in series:
        for x in (1.0, 10.0):
            points.append({"series": name, "row": "r", "x": x, "y": 0.5, "low": 0.4, "high": 0.6, "runs": 2})
    return {"title": "t", "is_curve": False, "is_share": False, "x": "samples", "y": "accuracy", "points": points}


def test_the_papers_points_are_drawn_in_a_separate_panel(tmp_path) -> None:
    record = {**panel("ours", "hybrids"), "log": ["x"], "stamp": "commit abc", "paper": panel("paper")}
    figure = study_figure(record, {})
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "log"]
    assert figure.texts[-1].get_text() == "commit abc"
    write_study_chart(record, tmp_path)
    assert (tmp_path / "figure.png").stat().st_size > 1000
