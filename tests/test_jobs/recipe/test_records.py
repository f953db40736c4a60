"""The content of stage.json, and the changes that are detected with it."""

import shutil
from pathlib import Path

from jobs.recipe.records import changed_warnings, environment, forbidden_fields, stage_record, unfinished_folder
from jobs.resolved_recipe import Campaign
from pipeline import artifacts
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
