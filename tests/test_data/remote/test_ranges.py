"""A cold start reads single samples of remote shards by byte ranges: the same samples, or an error with the reason."""

import gc
import pickle
import re
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from data import reader
from data.decoder import DecoderProcess
from data.errors import DataError, StorageError
from data.index.index import Index
from data.index.shard import SampleRow
from data.loader import TrainLoader
from data.order import Order
from data.reader import ShardReader
from data.remote import cache as cache_module
from data.remote import ranges, urls
from data.remote.cache import Cache, Prefetcher
from data.remote.config import CacheConfig
from tests.support.shards import index_at
from tests.support.stores import store

PATIENT = {"attempts": 12, "backoff_s": 0.01, "timeout_s": 30.0}
BATCH = 20


@pytest.fixture(scope="module")
def s3(local, tmp_path_factory):
    """Run moto, which serves the S3 protocol, and a proxy that counts requests and injects faults."""
    files = {f"set/{shard.name}": Path(local.location(number)) for number, shard in enumerate(local.shards)}
    with store("s3", files) as proxy:
        at = "s3://images/set"
        proxy.index = index_at(local, at, tmp_path_factory.mktemp("i"))
        yield proxy


@pytest.fixture
def faulty(s3, monkeypatch):
    """Return the store; shards of any size are read by range, and no whole shard is downloaded in the background."""
    s3.gets.clear()
    urls.forget_credentials()
    monkeypatch.setattr(reader, "SMALLEST", 0)
    monkeypatch.setattr(Prefetcher, "fetch", lambda self, shard: None)
    yield s3
    s3.fault = lambda path: None
    # Requests in flight at a test's end would count for the next test. The threads of a reader end with
    # it, and readers refer to themselves.
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("ranges"):
            thread.join(30)


def loader_of(index: Index, cfg: CacheConfig | None, **options) -> TrainLoader:
    order = Order(index.shard_samples, seed=0, batch_size=BATCH)
    return TrainLoader(index, order, image_size=16, slots=range(BATCH), micro_batch=BATCH, cache=cfg, **options)


def take(index: Index, cfg: CacheConfig | None, steps: int = 3, **options) -> list:
    batches = iter(loader_of(index, cfg, **options))
    taken = list(islice(batches, steps))
    batches.close()
    return taken


def assert_same(taken: list, expected: list) -> None:
    for ours, theirs in zip(taken, expected, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.ids, theirs.ids)
        assert not ours.bad


