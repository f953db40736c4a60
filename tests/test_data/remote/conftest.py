"""The shards for tests of remote sets: eight shards of 50 digits."""

from itertools import islice

import pytest

from data.index.index import Index
from data.shards.packing import pack
from data.sources.samples import digits


@pytest.fixture(scope="session")
def local(tmp_path_factory) -> Index:
    return pack(islice(digits(True), 400), tmp_path_factory.mktemp("shards"), shard_samples=50)
