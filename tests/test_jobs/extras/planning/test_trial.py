"""Trials of a tiny campaign on real workers, what `plan` makes of them, and what is refused."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.files import import_path, write_whole
from data.remote import urls
from jobs.__main__ import main
from jobs.extras.planning.trial import trial_key
from pipeline.extras.plan.trial import Trial, read_trials, write_trial
from tests.support.campaigns import load
from tests.support.stores import store

ROOT = Path(__file__).parents[4]


def key_in(recipe: Path, name: str, *overrides: str) -> str:
    loaded = load(recipe, list(overrides))
    return trial_key(loaded, loaded.stage(name))


def lines_of(said: str, start: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("backend", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_trial_takes_real_steps_and_leaves_nothing_but_what_it_measured(backend, recipe, tmp_path, capsys):
    began = time.time()
    assert main(["trial", str(recipe), f"cluster.backend={backend}", "--stage", "pretrain"]) == 0
    took_s = time.time() - began
    said = capsys.readouterr().out
    assert "pretrain   30 steps of 16 images on 2 workers, 5 of them to warm up" in said
    assert "pretrain   step 30 of 30" in said

    (trial,) = read_trials(tmp_path / "run", key_in(recipe, "pretrain"))
    assert (trial.stage, trial.world, trial.backend, trial.steps) == ("pretrain", 2, backend, 25)
    parts = trial.compute_s + trial.storage_s + trial.decode_s + trial.transfer_s
    assert trial.step_s == pytest.approx(parts) and trial.images_per_s == pytest.approx(16 / trial.step_s)
    # 25 steps, a save and a start are a part of the command.
    assert 0 < 25 * trial.step_s + trial.until_steady_s < took_s
    assert 0 < trial.save_stall_s <= trial.save_s < took_s
    assert 0.05 < trial.memory_gib < 8, "Python and torch"
    assert trial.hardware != "cpu" and trial.date.startswith("20")
    left = [path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert left == [f"trials/{trial.key[:8]}-2.json"], "checkpoints, weights and logs went with their folder"

    # The other stage, whose weights are not there yet, takes its steps from random ones.
    if backend == "processes":
        assert main(["trial", str(recipe)]) == 0
        assert read_trials(tmp_path / "run", key_in(recipe, "finetune"))
    assert main(["plan", str(recipe), f"cluster.backend={backend}", "--price", "2.5"]) == 0
    said = capsys.readouterr().out.partition("fits ")
    said = "".join(said[1:])
    assert re.match(r"fits    .*\ntime    \d+s for .*\ncost    [\d.]+ worker-hours, [\d.]+ at 2.5 each\n", said)
    assert re.search(r"  time    [\d.]+ m?s a step on 2 workers: compute .*images/s \(measured 20", said)


@pytest.mark.slow
def test_a_trial_of_a_run_in_a_bucket_saves_there_and_keeps_its_document_there_alone(recipe, tmp_path, capsys):
    with store("s3", {}):
        words = [str(recipe), "run=s3://images/runs/tried", f"cluster.scratch={tmp_path / 'scratch'}"]
        try:
            assert main(["trial", *words, "--stage", "pretrain"]) == 0
            assert "a save holds up" in capsys.readouterr().out
            kept = load(recipe, words[1:]).storage.list()
            assert [name.partition("-")[2] for name in kept] == ["2.json"], kept
            # Another machine, with a disk of its own, goes by it.
            assert main(["plan", *words[:2], f"cluster.scratch={tmp_path / 'other'}"]) == 0
            assert "images/s (measured 20" in capsys.readouterr().out
        finally:
            urls.forget_credentials()


@pytest.fixture
def tried(recipe, tmp_path) -> Trial:
    """A trial of both stages on 2 workers, by hand: 100 ms a step of 16 images, of which 80 ms are computing."""
    values = {"backend": "processes", "gpus_per_worker": 0, "cpus_per_worker": 1, "hardware": "Abacus", "commit": ""}
    trial = Trial(
        stage="pretrain",
        key=key_in(recipe, "pretrain"),
        world=2,
        date="2030-01-01",
        steps=25,
        images_per_s=160.0,
        step_s=0.1,
        compute_s=0.08,
        storage_s=0.0,
        decode_s=0.02,
        transfer_s=0.0,
        memory_gib=1.5,
        save_stall_s=0.02,
        save_s=0.5,
        until_steady_s=10.0,
        **values,
    )
    write_trial(tmp_path / "run", trial)
    write_trial(tmp_path / "run", dataclasses.replace(trial, stage="finetune", key=key_in(recipe, "finetune")))
    return trial


def test_plan_multiplies_a_trial_and_adds_saves_evaluations_and_failures(recipe, tried, capsys):
    """By hand: 24,000 steps of 0.1 s, every eighth with a save of 0.02 s; 360 images are evaluated, once."""
    long = ["pretrain.steps=24000"]  # a trial holds for any length
    images = 360
    expected_s = 24_000 * 0.1 + 3000 * 0.02 + images / (3 * 160)
    assert main(["plan", str(recipe), *long]) == 0
    said = capsys.readouterr().out
    assert "(measured 2030-01-01; Abacus, 1.5 GiB at most)" in said
    assert (
        "100 ms a step on 2 workers: compute 80 ms, storage 0.00 ms, decode 20 ms, transfer 0.00 ms; 160 images/s"
        in said
    )
    minutes, seconds = divmod(int(expected_s), 60)
    assert f"  finish  {minutes}m{seconds:02}s for 24,000 steps and evaluations (0s, a third of" in said
    assert f"; {2 * expected_s / 3600:,.1f} worker-hours (--price 2.5 says what they cost)" in said
    assert "with" not in lines_of(said, "time ")[0]
    # A failure every half hour: Young's interval is √(2 · 0.02 · 1,800) = 8.5 s of work, 85 steps.
    assert main(["plan", str(recipe), *long, "--mtbf", "0.5", "--price", "2"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"  save    every 8 steps; every 8\d ends [23]% sooner \(Young 1974\): type pretrain.save_every=8", said
    )
    assert re.search(r"time    \d+m\d\ds for 2 trained stages with 1\.\d failures", said), said[:400]
    assert re.search(r"cost    1\.\d worker-hours, [23]\.\d\d at 2 each", said)


def test_plan_says_what_it_assumes_of_a_world_that_was_not_tried(recipe, tried, tmp_path, capsys):
    assert main(["plan", str(recipe), "cluster.workers=4", "finetune.micro_batch=4"]) == 0
    said = capsys.readouterr().out
    assert "50 ms a step on 4 workers: compute 40 ms" in said
    assert "320 images/s (assumes images/s per worker stay as on 2 workers; Abacus" in said
    # With one on 8 workers, each of which takes 60 images/s and not 80, those of 4 lie in the middle: 70.
    write_trial(tmp_path / "run", dataclasses.replace(tried, world=8, images_per_s=480.0))
    assert main(["plan", str(recipe), "cluster.workers=4", "finetune.micro_batch=4"]) == 0
    assert "280 images/s (between trials on 2 and 8 workers; Abacus" in capsys.readouterr().out


def test_a_trial_holds_for_all_that_changes_no_step_and_for_nothing_else(recipe):
    key = key_in(recipe, "pretrain")
    for override in ("steps=7", "optim.lr=0.1", "seed=3", "save_every=5", "optim.schedule.warmup_steps=0"):
        assert key_in(recipe, "pretrain", f"pretrain.{override}") == key, override
    for override in ("micro_batch=2", "zero=1", "model.width=64", "data.processes=1", "mixup=0.2", "polyak=0.9"):
        assert key_in(recipe, "pretrain", f"pretrain.{override}") != key, override
    # Another set is decoded at another speed.
    loaded = load(recipe, [])
    other = load(recipe, [f"pretrain.data.train={loaded.stage('pretrain').config.data.evaluate}"])
    assert trial_key(other, other.stage("pretrain")) != key


def test_a_trial_of_other_workers_is_not_gone_by(recipe, tried, capsys):
    assert main(["plan", str(recipe), "cluster.cpus_per_worker=4"]) == 0
    said = capsys.readouterr().out
    assert "time    not known: type python -m jobs trial RECIPE, which takes 30 steps of each stage, or --gpu" in said
    assert "\ncost    not known without the time\n" in said
    assert main(["plan", str(recipe), "cluster.gpus_per_worker=1"]) == 0
    assert "a GPU's peak is of bf16, and this stage computes in fp32; type python -m jobs" in capsys.readouterr().out


def test_an_estimate_is_a_range_and_says_that_it_is_one(recipe, capsys):
    """By hand: 24 × 16 images × 6 × MACs, at a fifth and at two fifths of 2 × 989 TFLOP/s."""
    words = ["cluster.gpus_per_worker=1", "pretrain.precision=bf16", "finetune.precision=bf16", "finetune.zero=1"]
    long = ["pretrain.steps=100000000000000"]
    loaded = load(recipe, [*words, *long])
    assert main(["plan", str(recipe), *words, *long, "--gpu", "h100", "--price", "2"]) == 0
    said = capsys.readouterr().out
    flops = float(re.search(r"compute ([\d.e+]+) exaFLOPs", said)[1]) * 1e18
    least_h = flops / (0.4 * 2 * 989e12) / 3600
    assert lines_of(said, "time ")[0].startswith("time    ESTIMATE, not measured: ")
    hours = re.search(r"finish  .* without saves and failures; ([\d,.]+) to ([\d,.]+) worker-hours, ([\d,.]+) to", said)
    least, most, money = (float(text.replace(",", "")) for text in hours.groups())
    assert least == pytest.approx(2 * least_h, rel=0.01) and most == pytest.approx(2 * least, rel=0.01)
    assert money == pytest.approx(2 * least, rel=0.01)
    assert "20 to 40 % of the peak of 2 H100; python -m jobs trial RECIPE measures it" in said
    assert re.match(r"fits    yes: finetune needs the most, .* a worker of 79\.1 GiB \(an H100\)\n", said)
    assert loaded.cluster.most == 2


def test_where_it_does_not_fit_the_first_line_says_so(recipe, capsys):
    # Traces are made by hand (conftest.py): a GiB, and as much at the start.
    limited = ["cluster.gpus_per_worker=1", "cluster.gpu_memory_gb=0.5"]
    assert main(["plan", str(recipe), *limited]) == 78
    assert capsys.readouterr().out.startswith("fits    NO: of pretrain, finetune a worker needs more than there is\n")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["plan", "--gpu", "h10"], 78, "--gpu is h10; did you mean 'h100'?"),
        (["plan", "--price", "0"], 78, "--price is 0, expected more than 0"),
        (["plan", "--mtbf", "-1"], 78, "--mtbf is -1, expected more than 0"),
        (["trial", "--stage", "pretran"], 78, "the recipe has no stage 'pretran'"),
        (["trial", "--stage", "resize"], 78, "resize is a stage of kind resize, which takes no steps"),
    ],
)
def test_refusals(words, code, message, recipe, capsys):
    assert main([words[0], str(recipe), *words[1:]]) == code
    assert message in capsys.readouterr().err


def test_a_stage_without_its_data_is_not_tried_and_the_others_are_named(tmp_path, capsys):
    text = (
        f"run: {tmp_path}/run\ncluster: {{workers: 1, backend: processes}}\n"
        "shards: {kind: pack, sets: {train: {source: digits, image_size: 16}}}\n"
        'pretrain: {data: {train: "@shards/train"}, model: {name: mu/8, image_size: 16, classes: 10}, steps: 4,'
        " optim: {schedule: {warmup_steps: 0}}, batch_size: 16, micro_batch: 8, precision: fp32}\n"
    )
    file = tmp_path / "recipe.yaml"
    write_whole(file, text)
    assert main(["trial", str(file)]) == 65
    ended = capsys.readouterr()
    assert re.search(
        r"pretrain   not tried: .*/train is not there yet; type python -m jobs run RECIPE --only pack", ended.out
    )
    assert re.search(r"error: no stage can be tried: pretrain: .*/train is not there yet", ended.err)
    assert not (tmp_path / "run").exists()


def test_an_altered_trial_is_refused_by_name(recipe, tried, tmp_path, capsys):
    (first, *_) = (tmp_path / "run" / "trials").iterdir()
    record = json.loads(first.read_text())
    first.write_text(json.dumps({**record, "images_per_s": 1e9}))
    assert main(["plan", str(recipe)]) == 65
    assert first.name in capsys.readouterr().err


@pytest.mark.slow
def test_plan_says_something_within_two_seconds(recipe):
    environment = {**os.environ, "PYTHONPATH": import_path()}
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "jobs", "plan", str(recipe)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        seconds = time.monotonic() - began
        process.kill()
    assert first.startswith("plan: reading ") and seconds < 2
