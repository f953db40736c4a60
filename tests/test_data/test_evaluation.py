"""A pass over a set has every sample once, and the same batches with any number of workers."""

import numpy as np
import pytest

from data.evaluation import EvaluationSet
from tests.support.shards import digits, write_set

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    samples = list(digits(train=False, image_size=16))[:23]
    return write_set(samples, tmp_path_factory.mktemp("set"), name="test", shard_samples=9)


@pytest.mark.parametrize(("world", "batch_size"), [(1, 4), (2, 4), (3, 5), (4, 10)])
def test_all_workers_together_give_every_sample_once_in_equally_many_batches(index, world, batch_size):
    batches_of_worker = [
        list(EvaluationSet(index, "resize(16)", batch_size=batch_size, rank=rank, world=world)) for rank in range(world)
    ]
    assert len({len(batches) for batches in batches_of_worker}) == 1
    ids = []
    for batches in batches_of_worker:
        for batch in batches:
            assert batch.images.shape == (batch_size, 3, 16, 16)
            ids += batch.ids[batch.mask].tolist()
    by_hand = [[shard, sample] for shard, samples in enumerate((9, 9, 5)) for sample in range(samples)]
    assert ids == by_hand


def test_a_row_has_the_pixels_and_label_of_its_sample(index):
    (batch,) = EvaluationSet(index, "resize(16)", batch_size=23)
    for row, sample in enumerate(list(digits(train=False, image_size=16))[:23]):
        assert batch.labels[row].tolist() == list(sample.labels)
    assert batch.mask.all()
    first = batch.images[0].permute(1, 2, 0).numpy()
    assert np.ptp(first.astype(int)) > 100, "a digit has dark and bright pixels"


def test_padding_is_marked_in_every_field(index):
    *_, last = EvaluationSet(index, "resize(16)", batch_size=10)
    assert last.mask.tolist() == [True] * 3 + [False] * 7
    assert last.ids[3:].tolist() == [[-1, -1]] * 7
    assert last.labels[3:].tolist() == [[-1]] * 7
    assert int(last.images[3:].max()) == 0
