"""The axes of a study: size and cost of its runs."""

import json

import pytest

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
