"""How places are asked of Ray; test_ray_nodes.py asks a real cluster for them."""

import socket

import pytest

from jobs.cluster import ray_places

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("workers", "rooms", "sizes"),
    [
        (8000, [8] * 1000, [8] * 1000),
        (10, [3, 8, 1], [8, 2]),
        (5, [1, 2, 0], [2, 1, 1, 1]),  # an autoscaler is told of what has no room, a worker each
        (2, [], [1, 1]),
    ],
)
def test_a_bundle_holds_as_many_workers_as_a_node_has_room_for(workers, rooms, sizes) -> None:
    assert ray_places.bundle_sizes(workers, rooms) == sizes


@pytest.mark.parametrize(("room", "world"), [(4, 4), (3, 2), (100, 8), (1, 0)])
def test_the_largest_world_that_fits_is_chosen(room, world) -> None:
    assert ray_places.largest_within((8, 4, 2), room) == world


def test_bundles_are_kept_off_nodes_by_their_ids() -> None:
    assert ray_places.without_nodes(frozenset(), 2) is None
    selector = {"ray.io/node-id": "!in(a,b)"}
    assert ray_places.without_nodes({"b", "a"}, 2) == [selector, selector]


def test_a_node_is_there_if_its_kernel_takes_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        assert ray_places.takes_connections(node)
    assert not ray_places.takes_connections(node)
