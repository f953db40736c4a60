"""The axes of a study: size and cost of its runs."""

import json

import pytest

from data.index.document import load_index
from jobs.extras.studies.axes import axes_of
from pipeline import artifacts, variables
from tests.support.campaigns import load
from tests.support.sweep_tables import finish, make_table


def test_the_axes_equal_those_of_table_6(tmp_path):
    """Expected values are the paper's, seconds are computed by hand; a run that ended early counts what it trained."""
    recipe = tmp_path / "sizes.yaml"
    recipe.write_text(
        f"run: {tmp_path}/run\n"
        "pretrain:\n"
        "  model: {name: B/16, image_size: 224, classes: 18291}\n"
        "  data: {train: a, evaluate: b}\n"
        "  batch_size: 4096\n"
        "  steps: 900000\n"
        "  passes: null\n"
        "  sweep: {seeds: [0, 1]}\n"
    )
    loaded = load(recipe, [])
    steps = round(7 * 303e6 / 4096)
    for seed, seconds in ((0, 100.0), (1, 300.0)):
        folder = finish(loaded, f"pretrain.seed-{seed}", 0.5)
        # Evaluations took a tenth of the time of steps; 50 s passed before the first step and 9 s after the last.
        report = {"kind": "train", "attempt": 1, "time": 1050.0 + seconds, "seconds": seconds, "wait": 0.25}
        report |= {"step": steps, "steps": 900_000, "losses": [1.0] * steps, "samples_seen": 4096 * steps}
        report |= {"stalled_s": 1.0, "evaluated_s": seconds / 10}
        start = {"kind": "start", "attempt": 1, "time": 1040.0, "claimed": 1000.0, "step": 0}
        last = {"kind": "evaluate", "attempt": 1, "time": 1059.0 + seconds, "step": steps, "accuracy": 0.5}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (start, report, last)))
    document, log = make_table(loaded, "pretrain")
    axes = document["axes"]["pretrain"]
    assert axes["parameters"] == 85_798_656 + 18291 * 769  # timm's vit_base_patch16_224 without head, plus the head
    assert axes["exaflops"] == pytest.approx(224, rel=0.002)  # the paper's table 6
    assert axes["gmacs"] == pytest.approx(224e18 / 6 / (7 * 303e6) / 1e9, rel=0.005)
    assert (axes["samples"], axes["steps"], axes["seconds"]) == (4096 * steps, steps, pytest.approx(180))
    rates = [run["axes"]["images_per_s"] for run in document["runs"]]
    assert rates == pytest.approx([4096 * steps / 90, 4096 * steps / 270])
    assert axes["images_per_s"] == pytest.approx(sum(rates) / 2)
    heading = "parameters GMACs exaFLOPs samples steps seconds images/s"
    assert log[-2].split() == heading.split()
    assert log[-1].split()[:4] == ["pretrain", "99.9M", "17.58", "223.7"]
    assert (loaded.directory(loaded.stage("pretrain")) / "report.txt").read_text().splitlines()[-2:] == log[-2:]


def test_the_size_of_a_training_set_is_known_if_its_path_has_an_environment_variable(recipe, shards, monkeypatch):
    """Records have the variable instead of its value; the value may change after the run."""
    monkeypatch.setenv("PL_TEST_SHARDS", str(shards))
    monkeypatch.setattr(variables, "_values", {})
    variables.note_values({"PL_TEST_SHARDS": str(shards)})
    loaded = load(recipe, ["pretrain.steps=1", "pretrain.optim.schedule.warmup_steps=0"])
    stage = loaded.stage("pretrain")
    folder = finish(loaded, "pretrain", 0.5)
    report = {"kind": "train", "attempt": 1, "time": 11.0, "seconds": 1.0, "wait": 0.0, "step": 1, "steps": 1}
    report |= {"losses": [1.0], "samples_seen": 8, "stalled_s": 0.0, "evaluated_s": 0.0}
    start = {"kind": "start", "attempt": 1, "time": 10.0, "claimed": 9.0, "step": 0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (start, report)))
    inputs = variables.recorded({"data.train": {"path": f"{shards}/train"}})
    assert "oc.env" in inputs["data.train"]["path"]
    artifacts.write_record(folder / "provenance.json", {"inputs": inputs})
    assert axes_of(stage, folder)["images"] == load_index(f"{shards}/train").samples
    monkeypatch.setenv("PL_TEST_SHARDS", "/moved/elsewhere")
    assert "images" not in axes_of(stage, folder)
