"""Trials of a tiny campaign on real workers, what `plan` makes of them, and what is refused."""

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest

from data.files import write_atomically
from data.remote import urls
from jobs.__main__ import main
from jobs.extras.planning.trial import trial_key
from pipeline.extras.plan.trial import Trial, read_trials, write_trial
from tests.support.campaigns import load
from tests.support.stores import store


def key_in(recipe: Path, name: str, *overrides: str) -> str:
    loaded = load(recipe, list(overrides))
    return trial_key(loaded, loaded.stage(name))


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


def test_where_it_does_not_fit_the_first_line_says_so(recipe, capsys):
    # Traces are made by hand (conftest.py): a GiB, and as much at the start.
    limited = ["cluster.gpus_per_worker=1", "cluster.gpu_memory_gb=0.5"]
    assert main(["plan", str(recipe), *limited]) == 78
    assert capsys.readouterr().out.startswith("fits    NO: of pretrain, finetune a worker needs more than there is\n")


def test_a_stage_without_its_data_is_not_tried_and_the_others_are_named(tmp_path, capsys):
    text = (
        f"run: {tmp_path}/run\ncluster: {{workers: 1, backend: processes}}\n"
        "shards: {kind: pack, sets: {train: {source: digits, image_size: 16}}}\n"
        'pretrain: {data: {train: "@shards/train"}, model: {name: mu/8, image_size: 16, classes: 10}, steps: 4,'
        " optim: {schedule: {warmup_steps: 0}}, batch_size: 16, micro_batch: 8, precision: fp32}\n"
    )
    file = tmp_path / "recipe.yaml"
    write_atomically(file, text)
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
