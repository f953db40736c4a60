"""A shard, table or index that changes after its creation is detected on reading, whatever its modification time."""

import json
import os
import random
import tarfile
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

import data.reader as reader_module
import data.remote.cache as cache_module
from data.errors import DataError
from data.evaluation import EvaluationSet
from data.images.decode import BadImage
from data.index.document import load_index
from data.index.index import Index
from data.index.shard import Shard
from data.loader import TrainLoader
from data.order import Order
from data.reader import ShardReader, read_labels
from data.remote.cache import Cache
from data.remote.config import CacheConfig
from jobs.__main__ import main
from tests.support.shards import digits, flip, write_set


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Begin with an empty record of verified shards."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "node"))


@pytest.fixture
def made(tmp_path) -> Index:
    """Return fifty digits in three shards."""
    return write_set(islice(digits(True, image_size=16), 50), tmp_path / "set", shard_samples=20)


def read_all(index: Index) -> list[tuple[str, bytes, bytes]]:
    reader = ShardReader(index)
    return [reader.read(shard, n) for shard, size in enumerate(index.shard_samples) for n in range(size)]


def contents_by_tarfile(index: Index) -> list[tuple[str, bytes, bytes]]:
    """Return the samples as read by Python's `tarfile`."""
    samples = []
    for number in range(len(index.shards)):
        with tarfile.open(index.location(number)) as tar:
            bodies = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
        keys = dict.fromkeys(name.partition(".")[0] for name in bodies)
        samples += [(key, bodies[f"{key}.jpg"], bodies[f"{key}.cls"]) for key in keys]
    return samples


def test_repeated_label_is_read_once(made):
    assert read_labels(b"[3, 7, 3]", made, 3) == (3, 7)
    with pytest.raises(BadImage, match=r"more labels than data\.max_labels=2"):
        read_labels(b"[3, 7, 3]", made, 2)


def bytes_of_samples(path: Path) -> set[int]:
    """Return the byte positions of members' content in a tar, without headers and padding."""
    positions: set[int] = set()
    with tarfile.open(path) as tar:
        for member in tar.getmembers():
            positions.update(range(member.offset_data, member.offset_data + member.size))
    return positions


def image_start(path: Path, number: int = 0) -> int:
    """Return the offset of a sample's encoded image according to Python's `tarfile`."""
    with tarfile.open(path) as tar:
        return [member for member in tar.getmembers() if member.name.endswith(".jpg")][number].offset_data


# ------------------------------------------------------------------------------------------- shards


def test_a_hundred_bit_flips_after_the_first_reading_are_detected_or_outside_samples(made):
    original = contents_by_tarfile(made)
    path = Path(made.location(1))
    of_samples = bytes_of_samples(path)
    draw = random.Random(0)
    fates: Counter[str] = Counter()
    for _ in range(100):
        assert read_all(made) == original, "the first reading, which marks the shard as verified"
        position = draw.randrange(path.stat().st_size)
        bit = draw.randrange(8)
        flip(path, position, bit)
        try:
            fate = "harmless" if read_all(made) == original else "silent"
        except DataError as error:
            assert "sample 'digit" in str(error)
            assert "train-000001.tar" in str(error)
            fate = "found"
        assert fate == ("found" if position in of_samples else "harmless")
        fates[fate] += 1
        flip(path, position, bit)
    assert fates["found"] > 20
    assert fates["silent"] == 0
    assert fates.total() == 100


@pytest.mark.parametrize("processes", [0, 2])
def test_altered_sample_is_not_replaced_but_ends_the_run_with_a_remedy(made, processes):
    order = Order(made.shard_samples, seed=0, batch_size=50)
    loader = TrainLoader(made, order, image_size=16, slots=range(50), micro_batch=50, processes=processes)
    batches = iter(loader)
    assert next(batches).bad == ()
    batches.close()
    path = Path(made.location(2))
    flip(path, image_start(path, 3) + 40)
    message = r"train-000002.tar: sample 'digit\d+' differs from the index.*\n  expected \w{16}: .*\n.*data.drop=\[set/"
    # With two processes the faster one may reach the sample first, and the other one then hashes the shard.
    if processes > 1:
        message += r"|train-000002.tar: its sha256 differs from the index.* data.drop=\[set/"
    with pytest.raises(DataError, match=message) as caught:
        next(iter(loader))
    assert caught.value.exit_code == 65
    with pytest.raises(DataError, match="sha256 differs from the index"):  # the node no longer trusts its mark
        list(EvaluationSet(made, "resize(16)", batch_size=50))


