"""The JSON documents of all commands follow their schemas, and people read lines rendered from the same documents."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from data.files import import_path
from jobs.__main__ import COMMANDS, execute, main
from tests.support.documents import SCHEMAS, document_of
from tests.support.photos import make_photos
from tests.support.recipes import SHORT

ROOT = Path(__file__).parents[1]
WORDS = [words for section in COMMANDS.sections.values() for words in section]


@pytest.mark.quick
@pytest.mark.parametrize("words", [*WORDS, "error", "version"])
def test_every_command_has_a_valid_schema(words: str) -> None:
    schema = json.loads((SCHEMAS / f"{words.replace(' ', '-')}.1.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["schema"] == {"const": f"{words.replace(' ', '-')}.1"}
    assert {"schema", "code"} <= set(schema["required"])


@pytest.mark.quick
def test_there_is_no_schema_without_a_command() -> None:
    names = {f"{words.replace(' ', '-')}.1.json" for words in [*WORDS, "error", "version"]}
    assert {path.name for path in SCHEMAS.iterdir()} == names


@pytest.mark.quick
def test_run_and_status_describe_stages_alike() -> None:
    run, status = (json.loads((SCHEMAS / name).read_text()) for name in ("run.1.json", "status.1.json"))
    assert run["properties"]["stages"] == status["properties"]["stages"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A folder with the recipe of a small run, made by a separate process, and the document that it printed."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "small.yaml").write_text(SHORT.format(data=f"train: {shards}/train, evaluate: {shards}/test"))
    command = [sys.executable, "-m", "jobs", "run", "small.yaml", "--json"]
    environment = os.environ | {"PYTHONPATH": import_path()}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "run.json").write_text(done.stdout)
    assert "loss" in done.stderr, "the log goes to stderr"
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the run as the current directory."""
    monkeypatch.chdir(folder)
    return folder


def test_a_run_prints_only_its_document_with_weights_and_metrics(here: Path) -> None:
    lines = (here / "run.json").read_text().splitlines()
    assert len(lines) == 1
    document = json.loads(lines[0])
    schema = json.loads((SCHEMAS / "run.1.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    (stage,) = document["stages"]
    assert stage["state"] == "done"
    assert (Path(stage["weights"]) / "weights.safetensors").exists()
    recorded = json.loads((Path(stage["folder"]) / "done.json").read_text())["metrics"]
    assert stage["metrics"]["accuracy"] == recorded["accuracy"]
    assert json.loads(lines[0]) | {"schema": "status.1"} == document_of(["status", "runs/small"])


def class_folders(folder: Path) -> None:
    """Write three images of each of two classes."""
    folder.mkdir()
    for name in ("cat", "dog"):
        make_photos(folder / name)
        (folder / name / "notes.txt").unlink()


# Commands that only read, so that both outputs can be compared.
READING = """
--version
status runs/small
checkpoints list runs/small
checkpoints inspect runs/small/step-4
data check {shards}/test
data stats {shards}/test
data list {shards}/test
plan small.yaml
plan small.yaml --resolved
diff small.yaml small.yaml pretrain.optim.lr=2e-3 pretrain.batch_size=32
diff runs/small/pretrain/step-2 runs/small/pretrain/step-4
replay runs/small step=2
"""


@pytest.mark.parametrize("line", READING.strip().splitlines())
def test_people_read_the_lines_of_the_document(line: str, here: Path, shards: Path, capsys: Any) -> None:
    words = line.format(shards=shards).split()
    document = document_of(words)
    answer = execute(words)
    assert answer.render is not None
    rendered = list(answer.render(document))
    capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [part for text in rendered for part in text.split("\n")]


def test_documents_of_commands_that_write(here: Path, shards: Path) -> None:
    verified = document_of(["checkpoints", "verify", "runs/small"])
    assert [entry["problem"] for entry in verified["checkpoints"]] == ["", ""]
    exported = document_of(["export", "runs/small/pretrain/step-2", "weights"])
    assert exported["written"] == "weights"
    assert exported["largest_difference"] == 0
    assert document_of(["diff", "weights", "runs/small/pretrain/step-2"])["tensors"] == []
    converted = document_of(["export", "runs/small/pretrain", "timm", "--format", "timm"])
    assert converted["largest_difference"] == 0
    assert document_of(["import", "timm", "imported"])["parameters"] == converted["parameters"]
    part = document_of(["subset", f"{shards}/test", "--part", ":50%", "--output", "half"])["subsets"][0]
    assert part["samples"] == len(document_of(["data", "list", "half"])["samples"])
    repaired = document_of(["data", "repair", "half", "repaired"])
    assert (repaired["samples"], repaired["excluded"]) == (part["samples"], 0)
    leaks = document_of(["leaks", f"{shards}/train", "--test", "half", "--output", "leaks", "--fits", "1"])
    assert len(json.loads(Path(leaks["leaks"]).read_text())["pairs"]) == leaks["pairs"]
    assert document_of(["report", "runs/small"])["page"] == str(here / "runs" / "small" / "report.html")
    class_folders(here / "photos")
    predicted = document_of(["predict", "runs/small/pretrain", "photos"])
    assert len(predicted["images"]) == len(Path(predicted["table"]).read_text().splitlines()) - 1
    packed = document_of(["pack", "folder", "photos", "packed", "--check"])
    assert packed["check"]["good"] == packed["samples"] == len(predicted["images"])
    analyzed = document_of(["analyze", "runs/small/pretrain", "photos", "--output", "figures"])
    assert all(Path(figure).exists() for figure in analyzed["figures"])
    pruned = document_of(["checkpoints", "prune", "runs/small"])
    assert list(pruned["deleted"].values()) == [[]], "a run keeps two checkpoints anyway"


def test_document_of_new_names_the_next_command(here: Path) -> None:
    class_folders(here / "pets")
    document = document_of(["new", "pets", "--minutes", "1"])
    assert document["next"][0]["command"] == "python -m jobs run pets.yaml"
    assert document["sets"]["train"]["images"] == sum(document["sets"]["train"]["class_counts"].values())


def test_document_of_evaluate_has_the_values_of_its_file(here: Path, shards: Path) -> None:
    words = ["evaluate", "runs/small/pretrain", f"{shards}/test", "cluster.workers=1", "cluster.backend=processes"]
    document = document_of(words)
    (result,) = json.loads(Path(document["evaluation"]).read_text())["results"]
    values = document["results"][0]["values"]
    assert values["top-1"]["value"] == result["values"]["top-1"]["value"]


def test_index_of_foreign_tars(here: Path, shards: Path) -> None:
    tars = sorted(map(str, (shards / "test").glob("*.tar")))
    document = document_of(["index", *tars, "--output", "indexed"])
    assert document["samples"] == len(document_of(["data", "list", document["index"]])["samples"])


@pytest.mark.slow
def test_documents_of_commands_that_repeat_steps(here: Path) -> None:
    assert document_of(["audit", "runs/small", "--share", "1"])["content"]["verdict"] == "equal"
    assert "samples" in document_of(["bisect", "runs/small", "step=4"])["content"]
    (here / "none.txt").touch()
    assert document_of(["without", "runs/small", "--samples", "none.txt"])["content"]["equals_run"]
    assert document_of(["trial", "small.yaml", "run=runs/trial"])["trials"][0]["stage"] == "pretrain"
    assert document_of(["preflight", "small.yaml", "run=runs/preflight"])["checks"]
