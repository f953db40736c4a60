"""A branch is bit-equal to its trunk and to a separate run; forecasts are scored; a budget is enforced."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import models
from data.errors import ConfigError, DataError
from jobs.__main__ import main
from jobs.extras.studies.axes import AT_A_STEP, axes_at
from jobs.extras.studies.law import branch_off, compute_of, forecast_of
from jobs.resolved_recipe import Context
from pipeline import artifacts
from pipeline.extras.power_law import fit
from tests.support import campaigns

# Uses every kind of state: moments, averaged weights, random draws of dropout, crops and mixup.
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
    """Write a law far better than any run of these tests: an error of 1 % after 100 samples."""
    samples = np.geomspace(10, 1000, 8)
    error = 0.001 + 0.009 * (samples / 100) ** -0.5
    fitted = fit(samples[:, None], error * (1 + 0.01 * np.cos(samples)), draws=50)
    figure = {"y": "accuracy", "is_share": True, "is_curve": True}
    artifacts.write_record(folder / "figure.json", {**figure, "fit": {"axes": {"samples": 1}, "law": fitted.record()}})
    return str(folder / "figure.json")


def recipe(folder: Path, shards: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write a recipe with a trunk and its branches, a separate run like one of them, and a trunk in a sweep."""
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
    sections["cool"]["optim"] = {"schedule": {"cooldown_steps": 4}}  # the other fields come from the trunk
    for key, value in (changes or {}).items():
        section, _, field = key.partition(".")
        if field:
            sections[section][field] = value
        else:
            sections[section] = value
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    return path


def test_a_branch_is_bit_equal_to_its_trunk_and_to_a_separate_run_and_a_law_is_scored(tmp_path, shards, capsys):
    assert main(["run", str(recipe(tmp_path, shards))]) == 0
    out = capsys.readouterr().out
    weights = {}
    for file in (tmp_path / "run").glob("*/weights.safetensors"):
        weights[file.parent.name.rpartition("-")[0]] = file.read_bytes()
    assert weights["same"] == weights["trunk"] != weights["cool"]
    assert weights["cool"] == weights["apart"]
    assert "branch: resumed from step 8" in out
    assert "OUTSIDE" in out
    # The law predicts too much; the stage finishes anyway, and the score records the difference.
    (folder,) = (tmp_path / "run").glob("far.a-*")
    done = artifacts.read_done(folder)
    assert done is not None
    assert done["step"] == 24
    assert not done["foretold"]["is_inside"]
    assert done["foretold"]["was"] == done["metrics"]["accuracy"]
    assert "figure.json" not in out
    assert "predicts accuracy 0.9" in out
    assert weights["after.a"]


def test_a_longer_stage_is_refused_with_a_command_that_equals_a_run_of_this_length(tmp_path, shards, capsys):
    path = recipe(tmp_path, shards)
    sections = yaml.safe_load(path.read_text())
    trunk = {**sections["trunk"], "steps": 12, "keep_every": 0}
    short = {name: sections[name] for name in ("run", "cluster")}
    optim = {**COMMON["optim"], "schedule": {**COMMON["optim"]["schedule"], "cooldown_steps": 2}}
    path.write_text(yaml.safe_dump({**short, "trunk": trunk, "apart": {**trunk, "optim": optim, "steps": 20}}))
    assert main(["run", str(path)]) == 0
    (folder,) = (tmp_path / "run").glob("trunk-*")
    (folder / "done.json").unlink()
    capsys.readouterr()
    assert main(["run", str(path), "trunk.steps=20"]) == 78
    error = capsys.readouterr().err
    assert f"python -m jobs export {folder}/step-12 FOLDER, then add trunk.init=FOLDER --fresh" in error
    assert main(["export", f"{folder}/step-12", str(tmp_path / "weights")]) == 0
    assert main(["plan", str(path), "trunk.steps=20", f"trunk.init={tmp_path / 'weights'}", "--fresh"]) == 0
    command = error.partition("extend it with a new cool-down: python -m jobs ")[2].splitlines()[0]
    assert command.split()[:3] == ["run", str(path), "trunk.steps=12"], "it replaces what was typed"
    assert main(command.split()) == 0
    weights = [next((tmp_path / "run").glob(f"{name}-*/weights.safetensors")) for name in ("trunk-longer", "apart")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def law_of(axis: str, y: str = "accuracy") -> dict[str, Any]:
    """Return a section `figure` over the runs of the sweep, with a law over one axis, from four evaluations."""
    figure = {"kind": "figure", "tables": {"t": "@far"}, "y": y, "fit": [axis], "curve": True, "x": "samples"}
    return {"far.evaluate_every": 6, "curves": figure}


NEXT = {"kind": "pretrain", "init": "@trunk", "begin": 16, "steps": 24, "law": "@curves/figure.json"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cool.begin": 12}, "steps with keep_every=8 and save_every=8\n  set trunk.keep_every=12"),
        ({"trunk.keep_every": 0}, "keeps no checkpoint of this step: it trains 24 steps with keep_every=0 and save_ev"),
        ({"cool.steps": 8}, "begins at step 8 and ends at step 8"),
        ({"cool.seed": 1}, "but these values differ: seed: 0 → 1"),
        ({"cool.model": {"dropout": 0.5}}, "but these values differ: model.dropout: 0.1 → 0.5"),
        ({"apart.begin": 8, "apart.init": "other/trunk"}, "apart.begin: init is other/trunk, expected a stage of th"),
        ({"cool.optim": {"schedule": {"cooldown_steps": 12}}}, "the learning rate of step 8 is 0.003 in trunk, but"),
        ({"cool.init": "@far"}, "cool.init is @far, the table of a sweep"),
        ({"apart.begin": 8}, "begin is 8, which is a step of the stage in init, but init is not set"),
        ({**law_of("seconds"), "next": NEXT}, "@curves/figure.json needs seconds, which is unknown until"),
        ({**law_of("samples", y="5shot"), "next": NEXT}, "predicts 5shot, which the stage does not report"),
        ({"next": {**NEXT, "law": "@trunk/figure.json"}}, "next.law: @trunk/figure.json has no fit\n  expected @FIG"),
        (
            {"curves": {"kind": "figure", "tables": {"t": "@far"}, "fit": ["samples"]}},
            "the runs of @far cannot determine a law: found 1 points, expected at least 4 for a law with 3 parameters\n"
            "  numbers of distinct values: 1 of samples",
        ),
        (
            {"curves": {**law_of("samples")["curves"], "fit": ["parameters", "samples"]}, "far.evaluate_every": 2},
            "the runs of @far cannot determine a law: a variable of the law has 1 distinct values, expected at least 3",
        ),
        ({"budget": 1e-12}, "budget is 1e-12 exaFLOPs, but the recipe needs"),
        ({"budget": "much"}, "budget is much, expected a number of exaFLOPs"),
    ],
)
def test_impossible_branches_and_exceeded_budgets_are_refused_before_the_start(changes, message, tmp_path, shards):
    with pytest.raises(ConfigError) as error:
        campaigns.load(recipe(tmp_path, shards, changes), [])
    assert message in str(error.value)