def lengths_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the length in bytes of every range that this process reads."""
    asked: list[int] = []
    read_range = urls.read_range

    def counting(url, start, stop, timeout_s):
        asked.append(stop - start)
        return read_range(url, start, stop, timeout_s)

    monkeypatch.setattr(cache_module, "read_range", counting)
    return asked


def test_first_batch_reads_one_range_per_sample_instead_of_whole_shards(faulty, local, tmp_path, monkeypatch):
    asked = lengths_asked(monkeypatch)
    by_range = take(faulty.index, CacheConfig(str(tmp_path / "a"), **PATIENT), steps=1)
    assert_same(by_range, take(local, None, steps=1))
    # Bytes of these samples according to the tables: image, label, and the header and padding between them.
    expected = 0
    for _, shard, sample in by_range[0].ids.tolist():
        row = local.table(shard)[sample]
        ends = [int(row[name]) + int(row[f"{name}_size"]) for name in ("image", "label")]
        expected += max(ends) - min(int(row["image"]), int(row["label"]))
    assert len(asked) == len(faulty.gets) == BATCH
    assert sum(asked) == expected
    assert not list((tmp_path / "a").glob("*.tar"))

    faulty.gets.clear()
    asked.clear()
    monkeypatch.setattr(reader, "SMALLEST", 1 << 40)
    assert_same(take(faulty.index, CacheConfig(str(tmp_path / "b"), **PATIENT), steps=1), by_range)
    shards = {int(shard) for shard in by_range[0].ids[:, 1]}
    assert sum(asked) == sum(local.shards[shard].bytes for shard in shards) > 10 * expected
    assert len(faulty.gets) == len(shards)


def test_failing_and_short_responses_do_not_change_the_data(faulty, local, tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "ATTEMPTS", 12)
    faults = iter(range(10_000))
    faulty.fault = lambda path: [500, None, "short", None, None][next(faults) % 5]
    assert_same(take(faulty.index, CacheConfig(str(tmp_path), **PATIENT)), take(local, None))
    assert len(faulty.gets) > 3 * BATCH


def test_shard_on_this_node_is_read_instead(faulty, local, tmp_path):
    cfg = CacheConfig(str(tmp_path), **PATIENT)
    for number, shard in enumerate(faulty.index.shards):
        Cache(cfg).path(faulty.index.location(number), shard)
    faulty.gets.clear()
    assert_same(take(faulty.index, cfg), take(local, None))
    assert not faulty.gets


def test_sample_that_differs_from_the_index_is_fetched_with_its_shard(faulty, local, tmp_path, caplog, monkeypatch):
    """As from a store that ignores ranges: other bytes arrive."""
    read_range = urls.read_range
    wrong = []

    def shifting(url, start, stop, timeout_s):
        content = read_range(url, start, stop, timeout_s)
        is_sample = start > 0
        if is_sample:
            wrong.append(url)
            return content[1:] + b"x"
        return content

    monkeypatch.setattr(cache_module, "read_range", shifting)
    taken = take(faulty.index, CacheConfig(str(tmp_path), **PATIENT))
    assert_same(taken, take(local, None))
    said = [record.getMessage() for record in caplog.records if "by range" in record.getMessage()]
    pattern = (
        r"s3://images/set/train-00000\d.tar: a sample could not be read by range \(sample '\S+' differs from the index"
    )
    assert len(said) == 1
    assert re.match(pattern, said[0])
    assert said[0].endswith("waiting for whole shards")
    # After this discovery no further range is requested; only the requests in flight count.
    assert len(wrong) <= BATCH


def test_a_sample_whose_halves_are_of_two_versions_of_the_shard_is_not_believed(faulty, local, tmp_path):
    """A response breaks off, and before the next request the object is overwritten with one of equal size."""
    import boto3

    key = f"set/{local.shards[0].name}"
    first, other = (Path(local.location(number)).read_bytes() for number in (0, 1))
    assert len(first) == len(other)
    overwrite = boto3.client("s3").put_object
    reads = iter(["the half that arrives", "the rest, of another version", "the whole shard"])

    def fault(path):
        read = next(reads, "")
        if read == "the half that arrives":
            return "short"
        overwrite(Bucket="images", Key=key, Body=other if read == "the rest, of another version" else first)
        return None

    by_range = ShardReader(faulty.index, cache=CacheConfig(str(tmp_path / "a"), **PATIENT), by_range=True)
    faulty.fault = fault
    # Half of the image comes from the first version; the second version has different bytes there.
    assert by_range.read(0, 0) == ShardReader(local).read(0, 0) != ShardReader(local).read(1, 0)
    assert "differs from the index" in by_range.given_up
    assert len(faulty.gets) == 3
    by_range.stop()
    # If the object stays overwritten, the shard's digest reveals it.
    overwrite(Bucket="images", Key=key, Body=other)
    faulty.fault = lambda path: None
    by_range = ShardReader(faulty.index, cache=CacheConfig(str(tmp_path / "b"), **PATIENT), by_range=True)
    with pytest.raises(DataError, match=r"train-000000.tar: its sha256 differs from the index"):
        by_range.read(0, 0)
    by_range.stop()
    overwrite(Bucket="images", Key=key, Body=first)


def test_a_store_that_ignores_ranges_is_named(faulty, local, tmp_path, monkeypatch):
    """It answers 200 with the whole object: a gigabyte per sample, and no shard larger than one piece would work."""
    faulty.fault = lambda path: "whole"
    cfg = CacheConfig(str(tmp_path), **PATIENT)
    by_range = ShardReader(faulty.index, cache=cfg, by_range=True)
    size = local.shards[0].bytes
    # A shard in one piece is requested from its first to its last byte, and exactly these bytes arrive.
    assert by_range.read(0, 0) == ShardReader(local).read(0, 0)
    pattern = (
        rf"\(s3://images/set/train-000000.tar: the store ignores byte ranges: it sent {size} bytes instead of \d+;"
    )
    assert re.search(pattern, by_range.given_up)
    assert by_range.given_up.endswith("waiting for whole shards")
    monkeypatch.setattr(cache_module, "PIECE", size // 2)
    with pytest.raises(
        DataError,
        match=f"000001.tar: the store ignores byte ranges: it sent {size} bytes instead of {size // 2}",
    ):
        by_range.read(1, 0)
    by_range.stop()


def test_response_without_its_last_byte_is_requested_again(faulty, local, tmp_path, monkeypatch):
    read_range = urls.read_range
    last_bytes = []

    def one_byte_short(url, start, stop, timeout_s):
        if stop - start == 1:
            last_bytes.append(start)
        return read_range(url, start, max(start + 1, stop - 1), timeout_s)

    monkeypatch.setattr(cache_module, "read_range", one_byte_short)
    assert_same(take(faulty.index, CacheConfig(str(tmp_path), **PATIENT), steps=1), take(local, None, steps=1))
    assert len(last_bytes) == BATCH
    assert not list(tmp_path.glob("*.tar"))


def test_second_iteration_of_a_loader_reads_by_range_again(faulty, local, tmp_path):
    cfg = CacheConfig(str(tmp_path), **PATIENT)
    loader = loader_of(faulty.index, cfg)
    for _ in range(2):
        faulty.gets.clear()
        batches = iter(loader)
        assert_same([next(batches)], take(local, None, steps=1))
        batches.close()
        assert len(faulty.gets) == BATCH
    assert not list(tmp_path.glob("*.tar"))
    # A stopped reader stays stopped, and one that gave up on ranges does not try again.
    batches = iter(loader)
    next(batches)
    loader.stop()
    batches.close()
    assert loader.decoder.reader.ranges.stopped
    reader_that_gave_up = ShardReader(faulty.index, cache=cfg, by_range=True)
    reader_that_gave_up.ranges.give_up("s3://images/set/train-000000.tar", "too slow")
    reader_that_gave_up.stop()
    reader_that_gave_up.resume()
    assert "too slow" in reader_that_gave_up.given_up
    assert not reader_that_gave_up.ranges.stopped


def test_failed_range_reads_stop_once_and_the_reader_waits_for_whole_shards(
    faulty, local, tmp_path, caplog, monkeypatch
):
    read_range = urls.read_range

    def without_small_ones(url, start, stop, timeout_s):
        if stop - start < 10_000:
            raise TimeoutError
        return read_range(url, start, stop, timeout_s)

    monkeypatch.setattr(cache_module, "read_range", without_small_ones)
    taken = take(faulty.index, CacheConfig(str(tmp_path), **PATIENT), steps=2)
    assert_same(taken, take(local, None, steps=2))
    said = [record.getMessage() for record in caplog.records if "by range" in record.getMessage()]
    assert len(said) == 1
    assert "no response after 3 attempts, the last error was TimeoutError" in said[0]
    assert len(faulty.gets) == len(list(tmp_path.glob("*.tar"))), "each shard once, and nothing else"


def test_missing_or_corrupt_shard_in_the_store_ends_the_run_as_before(faulty, local, tmp_path, monkeypatch):
    gone = replace(faulty.index, directory="s3://images/elsewhere")
    with pytest.raises(DataError, match=r"elsewhere/train-00000\d.tar: this shard or its bucket does not exist"):
        take(gone, CacheConfig(str(tmp_path / "a"), **PATIENT))
    # Another shard under the name, of the same size, so that only digests differ.
    swapped = [replace(shard, name=faulty.index.shards[number ^ 1].name) for number, shard in enumerate(local.shards)]
    other = Index(tuple(swapped), 10, (), "", "s3://images/set", faulty.index.tables)
    tables = [local.table(number) for number in range(len(local.shards))]
    monkeypatch.setattr(Index, "table", lambda self, number: tables[number])
    with pytest.raises(DataError, match=r"train-00000\d.tar: its sha256 differs from the index"):
        take(other, CacheConfig(str(tmp_path / "b"), **PATIENT))


@pytest.mark.parametrize("far", [0, 100, 1 << 17])
def test_image_and_label_are_one_request_if_they_are_close(tmp_path, monkeypatch, far):
    content = bytes(np.random.default_rng(0).integers(0, 256, 300_000, np.uint8))
    asked = []

    def read(url, start, stop, timeout_s):
        asked.append((start, stop))
        return content[start : min(stop, start + 1000)]  # never more than 1,000 bytes

    monkeypatch.setattr(cache_module, "read_range", read)
    label = 1500 + far
    for row in (
        SampleRow(b"a", 500, 1000, label, 3),
        SampleRow(b"a", label, 1000, 500, 1000),  # the label first
        SampleRow(b"a", 500, 1000, 0, 0),
    ):
        image, text = ranges.Ranges(Cache(CacheConfig(str(tmp_path)))).take((0, 0), "s3://b/x.tar", row)
        assert image == content[row.image : row.image + row.image_size]
        assert text == content[row.label : row.label + row.label_size]
    assert ((500, 1500) in asked[:1]) == (far > 1 << 16)


def test_prefetch_window_follows_training_that_overtakes_it(faulty, tmp_path, monkeypatch):
    asked = []
    monkeypatch.undo()
    order = Order(faulty.index.shard_samples, seed=0, batch_size=BATCH)
    shards_of = cache_module.shards_of
    monkeypatch.setattr(cache_module, "shards_of", lambda o, s, step: asked.append(step) or shards_of(o, s, step))
    entered, may_go = threading.Event(), threading.Event()
    monkeypatch.setattr(Prefetcher, "fetch", lambda self, shard: entered.set() or may_go.wait(30))
    prefetcher = Prefetcher(faulty.index, order, range(BATCH), 5, CacheConfig(str(tmp_path), ahead=2))
    assert entered.wait(30)
    prefetcher.reached(40)
    may_go.set()
    ends_at = time.monotonic() + 30
    while asked[-1] < 42 and time.monotonic() < ends_at:
        time.sleep(0.01)
    prefetcher.stop()
    prefetcher.thread.join(30)
    assert asked == [5, 40, 41, 42]


def test_cause_of_waiting_for_the_first_batch_is_logged(faulty, local, tmp_path):
    cfg = CacheConfig(str(tmp_path), **PATIENT)
    loader = loader_of(faulty.index, cfg)
    shards = np.unique(loader.decoder.order.batch(0).shard).tolist()
    lines: list[str] = []
    loader.log_wait(lines.append)
    needed = f"waiting for the first batch: {BATCH} samples from {len(shards)} shards"
    assert lines[0].startswith(f"{needed}; 0 of them local, {len(shards)} (")
    assert lines[0].endswith("GiB) to download, starting with s3://images/set/train-000000.tar")
    Cache(cfg).path(faulty.index.location(shards[0]), faulty.index.shards[shards[0]])
    loader.log_wait(lines.append)
    assert f"; 1 of them local, {len(shards) - 1} (" in lines[1]
    loader_of(local, cfg).log_wait(lines.append)
    assert lines[2] == f"{needed}, all of them local"


def test_decoding_processes_read_by_range_too(faulty, local, tmp_path, monkeypatch):
    # A decoding process is a Python of its own: it takes small shards for worth it because of what it imports first.
    (tmp_path / "sitecustomize.py").write_text("from data import reader\n\nreader.SMALLEST = 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(DecoderProcess, "restart", lambda self: pytest.fail("a process died, or was silent"))
    cfg = CacheConfig(str(tmp_path / "cache"), **PATIENT)
    assert_same(take(faulty.index, cfg, steps=2, processes=1, prefetch=1), take(local, None, steps=2))
    assert len(faulty.gets) >= 2 * BATCH
    assert not list((tmp_path / "cache").glob("*.tar"))


def test_waiting_for_a_range_reports_progress_and_has_a_time_limit(faulty, tmp_path, monkeypatch):
    read_range = urls.read_range

    def late(*piece):
        time.sleep(0.3)
        return read_range(*piece)

    monkeypatch.setattr(cache_module, "read_range", late)
    monkeypatch.setattr(ranges, "REPORT_EVERY_S", 0.01)
    signs = []
    by_range = ShardReader(faulty.index, cache=CacheConfig(str(tmp_path), **PATIENT), by_range=True)
    by_range.cache.progress = lambda: signs.append(time.monotonic())
    sample = by_range.read(0, 0)
    assert len(signs) > 5
    assert not by_range.given_up

    monkeypatch.setattr(ranges, "LONGEST_S", 0.05)
    assert by_range.read(0, 0) == sample, "out of the whole shard"
    assert "a sample did not arrive within 0.05 s" in by_range.given_up
    by_range.stop()


def test_stop_from_another_thread_ends_the_wait_with_a_storage_error(tmp_path, monkeypatch):
    entered, may_go = threading.Event(), threading.Event()
    where = ("s3://b/x.tar", SampleRow(b"a", 0, 4, 4, 4))
    monkeypatch.setattr(cache_module, "read_range", lambda *piece: entered.set() or (may_go.wait(30) and b"12345678"))
    running = ranges.Ranges(Cache(CacheConfig(str(tmp_path))))
    for sample in range(ranges.AT_ONCE + 1):
        running.request((0, sample), *where)
    assert entered.wait(30)
    assert not pickle.loads(pickle.dumps(running)).requested, "a new decoding process asks for its own samples"
    # The last request has no thread yet: it is cancelled while the reader waits for it.
    with pytest.raises(StorageError, match=r"^s3://b/x.tar: stopped before the sample arrived$"):
        running.take((0, ranges.AT_ONCE), *where, running.stop)
    may_go.set()
    # Simulate a stop between the check of `stopped` and the request.
    running.stopped = False
    with pytest.raises(RuntimeError):
        running.request((1, 0), *where)
    monkeypatch.setattr(running.pool, "submit", lambda *_: refuse(running))
    with pytest.raises(StorageError, match="stopped before the sample arrived"):
        running.take((1, 0), *where)


def refuse(running: ranges.Ranges) -> None:
    """Raise the error of a pool that another thread has just shut down."""
    running.stopped = True
    raise RuntimeError("cannot schedule new futures after shutdown")


def test_stopped_reader_does_not_start_to_download_whole_shards(faulty, tmp_path, monkeypatch):
    by_range = ShardReader(faulty.index, cache=CacheConfig(str(tmp_path), **PATIENT), by_range=True)
    monkeypatch.setattr(ranges.Ranges, "request", lambda self, place, url, row: self.stop())
    with pytest.raises(StorageError, match="stopped before the sample arrived"):
        by_range.read(0, 0)
    assert not faulty.gets
    assert not by_range.given_up
