"""Selection of worker pairs to measure, and their schedule."""

import pytest

from pipeline.extras.preflight.network import pairs_to_measure, rounds_of

pytestmark = pytest.mark.quick


def test_many_workers_are_paired_with_neighbours_and_nodes_in_disjoint_rounds() -> None:
    assert pairs_to_measure(["a", "a", "b"]) == [(0, 1), (0, 2), (1, 2)]
    nodes = [f"n{rank // 8}" for rank in range(512)]
    pairs = pairs_to_measure(nodes)
    assert len(pairs) < 512 + 64 * 6
    assert all(low < high for low, high in pairs)
    neighbours = {(rank, rank + 1) for rank in range(511)} | {(0, 511)}
    assert neighbours <= set(pairs)
    assert {(0, 8), (0, 16), (0, 256), (8, 136)} <= set(pairs), "first workers, at 1, 2, … 32 nodes' distance"
    rounds = rounds_of(pairs)
    assert sorted(pair for pairs_at_once in rounds for pair in pairs_at_once) == pairs
    for pairs_at_once in rounds:
        ranks = [rank for pair in pairs_at_once for rank in pair]
        assert len(ranks) == len(set(ranks))
