"""Listing object stores; requests to real servers are in test_cache.py and test_foreign_stores.py."""

import pytest

from data.errors import DataError
from data.remote.listing import list_tars

pytestmark = pytest.mark.quick


def test_https_cannot_list_files() -> None:
    with pytest.raises(
        DataError, match=r"files cannot be listed over https; name the shards, as in …/train-\{000\.\.099\}\.tar"
    ):
        list_tars("https://example.com/train", 1.0)
