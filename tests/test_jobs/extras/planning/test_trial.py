"""Trials of a tiny campaign on real workers, plans based on them, and refusals."""

import json
import re
import time

import pytest

from data.files import write_atomically
from jobs.__main__ import main
from jobs.extras.planning.trial import trial_key
from pipeline.extras.plan.trial import Trial, read_trials
from tests.support.campaigns import load
from tests.support.stores import store
from tests.support.trials import key_in, write_trials


@pytest.mark.parametrize("backend", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_trial_measures_real_steps_and_leaves_only_its_result(backend, recipe, tmp_path, capsys):
    began = time.time()
    assert main(["trial", str(recipe), f"cluster.backend={backend}", "--stage", "pretrain"]) == 0
    took_s = time.time() - began
    out = capsys.readouterr().out
    assert "pretrain   30 steps of 16 images on 2 workers, the first 5 as warm-up" in out
    assert "pretrain   step 30 of 30" in out

    (trial,) = read_trials(tmp_path / "run", key_in(recipe, "pretrain"))
    assert (trial.stage, trial.world, trial.backend, trial.steps) == ("pretrain", 2, backend, 25)
    parts = trial.compute_s + trial.storage_s + trial.decode_s + trial.transfer_s
    assert trial.step_s == pytest.approx(parts)
    assert trial.images_per_s == pytest.approx(16 / trial.step_s)
    # The command takes longer than 25 steps, a save and a start.
    assert 0 < 25 * trial.step_s + trial.until_steady_s < took_s
    assert 0 < trial.save_stall_s <= trial.save_s < took_s
    assert 0.05 < trial.memory_gib < 8, "at least the memory of Python and torch"
    assert trial.hardware != "cpu"
    assert trial.date.startswith("20")
    files = [path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files == [f"trials/{trial.key[:8]}-2.json"], "checkpoints, weights and logs are deleted with their folder"

    # The initial weights of the other stage do not exist yet: it starts from random ones.
    if backend == "processes":
        assert main(["trial", str(recipe)]) == 0
        assert read_trials(tmp_path / "run", key_in(recipe, "finetune"))
    assert main(["plan", str(recipe), f"cluster.backend={backend}", "--price", "2.5"]) == 0
    summary = "".join(capsys.readouterr().out.partition("fits ")[1:])
    assert re.match(r"fits    .*\ntime    \d+s for .*\ncost    [\d.]+ worker-hours, [\d.]+ at 2.5 each\n", summary)
    assert re.search(r"  time    [\d.]+ m?s per step on 2 workers: compute .*images/s \(measured 20", summary)


@pytest.mark.slow
def test_a_trial_of_a_run_in_a_bucket_leaves_only_its_result_in_the_bucket(recipe, tmp_path, capsys):
    with store("s3", {}):
        words = [str(recipe), "run=s3://images/runs/tried", f"cluster.scratch={tmp_path / 'scratch'}"]
        assert main(["trial", *words, "--stage", "pretrain"]) == 0
        assert "a save pauses training" in capsys.readouterr().out
        kept = load(recipe, words[1:]).storage.list()
        assert [name.partition("-")[2] for name in kept] == ["2.json"], kept
        # A machine with another disk uses the result.
        assert main(["plan", *words[:2], f"cluster.scratch={tmp_path / 'other'}"]) == 0
        assert "images/s (measured 20" in capsys.readouterr().out


@pytest.fixture
def tried(recipe, tmp_path) -> Trial:
    return write_trials(tmp_path / "run", recipe)


def test_only_fields_that_affect_step_time_change_the_key_of_a_trial(recipe):
    key = key_in(recipe, "pretrain")
    for override in ("steps=7", "optim.lr=0.1", "seed=3", "save_every=5", "optim.schedule.warmup_steps=0"):
        assert key_in(recipe, "pretrain", f"pretrain.{override}") == key, override
    for override in ("micro_batch=2", "zero=1", "model.width=64", "data.processes=1", "mixup=0.2", "polyak=0.9"):
        assert key_in(recipe, "pretrain", f"pretrain.{override}") != key, override
    # Decoding another set takes another time.
    loaded = load(recipe, [])
    other = load(recipe, [f"pretrain.data.train={loaded.stage('pretrain').config.data.evaluate}"])
    assert trial_key(other, other.stage("pretrain")) != key


def test_the_first_line_of_a_plan_tells_that_a_stage_does_not_fit(recipe, capsys):
    # The traces come from conftest.py: 1 GiB, plus 1 GiB at the start.
    limited = ["cluster.gpus_per_worker=1", "cluster.gpu_memory_gb=0.5"]
    assert main(["plan", str(recipe), *limited]) == 78
    assert capsys.readouterr().out.startswith("fits    NO: too little memory per worker for pretrain, finetune\n")


def test_a_stage_without_data_is_skipped_and_listed(tmp_path, capsys):
    text = (
        f"run: {tmp_path}/run\ncluster: {{workers: 1, backend: processes}}\n"
        "shards: {kind: pack, sets: {train: {source: digits, image_size: 16}}}\n"
        'parts: {kind: pack, sets: {most: {source: subset, path: "@shards/train", part: ":90%"}}}\n'
        'pretrain: {data: {train: "@parts/most"}, model: {name: mu/8, image_size: 16, classes: 10}, steps: 4,'
        " optim: {schedule: {warmup_steps: 0}}, batch_size: 16, micro_batch: 8, precision: fp32}\n"
    )
    file = tmp_path / "recipe.yaml"
    write_atomically(file, text)
    assert main(["trial", str(file)]) == 65
    ended = capsys.readouterr()
    assert re.search(
        r"pretrain   not measured: .*/most does not exist yet; "
        f"run python -m jobs run {file} --only shards, then python -m jobs run {file} --only parts\n",
        ended.out,
    )
    assert re.search(r"error: none of the stages can be measured: pretrain: .*/most does not exist yet", ended.err)
    assert not (tmp_path / "run").exists()
    for only in ("shards", "parts"):
        assert main(["run", str(file), "--only", only]) == 0


def test_a_modified_trial_is_refused_by_name(recipe, tried, tmp_path, capsys):
    (first, *_) = (tmp_path / "run" / "trials").iterdir()
    record = json.loads(first.read_text())
    first.write_text(json.dumps({**record, "images_per_s": 1e9}))
    assert main(["plan", str(recipe)]) == 65
    assert first.name in capsys.readouterr().err
