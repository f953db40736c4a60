"""The figures for a paper: lines, fonts, colours and sizes, read from the files by XML, zlib and fontTools."""

import io
import json
import re
import zlib
from xml.etree import ElementTree

import numpy as np
import pytest
from fontTools.ttLib import TTFont

from jobs.extras.history import read_run
from jobs.extras.report import page, paper
from jobs.extras.report.paper import write_figures
from pipeline import artifacts
from tests.support.paged_runs import add, make_run

SVG = "{http://www.w3.org/2000/svg}"
# Okabe and Ito 2008, https://jfly.uni-koeln.de/color: blue, vermillion, bluish green, reddish purple, orange, sky blue.
OKABE_ITO = {(0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233)}


@pytest.fixture(scope="module")
def figures(tmp_path_factory, shards):
    """Return the runs' folders and the files written for them, by name."""
    folder = tmp_path_factory.mktemp("paper")
    runs = []
    for number in (0, 1):
        losses = (3 - number - np.sqrt(np.arange(24)) / 2).tolist()
        stage = make_run(folder / "runs" / f"lr $0.0{number}$", shards, losses=losses)
        for step in (8, 16, 24):
            add(stage, {"kind": "evaluate", "step": step, "accuracy": step / 100, "judged": 100})
        runs.append(stage.parent)
    written = write_figures(runs, folder / "figures")
    return runs, {path.name: path for path in written}


def curves_of(svg: ElementTree.Element) -> dict[str, np.ndarray]:
    """Return the points of the curves with more points than a line of the legend, by colour."""
    curves = {}
    for path in svg.iter(f"{SVG}path"):
        points = re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))
        colour = re.search(r"stroke: #(\w{6})", path.get("style", ""))
        if len(points) > 3 and "fill: none" in path.get("style", "") and colour:
            curves[colour[1]] = np.array(points, float)
    return curves


def test_each_quantity_is_written_over_samples_and_time_as_pdf_and_svg(figures):
    _, files = figures
    names = []
    for quantity in ("held-out-accuracy", "training-loss"):
        for axis in ("", "-over-time"):
            names += [f"the-only-training-stage-{quantity}{axis}{suffix}" for suffix in (".pdf", ".svg")]
    assert sorted(files) == sorted(names)


def test_the_curves_are_those_of_metrics_jsonl_in_colours_for_the_colour_blind(figures):
    runs, files = figures
    svg = ElementTree.fromstring(files["the-only-training-stage-training-loss.svg"].read_text())
    curves = curves_of(svg)
    assert {tuple(bytes.fromhex(colour)) for colour in curves} < OKABE_ITO
    recorded = []
    for run in runs:
        (metrics,) = run.glob("*/metrics.jsonl")
        records = map(json.loads, metrics.read_text().splitlines())
        recorded += [loss for record in records if record["kind"] == "train" for loss in record["losses"]]
    heights = np.concatenate([points[:, 1] for points in curves.values()])
    # One linear map leads from the losses of both runs to the heights of the picture, which grow downwards.
    slope, offset = np.polyfit(recorded, heights, 1)
    np.testing.assert_allclose(slope * np.array(recorded) + offset, heights, atol=0.01)
    assert slope < 0


def test_text_is_text_in_an_svg_in_the_width_of_a_column(figures):
    _, files = figures
    for name in files:
        if name.endswith(".svg"):
            svg = ElementTree.fromstring(files[name].read_text())
            assert svg.get("width") == "234pt", "3.25 inches"
            texts = ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]
            assert {"lr $0.00$", "lr $0.01$"} < set(texts), "names are no formulas"
            assert ("training time (seconds)" if "over-time" in name else "images seen") in texts
            assert min(map(int, re.findall(r"font-size: (\d+)px", files[name].read_text()))) == 7, "points"


def test_a_pdf_embeds_truetype_fonts_and_has_the_width_of_a_column(figures):
    _, files = figures
    for name in files:
        if name.endswith(".pdf"):
            pdf = files[name].read_bytes()
            assert re.search(rb"/MediaBox \[ ?0 0 234 ", pdf)
            assert b"/Type3" not in pdf
            fonts = []
            for content in map(inflated, re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL)):
                if content.startswith(b"\0\1\0\0"):
                    fonts.append(TTFont(io.BytesIO(content)))
            # A second subset of the font has the minus.
            assert len(fonts) == pdf.count(b"/FontFile2") > 0
            for font in fonts:
                assert font["maxp"].maxContours > 0


def inflated(content: bytes) -> bytes:
    """Return the content of a compressed stream of a PDF; empty if it is not compressed."""
    try:
        return zlib.decompressobj().decompress(content)
    except zlib.error:
        return b""


def test_one_run_has_a_figure_for_each_stage_with_intervals(figures, tmp_path):
    runs, _ = figures
    written = {path.name: path for path in write_figures(runs[:1], tmp_path / "of-one")}
    assert len(written) == 8
    text = next(path for name, path in written.items() if name.endswith("held-out-accuracy.svg")).read_text()
    assert "LineCollection" in text, "error bars"
    assert "legend" not in text


def test_runs_with_equal_names_are_compared_and_have_their_own_figures(tmp_path, shards, monkeypatch):
    runs = []
    for name in ("a", "b"):
        run = make_run(tmp_path / name / "x" / "my run", shards).parent
        (run / "figure-00000000").mkdir()
        for file in ("stage.json", "figure.json"):
            artifacts.write_record(run / "figure-00000000" / file, {"name": "figure"})
        runs.append(run)
    drawn = []

    def write(record, path, suffixes):
        drawn.append(path)
        return [path.with_name(path.name + suffix) for suffix in suffixes]

    monkeypatch.setattr(paper, "write_study_chart", write)
    written = write_figures(runs, tmp_path / "figures")
    assert len(set(written)) == len(written)
    assert len(set(drawn)) == 2
    assert {path.parent for path in drawn} == {tmp_path / "figures"}
    (compared,) = page.compare_values(list(map(read_run, runs)))["compared"]
    assert compared["runs"] == 2

    # Figures can also be named by the folders of their stages.
    drawn.clear()
    write_figures([run / "figure-00000000" for run in runs], tmp_path / "figures")
    assert len(set(drawn)) == 2
    assert {path.parent for path in drawn} == {tmp_path / "figures"}
