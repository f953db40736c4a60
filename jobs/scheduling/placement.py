"""The places of a worker group on a Ray cluster: asked for as a whole, waited for with words, kept over the attempts.

1. `reserve` asks Ray for a placement group: for every worker one share of CPUs and GPUs, each on one node. From then on
   an autoscaler sees what is wanted, and no other campaign can take a part of it.
2. While Ray has no room: say for how many workers there is room, and which campaigns hold the rest.
3. cluster/ray_backend.py hands the placement group to Ray Train, which would otherwise ask for one of its own.
4. It is kept when an attempt fails, so that a campaign that waits does not slip in between two attempts. It is asked
   for anew where one of its nodes is about to leave, or does not answer.
5. Ray takes it back when this process leaves the cluster.

Where `cluster.workers` is a range, the largest number of workers is asked for, so that an autoscaler hears of it. After
`patience_s` the largest for which there is room is asked for in its place. What is held is given up for more as soon as
there is room for more, between two attempts.

>>> reserve(ClusterConfig(workers=2, cpus_per_worker=4), "/runs/digits", is_embedded=False)
waiting for the cluster: room for 1 of 2 workers of 4 CPUs; free: 6 CPUs on n1; held: 8 CPUs by /runs/photographs
"""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ray._private.state import state as ray_state
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from jobs.cluster_config import ClusterConfig
from jobs.scheduling.room import (
    OWNER,
    draining_nodes,
    missing,
    refuse_what_never_fits,
    room_for,
    share_of_worker,
    staying,
    too_small,
)
from jobs.workers.worker_group import do_nothing

POLL_S = 0.25
FIRST_WORD_S = 3.0  # the places of the last worker group take a moment to come free: no word about that
NEXT_WORD_S = 10.0  # between two different words
SAME_WORD_S = 60.0  # before the same word is said again
NEXT_CHOICE_S = 5.0  # for Ray to place what has been asked for, before another number of workers is
AVOID_S = 600.0  # a node that was to leave, and is there after so long, stays
MISSED_S = 70.0  # a node that is dead has been missed by Ray after so long; one that is there is better than none
BORROW_S = 5.0  # for Ray to place what seems to be free


@dataclass(frozen=True)
class Reservation:
    """Holds what this process has reserved, for how many workers and how much each."""

    group: PlacementGroup
    workers: int
    share: Mapping[str, int]  # of one worker, by Ray's name of the resource


@dataclass(frozen=True)
class Request:
    """Says which places a worker group wants, and how long it waits."""

    run: str
    share: Mapping[str, int]  # of one worker, by Ray's name of the resource
    worlds: tuple[int, ...]  # the numbers of workers that would do, the largest first
    patience_s: float  # for the largest, where several would do
    timeout_s: float  # for any

    def largest_in(self, room: int) -> int | None:
        """Return the largest world for whose workers there is room; None where there is room for none."""
        for world in self.worlds:
            if world <= room:
                return world
        return None


_reservations: list[Reservation] = []  # of this process: none or one
_lent: list[Reservation] = []  # of this process too: free places that it gives back when anybody wants them
_avoided: dict[str, float] = {}  # ids of nodes that are about to leave, or do not answer → since when


# ------------------------------------------------------------------------ held by this process


def reserve(
    cluster: ClusterConfig,
    run: str,
    is_embedded: bool,
    say: Callable[[str], None] = print,
    on_tick: Callable[[], None] = do_nothing,
    worlds: Sequence[int] = (),
) -> PlacementGroup:
    """Return a placement group that holds one place for every worker, when Ray has made room for it.

    `worlds` are the numbers of workers that would do, the largest first; without them it is `cluster.world`. What this
    process holds already is returned at once, where it fits, none of its nodes is to be left, and there is no room for
    more. `on_tick` is called about four times a second; what it raises ends the wait. Raises ClusterError after
    `wait_s`, or at once where an embedded cluster will never have the room.
    """
    refuse_what_never_fits(cluster, is_embedded)
    share = share_of_worker(cluster)
    worlds = worlds or (cluster.world,)
    if is_embedded:
        # It does not grow: nobody has to wait for more.
        room_when_empty = room_for(share, ray_state.total_resources_per_node())
        worlds = [world for world in worlds if world <= room_when_empty]
    request = Request(run, share, tuple(worlds), cluster.patience_s, cluster.wait_s or math.inf)
    if not _holds(request):
        _ask(request, request.worlds[0])
    elif len(worlds) > 1:
        _ask_for_more(request)

    try:
        _wait(request, say, on_tick)
    except BaseException:
        # Who does not wait any more must not be given what others wait for.
        release()
        raise
    return _reservations[0].group