def test_shard_replaced_during_opening_is_not_mistaken_for_the_verified_one(made, monkeypatch):
    path = Path(made.location(0))
    other = path.with_name("other.tar")
    other.write_bytes(path.read_bytes())
    flip(other, image_start(other, 7) + 40)
    mark_of = reader_module.mark_of

    def replacing(*args):  # between its mapping and its mark
        os.replace(other, path)
        return mark_of(*args)

    with monkeypatch.context() as patched:
        patched.setattr(reader_module, "mark_of", replacing)
        ShardReader(made).read(0, 0)
    with pytest.raises(DataError, match=r"train-000000.tar: its sha256 differs from the index"):
        ShardReader(made).read(0, 0)


def test_every_local_shard_that_is_missing_or_of_another_size_is_named(tmp_path):
    """The bad shards follow dropped, remote and intact ones."""
    for name, size in (("whole", 7), ("short", 6), ("long", 8), ("other", 1)):
        (tmp_path / f"{name}.tar").write_bytes(bytes(size))
    rows = [
        ("a", 0, 0),
        ("whole", 2, 7),
        ("missing", 2, 7),
        ("s3://b/c", 2, 7),
        ("short", 2, 7),
        ("d", 0, 0),
        ("long", 2, 7),
    ]
    shards = tuple(
        Shard(f"{name}.tar", samples, size, "") for name, samples, size in [*rows, ("e", 2, 7), ("whole", 0, 7)]
    )
    index = Index(shards, 3, (), "d", str(tmp_path), tmp_path)
    assert reader_module.unusable_shards(index) == {
        f"{tmp_path}/missing.tar": "No such file or directory",
        f"{tmp_path}/short.tar": "found 6 bytes, but the index lists 7",
        f"{tmp_path}/long.tar": "found 8 bytes, but the index lists 7",
        f"{tmp_path}/e.tar": "No such file or directory",
    }


def test_evaluation_rejects_samples_that_differ_from_the_index(made):
    assert sum(batch.mask.sum() for batch in EvaluationSet(made, "resize(16)", batch_size=50)) == 50
    path = Path(made.location(0))
    flip(path, image_start(path, 7) + 40)
    with pytest.raises(DataError, match=r"train-000000.tar: sample 'digit\d+' differs from the index"):
        list(EvaluationSet(made, "resize(16)", batch_size=50))


RECIPE = """
run: {run}
cluster: {{workers: 2, backend: processes, backoff_s: 0}}
pretrain:
  data: {{train: {train}}}
  model: {{name: mu/8, width: 16, depth: 1, mlp: 32, heads: 2, image_size: 16, classes: 10}}
  optim: {{schedule: {{warmup_steps: 2}}}}
  loss: softmax
  steps: {steps}
  batch_size: 16
  micro_batch: 8
  precision: fp32
  log_every: 1
fewshot: {{init: "@pretrain", probe: {{train: {train}, test: {test}, shots: [1]}}}}
"""


def test_shard_overwritten_during_a_run_ends_it_with_65(made, shards, tmp_path, capsys):
    recipe = tmp_path / "run.yaml"
    recipe.write_text(RECIPE.format(run=tmp_path / "run", train=tmp_path / "set", test=shards / "test", steps=5_000))
    overwritten_after: list[int] = []

    def overwrite() -> None:
        # An epoch is 50 samples, which is 4 steps: after 20 steps each worker has surely opened both shards.
        # A worker that opens a shard only afterwards compares its sha256 and says that instead.
        steps = 0
        deadline = time.monotonic() + 120
        while steps < 20 and time.monotonic() < deadline:
            time.sleep(0.1)
            steps = sum(len(path.read_text().splitlines()) for path in tmp_path.glob("run/*/metrics.jsonl"))
        overwritten_after.append(steps)
        path = Path(made.location(1))
        for number in range(20):
            flip(path, image_start(path, number) + 40)

    thread = threading.Thread(target=overwrite)
    thread.start()
    code = main(["run", str(recipe)])
    thread.join()
    err = capsys.readouterr().err
    assert code == 65
    assert overwritten_after[0] >= 20
    assert "train-000001.tar: sample 'digit" in err
    assert "data.drop=[set/train-000001.tar]" in err


