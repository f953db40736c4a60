"""The runs of a sweep: their keys, which values are chosen, and what the tables say."""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from data.errors import ConfigError, DataError, Diverged
from jobs.__main__ import main
from jobs.cluster.failure import StageFailed
from jobs.commands import status
from jobs.extras import recipe_text
from jobs.extras.monitor.trackers import facts_of
from jobs.extras.planning.plan import plan
from jobs.recipe import records
from jobs.recipe.references import with_values
from jobs.resolved_recipe import Available, Campaign, CheckResult, Context, Stage
from jobs.run.log import log_table
from jobs.run.stage_run import run_stage
from pipeline import artifacts
from pipeline.evaluation.document import evaluation_record
from pipeline.evaluation.intervals import over_draws
from pipeline.extras.plan.cost import Assumptions
from tests.support.campaigns import load, with_methods

ROOT = Path(__file__).parents[4]
IMAGES = ROOT.parent / "shared" / "images"

RECIPE = """
run: {run}
cluster: {{workers: 1, backend: processes, backoff_s: 0}}
shards:
  kind: pack
  sets:
    train: {{source: digits, image_size: 16}}
    test: {{source: digits, split: test, image_size: 16}}
    most: {{source: digits, keep: [0, 1, 2, 3, 4, 5, 6, 7], image_size: 16}}
    rest: {{source: digits, split: test, keep: [0, 1, 2, 3, 4, 5, 6, 7], image_size: 15}}
finetune:
  model: {{name: mu/8, image_size: 16, classes: 10}}
  data: {{train: "@shards/train", evaluate: "@shards/test", augment: {{min_area: 0.7, flip: false}}}}
  optim: {{schedule: {{warmup_steps: 2}}}}
  steps: 12
  batch_size: 32
  micro_batch: 32
  precision: fp32
  save_every: 4
  log_every: 4
  sweep:
    grid: {{optim: {{lr: [0.01, 0.1]}}}}
    held_out: {{data: {{train: "@shards/most", evaluate: "@shards/rest"}}}}
    seeds: [0, 1]
"""


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    """Table 4's protocol in small: a grid of two on a held-out part, then two seeds with the best."""
    path = tmp_path / "protocol.yaml"
    path.write_text(RECIPE.format(run=tmp_path / "run"))
    return path


def no_checks(stage: Stage, available: Available) -> Iterable[CheckResult]:
    return ()


def keys_of(recipe: Path, *overrides: str) -> dict[str, str]:
    return {stage.name: stage.key for stage in load(recipe, list(overrides)).stages}


