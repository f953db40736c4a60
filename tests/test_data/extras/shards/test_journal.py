"""Interrupted packing resumes from its journal unless the recorded inputs have changed."""

import contextlib
import os
import time
from dataclasses import replace

import pytest

from data.errors import DataError
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample
from data.files import write_atomically
from data.images.decode import library
from data.index.document import load_index
from data.reader import ShardReader
from tests.support.tars import picture

pytestmark = pytest.mark.quick

needs_binding = pytest.mark.skipif(library() is None, reason="no C++ compiler, or Pillow is not the wheel")


def samples(count: int, classes: int = 5):
    return [Sample(f"s{n:05d}", picture(n % 256), (n % classes,)) for n in range(count)]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_killed_packing_resumes_and_ends_with_the_same_bytes(tmp_path):
    def dying():
        yield from samples(25)[:17]
        raise KeyboardInterrupt

    pack(samples(25), tmp_path / "whole", shard_samples=5)
    with pytest.raises(KeyboardInterrupt):
        pack(dying(), tmp_path / "killed", shard_samples=5)
    assert len(list((tmp_path / "killed").glob("*.tar"))) == 3
    assert not list((tmp_path / "killed").glob("*.json"))
    kept = (tmp_path / "killed" / "train-000000.tar").stat().st_mtime_ns
    pack(samples(25), tmp_path / "killed", shard_samples=5)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert (tmp_path / "killed" / "train-000000.tar").stat().st_mtime_ns == kept


def test_kill_during_a_resume_from_a_journal_loses_no_finished_shard(tmp_path, monkeypatch):
    wrong = [*samples(16), Sample("last", picture(0), (7,))]
    with pytest.raises(DataError, match="labels"):
        pack(wrong, tmp_path, shard_samples=5, classes=5)
    partial = tmp_path / "train.index.json.partial"
    before = partial.read_text()
    assert len(before.splitlines()) == 4, "the setting and three shards"

    def killed(path, content):
        write_atomically(path, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("data.seal.write_atomically", killed)
        pack(wrong, tmp_path, shard_samples=5, classes=5)
    assert partial.read_text() == before


def test_packing_resumes_from_a_journal_with_a_truncated_line(tmp_path):
    pack(samples(25), tmp_path / "whole", shard_samples=5)
    with pytest.raises(DataError, match="labels"):
        pack([*samples(15), Sample("last", picture(0), (1_000,))], tmp_path / "killed", shard_samples=5, classes=5)
    journal = tmp_path / "killed" / "train.index.json.partial"
    journal.write_bytes(journal.read_bytes()[:-20])
    pack(samples(25), tmp_path / "killed", shard_samples=5, classes=5)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_journal_of_other_samples_is_not_trusted(tmp_path):
    def dying():
        yield from samples(17)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(dying(), tmp_path, shard_samples=5)
    others = [Sample(f"x{s.key[1:]}", s.image, s.labels) for s in samples(8)]
    assert ShardReader(made := pack(others, tmp_path, shard_samples=5)).read(0, 0)[0] == "x00000"
    assert made.samples == 8


def test_labels_corrected_after_a_stop_are_in_the_shards_that_were_finished_before(tmp_path):
    wrong = [*samples(16), Sample("last", picture(0), (7,))]
    with pytest.raises(DataError, match="labels"):
        pack(wrong, tmp_path / "one", shard_samples=5, classes=5)
    right = [replace(sample, labels=(0,)) for sample in wrong]
    pack(right, tmp_path / "one", shard_samples=5, classes=5)
    pack(right, tmp_path / "two", shard_samples=5, classes=5)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("restarts", [False, pytest.param(True, marks=needs_binding)])
def test_images_corrected_after_a_stop_are_too(tmp_path, restarts):
    for name in "abcd":
        (tmp_path / f"{name}.jpg").write_bytes(picture(1))
    originals = [Sample(name, tmp_path / f"{name}.jpg", (0,)) for name in "abcd"]
    with pytest.raises(DataError, match="labels"):
        pack(
            [*originals, Sample("e", picture(0), (7,))], tmp_path / "one", shard_samples=2, classes=5, restarts=restarts
        )
    (tmp_path / "c.jpg").write_bytes(picture(2))
    os.utime(tmp_path / "c.jpg", (time.time() + 5, time.time() + 5))
    for folder in ("one", "two"):
        pack(originals, tmp_path / folder, shard_samples=2, classes=5, restarts=restarts)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_images_in_memory_that_changed_after_a_stop_are_packed_again(tmp_path):
    originals = samples(6)
    for label in (7, 0):
        with contextlib.suppress(DataError):
            pack([*originals, Sample("last", picture(0), (label,))], tmp_path / "one", shard_samples=3, classes=5)
        originals[0] = replace(originals[0], image=originals[0].image[::-1])
    originals[0] = replace(originals[0], image=originals[0].image[::-1])
    pack([*originals, Sample("last", picture(0), (0,))], tmp_path / "two", shard_samples=3, classes=5)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_interrupted_packing_is_not_mistaken_for_a_data_set(tmp_path):
    wrong = [*samples(5), Sample("last", picture(0), (7,))]
    with pytest.raises(DataError, match="labels"):
        pack(wrong, tmp_path, name="set", shard_samples=5, classes=5)
    (tmp_path / ".tmp-4000000-4000000-set-000001.tar").write_bytes(b"half")
    with pytest.raises(DataError, match="a pack command has not finished; run the same `jobs pack` again"):
        build_index(tmp_path, name="set")
    with pytest.raises(DataError, match=r"set\.index\.json\.partial belongs to an unfinished packing or indexing"):
        load_index(tmp_path)
    made = pack([replace(sample, labels=(0,)) for sample in wrong], tmp_path, name="set", shard_samples=5, classes=5)
    assert made.samples == 6
    assert not list(tmp_path.glob(".tmp-*"))
