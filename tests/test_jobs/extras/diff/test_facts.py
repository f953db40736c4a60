"""Facts are compared by value, whatever their text."""

import pytest

from jobs.extras.diff.facts import Effect, Fact, differences

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        (Fact(1, "one"), Fact(1, "1"), True),
        (Fact(1, "one"), Fact(2, "one"), False),
        (Fact(100, "100", slack=8), Fact(107, "107"), True),
        (Fact(100, "100", slack=8), Fact(109, "109"), False),
        (Fact((1, 2), "the best of 1, 2"), Fact(2, "2"), True),
        (Fact(3, "3"), Fact((1, 2), "the best of 1, 2"), False),
        (Fact((1, 2), ""), Fact((1, 2), ""), True),
        (Fact((1, 2), ""), Fact((2, 1), ""), True),
        (Fact((1, 2), ""), Fact((1, 3), ""), False),
        (Fact([1, 2], ""), Fact([2, 1], ""), False),
    ],
)
def test_facts_are_equal_within_their_slack_or_if_one_of_several_values_matches(first, second, is_equal) -> None:
    assert first.equals(second) is is_equal
    assert second.equals(first) is is_equal
    assert (differences({"name": first}, {"name": second}) == []) is is_equal


def test_a_fact_missing_from_one_stage_is_a_difference() -> None:
    fact = Fact(1, "one", effect=Effect.ORDER)
    (difference,) = differences({}, {"name": fact})
    assert difference.words == ("absent", "one")
    assert difference.known is fact
    assert not difference.is_unknown


def test_a_fact_of_unknown_value_equals_no_other() -> None:
    (difference,) = differences({"name": Fact(None, "")}, {"name": Fact(None, "")})
    assert difference.is_unknown


def test_differences_keep_the_order_of_the_facts() -> None:
    first = {"b": Fact(1, ""), "same": Fact(0, ""), "a": Fact(1, "")}
    second = {"c": Fact(1, ""), "a": Fact(2, ""), "same": Fact(0, "")}
    assert [difference.name for difference in differences(first, second)] == ["b", "a", "c"]