def test_runs_that_measure_nothing_have_a_table_of_their_axes_and_what_they_share_is_one_stage(protocol):
    sweep_of_resize = "{image_size: [16, 24]}"
    chain = "pretrain={model: {name: mu/8, image_size: 16, classes: 10}, data: {train: '@shards/train'}, steps: 4, "
    chain += "optim: {schedule: {warmup_steps: 1}}}"
    overrides = [chain, f"resize={{init: '@pretrain', sweep: {{grid: {sweep_of_resize}}}}}"]
    tuned = "tuned={kind: finetune, init: '@resize.*', steps: 1, data: {train: '@shards/train'}, seed: 3, "
    overrides.append(tuned + "optim: {schedule: {warmup_steps: 0}}, sweep: {each: {a: {}, b: {polyak: 0.5}}}}")
    loaded = load(protocol, overrides)
    assert sum(stage.name == "pretrain" for stage in loaded.stages) == 1
    assert loaded.stage("tuned.image_size-24.b").model.image_size == (24, 24)
    for size in (16, 24):
        finish(loaded, f"resize.image_size-{size}", 0.0, kept=1)
    document, said = make_table(loaded, "resize")
    assert document["chosen"] == {} and list(document["rows"]) == ["image_size=16", "image_size=24"]
    assert said[0].strip() == "resize" and said[-3].split() == ["parameters", "GMACs"]
    assert "diverged" not in "".join(said)
    assert artifacts.read_done(loaded.directory(loaded.stage("resize")))["summary"] == "2 runs in 2 rows"
    # Five more positions of width 32: 2 × 2 and the class token became 3 × 3.
    parameters = [document["axes"][row]["parameters"] for row in document["rows"]]
    assert parameters[1] - parameters[0] == 5 * 32
    with pytest.raises(ConfigError, match="will have no 'accuracy'"):
        load(protocol, [*overrides, "resize.sweep.held_out.image_size=16"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["finetune.sweep.best=accurracy"], "finetune.lr-0.01 will have no 'accurracy'; did you mean 'accuracy'?"),
        (["finetune.sweep.held_out.data.evaluate=null"], "finetune.grid: finetune.lr-0.01 will have no 'accuracy'"),
        (["finetune.stepz=3"], "unknown key finetune.stepz; did you mean 'steps'?"),
        (["finetune.sweep.grid.optim.lrr=[1]"], "unknown key finetune.optim.lrr; did you mean 'lr'?"),
        (["finetune.sweep.each={'a/b': null}"], "a stage is called 'finetune.a/b.lr-0.01'"),
        (
            ["fewshot.init=@finetune"],
            "that is the table of a sweep\n  expected one of its runs: @finetune.seed-0, @fin",
        ),
        (["finetune.sweep.grid={init: [x, y]}"], "finetune.seed-0: init names an input, which a grid with held_out"),
        (
            ["finetune.sweep.grid={data: {augment: [{min_area: 0.5}, {min_area: 0.7}]}}"],
            "finetune.sweep.grid.data.augment lists {'min_area': 0.5}, a section",
        ),
        (["fine={kind: finetune, sweep: {seeds: [0]}}", "fine.seed-0={}"], "seed-0"),
    ],
)
def test_a_recipe_whose_sweep_could_not_run_is_refused_before_anything_starts(protocol, overrides, message):
    with pytest.raises(ConfigError) as error:
        load(protocol, overrides)
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------------ keys


def test_a_key_changes_with_what_the_run_depends_on_and_with_nothing_else(protocol):
    before = keys_of(protocol)
    assert len(set(before.values())) == len(before) == 7
    # One more value: the runs that were there stay, and whatever depends on the choice is another stage.
    more = keys_of(protocol, "finetune.sweep.grid.optim.lr=[0.01,0.1,1]")
    same = {name for name in before if more[name] == before[name]}
    assert same == {"shards", "finetune.lr-0.01", "finetune.lr-0.1"}
    # One more seed: only the table of all is another one.
    more = keys_of(protocol, "finetune.sweep.seeds=[0,1,2]")
    assert {name for name in before if more[name] != before[name]} == {"finetune"}
    # What the grid is judged on decides the choice, and what the last runs are judged on is in their numbers.
    more = keys_of(protocol, "finetune.sweep.held_out.data.evaluate=@shards/test")
    assert {name for name in before if more[name] == before[name]} == {"shards"}
    more = keys_of(protocol, "finetune.data.evaluate=@shards/rest")
    assert {name for name in before if more[name] != before[name]} == {"finetune.seed-0", "finetune.seed-1", "finetune"}
    more = keys_of(protocol, "finetune.micro_batch=16", "cluster.workers=2")
    assert more == before, "how a run is computed is no part of its key"


def finish(loaded: Campaign, name: str, accuracy: float, **outcome: Any) -> Path:
    """Leave behind what a finished run would."""
    stage = loaded.stage(name)
    folder = loaded.directory(stage)
    folder.mkdir(parents=True)
    artifacts.write_record(folder / "stage.json", records.stage_record(stage))
    metrics = {} if outcome else {"accuracy": accuracy}
    artifacts.write_record(folder / "done.json", {"key": stage.key, "seconds": 1.0, "metrics": metrics, **outcome})
    return folder


def make_table(loaded: Campaign, name: str) -> tuple[dict[str, Any], list[str]]:
    """Run the stage of a table, and return its record and the lines that it says."""
    said: list[str] = []
    stage = loaded.stage(name)
    folder = loaded.directory(stage)
    folder.mkdir(parents=True, exist_ok=True)
    artifacts.write_record(folder / "stage.json", records.stage_record(stage))
    context = Context(loaded, stage, said.append, poll=lambda attempt, step: None, stop_requested=lambda: False)
    outcome = stage.kind.run(stage.config, context)
    artifacts.write_record(folder / "done.json", {"key": stage.key, "seconds": 0.0, **outcome})
    return artifacts.read_record(folder / "sweep.json"), said


