"""`jobs analyze`: the pictures are drawn, the numbers are those of the analysis, what cannot be is refused."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import models
from data.shards.packing import pack
from data.sources.samples import digits
from jobs.__main__ import main
from jobs.extras.analyze.analyze import encoded_images
from models.extras import analysis

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of three images of other sizes than the models take, and a file that is none."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 30, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), pixels)
    (folder / "notes.txt").write_text("no image")
    return folder


def saved(folder: Path, name: str = "mu/8", image_size=(16, 24), **config) -> str:
    torch.manual_seed(0)
    models.save(models.build(name, image_size, 5, **config), folder / "weights")
    return str(folder / "weights")


def test_pictures_and_numbers_of_a_folder_of_images(tmp_path, photos, capsys):
    weights, output = saved(tmp_path, depth=3, registers=1), tmp_path / "out"
    assert main(["analyze", weights, str(photos), "--output", str(output), "--limit", "2"]) == 0
    assert "2 images of 16×24 px through 3 layers" in capsys.readouterr().out
    numbers = json.loads((output / "analysis.json").read_text())
    assert [Path(name).name for name in numbers["images"]] == ["0.png", "1.png"]
    assert np.shape(numbers["attention_distance"]) == (3, 2) and np.shape(numbers["attention_maps"]) == (2, 2, 3)
    similarity = analysis.position_similarity(models.load(weights)).numpy()
    np.testing.assert_allclose(numbers["position_similarity"], similarity, rtol=1e-5)
    assert np.shape(numbers["explained_variance"]) == (28,)
    for picture in ("attention.png", "inside.png"):
        pixels = cv2.imread(str(output / picture))
        assert pixels is not None and pixels.std() > 10, picture


def test_distances_are_means_over_the_images(tmp_path, photos):
    weights = saved(tmp_path, depth=2)
    found = []
    for images in ([photos / "0.png"], [photos / "1.png"], [photos / "0.png", photos / "1.png"]):
        assert main(["analyze", weights, *map(str, images), "--output", str(tmp_path / "out")]) == 0
        numbers = json.loads((tmp_path / "out/analysis.json").read_text())
        found.append(np.array([numbers["attention_distance"], numbers["attention_distance_renormalised"]]))
    np.testing.assert_allclose((found[0] + found[1]) / 2, found[2], rtol=1e-5)
    assert not np.allclose(found[0], found[1]) and (found[2][1] > found[2][0]).all()


def test_a_hybrid_without_tables_shows_what_it_has(tmp_path, photos):
    weights = saved(tmp_path, "R26+S/32", 64, depth=1, positions="relative", stem=(1,), stem_width=32)
    assert main(["analyze", weights, str(photos), "--output", str(tmp_path / "out")]) == 0
    numbers = json.loads((tmp_path / "out/analysis.json").read_text())
    assert numbers["position_similarity"] is None and numbers["explained_variance"] is None


def test_of_more_images_some_of_every_class_are_taken(photos):
    (photos / "z").mkdir()
    for number in range(3):
        (photos / "z" / f"{number}.png").write_bytes(b"")
    names = [Path(name).relative_to(photos).as_posix() for name, _ in encoded_images([str(photos)], 2)]
    assert names == ["0.png", "z/0.png"]
    assert len(list(encoded_images([str(photos)], 6))) == len(list(encoded_images([str(photos)], 9))) == 6


def test_images_come_out_of_shards_too(tmp_path):
    pack(digits(train=False, image_size=16), tmp_path / "shards", name="test")
    shard = str(tmp_path / "shards/test-000000.tar")
    assert main(["analyze", saved(tmp_path), shard, "--limit", "3", "--output", str(tmp_path / "out")]) == 0
    names = json.loads((tmp_path / "out/analysis.json").read_text())["images"]
    assert len(names) == 3 and all(name.startswith("test-000000.tar:") for name in names)
