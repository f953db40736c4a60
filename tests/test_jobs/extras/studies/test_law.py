"""A branch has the bits of its trunk and of a run of its own; a law is scored; a budget is kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import models
from data.errors import ConfigError
from jobs.__main__ import main
from jobs.extras.studies.axes import AT_A_STEP, axes_at
from jobs.extras.studies.law import compute_of, foretell
from jobs.resolved_recipe import Context
from pipeline import artifacts
from pipeline.extras.power_law import fit
from tests.support import campaigns

# A step of each kind of state: moments, averaged weights, draws of dropout, crops and mixup.
COMMON: dict[str, Any] = {
    "kind": "pretrain",
    "data": {"augment": {"min_area": 0.5}},
    "model": {"name": "mu/8", "image_size": 16, "classes": 10, "dropout": 0.1},
    "optim": {"lr": 3e-3, "schedule": {"decay": "constant", "warmup_steps": 4}},
    "mixup": 0.2,
    "polyak": 0.9,
    "batch_size": 16,
    "micro_batch": 16,
    "precision": "fp32",
    "log_every": 8,
}
COOLED = {"schedule": {"decay": "constant", "warmup_steps": 4, "cooldown_steps": 4}}


def law(folder: Path) -> str:
    """A law of curves that were far better than any run of these tests: an error of 1 % after 100 samples."""
    samples = np.geomspace(10, 1000, 8)
    error = 0.001 + 0.009 * (samples / 100) ** -0.5
    fitted = fit(samples[:, None], error * (1 + 0.01 * np.cos(samples)), np.random.default_rng(0), draws=50)
    figure = {"y": "accuracy", "is_share": True, "is_curve": True}
    artifacts.write_record(folder / "figure.json", {**figure, "fit": {"axes": {"samples": 1}, "law": fitted.record()}})
    return str(folder / "figure.json")


def recipe(folder: Path, shards: Path, changes: dict[str, Any] | None = None) -> Path:
    """A trunk with its branches, a run of its own like one of them, and a trunk in a sweep with its branch."""
    data = {**COMMON["data"], "train": str(shards / "train"), "evaluate": str(shards / "test")}
    trunk = {**COMMON, "data": data, "steps": 24, "save_every": 8, "keep_every": 8}
    sections: dict[str, Any] = {
        "run": str(folder / "run"),
        "cluster": {"workers": 1, "backend": "processes"},
        "trunk": trunk,
        "same": {"kind": "pretrain", "init": "@trunk", "begin": 16, "steps": 24},
        "cool": {"kind": "pretrain", "init": "@trunk", "begin": 8, "steps": 16, "law": law(folder)},
        "apart": {**COMMON, "data": data, "optim": {**COMMON["optim"], **COOLED}, "steps": 16},
        "far": {**trunk, "evaluate_every": 8, "law": law(folder), "sweep": {"each": {"a": {}}}},
        "after": {"kind": "pretrain", "init": "@far.*", "begin": 16, "steps": 24},
    }
    sections["cool"]["optim"] = {"schedule": {"cooldown_steps": 4}}  # the rest is its trunk's
    for key, value in (changes or {}).items():
        section, _, field = key.partition(".")
        if field:
            sections[section][field] = value
        else:
            sections[section] = value
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    return path


def test_a_branch_has_the_bits_of_its_trunk_and_of_a_run_of_its_own_and_a_law_is_scored(tmp_path, shards, capsys):
    assert main(["run", str(recipe(tmp_path, shards))]) == 0
    said = capsys.readouterr().out
    weights = {}
    for file in (tmp_path / "run").glob("*/weights.safetensors"):
        weights[file.parent.name.rpartition("-")[0]] = file.read_bytes()
    assert weights["same"] == weights["trunk"] != weights["cool"]
    assert weights["cool"] == weights["apart"]
    assert "branch: resumed from step 8" in said and "OUTSIDE" in said
    # The law expects more than there is; the stage goes to its end all the same, and the score says so.
    (folder,) = (tmp_path / "run").glob("far.a-*")
    done = artifacts.read_done(folder)
    assert done is not None
    assert done["step"] == 24
    assert not done["foretold"]["is_inside"]
    assert done["foretold"]["was"] == done["metrics"]["accuracy"]
    assert "figure.json" not in said and "foretells accuracy 0.9" in said
    assert weights["after.a"]


def law_of(axis: str, y: str = "accuracy") -> dict[str, Any]:
    """A figure over the runs of the sweep, with a law of an axis."""
    return {"curves": {"kind": "figure", "tables": {"t": "@far"}, "y": y, "fit": [axis]}}


NEXT = {"kind": "pretrain", "init": "@trunk", "begin": 16, "steps": 24, "law": "@curves/figure.json"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cool.begin": 12}, "keeps those that keep_every 8 and save_every 8 divide\n  type trunk.keep_every=12"),
        ({"cool.steps": 8}, "begins at step 8 and ends at step 8"),
        ({"cool.seed": 1}, "has its values, and here they differ: seed: 0 → 1"),
        ({"cool.model": {"dropout": 0.5}}, "has its values, and here they differ: model.dropout: 0.1 → 0.5"),
        ({"apart.begin": 8, "apart.init": "other/trunk"}, "apart.begin: init is other/trunk, and a branch has the"),
        ({"cool.optim": {"schedule": {"cooldown_steps": 12}}}, "the learning rate of step 8 is 0.003 in trunk, and"),
        ({"cool.init": "@far"}, "cool.init is @far: that is the table of a sweep"),
        ({"apart.begin": 8}, "begin is a step of the stage that init names: give init"),
        ({**law_of("seconds"), "next": NEXT}, "@curves/figure.json is a law of seconds, which nothing tells before"),
        ({**law_of("samples", y="5shot"), "next": NEXT}, "is a law of 5shot, which its evaluations will not have"),
        ({"next": {**NEXT, "law": "@trunk/figure.json"}}, "next.law: @trunk/figure.json has no fit\n  expected @FIG"),
        ({"budget": 1e-12}, "budget is 1e-12 exaFLOPs, and the recipe takes"),
        ({"budget": "much"}, "budget is much, expected exaFLOPs"),
    ],
)
def test_what_would_be_no_branch_or_costs_too_much_is_refused_before_anything_starts(
    changes, message, tmp_path, shards
):
    with pytest.raises(ConfigError) as error:
        campaigns.load(recipe(tmp_path, shards, changes), [])
    assert message in str(error.value)


def test_a_branch_costs_its_own_steps_alone(tmp_path, shards):
    # A branch of a grid is a branch like any other.
    loaded = campaigns.load(recipe(tmp_path, shards, {"cool.begin": None, "cool.sweep": {"grid": {"begin": [8]}}}), [])
    trunk = loaded.stage("trunk")
    assert tuple(axes_at(trunk.config, trunk.model, 1, 24)) == AT_A_STEP
    image = 6 * models.macs_of(loaded.stage("trunk").model) * 16 / 1e18  # forward and twice backward, 2 a MAC
    compute = compute_of(loaded)
    # Trunk, same, cool, apart, far and after; without branches the two trunks are not needed.
    assert compute.planned == pytest.approx((24 + 8 + 8 + 16 + 24 + 8) * image)
    assert compute.apart == pytest.approx((24 + 16 + 16 + 24) * image)


@pytest.mark.parametrize(("step", "was", "verdict"), [(8, 0.991, "inside"), (24, 0.5, "OUTSIDE")])
def test_the_evaluation_of_the_step_with_which_a_stage_ended_is_scored(step, was, verdict, tmp_path, shards):
    loaded = campaigns.load(recipe(tmp_path, shards), [])
    stage = loaded.stage("far.a")
    context = Context(loaded, stage, print, poll=lambda attempt, step: None, stop_requested=lambda: False)
    forecast = foretell(stage.config, context, step)
    # By hand: the law of `law`, after this many samples.
    assert forecast.value == pytest.approx(1 - (0.001 + 0.009 * (16 * step / 100) ** -0.5), abs=2e-3)
    said: list[str] = []
    score = forecast.score(was, said.append)
    assert score["is_inside"] == (forecast.low <= was <= forecast.high)
    assert said[0].endswith(f"at step {step}, was {was:.4f}: {verdict}")
