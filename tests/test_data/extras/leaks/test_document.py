"""leaks.json marks the right samples, and any changed bit is detected."""

import json

import cv2
import numpy as np
import pytest

from data.errors import DataError
from data.extras.leaks.document import Compared, Leaks, Pair, in_pairs, read_leaks, write_leaks
from data.extras.shards.packing import pack
from data.extras.shards.subset import Rule
from data.extras.sources.samples import Sample
from data.seal import seal, unseal
from tests.support.archives import make_subset

pytestmark = pytest.mark.quick


def picture(value: int) -> bytes:
    return cv2.imencode(".jpg", np.full((16, 16, 3), value, np.uint8))[1].tobytes()


def small_set(folder, count: int = 7):
    samples = [Sample(f"s{number}", picture(10 * number), (number % 3,)) for number in range(count)]
    return pack(samples, folder, name="t", shard_samples=3)


def test_leaked_samples_are_marked_in_the_order_of_the_set(tmp_path):
    train = small_set(tmp_path / "train", 9)
    test = small_set(tmp_path / "test")
    other = small_set(tmp_path / "other", 8)  # with the same shard names and keys
    pairs = (
        Pair(("t-000000.tar", "s1"), ("t-000001.tar", "s4"), "exact", 0.0),
        Pair(("t-000002.tar", "s8"), ("t-000001.tar", "s4"), "perceptual", 0.1),
        Pair(("t-000000.tar", "s1"), ("t-000002.tar", "s6"), "embedding", 0.02),
        Pair(("t-000000.tar", "s0"), ("t-000000.tar", "s2"), "exact", 0.0, test_set=1),
    )
    sets = (Compared("test", test.digest), Compared("other", other.digest))
    leaks = Leaks((Compared("train", train.digest),), sets, pairs, {"threshold": 3})
    write_leaks(tmp_path / "leaks.json", leaks)
    assert read_leaks(tmp_path / "leaks.json") == leaks
    assert np.flatnonzero(in_pairs(leaks, test, "test")).tolist() == [4, 6]
    assert np.flatnonzero(in_pairs(leaks, other, "test")).tolist() == [2]
    assert np.flatnonzero(in_pairs(leaks, train, "train")).tolist() == [0, 1, 8]
    # In a subset of the test set the same samples are found, at their new positions.
    half = make_subset(test, tmp_path / "half", Rule(keep=(0, 1)))
    assert in_pairs(leaks, half, "test").tolist() == [key in ("s4", "s6") for key in ("s0", "s1", "s3", "s4", "s6")]
    # The document itself also selects the subset of the training set without them.
    clean = make_subset(train, tmp_path / "clean", Rule(but=str(tmp_path / "leaks.json")))
    keys = [row["key"] for number in range(len(clean.shards)) for row in clean.table(number)]
    assert keys == b"s2 s3 s4 s5 s6 s7".split()
    with pytest.raises(DataError, match=rf"{train.digest[:12]}.*is not one of the test sets in leaks.json"):
        in_pairs(leaks, train, "test")


def test_pairs_of_a_document_without_set_numbers_belong_to_the_first_sets(tmp_path):
    pair = Pair(("t-000000.tar", "s1"), ("t-000001.tar", "s4"), "exact", 0.0)
    sets = (Compared("first", "a" * 64), Compared("second", "b" * 64))
    write_leaks(tmp_path / "leaks.json", Leaks(sets, sets, (pair,), {}))
    content = unseal((tmp_path / "leaks.json").read_bytes())
    for entry in content["pairs"]:
        entry.pop("train_set", None)
        entry.pop("test_set", None)
    (tmp_path / "leaks.json").write_text(seal(content))
    [read] = read_leaks(tmp_path / "leaks.json").pairs
    assert (read.train_set, read.test_set) == (0, 0)


def test_document_with_any_changed_bit_is_rejected(tmp_path):
    path = tmp_path / "leaks.json"
    pair = Pair(("x.tar", "1"), ("y.tar", "2"), "exact", 0.0)
    write_leaks(path, Leaks((Compared("a", "aa"),), (Compared("b", "bb"),), (pair,), {"fits": 0.88}))
    whole = path.read_bytes()
    # One bit of every byte: in values, and in names such as that of the digest itself.
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 7]) + whole[place + 1 :])
        with pytest.raises(DataError, match="jobs leaks` again"):
            read_leaks(path)
    for text in (b"", whole[:-30], json.dumps({"schema": 2, "train": [], "test": [], "pairs": []}).encode()):
        path.write_bytes(text)
        with pytest.raises(DataError, match="jobs leaks` again"):
            read_leaks(path)
    entries = json.loads(whole)
    del entries["sha256"]
    entry = entries["pairs"][0]
    path.write_text(seal({**entries, "schema": 9}))
    with pytest.raises(DataError, match="written by a newer Patchline: it has schema 9"):
        read_leaks(path)
    for wrong in ({"pairs": [{"train": "x"}]}, {"pairs": [{**entry, "test_set": 3}]}):
        path.write_text(seal({**entries, **wrong}))
        with pytest.raises(DataError, match="jobs leaks"):
            read_leaks(path)
    with pytest.raises(DataError, match="file not found"):
        read_leaks(tmp_path / "none.json")