def test_the_last_runs_get_the_value_that_did_best_and_keep_their_keys(protocol, capsys):
    before = load(protocol, [])
    plan(before, Assumptions(), print)
    planned = capsys.readouterr().out
    assert planned.count("optim.lr: the best of 0.01, 0.1 by accuracy, known after finetune.grid") == 2
    assert "2 runs in 2 rows by accuracy: chooses the highest mean; of equal ones the first in the recipe" in planned
    assert "lr: the best of 0.01, 0.1 by accuracy, known after" in recipe_text.resolved(before)
    facts = facts_of(before, before.stage("finetune.seed-0"))
    assert facts["config"]["optim"]["lr"].startswith("the best of"), "no tracker is told a value that was not chosen"

    finish(before, "finetune.lr-0.01", 0.25)
    finish(before, "finetune.lr-0.1", 0.75)
    document, said = make_table(before, "finetune.grid")
    assert document["chosen"] == {"optim.lr": 0.1}
    assert said[-2:] == ["optim.lr=0.01                 25.00", "optim.lr=0.1                  75.00   the best"]

    after = load(protocol, [])
    assert [stage.key for stage in after.stages] == [stage.key for stage in before.stages]
    assert after.stage("finetune.seed-1").config.optim.lr == 0.1
    assert asdict(with_values(before).stage("finetune.seed-1").config) == asdict(
        after.stage("finetune.seed-1").config
    ), "the command that made the table goes on with what a later one reads"
    plan(after, Assumptions(), print)
    assert "optim.lr: 0.1, the best of 0.01, 0.1 by accuracy (finetune.grid)" in capsys.readouterr().out
    assert records.forbidden_fields(after.stage("finetune.seed-1"))["optim.lr"] == 0.1

    # A choice that is made anew and otherwise does not pass over what was run with the old one.
    folder = finish(after, "finetune.seed-0", 0.5)
    table = before.directory(before.stage("finetune.grid")) / "sweep.json"
    artifacts.write_record(table, {**document, "chosen": {"optim.lr": 0.01}})
    with pytest.raises(DataError) as error:
        load(protocol, [])
    assert (
        f"{folder} ran with values that differ from the current choice of finetune.grid: optim.lr: 0.1 → 0.01"
        in str(error.value)
    )


def test_a_choice_may_be_of_the_model(protocol):
    protocol.write_text(protocol.read_text().replace("optim: {lr: [0.01, 0.1]}", "model: {depth: [1, 2]}"))
    overrides = ["finetune.optim.lr=0.1"]
    overrides.append("next={kind: finetune, init: '@finetune.seed-0', steps: 9, data: {train: '@shards/train'}}")
    overrides.append("next.optim.schedule.warmup_steps=1")
    before = load(protocol, overrides)
    assert before.stage("next").model.depth == 1
    finish(before, "finetune.depth-1", 0.25)
    finish(before, "finetune.depth-2", 0.75)
    make_table(before, "finetune.grid")
    after = with_values(before)
    assert after.stage("finetune.seed-0").model.depth == after.stage("next").model.depth == 2
    assert [stage.key for stage in after.stages] == [stage.key for stage in before.stages]


# ------------------------------------------------------------------------------------------------ tables


def test_of_equal_rows_the_first_wins_and_one_that_diverged_does_not_take_part(protocol):
    loaded = load(protocol, ["finetune.sweep.grid.optim.lr=[0.1,0.01,3,1]"])
    finish(loaded, "finetune.lr-0.1", 0.0, diverged="5 steps in a row were not finite")
    for name, accuracy in (("finetune.lr-0.01", 0.5), ("finetune.lr-3", 0.75), ("finetune.lr-1", 0.75)):
        finish(loaded, name, accuracy)
    document, said = make_table(loaded, "finetune.grid")
    assert document["chosen"] == {"optim.lr": 3}
    assert document["runs"][0]["diverged"] == "5 steps in a row were not finite"
    assert [run["key"] for run in document["runs"]] == [stage.key for stage in loaded.stages[1:5]]
    assert said[0].startswith("finetune.grid: finetune.lr-0.1 has diverged: 5 steps")
    assert said[2].endswith("-   diverged") and said[4].endswith("75.00   the best")


