"""A large index is memory-mapped instead of parsed; the mapped file must match its JSON."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.index import document
from data.index import shard as shard_module
from data.index.document import load_index
from data.index.index import Index, exclude, join
from data.index.shard import MappedShards, Shard, write_columns
from data.loader import TrainLoader
from data.order import Mixture, Order
from tests.support.shards import digits, write_set

ROWS = [
    [f"größe/train-{number:06d}.tar", 10 + number % 7, 1000 * number, f"{number:064x}", f"{number + 1:064x}"]
    for number in range(6000)
]
ROWS_HELD = [Shard(*row) for row in ROWS]
COUNTS = [20_000, sum(row[1] for row in ROWS) - 20_000]


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch) -> Path:
    """The node's state folder."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "state"))
    return tmp_path / "state" / "patchline" / "indexes"


@pytest.fixture
def path(tmp_path) -> Iterator[Path]:
    """Write an index of 6,000 shards by hand."""
    tars = [row[:4] for row in ROWS]
    content = {"schema": 1, "directory": "tars", "class_counts": COUNTS, "shards": ROWS}
    content |= {"names": [], "origin": None, "refused": {}, "first_refused": {}}
    content["digest"] = sha256(json.dumps([1, tars, COUNTS]).encode()).hexdigest()
    content["seal"] = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path = tmp_path / "train.index.json"
    path.write_text(json.dumps(content, indent=1))
    return path


