"""Leaks: training images that are in a test set, planted and found; and what a leaks.json says of a set."""

import json

import cv2
import numpy as np
import pytest

from data.errors import DataError
from data.leaks.document import (
    Compared,
    Leaks,
    Pair,
    leaked_test_samples,
    leaked_train_samples,
    read_leaks,
    write_leaks,
)
from data.shards.packing import pack
from data.shards.sources import Sample
from data.shards.subset import Rule, make_subset


def picture(value: int) -> bytes:
    return cv2.imencode(".jpg", np.full((16, 16, 3), value, np.uint8))[1].tobytes()


def small_set(folder, count: int = 7):
    samples = [Sample(f"s{number}", picture(10 * number), (number % 3,)) for number in range(count)]
    return pack(samples, folder, name="t", shard_samples=3)


# ------------------------------------------------------------------------------------------ the document


def test_the_document_marks_the_samples_of_the_very_set_in_its_order(tmp_path):
    train = small_set(tmp_path / "train", 9)
    test = small_set(tmp_path / "test")
    other = small_set(tmp_path / "other", 8)  # whose shards and keys are called alike
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
    assert np.flatnonzero(leaked_test_samples(leaks, test)).tolist() == [4, 6]
    assert np.flatnonzero(leaked_test_samples(leaks, other)).tolist() == [2]
    assert np.flatnonzero(leaked_train_samples(leaks, train)).tolist() == [0, 1, 8]
    # Of a subset of the test set: the same samples, wherever they stand in it.
    half = make_subset(test, tmp_path / "half", Rule(keep=(0, 1)))
    assert leaked_test_samples(leaks, half).tolist() == [key in ("s4", "s6") for key in ("s0", "s1", "s3", "s4", "s6")]
    # And a subset of the training set without them, by the document itself.
    clean = make_subset(train, tmp_path / "clean", Rule(but=str(tmp_path / "leaks.json")))
    assert [row["key"] for n in range(len(clean.shards)) for row in clean.table(n)] == [
        b"s2",
        b"s3",
        b"s4",
        b"s5",
        b"s6",
        b"s7",
    ]
    with pytest.raises(DataError, match=rf"{train.digest[:12]}.*is none of the test sets that were compared"):
        leaked_test_samples(leaks, train)


def test_a_document_made_by_hand_is_read_and_an_altered_one_refused(tmp_path):
    path = tmp_path / "leaks.json"
    by_hand = {
        "schema": 1,
        "train": [{"path": "a", "digest": "aa"}],
        "test": [{"path": "b", "digest": "bb"}],
        "pairs": [{"train": ["x.tar", "1"], "test": ["y.tar", "2"], "kind": "exact", "distance": 0}],
    }
    path.write_text(json.dumps(by_hand))
    leaks = read_leaks(path)
    assert leaks.pairs == (Pair(("x.tar", "1"), ("y.tar", "2"), "exact", 0.0),)
    write_leaks(path, leaks)
    path.write_text(path.read_text().replace('"2"', '"3"'))
    with pytest.raises(DataError, match="seal does not match"):
        read_leaks(path)
    for wrong in ({"schema": 2}, {"pairs": [{"train": "x"}]}, {"pairs": [{**by_hand["pairs"][0], "test_set": 3}]}):
        path.write_text(json.dumps({**by_hand, **wrong}))
        with pytest.raises(DataError, match="jobs leaks"):
            read_leaks(path)
    with pytest.raises(DataError, match="there is no such document"):
        read_leaks(tmp_path / "none.json")
