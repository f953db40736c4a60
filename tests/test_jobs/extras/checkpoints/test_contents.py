"""`python -m jobs checkpoints verify|inspect`, and `diff` and `export` of checkpoints, on a small run."""

import shutil
from pathlib import Path

import pytest
import torch

import models
from jobs.__main__ import main
from pipeline.checkpoints.manifest import committed
from tests.support.drives import finish, output_of, stage


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("made") / "run"
    assert finish(run, "pretrain.steps=12", "pretrain.save_every=4") == 0, output_of(run)
    return run


@pytest.fixture
def run(trained_run, tmp_path) -> Path:
    """A run with checkpoints at steps 4, 8 and 12; the one at step 8 has a flipped bit."""
    shutil.copytree(trained_run, tmp_path / "run")
    victim = stage(tmp_path / "run") / "checkpoints" / "step-0000000008" / "rank-00001.safetensors"
    blob = bytearray(victim.read_bytes())
    blob[len(blob) // 2] ^= 1
    victim.write_bytes(blob)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["checkpoints", "diff", "RUN", "--with", "OUT"], 64, "instead, run python -m jobs diff OUT RUN\n"),
        (["export", "RUN/step-4", "FILE"], 64, "FILE is inside the run directory RUN"),
        (["export", "RUN/step-5", "NEW"], 64, "no checkpoint of step 5\n  expected one of the steps 12, 8, 4"),
        (["export", "RUN/step-8", "NEW"], 74, "rank-00001.safetensors: its sha256 differs"),
        (["predict", "RUN/step-4", "RUN"], 65, "run python -m jobs export RUN/step-4 FOLDER, then use FOLDER"),
        (["diff", "RUN/step-4", "digits"], 64, "digits is a recipe, but RUN/step-4 has tensors\n  expected two"),
        (["diff", "RUN/step-4", "RUN/step-12", "seed=1"], 64, "overrides apply only to recipes, but RUN/step-4"),
        (["replay", "RUN", "step=3", "--to", "FILE"], 64, "--to FILE does not end in .npz"),
        (["replay", "RUN", "step=3", "--to", "RUN/nowhere/x.npz"], 64, "the folder RUN/nowhere does not exist"),
        (
            ["export", "STAGE", "NEW", "--format", "hf"],
            65,
            "instead, run python -m jobs export STAGE/step-12 NEW --format hf\n",
        ),
        (["replay", "TASKLESS", "step=3"], 74, "Is a directory: TASKLESS/task.json\n  expected a file with this name"),
    ],
)
def test_wrong_arguments_are_refused_with_the_correct_command(run, capsys, arguments, code, message) -> None:
    file = run / "file"
    file.write_text("kept")
    unfinished = run.parent / "unfinished"
    shutil.copytree(stage(run) / "checkpoints", unfinished / "checkpoints")
    taskless = run.parent / "taskless"
    (taskless / "task.json").mkdir(parents=True)
    places = {
        "STAGE": unfinished,
        "TASKLESS": taskless,
        "FILE": file,
        "OUT": run / "out",
        "NEW": run.parent / "new",
        "RUN": run,
    }

    def with_places(text: str) -> str:
        for name, path in places.items():
            text = text.replace(name, str(path))
        return text

    assert main([with_places(word) for word in arguments]) == code
    assert with_places(message) in capsys.readouterr().err
    assert file.read_text() == "kept"
    assert not places["NEW"].exists()
    assert not list(run.parent.glob(".tmp-*"))


def test_verify_names_the_damaged_checkpoint_and_exits_74(run, capsys) -> None:
    assert main(["checkpoints", "verify", str(run)]) == 74
    out, err = capsys.readouterr()
    assert f"{stage(run).name}/step-0000000012  intact" in out
    assert "/step-0000000008  DAMAGED: " in out
    assert "rank-00001.safetensors: its sha256 differs from the manifest" in out
    assert "damaged checkpoints: 1" in err
    assert len(committed(stage(run) / "checkpoints")) == 3


def test_inspect_prints_the_manifest_and_every_parameter(run, capsys) -> None:
    assert main(["checkpoints", "inspect", f"{run}/step-4"]) == 0
    out = capsys.readouterr().out
    assert "step          4" in out
    assert "samples_seen  64" in out
    assert "ledger " in out
    (row,) = [line for line in out.splitlines() if line.startswith("head.bias")]
    assert row.split()[1] == "10"
    assert all(f"|{kind}|" in row for kind in ("master", "exp_avg", "exp_avg_sq"))


def test_diff_shows_the_changes_between_two_steps(run, capsys) -> None:
    assert main(["diff", f"{run}/step-4", f"{stage(run)}/step-12"]) == 0
    out = capsys.readouterr().out
    assert "step: 4 → 12" in out
    assert "head.bias master: largest difference" in out
    assert "\n  0 of " in out
    assert main(["diff", f"{run}/step-8", f"{run}/step-4"]) == 74  # step 8 is damaged


@pytest.mark.parametrize("name", ["step-12", "step-0000000012", "checkpoints/step-12", "checkpoints/step-0000000012"])
def test_export_writes_the_same_weights_as_the_stage(run, tmp_path, name) -> None:
    assert main(["export", f"{stage(run)}/{name}", str(tmp_path / "out")]) == 0
    ours, theirs = (models.load_weights(str(folder)) for folder in (tmp_path / "out", stage(run)))
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])
    assert not list(tmp_path.glob(".tmp-*"))


def test_export_of_a_checkpoint_in_another_format_has_its_weights(run, tmp_path, capsys) -> None:
    assert main(["export", f"{run}/step-4", str(tmp_path / "early.npz"), "--format", "npz"]) == 0
    assert "differ by at most 0.0e+00" in capsys.readouterr().out
    early = models.load(tmp_path / "early.npz", image_size=models.load(str(stage(run))).config.image_size)
    assert main(["export", f"{run}/step-4", str(tmp_path / "early")]) == 0
    ours = models.load_weights(str(tmp_path / "early"))[0]
    assert all(torch.equal(ours[name], value) for name, value in early.state_dict().items())
    assert not torch.equal(ours["head.bias"], models.load_weights(str(stage(run)))[0]["head.bias"])


def test_a_missing_step_is_refused_with_the_steps_that_exist(run, capsys) -> None:
    assert main(["checkpoints", "inspect", f"{run}/step-5"]) == 64
    assert "has no checkpoint of step 5" in (err := capsys.readouterr().err)
    assert "12, 8, 4" in err
