"""The number of classes of a pack stage, before it has run."""

from itertools import islice
from pathlib import Path

import pytest

from data.extras.sources.samples import digits
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