def test_where_all_have_diverged_nothing_is_chosen_and_a_mean_needs_all_its_runs(protocol):
    loaded = load(protocol, [])
    for name in ("finetune.lr-0.01", "finetune.lr-0.1", "finetune.seed-0"):
        finish(loaded, name, 0.0, diverged="not finite")
    finish(loaded, "finetune.seed-1", 0.5)
    with pytest.raises(Diverged) as error:
        make_table(loaded, "finetune.grid")
    names = "finetune.lr-0.01, finetune.lr-0.1"
    assert f"2 runs of the sweep have diverged: {names}\n  expected one that has not" in str(error.value)
    with pytest.raises(Diverged) as error:
        make_table(loaded, "finetune")
    assert "1 runs of the sweep have diverged: finetune.seed-0\n  expected all of them" in str(error.value)
    assert f"remove {loaded.directory(loaded.stage('finetune.seed-0'))}/done.json" in str(error.value)


def test_a_table_takes_the_best_evaluation_of_each_run_where_it_is_asked_to(protocol):
    best = "finetune.sweep.evaluation=best"
    loaded = load(protocol, [best])
    for name, last, highest in (("finetune.lr-0.01", 0.5, 0.75), ("finetune.lr-0.1", 0.7, 0.7)):
        folder = finish(loaded, name, last)
        done = artifacts.read_record(folder / "done.json")
        done["best"] = {"accuracy": {"value": highest, "step": 8}, "5shot": {"value": 0.1, "step": 4}}
        artifacts.write_record(folder / "done.json", done)
    document, said = make_table(loaded, "finetune.grid")
    assert document["chosen"] == {"optim.lr": 0.01}
    assert document["evaluation"] == "best" and document["runs"][0]["steps"] == {"accuracy": 8, "5shot": 4}
    assert said[0].startswith("finetune.grid, in %, the best evaluation of each run, chosen by what it is judged on")
    assert said[1].split()[:3] == ["optim.lr=0.01", "75.00", "10.00"]
    # The same runs by their last evaluations: another table, of another key.
    loaded = load(protocol, [])
    document, _ = make_table(loaded, "finetune.grid")
    assert document["chosen"] == {"optim.lr": 0.1} and document["runs"][0]["steps"] == {}
    with pytest.raises(ConfigError) as error:
        load(protocol, ["finetune.sweep.evaluation=bset"])
    assert "evaluation" in str(error.value) and "best" in str(error.value)
    with pytest.raises(ConfigError) as error:
        varies = "sweep: {each: {b: null}, best: top-1, evaluation: best}"
        load(protocol, ["e={kind: evaluate, init: x, sets: {a: {test: y}}, protocols: [top-1], " + varies + "}"])
    assert "e: e.b is of kind evaluate, which is evaluated once\n  expected runs that train" in str(error.value)


