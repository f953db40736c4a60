"""The places of a worker group on a Ray cluster: asked for as a whole, waited for with words, kept over the attempts.

1. `reserve` asks Ray for a placement group: for every worker one share of CPUs and GPUs, each on one node. From then on
   an autoscaler sees what is wanted, and no other campaign can take a part of it.
2. While Ray has no room: say for how many workers there is room, and which campaigns hold the rest.
3. ray_backend.py hands the placement group to Ray Train, which would otherwise ask for one of its own.
4. It is kept when an attempt fails, so that a campaign that waits does not slip in between two attempts. It is asked
   for anew where one of its nodes is about to leave, or does not answer.
5. Ray takes it back when this process leaves the cluster.

>>> reserve(ClusterConfig(workers=2, cpus_per_worker=4), "/runs/digits", is_embedded=False)
waiting for the cluster: room for 1 of 2 workers of 4 CPUs; free: 6 CPUs on n1; held: 8 CPUs by /runs/photographs
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray
from ray._private.state import state as ray_state
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from data.errors import ClusterError
from jobs.cluster.worker_group import ClusterConfig, do_nothing

POLL_S = 0.25
FIRST_WORD_S = 3.0  # the places of the last worker group take a moment to come free: no word about that
NEXT_WORD_S = 10.0  # between two different words
SAME_WORD_S = 60.0  # before the same word is said again
LONGEST_LIST = 4  # nodes or campaigns that a word names
OWNER = "patchline "  # how the names of our placement groups begin; the run follows, and what makes the name its own


@dataclass(frozen=True)
class Reservation:
    """Holds what this process has reserved, for how many workers and how much each."""

    group: PlacementGroup
    workers: int
    share: Mapping[str, int]  # of one worker, by Ray's name of the resource


_reservations: list[Reservation] = []  # of this process: none or one
_avoided: set[str] = set()  # ids of nodes that are about to leave, or do not answer


# ------------------------------------------------------------------------ held by this process


def reserve(
    cluster: ClusterConfig,
    run: str,
    is_embedded: bool,
    say: Callable[[str], None] = print,
    on_tick: Callable[[], None] = do_nothing,
) -> PlacementGroup:
    """Return a placement group that holds one place for every worker, when Ray has made room for it.

    What this process holds already is returned at once, where it fits and none of its nodes is to be left. `on_tick`
    is called about four times a second; what it raises ends the wait. Raises ClusterError after `wait_s`, or at once
    where an embedded cluster will never have the room.
    """
    share = share_of_worker(cluster)
    refuse_what_never_fits(cluster, is_embedded)
    if not _holds(cluster.workers, share):
        release()
        group = placement_group(
            [share] * cluster.workers,
            strategy="PACK",
            # Of two groups of one name Ray refuses the second; a new one may be asked for before the old one is gone.
            name=f"{OWNER}{run} {secrets.token_hex(4)}",
            bundle_label_selector=_elsewhere(cluster.workers, share),
        )
        _reservations.append(Reservation(group, cluster.workers, share))

    group = _reservations[0].group
    try:
        _wait(group, cluster, share, say, on_tick)
    except BaseException:
        # Who does not wait any more must not be given what others wait for.
        release()
        raise
    return group


def release() -> None:
    """Give back what this process holds, where it holds anything."""
    while _reservations:
        remove_placement_group(_reservations.pop().group)


def group_id() -> str:
    """Return the id of the placement group that this process has asked for; "" where there is none."""
    return _reservations[0].group.id.hex() if _reservations else ""


def forget() -> None:
    """Forget what this process held in a cluster that it has left; Ray has taken it back."""
    _reservations.clear()
    _avoided.clear()


def avoid(node_id: str) -> None:
    """Have the next worker group placed without this node, as long as the others have the room."""
    _avoided.add(node_id)


def draining_nodes() -> dict[str, int]:
    """Return the nodes that Ray was told will go: by id, until when in ms since 1970, or 0 where nobody said."""
    return ray_state.get_draining_nodes()


def share_of_worker(cluster: ClusterConfig) -> dict[str, int]:
    """Return what Ray reserves for one worker, by Ray's name of the resource; a share of nothing is left out."""
    share = {"CPU": cluster.cpus_per_worker}
    if cluster.gpus_per_worker:
        share["GPU"] = cluster.gpus_per_worker
    return share


def refuse_what_never_fits(cluster: ClusterConfig, is_embedded: bool) -> None:
    """Raise ClusterError where an embedded cluster, which does not grow, is too small even when it is empty."""
    if not is_embedded:
        return
    share = share_of_worker(cluster)
    room = room_for(share, ray_state.total_resources_per_node())
    if room < cluster.workers:
        raise too_small(
            f"room for {room} of {cluster.workers} workers of {in_words(share)}", "this machine has no more"
        )


