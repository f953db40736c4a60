"""The places of a campaign's workers in a Ray cluster, which Ray reserves.

1. `reserve` asks Ray for a placement group: for every worker one share of CPUs and GPUs, all shares of a bundle on one
   node. From then on Ray's scheduler orders the request among all others, and an autoscaler sees what is needed.
2. While Ray has no room, a message tells for how many workers there is room, and which campaigns hold the rest.
3. The places are kept when an attempt fails, so that no other campaign takes them between two attempts. New ones are
   requested if one of their nodes is about to leave, or does not answer.
4. Ray takes all of it back when this process leaves the cluster.

If `cluster.workers` is a range, the largest number of workers is requested, so that an autoscaler hears of it. After
`patience_s` the largest number for which there is room is requested instead. The places are given up for more as soon
as there is room for more, between two attempts.

No places lie on excluded nodes, and on those that are avoided for a while only if the others have too little room.
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
FIRST_LINE_S = 3.0  # the places of the last worker group take a moment to come free: no line about that
NEXT_LINE_S = 10.0  # between two different lines
SAME_LINE_S = 60.0  # before the same line is logged again
NEXT_CHOICE_S = 5.0  # for Ray to place a request, before another number of workers is requested
AVOID_S = 600.0  # a node that was to leave, and is still there after so long, is used again
MISSED_S = 70.0  # Ray has noticed a dead node after so long; a node that is there is better than none
TOO_FEW = "type fewer cluster.workers, or RAY_ADDRESS=host:port of more machines"

ANSWER_S = 0.5  # for the kernel of a node that is alive to take a connection
ASKED_TIMES = 2  # one packet may be lost: TCP would retry after 1 s, a new connection does at once
ASKED_AT_ONCE = 64  # nodes


@dataclass(frozen=True)
class Reservation:
    """Holds what this process has reserved, for how many workers and how much each."""

    group: PlacementGroup
    sizes: Sequence[int]  # workers of each bundle
    share: Mapping[str, int]  # of one worker, by Ray's name of the resource

    @property
    def workers(self) -> int:
        """Return for how many workers places are reserved."""
        return sum(self.sizes)


def takes_connections(node: Mapping[str, Any]) -> bool:
    """Ask a node of `ray.nodes()` whether it is there; its kernel answers, however busy its processes are.

    Ray's own health check takes 15 s for a node that refuses, and 65 s for one that is silent.
    """
    for _ in range(ASKED_TIMES):
        with suppress(OSError):
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_S).close()
            return True
    return False


def without_nodes(node_ids: Set[str], bundles: int) -> list[dict[str, str]] | None:
    """Return the label selectors of so many bundles that must not lie on these nodes."""
    if not node_ids:
        return None
    # Without a space: Ray takes it for a part of the next id, which then names no node.
    return [{"ray.io/node-id": f"!in({','.join(sorted(node_ids))})"}] * bundles


def bundle_sizes(workers: int, rooms: Iterable[int]) -> list[int]:
    """Return how many workers each bundle is for, where nodes have room for so many workers each.

    A bundle takes what a node has free: of 1,000 nodes with eight workers each Ray places 1,000 bundles, and not 8,000.
    For what has no room yet a bundle is a worker's, because nobody knows how large the nodes will be that come free.
    """
    sizes: list[int] = []
    for room in sorted(rooms, reverse=True):
        size = min(room, workers - sum(sizes))
        if size:
            sizes.append(size)
    return sizes + [1] * (workers - sum(sizes))


def largest_within(worlds: Sequence[int], room: int) -> int:
    """Return the largest world for whose workers there is room; 0 where there is room for none."""
    return max((world for world in worlds if world <= room), default=0)


class RayPlaces:
    """The places that this process holds in the cluster that it has joined, and those that it waits for."""

    def __init__(self, cluster: ClusterConfig, *, is_embedded: bool) -> None:
        self.cluster = cluster
        self.is_embedded = is_embedded
        self.avoided: dict[str, float] = {}  # ids of nodes that are about to leave, or do not answer → since when
        self.excluded: set[str] = set()  # ids of nodes that are not used any more
        self.reservation: Reservation | None = None
        self.last_sizes: Sequence[int] = ()  # of the bundles that were requested last
        self.borrowed: list[Reservation] = []  # free places that are given back when anybody needs them
        self.run = ""

    @property
    def share(self) -> dict[str, int]:
        """Return what Ray reserves for one worker, by Ray's name of the resource; a share of nothing is left out."""
        share = {"CPU": self.cluster.cpus_per_worker}
        if self.cluster.gpus_per_worker:
            share["GPU"] = self.cluster.gpus_per_worker
        return share

    def reserve(self, run: str, worlds: Sequence[int], log: Callable[[str], None], on_tick: Callable[[], None]) -> int:
        """Return how many workers have places, when Ray has made room for them.

        Places that this process holds are returned at once, where they fit, none of their nodes is to be left, and
        there is no room for more. `on_tick` is called several times a second; what it raises ends the wait. Raises
        ClusterError after `wait_s`, or at once where an embedded cluster will never have the room.
        """
        self.run = run
        if self.is_embedded:
            # It does not grow: nobody has to wait for more.
            room = self.refuse_too_few(worlds[-1])
            worlds = [world for world in worlds if world <= room]

        # What this process holds is kept on nodes that stay. A group that has lost a node is placed anew by Ray; one
        # may be REMOVED by somebody else.
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
            # Ray would place bundles on a node that has just lost its power, and then wait until it misses that.
            avoided = self.avoided_now()
            nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoided]
            with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
                for node, is_there in zip(nodes, threads.map(takes_connections, nodes), strict=True):
                    if not is_there:
                        self.avoid([node["NodeID"]])
            self._request(worlds[0], worlds[-1])
        elif len(worlds) > 1:
            # Give it up for the places of more workers, where there is room for them.
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
        """Return what the nodes have that this process may use. Any thread may ask."""
        return ClusterState.now(without=self.excluded)

    def refuse_too_few(self, least: int) -> int:
        """Return for how many workers the cluster has room when it is empty.

        Raises ClusterError where that is too few and will be for ever: an embedded cluster does not grow.
        """
        share = self.share
        room = room_for(share, self.state().total)
        if self.is_embedded and room < least:
            reason = "this machine has no more"
            advice = TOO_FEW
            if "GPU" in share and not self.gpus_present()[0]:
                reason = "neither Ray nor torch sees a GPU here"
                advice = f"type cluster.gpus_per_worker=0 to compute on the CPU; or {TOO_FEW}"
            raise ClusterError(f"room for {room} of {least} workers of {in_words(share)}\n{reason}\n{advice}")
        return room

    def gpus_present(self) -> tuple[int, str]:
        """Return how many GPUs the cluster has, and whether it is this "machine" or another "cluster"."""
        place = "machine" if self.is_embedded else "cluster"
        return int(ray.cluster_resources().get("GPU", 0)), place

    @property
    def workers_held(self) -> int:
        """Return for how many workers this process holds places."""
        return self.reservation.workers if self.reservation else 0

    def nodes_held(self, world: int) -> set[str]:
        """Return the ids of the nodes on which the first `world` places lie."""
        if self.reservation is None:
            return set()
        return set(self.places(world))

    def places(self, world: int) -> dict[str, dict[int, int]]:
        """Return where the first `world` workers have their places: by node, how many in which bundle."""
        assert self.reservation is not None and self.reservation.workers >= world
        nodes: dict[str, dict[int, int]] = {}  # in the order of the first bundle
        left = world
        for bundle, node_id in sorted(placement_group_table(self.reservation.group)["bundles_to_node_id"].items()):
            count = min(self.reservation.sizes[bundle], left)
            left -= count
            if count:
                nodes.setdefault(node_id, {})[bundle] = count
        return nodes

    def release(self) -> None:
        """Give back the workers' places, where there are any."""
        reservation = self.reservation
        self.reservation = None
        if reservation is not None:
            remove_placement_group(reservation.group)

    def room(self) -> int:
        """Return for how many workers there would be room, those counted that have their places. Any thread may ask."""
        # Another campaign that waits comes before one that wants more.
        if self.has_pending_requests():
            return self.workers_held
        return room_for(self.share, self._open_to_us(self.state(), self.avoided_now()))

    def has_pending_requests(self) -> bool:
        """Tell whether anybody waits for a placement group that the cluster can hold. Any thread may ask."""
        total = self.state().total
        ours = [reservation.group.id.hex() for reservation in [self.reservation, *self.borrowed] if reservation]
        for group, row in placement_group_table().items():
            if row["state"] in ("PENDING", "RESCHEDULING") and group not in ours:
                requested: Counter[str] = Counter()
                for bundle in row["bundles"].values():
                    requested.update(bundle)
                    if room_for(bundle, total) < 1:
                        requested["more than any node has"] += 1
                there: Counter[str] = Counter()
                for resources in total.values():
                    there.update(resources)  # type: ignore[arg-type]  # amounts may be fractions
                if requested <= there:
                    return True
        return False

    def _request(self, workers: int, least: int) -> None:
        """Ask Ray for the places of so many workers, and give back what this process has asked for before."""
        share = self.share
        state = self.state()
        avoided = self._avoided_for(least, state)
        sizes: Sequence[int] = self.sizes(workers, self._open_to_us(state, avoided))
        # What was given back a moment ago, as when a node was lost, is not yet counted as free.
        if len(self.last_sizes) < len(sizes) and sum(self.last_sizes) == workers:
            sizes = self.last_sizes
        self.release()
        bundles = []
        for size in sizes:
            bundles.append({name: amount * size for name, amount in share.items()})
        group = placement_group(
            bundles,
            strategy="PACK",
            # Of two groups of one name Ray refuses the second; a new one may be asked for before the old one is gone.
            name=f"{OWNER}{self.run} {secrets.token_hex(4)}",
            bundle_label_selector=without_nodes(avoided, len(bundles)),
        )
        self.reservation = Reservation(group, sizes, share)
        self.last_sizes = sizes

    def sizes(self, workers: int, nodes: Mapping[str, Mapping[str, float]]) -> list[int]:
        """Return how many workers each bundle is for, by what the nodes have for us."""
        return bundle_sizes(workers, [room_for(self.share, {node: free}) for node, free in nodes.items()])

    def _wait(self, worlds: Sequence[int], log: Callable[[str], None], on_tick: Callable[[], None]) -> None:
        """Return when Ray has placed the request; log meanwhile what is missing. Raises what `reserve` raises."""
        patience_s = self.cluster.patience_s
        timeout_s = self.cluster.wait_s or math.inf
        began = time.monotonic()
        deadline = began + timeout_s
        patient_until = min(began + patience_s, deadline)
        next_choice = min(began + NEXT_CHOICE_S, patient_until)
        next_line = began + FIRST_LINE_S
        last_line, logged_at = "", 0.0
        assert self.reservation is not None
        while not self.reservation.group.wait(timeout_seconds=POLL_S):
            now = time.monotonic()
            if now > next_choice:
                is_patient = now < patient_until
                next_choice = now + NEXT_CHOICE_S
                if is_patient:
                    next_choice = min(next_choice, patient_until)
                if self._adjust_request(worlds, log, is_patient=is_patient):
                    deadline = max(deadline, next_choice)
            if now > deadline:
                raise ClusterError(f"{self._missing(worlds[-1])}\nwaited {timeout_s:.0f} s\n{TOO_FEW}")
            # Not at once, when it has changed, and now and then. Or a queue looks like a hang.
            if now > next_line:
                line = self._missing(worlds[0])
                if len(worlds) > 1:
                    line += f"; fewer will do after {patience_s:g} s (cluster.patience_s)"
                if line != last_line or now > logged_at + SAME_LINE_S:
                    log(f"{WAITING}{line}")
                    last_line, logged_at = line, now
                next_line = now + NEXT_LINE_S
            on_tick()
            assert self.reservation is not None

    def _missing(self, workers: int) -> str:
        """Say for how many of so many workers there is room, what is free where, and which campaigns hold the rest."""
        state = self.state()
        return missing(workers, self.share, self._open_to_us(state, set()), state)

    def _adjust_request(self, worlds: Sequence[int], log: Callable[[str], None], *, is_patient: bool) -> bool:
        """Ask for the places of as many workers as there is room for; tell whether these are fewer than the most.

        As long as it `is_patient` the number stays, and bundles are only asked for in other sizes.
        """
        state = self.state()
        # Nodes that are avoided for long are used if only with them there is room.
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

        # Where none would do, the most is what an autoscaler is to hear of.
        world = self.workers_held if is_patient else largest_within(worlds, room) or worlds[0]
        assert self.reservation is not None
        if has_other_nodes or self.sizes(world, open_to_us) != self.reservation.sizes:
            if world < worlds[0] and world != self.workers_held and not has_other_nodes:
                log(f"goes on with {world} of up to {worlds[0]} workers: {self._missing(worlds[0])}")
            self.last_sizes = ()
            self._request(world, worlds[-1])
        return world < worlds[0]

    def _open_to_us(self, state: ClusterState, avoided: Set[str]) -> dict[str, Counter[str]]:
        """Return what the nodes have for us, by node: what is free there, and what this process holds."""
        nodes: dict[str, Counter[str]] = {}
        for node, resources in state.staying.items():
            if node not in avoided:
                nodes[node] = Counter(resources)  # type: ignore[arg-type]  # amounts may be fractions
        for reservation in [self.reservation, *self.borrowed]:
            if reservation is None:
                continue
            # A bundle that has lost its node lies on none of these.
            for bundle, node in placement_group_table(reservation.group)["bundles_to_node_id"].items():
                if node in nodes:
                    for name, amount in reservation.share.items():
                        nodes[node][name] += amount * reservation.sizes[bundle]
        return nodes

    # -------------------------------------------------------------------- nodes without places

    def avoid(self, node_ids: Iterable[str]) -> None:
        """Have worker groups placed without these nodes for a while, as long as the others have the room."""
        for node_id in node_ids:
            self.avoided[node_id] = time.monotonic()

    def avoided_now(self) -> set[str]:
        """Return the excluded nodes and those that are avoided at the moment."""
        now = time.monotonic()
        return self.excluded | {node for node, since in self.avoided.items() if now < since + AVOID_S}

    def _long_avoided(self, nodes: Set[str]) -> set[str]:
        """Return those of the nodes that are avoided for so long that they can be taken for alive."""
        now = time.monotonic()
        return {node for node in nodes - self.excluded if now > self.avoided[node] + MISSED_S}

    def _avoided_for(self, least: int, state: ClusterState) -> set[str]:
        """Return the nodes on which no places may lie, if the others have room for `least` workers.

        Avoided nodes are used if the others have too little room: a worker may have received a signal that its node has
        not.
        """
        avoided = self.avoided_now() & set(state.total)
        others = {node: resources for node, resources in state.total.items() if node not in avoided}
        if room_for(self.share, others) < least:
            avoided = set()
        return avoided | self.excluded
