"""A worker that is slower than the others is found with its factor and cause, and equally fast workers are not."""

import numpy as np
import pytest

from benchmarks import slow_workers as bench
from pipeline.extras.slow_worker.comparison import CAUSES, PART, WINDOW, link_seconds, others_of, slow_workers

pytestmark = pytest.mark.quick


def window(world: int, seed: int = 0) -> np.ndarray:
    """Return the seconds of equal workers (W, S, causes): 31 ms of data loading and 969 ms of computing per step."""
    rng = np.random.default_rng(seed)
    seconds = np.zeros((world, WINDOW, len(CAUSES)))
    seconds[..., CAUSES.index("data")] = 0.031 * (1 + 0.1 * rng.standard_normal((world, WINDOW)))
    seconds[..., CAUSES.index("compute")] = 0.969 * (1 + 0.01 * rng.standard_normal((world, WINDOW)))
    return seconds


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8, 31])
def test_median_leaves_out_the_worker_itself(world):
    values = np.random.default_rng(world).random((2, world, 5))
    expected = np.empty_like(values)
    for group in range(2):
        for rank in range(world):
            expected[group, rank] = np.median([values[group, other] for other in range(world) if other != rank], 0)
    np.testing.assert_allclose(others_of(values), expected)


@pytest.mark.parametrize("world", [2, 3, 8, 512])
@pytest.mark.parametrize("cause", CAUSES)
def test_slow_worker_is_found_with_factor_and_cause(world, cause):
    seconds = window(world)
    rank = world - 1
    excess = 0.18
    if cause == "gc":  # every ninth step
        seconds[rank, ::9, CAUSES.index(cause)] = 9 * excess
    else:
        seconds[rank, :, CAUSES.index(cause)] += excess
    (found,) = slow_workers(seconds)
    assert (found.rank, found.cause) == (rank, cause)
    assert found.factor == pytest.approx(1.18, abs=0.02)
    usual = {"data": 0.031, "compute": 0.969}.get(cause, 0.0)
    assert found.others == pytest.approx(usual, rel=0.06)
    assert found.seconds == pytest.approx(usual + excess, rel=0.15)
    assert found.low <= found.others <= found.high


def test_worker_that_stops_in_one_of_ten_steps_is_found():
    seconds = window(4)
    seconds[2, 5::10, CAUSES.index("host")] = 4.0
    (found,) = slow_workers(seconds)
    assert (found.rank, found.cause) == (2, "host")
    assert found.factor == pytest.approx(1.4, abs=0.02)


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("cause", ["data", "compute", "gc"])
def test_cause_is_found_although_other_programs_take_much_time_from_all_workers(world, cause):
    """Waiting for a processor takes as long as computing, and varies by half."""
    seconds = window(world)
    rng = np.random.default_rng(5)
    seconds[..., CAUSES.index("host")] = 1 + 0.5 * rng.standard_normal((world, WINDOW))
    assert slow_workers(seconds) == []
    seconds[1, :, CAUSES.index(cause)] += 0.3
    (found,) = slow_workers(seconds)
    assert (found.rank, found.cause) == (1, cause)
    # A worker that computes longer also waits longer for a processor, in proportion.
    expected = 1 + 0.3 / 2 * (1 if cause == "data" else 2)
    assert found.factor == pytest.approx(expected, abs=0.03)


def test_longer_waits_for_a_processor_by_a_worker_that_computes_longer_are_computing():
    seconds = window(2)
    seconds[..., CAUSES.index("host")] = 2 * seconds[..., CAUSES.index("compute")]
    seconds[0] *= 1.5
    seconds[0, :, CAUSES.index("data")] /= 1.5
    (found,) = slow_workers(seconds)
    assert (found.rank, found.cause) == (0, "compute")
    assert found.factor == pytest.approx(1.5, abs=0.02)


def test_worker_that_is_faster_in_total_is_not_slow():
    seconds = window(2)
    seconds[1, :, CAUSES.index("data")] += 0.1
    seconds[1, :, CAUSES.index("compute")] -= 0.2
    assert [worker.rank for worker in slow_workers(seconds)] == [0]


@pytest.mark.parametrize("world", [1, 2, 8])
def test_change_that_all_workers_share_is_no_difference(world):
    seconds = window(world)
    seconds[:, 30:] *= 3
    assert slow_workers(seconds) == []


def test_difference_in_one_half_of_the_window_is_not_enough():
    seconds = window(4)
    seconds[1, : WINDOW // 2] *= 2
    assert slow_workers(seconds) == []


def test_two_slow_workers_are_both_found_the_slowest_first():
    seconds = window(8)
    seconds[2] *= 1.2
    seconds[5] *= 1.4
    assert [worker.rank for worker in slow_workers(seconds)] == [5, 2]


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_equally_fast_workers_are_not_slow(world):
    """The benchmark draws a million windows."""
    for number, noise in enumerate(bench.NOISE):
        rng = np.random.default_rng([world, number])
        for _ in range(64 // world):
            (seconds,) = bench.with_links(bench.quiet_groups(noise, rng, 1, world, WINDOW), slice(0, WINDOW))
            assert slow_workers(seconds) == [], noise.__name__


@pytest.mark.parametrize("world", [2, 64])
def test_planted_cases_are_right(world):
    """The benchmark has more, with other noise."""
    for number, cause in enumerate(CAUSES):
        case = bench.planted_case(cause, 1.25, bench.normal, world, [world, number])
        assert case.named == cause
        assert case.delay <= 100


def test_link_costs_what_a_longer_round_trip_adds_to_the_collectives():
    own = np.full((3, 2 * PART), 1.0)
    own[0] = 0.5
    steps = np.full(2 * PART, 1.4)  # 0.4 s more than the slowest worker's
    round_trips = np.array([[0.001, 0.001], [0.001, 0.001], [0.001, 0.004]])
    link = link_seconds(own, steps, round_trips, round_trips.min(1))
    assert link[:2].max() == 0
    assert link[2, :PART].max() == 0
    np.testing.assert_allclose(link[2, PART:], 0.4 * 3 / 4)


@pytest.mark.parametrize(
    ("round_trips", "expected"),
    [
        ([0.001, 0.0025, 0.001], 0),  # less than three times as long
        ([0.00001, 0.0001, 0.00001], 0),  # ten times, but only 0.09 ms longer
        ([np.nan, 0.004, np.nan], 0),  # nothing to compare with
        ([np.nan, np.nan, np.nan], 0),
    ],
)
def test_small_and_unknown_differences_of_links_do_not_count(round_trips, expected):
    trips = np.array(round_trips)[:, None]
    link = link_seconds(np.ones((3, PART)), np.full(PART, 2.0), trips, trips[:, 0])
    assert np.abs(link).max() == expected


def test_two_workers_compare_their_link_with_its_past():
    round_trips = np.array([[0.010], [0.011]])
    link = link_seconds(np.ones((2, PART)), np.full(PART, 1.5), round_trips, np.array([0.001, 0.0011]))
    np.testing.assert_allclose(link, 0.45)
    seconds = window(2)
    seconds[..., CAUSES.index("link")] = 0.45
    assert {worker.cause for worker in slow_workers(seconds)} == {"link"}
