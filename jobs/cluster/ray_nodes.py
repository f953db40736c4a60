"""The nodes of a Ray cluster on which a campaign works: the places of its workers, its agents, and the nodes that go.

    nodes = ray_nodes_of(cluster, is_embedded=False)
    world = nodes.reserve("/runs/digits", (4, 2), print, on_tick)    # ray_places.py
    agents = nodes.agents(world)                                     # on each node with workers an actor: ray_agent.py

An agent belongs to the node and not to the places, which may change while the node does not: it stays warm over
attempts and stages. It takes no CPU of Ray's count.
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

WARM_SPARES = 2  # nodes without a worker that have an agent: importing torch takes 4 s of two cores, 0.4 GB
AGENT_THREADS = 4  # of an agent: a poll, and calls during it
IDENTITY_S = 60.0  # for all nodes to return their identity: Ray starts a process on each


class RayNodes(RayPlaces):
    """The places and agents of this process in its cluster; the contract is that of `ThisMachine`."""

    def __init__(self, cluster: ClusterConfig, *, is_embedded: bool) -> None:
        super().__init__(cluster, is_embedded=is_embedded)
        self.own_node = str(ray.get_runtime_context().get_node_id())
        self.actors: dict[str, Any] = {}  # the agents that this process has started, by the ids of their nodes
        self.used: Set[str] = frozenset()  # ids of the nodes on which workers were placed last
        self.actors_started = 0
        self.group_id = ""  # of the placement group that `gpu_ids` is about
        self.gpu_ids: dict[str, str] = {}  # by node: CUDA_VISIBLE_DEVICES of its workers

    # -------------------------------------------------------------------- agents

    def warm_up(self) -> None:
        """Start the agents of the nodes on which workers will probably lie, because their imports take seconds.

        Raises ClusterError where an embedded cluster has too few places: now, and not when the workers are needed.
        """
        self.refuse_too_few(self.cluster.least)
        if self.is_embedded:
            self.start_agent(self.own_node)
            return
        # Ray packs the workers on few nodes; an agent that is not needed ends when they are placed.
        rooms = {node_id: room_for(self.share, {node_id: free}) for node_id, free in self.state().staying.items()}
        room = 0
        for node_id in sorted(rooms, key=lambda node_id: -rooms[node_id]):
            if rooms[node_id] and room < self.cluster.most:
                self.start_agent(node_id)
                room += rooms[node_id]

    def agents(self, world: int) -> list[NodeAgent]:
        """Return the agents of the nodes of the reservation, in the order of the ranks; start the missing ones."""
        assert self.reservation is not None
        group = self.reservation.group
        places = self.places(world)
        if group.id.hex() != self.group_id:
            self.group_id = group.id.hex()
            self.gpu_ids = {}
        rows = {node["NodeID"]: node for node in ray.nodes()}
        gpus = self.cluster.gpus_per_worker
        # Unused agents only take up memory; a few are kept for the next attempt, but none on an avoided node.
        self.used = places.keys()
        avoided = self.avoided_now()
        kept = 0
        for node_id in self.actors.keys() - self.used:
            is_there = node_id in rows and rows[node_id]["Alive"] and node_id not in avoided
            if is_there and not gpus and kept < WARM_SPARES:
                kept += 1
            else:
                self.end_agent(node_id)
        agents = []
        for node_id, bundles in places.items():
            # Which GPUs Ray has given to a bundle it tells in no table: a task in each bundle sees its own. They are
            # the same as long as the bundle lives.
            if gpus and node_id not in self.gpu_ids:
                answers = []
                for bundle, count in bundles.items():
                    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
                    task: Any = ray.remote(num_cpus=0, num_gpus=gpus * count)(ray.get_gpu_ids)
                    answers.append(task.options(scheduling_strategy=place).remote())
                ids: list[str] = []
                for of_bundle in ray.get(answers):
                    ids += map(str, of_bundle)
                self.gpu_ids[node_id] = ",".join(ids)
            agents.append(
                NodeAgent(
                    name=rows[node_id]["NodeManagerHostname"],
                    node_id=node_id,
                    address=rows[node_id]["NodeManagerAddress"],
                    slots=sum(bundles.values()),
                    call=partial(call_actor, self.start_agent(node_id)),
                    visible_gpus=self.gpu_ids.get(node_id, ""),
                )
            )
        return agents

    def warm_up_spares(self, spare: Set[str]) -> None:
        """Start agents on a few of these nodes, to which a next attempt may move.

        Those of workers with GPUs import nothing ahead: there is nothing to gain, and an autoscaler takes no node away
        that has an agent.
        """
        if self.cluster.gpus_per_worker:
            return
        idle = (self.actors.keys() - self.used) & spare
        for node_id in sorted(spare - self.actors.keys())[: max(0, WARM_SPARES - len(idle))]:
            self.start_agent(node_id)

    def start_agent(self, node_id: str) -> Any:
        """Return the actor that is the agent of a node; where none runs there, one is started and imports."""
        if node_id not in self.actors:
            self.actors_started += 1
            remote: Any = ray.remote(RayAgent).options(
                # People find it by this name in the dashboard.
                name=f"{Path(self.run).name} agent {self.actors_started} {secrets.token_hex(2)}",
                num_cpus=0,
                max_restarts=0,
                max_concurrency=AGENT_THREADS,
                # Not soft: on any other node it would start the workers there.
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            self.actors[node_id] = remote.remote(self.cluster.gpus_per_worker > 0)
            self.actors[node_id].warm_up.remote()
        return self.actors[node_id]

    def end_agent(self, node_id: str) -> None:
        """End the agent of a node, and its workers with it, where there is one."""
        with suppress(Exception):
            ray.kill(self.actors[node_id])
        self.actors.pop(node_id, None)

    def losses_of(self, asked: Sequence[tuple[NodeAgent, BaseException | None]]) -> list[str]:
        """Say how the node of each agent was lost, or the agent alone, and go on without it; "" where both are there.

        Ray is asked once and all nodes at the same time: a rack without power costs one wait.
        """
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        nodes = [alive.get(agent.node_id) for agent, _ in asked]
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = list(threads.map(lambda node: node is None or takes_connections(node), nodes))
        losses = []
        for (agent, error), node, takes in zip(asked, nodes, answers, strict=True):
            loss = "" if takes else "its node does not answer"
            if node is None:
                loss = "its node left the cluster"
            if loss:
                # The places are asked for anew, elsewhere.
                self.avoid([agent.node_id])
                self.release()
            elif isinstance(error, OutOfMemoryError):
                loss = f"its node's agent was killed by Ray's out-of-memory killer: {str(error).splitlines()[0]}"
            elif isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                loss = "its node's agent died (killed, or crashed), and its workers with it"
            if loss:
                self.end_agent(agent.node_id)
            losses.append(loss)
        return losses

    # -------------------------------------------------------------------- nodes that go

    def status(self) -> tuple[Set[str], Set[str]]:
        """Return the nodes that Ray was told will go, and those with room for a worker. Any thread may ask.

        Ray is told by hand, by its autoscaler, by SIGTERM to `ray start --block`.
        """
        state = ClusterState.now()
        avoided = self.avoided_now()
        spare = set()
        for node_id, resources in state.staying.items():
            if node_id not in avoided and room_for(self.share, {node_id: resources}):
                spare.add(node_id)
        return state.draining, spare

    def stay_on(self, node_ids: Set[str]) -> None:
        """Have the next attempts placed without any other node."""
        self.avoid(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in node_ids)

    def exclude(self, node_ids: Set[str], least: int) -> int:
        """Use these nodes no more, as long as this process lives; return for how many workers the others have room.

        Where that is less than `least`, nothing is left out.
        """
        room = room_for(self.share, ClusterState.now(without=self.excluded | node_ids).total)
        if room >= least:
            self.excluded |= node_ids
            for node_id in node_ids:
                self.end_agent(node_id)
        return room

    def identities(self) -> dict[str, Identity]:
        """Return code and packages of every node that answers, by its id."""
        values, _ = run_on_nodes(identity, "", without=(), timeout_s=IDENTITY_S)
        return dict(values)


def run_on_nodes(
    function: Callable[..., Any], *arguments: object, without: Collection[str], timeout_s: float
) -> tuple[list[tuple[str, Any]], dict[str, str]]:
    """Run a function once on each node; return node ids with its values, and by a node's name why it gave none.

    All nodes that are alive are asked, but those whose ids are in `without`. Nothing is reserved for it: a node that
    another campaign has filled is asked as well.
    """
    there: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = []
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in without:
            pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked.append((node, there.options(scheduling_strategy=pinned).remote(*arguments)))
    # All wait together: a node that does not answer costs the others nothing.
    ray.wait([answer for _, answer in asked], num_returns=len(asked), timeout=timeout_s)
    values = []
    unanswered = {}
    for node, answer in asked:
        try:
            values.append((node["NodeID"], ray.get(answer, timeout=0)))
        except RayError as error:  # a time-out too
            unanswered[node["NodeManagerHostname"]] = str(error).splitlines()[0] or f"no answer in {timeout_s:g} s"
    return values, unanswered


_joined: dict[tuple[str, str], RayNodes] = {}  # by the ids of this node and of this process there; at most one entry


def ray_nodes_of(cluster: ClusterConfig, *, is_embedded: bool) -> RayNodes:
    """Return what this process has in the cluster that it has joined."""
    # Every cluster counts its drivers anew, so that the first of each has the same id; no two nodes have the same.
    context = ray.get_runtime_context()
    connection = (str(context.get_node_id()), str(context.get_job_id()))
    if connection not in _joined:
        # What was held over another connection has gone with it. The nodes to avoid are kept: it may be the same
        # cluster that was joined again.
        nodes = RayNodes(cluster, is_embedded=is_embedded)
        for before in _joined.values():
            nodes.avoided |= before.avoided
            nodes.excluded |= before.excluded
        _joined.clear()
        _joined[connection] = nodes
    _joined[connection].cluster = cluster
    return _joined[connection]
