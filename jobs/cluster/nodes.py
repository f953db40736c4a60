"""The nodes on which a campaign's workers run: this machine, or the nodes of a Ray cluster (ray_nodes.py).

    nodes = nodes_of(cluster)
    world = nodes.reserve("/runs/digits", (4, 2), print, on_tick)    # waits for free resources
    agents = nodes.agents(world)                            # one per node, reused by later attempts and stages
    agents[0].call("poll", 0, 1.0, {})                      # a Future

`RayNodes` has the same methods as `ThisMachine`, which documents them. Ray takes seconds to import, so it is imported
only if the campaign runs on a Ray cluster.
"""

import os
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from data.errors import ClusterError
from jobs.cluster import embedded
from jobs.cluster.agent import Agent, NodeAgent
from jobs.cluster.ray import connect, joined_cluster
from jobs.cluster.worker import LOOPBACK
from jobs.cluster_config import ClusterConfig, cores
from pipeline.identity import Identity, workers_per_gpu
from pipeline.values import counted

if TYPE_CHECKING:
    from jobs.cluster.ray_nodes import RayNodes

Nodes: TypeAlias = "ThisMachine | RayNodes"


class ThisMachine:
    """Workers as processes on this machine, without Ray: a single node, whose agent is an object in the driver."""

    own_node = ""  # id of the driver's node

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster
        self.agent = Agent(has_gpus=cluster.gpus_per_worker > 0)
        # One thread for the pending poll, the others for calls of the agent during that poll.
        self.threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="agent")

    def warm_up(self) -> None:
        """Start the slow preparations for the workers early, unless this would take resources from other users."""
        self.agent.warm_up()

    def reserve(self, run: str, worlds: Sequence[int], log: Callable[[str], None], on_tick: Callable[[], None]) -> int:
        """Reserve slots for as many workers as possible; return the number, which is one of `worlds`.

        `worlds` lists the allowed numbers, largest first. `run` is the name under which other users see the
        reservation. During the wait, `on_tick` is called several times a second; it may end the wait by raising an
        exception. Raises ClusterError if no slots can be reserved; on this machine, only if it has too few GPUs.
        """
        gpus = self.cluster.gpus_per_worker
        if not gpus:
            return worlds[0]
        check_gpus(self.cluster, worlds[-1])
        present, _ = self.gpus_present()
        return next(world for world in worlds if world * gpus <= present)

    def agents(self, world: int) -> list[NodeAgent]:
        """Return the agents of the nodes with reserved slots, in the order of the ranks; start the missing agents."""
        return [NodeAgent(os.uname().nodename, "", LOOPBACK, world, self.call)]

    def call(self, method: str, *arguments: object) -> "Future[Any]":
        """Call a method of the agent in another thread."""
        return self.threads.submit(getattr(self.agent, method), *arguments)

    def losses_of(self, calls: Sequence[tuple[NodeAgent, BaseException | None]]) -> list[str]:
        """Return how each agent's node was lost ("" if it was not lost); stop using lost nodes.

        `calls` pairs each agent with the exception of its last call, or with None if that call has not returned.
        """
        return [""] * len(calls)

    def give_up(self, agent: NodeAgent) -> None:
        """Kill an unresponsive agent and its workers, avoid its node, and start a new agent at the next attempt."""

    def room(self) -> int:
        """Return how many workers currently fit into the cluster, including running ones. Thread-safe."""
        return 0  # this machine never gets more slots

    def status(self) -> tuple[Set[str], Set[str]]:
        """Return the ids of draining nodes, and the ids of other nodes with room for a worker. Thread-safe."""
        return frozenset(), frozenset()

    def warm_up_spares(self, spare: Set[str]) -> None:
        """Start agents on a few of these spare nodes, in case the next attempt moves there."""

    def avoid(self, node_ids: Sequence[str]) -> None:
        """Do not place the next attempt on these nodes if the other nodes have enough room."""

    def stay_on(self, node_ids: Set[str]) -> None:
        """Place the next attempts only on these nodes if they have enough room."""

    def identities(self) -> Mapping[str, Identity]:
        """Return the code and package versions of each node that can be excluded, by node id."""
        return {}

    def exclude(self, node_ids: Set[str], least: int) -> int:
        """Exclude nodes until this process ends; return how many workers fit on the remaining nodes.

        Excludes nothing if that number is less than `least`.
        """
        return 0

    def gpus_present(self) -> tuple[int, str]:
        """Return the number of GPUs, and where they are: "machine" (this one) or "cluster"."""
        return local_gpus(), "machine"


