"""The shards that the tests of remote sets serve: eight, of 50 digits each."""

from itertools import islice

import pytest

from data.index.index import Index
from data.shards.packing import pack
from data.sources.samples import digits


@pytest.fixture(scope="session")
def local(tmp_path_factory) -> Index:
    return pack(islice(digits(True), 400), tmp_path_factory.mktemp("shards"), shard_samples=50)
