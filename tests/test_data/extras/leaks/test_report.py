"""The leak report counts the leaked samples of each set, and names a few pairs."""

import pytest

from data.extras.leaks.document import Compared, Leaks, Pair
from data.extras.leaks.report import caption, lines
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits

pytestmark = pytest.mark.quick


def test_leaked_samples_are_counted_by_set_and_kind(tmp_path) -> None:
    images = list(digits(train=False, image_size=16))[:10]
    train = pack(images[:8], tmp_path / "train", name="train")
    test = pack(images[8:], tmp_path / "test", name="test")
    first, second = (("train-000000.tar", images[number].key) for number in (0, 1))
    leaked = ("test-000000.tar", images[8].key)
    looked_at = {"train": 8, "test": 2, "train_undecodable": 0, "test_undecodable": 0, "train_flat": 0}
    leaks = Leaks(
        (Compared("a", train.digest),),
        (Compared("b", test.digest),),
        (Pair(first, leaked, "exact", 0.0), Pair(second, leaked, "perceptual", 0.04)),
        looked_at=looked_at,
    )
    report = lines(leaks, {"a": train}, {"b": test})
    assert report[0] == "8 training and 2 test samples compared, 2 pairs"
    assert "test  b: 1 of 2 samples leak (50.000%)" in report
    assert "train a: 2 of 8 samples leak (25.000%)" in report
    assert "exact 1  perceptual 1" in report


def test_key_with_terminal_escapes_is_escaped() -> None:
    pair = Pair(("a.tar", "\x1b[2J"), ("b.tar", "k"), "exact", 0.0)
    assert caption(pair) == r"a.tar \x1b[2J = b.tar k: exact, distance 0"
