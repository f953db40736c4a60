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
    write_study_chart(record, tmp_path / "figure")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_a_law_is_a_line_in_our_panel_and_series_differ_without_colours() -> None:
    record = {**panel("ours", "hybrids"), "log": ["x"], "stamp": "", "paper": panel("paper")}
    without = [len(axes.lines) for axes in study_figure(record, {}).axes]
    figure = study_figure({**record, "fit": {"line": [[1.0, 3.0, 10.0], [0.4, 0.5, 0.6]]}}, {})
    assert [len(axes.lines) for axes in figure.axes] == [without[0] + 1, without[1]]
    assert figure.axes[0].lines[-1].get_xydata().tolist() == [[1.0, 0.4], [3.0, 0.5], [10.0, 0.6]]
    first, second = (container.lines[0] for container in figure.axes[0].containers)
    assert first.get_marker() != second.get_marker()
    assert first.get_linestyle() != second.get_linestyle()


def test_names_are_drawn_at_integers_in_order_of_appearance() -> None:
    record = {**panel("ours"), "log": [], "stamp": ""}
    for point, name in zip(record["points"], ("small", "big"), strict=True):
        point["x"] = name
    (axes,) = study_figure(record, {}).axes
    (container,) = axes.containers
    assert container.lines[0].get_xdata().tolist() == [0, 1]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["small", "big"]
