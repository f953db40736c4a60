"""The search identifies the samples that cause a spike."""

import math
from collections.abc import Sequence

import pytest

from pipeline.extras.replays.search import culprits, is_spike, limit_of

pytestmark = pytest.mark.quick


def test_a_spike_exceeds_twice_the_usual_value_and_its_limit_is_the_midpoint_on_a_log_scale() -> None:
    assert [is_spike(value, 0.4) for value in (0.5, 0.8, 0.81, math.inf)] == [False, False, True, True]
    assert limit_of(40.0, 0.4) == pytest.approx(4.0)  # ten times the usual value, a tenth of the spike
    assert limit_of(math.inf, 0.4) == pytest.approx(4.0), "ten times the usual value, as while training"


@pytest.mark.parametrize("value", [math.inf, 40.0])
def test_single_culprit_is_found_in_twelve_evaluations_at_any_position(value: float) -> None:
    for place in range(0, 1024, 31):
        taken = []

        def without(rows: Sequence[int], place: int = place, taken: list[int] = taken) -> float:
            taken.append(len(rows))
            return (0.0 if place in rows else value) + (1024 - len(rows)) / 1024

        found = culprits(without, 1024, 6.0, most=19, twins_of=lambda row: [row])
        assert (found.rows, found.is_found) == ([place], True)
        assert len(taken) <= 12


def test_copies_are_found_together_and_no_sample_is_named_if_all_cause_the_spike() -> None:
    copies = {17, 400, 1003}

    def without(rows: Sequence[int]) -> float:
        return 40.0 if copies - set(rows) else 1.0

    found = culprits(without, 1024, 6.0, most=19, twins_of=lambda row: sorted(copies))
    assert (set(found.rows), found.is_found, len(found.twins)) == (copies, True, 2)

    found = culprits(lambda rows: 40.0 * (1024 - len(rows)) / 1024, 1024, 6.0, most=19, twins_of=lambda row: [row])
    assert not found.is_found
    assert 871 <= len(found.rows) < 900  # without 870 of 1,024 it is 6.02