def test_means_and_deviations_are_those_of_numpy_over_rows_groups_and_seeds(tmp_path):
    """Nineteen tasks in small: three in two groups, and three seeds."""
    recipe = tmp_path / "tasks.yaml"
    recipe.write_text(
        f"run: {tmp_path}/run\n"
        "finetune:\n"
        "  model: {name: mu/8, image_size: 16, classes: 10}\n"
        "  data: {evaluate: y}\n"
        "  sweep:\n"
        "    each: {cars: {data: {train: a}}, dogs: {data: {train: b}}, dots: {data.train: c, steps: 600}}\n"
        "    groups: {natural: [cars, dogs], structured: [dots]}\n"
        "    seeds: [0, 1, 2]\n"
    )
    loaded = load(recipe, [])
    assert loaded.stage("finetune.dots.seed-2").config.steps == 600
    accuracies = np.random.default_rng(0).random((3, 3))  # task, seed
    for row, task in enumerate(("cars", "dogs", "dots")):
        for seed in range(3):
            finish(loaded, f"finetune.{task}.seed-{seed}", accuracies[row, seed])
    document, said = make_table(loaded, "finetune")
    for row, task in enumerate(("cars", "dogs", "dots")):
        values = document["rows"][task]["accuracy"]
        assert values["mean"] == pytest.approx(accuracies[row].mean(), rel=1e-12)
        assert values["sd"] == pytest.approx(accuracies[row].std(ddof=1), rel=1e-12) and values["runs"] == 3
    for group, rows in (("natural of 2", [0, 1]), ("structured of 1", [2]), ("mean of 3", [0, 1, 2])):
        repeats = accuracies[rows].mean(axis=0)
        values = document["means"][group]["accuracy"]
        assert values["mean"] == pytest.approx(repeats.mean(), rel=1e-12)
        assert values["sd"] == pytest.approx(repeats.std(ddof=1), rel=1e-12)
    mean = 100 * accuracies.mean()
    sd = 100 * accuracies.mean(axis=0).std(ddof=1)
    assert said[-1].split() == ["mean", "of", "3", f"{mean:.2f}", "±", f"{sd:.2f}"]
    assert (loaded.directory(loaded.stage("finetune")) / "report.txt").read_text().splitlines() == said


def evaluated(
    folder: Path, right: np.ndarray, *, name: str = "accuracy", digest: str = "d" * 64, missing: int = 0
) -> None:
    """Leave behind the document of an evaluation with what was right: (N,), or (draws, N) of seeds from 2 on."""
    samples = right.shape[-1]
    low, high = over_draws(right)
    entry = {"value": right.mean(), "low": low, "high": high, "samples": samples}
    entry["right"] = base64.b64encode(np.packbits(right).tobytes()).decode()
    if right.ndim == 2:
        entry["seeds"] = {str(seed + 2): share for seed, share in enumerate(right.mean(1).tolist())}
    result = {"set": {"name": "test", "digest": digest, "samples": samples + missing}, "values": {"accuracy": entry}}
    (folder / "evaluation.json").write_text(json.dumps({"results": [result]}))


@pytest.mark.parametrize("draws", [None, 3])
def test_a_row_of_several_evaluated_runs_has_an_interval_over_runs_draws_and_samples(protocol, draws):
    loaded = load(protocol, ["finetune.sweep.seeds=[4,7,9]"])
    shape = (3, 90) if draws is None else (3, draws, 90)
    right = np.random.default_rng(12).random(shape) < 0.8
    for number, seed in enumerate((4, 7, 9)):
        folder = finish(loaded, f"finetune.seed-{seed}", float(right[number].mean()))
        evaluated(folder, right[number])
    document, said = make_table(loaded, "finetune")
    entry = document["rows"]["finetune"]["accuracy"]
    of_runs = right.reshape(3, -1).mean(1)
    assert (entry["mean"], entry["sd"]) == pytest.approx((of_runs.mean(), of_runs.std(ddof=1)))
    low, high = over_draws(right)
    assert entry["interval"] == [low, high] and low < of_runs.mean() < high
    cells = [f"[{100 * low:.2f},", f"{100 * high:.2f}]", "±", f"{100 * entry['sd']:.2f}"]
    assert said[0].split()[-5:] == ["accuracy", "95", "%", "±", "sd"]
    assert said[1].split()[1:] == [f"{100 * of_runs.mean():.2f}", *cells]
    assert all("entries" not in run and run["intervals"] for run in document["runs"])


@pytest.mark.parametrize("difference", ["no document", "another set", "an unreadable sample"])
def test_runs_of_other_samples_have_no_common_interval(protocol, difference):
    loaded = load(protocol, [])
    right = np.random.default_rng(3).random((2, 50)) < 0.5
    evaluated(finish(loaded, "finetune.seed-0", 0.5), right[0])
    folder = finish(loaded, "finetune.seed-1", 0.5)
    if difference == "another set":
        evaluated(folder, right[1], digest="e" * 64)
    elif difference == "an unreadable sample":
        evaluated(folder, right[1], missing=1)
    document, said = make_table(loaded, "finetune")
    entry = document["rows"]["finetune"]["accuracy"]
    assert entry["interval"] is None and entry["sd"] == 0.0 and "95 %" not in said[0]


