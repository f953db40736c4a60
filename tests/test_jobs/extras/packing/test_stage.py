"""Stages that pack: what is known before they run, and how they resume."""

import json
import os
import shutil
import signal
from itertools import islice
from pathlib import Path

import pytest

from data.extras.shards.packing import pack
from data.extras.sources.samples import DIGITS, digits
from data.index.document import load_index
from jobs.__main__ import main

RECIPE = """
run: {folder}/run
cluster: {{workers: 1, backend: processes}}
shards: {{kind: pack, sets: {{train: {{path: {folder}/images}}}}}}
"""
PART = """
parts: {kind: pack, sets: {train: {source: subset, path: "@shards/train", part: ":80%", seed: 0}}}
pretrain:
  data: {train: "@parts/train"}
  model: {name: mu/8, image_size: 16, classes: 3}
  loss: softmax
  steps: 2
  batch_size: 4
  micro_batch: 4
  precision: fp32
"""


@pytest.mark.quick
def test_classes_of_a_subset_are_known_before_packing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, sample in enumerate(islice(digits(train=False, image_size=16), 9)):
        path = tmp_path / "images" / f"class{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.image)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path) + PART)
    assert main(["run", str(recipe), "pretrain.model.classes=2"]) == 65
    assert "set pretrain.model.classes=3" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("shards-*"))


def test_source_images_are_required_only_before_packing(tmp_path, capsys):
    images = tmp_path / "images"
    recipe = tmp_path / "pack.yaml"
    recipe.write_text(f"run: {tmp_path}/run\nshards: {{kind: pack, sets: {{train: {{path: {images}}}}}}}\n")
    assert main(["plan", str(recipe)]) == 0
    assert f"{images}" in capsys.readouterr().out.partition("still missing")[2]
    assert main(["run", str(recipe)]) == 65
    assert f"shards.sets.train.path: source folder: no file or folder at {images}" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("shards-*"))

    for sample in islice(digits(train=True, image_size=16), 4):
        path = images / f"class-{sample.labels[0]}" / f"{sample.key}.{sample.extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.read())
    assert main(["run", str(recipe)]) == 0
    shutil.rmtree(images)
    capsys.readouterr()
    assert main(["plan", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "finished, would be skipped" in out
    assert "MISSING" not in out
    assert main(["run", str(recipe)]) == 0

    # `plan` announces as skipped only the stages that `run` would skip.
    (record,) = (tmp_path / "run").glob("shards-*/provenance.json")
    record.write_bytes(record.read_bytes().replace(b"shards", b"shard5", 1))
    said = []
    for command in ("plan", "run"):
        capsys.readouterr()
        assert main([command, str(recipe)]) == 65
        lines = capsys.readouterr().err.splitlines()
        said.append("\n".join(line for line in lines if not line.startswith("plan: ")))  # without its progress
    assert "provenance.json has changed" in said[0]
    assert said[0] == said[1]


def test_an_interrupted_pack_stage_resumes_and_makes_the_same_data_set(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "pack.yaml"
    recipe.write_text(
        f"run: {tmp_path}/run\n"
        "shards: {kind: pack, shard_samples: 100, sets: {train: {source: digits, image_size: 16}}}\n"
    )

    def with_a_signal(cfg, numbering):
        for number, sample in enumerate(digits(train=True, image_size=16)):
            if number == 350:
                os.kill(os.getpid(), signal.SIGTERM)
            yield sample

    with monkeypatch.context() as patch:
        patch.setattr("jobs.extras.packing.stage.samples_of", with_a_signal)
        assert main(["run", str(recipe)]) == 75
    said = capsys.readouterr()
    assert "stopped by SIGTERM; " in said.err
    assert "is kept, run the same command again" in said.err
    (folder,) = (tmp_path / "run").glob("shards-*")
    assert len(list(folder.glob("train/train-*.tar"))) <= 3, "the fourth was being filled"
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 75

    assert main(["run", str(recipe)]) == 0
    expected = pack(digits(train=True, image_size=16), tmp_path / "undisturbed", shard_samples=100, names=DIGITS)
    assert load_index(folder / "train").digest == expected.digest