def held(path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Return the same index as Python objects, like that of a small set."""
    with monkeypatch.context() as patch:
        patch.setattr(document, "LARGE", 1 << 30)
        read = load_index(path)
    assert isinstance(read.shards, tuple)
    return read


def same(index: Index, other: Index) -> bool:
    """Return whether two indexes have the same content, in memory or mapped."""
    return replace(index, shards=tuple(index.shards)) == replace(other, shards=tuple(other.shards))


def test_mapped_large_index_equals_its_json(path, state, monkeypatch):
    mapped = load_index(path)
    assert isinstance(mapped.shards, MappedShards)
    assert [[s.name, s.samples, s.bytes, s.sha256, s.table] for s in mapped.shards] == ROWS
    assert mapped.shards[-1] == Shard(*ROWS[-1])
    assert mapped.shards[7:9] == (Shard(*ROWS[7]), Shard(*ROWS[8]))
    assert mapped.shard_samples.tolist() == [row[1] for row in ROWS]
    assert (mapped.samples, mapped.bytes) == (sum(row[1] for row in ROWS), sum(row[2] for row in ROWS))
    assert mapped.location(3) == f"{path.parent}/tars/größe/train-000003.tar"
    assert not mapped.remote
    assert same(mapped, held(path, monkeypatch))
    assert same(load_index(path), mapped)
    with pytest.raises(IndexError):
        mapped.shards[6000]
    # Half of the file's bytes are digests: the column for all shards must be a view, not a copy.
    assert not mapped.shard_samples.flags.owndata
    assert len(list(state.glob("*.columns"))) == 1


def test_changed_index_is_mapped_again(path, state):
    before = load_index(path)
    content = json.loads(path.read_text())
    content["shards"] = [["s3://b/x.tar", 1, 2, "0" * 64, ""], *content["shards"]]
    content["digest"] = sha256(json.dumps([1, [row[:4] for row in content["shards"]], COUNTS]).encode()).hexdigest()
    del content["seal"]
    content["seal"] = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content, indent=1))
    after = load_index(path)
    assert after.digest == content["digest"] != before.digest
    assert len(after.shards) == 6001
    assert after.remote
    assert len(list(state.glob("*.columns"))) == 2
    path.write_text(path.read_text().replace('"größe/train-000004.tar"', '"größe/train-999999.tar"'))
    path.write_text(path.read_text().replace("\\u00f6", "o", 1))
    with pytest.raises(DataError, match="its digest does not match its contents"):
        load_index(path)


@pytest.mark.parametrize("at", [40, 6000 * 8 + 300, -200])
def test_altered_columns_are_not_used(path, state, at, caplog):
    mapped = load_index(path)
    (file,) = state.glob("*.columns")
    whole = file.read_bytes()
    altered = bytearray(whole)
    altered[at] ^= 1
    for content in (altered, whole[:-7], b""):
        file.write_bytes(content)
        caplog.clear()
        assert list(load_index(path).shards) == ROWS_HELD
        assert "is truncated or altered; creating it again from" in caplog.text
        assert file.read_bytes() == whole
    assert mapped.shards[0].name == ROWS[0][0]


def test_another_process_receives_only_the_path_of_the_columns(path, state):
    mapped = exclude([load_index(path)], ["train-000005.tar"])[0]
    order = Order(mapped.shard_samples, seed=0, batch_size=64)
    sent = pickle.dumps(mapped)
    assert len(sent) < 2000
    code = (
        "import pickle, sys; from data.order import Order; index = pickle.loads(sys.stdin.buffer.read());"
        "order = Order(index.shard_samples, seed=0, batch_size=64);"
        "print(index.shards[5].samples, index.shards[6].name, order.batch(9).shard.tolist())"
    )
    answer = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True).stdout.decode()
    assert answer == f"0 {ROWS[6][0]} {order.batch(9).shard.tolist()}\n"
    # Somebody empties the folder: the next process recreates the file. Another file of that name is refused.
    (file,) = state.glob("*.columns")
    file.unlink()
    sent = pickle.dumps(mapped)
    assert same(pickle.loads(sent), mapped)
    write_columns(file, {}, ROWS_HELD[:10])
    with pytest.raises(DataError, match="missing, or changed since the worker read it"):
        pickle.loads(sent)


def test_many_processes_at_once_read_the_json_once(path, monkeypatch):
    read, calls = document.read_json, []
    monkeypatch.setattr(document, "read_json", lambda *args: calls.append(args) or read(*args))
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(load_index, [path] * 8))
    assert len(calls) == 1
    assert all(same(other, loaded[0]) for other in loaded)


def test_columns_unopened_for_a_month_are_deleted_when_others_are_written(path, state):
    mapped = load_index(path)
    (kept,) = state.glob("*.columns")
    unused, lock, recent = (state / f"{name}" for name in ("0.columns", "0.lock", "1.columns"))
    for other in (unused, lock, recent):
        other.write_bytes(b"")
    month_ago, days_ago = time.time() - 31 * 86400, time.time() - 29 * 86400
    os.utime(unused, (month_ago, month_ago))
    os.utime(kept, (month_ago, month_ago))
    os.utime(recent, (days_ago, days_ago))
    # Loading an index marks its columns as used; nothing is created, so nothing is deleted.
    assert same(load_index(path), mapped)
    assert unused.exists()
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert same(load_index(path), mapped)
    assert not unused.exists()
    assert not lock.exists()
    assert recent.exists()
    assert kept.exists()
    assert len(list(state.glob("*.columns"))) == 3
    # A process keeps its mapping of a deleted file, and may still send it to another process.
    os.utime(kept, (month_ago, month_ago))
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    assert same(load_index(path), mapped)
    assert not kept.exists()
    assert mapped.shards[17] == ROWS_HELD[17]
    assert same(pickle.loads(pickle.dumps(mapped)), mapped)


def test_shards_are_loaded_with_a_warning_if_columns_cannot_be_written(path, monkeypatch, caplog):
    monkeypatch.setenv("PATCHLINE_CACHE", "/proc/x")
    read = load_index(path)
    assert isinstance(read.shards, tuple)
    assert [shard.name for shard in read.shards] == [row[0] for row in ROWS]
    assert "cannot store its columns in /proc/x/patchline/indexes" in caplog.text
    assert "set PATCHLINE_CACHE to a writable folder" in caplog.text


def test_sets_are_joined_and_shards_excluded_as_in_a_small_index(path, monkeypatch):
    small = held(path, monkeypatch)
    names = ["train-000007.tar", "train-005999.tar"]
    (dropped,) = exclude([load_index(path)], names)
    assert same(dropped, exclude([small], names)[0])
    assert dropped.digest != small.digest
    assert (dropped.shards[7].samples, dropped.shards[7].bytes, dropped.shard_samples[5999]) == (0, 0, 0)
    joined = join([dropped, small], [1.0, 2.0])
    places = [small.location(number) for number in range(6000)] * 2
    assert [shard.name for shard in joined.shards] == places == [joined.location(n) for n in range(12_000)]
    assert joined.shard_samples.tolist() == [*dropped.shard_samples, *small.shard_samples]
    options = {"groups": [6000, 6000], "weights": [1, 2], "seed": 1, "batch_size": 60}
    mixture = Mixture(joined.shard_samples, **options)
    sent = mixture.without_sizes()
    assert len(pickle.dumps(sent)) < 4000
    sent.with_sizes(pickle.loads(pickle.dumps(joined)).shard_samples)
    assert all(np.array_equal(*pair) for pair in zip(sent.batch(8), mixture.batch(8), strict=True))


def test_a_loader_gives_the_same_batches_from_a_mapped_index(tmp_path, monkeypatch):
    made = write_set(islice(digits(True), 120), tmp_path / "set", shard_samples=20)
    assert isinstance(made.shards, tuple)
    monkeypatch.setattr(document, "LARGE", 0)
    mapped = load_index(tmp_path / "set")
    assert isinstance(mapped.shards, MappedShards)
    taken = []
    for each, processes in ((made, 0), (mapped, 1)):
        order = Order(each.shard_samples, seed=0, batch_size=50)
        loader = TrainLoader(each, order, image_size=16, slots=range(50), micro_batch=50, processes=processes)
        batches = iter(loader)
        taken.append([next(batches) for _ in range(3)])
        batches.close()
    for small, large in zip(*taken, strict=True):
        assert torch.equal(small.images, large.images)
        assert torch.equal(small.ids, large.ids)


def test_decoding_process_reports_that_it_cannot_map_the_index(path, monkeypatch):
    mapped = load_index(path)
    elsewhere = (shard_module.reopened, (Path("/x"), b"", frozenset()))
    monkeypatch.setattr(MappedShards, "__reduce__", lambda self: elsewhere)
    order = Order(mapped.shard_samples, seed=0, batch_size=8)
    loader = TrainLoader(mapped, order, image_size=16, slots=range(8), micro_batch=8, processes=1)
    with pytest.raises(DataError, match="/x: missing, or changed since the worker read it"):
        next(iter(loader))


def test_a_process_keeps_two_epochs_of_the_order_and_nothing_of_the_index(path):
    mapped = load_index(path)
    order = Order(mapped.shard_samples, seed=0, batch_size=1024)
    for step in range(200):  # three epochs
        order.batch(step)
    kept = [array for arrays in order._shard_orders.values() for array in arrays]
    assert sum(array.nbytes for array in kept) == 2 * 6000 * (4 + 8)
    assert order.shard_samples.base is not None
    assert os.path.getsize(mapped.shards.path) > 6000 * (2 * 8 + 2 * 64)
