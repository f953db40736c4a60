"""The nodes of a Ray cluster on which a campaign works: the places of its workers, which Ray reserves.

1. `reserve` asks Ray for a placement group: for every worker one share of CPUs and GPUs, each on one node. From then on
   Ray's scheduler orders the request among all others, and an autoscaler sees what is wanted.
2. While Ray has no room, a message says for how many workers there is room, and which campaigns hold the rest.
3. `agents` starts an actor on each of these nodes (ray_agents.py), or finds it warm: it belongs to the node and not to
   the places, which may change while the node does not.
4. The places are kept when an attempt fails, so that a campaign that waits does not slip in between two attempts. They
   are asked for anew where one of their nodes is about to leave, or does not answer.
5. Ray takes all of it back when this process leaves the cluster.

Where `cluster.workers` is a range, the largest number of workers is asked for, so that an autoscaler hears of it. After
`patience_s` the largest for which there is room is asked for in its place. The places are given up for more as soon as
there is room for more, between two attempts.
"""

import math
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from data.errors import ClusterError
from jobs.cluster.capacity import OWNER, ClusterState, in_words, missing, room_for, share_of_worker
from jobs.cluster.nodes import Log, NodeAgent, Tick
from jobs.cluster.ray import WAITING
from jobs.cluster.ray_agents import RayAgents, gpus_of_bundles, loss_of_agent, loss_of_node
from jobs.cluster_config import ClusterConfig

POLL_S = 0.1
FIRST_LINE_S = 3.0  # the places of the last worker group take a moment to come free: no line about that
NEXT_LINE_S = 10.0  # between two different lines
SAME_LINE_S = 60.0  # before the same line is logged again
NEXT_CHOICE_S = 5.0  # for Ray to place a request, before another number of workers is asked for
AVOID_S = 600.0  # a node that was to leave, and is there after so long, stays
MISSED_S = 70.0  # Ray has missed a node that is dead after so long; a node that is there is better than none


@dataclass(frozen=True)
class Reservation:
    """Holds what this process has reserved, for how many workers and how much each."""

    group: PlacementGroup
    workers: int
    share: Mapping[str, int]  # of one worker, by Ray's name of the resource

    def row(self) -> Mapping[str, Any]:
        """Return what Ray's table says of it."""
        return placement_group_table(self.group)


@dataclass(frozen=True)
class Request:
    """Says which places a worker group wants, and how long it waits."""

    run: str
    share: Mapping[str, int]  # of one worker, by Ray's name of the resource
    worlds: tuple[int, ...]  # the numbers of workers that would do, the largest first
    patience_s: float  # for the largest, where several would do
    timeout_s: float  # for any
    log: Log

    def largest_in(self, room: int) -> int | None:
        """Return the largest world for whose workers there is room; None where there is room for none."""
        for world in self.worlds:
            if world <= room:
                return world
        return None


