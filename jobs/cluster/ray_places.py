"""Reserve slots for a campaign's workers in a Ray cluster. A slot consists of the CPUs and GPUs for one worker.

1. `reserve` requests a placement group from Ray. Each bundle contains the slots of one or more workers on a single
   node. Ray's scheduler queues the request with all other requests, and an autoscaler sees what is needed.
2. Until there is enough room, a message reports how many workers fit and which campaigns hold the rest.
3. Slots stay reserved when an attempt fails, so that no other campaign takes them before the next attempt. New slots
   are requested if one of the nodes is about to leave or does not respond.
4. Ray releases all slots when this process leaves the cluster.

If `cluster.workers` is a range, its maximum is requested first, so that an autoscaler sees it. After `patience_s`, the
largest number of workers that fits is requested instead. Between attempts, if more workers fit, the reservation is
replaced with a larger one.

Excluded nodes are never used. Avoided nodes are used only if the other nodes have too little room.
"""

import math
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from data.errors import ClusterError
from jobs.cluster.capacity import OWNER, ClusterState, in_words, missing, room_for
from jobs.cluster.ray import WAITING
from jobs.cluster_config import ClusterConfig

POLL_S = 0.1
FIRST_LINE_S = 3.0  # wait before the first message: slots of the previous worker group take a moment to become free
NEXT_LINE_S = 10.0  # minimum interval between different messages
SAME_LINE_S = 60.0  # interval at which the same message is repeated
NEXT_REQUEST_S = 5.0  # time for Ray to place a request, before a different number of workers is requested
AVOID_S = 600.0  # how long a node is avoided after it was about to leave
DETECTION_S = 70.0  # within this time Ray detects a dead node, so a node still listed later may be used again
TOO_FEW = "use a smaller cluster.workers, or set RAY_ADDRESS=HOST:PORT to use a larger cluster"

PROBE_TIMEOUT_S = 0.5  # timeout for the kernel of a live node to accept a connection
PROBE_ATTEMPTS = 2  # connection attempts, because a packet may be lost: TCP retries after 1 s, a new connection at once
PARALLEL_PROBES = 64  # number of nodes probed in parallel


@dataclass(frozen=True)
class Reservation:
    """A placement group created by this process."""

    group: PlacementGroup
    sizes: Sequence[int]  # number of workers in each bundle
    share: Mapping[str, int]  # the resources of one worker, by Ray's resource name

    @property
    def workers(self) -> int:
        """Return the number of workers with reserved slots."""
        return sum(self.sizes)


def takes_connections(node: Mapping[str, Any]) -> bool:
    """Return whether a node in `ray.nodes()` accepts connections, which its kernel does even if all processes are busy.

    Ray's own health check takes 15 s for a node that refuses connections, and 65 s for one that does not respond.
    """
    for _ in range(PROBE_ATTEMPTS):
        with suppress(OSError):
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), PROBE_TIMEOUT_S).close()
            return True
    return False


def without_nodes(node_ids: Set[str], bundles: int) -> list[dict[str, str]] | None:
    """Return label selectors that exclude these nodes, one per bundle; None if there are no nodes to exclude."""
    if not node_ids:
        return None
    # No space after the comma: Ray would include it in the next node id.
    return [{"ray.io/node-id": f"!in({','.join(sorted(node_ids))})"}] * bundles


def bundle_sizes(workers: int, rooms: Iterable[int]) -> list[int]:
    """Return the number of workers in each bundle; `rooms` is the number of workers that still fit on each node.

    One bundle takes all free room on a node: on 1,000 nodes with room for eight workers each, Ray places 1,000 bundles
    instead of 8,000. Workers for which there is no room yet get one bundle each, because the size of future nodes is
    unknown.
    """
    sizes: list[int] = []
    for room in sorted(rooms, reverse=True):
        size = min(room, workers - sum(sizes))
        if size:
            sizes.append(size)
    return sizes + [1] * (workers - sum(sizes))


def largest_within(worlds: Sequence[int], room: int) -> int:
    """Return the largest of these world sizes not exceeding `room`; 0 if all are larger."""
    return max((world for world in worlds if world <= room), default=0)


