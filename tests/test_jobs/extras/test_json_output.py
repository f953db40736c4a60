"""What --json prints: one document on the real stdout, and the steps derived from the messages of errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.errors import ConfigError, Preempted
from jobs.__main__ import main
from jobs.extras.json_output import error_document, plain
from tests.support.documents import document_of

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[3]

WRITES_EVERYWHERE = """
import os, subprocess, sys
from jobs.answer import Answer
from jobs.extras.json_output import print_document

def command():
    print("printed")
    os.write(1, b"written by C++\\n")
    subprocess.run(["echo", "a child"])
    return Answer({"path": 1})

sys.exit(print_document(["status"], command, lambda error: (error, str(error))))
"""


def test_stdout_has_only_the_document_also_if_libraries_and_children_write() -> None:
    done = subprocess.run([sys.executable, "-c", WRITES_EVERYWHERE], cwd=ROOT, capture_output=True, text=True)
    assert json.loads(done.stdout) == {"schema": "status.1", "code": 0, "path": 1}
    assert sorted(done.stderr.splitlines()) == ["a child", "printed", "written by C++"]


def test_names_that_are_not_utf_8_arrive_unchanged() -> None:
    run = b"/nowhere/\xff"
    done = subprocess.run([sys.executable, "-m", "jobs", "status", run, "--json"], cwd=ROOT, capture_output=True)
    document = json.loads(done.stdout.decode())
    assert os.fsencode(document["what"]) == b"no run at " + run
    assert done.returncode == document["code"] == 64


def test_documents_have_only_json_values() -> None:
    assert plain({"a": Path("x"), 1: (float("nan"), 2.0), "rows": iter([{"b": True}])}) == {
        "a": "x",
        "1": [None, 2.0],
        "rows": [{"b": True}],
    }


@pytest.mark.parametrize(
    ("typed", "message", "steps"),
    [
        (
            "run x.yaml pretrain.optm.lr=1",
            "unknown key pretrain.optm; did you mean 'optim'?",
            [("instead", "run x.yaml pretrain.optim.lr=1")],
        ),
        ("rn x", "No such command 'rn'. Did you mean 'run'?", [("instead", "run x")]),
        ("run smal", "no recipe at smal\n  did you mean small.yaml?", [("instead", "run small.yaml")]),
        (
            "plan x pretrain.batch_size=30",
            "pretrain: batch_size 30 is not a multiple of 16; nearest: 16 or 32",
            [("instead", "plan x pretrain.batch_size=16")],
        ),
        (
            "run x",
            "it has changed\n  to restart it, add --fresh (the old folder is kept)",
            [("instead", "run x --fresh")],
        ),
        ("new x", "x.yaml already exists\n  pass --output OTHER.yaml, or delete it first", [("read", "")]),
        (
            "run x",
            "pretrain: diverged\n  lower optim.lr, for example optim.lr=1e-4, or wait",
            [("instead", "run x pretrain.optim.lr=1e-4")],
        ),
        (
            "run x",
            "2 shards are lost\n  or train without them: 'pretrain.data.drop=[a.tar,b.tar]'",
            [("instead", "run x 'pretrain.data.drop=[a.tar,b.tar]'")],
        ),
        (
            "run x",
            "owned\n  to watch it, run python -m jobs status r; to stop it, run python -m jobs stop r",
            [("first", "status r"), ("first", "stop r")],
        ),
        ("run x", "no run\n  to start one, run python -m jobs run RECIPE", [("read", "")]),
        ("run x", "gone\n  expected a folder written by `python -m jobs index`", []),
        ("run x", "stuck\n  wait a minute, then run the same command again", [("repeat", "")]),
        ("run x", "no such command\n  for help, run python -m jobs run --help", []),
    ],
)
def test_steps_come_from_the_lines_of_a_message(typed: str, message: str, steps: list[tuple[str, str]]) -> None:
    document = error_document(ConfigError(message), message, typed.split())
    found = [(step["do"], step.get("command", "").removeprefix("python -m jobs ")) for step in document["next"]]
    assert found == steps
    assert document["what"] == message.splitlines()[0]


@pytest.mark.parametrize(
    ("message", "step"),
    [
        (
            "No space left on device: /data/run/x\n  free some space",
            {"do": "fix", "need": "space", "path": "/data/run/x", "text": "free some space"},
        ),
        (
            "Environment variable 'SHARDS' not found\n  set it",
            {"do": "fix", "need": "variable", "name": "SHARDS", "text": "set it"},
        ),
        (
            "s3://b/run: denied: the credentials have expired",
            {
                "do": "fix",
                "need": "credentials",
                "path": "s3://b/run",
                "text": "s3://b/run: denied: the credentials have expired",
            },
        ),
    ],
)
def test_missing_things_outside_patchline_have_a_need(message: str, step: dict[str, str]) -> None:
    assert error_document(ConfigError(message), message, ["run", "x"])["next"] == [step]


def test_typing_error_in_a_recipe_is_a_step_that_edits_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.touch()
    message = "unknown key pretrain.lss; did you mean 'loss'?"
    (step,) = error_document(ConfigError(message), message, ["run", str(recipe)])["next"]
    assert (step["do"], step["path"], step["replace"], step["by"]) == ("edit", str(recipe), "lss", "loss")


def test_stopped_run_is_repeated() -> None:
    document = error_document(Preempted("stopped"), "stopped", ["run", "x"])
    assert (document["code"], document["next"][0]["do"]) == (75, "repeat")


def test_usage_errors_and_bugs_are_documents_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert document_of(["status", "/nowhere"])["code"] == 64
    assert document_of(["stauts", "/nowhere"])["next"][0]["command"] == "python -m jobs status /nowhere --json"
    monkeypatch.setattr("jobs.commands.status.status_of", lambda run: 1 // 0)
    assert document_of(["status", "."])["why"].startswith("this is a bug in Patchline")


def test_help_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--help"]) == 0
    assert "--json" in capsys.readouterr().out
