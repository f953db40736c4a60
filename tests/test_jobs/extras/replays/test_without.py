"""The samples that `without` removes, as ranges; test_replays.py repeats runs without them."""

import pytest

from data.errors import DataError
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from data.index.index import Index
from jobs.extras.replays.without import masked_ranges

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Seven samples in shards of 3, 3 and 1."""
    samples = list(digits(train=False, image_size=16))[:7]
    return pack(samples, tmp_path_factory.mktemp("set"), name="t", shard_samples=3)


def test_listed_samples_become_ranges_of_their_shards(index, tmp_path) -> None:
    keys = [sample.key for sample in list(digits(train=False, image_size=16))[:7]]
    (tmp_path / "bad.txt").write_text("\n".join([keys[1], keys[2], keys[4], keys[6]]))
    # [epoch (0: every), shard, first sample, the sample after the last]
    assert masked_ranges(index, str(tmp_path / "bad.txt"), []) == [[0, 0, 1, 3], [0, 1, 1, 2], [0, 2, 0, 1]]


def test_a_shard_is_one_range(index) -> None:
    assert masked_ranges(index, None, ["t-000001.tar"]) == [[0, 1, 0, 3]]


def test_an_empty_list_removes_nothing(index, tmp_path) -> None:
    (tmp_path / "none.txt").write_text("\n")
    assert masked_ranges(index, str(tmp_path / "none.txt"), []) == []


def test_an_unknown_shard_is_refused_with_an_example(index) -> None:
    with pytest.raises(
        DataError,
        match=r"--shards t-9\.tar matches 0 shards of the data set\n  expected exactly one: for example .*tar",
    ):
        masked_ranges(index, None, ["t-9.tar"])
