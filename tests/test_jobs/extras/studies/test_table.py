"""The runs of a sweep: their keys, the chosen values, and the tables."""

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
from jobs.extras.studies.table import means_by_metric, waiting_for
from jobs.recipe import records
from jobs.recipe.references import with_values
from jobs.resolved_recipe import Available, CheckResult, Context, Stage
from jobs.run.log import log_table
from jobs.run.stage_run import run_stage
from pipeline import artifacts
from pipeline.evaluation.document import evaluation_record
from pipeline.evaluation.intervals import over_draws
from pipeline.extras.plan.cost import Assumptions
from tests.support.campaigns import load, with_methods
from tests.support.choosers import load_chooser
from tests.support.sweep_tables import finish, make_table

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
    """The protocol of table 4 in small: a grid of two on a held-out part, then two seeds with the best value."""
    path = tmp_path / "protocol.yaml"
    path.write_text(RECIPE.format(run=tmp_path / "run"))
    return path


def no_checks(stage: Stage, available: Available) -> Iterable[CheckResult]:
    return ()


def keys_of(recipe: Path, *overrides: str) -> dict[str, str]:
    return {stage.name: stage.key for stage in load(recipe, list(overrides)).stages}


def test_runs_without_metrics_have_a_table_of_their_axes_and_share_common_stages(protocol):
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
    document, log = make_table(loaded, "resize")
    assert document["chosen"] == {}
    assert list(document["rows"]) == ["image_size=16", "image_size=24"]
    assert log[0].strip() == "resize"
    assert log[-3].split() == ["parameters", "GMACs"]
    assert "diverged" not in "".join(log)
    assert artifacts.read_done(loaded.directory(loaded.stage("resize")))["summary"] == "2 runs in 2 rows"
    # Five more positions of width 32: from 2 × 2 and the class token to 3 × 3 and the class token.
    parameters = [document["axes"][row]["parameters"] for row in document["rows"]]
    assert parameters[1] - parameters[0] == 5 * 32
    with pytest.raises(ConfigError, match="does not report 'accuracy'"):
        load(protocol, [*overrides, "resize.sweep.held_out.image_size=16"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["finetune.sweep.best=accurracy"], "finetune.lr-0.01 does not report 'accurracy'; did you mean 'accuracy'?"),
        (["finetune.sweep.held_out.data.evaluate=null"], "finetune.grid: finetune.lr-0.01 does not report 'accuracy'"),
        (["finetune.stepz=3"], "unknown key finetune.stepz; did you mean 'steps'?"),
        (["finetune.sweep.grid.optim.lrr=[1]"], "unknown key finetune.optim.lrr; did you mean 'lr'?"),
        (["finetune.sweep.each={'a/b': null}"], "a stage is named 'finetune.a/b.lr-0.01'"),
        (
            ["fewshot.init=@finetune"],
            "the table of a sweep\n  expected one of the sweep's runs: @finetune.seed-0, @fin",
        ),
        (["finetune.sweep.grid={init: [x, y]}"], "finetune.seed-0: init is an input, but a grid with held_out"),
        (
            ["finetune.sweep.grid={data: {augment: [{min_area: 0.5}, {min_area: 0.7}]}}"],
            "finetune.sweep.grid.data.augment lists {'min_area': 0.5}, a section",
        ),
        (["fine={kind: finetune, sweep: {seeds: [0]}}", "fine.seed-0={}"], "seed-0"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_before_the_start(protocol, overrides, message):
    with pytest.raises(ConfigError) as error:
        load(protocol, overrides)
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------------ keys


def test_a_key_changes_only_with_the_dependencies_of_the_run(protocol):
    before = keys_of(protocol)
    assert len(set(before.values())) == len(before) == 7
    # One more value: existing runs keep their keys; every stage that depends on the choice changes.
    more = keys_of(protocol, "finetune.sweep.grid.optim.lr=[0.01,0.1,1]")
    same = {name for name in before if more[name] == before[name]}
    assert same == {"shards", "finetune.lr-0.01", "finetune.lr-0.1"}
    # One more seed: only the table of all runs changes.
    more = keys_of(protocol, "finetune.sweep.seeds=[0,1,2]")
    assert {name for name in before if more[name] != before[name]} == {"finetune"}
    # The held-out set affects the choice; the final evaluation set affects only the results of the last runs.
    more = keys_of(protocol, "finetune.sweep.held_out.data.evaluate=@shards/test")
    assert {name for name in before if more[name] == before[name]} == {"shards"}
    more = keys_of(protocol, "finetune.data.evaluate=@shards/rest")
    assert {name for name in before if more[name] != before[name]} == {"finetune.seed-0", "finetune.seed-1", "finetune"}
    more = keys_of(protocol, "finetune.micro_batch=16", "cluster.workers=2")
    assert more == before, "the way a run is computed must not change its key"


def test_the_final_runs_get_the_best_value_and_keep_their_keys(protocol):
    before = load(protocol, [])
    planned = "\n".join(plan(before, Assumptions(), print)["report"])
    assert planned.count("optim.lr: the best of 0.01, 0.1 by accuracy, known after finetune.grid") == 2
    assert "2 runs in 2 rows by accuracy: chooses the highest mean; if equal, the first in the recipe" in planned
    assert "lr: the best of 0.01, 0.1 by accuracy, known after" in recipe_text.resolved(before)
    facts = facts_of(before, before.stage("finetune.seed-0"))
    assert facts["config"]["optim"]["lr"].startswith("the best of"), "trackers must not get a placeholder as a value"

    finish(before, "finetune.lr-0.01", 0.25)
    finish(before, "finetune.lr-0.1", 0.75)
    document, log = make_table(before, "finetune.grid")
    assert document["chosen"] == {"optim.lr": 0.1}
    assert log[-2:] == ["optim.lr=0.01                 25.00", "optim.lr=0.1                  75.00   best"]

    after = load(protocol, [])
    assert [stage.key for stage in after.stages] == [stage.key for stage in before.stages]
    assert after.stage("finetune.seed-1").config.optim.lr == 0.1
    assert asdict(with_values(before).stage("finetune.seed-1").config) == asdict(
        after.stage("finetune.seed-1").config
    ), "the command that made the table uses the same values as a later command"
    planned = "\n".join(plan(after, Assumptions(), print)["report"])
    assert "optim.lr: 0.1, the best of 0.01, 0.1 by accuracy (finetune.grid)" in planned
    assert records.forbidden_fields(after.stage("finetune.seed-1"))["optim.lr"] == 0.1

    # If a new choice differs, runs with the old choice are not skipped silently.
    folder = finish(after, "finetune.seed-0", 0.5)
    table = before.directory(before.stage("finetune.grid")) / "sweep.json"
    artifacts.write_record(table, {**document, "chosen": {"optim.lr": 0.01}})
    with pytest.raises(DataError) as error:
        load(protocol, [])
    assert f"{folder} was run with values that finetune.grid no longer selects: optim.lr: 0.1 → 0.01" in str(
        error.value
    )


def test_a_choice_can_change_the_model(protocol):
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


def test_the_first_of_equal_rows_wins_and_a_diverged_row_is_excluded(protocol):
    loaded = load(protocol, ["finetune.sweep.grid.optim.lr=[0.1,0.01,3,1]"])
    finish(loaded, "finetune.lr-0.1", 0.0, diverged="5 steps in a row were not finite")
    for name, accuracy in (("finetune.lr-0.01", 0.5), ("finetune.lr-3", 0.75), ("finetune.lr-1", 0.75)):
        finish(loaded, name, accuracy)
    document, log = make_table(loaded, "finetune.grid")
    assert document["chosen"] == {"optim.lr": 3}
    assert document["runs"][0]["diverged"] == "5 steps in a row were not finite"
    assert [run["key"] for run in document["runs"]] == [stage.key for stage in loaded.stages[1:5]]
    assert log[0].startswith("finetune.grid: finetune.lr-0.1 has diverged: 5 steps")
    assert log[2].endswith("-   diverged")
    assert log[4].endswith("75.00   best")


def test_if_all_runs_diverged_nothing_is_chosen_and_a_mean_needs_all_runs(protocol):
    loaded = load(protocol, [])
    for name in ("finetune.lr-0.01", "finetune.lr-0.1", "finetune.seed-0"):
        finish(loaded, name, 0.0, diverged="not finite")
    finish(loaded, "finetune.seed-1", 0.5)
    with pytest.raises(Diverged) as error:
        make_table(loaded, "finetune.grid")
    names = "finetune.lr-0.01, finetune.lr-0.1"
    assert f"2 runs of the sweep have diverged: {names}, but at least one row must have no diverged run\n" in str(
        error.value
    )
    with pytest.raises(Diverged) as error:
        make_table(loaded, "finetune")
    assert "1 runs of the sweep have diverged: finetune.seed-0, but the table needs all runs" in str(error.value)
    assert f"remove {loaded.directory(loaded.stage('finetune.seed-0'))}/done.json" in str(error.value)


def test_a_table_uses_the_best_evaluation_of_each_run_if_configured(protocol):
    best = "finetune.sweep.evaluation=best"
    loaded = load(protocol, [best])
    for name, last, highest in (("finetune.lr-0.01", 0.5, 0.75), ("finetune.lr-0.1", 0.7, 0.7)):
        folder = finish(loaded, name, last)
        done = artifacts.read_record(folder / "done.json")
        done["best"] = {"accuracy": {"value": highest, "step": 8}, "5shot": {"value": 0.1, "step": 4}}
        artifacts.write_record(folder / "done.json", done)
    document, log = make_table(loaded, "finetune.grid")
    assert document["chosen"] == {"optim.lr": 0.01}
    assert document["evaluation"] == "best"
    assert document["runs"][0]["steps"] == {"accuracy": 8, "5shot": 4}
    assert log[0].startswith("finetune.grid, in %, best evaluation of each run (chosen on the evaluation set)")
    assert log[1].split()[:3] == ["optim.lr=0.01", "75.00", "10.00"]
    # With the last evaluations of the same runs: another table with another key.
    loaded = load(protocol, [])
    document, _ = make_table(loaded, "finetune.grid")
    assert document["chosen"] == {"optim.lr": 0.1}
    assert document["runs"][0]["steps"] == {}
    with pytest.raises(ConfigError) as error:
        load(protocol, ["finetune.sweep.evaluation=bset"])
    assert "evaluation" in str(error.value)
    assert "best" in str(error.value)
    with pytest.raises(ConfigError) as error:
        varies = "sweep: {each: {b: null}, best: top-1, evaluation: best}"
        load(protocol, ["e={kind: evaluate, init: x, sets: {a: {test: y}}, protocols: [top-1], " + varies + "}"])
    assert (
        "e: e.b is of kind evaluate, which is evaluated only once\n  sweep.evaluation=best needs runs that train"
        in str(error.value)
    )


def test_means_and_deviations_equal_those_of_numpy_over_rows_groups_and_seeds(tmp_path):
    """A benchmark on a small scale: three tasks in two groups, with three seeds."""
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
    document, log = make_table(loaded, "finetune")
    for row, task in enumerate(("cars", "dogs", "dots")):
        values = document["rows"][task]["accuracy"]
        assert values["mean"] == pytest.approx(accuracies[row].mean(), rel=1e-12)
        assert values["sd"] == pytest.approx(accuracies[row].std(ddof=1), rel=1e-12)
        assert values["runs"] == 3
    for group, rows in (("natural of 2", [0, 1]), ("structured of 1", [2]), ("mean of 3", [0, 1, 2])):
        repeats = accuracies[rows].mean(axis=0)
        values = document["means"][group]["accuracy"]
        assert values["mean"] == pytest.approx(repeats.mean(), rel=1e-12)
        assert values["sd"] == pytest.approx(repeats.std(ddof=1), rel=1e-12)
    mean = 100 * accuracies.mean()
    sd = 100 * accuracies.mean(axis=0).std(ddof=1)
    assert log[-1].split() == ["mean", "of", "3", f"{mean:.2f}", "±", f"{sd:.2f}"]
    assert (loaded.directory(loaded.stage("finetune")) / "report.txt").read_text().splitlines() == log


def test_a_metric_that_a_run_lacks_has_no_mean_over_the_others():
    means = means_by_metric([{"accuracy": 0.5, "5shot": 0.25}, {"accuracy": 0.75}, {"accuracy": 0.25, "5shot": 0.5}])
    assert list(means) == ["accuracy"]
    assert (means["accuracy"].mean, means["accuracy"].sd, means["accuracy"].runs) == (0.5, 0.25, 3)


def write_evaluation(
    folder: Path, right: np.ndarray, *, name: str = "accuracy", digest: str = "d" * 64, missing: int = 0
) -> None:
    """Write the evaluation.json of a run: correct predictions (N,), or (draws, N) with seeds from 2 on."""
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
        write_evaluation(folder, right[number])
    document, log = make_table(loaded, "finetune")
    entry = document["rows"]["finetune"]["accuracy"]
    of_runs = right.reshape(3, -1).mean(1)
    assert (entry["mean"], entry["sd"]) == pytest.approx((of_runs.mean(), of_runs.std(ddof=1)))
    low, high = over_draws(right)
    assert entry["interval"] == [low, high]
    assert low < of_runs.mean() < high
    cells = [f"[{100 * low:.2f},", f"{100 * high:.2f}]", "±", f"{100 * entry['sd']:.2f}"]
    assert log[0].split()[-5:] == ["accuracy", "95", "%", "±", "sd"]
    assert log[1].split()[1:] == [f"{100 * of_runs.mean():.2f}", *cells]
    assert all("entries" not in run and run["intervals"] for run in document["runs"])


@pytest.mark.parametrize("difference", ["no document", "another set", "an unreadable sample"])
def test_runs_evaluated_on_different_samples_have_no_common_interval(protocol, difference):
    loaded = load(protocol, [])
    right = np.random.default_rng(3).random((2, 50)) < 0.5
    write_evaluation(finish(loaded, "finetune.seed-0", 0.5), right[0])
    folder = finish(loaded, "finetune.seed-1", 0.5)
    if difference == "another set":
        write_evaluation(folder, right[1], digest="e" * 64)
    elif difference == "an unreadable sample":
        write_evaluation(folder, right[1], missing=1)
    document, log = make_table(loaded, "finetune")
    entry = document["rows"]["finetune"]["accuracy"]
    assert entry["interval"] is None
    assert entry["sd"] == 0.0
    assert "95 %" not in log[0]


def test_done_json_contains_the_digest_of_the_tables_record(protocol):
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
            write_evaluation(folder, right)
    document, log = make_table(loaded, "finetune.grid")
    wilson = binomtest(20, 40).proportion_ci(0.95, method="wilson")
    interval = [f"[{100 * wilson.low:.2f},", f"{100 * wilson.high:.2f}]"]
    assert log[1].split() == ["optim.lr=0.01", "50.00", *interval, "best"]
    assert log[2].split() == ["optim.lr=0.1", "12.50", "-"]
    assert document["rows"]["optim.lr=0.01"]["accuracy"]["interval"] == pytest.approx([wilson.low, wilson.high])


def test_a_single_draw_is_recognised_by_the_end_of_the_metrics_name_not_by_the_set(protocol):
    loaded = load(protocol, [])
    metrics = {"accuracy": 0.5, "seedlings top-1": 0.25, "seed-bank 5shot": 0.75, "seed-bank 5shot-seed-10": 0.125}
    shown = ["accuracy", "seedlings top-1", "seed-bank 5shot"]
    entry = {"top-1": {"value": 0.25, "low": 0.125, "high": 0.375, "samples": 8}}
    for name in ("finetune.lr-0.01", "finetune.lr-0.1"):
        folder = finish(loaded, name, 0.5, metrics=metrics)
        seedlings = {"name": "seedlings", "digest": "d" * 64, "samples": 8}
        results = [{"set": seedlings, "values": entry}, {"set": {"name": "rest"}, "values": {}}]
        (folder / "evaluation.json").write_text(json.dumps({"results": results}))
    document, log = make_table(loaded, "finetune.grid")
    assert list(document["rows"]["optim.lr=0.01"]) == list(document["runs"][0]["metrics"]) == shown
    assert "25.00   [12.50, 37.50]" in log[1]
    table: list[str] = []
    log_table([{"stage": "finetune", "seconds": 1.0, "skipped": False, "metrics": metrics}], table.append)
    assert "accuracy 50.0%  seedlings top-1 25.0%  seed-bank 5shot 75.0%" in table[1]
    line = status.stage_line(status.stage_status(folder, str(folder), has_ended=True))
    assert line.endswith("  accuracy 0.5000  seedlings top-1 0.2500  seed-bank 5shot 0.7500")
    record = evaluation_record(3, metrics, {})
    assert record["line"] == f"evaluate step 3  {line.partition('  ')[2]}"


def test_divergence_is_an_outcome_in_a_sweep_and_a_failure_elsewhere(protocol):
    loaded = load(protocol, ["plain={kind: finetune, init: '@finetune.seed-0', data: {train: '@shards/train'}}"])
    log: list[str] = []

    def end_as(name: str, failure: StageFailed) -> dict[str, Any]:
        """Run a stage that fails in this way, as if the sets of the recipe were packed."""

        def fail(cfg: Any, context: Context) -> dict[str, Any]:
            raise failure

        stage = loaded.stage(name)
        kind = with_methods(stage.kind, run=fail, checks=no_checks)
        stage = replace(stage, kind=kind, parents={}, reads={})
        context = Context(loaded, stage, log.append, poll=lambda attempt, step: None, stop_requested=lambda: False)
        return run_stage(context, fresh=False)

    diverged = StageFailed("finetune.lr-0.1: 5 steps in a row were not finite", 70, "Diverged")
    assert end_as("finetune.lr-0.1", diverged)["diverged"] == "5 steps in a row were not finite"
    assert log[-1] == "finetune.lr-0.1: 5 steps in a row were not finite\n  the sweep continues without this run"
    with pytest.raises(StageFailed, match="5 steps"):
        end_as("plain", diverged)
    with pytest.raises(StageFailed, match="bug"):
        end_as("finetune.lr-0.01", StageFailed("finetune.lr-0.01: bug", 70, "ValueError"))


# --------------------------------------------------------------------------------------------- complete runs


@pytest.mark.slow  # seven stages, most of them twice
def test_a_killed_sweep_resumes_and_ends_like_an_undisturbed_one(protocol, tmp_path, capsys):
    assert main(["run", str(protocol), f"run={tmp_path}/undisturbed"]) == 0
    command = [sys.executable, "-m", "jobs", "run", str(protocol)]
    loaded = load(protocol, [])
    # Kill it as soon as the second run of the grid, and then the second seed, have committed a checkpoint.
    for name in ("finetune.lr-0.1", "finetune.seed-1"):
        folder = loaded.directory(loaded.stage(name))
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
        while not list(folder.glob("checkpoints/step-*")):
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    capsys.readouterr()
    assert main(["run", str(protocol)]) == 0
    out = capsys.readouterr().out
    assert "finetune.grid: skipped" in out
    assert "finetune.seed-0: skipped" in out
    assert "finetune.lr-0.1: skipped" in out
    for name in ("finetune.grid", "finetune"):
        folder = loaded.directory(loaded.stage(name)).name
        documents = [json.loads((tmp_path / run / folder / "sweep.json").read_text()) for run in ("run", "undisturbed")]
        assert documents[0] == documents[1]
    assert main(["status", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out
    chosen = documents[0]["runs"][0]["values"]["optim.lr"]
    assert lines.count(f"(optim.lr={chosen})") == 3
    assert "finetune.lr-0.01-" in lines


@pytest.mark.slow  # ten stages on 12,000 images
@pytest.mark.skipif(not IMAGES.is_dir(), reason="the images are not available")
def test_cifar10_goes_from_tars_to_one_table_with_intervals(tmp_path, capsys):
    """Train the real recipe for a few steps; compare the intervals with scipy's."""
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
    assert "evaluate, in %" in out
    assert "finetune, in %" in out


def test_a_stage_waits_for_the_stage_that_determines_its_value(tmp_path):
    loaded = load_chooser(tmp_path)
    assert waiting_for(loaded, loaded.stage("chooser")) == [loaded.stage("user")]
