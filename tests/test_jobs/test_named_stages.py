"""Runs and stages by their names: which folder a command takes, and what it says where none or several fit."""

import json
import shutil
from pathlib import Path

import pytest

from data.errors import DataError, UsageError
from jobs.named_stages import find_set, find_stage
from pipeline.artifacts import write_record
from tests.support.campaigns import load

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two finished finetunings, a newer unfinished one, a pretraining, and packed shards."""
    stages = {
        "shards-00000001": (["done.json"], 10),
        "pretrain-00000002": (["model.json", "task.json", "checkpoints/x", "done.json"], 20),
        "finetune-00000003": (["model.json", "task.json", "checkpoints/x", "done.json"], 40),
        "finetune-00000004": (["model.json", "task.json", "checkpoints/x", "done.json"], 30),
        "finetune-00000005": (["task.json", "checkpoints/x"], 50),
    }
    for name, (files, time) in stages.items():
        made(tmp_path / "x" / name, files, time)
    return tmp_path / "x"


def made(stage: Path, files: list[str], time: float) -> None:
    """Write the files of a stage; its times are only in its records."""
    for file in ["stage.json", *files]:
        path = stage / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file in ("stage.json", "done.json"):
            write_record(path, {"started": 5.0, "resumed": time, "finished": time})
        else:
            path.write_text("{}")


@pytest.mark.parametrize(
    ("typed", "needs", "expected"),
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
def test_a_name_selects_the_newest_finished_stage_and_reports_it(run, capsys, typed, needs, expected):
    path = f"{run}/{typed}"
    assert find_stage(path, needs) == (path if expected is None else f"{run}/{expected}")
    message = capsys.readouterr().err
    assert message.count("\n") == (expected is not None)
    if expected is not None:
        assert message.startswith(f"{path}: using {expected}, finished 1970-01-01 ")
    assert ("to select another stage, use" in message) == (typed == "")
    older = ", the newest of 2 with different settings (older: finetune-00000004)"
    assert (older in message) == (expected == "finetune-00000003")


def test_a_folder_with_the_name_of_a_stage_is_not_a_stage(run):
    for name in ("finetune", "pictures"):
        (run / name).mkdir()
        (run / name / "config.json").write_text("{}")
    assert find_stage(f"{run}/finetune") == f"{run}/finetune-00000003"
    assert find_stage(f"{run}/pictures") == f"{run}/pictures"


def test_if_no_stage_or_several_stages_match_the_stages_are_listed(run):
    with pytest.raises(DataError, match="no stage 'finetnue'; did you mean 'finetune'") as error:
        find_stage(f"{run}/finetnue")
    assert str(error.value).count("finished 1970") == 4
    assert "finetune-00000005, not finished" in str(error.value)
    with pytest.raises(DataError, match=f"{run}/shards has no weights"):
        find_stage(f"{run}/shards")
    with pytest.raises(
        UsageError, match=f"2 stages with a training task\n  use one of them:\n  {run}/finetune\n  {run}/pretrain"
    ):
        find_stage(str(run), "task.json", one_name=True)


def test_an_unfinished_stage_is_used_for_checkpoints_if_no_other_has_any(run, capsys):
    for name in ("finetune-00000003", "finetune-00000004"):
        (run / name).rename(run / f"old-{name}")
    assert find_stage(f"{run}/finetune", "checkpoints") == f"{run}/finetune-00000005"
    assert "finetune-00000005, not finished, started 1970" in capsys.readouterr().err
    # For weights of unfinished training, the error reports the progress and the command that resumes it.
    (run / "finetune-00000005" / "metrics.jsonl").write_text('{"kind": "train", "step": 14, "steps": 200}\n')
    (run / "finetune-00000005" / "checkpoints" / "step-0000000012").mkdir()
    (run / "finetune-00000005" / "checkpoints" / "step-0000000012" / "MANIFEST.json").write_text("{}")
    for code, command in ((75, "python -m jobs run photos.yaml"), (78, "python -m jobs run ITS_RECIPE")):
        (run / "status.json").write_text(json.dumps({"exit_code": code, "command": "python -m jobs run photos.yaml"}))
        for typed in ("finetune", "finetune-00000005"):
            with pytest.raises(DataError, match="is at step 14 of 200\n") as error:
                find_stage(f"{run}/{typed}")
            assert f"to resume it, run {command}\n" in str(error.value)
            assert f"its newest checkpoint, run\n  python -m jobs export {run}/finetune/step-12 FOLDER" in str(
                error.value
            )


def test_a_data_set_is_found_by_the_names_of_run_stage_and_data_set(run, capsys):
    for stage, done in (("parts-0000000a", True), ("parts-0000000b", True), ("parts-0000000c", False)):
        files = ["held-out/held-out.index.json", *(["done.json"] if done else [])]
        made(run / stage, files, int(stage[-1], 16))
    for typed in ("parts/held-out", "held-out"):
        assert find_set(f"{run}/{typed}") == f"{run}/parts-0000000b/held-out"
        assert f"{run}/{typed}: using parts-0000000b, finished" in capsys.readouterr().err
    for path in (f"{run}/parts-0000000a/held-out", f"{run.parent}/elsewhere/x", "s3://bucket/x/y/z", "held-out"):
        assert find_set(path) == path
    listed = r"parts has no data set 'heldout'\n(.*\n)*.*finished 1970.*; data sets: held-out"
    with pytest.raises(DataError, match=listed):
        find_set(f"{run}/parts/heldout")


def test_a_copy_of_a_run_has_the_same_newest_stages(run, tmp_path):
    """`cp -r` gives all files the time of the copy, in any order."""
    for name in ("finetune-00000003", "pretrain-00000002", "finetune-00000005", "finetune-00000004"):
        shutil.copytree(run / name, tmp_path / "copy" / name, copy_function=shutil.copyfile)
    assert find_stage(f"{tmp_path}/copy/finetune") == f"{tmp_path}/copy/finetune-00000003"
    # For an older or altered record, only the file's time is known.
    (run / "finetune-00000004" / "done.json").write_text("{}")
    assert find_stage(f"{run}/finetune") == f"{run}/finetune-00000004"


RECIPE = """
run: {folder}/run
pretrain:
  data:
    mixture:
      a.b: {{train: {folder}/x/parts/train, weight: 0.5}}
      other: {{train: {shards}/test, weight: 0.5}}
    evaluate: {folder}/x/parts/test
  model: {{name: mu/8, image_size: 16, classes: 10}}
  optim: {{schedule: {{warmup_steps: 0}}}}
  sweep: {{seeds: [0, 1]}}
  steps: 4
  batch_size: 16
  micro_batch: 4
"""


def test_a_recipe_can_read_data_sets_of_another_run_by_name(tmp_path, shards, capsys):
    for key, time in (("0000000a", 20), ("0000000b", 10)):
        made(tmp_path / "x" / f"parts-{key}", ["done.json"], time)
        for name in ("train", "test"):
            (tmp_path / "x" / f"parts-{key}" / name).symlink_to(shards / name)
    recipe = tmp_path / "named.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path, shards=shards))
    campaign = load(recipe, [])
    taken = tmp_path / "x" / "parts-0000000a"
    for name in ("pretrain.seed-0", "pretrain.seed-1"):
        data = campaign.stage(name).config.data
        assert data.mixture["a.b"].train == f"{taken}/train"
        assert data.evaluate == f"{taken}/test"
        assert data.mixture["other"].train == f"{shards}/test"
        assert not campaign.stage(name).missing
    # Each path is said once, whatever the number of runs.
    assert capsys.readouterr().err.count("parts-0000000a, finished 1970") == 2
    with pytest.raises(DataError, match=r"x/parts has no data set 'tarin'"):
        load(recipe, [f"pretrain.data.evaluate={tmp_path}/x/parts/tarin"])