def held(cluster: ClusterConfig) -> PlacementGroup | None:
    """Return the places that this process has, where they are those of this very worker group; None where not."""
    for reservation in _reservations:
        is_placed = placement_group_table(reservation.group)["state"] == "CREATED"
        if is_placed and reservation.workers == cluster.world and reservation.share == share_of_worker(cluster):
            return reservation.group
    return None


def workers_held() -> int:
    """Return for how many workers this process holds places."""
    return sum(reservation.workers for reservation in _reservations)


def room_now(share: Mapping[str, int]) -> int:
    """Return for how many workers there would be room, those counted that have their places. Any thread may ask.

    Who waits for that room, the queue knows (queue.is_anybody_waiting).
    """
    return room_for(share, _open_to_us(set(_nodes_to_avoid())))


def release() -> None:
    """Give back what this process holds, where it holds anything."""
    while _reservations:
        remove_placement_group(_reservations.pop().group)


def group_id() -> str:
    """Return the id of the placement group that this process has asked for; "" where there is none."""
    return _reservations[0].group.id.hex() if _reservations else ""


def forget() -> None:
    """Forget what this process held in a cluster that it has left; Ray has taken it back.

    The nodes to avoid are kept: it may be the same cluster that is joined next, and no id is given twice.
    """
    _reservations.clear()
    _lent.clear()


def borrow(share: Mapping[str, int], run: str) -> PlacementGroup | None:
    """Return a place for one process outside the worker group, where Ray has it at once; None where it has not.

    Others see who has it by its name, which is none of those that they wait for. Any thread may ask.
    """
    group = placement_group([share], name=f"beside {run} {secrets.token_hex(4)}")
    _lent.append(Reservation(group, 1, share))
    deadline = time.monotonic() + BORROW_S
    while time.monotonic() < deadline:
        if placement_group_table(group)["state"] == "CREATED":
            return group
        time.sleep(POLL_S)
    give_back()
    return None


def give_back() -> None:
    """Give back what was borrowed, where anything was."""
    while _lent:
        remove_placement_group(_lent.pop().group)


def is_room_to_borrow(share: Mapping[str, int]) -> bool:
    """Tell whether a place is free, on a node that stays, and nobody waits for places. Any thread may ask."""
    free = staying(ray_state.available_resources_per_node())
    for node in _nodes_to_avoid():
        free.pop(node, None)
    return room_for(share, free) >= 1 and not is_anything_asked_for()


def is_anything_asked_for() -> bool:
    """Tell whether anybody, of whatever application, waits for a placement group for which the cluster is large enough.

    Any thread may ask.
    """
    total = ray_state.total_resources_per_node()
    ours = {reservation.group.id.hex() for reservation in [*_reservations, *_lent]}
    for group, row in placement_group_table().items():
        if row["state"] in ("PENDING", "RESCHEDULING") and group not in ours:
            bundles = row["bundles"].values()
            if all(room_for({name: 1}, total) >= amount for bundle in bundles for name, amount in bundle.items()):
                return True
    return False


def avoid(node_id: str) -> None:
    """Have worker groups placed without this node, as long as the others have the room."""
    _avoided[node_id] = time.monotonic()


def _holds(request: Request) -> bool:
    """Tell whether this process holds what is wanted, on nodes that stay."""
    if not _reservations:
        return False
    held = _reservations[0]
    row = placement_group_table(held.group)
    # A group that has lost a node is placed anew by Ray; one may be REMOVED by somebody else.
    if row["state"] == "REMOVED" or held.share != request.share or held.workers not in request.worlds:
        return False
    nodes = set(row["bundles_to_node_id"].values())
    return not nodes & (avoided_for(request.share, request.worlds[-1]) | set(draining_nodes()))


def _ask(request: Request, workers: int) -> None:
    """Ask Ray for the places of so many workers, and give back what this process has asked for before."""
    release()
    group = placement_group(
        [request.share] * workers,
        strategy="PACK",
        # Of two groups of one name Ray refuses the second; a new one may be asked for before the old one is gone.
        name=f"{OWNER}{request.run} {secrets.token_hex(4)}",
        bundle_label_selector=_elsewhere(request, workers),
    )
    _reservations.append(Reservation(group, workers, request.share))


def _ask_for_more(request: Request) -> None:
    """Give up what this process holds for the places of more workers, where there is room for them."""
    more = request.largest_in(room_now(request.share))
    if more is not None and more > workers_held():
        _ask(request, more)


def _elsewhere(request: Request, workers: int) -> list[dict[str, str]] | None:
    """Return for every worker the rule that keeps it off the nodes to avoid; None where there is no such rule."""
    avoided = avoided_for(request.share, request.worlds[-1])
    if not avoided:
        return None
    return [{"ray.io/node-id": f"!in({', '.join(sorted(avoided))})"}] * workers


