"""A figure contains the numbers of its tables and of the paper; impossible figures are refused by name."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

import models
from data.errors import ConfigError, DataError
from jobs.extras.studies import figure
from jobs.resolved_recipe import Available, Context
from pipeline import artifacts, config
from tests.support import campaigns

SPEC = Path(__file__).parents[5] / "shared" / "reference" / "SPEC.md"


def table(folder: Path, rows: dict[str, dict[str, Any]]) -> str:
    """Write the table of a sweep: rows by name, with accuracy, deviation, axes, and values of the grid."""
    record: dict[str, Any] = {"metric": "accuracy", "rows": {}, "means": {}, "chosen": {}, "axes": {}, "runs": []}
    for number, (name, row) in enumerate(rows.items()):
        mean = {"mean": row.get("accuracy"), "sd": row.get("sd"), "runs": 1, "interval": None}
        record["rows"][name] = {"accuracy": mean} if "accuracy" in row else {}
        record["axes"][name] = row.get("axes", {})
        run = {"stage": f"run-{number}", "key": "0" * 64, "row": name, "seed": None, "diverged": ""}
        record["runs"].append({**run, "values": row.get("values", {}), "axes": row.get("axes", {})})
    folder.mkdir(parents=True)
    artifacts.write_record(folder / "sweep.json", record)
    artifacts.write_record(folder / "stage.json", {"name": folder.name})
    artifacts.write_record(folder / "done.json", {"key": "0" * 64})
    return str(folder)


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, str]:
    """Two pretrained sizes, each fine-tuned on two sets."""
    sizes = {"S-32": {"axes": {"exaflops": 55.0}}, "S-16": {"axes": {"exaflops": 224.0}}}
    tuned = {}
    for number, (size, task) in enumerate([("S-32", "c10"), ("S-32", "pets"), ("S-16", "c10"), ("S-16", "pets")]):
        tuned[f"{size}, {task}"] = {"accuracy": 0.5 + number / 8, "sd": 0.01, "values": {"lr": number}}
    runs = tmp_path / "other"
    paths = {"pre": table(runs / "pre-00000000", sizes), "tuned": table(runs / "tuned-00000000", tuned)}
    record = artifacts.read_record(runs / "tuned-00000000" / "sweep.json")
    for size, mean in (("S-32", 0.5625), ("S-16", 0.8125)):
        record["means"][f"{size}, mean of 2"] = {"accuracy": {"mean": mean, "sd": 0.02, "runs": 3, "interval": None}}
    artifacts.write_record(runs / "tuned-00000000" / "sweep.json", record)
    return paths


def draw(tmp_path: Path, section: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    """Run a stage `figure`; return its record and its folder."""
    recipe = tmp_path / "figure.yaml"
    recipe.write_text(json.dumps({"run": str(tmp_path / "run"), "figure": section}))
    loaded = campaigns.load(recipe, [])
    stage = loaded.stage("figure")
    loaded.directory(stage).mkdir(parents=True, exist_ok=True)
    context = Context(loaded, stage, print, poll=lambda attempt, step: None, stop_requested=lambda: False)
    stage.kind.run(stage.config, context)
    return artifacts.read_record(loaded.directory(stage) / "figure.json"), loaded.directory(stage)


def test_rows_take_x_from_their_parent_row_and_the_papers_values_are_added(tables, tmp_path):
    paper = {"table": "table 6", "x": "exaflops", "y": "ImageNet"}
    section = {"tables": tables, "x": "pre.exaflops", "series": "row.2", "log": ["x"], "paper": paper, "stamp": "small"}
    record, folder = draw(tmp_path, section)
    points = [(point["series"], point["x"], point["y"], point["low"]) for point in record["points"]]
    assert points == [
        ("c10", 55.0, 0.5, 0.49),
        ("pets", 55.0, 0.625, 0.615),
        ("c10", 224.0, 0.75, 0.74),
        ("pets", 224.0, 0.875, 0.865),
    ]
    with open(folder / "figure.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["source"] for row in rows] == ["run"] * 4 + ["paper"] * 18
    (h14,) = [row for row in rows if row["row"] == "ViT-H/14 14ep"]
    assert (h14["x"], h14["y"]) == ("4262.0", "0.8808")
    text = (folder / "figure.md").read_text()
    assert "| pets | S-16, pets | 224 | 0.875 |" in text
    assert "*small*" in text
    assert "paper: Dosovitskiy" in text
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    svg = (folder / "figure.svg").read_text()
    assert "table 6</text>" in svg
    assert ">small</text>" in svg


def test_means_over_rows_are_drawn_if_rows_selects_them(tables, tmp_path):
    record, _ = draw(tmp_path, {"tables": tables, "x": "pre.exaflops", "series": "row.2", "rows": "*, mean of *"})
    points = [(point["series"], point["x"], point["y"], point["high"], point["runs"]) for point in record["points"]]
    assert points == [("mean of 2", 55.0, 0.5625, 0.5825, 3), ("mean of 2", 224.0, 0.8125, 0.8325, 3)]


def trained_table(folder: Path, **own: Any) -> str:
    """Write a table of two runs that trained for 8 steps, and a third that diverged."""
    rows = {"a": {"axes": {"steps": 8, "samples": 800, "seconds": 80.0}}, "lost": {}}
    table(folder / "long-00000000", rows)
    record = artifacts.read_record(folder / "long-00000000" / "sweep.json")
    record["runs"][1]["diverged"] = "not finite"
    record["runs"].append({**record["runs"][0], "stage": "second"})
    artifacts.write_record(folder / "long-00000000" / "sweep.json", record)
    cfg = config.build(campaigns.KINDS["pretrain"].config, {"steps": 8, "batch_size": 100, **own}, "t")
    for stage, losses in (("run-0", [4.0, 2.0]), ("second", [6.0, 2.0])):
        (folder / f"{stage}-00000000").mkdir()
        model = models.to_dict(models.config_of("mu/8", 16, 10))
        values = {"name": stage, "config": config.plain(cfg), "model": model}
        artifacts.write_record(folder / f"{stage}-00000000" / "stage.json", values)
        lines = [{"kind": "train", "step": 4 * n, "steps": 8, "losses": [loss]} for n, loss in enumerate(losses, 1)]
        (folder / f"{stage}-00000000" / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return str(folder / "long")


@pytest.mark.parametrize("x", ["samples", "exaflops", "seconds"])
def test_a_curve_is_the_mean_over_the_runs_of_a_row(x, tmp_path, capsys):
    # The first half of the steps sees half of the patches, so it costs less than the second.
    thinning = {"patch_dropout": 0.5, "patch_dropout_until": 0.5}
    tables = {"t": trained_table(tmp_path / "other", thinning=thinning)}
    drawn, _ = draw(tmp_path, {"tables": tables, "y": "loss", "x": x, "curve": True})
    model = models.config_of("mu/8", 16, 10)
    halves = [6 * 400 * models.macs_of(model, 2) / 1e18, 6 * 400 * models.macs_of(model) / 1e18]
    places = {"samples": [400, 800], "exaflops": [halves[0], sum(halves)], "seconds": [40.0, 80.0]}
    assert [point["x"] for point in drawn["points"]] == pytest.approx(places[x], rel=1e-12)
    assert [(point["y"], point["runs"]) for point in drawn["points"]] == [(5.0, 2), (2.0, 2)]
    assert drawn["points"][0]["high"] - 5.0 == pytest.approx(2**0.5)
    assert "lost of t has no curve, because its runs diverged" in capsys.readouterr().out


def test_the_seconds_of_a_curve_are_the_mean_over_the_runs_as_in_the_table(tmp_path):
    tables = {"t": trained_table(tmp_path / "other")}
    folder = tmp_path / "other" / "long-00000000"
    record = artifacts.read_record(folder / "sweep.json")
    record["runs"][0]["axes"]["seconds"] = 40.0
    record["runs"][-1]["axes"] = {**record["runs"][0]["axes"], "seconds": 120.0}
    artifacts.write_record(folder / "sweep.json", record)
    drawn, _ = draw(tmp_path, {"tables": tables, "y": "loss", "x": "seconds", "curve": True})
    assert [point["x"] for point in drawn["points"]] == [40.0, 80.0]


def test_rows_of_equal_name_in_two_tables_are_two_curves(tmp_path):
    tables = {name: trained_table(tmp_path / name) for name in ("t", "u")}
    drawn, folder = draw(tmp_path, {"tables": tables, "y": "loss", "curve": True})
    assert [point["series"] for point in drawn["points"]] == ["t: a", "t: a", "u: a", "u: a"]
    text = (folder / "figure.md").read_text()
    assert [text.count(f"| {name} | a | 8 |") for name in ("t: a", "u: a")] == [1, 1]


def test_the_curve_of_a_branch_cannot_be_drawn_over_seconds(tmp_path):
    tables = {"t": trained_table(tmp_path / "other", init="@trunk", begin=4)}
    with pytest.raises(DataError, match="seconds is unknown for some steps of the runs of 'a' of t"):
        draw(tmp_path, {"tables": tables, "y": "loss", "x": "seconds", "curve": True})


def test_values_are_treated_as_names_if_some_are_not_numbers(tmp_path):
    rows = {}
    for size in (None, 768):
        rows[f"size={size}"] = {"accuracy": 0.5, "values": {"model.representation": size}}
    tables = {"t": table(tmp_path / "other" / "t-00000000", rows)}
    drawn, _ = draw(tmp_path, {"tables": tables, "x": "model.representation"})
    assert [point["x"] for point in drawn["points"]] == ["None", "768"]


@pytest.mark.parametrize("sizes", [(1e3, 3e3, 1e4, 3e4, 1e5, 3e5), (1e3, 1e4, 1e5, 3e5)])
def test_a_law_planted_in_a_table_is_recovered_in_the_figure(sizes, tmp_path):
    rows = {}
    for samples in sizes:
        rows[f"{samples:g}"] = {"accuracy": 1 - (0.1 + 0.4 * (samples / 1e4) ** -0.5), "axes": {"samples": samples}}
    tables = {"t": table(tmp_path / "other" / "t-00000000", rows)}
    record, folder = draw(tmp_path, {"tables": tables, "x": "samples", "log": ["x"], "fit": ["samples"], "draws": 20})
    parameters = record["fit"]["parameters"]
    assert parameters["floor"][0] == pytest.approx(0.1, rel=1e-3)
    assert parameters["exponent 1"][0] == pytest.approx(0.5, rel=1e-3)
    text = (folder / "figure.md").read_text()
    # Four points determine a law; the remaining three do not, so there is no forecast of the fourth.
    if len(sizes) == 4:
        assert "no forecast of the largest point from the others: found 3 points, expected at least 4" in text
        return
    assert record["fit"]["largest"]["foretold"] == pytest.approx(1 - rows["300000"]["accuracy"], rel=1e-3)
    assert "fitted without 300000, the law predicts" in text


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"x": "exaflop"}, "has no 'exaflop'; did you mean 'exaflops'?\n  expected one of row, exaflops"),
        ({"y": "top-1"}, "no row of t has a value"),
        ({"x": "row", "y": "exaflops", "groups": {"big": "L-*"}}, "the row 'S-32' of t matches no group"),
        ({"y": "exaflops", "fit": ["exaflops"]}, "2 points, expected at least 4 for a law with 3 parameters"),
        ({"curve": True, "y": "loss"}, "no curve of loss over steps in metrics.jsonl"),
        ({"log": ["z"]}, "log is ['z'], expected x, y or both"),
        ({"paper": {"table": "table 60", "x": "row", "y": "5shot"}}, "paper.table is table 60; did you mean 'table 6"),
        (
            {"paper": {"table": "table 8", "x": "row", "y": "top-1"}},
            "but table 8 does not have this column\n  expected 5shot, row",
        ),
        ({"tables": {}}, "figure.tables is empty"),
    ],
)
def test_an_impossible_figure_is_refused_by_name(section, message, tables, tmp_path):
    with pytest.raises((ConfigError, DataError)) as error:
        draw(tmp_path, {"tables": {"t": tables["pre"]}, "y": "exaflops", **section})
    assert message in str(error.value)


@pytest.mark.skipif(not SPEC.exists(), reason="the paper's tables are not available")
def test_a_law_over_stages_that_do_not_train_is_not_refused_before_the_runs():
    overrides = ["graph.kind=figure", "graph.tables.t=@evaluate", "graph.x=samples", "graph.fit=[samples]"]
    campaign = campaigns.load(Path(__file__).parents[4] / "jobs" / "recipes" / "cifar10.yaml", overrides)
    stage = campaign.stage("graph")
    assert list(stage.kind.checks(stage, Available(campaign))) == []


def test_the_published_values_equal_those_in_the_paper():
    """Every number of paper.csv is in its table in SPEC.md, except for our own axes such as images."""
    spec = SPEC.read_text()
    with open(figure.PAPER, newline="") as file:
        entries = list(csv.DictReader(file))
    assert len(entries) > 350
    sections = {}
    for number in (2, 5, 6, 7, 8, 9):
        heading = f"Table {number})" if number in (7, 8) else f"**Table {number}**"
        sections[f"table {number}"] = spec[spec.index(heading) :][:2600]
    for entry in entries:
        if entry["name"] in ("images", "mean of 5", "core-days"):
            continue
        value = float(entry["value"])
        if entry["name"] == "exaflops":
            expected = f"| {value:g} |"
        elif entry["table"] == "table 8":
            expected = f"{value:.5f}"
        else:
            expected = rf"{100 * value:.1f}" if entry["table"] == "table 9" else f"{100 * value:.2f}"
        assert re.search(re.escape(expected.removesuffix("0")), sections[entry["table"]]), entry
