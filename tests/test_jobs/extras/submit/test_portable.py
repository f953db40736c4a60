"""The recipe of a submitted job has no relative paths and no secrets."""

from pathlib import Path

import pytest
import yaml

from data.errors import ConfigError
from jobs.extras.submit.portable import portable
from pipeline.recipe import Recipe
from tests.support.campaigns import KINDS

pytestmark = pytest.mark.quick


def test_relative_paths_become_absolute_and_are_listed():
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


def test_a_recipe_with_a_password_is_not_submitted():
    section = {"data": {"train": "https://me:hunter2@host/train"}}
    with pytest.raises(ConfigError, match=r"mine\.yaml seems to contain a secret"):
        portable(Recipe({"pretrain": section}, "mine.yaml", "runs/mine"), "/runs/x", Path("/home/me"), KINDS)


def test_names_of_runs_with_dots_are_kept_in_a_submitted_sweep():
    runs = {
        "lr-0.01": {"optim.lr": 0.01, "data": {"train": "sets/a"}},
        "v1.5": {"init": "weights/b", "held_out": {"data.evaluate": "sets/c"}},
        "none": {},
    }
    section = {"sweep": {"each": runs, "grid": {"init": ["weights/d", "@other"]}}}
    text, changed = portable(
        Recipe({"pretrain": section}, "mine.yaml", "runs/mine"), "/runs/x", Path("/home/me"), KINDS
    )
    assert yaml.safe_load(text)["pretrain"]["sweep"] == {
        "each": {
            "lr-0.01": {"optim.lr": 0.01, "data": {"train": "/home/me/sets/a"}},
            "v1.5": {"init": "/home/me/weights/b", "held_out": {"data.evaluate": "/home/me/sets/c"}},
            "none": {},
        },
        "grid": {"init": ["/home/me/weights/d", "@other"]},
    }
    assert len(changed) == 4
