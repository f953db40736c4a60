"""Fixtures for runs in an object store: moto serves the S3 protocol on loopback, and a proxy injects faults."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data import bucket as bucket_module
from data.index.index import Index
from data.remote import urls
from pipeline.checkpoints import saver
from tests.support.shards import digits, index_at, write_set
from tests.support.stores import Proxy, store

BUCKET = "images"


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with store("s3", {}) as proxy:
        yield proxy


@pytest.fixture
def proxy(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Run the store with its proxy; requests are retried immediately, and time out after a second."""
    monkeypatch.setattr(bucket_module, "BACKOFF_S", 0.001)
    monkeypatch.setattr(bucket_module, "TIMEOUT_S", 1.0)
    urls._denied_since.clear()
    monkeypatch.setattr(saver, "dist", torch.distributed)  # savers.WorkerGroup puts its own in its place
    yield server
    server.fault_of_any = lambda method, path: None
    server.fault = lambda path: None


@pytest.fixture
def run(proxy: Proxy, tmp_path: Path) -> str:
    """Return a run's URL, unique to this test."""
    return f"s3://{BUCKET}/runs/{tmp_path.name}"


@pytest.fixture
def bucket(proxy: Proxy) -> Any:
    import boto3

    return boto3.resource("s3").Bucket(BUCKET)


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Return eight shards of 50 digits."""
    return write_set(islice(digits(True), 400), tmp_path_factory.mktemp("shards"), shard_samples=50)


@pytest.fixture(scope="module", params=["s3", "gs", "az"])
def storage(request, local, tmp_path_factory):
    """Serve the shards on loopback with a scheme's protocol, through a proxy that injects faults."""
    files = {f"set/{shard.name}": Path(local.location(n)) for n, shard in enumerate(local.shards)}
    files |= {"mixed/a.tar": Path(local.location(0)), "mixed/b.tar.gz": Path(local.location(1))}
    with store(request.param, files) as proxy:
        proxy.set = f"{request.param}://images/set"
        proxy.index = index_at(local, proxy.set, tmp_path_factory.mktemp("i"))
        yield proxy


@pytest.fixture
def faulty(storage):
    storage.gets.clear()
    urls.forget_credentials()
    urls._denied_since.clear()
    yield storage
    storage.fault = lambda path: None