# ------------------------------------------------------------------------------------------- remote shards


def test_decayed_cached_copy_is_downloaded_again_once(made, tmp_path, monkeypatch):
    content = Path(made.location(0)).read_bytes()
    asked: list[int] = []

    def read(url, start, stop, timeout_s):
        asked.append(start)
        return content[start:stop]

    monkeypatch.setattr(cache_module, "read_range", read)
    cfg = CacheConfig(str(tmp_path / "cache"))
    remote = replace(made, directory="s3://b/set")
    readers = [ShardReader(remote, cache=cfg), ShardReader(remote, cache=cfg)]
    original = contents_by_tarfile(made)[:20]
    assert readers[0].read(0, 3) == readers[1].read(0, 3) == original[3]
    assert len(asked) == 1

    copy = next((tmp_path / "cache").glob("*.tar"))
    flip(copy, image_start(copy, 3) + 40)
    # The second reader has the old copy open too; it opens the new one without a download.
    assert readers[0].read(0, 3) == original[3]
    assert len(asked) == 2
    assert readers[1].read(0, 3) == original[3]
    assert len(asked) == 2

    path_of = Cache.path

    def rotting(self, url, shard):
        fetched = path_of(self, url, shard)
        flip(fetched, image_start(fetched, 5) + 40)
        return fetched

    monkeypatch.setattr(Cache, "path", rotting)
    with pytest.raises(
        DataError, match=r"s3://b/set/train-000000.tar: sample .*\n.*\n  upload a correct copy to the store"
    ):
        ShardReader(remote, cache=cfg).read(0, 5)


# ------------------------------------------------------------------------------------------- tables and index


def test_fifty_flips_over_tables_and_index_are_refused_or_change_nothing(made, tmp_path):
    files = sorted([*(tmp_path / "set").glob("*.npy"), *(tmp_path / "set").glob("*.json")])
    assert len(files) == 4
    original = contents_by_tarfile(made)
    whole = vars(made)
    draw = random.Random(1)
    fates: Counter[str] = Counter()
    for number in range(50):
        path = files[number % len(files)]
        position = draw.randrange(path.stat().st_size)
        bit = draw.randrange(8)
        flip(path, position, bit)
        try:
            index = load_index(tmp_path / "set")
            is_same = read_all(index) == original and vars(index) == whole
            fates["harmless" if is_same else "silent"] += 1
        except DataError as error:
            assert path.name in str(error)
            assert "index" in str(error)
            fates["refused"] += 1
        flip(path, position, bit)
    assert fates["silent"] == 0
    assert fates["refused"] >= 40
    assert fates.total() == 50


def test_a_table_of_another_set_is_refused_at_reading(made, tmp_path):
    others = islice(digits(True, image_size=16), 100, 150)
    write_set(others, tmp_path / "other", shard_samples=20)
    for path in (tmp_path / "other").glob("*.npy"):
        path.rename(tmp_path / "set" / path.name)
    with pytest.raises(
        DataError,
        match=r"train-000000.npy: not a valid table of train-000000.tar.*\n.*\n  run python -m jobs index /",
    ):
        ShardReader(made).read(0, 0)


def test_index_of_another_schema_is_refused_with_the_command(made, tmp_path):
    path = next((tmp_path / "set").glob("*.index.json"))
    content = json.loads(path.read_text())
    assert content["schema"] == 1
    path.write_text(json.dumps(content | {"schema": 2}))
    with pytest.raises(DataError, match=r"was written by a newer Patchline: it has schema 2, .* reads up to 1\n"):
        load_index(path)
    path.write_text(json.dumps(content | {"schema": 0}))
    with pytest.raises(DataError, match=r"has schema 0, expected 1; run `python -m jobs index` again"):
        load_index(path)


def test_the_label_of_an_oversize_image_is_compared_too(made, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_BYTES", 20)
    row = made.table(1)[3]
    assert ShardReader(made).read(1, 3)[0] == row["key"].decode()
    flip(Path(made.location(1)), int(row["label"]))
    with pytest.raises(DataError, match="differs from the index"):
        ShardReader(made).read(1, 3)
