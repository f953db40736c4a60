"""Workers without a cluster run on this machine (nodes of a Ray cluster: test_ray_nodes.py)."""

import dataclasses
import os

import pytest
import torch

from data.errors import ClusterError
from jobs.cluster.nodes import nodes_of
from jobs.cluster.worker_group import do_nothing
from jobs.cluster_config import ClusterConfig, WorkerRange

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("gpus", "world"), [(9, 4), (3, 2), (1, 1), (0, None)])
def test_plain_processes_use_the_largest_world_that_the_gpus_allow(gpus, world, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    on_cpus = ClusterConfig(workers=WorkerRange(least=1, most=6), backend="processes")
    on_gpus = dataclasses.replace(on_cpus, gpus_per_worker=1)
    worlds = (4, 2, 1)
    assert nodes_of(on_cpus).reserve("", worlds, print, do_nothing) == 4
    if world is not None:
        assert nodes_of(on_gpus).reserve("", worlds, print, do_nothing) == world
    else:
        with pytest.raises(ClusterError, match=r"at least 1 GPU for 1 worker with .*=1, but torch finds 0 on this"):
            nodes_of(on_gpus).reserve("", worlds, print, do_nothing)


def test_commands_of_a_process_share_agents_but_not_between_cpus_and_gpus() -> None:
    on_cpus = ClusterConfig(workers=2, backend="processes")
    on_gpus = dataclasses.replace(on_cpus, gpus_per_worker=1)
    machine = nodes_of(on_cpus)
    assert nodes_of(dataclasses.replace(on_cpus, workers=3)) is machine
    assert machine.cluster.workers == 3
    assert nodes_of(on_gpus) is not machine


def test_one_agent_has_the_places_of_all_workers_on_this_machine() -> None:
    machine = nodes_of(ClusterConfig(workers=3, backend="processes"))
    (agent,) = machine.agents(3)
    assert (agent.name, agent.node_id, agent.slots) == (os.uname().nodename, "", 3)