def _holds(workers: int, share: Mapping[str, int]) -> bool:
    """Tell whether this process holds what is wanted, on nodes that stay."""
    if not _reservations:
        return False
    held = _reservations[0]
    row = placement_group_table(held.group)
    # A group that has lost a node is placed anew by Ray; one is REMOVED by what clears up after Train's controller.
    if row["state"] == "REMOVED" or (held.workers, held.share) != (workers, share):
        return False
    nodes = set(row["bundles_to_node_id"].values())
    return not nodes & (_avoided | set(draining_nodes()))


def _elsewhere(workers: int, share: Mapping[str, int]) -> list[dict[str, str]] | None:
    """Return for every worker the rule that keeps it off the nodes to avoid; None where there is no such rule."""
    total = ray_state.total_resources_per_node()
    avoided = _avoided & set(total)
    others = {node: resources for node, resources in total.items() if node not in avoided}
    # A node that is to be avoided is better than none: its worker may have had a signal that the node had not.
    if not avoided or room_for(share, others) < workers:
        return None
    return [{"ray.io/node-id": f"!in({', '.join(sorted(avoided))})"}] * workers


# ------------------------------------------------------------------------ waiting


def _wait(
    group: PlacementGroup,
    cluster: ClusterConfig,
    share: Mapping[str, int],
    say: Callable[[str], None],
    on_tick: Callable[[], None],
) -> None:
    """Return when Ray has placed the group; say meanwhile what is missing. Raises what `reserve` raises."""
    began = time.monotonic()
    words = Words(say)
    while placement_group_table(group)["state"] != "CREATED":
        if cluster.wait_s is not None and time.monotonic() > began + cluster.wait_s:
            raise too_small(missing(cluster.workers, share), f"waited {cluster.wait_s:.0f} s")
        if words.are_due():
            words.tell(missing(cluster.workers, share))
        on_tick()
        time.sleep(POLL_S)


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


def missing(workers: int, share: Mapping[str, int]) -> str:
    """Say for how many workers there is room, what is free where, and which campaigns hold the rest."""
    leaving = set(draining_nodes())
    free = {}
    for node, resources in ray_state.available_resources_per_node().items():
        if node not in leaving:
            free[node] = resources
    parts = [f"room for {min(room_for(share, free), workers)} of {workers} workers of {in_words(share)}"]
    room_when_empty = room_for(share, ray_state.total_resources_per_node())
    if room_when_empty < workers:
        parts.append(f"even when the cluster is empty it has room for {room_when_empty}")

    names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    free_somewhere = []
    for node, resources in free.items():
        left = {name: int(resources.get(name, 0)) for name in share if resources.get(name, 0) >= 1}
        if left:
            free_somewhere.append(f"{in_words(left)} on {names.get(node, node[:8])}")
    if free_somewhere:
        parts.append(f"free: {_some(free_somewhere)}")
    held = [f"{in_words(amounts)} by {run}" for run, amounts in _held_by_campaigns().items()]
    if held:
        parts.append(f"held: {_some(held)}")
    return "; ".join(parts)


def room_for(share: Mapping[str, int], nodes: Mapping[str, Mapping[str, float]]) -> int:
    """Return how many workers the nodes can hold; what is left on two nodes does not make a place for one worker.

    >>> room_for({"CPU": 2}, {"n1": {"CPU": 5.0}, "n2": {"CPU": 1.0}})
    2
    """
    workers = 0
    for resources in nodes.values():
        workers += min(int(resources.get(name, 0) // count) for name, count in share.items())
    return workers


def in_words(amounts: Mapping[str, float]) -> str:
    """Return "4 CPUs and 1 GPUs"."""
    return " and ".join(f"{count:g} {name}s" for name, count in amounts.items())


def _held_by_campaigns() -> dict[str, Counter[str]]:
    """Return what the placement groups of campaigns hold, by the run directory that their names tell."""
    held: dict[str, Counter[str]] = {}
    for row in placement_group_table().values():
        if row["state"] == "CREATED" and row["name"].startswith(OWNER):
            run, _, _ = row["name"].removeprefix(OWNER).rpartition(" ")
            amounts = held.setdefault(run, Counter())
            for bundle in row["bundles"].values():
                amounts.update({name: int(count) for name, count in bundle.items() if name in ("CPU", "GPU")})
    return held


def _some(texts: list[str]) -> str:
    """Join the first few texts, and count the rest."""
    shown = ", ".join(texts[:LONGEST_LIST])
    if len(texts) > LONGEST_LIST:
        shown += f" and {len(texts) - LONGEST_LIST} more"
    return shown


def too_small(missing: str, reason: str) -> ClusterError:
    return ClusterError(f"{missing}\n{reason}\ntype fewer cluster.workers, or RAY_ADDRESS=host:port of more machines")