def avoided_for(share: Mapping[str, int], least: int) -> set[str]:
    """Return the nodes that the places of a worker group of `least` workers or more must not lie on."""
    total = ray_state.total_resources_per_node()
    avoided = _nodes_to_avoid() & set(total)
    others = {node: resources for node, resources in total.items() if node not in avoided}
    # A node that is to be avoided is better than none: its worker may have had a signal that the node had not.
    if room_for(share, others) < least:
        return set()
    return avoided


def _nodes_to_avoid() -> set[str]:
    """Return the nodes that `avoid` was told of not long ago."""
    now = time.monotonic()
    return {node for node, since in _avoided.items() if now < since + AVOID_S}


def _open_to_us(avoided: set[str]) -> dict[str, Counter[str]]:
    """Return what the nodes have for us, by node: what is free there, and what this process holds."""
    nodes: dict[str, Counter[str]] = {}
    for node, resources in staying(ray_state.available_resources_per_node()).items():
        if node not in avoided:
            nodes[node] = Counter(resources)
    for reservation in [*_reservations, *_lent]:
        # A bundle that has lost its node lies on none of these.
        for node in placement_group_table(reservation.group)["bundles_to_node_id"].values():
            if node in nodes:
                nodes[node].update(reservation.share)
    return nodes


# ------------------------------------------------------------------------ waiting


def _wait(request: Request, say: Callable[[str], None], on_tick: Callable[[], None]) -> None:
    """Return when Ray has placed what was asked for; say meanwhile what is missing. Raises what `reserve` raises."""
    began = time.monotonic()
    deadline = began + request.timeout_s
    next_choice = min(began + request.patience_s, deadline)
    words = Words(say)
    while placement_group_table(_reservations[0].group)["state"] != "CREATED":
        now = time.monotonic()
        if now > next_choice:
            next_choice = now + NEXT_CHOICE_S
            _take_avoided_nodes(request)
            if len(request.worlds) > 1 and _choose(request, say):
                deadline = max(deadline, next_choice)
        if now > deadline:
            raise too_small(missing_places(request.worlds[-1], request.share), f"waited {request.timeout_s:.0f} s")
        if words.are_due():
            word = missing_places(request.worlds[0], request.share)
            if len(request.worlds) > 1:
                word += f"; fewer will do after {request.patience_s:g} s (cluster.patience_s)"
            words.tell(word)
        on_tick()
        time.sleep(POLL_S)


def _take_avoided_nodes(request: Request) -> None:
    """Ask for the places anew, with nodes that were to be avoided, where only with them there is room."""
    now = time.monotonic()
    avoided = avoided_for(request.share, request.worlds[-1])
    alive = {node for node in avoided if now > _avoided[node] + MISSED_S}
    room = room_for(request.share, _open_to_us(avoided))
    room_with_them = room_for(request.share, _open_to_us(avoided - alive))
    world = request.largest_in(room_with_them)
    if request.largest_in(room) is None and world is not None:
        for node in alive:
            del _avoided[node]
        _ask(request, world)


class Words:
    """Says what is waited for: not at once, when it has changed, and now and then. Or a queue looks like a hang."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.next_word = time.monotonic() + FIRST_WORD_S
        self.last_word = ""
        self.said = 0.0

    def are_due(self) -> bool:
        """Tell whether `tell` would say something new."""
        return time.monotonic() > self.next_word

    def tell(self, word: str) -> None:
        """Say a word, where it is due."""
        now = time.monotonic()
        if now <= self.next_word:
            return
        if word != self.last_word or now > self.said + SAME_WORD_S:
            self.say(f"waiting for the cluster: {word}")
            self.last_word = word
            self.said = now
        self.next_word = now + NEXT_WORD_S


def _choose(request: Request, say: Callable[[str], None]) -> bool:
    """Ask for the places of as many workers as there is room for; tell whether these are fewer than the most."""
    most = request.worlds[0]
    room = room_for(request.share, _open_to_us(avoided_for(request.share, request.worlds[-1])))
    # Where none would do, the most is what an autoscaler is to hear of.
    world = request.largest_in(room) or most
    if world != workers_held():
        if world < most:
            say(f"goes on with {world} of up to {most} workers: {missing_places(most, request.share)}")
        _ask(request, world)
    return world < most


def missing_places(workers: int, share: Mapping[str, int]) -> str:
    """Say for how many workers there is room, those counted that have their places, and where the rest is."""
    return missing(workers, share, room_for(share, _open_to_us(set())))
