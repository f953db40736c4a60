"""`python -m jobs checkpoints verify|inspect|diff|export` on a small run, as a person types it."""

import shutil
from pathlib import Path

import pytest
import torch

import models
from jobs.__main__ import main
from pipeline.checkpoints.manifest import committed
from tests.support.drives import finish, said, stage


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("made") / "run"
    assert finish(run, "pretrain.steps=12", "pretrain.save_every=4") == 0, said(run)
    return run


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A run with checkpoints of steps 4, 8 and 12; the one of step 8 has a flipped bit."""
    shutil.copytree(made, tmp_path / "run")
    victim = stage(tmp_path / "run") / "checkpoints" / "step-0000000008" / "rank-00001.safetensors"
    blob = bytearray(victim.read_bytes())
    blob[len(blob) // 2] ^= 1
    victim.write_bytes(blob)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["checkpoints", "diff", "RUN", "RUN"],
            64,
            "what has changed from the first to the second: diff RUN --with RUN",
        ),
        (["checkpoints", "export", "RUN", "--to", "FILE"], 64, "--to FILE is a file\n  expected a folder"),
        (["replay", "RUN", "step=3", "--to", "FILE"], 64, "--to FILE does not end in .npz"),
        (["replay", "RUN", "step=3", "--to", "RUN/nowhere/x.npz"], 64, "there is no folder RUN/nowhere"),
        (["export", "STAGE", "OUT", "--format", "hf"], 65, "jobs checkpoints export STAGE --to FOLDER"),
        (["replay", "TASKLESS", "step=3"], 74, "Is a directory: TASKLESS/task.json\n  expected a file of this name"),
    ],
)
def test_what_a_stranger_types_first_is_refused_with_what_to_type_next(run, capsys, arguments, code, message) -> None:
    file = run / "file"
    file.write_text("kept")
    unfinished = run.parent / "unfinished"
    (unfinished / "checkpoints").mkdir(parents=True)
    taskless = run.parent / "taskless"
    (taskless / "task.json").mkdir(parents=True)
    places = {"STAGE": unfinished, "TASKLESS": taskless, "FILE": file, "OUT": run / "out", "RUN": run}

    def with_places(text: str) -> str:
        for name, path in places.items():
            text = text.replace(name, str(path))
        return text

    assert main([with_places(word) for word in arguments]) == code
    assert with_places(message) in capsys.readouterr().err
    assert file.read_text() == "kept"


def test_verify_names_the_bad_one_and_exits_74(run, capsys) -> None:
    assert main(["checkpoints", "verify", str(run)]) == 74
    out, err = capsys.readouterr()
    assert f"{stage(run).name}/step-0000000012  whole" in out and "/step-0000000008  BAD: " in out
    assert "rank-00001.safetensors: its sha256 differs from the manifest" in out
    assert "bad checkpoints: 1" in err and len(committed(stage(run) / "checkpoints")) == 3


def test_inspect_prints_the_manifest_and_every_parameter(run, capsys) -> None:
    assert main(["checkpoints", "inspect", str(run), "--step", "4"]) == 0
    out = capsys.readouterr().out
    assert "step          4" in out and "samples_seen  64" in out and "ledger " in out
    (row,) = [line for line in out.splitlines() if line.startswith("head.bias")]
    assert row.split()[1] == "10" and all(f"|{kind}|" in row for kind in ("master", "exp_avg", "exp_avg_sq"))


def test_diff_says_what_changed_between_two_steps(run, capsys) -> None:
    assert main(["checkpoints", "diff", str(run), "--step", "12", "--with-step", "4"]) == 0
    out = capsys.readouterr().out
    assert "step: 4 → 12" in out and "head.bias master: largest difference" in out and "\n  0 of " in out
    assert main(["checkpoints", "diff", str(run), "--step", "4", "--with-step", "8"]) == 74  # a bad one is not compared
    assert main(["checkpoints", "diff", str(run)]) == 64


def test_export_writes_the_weights_that_the_stage_handed_on(run, tmp_path, capsys) -> None:
    assert main(["checkpoints", "export", str(run), "--to", str(tmp_path / "out")]) == 0
    ours, theirs = (models.load_weights(str(folder)) for folder in (tmp_path / "out", stage(run)))
    assert ours[1] == theirs[1] and ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])
    assert main(["checkpoints", "export", str(run)]) == 64


def test_a_wrong_name_says_what_there_is(run, capsys) -> None:
    assert main(["checkpoints", "inspect", str(run), "--step", "5"]) == 64
    assert "no checkpoint of step 5" in (err := capsys.readouterr().err) and "12, 8, 4" in err
