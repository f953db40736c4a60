"""Listing object stores; requests to real servers are in test_cache.py and test_foreign_stores.py."""

import threading

import pytest

from data.errors import DataError
from data.extras.shards.indexing import remote_tars
from data.extras.sources.listing import list_tars
from data.remote.cache import Cache
from data.remote.config import CacheConfig


@pytest.mark.quick
def test_https_cannot_list_files() -> None:
    with pytest.raises(
        DataError, match=r"files cannot be listed over https; name the shards, as in …/train-\{000\.\.099\}\.tar"
    ):
        list_tars("https://example.com/train", 1.0)


@pytest.mark.parametrize("key", ["../a.tar", "x/../../a.tar", "./a.tar"])
def test_tars_with_hostile_names_in_a_bucket_are_not_indexed(key, run, bucket) -> None:
    bucket.put_object(Key=f"{run.removeprefix('s3://images/')}/{key}", Body=b"attack")
    with pytest.raises(DataError, match="unsafe name"):
        remote_tars([f"{run}/**"], Cache(CacheConfig()), 1, threading.Event())


def test_tars_in_capital_letters_in_a_bucket_are_not_ignored_silently(run, bucket) -> None:
    prefix = run.removeprefix("s3://images/")
    for name in ("a.tar", "b.TAR"):
        bucket.put_object(Key=f"{prefix}/{name}", Body=b"tar")
    with pytest.raises(DataError, match=r"'b\.TAR' would be ignored, because names of tars end in \.tar; rename them"):
        list_tars(run, 5.0)
    assert list(list_tars(f"{run}/*.tar", 5.0)) == [f"{run}/a.tar"]
