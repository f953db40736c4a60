"""Lists of samples select the right rows of a set."""

import json
from dataclasses import replace

import numpy as np
import pytest

from data.errors import DataError
from data.extras.listed import listed_rows
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Return shards of 3, 3 and 1 samples with keys s0 to s5; the last shard repeats s1."""
    some = list(digits(train=False, image_size=16))[:7]
    keys = ["s0", "s1", "s2", "s3", "s4", "s5", "s1"]
    samples = [replace(sample, key=key) for key, sample in zip(keys, some, strict=True)]
    return pack(samples, tmp_path_factory.mktemp("set"), name="t", shard_samples=3)


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("list.txt", "s4\ns0\n", [0, 4]),
        ("list.txt", "\ufeffs2\n\n", [2]),
        ("list.txt", "t-000002.tar\ts1\ns5", [5, 6]),
        ("list.json", json.dumps(["s3", ["t-000000.tar", "s1"]]), [1, 3]),
    ],
)
def test_list_selects_rows_of_the_set(name, text, rows, index, tmp_path):
    (tmp_path / name).write_text(text)
    assert np.sort(listed_rows(str(tmp_path / name), index)).tolist() == rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("list.txt", "s9\n", "1 of the 1 listed samples are not in"),
        ("list.txt", "s1\n", r"1 of the listed keys are in several shards: s1 \(t-000000.tar, t-000002.tar\)"),
        ("list.txt", "t-000009.tar\ts1\n", "0 shards of .* match t-000009.tar"),
        ("list.txt", "\n", "the file is empty"),
        ("list.json", "[3]", "not a list of samples"),
        ("list.json", "{}", "the JSON value is not a list"),
    ],
)
def test_list_that_does_not_match_the_set_is_rejected(name, text, message, index, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        listed_rows(str(tmp_path / name), index)


def test_missing_list_is_reported_with_its_path(index):
    with pytest.raises(DataError, match=r"/nowhere/list\.txt: file not found"):
        listed_rows("/nowhere/list.txt", index)