class RayNodes:
    """What this process has in the cluster that it has joined."""

    def __init__(self, cluster: ClusterConfig, *, is_embedded: bool) -> None:
        self.cluster = cluster
        self.is_embedded = is_embedded
        self.reservation: Reservation | None = None
        self.lent: list[Reservation] = []  # free places that are given back when anybody wants them
        self.avoided: dict[str, float] = {}  # ids of nodes that are about to leave, or do not answer → since when
        self.ray_agents = RayAgents()
        self.run = ""
        self.gpu_ids: dict[str, str] = {}  # of this reservation, by node: CUDA_VISIBLE_DEVICES

    def warm_up(self) -> None:
        """Start the agent of an embedded cluster, which is for this command alone.

        Raises ClusterError where an embedded cluster has too few places: now, and not when the workers are needed.
        """
        self.refuse_too_few(self.cluster.least)
        if self.is_embedded:
            self.ray_agents.start(self.own_node(), self.run, has_gpus=self.cluster.gpus_per_worker > 0)

    # -------------------------------------------------------------------- places

    def reserve(self, run: str, worlds: Sequence[int], log: Log, on_tick: Tick) -> int:
        """Return how many workers have places, when Ray has made room for them.

        Places that this process holds are returned at once, where they fit, none of their nodes is to be left, and
        there is no room for more. `on_tick` is called several times a second; what it raises ends the wait. Raises
        ClusterError after `wait_s`, or at once where an embedded cluster will never have the room.
        """
        self.run = run
        share = share_of_worker(self.cluster)
        if self.is_embedded:
            # It does not grow: nobody has to wait for more.
            room = self.refuse_too_few(worlds[-1])
            worlds = [world for world in worlds if world <= room]
        request = Request(run, share, tuple(worlds), self.cluster.patience_s, self.cluster.wait_s or math.inf, log)
        if not self._holds(request):
            self._ask(request, request.worlds[0])
        elif len(worlds) > 1:
            # Give up what this process holds for the places of more workers, where there is room for them.
            more = request.largest_in(self.room())
            if more is not None and more > self.workers_held:
                self._ask(request, more)
        try:
            self._wait(request, on_tick)
        except BaseException:
            # Who does not wait any more must not be given what others wait for.
            self.release()
            raise
        return self.workers_held

    def refuse_too_few(self, least: int) -> int:
        """Return for how many workers the cluster has room when it is empty.

        Raises ClusterError where that is too few and will be for ever: an embedded cluster does not grow.
        """
        share = share_of_worker(self.cluster)
        room = room_for(share, ClusterState.now().total)
        if self.is_embedded and room < least:
            raise too_small(f"room for {room} of {least} workers of {in_words(share)}", "this machine has no more")
        return room

    @property
    def workers_held(self) -> int:
        """Return for how many workers this process holds places."""
        return self.reservation.workers if self.reservation else 0

    def release(self) -> None:
        """Give back the workers' places, where there are any."""
        if self.reservation is not None:
            remove_placement_group(self.reservation.group)
            self.reservation = None

    def room(self) -> int:
        """Return for how many workers there would be room, those counted that have their places. Any thread may ask."""
        # Another campaign that waits comes before one that wants more.
        if self.is_anything_asked_for():
            return self.workers_held
        state = ClusterState.now()
        return room_for(share_of_worker(self.cluster), self._open_to_us(state, self.nodes_to_avoid()))

    def is_anything_asked_for(self) -> bool:
        """Tell whether anybody waits for a placement group that the cluster can hold. Any thread may ask."""
        total = ClusterState.now().total
        ours = {reservation.group.id.hex() for reservation in self._reservations()}
        for group, row in placement_group_table().items():
            if row["state"] in ("PENDING", "RESCHEDULING") and group not in ours:
                wanted: Counter[str] = Counter()
                for bundle in row["bundles"].values():
                    wanted.update(bundle)
                    if room_for({name: 1 for name in bundle}, total) < 1:
                        wanted["more than any node has"] += 1
                if all(sum(node.get(name, 0) for node in total.values()) >= count for name, count in wanted.items()):
                    return True
        return False

    def _reservations(self) -> list[Reservation]:
        return [reservation for reservation in [self.reservation, *self.lent] if reservation is not None]

    def _holds(self, request: Request) -> bool:
        """Tell whether this process holds what is wanted, on nodes that stay."""
        held = self.reservation
        if held is None:
            return False
        row = held.row()
        # A group that has lost a node is placed anew by Ray; one may be REMOVED by somebody else.
        if row["state"] == "REMOVED" or held.share != request.share or held.workers not in request.worlds:
            return False
        state = ClusterState.now()
        nodes = set(row["bundles_to_node_id"].values())
        return not nodes & (self._avoided_for(request, state) | state.draining)

    def _ask(self, request: Request, workers: int) -> None:
        """Ask Ray for the places of so many workers, and give back what this process has asked for before."""
        self.release()
        self.gpu_ids = {}
        selector = None
        avoided = self._avoided_for(request, ClusterState.now())
        if avoided:
            selector = [{"ray.io/node-id": f"!in({', '.join(sorted(avoided))})"}] * workers
        group = placement_group(
            [dict(request.share)] * workers,
            strategy="PACK",
            # Of two groups of one name Ray refuses the second; a new one may be asked for before the old one is gone.
            name=f"{OWNER}{request.run} {secrets.token_hex(4)}",
            bundle_label_selector=selector,
        )
        self.reservation = Reservation(group, workers, request.share)

    def _wait(self, request: Request, on_tick: Tick) -> None:
        """Return when Ray has placed the request; log meanwhile what is missing. Raises what `reserve` raises."""
        began = time.monotonic()
        deadline = began + request.timeout_s
        next_choice = min(began + request.patience_s, deadline)
        next_line = began + FIRST_LINE_S
        last_line, logged_at = "", 0.0
        assert self.reservation is not None
        while not self.reservation.group.wait(timeout_seconds=POLL_S):
            now = time.monotonic()
            if now > next_choice:
                next_choice = now + NEXT_CHOICE_S
                self._take_avoided_nodes(request)
                if len(request.worlds) > 1 and self._choose(request):
                    deadline = max(deadline, next_choice)
            if now > deadline:
                text = self._missing(request.worlds[-1], request.share)
                raise too_small(text, f"waited {request.timeout_s:.0f} s")
            # Not at once, when it has changed, and now and then. Or a queue looks like a hang.
            if now > next_line:
                line = self._missing(request.worlds[0], request.share)
                if len(request.worlds) > 1:
                    line += f"; fewer will do after {request.patience_s:g} s (cluster.patience_s)"
                if line != last_line or now > logged_at + SAME_LINE_S:
                    request.log(f"{WAITING}{line}")
                    last_line, logged_at = line, now
                next_line = now + NEXT_LINE_S
            on_tick()
            assert self.reservation is not None

    def _choose(self, request: Request) -> bool:
        """Ask for the places of as many workers as there is room for; tell whether these are fewer than the most."""
        most = request.worlds[0]
        state = ClusterState.now()
        room = room_for(request.share, self._open_to_us(state, self._avoided_for(request, state)))
        # Where none would do, the most is what an autoscaler is to hear of.
        world = request.largest_in(room) or most
        if world != self.workers_held:
            if world < most:
                request.log(f"goes on with {world} of up to {most} workers: {self._missing(most, request.share)}")
            self._ask(request, world)
        return world < most

    def _take_avoided_nodes(self, request: Request) -> None:
        """Ask for the places anew, with nodes that were to be avoided, where only with them there is room."""
        now = time.monotonic()
        state = ClusterState.now()
        avoided = self._avoided_for(request, state)
        alive = {node for node in avoided if now > self.avoided[node] + MISSED_S}
        room = room_for(request.share, self._open_to_us(state, avoided))
        world = request.largest_in(room_for(request.share, self._open_to_us(state, avoided - alive)))
        if request.largest_in(room) is None and world is not None:
            for node in alive:
                del self.avoided[node]
            self._ask(request, world)

    def _missing(self, workers: int, share: Mapping[str, int]) -> str:
        state = ClusterState.now()
        return missing(workers, share, room_for(share, self._open_to_us(state, set())), state)

    def _open_to_us(self, state: ClusterState, avoided: Set[str]) -> dict[str, Counter[str]]:
        """Return what the nodes have for us, by node: what is free there, and what this process holds."""
        nodes: dict[str, Counter[str]] = {}
        for node, resources in state.staying.items():
            if node not in avoided:
                nodes[node] = Counter(resources)  # type: ignore[arg-type]  # amounts may be fractions
        for reservation in self._reservations():
            # A bundle that has lost its node lies on none of these.
            for node in reservation.row()["bundles_to_node_id"].values():
                if node in nodes:
                    nodes[node].update(reservation.share)
        return nodes

    # -------------------------------------------------------------------- nodes that go

    def draining(self) -> Set[str]:
        """Return the nodes that Ray was told will go: by hand, by its autoscaler, by SIGTERM to `ray start --block`."""
        return ClusterState.now().draining

    def own_node(self) -> str:
        """Return the id of this process's own node."""
        return str(ray.get_runtime_context().get_node_id())

    def avoid(self, node_ids: Sequence[str]) -> None:
        """Have worker groups placed without these nodes, as long as the others have the room."""
        for node_id in node_ids:
            self.avoided[node_id] = time.monotonic()

    def stay_on(self, node_ids: Set[str]) -> None:
        """Have the next attempts placed without any other node."""
        self.avoid([node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in node_ids])

    def nodes_to_avoid(self) -> set[str]:
        """Return the nodes that `avoid` was told of not long ago."""
        now = time.monotonic()
        return {node for node, since in self.avoided.items() if now < since + AVOID_S}

    def _avoided_for(self, request: Request, state: ClusterState) -> set[str]:
        """Return the nodes that the places of a worker group must not lie on."""
        avoided = self.nodes_to_avoid() & set(state.total)
        others = {node: resources for node, resources in state.total.items() if node not in avoided}
        # A node that is to be avoided is better than none: its worker may have had a signal that the node had not.
        if room_for(request.share, others) < request.worlds[-1]:
            return set()
        return avoided

    # -------------------------------------------------------------------- agents

    def agents(self, world: int, on_tick: Tick) -> list[NodeAgent]:
        """Return the agents of the nodes of the reservation, in the order of the ranks; start those that lack."""
        assert self.reservation is not None and self.reservation.workers >= world
        slots: dict[str, list[int]] = {}  # bundles by node, in the order of the first bundle
        for bundle, node_id in sorted(self.reservation.row()["bundles_to_node_id"].items())[:world]:
            slots.setdefault(node_id, []).append(bundle)
        # Agents of nodes that are not used any more would only take up their memory.
        for node_id in self.ray_agents.actors.keys() - slots.keys():
            self.ray_agents.kill(node_id)
        rows = {node["NodeID"]: node for node in ray.nodes()}
        gpus = self.cluster.gpus_per_worker
        agents = []
        for node_id, bundles in slots.items():
            # Of a bundle the GPUs are the same as long as it lives.
            if gpus and node_id not in self.gpu_ids:
                self.gpu_ids[node_id] = gpus_of_bundles(self.reservation.group, bundles, gpus)
            agents.append(
                NodeAgent(
                    name=rows[node_id]["NodeManagerHostname"],
                    node_id=node_id,
                    address=rows[node_id]["NodeManagerAddress"],
                    slots=len(bundles),
                    call=self.ray_agents.start(node_id, self.run, has_gpus=gpus > 0),
                    visible_gpus=self.gpu_ids.get(node_id, ""),
                )
            )
        return agents

    def loss_of(self, agent: NodeAgent, error: BaseException | None) -> str:
        """Say how the node of an agent was lost, or the agent alone, and go on without it; "" where both are there."""
        loss = loss_of_node(agent.node_id)
        if loss:
            # The places are asked for anew, elsewhere.
            self.avoid([agent.node_id])
            self.release()
        else:
            loss = loss_of_agent(error)
        if loss:
            self.ray_agents.kill(agent.node_id)
        return loss

    def gpus_present(self) -> tuple[int, str]:
        """Return how many GPUs the cluster has, and whether it is this "machine" or another "cluster"."""
        return int(ray.cluster_resources().get("GPU", 0)), "machine" if self.is_embedded else "cluster"


def too_small(text: str, reason: str) -> ClusterError:
    """Return the error of a cluster that has not enough places, with what to type."""
    return ClusterError(f"{text}\n{reason}\ntype fewer cluster.workers, or RAY_ADDRESS=host:port of more machines")


_joined: dict[tuple[str, str], RayNodes] = {}  # by the ids of this node and of this process there; at most one entry


def ray_nodes_of(cluster: ClusterConfig, *, is_embedded: bool) -> RayNodes:
    """Return what this process has in the cluster that it has joined."""
    # Every cluster counts its drivers anew, so that the first of each has the same id; no two nodes have the same.
    context = ray.get_runtime_context()
    connection = (str(context.get_node_id()), str(context.get_job_id()))
    if connection not in _joined:
        # What was held over another connection has gone with it. The nodes to avoid are kept: it may be the same
        # cluster that was joined again.
        avoided = {node: since for nodes in _joined.values() for node, since in nodes.avoided.items()}
        _joined.clear()
        _joined[connection] = RayNodes(cluster, is_embedded=is_embedded)
        _joined[connection].avoided = avoided
    _joined[connection].cluster = cluster
    return _joined[connection]
