"""How places are requested from Ray (from a real cluster: test_ray_nodes.py)."""

import socket

import pytest

from jobs.cluster import ray_places
from jobs.cluster.capacity import ClusterState
from jobs.cluster.ray_places import RayPlaces
from jobs.cluster_config import ClusterConfig

pytestmark = pytest.mark.quick

TOTAL = {"a": {"CPU": 4.0}, "b": {"CPU": 4.0}, "c": {"CPU": 3.0}}  # room for 2, 2 and 1 workers of two CPUs
STATE = ClusterState(TOTAL, TOTAL, set())


@pytest.mark.parametrize(
    ("workers", "rooms", "sizes"),
    [
        (8000, [8] * 1000, [8] * 1000),
        (10, [3, 8, 1], [8, 2]),
        (5, [1, 2, 0], [2, 1, 1, 1]),  # workers without room get one bundle each, for an autoscaler
        (2, [], [1, 1]),
    ],
)
def test_bundle_holds_as_many_workers_as_fit_on_a_node(workers, rooms, sizes) -> None:
    assert ray_places.bundle_sizes(workers, rooms) == sizes


@pytest.mark.parametrize(("room", "world"), [(4, 4), (3, 2), (100, 8), (1, 0)])
def test_the_largest_world_that_fits_is_chosen(room, world) -> None:
    assert ray_places.largest_within((8, 4, 2), room) == world


def test_bundles_exclude_nodes_by_id() -> None:
    assert ray_places.without_nodes(frozenset(), 2) is None
    selector = {"ray.io/node-id": "!in(a,b)"}
    assert ray_places.without_nodes({"b", "a"}, 2) == [selector, selector]


def test_node_is_alive_if_its_kernel_accepts_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        assert ray_places.takes_connections(node)
    assert not ray_places.takes_connections(node)


# ------------------------------------------------------------------------ nodes without places


@pytest.fixture
def places() -> RayPlaces:
    return RayPlaces(ClusterConfig(cpus_per_worker=2), is_embedded=False)


def test_avoided_nodes_get_no_places_if_the_others_have_room(places) -> None:
    places.avoid(["a"])
    assert places._avoided_for(3, STATE) == {"a"}
    assert places._avoided_for(4, STATE) == set(), "a node that is about to leave is better than none"


def test_excluded_nodes_get_no_places_even_if_the_others_have_no_room(places) -> None:
    places.excluded.add("b")
    places.avoid(["a"])
    assert places._avoided_for(1, STATE) == {"a", "b"}
    assert places._avoided_for(4, STATE) == {"b"}


def test_a_node_that_has_left_the_cluster_is_not_counted(places) -> None:
    places.avoid(["gone"])
    assert places._avoided_for(5, STATE) == set()


def test_node_is_avoided_for_ten_minutes_and_considered_alive_after_70_s(places, monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(ray_places.time, "monotonic", lambda: now[0])
    places.avoid(["a"])
    now[0] += 69
    assert places._long_avoided({"a"}) == set()
    now[0] += 2
    assert places._long_avoided({"a"}) == {"a"}
    now[0] = 1599.0
    assert places.avoided_now() == {"a"}
    now[0] = 1601.0
    assert places.avoided_now() == set()
