"""A recipe as text: with every default, and without relative paths and secrets for a submitted job."""

from pathlib import Path

import pytest
import yaml

from data.errors import ConfigError
from jobs.recipe.render import portable, resolved
from pipeline.recipe import Recipe
from tests.support import campaigns
from tests.support.campaigns import KINDS


def test_a_resolved_recipe_has_every_default_and_gives_the_same_keys(recipe, tmp_path):
    loaded = campaigns.load(recipe, [])
    sections = yaml.safe_load(resolved(loaded))
    assert sections["pretrain"]["optim"]["lr"] == 2e-3
    assert sections["pretrain"]["optim"]["beta1"] == 0.9
    again = tmp_path / "again.yaml"
    again.write_text(resolved(loaded))
    keys = {stage.name: stage.key for stage in campaigns.load(again, [f"run={tmp_path}/run"]).stages}
    assert keys == {stage.name: stage.key for stage in loaded.stages}


def test_of_several_runs_of_a_section_the_first_is_whole_and_the_others_show_what_differs(recipe):
    loaded = campaigns.load(recipe, ["finetune.sweep={seeds: [0, 1]}"])
    sections = yaml.safe_load(resolved(loaded))
    assert sections["finetune.seed-0"]["seed"] == 0
    assert sections["finetune.seed-1"] == {"as": "finetune.seed-0", "but": {"seed": 1}}
    assert sections["finetune"]["kind"] == "sweep"


@pytest.mark.quick
def test_relative_paths_are_made_absolute_and_named():
    section = {
        "data": {"train": "sets/train", "evaluate": "s3://bucket/test"},
        "init": "@other",
        "deepspeed": "ds.json",
    }
    recipe = Recipe({"pretrain": section, "cluster": {"workers": 2}}, "mine.yaml", "runs/mine")
    text, changed = portable(recipe, "/runs/x", Path("/home/me"), KINDS)
    assert yaml.safe_load(text) == {
        "pretrain": {
            "data": {"train": "/home/me/sets/train", "evaluate": "s3://bucket/test"},
            "init": "@other",
            "deepspeed": "/home/me/ds.json",
        },
        "cluster": {"workers": 2},
        "run": "/runs/x",
    }
    assert changed == ["pretrain.data.train", "pretrain.deepspeed"]


@pytest.mark.quick
def test_a_recipe_with_a_password_does_not_travel():
    section = {"data": {"train": "https://me:hunter2@host/train"}}
    with pytest.raises(ConfigError, match=r"mine\.yaml holds what looks like a secret"):
        portable(Recipe({"pretrain": section}, "mine.yaml", "runs/mine"), "/runs/x", Path("/home/me"), KINDS)
