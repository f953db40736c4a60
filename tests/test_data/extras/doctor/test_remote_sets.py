"""The data check reads shards in an object store, and reports the ones that it cannot download."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from data.extras.doctor.doctor import check
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from jobs.__main__ import main
from tests.support.stores import Proxy, store


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Proxy]:
    """Serve eight shards of 50 digits with the protocol of S3, through a proxy that injects faults."""
    local = pack(islice(digits(True), 400), tmp_path / "shards", shard_samples=50)
    files = {f"set/{shard.name}": Path(local.location(n)) for n, shard in enumerate(local.shards)}
    with store("s3", files) as proxy:
        proxy.index = build_index(local.directory, output=tmp_path / "index", name="train", at="s3://images/set")
        yield proxy


def test_the_doctor_looks_at_remote_sets_too(faulty, tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path))
    gone = replace(faulty.index.shards[0], name="absent.tar", sha256="0" * 64)
    report = check(replace(faulty.index, shards=(gone, *faulty.index.shards[1:3])), decode=False)
    assert report.good == 100
    assert "this shard or its bucket does not exist" in report.shards[0].problem


def test_doctor_caches_shards_in_the_given_folder_and_continues_after_a_failed_download(
    faulty, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("data.remote.urls.random.uniform", lambda low, high: 0)
    faulty.fault = lambda path: 503 if "000001" in path else None
    command = ["data", "check", str(faulty.index.tables), "--cache", str(tmp_path / "cache")]
    assert main(command) == 65
    said = capsys.readouterr().out
    assert "train-000001.tar: no response after 8 attempts" in said
    assert "350 good samples" in said
    copies = list((tmp_path / "cache").glob("*.tar"))
    assert len(copies) == 7

    # A corrupt copy is downloaded again, as a run would do.
    content = bytearray(copies[0].read_bytes())
    content[-2000] ^= 1
    copies[0].write_bytes(content)
    faulty.fault = lambda path: None
    assert main(command) == 0
    assert "400 good samples" in capsys.readouterr().out
