"""A campaign's nodes in a Ray cluster: its slots, its agents, and draining nodes.

    nodes = ray_nodes_of(cluster, is_embedded=False)
    world = nodes.reserve("/runs/digits", (4, 2), print, on_tick)    # ray_places.py
    agents = nodes.agents(world)                                     # an actor on each node with workers: ray_agent.py

An agent is bound to a node and not to slots, so it stays warm between attempts and stages even if the slots change.
In Ray's accounting, it uses no CPU.
"""

import secrets
from collections.abc import Callable, Collection, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from jobs.cluster.agent import NodeAgent
from jobs.cluster.capacity import ClusterState, room_for
from jobs.cluster.ray_agent import RayAgent, call_actor
from jobs.cluster.ray_places import RayPlaces, takes_connections
from jobs.cluster_config import ClusterConfig
from pipeline.identity import Identity, identity

WARM_SPARES = 2  # nodes without workers that keep an agent, which costs 0.4 GB and, at its start, 4 s of two cores
AGENT_THREADS = 4  # per agent: one for a poll, the others for calls during the poll
IDENTITY_S = 60.0  # maximum wait for all nodes to return their identity: Ray starts a process on each


class RayNodes(RayPlaces):
    """The slots and agents of this process in its Ray cluster; `ThisMachine` documents the methods."""

    def __init__(self, cluster: ClusterConfig, *, is_embedded: bool) -> None:
        super().__init__(cluster, is_embedded=is_embedded)
        self.own_node = str(ray.get_runtime_context().get_node_id())
        self.actors: dict[str, Any] = {}  # this process's running agents, by node id
        self.warmed_up: dict[str, Any] = {}  # each agent's reply to its first call, by node id
        self.used: Set[str] = frozenset()  # ids of the nodes with workers of the last attempt
        self.actors_started = 0
        self.group_id = ""  # the placement group that `gpu_ids` belongs to
        # (node id, its bundles) → CUDA_VISIBLE_DEVICES of its workers
        self.gpu_ids: dict[tuple[str, tuple[int, ...]], str] = {}

    # -------------------------------------------------------------------- agents

    def warm_up(self) -> None:
        """Start agents early on the nodes that will probably get workers, because the agents' imports take seconds.

        Raises ClusterError at once if an embedded cluster is too small.
        """
        self.refuse_too_few(self.cluster.least)
        if self.is_embedded:
            self.start_agent(self.own_node)
            return
        # Ray packs the workers on few nodes, so start with the largest; unneeded agents end after the placement.
        rooms = {node_id: room_for(self.share, {node_id: free}) for node_id, free in self.state().staying.items()}
        room = 0
        for node_id in sorted(rooms, key=lambda node_id: -rooms[node_id]):
            if rooms[node_id] and room < self.cluster.most:
                self.start_agent(node_id)
                room += rooms[node_id]

    def agents(self, world: int) -> list[NodeAgent]:
        """Return the agents of the nodes with reserved slots, in the order of the ranks; start the missing agents."""
        assert self.reservation is not None
        group = self.reservation.group
        slots = self.slots(world)
        if group.id.hex() != self.group_id:
            self.group_id = group.id.hex()
            self.gpu_ids = {}
        rows = {node["NodeID"]: node for node in ray.nodes()}
        gpus = self.cluster.gpus_per_worker
        # Unused agents only take up memory. Keep a few for the next attempt, but none on an avoided node.
        self.used = slots.keys()
        avoided = self.avoided_now()
        kept = 0
        for node_id in self.actors.keys() - self.used:
            is_usable = node_id in rows and rows[node_id]["Alive"] and node_id not in avoided
            if is_usable and not gpus and kept < WARM_SPARES:
                kept += 1
            else:
                self.end_agent(node_id)
        agents = []
        for node_id, bundles in slots.items():
            # Ray has no table of the GPUs in a bundle, so run a task in each bundle to get them. They do not change as
            # long as the bundle is on its node: after the loss of another node, Ray may place that node's bundle here.
            place_of_gpus = (node_id, tuple(bundles))
            if gpus and place_of_gpus not in self.gpu_ids:
                replies = []
                for bundle, count in bundles.items():
                    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
                    task: Any = ray.remote(num_cpus=0, num_gpus=gpus * count)(ray.get_gpu_ids)
                    replies.append(task.options(scheduling_strategy=place).remote())
                ids: list[str] = []
                for of_bundle in ray.get(replies):
                    ids += map(str, of_bundle)
                self.gpu_ids[place_of_gpus] = ",".join(ids)
            agents.append(
                NodeAgent(
                    name=rows[node_id]["NodeManagerHostname"],
                    node_id=node_id,
                    address=rows[node_id]["NodeManagerAddress"],
                    slots=sum(bundles.values()),
                    call=partial(call_actor, self.start_agent(node_id)),
                    visible_gpus=self.gpu_ids.get(place_of_gpus, ""),
                    is_up=len(ray.wait([self.warmed_up[node_id]], timeout=0)[0]) > 0,
                )
            )
        return agents

    def warm_up_spares(self, spare: Set[str]) -> None:
        """Start agents on a few of these spare nodes, in case the next attempt moves there.

        If workers use GPUs, start no agents: these agents would import nothing early, and an autoscaler does not remove
        a node with an agent.
        """
        if self.cluster.gpus_per_worker:
            return
        idle = (self.actors.keys() - self.used) & spare
        for node_id in sorted(spare - self.actors.keys())[: max(0, WARM_SPARES - len(idle))]:
            self.start_agent(node_id)

    def start_agent(self, node_id: str) -> Any:
        """Return the actor of a node's agent; start the actor if it is not running."""
        if node_id not in self.actors:
            self.actors_started += 1
            remote: Any = ray.remote(RayAgent).options(
                # The dashboard shows this name.
                name=f"{Path(self.run).name} agent {self.actors_started} {secrets.token_hex(2)}",
                num_cpus=0,
                max_restarts=0,
                max_concurrency=AGENT_THREADS,
                # Not soft: an agent on another node would start the workers there.
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            self.actors[node_id] = remote.remote(self.cluster.gpus_per_worker > 0)
            self.warmed_up[node_id] = self.actors[node_id].warm_up.remote()
        return self.actors[node_id]

    def end_agent(self, node_id: str) -> None:
        """Kill a node's agent and its workers, if the agent is running."""
        with suppress(Exception):
            ray.kill(self.actors[node_id])
        self.actors.pop(node_id, None)

    def give_up(self, agent: NodeAgent) -> None:
        """Kill an unresponsive agent and its workers, and avoid the agent's node."""
        self.avoid([agent.node_id])
        # Ray kills a frozen process after 5 s; its fork server and workers end with it.
        self.end_agent(agent.node_id)

    def losses_of(self, calls: Sequence[tuple[NodeAgent, BaseException | None]]) -> list[str]:
        """Return how each agent or its node was lost ("" if neither was); stop using lost agents and nodes.

        Ray is queried only once and all nodes are probed in parallel, so a rack without power costs a single timeout.
        """
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        nodes = [alive.get(agent.node_id) for agent, _ in calls]
        with ThreadPoolExecutor(len(calls)) as threads:
            accepted = list(threads.map(lambda node: node is None or takes_connections(node), nodes))
        losses = []
        for (agent, error), node, takes in zip(calls, nodes, accepted, strict=True):
            loss = "" if takes else "its node does not respond"
            if node is None:
                loss = "its node left the cluster"
            if loss:
                # Release the slots, so that the next attempt requests new ones on other nodes.
                self.avoid([agent.node_id])
                self.release()
            elif isinstance(error, OutOfMemoryError):
                loss = f"its node's agent was killed by Ray's out-of-memory killer: {str(error).splitlines()[0]}"
            elif isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                loss = "its node's agent died (killed, or crashed), together with its workers"
            if loss:
                self.end_agent(agent.node_id)
            losses.append(loss)
        return losses

    # -------------------------------------------------------------------- draining and excluded nodes

    def status(self) -> tuple[Set[str], Set[str]]:
        """Return the ids of draining nodes, and the ids of other nodes with room for a worker. Thread-safe.

        A node is drained by a command, by the autoscaler, or after SIGTERM to `ray start --block`.
        """
        state = ClusterState.now()
        avoided = self.avoided_now()
        spare = set()
        for node_id, resources in state.staying.items():
            if node_id not in avoided and room_for(self.share, {node_id: resources}):
                spare.add(node_id)
        return state.draining, spare

    def stay_on(self, node_ids: Set[str]) -> None:
        """Place the next attempts only on these nodes, by avoiding all others."""
        self.avoid(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in node_ids)

    def exclude(self, node_ids: Set[str], least: int) -> int:
        """Exclude nodes until this process ends; return how many workers fit on the remaining nodes.

        Excludes nothing if that number is less than `least`.
        """
        room = room_for(self.share, ClusterState.now(without=self.excluded | node_ids).total)
        if room >= least:
            self.excluded |= node_ids
            for node_id in node_ids:
                self.end_agent(node_id)
        return room

    def identities(self) -> dict[str, Identity]:
        """Return the code and package versions of each responding node, by node id."""
        values, _ = run_on_nodes(identity, "", without=(), timeout_s=IDENTITY_S)
        return dict(values)


def run_on_nodes(
    function: Callable[..., Any], *arguments: object, without: Collection[str], timeout_s: float
) -> tuple[list[tuple[str, Any]], dict[str, str]]:
    """Run a function once on each live node, except for the nodes whose ids are in `without`.

    Returns (node id, value) pairs, and node name → reason for each node without a value. Nothing is reserved, so the
    function also runs on nodes filled by other campaigns.
    """
    remote_function: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = []
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in without:
            pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            calls.append((node, remote_function.options(scheduling_strategy=pinned).remote(*arguments)))
    # Wait for all nodes together, so that a node that does not respond does not delay the others.
    ray.wait([reply for _, reply in calls], num_returns=len(calls), timeout=timeout_s)
    values = []
    failures = {}
    for node, reply in calls:
        try:
            values.append((node["NodeID"], ray.get(reply, timeout=0)))
        except RayError as error:  # includes timeouts
            failures[node["NodeManagerHostname"]] = str(error).splitlines()[0] or f"no response in {timeout_s:g} s"
    return values, failures


_joined: dict[tuple[str, str], RayNodes] = {}  # (id of this node, id of this Ray job) → nodes; at most one entry


def ray_nodes_of(cluster: ClusterConfig, *, is_embedded: bool) -> RayNodes:
    """Return this process's slots and agents in the joined cluster."""
    # Each cluster counts its job ids from 1, so the node id, which is unique, is needed too.
    context = ray.get_runtime_context()
    connection = (str(context.get_node_id()), str(context.get_job_id()))
    if connection not in _joined:
        # Slots and agents of an earlier connection are gone. Keep avoided and excluded nodes, because this may be the
        # same cluster, joined again.
        nodes = RayNodes(cluster, is_embedded=is_embedded)
        for before in _joined.values():
            nodes.avoided |= before.avoided
            nodes.excluded |= before.excluded
        _joined.clear()
        _joined[connection] = nodes
    _joined[connection].cluster = cluster
    return _joined[connection]
