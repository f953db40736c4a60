"""Runs and stages by their names: which folder a command takes, and what it says where none or several fit."""

import json
import os
from pathlib import Path

import pytest

from data.errors import DataError, UsageError
from jobs.named_stages import find_set, find_stage

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
    with pytest.raises(DataError, match="no stage 'finetnue'; did you mean 'finetune'") as error:
        find_stage(f"{run}/finetnue")
    assert str(error.value).count("finished 1970") == 4 and "finetune-00000005, not finished" in str(error.value)
    with pytest.raises(DataError, match=f"{run}/shards has no weights"):
        find_stage(f"{run}/shards")
    with pytest.raises(UsageError, match=f"2 stages with training\n  name one:\n  {run}/finetune\n  {run}/pretrain"):
        find_stage(str(run), "task.json", one_name=True)


def test_an_unfinished_stage_is_taken_where_checkpoints_are_read_and_nothing_else_is_there(run, capsys):
    for name in ("finetune-00000003", "finetune-00000004"):
        (run / name).rename(run / f"old-{name}")
    assert find_stage(f"{run}/finetune", "checkpoints") == f"{run}/finetune-00000005"
    assert "finetune-00000005, not finished, started 1970" in capsys.readouterr().err
    # Of weights that are still being trained: how far they are, and what goes on.
    (run / "finetune-00000005" / "metrics.jsonl").write_text('{"kind": "train", "step": 14, "steps": 200}\n')
    (run / "finetune-00000005" / "checkpoints" / "step-0000000012").mkdir()
    (run / "finetune-00000005" / "checkpoints" / "step-0000000012" / "MANIFEST.json").write_text("{}")
    for code, command in ((75, "python -m jobs run photos.yaml"), (78, "python -m jobs run RECIPE")):
        (run / "status.json").write_text(json.dumps({"exit_code": code, "command": "python -m jobs run photos.yaml"}))
        for typed in ("finetune", "finetune-00000005"):
            with pytest.raises(DataError, match="stands at step 14 of 200\n") as error:
                find_stage(f"{run}/{typed}")
            assert f"to go on with it type {command}\n" in str(error.value)
            assert (
                f"step 12, its newest checkpoint: type\n  python -m jobs checkpoints export {run}/finetune --to"
                in str(error.value)
            )


def test_a_set_goes_by_the_names_of_its_run_stage_and_itself(run, capsys):
    for stage, done in (("parts-0000000a", True), ("parts-0000000b", True), ("parts-0000000c", False)):
        folder = run / stage / "held-out"
        folder.mkdir(parents=True)
        for file in ["stage.json", "held-out/held-out.index.json", *(["done.json"] if done else [])]:
            (run / stage / file).write_text("{}")
            os.utime(run / stage / file, (int(stage[-1], 16),) * 2)
    for typed in ("parts/held-out", "held-out"):
        assert find_set(f"{run}/{typed}") == f"{run}/parts-0000000b/held-out"
        assert f"{run}/{typed}: parts-0000000b, finished" in capsys.readouterr().err
    for path in (f"{run}/parts-0000000a/held-out", f"{run.parent}/elsewhere/x", "s3://bucket/x/y/z", "held-out"):
        assert find_set(path) == path
    with pytest.raises(DataError, match=r"parts has no set 'heldout'\n(.*\n)*.*finished 1970.*: sets held-out"):
        find_set(f"{run}/parts/heldout")
