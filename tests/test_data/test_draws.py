"""Random numbers by key, against the published generator and counts by hand."""

import numpy as np
import pytest

from data.draws import Draws, few_shot_rows, key_of, mix, permute, stratified

pytestmark = pytest.mark.quick

# The first outputs of Vigna's splitmix64.c for the seed 1234567, as published with the reference code.
SPLITMIX64 = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)


def test_draws_are_those_of_the_reference_splitmix64():
    draws = Draws(1234567)
    assert [draws.uniform() for _ in SPLITMIX64] == [(number >> 11) * 2.0**-53 for number in SPLITMIX64]


def test_mix_is_the_finaliser_of_the_same_generator():
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + golden * (step + 1)) % 2**64 for step in range(len(SPLITMIX64))]
    assert mix(np.array(states, np.uint64)).tolist() == list(SPLITMIX64)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 1000])
def test_permutation_maps_every_number_to_a_distinct_place(size):
    numbers = np.arange(size)
    sizes = np.full(size, size)
    for seed in range(3):
        sent = permute(numbers, sizes, np.repeat(key_of(seed), size))
        assert sorted(sent.tolist()) == list(range(size))


def test_first_places_of_permutations_are_spread_evenly():
    trials = 6000
    keys = key_of(np.arange(trials), 0)
    sent = permute(np.zeros(trials, np.int64), np.full(trials, 6), keys)
    counts = np.bincount(sent, minlength=6)
    # Six standard deviations of a binomial count of 6,000 draws at 1/6.
    assert abs(counts - 1000).max() < 6 * (6000 * (1 / 6) * (5 / 6)) ** 0.5


def test_below_is_in_range_and_reaches_both_ends():
    draws = Draws(7)
    assert {draws.below(3) for _ in range(200)} == {0, 1, 2}
    assert draws.below(0) == 0


def test_few_shot_rows_are_those_of_numpy_in_the_order_of_classes():
    labels = np.array([2, 0, 1, 0, 2, -1, 2, 1])
    rng = np.random.default_rng(5)
    expected = [rng.permutation([row for row in range(8) if labels[row] == label])[:2] for label in range(3)]
    assert few_shot_rows(labels, 2, 5).tolist() == np.concatenate(expected).tolist()


def test_every_stretch_of_a_stratified_order_has_its_share_of_each_class():
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    order = stratified(np.arange(100), labels, seed=0)
    assert sorted(order.tolist()) == list(range(100))
    for start in range(0, 100, 20):
        counts = np.bincount(labels[order[start : start + 20]], minlength=3)
        assert abs(counts - [12, 6, 2]).max() <= 2
