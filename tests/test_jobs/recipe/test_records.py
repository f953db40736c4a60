"""The content of stage.json, and the changes that it reveals."""

import json
import re
import shutil
from pathlib import Path

import pytest

from data.errors import DataError
from jobs.recipe.records import changed_warnings, environment, forbidden_fields, stage_record, unfinished_folder
from jobs.resolved_recipe import Campaign
from jobs.run.session import run_campaign
from pipeline import artifacts, config, variables
from pipeline.variables import recorded, restored
from tests.support import campaigns


def started(recipe: Path) -> tuple[Campaign, Path]:
    """Write the stage.json of a started pretraining."""
    loaded = campaigns.load(recipe, [])
    folder = loaded.directory(loaded.stage("pretrain"))
    folder.mkdir(parents=True)
    artifacts.write_record(folder / "stage.json", stage_record(loaded.stage("pretrain")))
    return loaded, folder


def test_a_record_has_the_resolved_model_instead_of_the_recipes_section(recipe):
    fields = forbidden_fields(campaigns.load(recipe, []).stage("pretrain"))
    assert fields["model.width"] == 32
    assert "model" not in fields
    assert fields["optim.lr"] == 2e-3
    assert isinstance(fields["content of data.train"], str)


def test_only_changed_fields_tagged_warn_are_reported(recipe):
    _, folder = started(recipe)
    loaded = campaigns.load(recipe, ["pretrain.data.evaluate=null", "pretrain.log_every=1"])
    changes = changed_warnings(folder, loaded.stage("pretrain"))
    assert list(changes) == ["data.evaluate"]
    assert changed_warnings(folder.parent / "other", loaded.stage("pretrain")) == {}


def test_data_sets_are_compared_by_content(recipe, shards, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(shards / "test", copied)
    _, folder = started(recipe)
    override = f"pretrain.data.evaluate={copied}"
    assert changed_warnings(folder, campaigns.load(recipe, [override]).stage("pretrain")) == {}
    shutil.rmtree(copied)
    shutil.copytree(shards / "train", copied)
    changes = changed_warnings(folder, campaigns.load(recipe, [override]).stage("pretrain"))
    assert list(changes) == ["data.evaluate"]


def test_a_folder_without_a_checkpoint_is_not_an_unfinished_stage(recipe):
    started(recipe)
    loaded = campaigns.load(recipe, ["pretrain.optim.lr=1"])
    assert unfinished_folder(loaded, loaded.stage("pretrain")) is None


def test_the_environment_has_the_versions_of_packages():
    import torch

    assert environment()["torch"] == torch.__version__.split("+")[0] or environment()["torch"] == torch.__version__


# ------------------------------------------------------------------------ values of environment variables


def files_with(text: str, folder: Path) -> list[str]:
    """Return the names of the files below a folder that contain a text."""
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and text.encode() in path.read_bytes():
            names.append(path.relative_to(folder).as_posix())
    return names


def test_run_keeps_values_of_the_environment_out_of_its_records(recipe, tmp_path, shards, monkeypatch, capsys) -> None:
    place = tmp_path / "private place of otto"
    shutil.copytree(shards, place)
    changes = ["pretrain.steps=8"]
    for name, part in (("train", "train"), ("evaluate", "test")):
        changes.append(f"pretrain.data.{name}=${{oc.env:PLACE}}/{part}")
    monkeypatch.setenv("PLACE", str(place))
    monkeypatch.setattr(variables, "_values", {})
    run_campaign(campaigns.load(recipe, changes), only="pretrain")
    (stage,) = (tmp_path / "run").glob("pretrain-*")
    key = artifacts.read_record(stage / "stage.json")["key"]
    assert files_with("private place", tmp_path / "run") == []
    manifest = json.loads((next(stage.glob("checkpoints/step-*")) / "MANIFEST.json").read_text())
    task = artifacts.read_record(stage / artifacts.TASK)
    for train in (manifest["config"]["data.train"], task["config"]["data"]["train"], task["job"]["train"][0]):
        assert re.fullmatch(r"\$\{oc\.env:PLACE\}/train \(sha256 [0-9a-f]{8}\)", train)

    # The finished stage is skipped, and its steps can be repeated.
    capsys.readouterr()
    run_campaign(campaigns.load(recipe, changes), only="pretrain")
    assert "skipped, finished with the same config and inputs" in capsys.readouterr().out
    assert restored(task["job"]["train"], stage) == [str(place / "train")]

    # The same sets in another place have the same key. The change is shown, but neither value.
    other = tmp_path / "another place of bob"
    shutil.copytree(place, other)
    monkeypatch.setenv("PLACE", str(other))
    loaded = campaigns.load(recipe, changes)
    assert loaded.stage("pretrain").key == key
    before = artifacts.read_record(stage / "stage.json")["forbid"]
    (change,) = config.differences(recorded(before), forbidden_fields(loaded.stage("pretrain"))).values()
    assert change.startswith("data.train: ")
    assert "${oc.env:PLACE}/train" in change
    assert "otto" not in change
    assert "bob" not in change
    with pytest.raises(DataError, match=r"PLACE is not set, or has another value now"):
        restored(task["job"]["train"], stage)

    # A record of an earlier version has the value itself.
    monkeypatch.setenv("PLACE", str(place))
    loaded = campaigns.load(recipe, changes)
    old = {**forbidden_fields(loaded.stage("pretrain")), "data.train": str(place / "train")}
    assert config.differences(recorded(old), forbidden_fields(loaded.stage("pretrain"))) == {}
