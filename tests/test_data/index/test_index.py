"""The content of an index of 3, 2 and 4 samples, counted by hand."""

from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.index.index import exclude, join, shards_called
from tests.support.shards import digits, write_set

pytestmark = pytest.mark.quick


@pytest.fixture
def index(tmp_path):
    return write_set(list(digits(train=False, image_size=16))[:9], tmp_path / "set", name="t", shard_samples=4)


def test_rows_are_numbered_shard_after_shard(index):
    assert index.shard_samples.tolist() == [4, 4, 1]
    assert index.starts.tolist() == [0, 4, 8, 9]
    assert index.rows(1) == slice(4, 8)
    assert index.samples == 9
    assert index.bytes == sum(path.stat().st_size for path in Path(index.directory).glob("*.tar"))


def test_a_shard_lies_in_the_directory_of_the_set(index):
    assert index.location(2) == f"{index.directory}/t-000002.tar"
    assert index.numbers == {"t-000000.tar": 0, "t-000001.tar": 1, "t-000002.tar": 2}
    assert not index.remote


def test_joined_sets_follow_each_other(index, tmp_path):
    other = write_set(list(digits(train=True, image_size=16))[:5], tmp_path / "other", name="o", shard_samples=4)
    both = join([index, other], [1.0, 1.0])
    assert both.shard_samples.tolist() == [4, 4, 1, 4, 1]
    assert both.location(3) == f"{other.directory}/o-000000.tar"
    assert both.table(4)["key"].tolist() == other.table(1)["key"].tolist()
    assert shards_called("o-000001.tar", [index, other])
    assert not shards_called("x.tar", [index, other])


def test_an_excluded_shard_keeps_its_number_and_loses_its_samples(index):
    (rest,) = exclude([index], ["t-000001.tar"])
    assert rest.shard_samples.tolist() == [4, 0, 1]
    assert rest.starts.tolist() == [0, 4, 4, 5]


def test_altered_table_is_refused_with_the_command_that_recreates_it(index):
    path = index.tables / "t-000001.npy"
    table = np.load(path)
    table["key"][0] = b"other"
    np.save(path, table)
    assert len(index.table(0)) == 4
    with pytest.raises(
        DataError, match=r"t-000001.npy: not a valid table of .*altered or replaced\n.*\n  run python -m jobs index"
    ):
        index.table(1)
