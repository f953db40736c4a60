"""Counts of skipped members, compared with a plain count."""

from collections import Counter

import pytest

from data.extras.sources.refusals import MAX_NAME, MAX_TYPES, OTHER_TYPES, Refusals, refusal_lines

pytestmark = pytest.mark.quick


def test_reasons_are_counted_with_their_first_name():
    refusals = Refusals()
    skipped = [("truncated", "b"), ("hidden", b"c\xff"), ("truncated", "a"), ("truncated", "x" * 1000)]
    for reason, name in skipped:
        refusals.add(reason, name)
    assert refusals.counts == Counter(reason for reason, _ in skipped)
    assert refusals.first == {"truncated": "b", "hidden": "c\ufffd"}
    refusals.add("long", "x" * 1000)
    assert refusals.first["long"] == "x" * MAX_NAME


def test_many_types_of_a_set_share_one_reason():
    total = Refusals()
    for shard in range(3):
        of_shard = Refusals()
        for number in range(20):
            of_shard.add_type(f"t{shard}-{number}", f"a.t{shard}-{number}")
        total.add_all(of_shard, f"{shard}.tar")
    assert len(total.counts) == MAX_TYPES + 1
    assert total.counts.total() == 60
    assert total.counts[OTHER_TYPES] == 60 - MAX_TYPES
    assert total.first["member type .t0-0"] == "a.t0-0 of 0.tar"


def test_lines_begin_with_the_most_frequent_reason_and_have_no_control_characters():
    refusals = Refusals()
    refusals.add("rare", "a\x1b[31m")
    refusals.add("common", "b", 1200)
    first, second = refusal_lines(refusals, "refused: ")
    assert first == "refused: 1,200 × common, first b"
    assert "\x1b" not in second
