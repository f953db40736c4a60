"""The order in which campaigns get their places on one cluster, and which of them make way: pure functions.

1. By `cluster.priority`, the higher first; among equals by age, the older first. No campaign is let past another
   because it would fit into what is free: a large one would wait for ever behind small ones.
2. What asks for more than the cluster has even when it is empty holds up nobody.
3. Who is first and has no room takes it from campaigns of a lower priority: from the lowest first, from the youngest
   among equals, from as few as are needed, and from none where even that would not do.

>>> a = Entry("01", "/runs/a", 0, 1000.0, 2, {"CPU": 1}, places="4f1a")
>>> b = Entry("02", "/runs/b", 5, 2000.0, 2, {"CPU": 1})
>>> victims_of(b, [a, b], held={"4f1a": {"n1": {"CPU": 2}}}, free={"n1": {"CPU": 0}})
[a]
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.scheduling.room import Resources, room_for


@dataclass(frozen=True)
class Entry:
    """One campaign's driver, as the others see it."""

    job: str  # Ray's id of the driver
    run: str
    priority: int
    since: float  # when its command first asked for places, seconds since 1970
    workers: int
    share: dict[str, int]  # of one worker
    places: str = ""  # id of the placement group that it has; "" while it waits


def rank(entry: Entry) -> tuple[int, float, str]:
    """Return what the queue is sorted by; the job's id only makes the order the same for all who look."""
    return -entry.priority, entry.since, entry.job


def waiting(entries: Sequence[Entry]) -> list[Entry]:
    """Return who waits, the first first."""
    return sorted([entry for entry in entries if not entry.places], key=rank)


def ahead_of(mine: Entry, entries: Sequence[Entry], total: Mapping[str, Resources]) -> list[Entry]:
    """Return who waits ahead of one's own, the first first; `total` is what the nodes have when they are empty."""
    ahead = []
    for entry in waiting(entries):
        fits = room_for(entry.share, total) >= entry.workers
        if fits and rank(entry) < rank(mine):
            ahead.append(entry)
    return ahead


def victims_of(
    mine: Entry,
    entries: Sequence[Entry],
    held: Mapping[str, Mapping[str, Resources]],
    free: Mapping[str, Resources],
) -> list[Entry]:
    """Return which campaigns are to make way for one's own; none where it needs none, or where that would not do.

    `held` is what lies on each node by the id of the places, `free` what is free there, or about to be.
    """
    lower = [entry for entry in entries if entry.places and entry.priority < mine.priority]
    lower.sort(key=rank, reverse=True)

    def is_enough(chosen: Sequence[Entry]) -> bool:
        nodes = {node: Counter(resources) for node, resources in free.items()}
        for entry in chosen:
            for node, resources in held.get(entry.places, {}).items():
                # What lies on a node that is about to leave is no room.
                if node in nodes:
                    nodes[node].update(resources)
        return room_for(mine.share, nodes) >= mine.workers

    chosen: list[Entry] = []
    while not is_enough(chosen):
        if not lower:
            return []
        chosen.append(lower.pop(0))
    # A small one that was chosen early may not be needed any more beside a large one; the highest is spared first.
    for entry in reversed(chosen.copy()):
        others = [other for other in chosen if other is not entry]
        if is_enough(others):
            chosen = others
    return chosen
