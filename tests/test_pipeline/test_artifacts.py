"""The next stage reads exactly what a stage wrote, bit for bit; otherwise the file is named and nothing starts."""

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

import models
from data.errors import CheckpointError, DataError
from data.seal import seal
from jobs.__main__ import main
from models.weights import files
from pipeline import artifacts, train
from pipeline.checkpoints import manifest
from pipeline.checkpoints.stage_checkpoints import Chosen
from tests.support import campaigns
from tests.support.hostile_names import HOSTILE_NAMES
from tests.support.recipes import TINY

STAGES = ("pretrain", "resize", "finetune", "fewshot")
# No result depends on them, or their records have their own digests (metrics.jsonl).
LOGS = {"log.txt", "metrics.jsonl", "examples.json"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """Return the recipe of a finished run of four stages."""
    folder = tmp_path_factory.mktemp("artifacts")
    recipe = folder / "tiny.yaml"
    recipe.write_text(TINY.format(run=folder / "run", shards=shards))
    assert main(["run", str(recipe)]) == 0
    return recipe


def stage_folder(recipe: Path, name: str) -> Path:
    loaded = campaigns.load(recipe, [])
    return loaded.directory(loaded.stage(name))


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """Change one bit of the file for the duration of the block."""
    original = file.read_bytes()
    damaged = bytearray(original)
    damaged[bit // 8] ^= 1 << bit % 8
    file.write_bytes(damaged)
    yield
    file.write_bytes(original)


def some_bits(file: Path, count: int, seed: int) -> list[int]:
    return random.Random(f"{seed} {file.name}").sample(range(8 * file.stat().st_size), count)


def command(arguments: list[str]) -> int:
    """Return the exit code of a command; if the first word is a kind of stage, of a run of only that stage."""
    if arguments[0] not in STAGES:
        return main(arguments)
    kind, *words = arguments
    return main(["run", *words, "--only", kind])


def refused(arguments: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of a command that must exit with 65 and name the file."""
    capsys.readouterr()
    code = command(arguments)
    said = capsys.readouterr().err
    assert code == 65, (file, code, said)
    assert f"{file} has changed" in said, (file, code, said)
    assert "expected" in said, (file, code, said)
    return said


def test_stage_records_the_sha256_of_every_output_file(made):
    for name in STAGES:
        folder = stage_folder(made, name)
        done = json.loads((folder / "done.json").read_text())
        files = {path.name for path in folder.iterdir() if path.is_file()}
        assert done["files"].keys() == files - LOGS - {"done.json"}, name
        for file, record in done["files"].items():
            digest, _, _ = subprocess.check_output(["sha256sum", folder / file], text=True).partition(" ")
            assert record == {"bytes": (folder / file).stat().st_size, "sha256": digest}


def test_weight_file_names_agree_between_packages():
    """The records use the names without importing the modules that write the files."""
    assert artifacts.WEIGHT_FILES == (files.WEIGHTS, files.CONFIG, files.CLASSES, files.PREPROCESSING)


@pytest.mark.parametrize("flips_per_file", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_flipped_bits_in_outputs_of_a_finished_run_are_detected(made, capsys, flips_per_file):
    folders = sorted(path for path in made.parent.glob("run/*-*") if path.is_dir())
    flips = 0
    for folder in folders:
        for file in sorted(path for path in folder.iterdir() if path.is_file() and path.name not in LOGS):
            for bit in some_bits(file, flips_per_file, seed=11):
                with flipped(file, bit):
                    refused(["run", str(made)], file, capsys)
                flips += 1
    assert flips >= 18 * flips_per_file
    assert main(["run", str(made)]) == 0
    assert capsys.readouterr().out.count("skipped, finished") == len(STAGES)
    assert sorted(path for path in made.parent.glob("run/*-*") if path.is_dir()) == folders, "nothing was started"


def test_flipped_bit_in_any_byte_of_a_record_is_detected(made, tmp_path):
    original = (stage_folder(made, "fewshot") / "done.json").read_bytes()
    file = tmp_path / "done.json"
    for position in range(len(original)):
        damaged = bytearray(original)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        with pytest.raises(artifacts.DataError, match=r"done\.json has changed"):
            artifacts.read_record(file)


def test_remedy_quotes_folder_names_with_blanks(tmp_path):
    folder = tmp_path / "my run" / "pretrain-1a2b3c4d"
    folder.mkdir(parents=True)
    artifacts.write_record(folder / "done.json", {"key": "1a2b"})
    artifacts.write_record(folder / "stage.json", {"key": "1a2b"})
    (folder / "stage.json").write_text((folder / "stage.json").read_text().replace("1a2b", "1a2c"))
    with pytest.raises(artifacts.DataError, match=r"stage\.json has changed") as caught:
        artifacts.read_record(folder / "stage.json")
    subprocess.run(str(caught.value).splitlines()[2].partition("or ")[2], shell=True, check=True)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["weights.safetensors", "model.json"])
def test_every_reader_of_weights_verifies_them(made, tmp_path, capsys, name):
    resized = stage_folder(made, "resize")
    file = resized / name
    cv2.imwrite(str(tmp_path / "photo.png"), np.zeros((24, 24, 3), np.uint8))
    outside = [f"resize.init={resized}", "resize.image_size=16"]
    readers = [
        ["finetune", str(made), "finetune.steps=3"],
        ["fewshot", str(made), "fewshot.probe.shots=[2]"],
        ["resize", str(made), *outside],
        ["export", str(resized), str(tmp_path / "out"), "--format", "timm"],
        ["import", str(resized), str(tmp_path / "out")],
        ["analyze", str(resized), str(tmp_path / "photo.png"), "--output", str(tmp_path / "out")],
    ]
    workers_before = sorted(made.parent.glob("run/*/attempts/*/rank-*"))
    for reader in readers:
        for bit in some_bits(file, 2, seed=12):
            with flipped(file, bit):
                refused(reader, file, capsys)
        assert not (tmp_path / "out").exists()
    assert sorted(made.parent.glob("run/*/attempts/*/rank-*")) == workers_before != [], "no worker was started"

    file.rename(tmp_path / "elsewhere")
    refused(readers[0], file, capsys)
    (tmp_path / "elsewhere").rename(file)


def test_printed_remedy_recreates_the_same_weights(made, tmp_path, shards, capsys):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY.format(run=tmp_path / "run", shards=shards))
    shutil.copytree(made.parent / "run", tmp_path / "run")
    folder = stage_folder(recipe, "pretrain")
    weights = (folder / "weights.safetensors").read_bytes()
    damaged = bytearray(weights)
    damaged[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(damaged)
    said = refused(["run", str(recipe)], folder / "weights.safetensors", capsys)
    (removal,) = [line.partition("or ")[2] for line in said.splitlines() if "or rm -f" in line]
    subprocess.run(removal, shell=True, check=True)
    assert main(["run", str(recipe)]) == 0
    assert "resumed from step 24" in capsys.readouterr().out
    assert (folder / "weights.safetensors").read_bytes() == weights


def test_imported_weights_are_verified_and_missing_digests_are_logged(made, tmp_path, capsys):
    models.save(models.build("mu/8", 24, 10), tmp_path / "bare")
    assert main(["import", str(tmp_path / "bare"), str(tmp_path / "in")]) == 0
    assert f"unverified: {tmp_path / 'bare'} has no recorded digests" in capsys.readouterr().out
    resize = ["resize", str(made), "resize.image_size=16"]
    assert command([*resize, f"resize.init={tmp_path / 'bare'}"]) == 0
    assert f"unverified: {tmp_path / 'bare'} has no recorded digests" in capsys.readouterr().out

    for name in ("weights.safetensors", "model.json", "provenance.json"):
        file = tmp_path / "in" / name
        for bit in some_bits(file, 8, seed=13):
            with flipped(file, bit):
                said = refused([*resize, f"resize.init={tmp_path / 'in'}"], file, capsys)
                assert "import again" in said
    assert command([*resize, f"resize.init={tmp_path / 'in'}"]) == 0
    assert "unverified" not in capsys.readouterr().out


def test_checkpoint_export_has_digests_and_a_sealed_model(made, tmp_path, capsys):
    folder = stage_folder(made, "pretrain")
    export = ["export", f"{folder}/step-24", str(tmp_path / "out")]
    for bit in some_bits(folder / "stage.json", 8, seed=14):
        with flipped(folder / "stage.json", bit):
            refused(export, folder / "stage.json", capsys)
    assert main(export) == 0
    ours, theirs = tmp_path / "out/weights.safetensors", folder / "weights.safetensors"
    assert ours.read_bytes() == theirs.read_bytes()
    with flipped(ours, 8 * ours.stat().st_size - 1):
        refused(["export", str(tmp_path / "out"), str(tmp_path / "x"), "--format", "timm"], ours, capsys)


def test_stage_exports_no_weights_from_a_checkpoint_changed_after_its_commit(made):
    loaded = campaigns.load(made, [])
    folder = loaded.directory(loaded.stage("pretrain"))
    newest = manifest.committed(folder / "checkpoints")[0]
    # The parts of a worker that the export uses; the bit changed during the last evaluation.
    worker: Any = SimpleNamespace(
        job=SimpleNamespace(directory=str(folder)),
        saver=SimpleNamespace(checkpoint_of=lambda step: Chosen(newest.name, newest, manifest.read_manifest(newest))),
        model_config=loaded.stage("pretrain").model,
        hooks=(),
        cfg=loaded.stage("pretrain").config,
    )
    progress: Any = SimpleNamespace(step=24)
    weights = (folder / "weights.safetensors").read_bytes()
    for file in sorted(newest.glob("*.safetensors")):
        with flipped(file, 8 * file.stat().st_size - 1), pytest.raises(CheckpointError, match=file.name):
            train.export_weights(worker, progress)
    assert (folder / "weights.safetensors").read_bytes() == weights


def test_replay_and_status_report_a_changed_record(made, capsys):
    folder = stage_folder(made, "pretrain")
    with flipped(folder / "task.json", 8 * 300):
        refused(["replay", str(folder), "step=3"], folder / "task.json", capsys)
    with flipped(folder / "done.json", 8 * 30):
        assert main(["status", str(folder.parent)]) == 0
        assert f"UNREADABLE: {folder / 'done.json'} has changed" in capsys.readouterr().out


def test_slow_check_is_logged(made, capsys, monkeypatch):
    monkeypatch.setattr(artifacts, "LOG_AFTER_S", 0.0)
    assert main(["run", str(made)]) == 0
    assert f"verified 0.0 GB in {stage_folder(made, 'pretrain')} in 0 s" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if isinstance(name, str)])
def test_record_with_a_name_outside_its_folder_is_refused(name, tmp_path):
    artifacts.write_record(tmp_path / "done.json", {"files": {name: {"bytes": 1, "sha256": "0" * 64}}})
    with pytest.raises(DataError, match=r"done\.json: unsafe name"):
        artifacts.read_done(tmp_path)


def test_record_of_a_newer_version_is_refused_with_what_to_update(tmp_path):
    # Its entries may have other names: "seconds" could be missing.
    (tmp_path / "done.json").write_text(seal({"schema": artifacts.SCHEMA + 1, "duration": 2.0}))
    with pytest.raises(DataError, match=r"done\.json was written by a newer Patchline.*\n.*\n  update this checkout"):
        artifacts.read_done(tmp_path)
    (tmp_path / "done.json").write_text(seal({"schema": "1", "duration": 2.0}))
    with pytest.raises(DataError, match=r"done\.json has schema '1', expected a whole number up to 1"):
        artifacts.read_done(tmp_path)
