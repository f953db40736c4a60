"""Where workers are placed: on this machine, or on the nodes of a Ray cluster (ray_nodes.py); nodes.py is the contract.

Ray takes seconds to import, so only a cluster that needs it imports it.
"""

import dataclasses
import os
from collections.abc import Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from data.errors import ClusterError
from jobs.cluster import embedded
from jobs.cluster.agent import Agent
from jobs.cluster.nodes import Log, NodeAgent, Nodes, SparePlace, Tick
from jobs.cluster.ray import connect
from jobs.cluster.worker import LOOPBACK
from jobs.cluster_config import ClusterConfig, cores

if TYPE_CHECKING:
    from jobs.cluster.ray_nodes import RayNodes


class ThisMachine:
    """Plain processes of this machine: one node, whose agent is an object in this process."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster
        self.agent = Agent(has_gpus=cluster.gpus_per_worker > 0)
        # The poll that is under way, and what is asked of the agent meanwhile.
        self.threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="agent")
        self.name = ""

    def warm_up(self) -> None:
        """Start the fork server: it imports while the driver still prepares the work."""
        self.name = self.agent.warm_up()

    def reserve(self, run: str, worlds: Sequence[int], log: Log, on_tick: Tick) -> int:
        """Return the largest world for which this machine has the GPUs. Raises ClusterError where it has too few."""
        gpus = self.cluster.gpus_per_worker
        if not gpus:
            return worlds[0]
        present, _ = self.gpus_present()
        for world in worlds:
            if world * gpus <= present:
                return world
        raise ClusterError(
            f"{worlds[-1]} workers want {worlds[-1] * gpus} GPUs and this machine has {present}\n"
            f"the processes backend stays on one machine\n"
            f"type cluster.workers={max(1, present // gpus)}, cluster.gpus_per_worker=0 "
            f"or cluster.backend=ray for more machines"
        )

    def agents(self, world: int, on_tick: Tick) -> list[NodeAgent]:
        """Return the agent of this machine."""
        self.warm_up()
        return [NodeAgent(self.name, "", LOOPBACK, world, self.call)]

    def call(self, method: str, *arguments: object) -> "Future[Any]":
        """Call a method of the agent in another thread."""
        return self.threads.submit(getattr(self.agent, method), *arguments)

    def loss_of(self, agent: NodeAgent, error: BaseException | None) -> str:
        return ""

    def room(self) -> int:
        """Return 0: there are as many places from the start as there will ever be."""
        return 0

    def draining(self) -> Set[str]:
        return frozenset()

    def own_node(self) -> str:
        return ""

    def avoid(self, node_ids: Sequence[str]) -> None:
        pass

    def stay_on(self, node_ids: Set[str]) -> None:
        pass

    def gpus_present(self) -> tuple[int, str]:
        """Return how many GPUs this process sees: CUDA_VISIBLE_DEVICES may hide some, and then somebody chose so."""
        import torch

        return torch.cuda.device_count(), "machine"


class SpareCore(ThisMachine):
    """A core, and where workers have GPUs also a GPU, that the workers of this machine leave free."""

    def __init__(self, cluster: ClusterConfig, world: int, busy_cores: int) -> None:
        """`world` workers of the config train on this machine and keep so many cores busy."""
        super().__init__(cluster)
        self.busy_cores = busy_cores
        self.gpus_in_use = world * cluster.gpus_per_worker

    def is_free(self) -> bool:
        """Tell whether this process may use more cores and GPUs than the workers do."""
        if cores() <= self.busy_cores:
            return False
        gpus = self.cluster.gpus_per_worker
        return not gpus or self.gpus_present()[0] >= self.gpus_in_use + gpus

    def is_wanted(self) -> bool:
        """Tell that nobody waits: other commands of this machine do not know of one another."""
        return False

    def training_has_ended(self) -> None:
        """Take all cores and GPUs for free."""
        self.busy_cores = 0
        self.gpus_in_use = 0

    def take(self) -> bool:
        """Tell that the place is there: nobody else takes it meanwhile."""
        return True

    def give_back(self) -> None:
        pass

    def close(self) -> None:
        """End the fork server of this place."""
        self.agent.close()

    def agents(self, world: int, on_tick: Tick) -> list[NodeAgent]:
        """Return the agent of this machine, for one worker on a GPU that training leaves."""
        (agent,) = super().agents(world, on_tick)
        if not self.cluster.gpus_per_worker:
            return [agent]
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = named.split(",") if named is not None else [str(number) for number in range(self.gpus_present()[0])]
        return [dataclasses.replace(agent, visible_gpus=",".join(visible[self.gpus_in_use :]))]


_machines: dict[bool, ThisMachine] = {}  # of this process: with or without GPUs


def nodes_of(cluster: ClusterConfig) -> Nodes:
    """Return the nodes on which workers of this config start; a Ray cluster is joined, or started.

    What is kept warm there serves every command of this process.
    """
    if cluster.backend == "ray":
        return _ray_nodes(cluster)
    has_gpus = cluster.gpus_per_worker > 0
    if has_gpus not in _machines:
        _machines[has_gpus] = ThisMachine(cluster)
    machine = _machines[has_gpus]
    machine.cluster = cluster
    return machine


def _ray_nodes(cluster: ClusterConfig) -> "RayNodes":
    # First: Ray reads some variables when it is imported, which `connect` has set then.
    info = connect(cluster)
    from jobs.cluster import ray_nodes

    return ray_nodes.ray_nodes_of(cluster, is_embedded=info.embedded)


def spare_place_of(cluster: ClusterConfig, busy_cores: int) -> SparePlace:
    """Return the place beside a worker group of `cluster.world`, which keeps so many cores of this machine busy."""
    if cluster.backend == "ray":
        training = _ray_nodes(cluster)
        from jobs.cluster.spare_nodes import SpareBundle

        return SpareBundle(training)
    return SpareCore(cluster, cluster.world, busy_cores)


def start_early(cluster: ClusterConfig) -> None:
    """Begin what workers need and what takes seconds: the fork server, or the processes of an embedded Ray cluster."""
    if cluster.backend == "processes":
        nodes_of(cluster).warm_up()
    else:
        embedded.start_early(cluster)