def test_the_table_hands_on_its_record_with_its_digest(protocol):
    loaded = load(protocol, [])
    for name, accuracy in (("finetune.lr-0.01", 0.5), ("finetune.lr-0.1", 0.125)):
        finish(loaded, name, accuracy)
    make_table(loaded, "finetune.grid")
    folder = loaded.directory(loaded.stage("finetune.grid"))
    content = (folder / "sweep.json").read_bytes()
    done = artifacts.read_done(folder)
    assert done["files"] == {"sweep.json": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    assert done["summary"] == "optim.lr=0.01: accuracy 50.00, the best of 2"


def test_a_single_evaluated_run_has_the_interval_of_its_evaluation(protocol):
    loaded = load(protocol, [])
    right = np.arange(40) < 20
    for name, accuracy in (("finetune.lr-0.01", 0.5), ("finetune.lr-0.1", 0.125)):
        folder = finish(loaded, name, accuracy)
        if accuracy == 0.5:
            evaluated(folder, right)
    document, said = make_table(loaded, "finetune.grid")
    wilson = binomtest(20, 40).proportion_ci(0.95, method="wilson")
    interval = [f"[{100 * wilson.low:.2f},", f"{100 * wilson.high:.2f}]"]
    assert said[1].split() == ["optim.lr=0.01", "50.00", *interval, "the", "best"]
    assert said[2].split() == ["optim.lr=0.1", "12.50", "-"]
    assert document["rows"]["optim.lr=0.01"]["accuracy"]["interval"] == pytest.approx([wilson.low, wilson.high])


def test_a_value_of_one_seed_is_told_by_the_end_of_its_name_and_not_by_that_of_a_set(protocol):
    loaded = load(protocol, [])
    metrics = {"accuracy": 0.5, "seedlings top-1": 0.25, "seed-bank 5shot": 0.75, "seed-bank 5shot-seed-10": 0.125}
    shown = ["accuracy", "seedlings top-1", "seed-bank 5shot"]
    entry = {"top-1": {"value": 0.25, "low": 0.125, "high": 0.375, "samples": 8}}
    for name in ("finetune.lr-0.01", "finetune.lr-0.1"):
        folder = finish(loaded, name, 0.5, metrics=metrics)
        seedlings = {"name": "seedlings", "digest": "d" * 64, "samples": 8}
        results = [{"set": seedlings, "values": entry}, {"set": {"name": "rest"}, "values": {}}]
        (folder / "evaluation.json").write_text(json.dumps({"results": results}))
    document, said = make_table(loaded, "finetune.grid")
    assert list(document["rows"]["optim.lr=0.01"]) == list(document["runs"][0]["metrics"]) == shown
    assert "25.00   [12.50, 37.50]" in said[1]
    table: list[str] = []
    log_table([{"stage": "finetune", "seconds": 1.0, "skipped": False, "metrics": metrics}], table.append)
    assert "accuracy 50.0%  seedlings top-1 25.0%  seed-bank 5shot 75.0%" in table[1]
    line = status.stage_line(folder, has_ended=True)
    assert line.endswith("  accuracy 0.5000  seedlings top-1 0.2500  seed-bank 5shot 0.7500")
    record = evaluation_record(3, metrics, {})
    assert record["line"] == f"evaluate step 3  {line.partition('  ')[2]}"


def test_a_run_that_diverges_is_an_outcome_of_its_sweep_and_a_failure_anywhere_else(protocol):
    loaded = load(protocol, ["plain={kind: finetune, init: '@finetune.seed-0', data: {train: '@shards/train'}}"])
    said: list[str] = []

    def end_as(name: str, failure: StageFailed) -> dict[str, Any]:
        """Run a stage whose work ends so, with the sets of the recipe packed."""

        def fail(cfg: Any, context: Context) -> dict[str, Any]:
            raise failure

        stage = loaded.stage(name)
        kind = with_methods(stage.kind, run=fail, checks=no_checks)
        stage = replace(stage, kind=kind, parents={})
        context = Context(loaded, stage, said.append, poll=lambda attempt, step: None, stop_requested=lambda: False)
        return run_stage(context, fresh=False)

    diverged = StageFailed("finetune.lr-0.1: 5 steps in a row were not finite", 70, "Diverged")
    assert end_as("finetune.lr-0.1", diverged)["diverged"] == "5 steps in a row were not finite"
    assert said[-1] == "finetune.lr-0.1: 5 steps in a row were not finite\n  the sweep continues without this run"
    with pytest.raises(StageFailed, match="5 steps"):
        end_as("plain", diverged)
    with pytest.raises(StageFailed, match="bug"):
        end_as("finetune.lr-0.01", StageFailed("finetune.lr-0.01: bug", 70, "ValueError"))


# --------------------------------------------------------------------------------------------- for real


@pytest.mark.slow  # seven stages, most of them twice
def test_a_sweep_that_was_killed_goes_on_and_ends_as_one_that_was_not(protocol, tmp_path, capsys):
    assert main(["run", str(protocol), f"run={tmp_path}/undisturbed"]) == 0
    command = [sys.executable, "-m", "jobs", "run", str(protocol)]
    loaded = load(protocol, [])
    # Killed as soon as the second run of the grid, and then the second seed, have committed a checkpoint.
    for name in ("finetune.lr-0.1", "finetune.seed-1"):
        folder = loaded.directory(loaded.stage(name))
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
        while not list(folder.glob("checkpoints/step-*")):
            assert process.poll() is None, "the run has ended before it could be killed"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    capsys.readouterr()
    assert main(["run", str(protocol)]) == 0
    out = capsys.readouterr().out
    assert "finetune.grid: skipped" in out and "finetune.seed-0: skipped" in out and "finetune.lr-0.1: skipped" in out
    for name in ("finetune.grid", "finetune"):
        folder = loaded.directory(loaded.stage(name)).name
        documents = [json.loads((tmp_path / run / folder / "sweep.json").read_text()) for run in ("run", "undisturbed")]
        assert documents[0] == documents[1]
    assert main(["status", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out
    chosen = documents[0]["runs"][0]["values"]["optim.lr"]
    assert lines.count(f"(optim.lr={chosen})") == 3 and "finetune.lr-0.01-" in lines


@pytest.mark.slow  # ten stages on 12,000 images
@pytest.mark.skipif(not IMAGES.is_dir(), reason="the images are not here")
def test_cifar10_goes_from_tars_to_one_table_with_intervals(tmp_path, capsys):
    """The recipe itself, trained for a few steps; the intervals are compared with scipy's."""
    overrides = [
        f"shards.sets.train.path={IMAGES}/cifar10-train-*.tar",
        f"shards.sets.test.path={IMAGES}/cifar10-test-*.tar",
        f"run={tmp_path}/run",
        *("cluster.backend=processes", "pretrain.passes=null", "pretrain.steps=8", "finetune.steps=4"),
        *("pretrain.optim.schedule.warmup_steps=2", "finetune.optim.schedule.warmup_steps=1"),
    ]
    assert main(["run", "cifar10", *overrides]) == 0
    loaded = load(ROOT / "jobs" / "recipes" / "cifar10.yaml", overrides)
    table = artifacts.read_record(loaded.directory(loaded.stage("evaluate")) / "sweep.json")
    assert list(table["rows"]) == ["pretrained", "finetuned"]
    for row in table["rows"].values():
        assert set(row) == {"top-1", "5shot", "25shot", "knn-20", "linear"}
        for metric in ("top-1", "knn-20", "linear"):
            right = round(row[metric]["mean"] * 2_000)
            wilson = binomtest(right, 2_000).proportion_ci(0.95, method="wilson")
            assert row[metric]["interval"] == pytest.approx([wilson.low, wilson.high], abs=1e-9)
    parts = loaded.stage("parts")
    sizes = {name: record["samples"] for name, record in (loaded.done(parts) or {})["sets"].items()}
    assert sizes == {"most": 9_000, "held-out": 1_000}
    out = capsys.readouterr().out
    assert "evaluate, in %" in out and "finetune, in %" in out
