"""Runs and stages by their names: which folder a command takes, and what it says where none or several fit."""

import json
import os
from pathlib import Path

import pytest

from data.errors import DataError, UsageError
from jobs.named_stages import find_stage

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two finished finetunings, a newer one that is half done, a pretraining, and packed shards."""
    stages = {
        "shards-00000001": (["done.json"], 10),
        "pretrain-00000002": (["model.json", "task.json", "checkpoints/x", "done.json"], 20),
        "finetune-00000003": (["model.json", "task.json", "checkpoints/x", "done.json"], 40),
        "finetune-00000004": (["model.json", "task.json", "checkpoints/x", "done.json"], 30),
        "finetune-00000005": (["task.json", "checkpoints/x"], 50),
    }
    for name, (files, time) in stages.items():
        for file in ["stage.json", *files]:
            path = tmp_path / "x" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({}))
            os.utime(path, (time, time))
    return tmp_path / "x"


@pytest.mark.parametrize(
    ("typed", "needs", "taken"),
    [
        ("finetune", "model.json", "finetune-00000003"),
        ("finetune/", "model.json", "finetune-00000003"),
        ("pretrain", "model.json", "pretrain-00000002"),
        ("", "model.json", "finetune-00000003"),
        ("finetune", "task.json", "finetune-00000003"),
        ("finetune", "checkpoints", "finetune-00000003"),
        ("finetune-00000004", "model.json", None),
        ("finetune-00000005", "checkpoints", None),
        ("../elsewhere", "model.json", None),
        ("../elsewhere/vit.npz", "model.json", None),
    ],
)
def test_the_newest_finished_stage_of_a_name_is_taken_and_said(run, capsys, typed, needs, taken):
    path = f"{run}/{typed}"
    assert find_stage(path, needs) == (path if taken is None else f"{run}/{taken}")
    said = capsys.readouterr().err
    assert said.count("\n") == (taken is not None)
    if taken is not None:
        assert said.startswith(f"{path}: {taken}, finished 1970-01-01 ")
    assert ("for another type" in said) == (typed == "")


def test_where_none_or_several_fit_those_that_are_there_are_listed(run):
    with pytest.raises(DataError, match="no finished stage with weights of the name 'finetnue'; did you mean") as error:
        find_stage(f"{run}/finetnue")
    assert str(error.value).count("finished 1970") == 5 and f"{run}/finetune-00000005  not finished" in str(error.value)
    with pytest.raises(DataError, match="no finished stage with weights of the name 'shards'"):
        find_stage(f"{run}/shards")
    with pytest.raises(UsageError, match=f"2 stages with training\n  name one:\n  {run}/finetune\n  {run}/pretrain"):
        find_stage(str(run), "task.json", one_name=True)


def test_an_unfinished_stage_is_taken_where_checkpoints_are_read_and_nothing_else_is_there(run, capsys):
    for name in ("finetune-00000003", "finetune-00000004"):
        (run / name).rename(run / f"old-{name}")
    assert find_stage(f"{run}/finetune", "checkpoints") == f"{run}/finetune-00000005"
    assert "finetune-00000005, not finished, started 1970" in capsys.readouterr().err
    with pytest.raises(DataError):
        find_stage(f"{run}/finetune")