class RayPlaces:
    """The slots that this process has reserved or requested in its Ray cluster."""

    def __init__(self, cluster: ClusterConfig, *, is_embedded: bool) -> None:
        self.cluster = cluster
        self.is_embedded = is_embedded
        self.avoided: dict[str, float] = {}  # id of a node that may leave or does not respond → time since then
        self.excluded: set[str] = set()  # ids of nodes that must not be used again
        self.reservation: Reservation | None = None
        self.last_sizes: Sequence[int] = ()  # bundle sizes of the last request
        self.borrowed: list[Reservation] = []  # free slots in temporary use, released as soon as others need them
        self.run = ""

    @property
    def share(self) -> dict[str, int]:
        """Return the resources of one worker as Ray's resource name → amount; zero amounts are omitted."""
        share = {"CPU": self.cluster.cpus_per_worker}
        if self.cluster.gpus_per_worker:
            share["GPU"] = self.cluster.gpus_per_worker
        return share

    def reserve(self, run: str, worlds: Sequence[int], log: Callable[[str], None], on_tick: Callable[[], None]) -> int:
        """Wait until slots are reserved, and return the number of workers with a slot.

        Returns at once if this process already has suitable slots, none of their nodes is leaving, and no larger
        number of workers fits. `on_tick` is called several times a second and may end the wait by raising an exception.
        Raises ClusterError after `wait_s`, or at once if an embedded cluster is too small.
        """
        self.run = run
        if self.is_embedded:
            # An embedded cluster never gets more nodes, so do not wait for more slots.
            room = self.refuse_too_few(worlds[-1])
            worlds = [world for world in worlds if world <= room]

        # Keep held slots if none of their nodes is leaving. If a node is lost, Ray places the group again; a REMOVED
        # group was deleted by somebody else.
        held = self.reservation
        if held is not None and held.share == self.share and held.workers in worlds:
            row = placement_group_table(held.group)
            state = self.state()
            leaving = self._avoided_for(worlds[-1], state) | state.draining
            if row["state"] == "REMOVED" or leaving & set(row["bundles_to_node_id"].values()):
                held = None
        else:
            held = None
        if held is None:
            # Probe all nodes: Ray would place bundles on a node without power, because it notices the loss only later.
            avoided = self.avoided_now()
            nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoided]
            with ThreadPoolExecutor(PARALLEL_PROBES) as threads:
                for node, is_alive in zip(nodes, threads.map(takes_connections, nodes), strict=True):
                    if not is_alive:
                        self.avoid([node["NodeID"]])
            self._request(worlds[0], worlds[-1])
        elif len(worlds) > 1:
            # If more workers fit, exchange the slots for more.
            more = largest_within(worlds, self.room())
            if more > held.workers:
                self._request(more, worlds[-1])

        try:
            self._wait(worlds, log, on_tick)
        except BaseException:
            # We stopped waiting: cancel the request so that it does not block other jobs.
            self.release()
            raise
        return self.workers_held

    def state(self) -> ClusterState:
        """Return the state of the cluster without the excluded nodes. Thread-safe."""
        return ClusterState.now(without=self.excluded)

    def refuse_too_few(self, least: int) -> int:
        """Return how many workers fit into the whole cluster.

        Raises ClusterError if fewer than `least` fit into an embedded cluster, which never gets more nodes.
        """
        share = self.share
        room = room_for(share, self.state().total)
        if self.is_embedded and room < least:
            reason = "this machine has no more CPUs or GPUs"
            advice = TOO_FEW
            if "GPU" in share and not self.gpus_present()[0]:
                reason = "neither Ray nor torch sees a GPU on this machine"
                advice = f"to train on the CPU, set cluster.gpus_per_worker=0; or {TOO_FEW}"
            raise ClusterError(
                f"there is room for only {room} of {least} workers, which need {in_words(share)} each\n"
                f"  {reason}\n"
                f"  {advice}"
            )
        return room

    def gpus_present(self) -> tuple[int, str]:
        """Return the number of GPUs, and where they are: "machine" (this one) or "cluster"."""
        place = "machine" if self.is_embedded else "cluster"
        return int(ray.cluster_resources().get("GPU", 0)), place

    @property
    def workers_held(self) -> int:
        """Return the number of workers for which this process has reserved slots."""
        return self.reservation.workers if self.reservation else 0

    def nodes_held(self, world: int) -> set[str]:
        """Return the ids of the nodes with the first `world` slots."""
        if self.reservation is None:
            return set()
        return set(self.slots(world))

    def slots(self, world: int) -> dict[str, dict[int, int]]:
        """Return the slots of the first `world` workers: node id → bundle → number of workers."""
        assert self.reservation is not None and self.reservation.workers >= world
        nodes: dict[str, dict[int, int]] = {}  # ordered by each node's first bundle
        remaining = world
        for bundle, node_id in sorted(placement_group_table(self.reservation.group)["bundles_to_node_id"].items()):
            count = min(self.reservation.sizes[bundle], remaining)
            remaining -= count
            if count:
                nodes.setdefault(node_id, {})[bundle] = count
        return nodes

    def release(self) -> None:
        """Release the workers' slots, if any."""
        reservation = self.reservation
        self.reservation = None
        if reservation is not None:
            remove_placement_group(reservation.group)

    def room(self) -> int:
        """Return how many workers currently fit into the cluster, including those with a slot. Thread-safe."""
        # Campaigns that wait for slots take precedence over a scale-up.
        if self.has_pending_requests():
            return self.workers_held
        return room_for(self.share, self._open_to_us(self.state(), self.avoided_now()))

    def has_pending_requests(self) -> bool:
        """Return whether another process is waiting for a placement group that fits into the cluster. Thread-safe."""
        total = self.state().total
        ours = [reservation.group.id.hex() for reservation in [self.reservation, *self.borrowed] if reservation]
        for group, row in placement_group_table().items():
            if row["state"] in ("PENDING", "RESCHEDULING") and group not in ours:
                requested: Counter[str] = Counter()
                for bundle in row["bundles"].values():
                    requested.update(bundle)
                    if room_for(bundle, total) < 1:
                        requested["more than any node has"] += 1
                available: Counter[str] = Counter()
                for resources in total.values():
                    available.update(resources)  # type: ignore[arg-type]  # amounts may be fractions
                if requested <= available:
                    return True
        return False

    def _request(self, workers: int, least: int) -> None:
        """Request slots for `workers` workers from Ray, and cancel the previous request."""
        share = self.share
        state = self.state()
        avoided = self._avoided_for(least, state)
        sizes: Sequence[int] = self.sizes(workers, self._open_to_us(state, avoided))
        # Ray does not report recently released resources as free yet, for example after the loss of a node.
        if len(self.last_sizes) < len(sizes) and sum(self.last_sizes) == workers:
            sizes = self.last_sizes
        self.release()
        bundles = []
        for size in sizes:
            bundles.append({name: amount * size for name, amount in share.items()})
        group = placement_group(
            bundles,
            strategy="PACK",
            # Use a new name: Ray refuses a second group of the same name, and the old one may not be removed yet.
            name=f"{OWNER}{self.run} {secrets.token_hex(4)}",
            bundle_label_selector=without_nodes(avoided, len(bundles)),
        )
        self.reservation = Reservation(group, sizes, share)
        self.last_sizes = sizes

    def sizes(self, workers: int, nodes: Mapping[str, Mapping[str, float]]) -> list[int]:
        """Return the number of workers in each bundle, given the free resources of the nodes."""
        return bundle_sizes(workers, [room_for(self.share, {node: free}) for node, free in nodes.items()])

    def _wait(self, worlds: Sequence[int], log: Callable[[str], None], on_tick: Callable[[], None]) -> None:
        """Wait until Ray grants the request, and log the missing resources. Raises the same errors as `reserve`."""
        patience_s = self.cluster.patience_s
        timeout_s = self.cluster.wait_s or math.inf
        began = time.monotonic()
        deadline = began + timeout_s
        patient_until = min(began + patience_s, deadline)
        next_choice = min(began + NEXT_REQUEST_S, patient_until)
        next_line = began + FIRST_LINE_S
        last_line, logged_at = "", 0.0
        assert self.reservation is not None
        while not self.reservation.group.wait(timeout_seconds=POLL_S):
            now = time.monotonic()
            if now > next_choice:
                is_patient = now < patient_until
                next_choice = now + NEXT_REQUEST_S
                if is_patient:
                    next_choice = min(next_choice, patient_until)
                if self._adjust_request(worlds, log, is_patient=is_patient):
                    deadline = max(deadline, next_choice)
            if now > deadline:
                raise ClusterError(
                    f"{self._missing(worlds[-1])}\n"
                    f"  the slots did not become free within {timeout_s:.0f} s (cluster.wait_s)\n  {TOO_FEW}"
                )
            # Log after a few seconds, after each change, and once in a while, because a silent wait looks like a hang.
            if now > next_line:
                line = self._missing(worlds[0])
                if len(worlds) > 1:
                    line += f"; continuing with fewer workers after {patience_s:g} s (cluster.patience_s)"
                if line != last_line or now > logged_at + SAME_LINE_S:
                    log(f"{WAITING}{line}")
                    last_line, logged_at = line, now
                next_line = now + NEXT_LINE_S
            on_tick()
            assert self.reservation is not None

    def _missing(self, workers: int) -> str:
        """Describe how many workers fit, the free resources by node, and which campaigns hold the rest."""
        state = self.state()
        return missing(workers, self.share, self._open_to_us(state, set()), state)

    def _adjust_request(self, worlds: Sequence[int], log: Callable[[str], None], *, is_patient: bool) -> bool:
        """Adapt the request to the room in the cluster; return whether it is now below the maximum.

        If `is_patient`, only the sizes of the bundles change, and the number of workers stays the same.
        """
        state = self.state()
        # Use long-avoided nodes again, but only if the others have too little room.
        avoided = self._avoided_for(worlds[-1], state)
        open_to_us = self._open_to_us(state, avoided)
        room = room_for(self.share, open_to_us)
        back = self._long_avoided(avoided)
        room_with_them = room_for(self.share, self._open_to_us(state, avoided - back))
        has_other_nodes = not is_patient and room < worlds[-1] <= room_with_them
        if has_other_nodes:
            room = room_with_them
            for node in back:
                del self.avoided[node]

        # If no allowed number of workers fits, keep requesting the maximum, so that an autoscaler sees it.
        world = self.workers_held if is_patient else largest_within(worlds, room) or worlds[0]
        assert self.reservation is not None
        if has_other_nodes or self.sizes(world, open_to_us) != self.reservation.sizes:
            if world < worlds[0] and world != self.workers_held and not has_other_nodes:
                log(f"continuing with {world} of up to {worlds[0]} workers: {self._missing(worlds[0])}")
            self.last_sizes = ()
            self._request(world, worlds[-1])
        return world < worlds[0]

    def _open_to_us(self, state: ClusterState, avoided: Set[str]) -> dict[str, Counter[str]]:
        """Return the resources available to this process on each node: those that are free or reserved by it."""
        nodes: dict[str, Counter[str]] = {}
        for node, resources in state.staying.items():
            if node not in avoided:
                nodes[node] = Counter(resources)  # type: ignore[arg-type]  # amounts may be fractions
        for reservation in [self.reservation, *self.borrowed]:
            if reservation is None:
                continue
            # A bundle on a lost node has no entry in this table.
            for bundle, node in placement_group_table(reservation.group)["bundles_to_node_id"].items():
                if node in nodes:
                    for name, amount in reservation.share.items():
                        nodes[node][name] += amount * reservation.sizes[bundle]
        return nodes

    # -------------------------------------------------------------------- avoided and excluded nodes

    def avoid(self, node_ids: Iterable[str]) -> None:
        """Avoid these nodes in new placements for AVOID_S if the other nodes have enough room."""
        for node_id in node_ids:
            self.avoided[node_id] = time.monotonic()

    def avoided_now(self) -> set[str]:
        """Return the ids of all excluded nodes and currently avoided nodes."""
        now = time.monotonic()
        return self.excluded | {node for node, since in self.avoided.items() if now < since + AVOID_S}

    def _long_avoided(self, nodes: Set[str]) -> set[str]:
        """Return the nodes avoided for longer than Ray takes to detect a dead node."""
        now = time.monotonic()
        return {node for node in nodes - self.excluded if now > self.avoided[node] + DETECTION_S}

    def _avoided_for(self, least: int, state: ClusterState) -> set[str]:
        """Return the nodes to exclude from a placement: excluded and avoided nodes.

        If the other nodes have no room for `least` workers, return only excluded nodes: a node may be avoided wrongly,
        because one of its workers has received a signal not meant for the node.
        """
        avoided = self.avoided_now() & set(state.total)
        others = {node: resources for node, resources in state.total.items() if node not in avoided}
        if room_for(self.share, others) < least:
            avoided = set()
        return avoided | self.excluded
