"""Which nodes of a Ray cluster have a warm agent; test_worker_group.py runs workers through real ones."""

import pytest

from jobs.cluster.ray_agents import RayAgents
from jobs.cluster_config import ClusterConfig

pytestmark = pytest.mark.quick


def test_a_few_spare_nodes_have_a_warm_agent(monkeypatch) -> None:
    agents = RayAgents(ClusterConfig())
    started: list[str] = []

    def start(node_id: str) -> None:
        started.append(node_id)
        agents.actors[node_id] = None

    monkeypatch.setattr(agents, "start", start)
    monkeypatch.setattr(agents, "actors", {"a": None})
    monkeypatch.setattr(agents, "used", {"a"})
    # A node with a worker and room for another one is no spare one that lacks an agent.
    for spare, expected in [("a", ""), ("bcd", "bc"), ("bcd", ""), ("cde", "d"), ("bcdefg", ""), ("ef", "ef")]:
        agents.warm_up_spares(set(spare))
        assert started == list(expected), spare
        started.clear()
    # Those of workers with GPUs import nothing ahead.
    monkeypatch.setattr(agents, "cluster", ClusterConfig(gpus_per_worker=1))
    agents.warm_up_spares({"x", "y"})
    assert not started


def test_an_agent_that_is_not_there_can_be_ended() -> None:
    agents = RayAgents(ClusterConfig())
    agents.end("a")
    assert agents.actors == {}
