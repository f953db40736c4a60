"""The nodes that a campaign works on, as the driver sees them: this machine, or those of a Ray cluster (ray_nodes.py).

    nodes = nodes_of(cluster)
    world = nodes.reserve("/runs/digits", (4, 2), print, on_tick)    # waits for places, and logs for what
    agents = nodes.agents(world)                            # one a node, warm over attempts and stages
    agents[0].call("poll", 0, 1.0, {})                      # a Future

`RayNodes` has the methods of `ThisMachine`; what they promise stands here. Ray takes seconds to import, so only a
cluster that needs it imports it.
"""

import os
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from data.errors import ClusterError
from jobs.cluster import embedded
from jobs.cluster.agent import Agent, NodeAgent
from jobs.cluster.ray import connect
from jobs.cluster.worker import LOOPBACK
from jobs.cluster_config import ClusterConfig
from pipeline.identity import Identity, workers_per_gpu

if TYPE_CHECKING:
    from jobs.cluster.ray_nodes import RayNodes

Nodes: TypeAlias = "ThisMachine | RayNodes"


class ThisMachine:
    """Plain processes of this machine: one node, whose agent is an object in this process."""

    own_node = ""  # id of the driver's own node

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster
        self.agent = Agent(has_gpus=cluster.gpus_per_worker > 0)
        # The poll that is under way, and what is asked of the agent meanwhile.
        self.threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="agent")

    def warm_up(self) -> None:
        """Begin what workers need and what takes seconds, where that takes nothing from anybody."""
        self.agent.warm_up()

    def reserve(self, run: str, worlds: Sequence[int], log: Callable[[str], None], on_tick: Callable[[], None]) -> int:
        """Return how many workers can start, one of `worlds`, when their places are reserved; the largest comes first.

        `run` is the name under which others see who holds the places. `on_tick` is called a few times a second during
        a wait; what it raises ends the wait. Raises ClusterError, here if this machine has too few GPUs.
        """
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

    def agents(self, world: int) -> list[NodeAgent]:
        """Return the agents of the nodes on which the places lie, in the order of the ranks; start those that lack."""
        return [NodeAgent(os.uname().nodename, "", LOOPBACK, world, self.call)]

    def call(self, method: str, *arguments: object) -> "Future[Any]":
        """Call a method of the agent in another thread."""
        return self.threads.submit(getattr(self.agent, method), *arguments)

    def losses_of(self, asked: Sequence[tuple[NodeAgent, BaseException | None]]) -> list[str]:
        """Say how each node was lost whose agent does not answer, and go on without it; "" where it is there.

        Beside each agent stands what the call of it raised, None where it has not returned.
        """
        return [""] * len(asked)

    def room(self) -> int:
        """Return for how many workers a larger group would find room, those counted that run. Any thread may ask."""
        return 0  # there are as many places from the start as there will ever be

    def status(self) -> tuple[Set[str], Set[str]]:
        """Return the ids of the nodes that were told to go, and of those that stay and have room for another worker.

        Any thread may ask.
        """
        return frozenset(), frozenset()

    def warm_up_spares(self, spare: Set[str]) -> None:
        """Start agents on a few of these nodes, to which a next attempt may move."""

    def avoid(self, node_ids: Sequence[str]) -> None:
        """Have the next attempt placed without these nodes, where the others have the room."""

    def stay_on(self, node_ids: Set[str]) -> None:
        """Have the next attempts placed on these nodes alone, where they have the room."""

    def identities(self) -> Mapping[str, Identity]:
        """Return code and packages of every node that may be left out, by its id."""
        return {}

    def exclude(self, node_ids: Set[str], least: int) -> int:
        """Use these nodes no more, as long as this process lives; return for how many workers the others have room.

        Where that is less than `least`, nothing is left out.
        """
        return 0

    def gpus_present(self) -> tuple[int, str]:
        """Return how many GPUs there are, and whether this "machine" or a "cluster" has them."""
        # CUDA_VISIBLE_DEVICES may hide some, and then somebody chose so. Torch takes a second to import.
        import torch

        return torch.cuda.device_count() * workers_per_gpu(), "machine"


_machines: dict[bool, ThisMachine] = {}  # of this process: with or without GPUs


def nodes_of(cluster: ClusterConfig) -> Nodes:
    """Return the nodes on which workers of this config start; a Ray cluster is joined, or started.

    What is kept warm there serves every command of this process.
    """
    if cluster.backend == "ray":
        # First: Ray reads some variables when it is imported, which `connect` has set then.
        info = connect(cluster)
        from jobs.cluster import ray_nodes

        return ray_nodes.ray_nodes_of(cluster, is_embedded=info.embedded)
    has_gpus = cluster.gpus_per_worker > 0
    if has_gpus not in _machines:
        _machines[has_gpus] = ThisMachine(cluster)
    machine = _machines[has_gpus]
    machine.cluster = cluster
    return machine


def start_early(cluster: ClusterConfig) -> None:
    """Begin what workers need and what takes seconds: the fork server, or the processes of an embedded Ray cluster."""
    if cluster.backend == "processes":
        nodes_of(cluster).warm_up()
    # A cluster that is joined is not touched before it is time.
    elif embedded.is_wanted() and not embedded.is_started():
        # The same failure comes again when the cluster is needed, and is reported then.
        with suppress(OSError, ClusterError):
            embedded.start(cluster)