def local_gpus() -> int:
    """Return the number of GPUs of this machine, times the number of workers that share a GPU."""
    # torch also respects CUDA_VISIBLE_DEVICES. Imported here, because torch takes a second to import.
    import torch

    return torch.cuda.device_count() * workers_per_gpu()


def check_gpus(cluster: ClusterConfig, least: int) -> None:
    """Raise ClusterError if this machine has too few GPUs for `least` workers."""
    gpus = cluster.gpus_per_worker
    if not gpus:
        return
    present = local_gpus()
    if least * gpus > present:
        advice = "set cluster.gpus_per_worker=0 to train on the CPU"
        if present >= gpus:
            advice = f"set cluster.workers={present // gpus}"
        raise ClusterError(
            f"expected at least {counted(least * gpus, 'GPU')} for {counted(least, 'worker')} with "
            f"cluster.gpus_per_worker={gpus}, but torch finds {present} on this machine\n"
            f"  {advice}, or cluster.backend=ray to use several machines"
        )


_machines: dict[bool, ThisMachine] = {}  # whether workers use GPUs → this process's ThisMachine


def nodes_of(cluster: ClusterConfig) -> Nodes:
    """Return the nodes for the workers of this config; join or start the Ray cluster if needed.

    The nodes are cached, so that agents stay warm until this process ends.
    """
    if cluster.backend == "ray":
        # `connect` comes first: it sets environment variables that Ray reads when it is imported.
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
    """Start the fork server or an embedded Ray cluster early, because startup takes several seconds."""
    if cluster.backend == "processes":
        nodes_of(cluster).warm_up()
    # An existing cluster is joined only when workers are needed.
    elif embedded.is_needed() and not embedded.is_started():
        # Ignore errors: they occur again, and are reported, when the cluster is needed.
        with suppress(OSError, ClusterError):
            embedded.start(cluster)


def start_workers(cluster: ClusterConfig, log: Callable[[str], None], meanwhile: Callable[[], object]) -> None:
    """Start or join the Ray cluster, or start the fork server if workers are plain processes.

    `meanwhile` is called while the fork server, or the processes of an embedded Ray cluster, start on another core.
    """
    start_early(cluster)
    if cluster.backend == "processes":
        check_gpus(cluster, cluster.least)  # before images are packed
    meanwhile()
    nodes = nodes_of(cluster)
    if cluster.backend == "ray":
        info = joined_cluster()
        kind = "embedded, stops with this command" if info.embedded else f"joined at {info.address}"
        log(f"ray: {counted(info.nodes, 'node')}, {info.cpus:g} CPUs, {info.gpus:g} GPUs ({kind})")
        if info.dashboard:
            log(f"dashboard: {info.dashboard} (for its token, run ray get-auth-token)")
    nodes.warm_up()
    load = os.getloadavg()[0]
    if cluster.backend == "processes" and load > 2 * cores():
        log(f"this machine is busy (load {load:.0f} on {cores()} cores), so the run will take longer than planned")
    warn_of_unused_gpus(cluster, nodes, log)


def warn_of_unused_gpus(cluster: ClusterConfig, nodes: Nodes, log: Callable[[str], None]) -> None:
    """Log how many GPUs are unused, and which setting would use them."""
    gpus, place = nodes.gpus_present()
    used = cluster.most * cluster.gpus_per_worker
    unused = f"unused GPUs: {gpus - used} of {gpus} in this {place}"
    if gpus and not used:
        log(f"{unused}: the workers use only the CPU; set cluster.gpus_per_worker=1 to use the GPUs")
    # In a shared cluster, other people may use the remaining GPUs.
    elif gpus > used and place == "machine":
        workers_that_fit = gpus // cluster.gpus_per_worker
        key = "cluster.workers" if cluster.least == cluster.most else "cluster.workers.most"
        advice = f"set {key}={workers_that_fit} to use them"
        if workers_that_fit == cluster.most:
            advice = f"too few for one more worker with {cluster.gpus_per_worker} GPUs"
        log(f"{unused}; {advice}")
