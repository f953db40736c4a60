"""Features stored by rank 0: the same at any world size, in the order of the set, on a disk with enough room."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.evaluation import EvaluationSet
from data.index.index import Index
from pipeline.evaluation import features
from pipeline.evaluation.features import FeatureStore, collect
from tests.support import evaluated_sets
from tests.support.evaluated_sets import CPU, Sums, unreadable

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def with_a_bad_one(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return evaluated_sets.with_a_bad_one(tmp_path_factory.mktemp("set"))


def collected(index: Index, world: int, folder: Path) -> FeatureStore:
    """Return rank 0's store after every rank has sent its part, one after another."""
    torch.manual_seed(0)
    model = Sums()
    store = FeatureStore(index, folder)
    for rank in range(world):
        samples = EvaluationSet(index, "resize(16)", batch_size=16, rank=rank, world=world)
        collect(model, store.watching(samples), store, torch.float32, CPU, best=5)
    return store


def test_rank_0_stores_the_same_bits_at_any_world_size(with_a_bad_one: Index, tmp_path: Path) -> None:
    alone = collected(with_a_bad_one, 1, tmp_path)
    assert alone.rows.tolist() == [row for row in range(150) if row != 77], "every good sample once, in order"
    for world in (2, 3, 4, 16):
        store = collected(with_a_bad_one, world, tmp_path)
        assert np.array_equal(store.rows, alone.rows)
        assert np.array_equal(store.labels, alone.labels)
        assert torch.equal(store.features(store.rows), alone.features(alone.rows))
        assert np.array_equal(store.predictions, alone.predictions)
    assert not list(tmp_path.iterdir()), "the file has no name: nothing is left behind"


def test_rank_0_receives_the_batches_of_all_ranks(
    with_a_bad_one: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send ten batches from three ranks, two of them padding on the last rank; the other ranks store nothing."""
    alone = collected(with_a_bad_one, 1, tmp_path)
    torch.manual_seed(0)
    model = Sums()
    sent: dict[int, deque[torch.Tensor]] = {1: deque(), 2: deque()}
    for rank in (1, 2, 0):
        group = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda rank=rank: rank, get_world_size=lambda: 3)
        group.send = lambda tensor, to, rank=rank: sent[rank].append(tensor.clone())
        group.recv = lambda tensor, source: tensor.copy_(sent[source].popleft())
        monkeypatch.setattr(features, "dist", group)
        store = FeatureStore(with_a_bad_one, tmp_path)
        samples = EvaluationSet(with_a_bad_one, "resize(16)", batch_size=16, rank=rank, world=3)
        collect(model, store.watching(samples), store, torch.float32, CPU, best=5)
        assert (len(store.rows) > 0) == (rank == 0)
    assert not sent[1]
    assert not sent[2]
    assert np.array_equal(store.rows, alone.rows)
    assert torch.equal(store.features(store.rows), alone.features(alone.rows))
    assert np.array_equal(store.labels, alone.labels)
    assert np.array_equal(store.predictions, alone.predictions)


@pytest.mark.parametrize(("count", "size"), [(12, 4), (13, 4), (11, 4), (3, 4), (4, 4), (5, 1), (0, 4)])
def test_blocks_contain_every_row_once_in_order(count: int, size: int, tmp_path: Path) -> None:
    features = np.random.default_rng(6).normal(size=(20, 3)).astype(np.float32)
    store = unreadable(features, np.zeros(20, int), tmp_path, [2, 9])
    assert [place for place, _ in store.blocks(size=18)] == [slice(0, 18)]
    for rows in (store.rows[:count], np.random.default_rng(count).permutation(store.rows)[:count]):
        places = []
        blocks = [np.empty((0, 3), np.float32)]
        for place, block in store.blocks(rows, size):
            places.append((place.start, place.stop))
            blocks.append(block.numpy())
        assert places == [(first, min(first + size, count)) for first in range(0, count, size)]
        assert np.array_equal(np.concatenate(blocks), features[rows])


def test_full_disk_is_detected_at_the_first_batch(
    with_a_bad_one: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    store = FeatureStore(with_a_bad_one, tmp_path)
    samples = EvaluationSet(with_a_bad_one, "resize(16)", batch_size=16)
    passed = 0
    with pytest.raises(OSError, match="cannot keep features: No space left on device") as refusal:
        for batch in store.watching(samples):
            passed += 1
            store.keep(torch.arange(16), batch.labels, torch.ones(16, 4))
    assert passed == 1
    assert refusal.value.filename == str(tmp_path)
