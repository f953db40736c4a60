"""A finished stage whose evaluation settings change stays finished, and the command that evaluates it is printed."""

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import models
from jobs.__main__ import main
from jobs.extras.reevaluation import evaluation_commands
from jobs.recipe.records import changed_warnings, stage_record
from jobs.resolved_recipe import Campaign
from pipeline import artifacts
from tests.support import campaigns
from tests.support.recipes import TINY


def finished(recipe: Path, overrides: Sequence[str] = (), **outcome: str) -> Campaign:
    """Leave the folder of a finished pretraining, without the training."""
    loaded = campaigns.load(recipe, list(overrides))
    stage = loaded.stage("pretrain")
    folder = loaded.directory(stage)
    models.save(models.from_config(stage.model, torch.Generator().manual_seed(0)), folder)
    artifacts.write_record(folder / "stage.json", stage_record(stage))
    done = {"key": stage.key, "seconds": 1, "files": artifacts.digests(folder), **outcome}
    artifacts.write_record(folder / "done.json", done)
    return loaded


def commands(recipe: Path, overrides: Sequence[str] = ()) -> list[list[str]]:
    """Return the words of the commands that evaluate the finished stage as the recipe says now."""
    loaded = campaigns.load(recipe, list(overrides))
    stage = loaded.stage("pretrain")
    changed = changed_warnings(loaded.directory(stage), stage)
    return [shlex.split(command) for command in evaluation_commands(loaded, stage, changed)]


@pytest.fixture
def alone(recipe: Path) -> Path:
    """The recipe's pretraining alone."""
    recipe.write_text(recipe.read_text().partition("resize:")[0])
    return recipe


def test_without_a_change_there_is_no_command(alone: Path) -> None:
    finished(alone)
    assert commands(alone) == []


def test_another_set_gives_the_command_that_evaluates_on_it(alone: Path, shards: Path) -> None:
    loaded = finished(alone)
    folder = loaded.directory(loaded.stage("pretrain"))
    command = ["python", "-m", "jobs", "evaluate", str(folder), f"{shards}/train", "micro_batch=4"]
    assert commands(alone, [f"pretrain.data.evaluate={shards}/train"]) == [command]
    assert commands(alone, ["pretrain.data.evaluate=null"]) == [], "there is no set to evaluate on"


def test_another_preprocessing_is_part_of_the_command(alone: Path) -> None:
    finished(alone)
    ((*_, preprocess, micro_batch),) = commands(alone, ["pretrain.data.preprocess=resize_small(18)|central_crop(16)"])
    assert preprocess == "preprocess=resize_small(18)|central_crop(16)"
    assert micro_batch == "micro_batch=4"


def test_the_default_preprocessing_is_named_in_the_command(alone: Path) -> None:
    """Without it, the command would use the preprocessing recorded with the weights."""
    finished(alone, ["pretrain.data.preprocess=resize_small(18)|central_crop(16)"])
    ((*_, preprocess, _),) = commands(alone, ["pretrain.data.preprocess=null"])
    assert preprocess == "preprocess=resize((16, 16))"


def test_another_probe_gives_the_command_of_the_few_shot_protocol(alone: Path, shards: Path) -> None:
    loaded = finished(alone)
    folder = loaded.directory(loaded.stage("pretrain"))
    probe = [f"pretrain.probe.train={shards}/train", f"pretrain.probe.test={shards}/test", "pretrain.probe.shots=[3]"]
    (command,) = commands(alone, probe)
    assert command[3:8] == ["evaluate", str(folder), f"{shards}/test", f"train={shards}/train", "fewshot.shots=[3]"]
    assert command[-2:] == ["--protocol", "fewshot"]


@pytest.mark.parametrize("end", ["diverged"])
def test_a_stage_without_final_weights_has_no_command(alone: Path, shards: Path, end: str) -> None:
    finished(alone, **{end: "a reason"})
    assert commands(alone, [f"pretrain.data.evaluate={shards}/train"]) == []


def test_a_set_counts_by_its_content_and_not_by_its_path(alone: Path, shards: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(shards / "test", copied)
    outside = [f"pretrain.data.evaluate={copied}"]
    loaded = finished(alone, outside)
    same = [f"pretrain.data.evaluate={tmp_path}/./copied"]
    assert commands(alone, same) == [], "the same content by another path"
    shutil.rmtree(copied)
    shutil.copytree(shards / "train", copied)
    assert len(commands(alone, outside)) == 1, "another set at the same path"
    # Records of earlier versions have the path alone.
    record_path = loaded.directory(loaded.stage("pretrain")) / "stage.json"
    record = artifacts.read_record(record_path)
    artifacts.write_record(record_path, {field: value for field, value in record.items() if field != "eval_inputs"})
    assert commands(alone, outside) == []
    assert len(commands(alone, same)) == 1
    shutil.rmtree(copied)
    artifacts.write_record(record_path, record)
    assert commands(alone, outside) == [], "a set that is missing is no other set"


def test_a_set_counts_as_changed_if_the_stage_that_packs_it_was_edited(alone: Path) -> None:
    packed = "testshards: {kind: pack, sets: {test: {source: digits, split: test, image_size: 32}}}\n"
    alone.write_text(alone.read_text() + packed)
    inside = ["pretrain.data.evaluate=@testshards/test"]
    finished(alone, inside)
    assert commands(alone, inside) == []
    edited = [*inside, "testshards.sets.test.keep=[0,1]"]
    loaded = campaigns.load(alone, edited)
    ((*_, test, _),) = commands(alone, edited)
    assert test == str(loaded.directory(loaded.stage("testshards")) / "test")


@pytest.mark.slow
def test_the_printed_command_gives_the_accuracy_that_training_would_have_given(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = f"pretrain.data.evaluate={shards}/train"
    for name in ("later", "at-once"):
        (tmp_path / f"{name}.yaml").write_text(TINY.partition("resize:")[0].format(run=tmp_path / name, shards=shards))
    assert main(["run", "later.yaml"]) == 0
    (folder,) = (tmp_path / "later").glob("pretrain-*")
    weights = artifacts.digest_of(folder / "weights.safetensors")
    capsys.readouterr()
    assert main(["run", "later.yaml", changed]) == 0
    out = capsys.readouterr().out
    assert "pretrain: skipped, finished" in out
    assert f"pretrain: evaluation settings changed since it finished: data.evaluate: {shards}/test" in out
    assert "[pretrain]" not in out, "no worker of the stage was started"
    (command,) = [line.strip() for line in out.splitlines() if line.startswith("  python -m jobs evaluate")]
    assert main([*shlex.split(command)[3:], "cluster.backend=processes", "--output", "evaluated"]) == 0
    assert artifacts.digest_of(folder / "weights.safetensors") == weights

    assert main(["run", "at-once.yaml", changed]) == 0
    (done,) = (tmp_path / "at-once").glob("pretrain-*/done.json")
    (result,) = json.loads((tmp_path / "evaluated" / "evaluation.json").read_text())["results"]
    assert result["values"]["top-1"]["value"] == json.loads(done.read_text())["metrics"]["accuracy"]
