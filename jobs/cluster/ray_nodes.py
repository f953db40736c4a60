"""The nodes of a Ray cluster on which a campaign works: the places of its workers, its agents, and the nodes to avoid.

    nodes = ray_nodes_of(cluster, is_embedded=False)
    world = nodes.reserve("/runs/digits", (4, 2), print, on_tick)    # jobs/cluster/ray_places.py
    agents = nodes.agents(world)                                     # jobs/cluster/ray_agents.py

Which nodes are avoided, because they are about to leave or do not answer, is in jobs/cluster/ray_exclusion.py.
"""

from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from jobs.cluster.capacity import ClusterState, room_for, share_of_worker
from jobs.cluster.every_node import run_on_nodes
from jobs.cluster.nodes import Log, NodeAgent, NodesStatus, Tick
from jobs.cluster.ray_agents import RayAgents
from jobs.cluster.ray_places import RayPlaces, takes_connections
from jobs.cluster_config import ClusterConfig
from pipeline.identity import Identity, identity

IDENTITY_S = 60.0  # for all nodes to return their identity: Ray starts a process on each


class RayNodes(RayPlaces):
    """The places and agents of this process in its cluster; the contract is that of `ThisMachine`."""

    def __init__(self, cluster: ClusterConfig, *, is_embedded: bool) -> None:
        super().__init__(cluster, is_embedded=is_embedded)
        self.own_node = str(ray.get_runtime_context().get_node_id())
        self.node_agents = RayAgents(cluster)

    def use(self, cluster: ClusterConfig) -> None:
        """Use another config from now on, of another stage or attempt."""
        self.cluster = cluster
        self.node_agents.cluster = cluster

    # -------------------------------------------------------------------- agents

    def warm_up(self) -> None:
        """Start the agents of the nodes on which workers will probably lie, because their imports take seconds.

        Raises ClusterError where an embedded cluster has too few places: now, and not when the workers are needed.
        """
        self.refuse_too_few(self.cluster.least)
        if self.is_embedded:
            self.node_agents.start(self.own_node)
            return
        # Ray packs the workers on few nodes; an agent that is not needed ends when they are placed.
        share = share_of_worker(self.cluster)
        rooms = {node_id: room_for(share, {node_id: free}) for node_id, free in self.state().staying.items()}
        room = 0
        for node_id in sorted(rooms, key=lambda node_id: -rooms[node_id]):
            if rooms[node_id] and room < self.cluster.most:
                self.node_agents.start(node_id)
                room += rooms[node_id]

    def reserve(self, run: str, worlds: Sequence[int], log: Log, on_tick: Tick) -> int:
        """Return how many workers have places, when Ray has made room for them (`RayPlaces.reserve`)."""
        self.node_agents.run = run
        return super().reserve(run, worlds, log, on_tick)

    def agents(self, world: int) -> list[NodeAgent]:
        """Return the agents of the nodes of the reservation, in the order of the ranks; start the missing ones."""
        assert self.reservation is not None
        return self.node_agents.on(self.places(world), self.reservation.group, self.exclusion.now())

    def warm_up_spares(self, spare: Set[str]) -> None:
        """Start agents on a few of these nodes, to which a next attempt may move."""
        self.node_agents.warm_up_spares(spare)

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
                self.node_agents.end(agent.node_id)
            losses.append(loss)
        return losses

    # -------------------------------------------------------------------- nodes that go

    def status(self) -> NodesStatus:
        """Return the nodes that Ray was told will go, and those with room for a worker. Any thread may ask.

        Ray is told by hand, by its autoscaler, by SIGTERM to `ray start --block`.
        """
        state = ClusterState.now()
        share = share_of_worker(self.cluster)
        avoided = self.exclusion.now()
        spare = set()
        for node_id, resources in state.staying.items():
            if node_id not in avoided and room_for(share, {node_id: resources}):
                spare.add(node_id)
        return NodesStatus(state.draining, spare)

    def avoid(self, node_ids: Sequence[str]) -> None:
        """Have worker groups placed without these nodes, as long as the others have the room."""
        self.exclusion.avoid(node_ids)

    def stay_on(self, node_ids: Set[str]) -> None:
        """Have the next attempts placed without any other node."""
        self.avoid([node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in node_ids])

    def leave_out(self, node_ids: Set[str], least: int) -> int:
        """Use these nodes no more, as long as this process lives; return for how many workers the others have room.

        Where that is less than `least`, nothing is left out.
        """
        others = ClusterState.now(without=self.exclusion.excluded | node_ids)
        room = room_for(share_of_worker(self.cluster), others.total)
        if room >= least:
            self.exclusion.excluded |= node_ids
            for node_id in node_ids:
                self.node_agents.end(node_id)
        return room

    def identities(self) -> dict[str, Identity]:
        """Return code and packages of every node that answers, by its id."""
        values, _ = run_on_nodes(identity, "", without=(), timeout_s=IDENTITY_S)
        return dict(values)


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
            nodes.exclusion.add(before.exclusion)
        _joined.clear()
        _joined[connection] = nodes
    _joined[connection].use(cluster)
    return _joined[connection]
