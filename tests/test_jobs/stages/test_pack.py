"""Warnings of a finished pack stage whose source folder has changed."""

import errno
import os
import time
from itertools import islice
from pathlib import Path

import pytest

from data.sources.samples import digits
from jobs.__main__ import main
from pipeline import artifacts

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
def test_images_added_after_packing_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = list(digits(train=False, image_size=16))[:5]
    for number, sample in enumerate(samples[:4]):
        path = tmp_path / "images" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.image)
    (tmp_path / "images" / "class0" / "torn.jpg").write_bytes(b"\xff\xd8 no jpeg")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    assert main(["run", str(recipe)]) == 0
    assert main(["run", str(recipe)]) == 0
    later = time.time() + 10
    os.utime(tmp_path / "images" / "class0", (later, later))  # a change without a new image
    assert main(["run", str(recipe)]) == 0
    assert "was packed" not in capsys.readouterr().out

    (tmp_path / "images" / "class0" / "new.png").write_bytes(samples[4].image)
    for command in ("plan", "run"):
        assert main([command, str(recipe)]) == 0
        out = capsys.readouterr().out
        assert f"{tmp_path}/images now has 6 images, but train was packed from 5 and is not packed again" in out

    # An unreadable source, for example on a lost file server, does not matter after packing.
    def stale(*args: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("jobs.stages.pack.images_below", stale)
    assert main(["run", str(recipe)]) == 0
    assert "was packed" not in capsys.readouterr().out


@pytest.mark.quick
def test_a_done_json_without_the_time_of_packing_is_readable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = next(iter(digits(train=False, image_size=16))).image
    path = tmp_path / "images" / "class0" / "0.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(image)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    assert main(["run", str(recipe)]) == 0
    (done,) = (tmp_path / "run").glob("shards-*/done.json")
    values = artifacts.read_record(done)
    del values["finished"]
    artifacts.write_record(done, values)
    path.with_name("1.png").write_bytes(image)
    later = time.time() + 10
    os.utime(path.parent, (later, later))
    assert main(["run", str(recipe)]) == 0
    assert "now has 2 images, but train was packed from 1 and" in capsys.readouterr().out


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
