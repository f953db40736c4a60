"""Training images with features similar to a test image's; NumPy computes the expected features."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.extras.leaks.search import key_of
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample
from data.index.index import Index
from pipeline.extras.leak_embedding import find_similar

pytestmark = pytest.mark.quick

SIDE = 8


class Quarters(nn.Module):
    """A model whose features (b, 4) are the means of the quarters of the normalised image."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(image_size=(SIDE, SIDE))
        self.calls = 0

    def features(self, images: Tensor) -> Tensor:
        self.calls += 1
        half = SIDE // 2
        return images.reshape(len(images), 3, 2, half, 2, half).mean((1, 3, 5)).flatten(1)


def png(quarters: list[int]) -> bytes:
    """Return an image whose quarters have these grey values."""
    grey = np.kron(np.array(quarters, np.uint8).reshape(2, 2), np.ones((SIDE // 2, SIDE // 2), np.uint8))
    return cv2.imencode(".png", np.repeat(grey[..., None], 3, 2))[1].tobytes()


def packed(folder: Path, images: list[bytes]) -> Index:
    samples = [Sample(f"s{number}", image, (0,)) for number, image in enumerate(images)]
    return pack(samples, folder, name=folder.name, shard_samples=2)


TRAIN = [[255, 0, 0, 0], [0, 255, 0, 0], [255, 255, 0, 0], [250, 10, 0, 5], [0, 0, 0, 255]]
TEST = [[255, 0, 0, 0], [0, 0, 128, 128]]


def cosine(first: list[int], second: list[int]) -> float:
    a = np.array(first) / 127.5 - 1
    b = np.array(second) / 127.5 - 1
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Index, Index]:
    train = [png(quarters) for quarters in TRAIN]
    train.append(b"\xff\xd8 no jpeg")
    return packed(tmp_path / "train", train), packed(tmp_path / "test", [png(quarters) for quarters in TEST])


def search(model: nn.Module, sets: tuple[Index, Index], folder: Path, least: float) -> dict[tuple[int, int], float]:
    """Return the distances of the matches, by the numbers of the training image and of the test image."""
    train, test = sets
    found = find_similar(
        model, ("weights", "0" * 64), [train], [test], folder, cosine=least, device=torch.device("cpu")
    )
    assert found.settings["cosine"] == least
    distances = {}
    for number, shard in enumerate(train.shards):
        for match in found.records[key_of(shard)].matches:
            distances[2 * number + match.row, match.test] = match.distance
    return distances


def test_pairs_with_the_least_cosine_are_found_with_their_distance(sets: tuple[Index, Index], tmp_path: Path) -> None:
    expected = {}
    for row, train in enumerate(TRAIN):
        for column, test in enumerate(TEST):
            if cosine(train, test) >= 0.3:
                expected[row, column] = 1 - cosine(train, test)
    assert len(expected) > 2
    assert search(Quarters(), sets, tmp_path, 0.3) == pytest.approx(expected, abs=2e-4)


def test_finished_shards_are_not_searched_again(sets: tuple[Index, Index], tmp_path: Path) -> None:
    model = Quarters()
    first = search(model, sets, tmp_path, 0.9)
    calls = model.calls
    assert search(model, sets, tmp_path, 0.9) == first
    assert model.calls == calls


def test_undecodable_images_are_counted_and_match_nothing(sets: tuple[Index, Index], tmp_path: Path) -> None:
    train, test = sets
    options: dict[str, Any] = {"cosine": -1.0, "device": torch.device("cpu")}
    found = find_similar(Quarters(), ("weights", "0" * 64), [train], [test], tmp_path, **options)
    last = found.records[key_of(train.shards[2])]
    assert last.bad == 1
    assert {match.row for match in last.matches} == {0}
