"""Which nodes of a cluster get no workers: avoided ones for a while, excluded ones for good."""

import pytest

from jobs.cluster import ray_exclusion
from jobs.cluster.ray_exclusion import NodeExclusion

pytestmark = pytest.mark.quick

SHARE = {"CPU": 2}
TOTAL = {"a": {"CPU": 4.0}, "b": {"CPU": 4.0}, "c": {"CPU": 3.0}}  # room for 2, 2 and 1 workers


def test_avoided_nodes_get_no_places_if_the_others_have_room() -> None:
    exclusion = NodeExclusion()
    exclusion.avoid(["a"])
    assert exclusion.of_places(3, SHARE, TOTAL) == {"a"}
    assert exclusion.of_places(4, SHARE, TOTAL) == set(), "a node that is about to leave is better than none"


def test_excluded_nodes_get_no_places_even_if_the_others_have_no_room() -> None:
    exclusion = NodeExclusion()
    exclusion.excluded.add("b")
    exclusion.avoid(["a"])
    assert exclusion.of_places(1, SHARE, TOTAL) == {"a", "b"}
    assert exclusion.of_places(4, SHARE, TOTAL) == {"b"}


def test_a_node_that_has_left_the_cluster_is_not_counted() -> None:
    exclusion = NodeExclusion()
    exclusion.avoid(["gone"])
    assert exclusion.of_places(5, SHARE, TOTAL) == set()


def test_a_node_is_avoided_for_a_while_and_sooner_taken_for_alive(monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(ray_exclusion.time, "monotonic", lambda: now[0])
    exclusion = NodeExclusion()
    exclusion.avoid(["a"])
    assert exclusion.long_avoided({"a"}) == set()
    now[0] += ray_exclusion.MISSED_S + 1
    assert exclusion.long_avoided({"a"}) == {"a"}
    assert exclusion.now() == {"a"}
    now[0] += ray_exclusion.AVOID_S
    assert exclusion.now() == set()


def test_what_was_known_over_an_earlier_connection_is_kept() -> None:
    before = NodeExclusion()
    before.avoid(["a"])
    before.excluded.add("b")
    after = NodeExclusion()
    after.add(before)
    assert after.now() == {"a", "b"}
