"""How many workers fit on which nodes (with a real cluster: test_ray_nodes.py)."""

import pytest

from jobs.cluster.capacity import ClusterState, in_words, room_for

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("share", "nodes", "room"),
    [
        ({"CPU": 2}, {"n1": {"CPU": 5.0}, "n2": {"CPU": 1.0}}, 2),  # the rest of two nodes is not enough for a worker
        ({"CPU": 1, "GPU": 1}, {"n1": {"CPU": 8.0, "GPU": 3.0}, "n2": {"CPU": 8.0}}, 3),
        ({"CPU": 1}, {"n1": {"CPU": 0.5}}, 0),
        ({"CPU": 1}, {}, 0),
    ],
)
def test_worker_has_room_if_one_node_has_all_its_resources(share, nodes, room) -> None:
    assert room_for(share, nodes) == room


def test_draining_node_has_no_free_resources() -> None:
    has = {"n1": {"CPU": 4.0}, "n2": {"CPU": 2.0}}
    state = ClusterState(has, has, draining={"n1"})
    assert state.staying == {"n2": {"CPU": 2.0}}


def test_amounts_are_formatted_in_words() -> None:
    assert in_words({"CPU": 4.0, "GPU": 1}) == "4 CPUs and 1 GPUs"