def test_a_branch_costs_only_its_own_steps(tmp_path, shards):
    # A branch in a grid is counted like any other.
    loaded = campaigns.load(recipe(tmp_path, shards, {"cool.begin": None, "cool.sweep": {"grid": {"begin": [8]}}}), [])
    trunk = loaded.stage("trunk")
    assert tuple(axes_at(trunk.config, trunk.model, 1, 24)) == AT_A_STEP
    image = 6 * models.macs_of(loaded.stage("trunk").model) * 16 / 1e18  # forward and twice backward, 2 FLOPs per MAC
    compute = compute_of(loaded)
    # Trunk, same, cool, apart, far and after; separate runs would not need the two trunks.
    assert compute.planned == pytest.approx((24 + 8 + 8 + 16 + 24 + 8) * image)
    assert compute.apart == pytest.approx((24 + 16 + 16 + 24) * image)


@pytest.mark.parametrize(("step", "was", "verdict"), [(8, 0.991, "inside"), (24, 0.5, "OUTSIDE")])
def test_the_evaluation_of_the_last_step_is_scored(step, was, verdict, tmp_path, shards):
    loaded = campaigns.load(recipe(tmp_path, shards), [])
    stage = loaded.stage("far.a")
    context = Context(loaded, stage, print, poll=lambda attempt, step: None, stop_requested=lambda: False)
    forecast = forecast_of(stage.config, context, step)
    # By hand: the law in `law`, after this number of samples.
    assert forecast.value == pytest.approx(1 - (0.001 + 0.009 * (16 * step / 100) ** -0.5), abs=2e-3)
    log: list[str] = []
    score = forecast.score(was, log.append)
    assert score["is_inside"] == (forecast.low <= was <= forecast.high)
    assert log[0].endswith(f"at step {step}, measured {was:.4f}: {verdict}")


def test_branch_inherits_the_excluded_steps_before_its_first_step(tmp_path, monkeypatch):
    trunk = tmp_path / "trunk"
    branch = tmp_path / "branch"
    branch.mkdir()
    for step in (8, 16):
        checkpoint = trunk / "checkpoints" / f"step-{step:010d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "MANIFEST.json").touch()
    artifacts.write_record(trunk / artifacts.EXCLUDED_STEPS, {"stretches": [[2, 4], [6, 9], [8, 10], [12, 14]]})
    linked = []
    monkeypatch.setattr("jobs.extras.studies.law.link_checkpoint", lambda source, *_: linked.append(source.name))
    context: Any = SimpleNamespace(
        campaign=SimpleNamespace(path_of=lambda link: str(trunk)),
        stage=SimpleNamespace(name="branch", key="k"),
        directory=branch,
        checkpoints=None,
    )
    cfg: Any = SimpleNamespace(init="@trunk")
    branch_off(cfg, 8, context)
    assert linked == ["step-0000000008"]
    assert artifacts.read_record(branch / artifacts.EXCLUDED_STEPS)["stretches"] == [[2, 4], [6, 9]]
    with pytest.raises(
        DataError, match=r"branch\.begin is 12, but .* has no commit of this step\n  expected one of 8, 16"
    ):
        branch_off(cfg, 12, context)
