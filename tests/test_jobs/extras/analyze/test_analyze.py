"""`jobs analyze` draws figures, and its numbers equal those of `models.extras.analysis`."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import models
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from jobs.__main__ import main
from jobs.extras.analyze.analyze import draw_attention, draw_positions, encoded_images, relative_range
from models.extras import analysis
from tests.support.photos import make_photos, save_model

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos")


def test_analyze_writes_figures_and_numbers_for_a_folder_of_images(tmp_path, photos, capsys):
    weights, output = save_model(tmp_path, depth=3, registers=1), tmp_path / "out"
    assert main(["analyze", weights, str(photos), "--output", str(output), "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "analysed 2 images of 16×24 px across 3 layers" in out
    assert "× the mean of its image: nearly uniform" in out, "the weights are random"
    numbers = json.loads((output / "analysis.json").read_text())
    assert [Path(name).name for name in numbers["images"]] == ["0.png", "1.png"]
    assert np.shape(numbers["attention_distance"]) == (3, 2)
    assert np.shape(numbers["attention_maps"]) == (2, 2, 3)
    similarity = analysis.position_similarity(models.load(weights)).numpy()
    np.testing.assert_allclose(numbers["position_similarity"], similarity, rtol=1e-5)
    assert np.shape(numbers["explained_variance"]) == (28,)
    for picture in ("attention.png", "inside.png"):
        pixels = cv2.imread(str(output / picture))
        assert pixels is not None, picture
        assert pixels.std() > 10, picture


def test_distances_are_means_over_the_images(tmp_path, photos):
    weights = save_model(tmp_path, depth=2)
    distances = []
    for images in ([photos / "0.png"], [photos / "1.png"], [photos / "0.png", photos / "1.png"]):
        assert main(["analyze", weights, *map(str, images), "--output", str(tmp_path / "out")]) == 0
        numbers = json.loads((tmp_path / "out/analysis.json").read_text())
        distances.append(np.array([numbers["attention_distance"], numbers["attention_distance_renormalised"]]))
    np.testing.assert_allclose((distances[0] + distances[1]) / 2, distances[2], rtol=1e-5)
    assert not np.allclose(distances[0], distances[1])
    assert (distances[2][1] > distances[2][0]).all()


def test_a_hybrid_without_position_embeddings_has_no_similarity_and_no_filters(tmp_path, photos):
    weights = save_model(tmp_path, "R26+S/32", 64, depth=1, positions="relative", stem=(1,), stem_width=32)
    assert main(["analyze", weights, str(photos), "--output", str(tmp_path / "out")]) == 0
    numbers = json.loads((tmp_path / "out/analysis.json").read_text())
    assert numbers["position_similarity"] is None
    assert numbers["explained_variance"] is None


def test_attention_figure_has_room_for_every_image_and_the_titles(tmp_path):
    image = np.zeros((24, 16, 3), np.uint8)
    draw_attention([image] * 3, torch.ones(3, 3, 2), tmp_path / "attention.png")
    # By hand, at 200 pixels per inch and 3.25 inches for two images of 16 pixels and a gap of 1: three images of 24
    # pixels with two gaps, and 0.2 inches for the titles.
    height, width = cv2.imread(str(tmp_path / "attention.png")).shape[:2]
    assert width == 650
    assert height == pytest.approx(200 * (3.25 * 74 / 33 + 0.2), abs=1)
    draw_attention([image] * 8, torch.ones(8, 3, 2), tmp_path / "8.png")
    height, width = cv2.imread(str(tmp_path / "8.png")).shape[:2]
    assert width == 200 * 6.75, "both columns: eight images in one column would be higher than a page"
    assert height == pytest.approx(200 * (6.75 * (4 * 25 - 1) / (4 * 17 - 1) + 0.2), abs=1)


def test_the_range_of_a_map_is_relative_to_its_mean():
    assert relative_range(torch.tensor([[1.0, 2.0], [4.0, 1.0]])) == (0.5, 2.0)
    assert relative_range(torch.full((2, 2), 0.5)) == (1.0, 1.0), "uniform"


def test_missing_position_embeddings_are_noted_in_the_middle_of_their_axes():
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    draw_positions(figure, axes, None)
    (note,) = axes.texts
    assert (note.get_position(), note.get_ha()) == ((0.5, 0.5), "center")


def test_a_limited_selection_of_images_covers_all_folders(photos):
    (photos / "z").mkdir()
    for number in range(3):
        (photos / "z" / f"{number}.png").write_bytes(b"")
    names = [Path(name).relative_to(photos).as_posix() for name, _ in encoded_images([str(photos)], 2)]
    assert names == ["0.png", "z/0.png"]
    assert len(list(encoded_images([str(photos)], 6))) == len(list(encoded_images([str(photos)], 9))) == 6


def test_images_are_read_from_shards(tmp_path):
    pack(digits(train=False, image_size=16), tmp_path / "shards", name="test")
    shard = str(tmp_path / "shards/test-000000.tar")
    assert main(["analyze", save_model(tmp_path), shard, "--limit", "3", "--output", str(tmp_path / "out")]) == 0
    names = json.loads((tmp_path / "out/analysis.json").read_text())["images"]
    assert len(names) == 3
    assert all(name.startswith("test-000000.tar:") for name in names)


def test_samples_with_equal_names_in_two_folders_are_all_analysed(tmp_path):
    shards = []
    for folder in ("first", "second"):
        pack(digits(train=False, image_size=16), tmp_path / folder, name="test")
        shards.append(str(tmp_path / folder / "test-000000.tar"))
    assert main(["analyze", save_model(tmp_path), *shards, "--limit", "720", "--output", str(tmp_path / "out")]) == 0
    names = json.loads((tmp_path / "out/analysis.json").read_text())["images"]
    in_a_shard = sum(1 for _ in digits(train=False, image_size=16))
    assert len(names) == min(720, 2 * in_a_shard)
    assert len(set(names)) < len(names)
