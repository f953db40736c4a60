"""The queue of campaigns for the places of one Ray cluster: who may ask for places now, and who gives up their own.

There is no process for it. Every driver writes what it wants into Ray's key-value store, reads what the others want,
and keeps to the order that all of them compute alike (queue_order.py):

1. `reserve` writes an entry: the run, its priority, since when, how many workers. Entries of drivers that have died,
   which Ray knows, are ignored, and swept away.
2. While somebody is ahead who waits as well, it asks Ray for nothing, and says for whom and for what it waits.
3. Who is first asks Ray for its places (placement.py), which an autoscaler sees. So does at once who asks for more than
   the cluster has: nobody waits for that.
4. Who is first and has no room marks campaigns of a lower priority. `watch`, beside their attempt, leaves a notice: the
   workers commit, the places are given back, and the driver waits here again, as old as it was.
5. A mark counts as long as the driver that made it waits. So nobody makes way for one that was stopped or has died.
6. With its places it says so in its entry, and looks once more: where somebody ahead has come meanwhile, it gives them
   back. Of two that look at the same time, each sees the other, because both write first and look then.

A submitted job also tells its metadata where it stands, for `python -m jobs list`.
"""

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util.placement_group import PlacementGroup, placement_group_table

from jobs.cluster_config import ClusterConfig
from jobs.monitor import job_metadata
from jobs.scheduling import placement
from jobs.scheduling.queue_order import Entry, ahead_of, victims_of, waiting
from jobs.scheduling.room import add_to, held_by, room_for, share_of_worker, staying, too_small
from jobs.workers.notices import give_notice

NAMESPACE = b"patchline"  # in Ray's key-value store
ENTRIES = b"queue/"  # and the id of a driver → its entry
MARKS = b"make-way/"  # and the id of a driver → the id of the driver for which it is to make way
LEAST_LEFT_S = 0.001  # of a wait that is over; 0 would mean for ever
LOOK_S = 1.0  # between two looks at the queue
PREEMPT_AFTER_S = (
    3.0  # without room, and without anybody's coming or going: what is given back takes a moment to be free
)

_first_asked: dict[str, float] = {}  # run → when this process first asked for its places: its age in the queue


class NotOurTurn(Exception):
    """Somebody who is ahead waits as well."""


@dataclass(frozen=True)
class Queue:
    """What the drivers that are alive have written."""

    entries: list[Entry]
    marks: dict[str, Entry]  # driver → the one that waits and for which it is to make way

    def of_driver(self, job: str) -> Entry | None:
        """Return a driver's entry; None where it has none."""
        for entry in self.entries:
            if entry.job == job:
                return entry
        return None


def reserve(
    cluster: ClusterConfig,
    run: str,
    say: Callable[[str], None],
    on_tick: Callable[[], None],
    worlds: Sequence[int] = (),
) -> PlacementGroup:
    """Return the places of a worker group when it is this campaign's turn and there is room; see placement.reserve.

    Places that this process has already are returned at once, unless it is to make way, or there is room for more that
    nobody waits for. Raises ClusterError after `wait_s`, and what `on_tick`, called about four times a second, raises.
    """
    job = own_job()
    since = _first_asked.setdefault(run, time.time())
    share = share_of_worker(cluster)
    worlds = worlds or (cluster.world,)
    # With the smallest it is content, where several would do.
    mine = Entry(job, run, cluster.priority, since, worlds[-1], share)
    place = Place(mine, cluster.wait_s or math.inf, say, on_tick)
    queue = read()
    own = queue.of_driver(job)
    has_places = own is not None and own.places != ""
    if has_places and job in queue.marks:
        placement.release()
        has_places = False
    if has_places and placeable(queue.entries):
        worlds = [world for world in worlds if world <= placement.workers_held()] or worlds
    try:
        if not has_places:
            place.wait_for_turn()
        while True:
            try:
                patient = dataclasses.replace(cluster, wait_s=place.left_s())
                places = placement.reserve(patient, run, False, say, place.look, worlds)
            except NotOurTurn:
                place.wait_for_turn()
                continue
            place.take(places)
            if has_places or not place.is_behind():
                return places
            # Somebody who is ahead has come between our look and Ray's answer.
            placement.release()
            place.wait_for_turn()
    except BaseException:
        # With the driver's end it counts no more either.
        with suppress(Exception):
            delete(ENTRIES, job)
        raise
    finally:
        place.take_back_marks()


@dataclass
class Place:
    """One driver's place in the queue, while it waits."""

    mine: Entry
    wait_s: float
    say: Callable[[str], None]
    on_tick: Callable[[], None]
    began: float = field(default_factory=time.monotonic)
    next_look: float = 0.0
    marked: set[str] = field(default_factory=set)  # drivers that were told to make way for this one
    scene: tuple[str, ...] | None = None  # who had places when there was first no room; None: there is room
    scene_since: float = 0.0

    def wait_for_turn(self) -> None:
        """Return when nobody is ahead who could be placed; say meanwhile for whom this campaign waits."""
        words = placement.Words(self.say)
        while True:
            if self.left_s() == LEAST_LEFT_S:
                missing = placement.missing_places(self.mine.workers, self.mine.share)
                raise too_small(missing, f"waited {self.wait_s:.0f} s")
            queue = self.look_at_queue()
            ahead = self.ahead(queue)
            if not ahead:
                return
            others = f"behind {ahead[0].run}"
            if len(ahead) > 1:
                others += f" and {len(ahead) - 1} more"
            missing = f"{others}; {placement.missing_places(self.mine.workers, self.mine.share)}"
            self.tell(queue, missing)
            words.tell(f"{self.position(queue)} in the queue, {missing}")
            # A look costs the head a few questions; a stop is to be heard sooner.
            looked = time.monotonic()
            while time.monotonic() < looked + LOOK_S:
                self.on_tick()
                time.sleep(placement.POLL_S)

    def left_s(self) -> float | None:
        """Return for how many seconds more this campaign waits; None: for ever."""
        if math.isinf(self.wait_s):
            return None
        return max(LEAST_LEFT_S, self.began + self.wait_s - time.monotonic())

    def look(self) -> None:
        """Look once a second while Ray has been asked for the places, and take them from others where that is right.

        Raises NotOurTurn where somebody is ahead now, and what `on_tick` raises.
        """
        self.on_tick()
        if time.monotonic() < self.next_look:
            return
        queue = self.look_at_queue()
        if self.ahead(queue):
            raise NotOurTurn
        self.preempt(queue)
        self.tell(queue, placement.missing_places(self.mine.workers, self.mine.share))
        self.next_look = time.monotonic() + LOOK_S

    def look_at_queue(self) -> Queue:
        """Return the queue with this driver in it, waiting."""
        queue = read()
        if queue.of_driver(self.mine.job) != self.mine:
            write(self.mine)
            queue = read()
        return queue

    def ahead(self, queue: Queue) -> list[Entry]:
        """Return who waits ahead and could be placed, the first first; nobody where this one fits nowhere."""
        total = staying(ray_state.total_resources_per_node())
        # Nobody loses by a request that cannot be met, and an autoscaler is to see it.
        if room_for(self.mine.share, total) < self.mine.workers:
            return []
        return ahead_of(self.mine, queue.entries, total)

    def is_behind(self) -> bool:
        """Tell whether somebody waits ahead."""
        return self.ahead(read()) != []

    def preempt(self, queue: Queue) -> None:
        """Mark the campaigns that are to make way for this one, where there is no room without that."""
        table = placement_group_table()
        free = staying(ray_state.available_resources_per_node())
        # Ray was asked for places elsewhere: what is free on these nodes is no room, until they are taken after all.
        for node in placement.avoided_for(self.mine.share, self.mine.workers):
            free.pop(node, None)
        held = {places: held_by(row) for places, row in table.items() if row["state"] == "CREATED"}
        # Ray has just placed it: what looks like no room is its own.
        if placement.group_id() in held:
            return
        # Of places that have lost a node the rest is kept for this campaign.
        own = table.get(placement.group_id())
        if own is not None:
            add_to(free, held_by(own))
        others: list[Entry] = []
        for entry in queue.entries:
            if entry.job not in queue.marks:
                others.append(entry)
            else:
                # Who has been told to make way will have done so soon.
                add_to(free, held.get(entry.places, {}))
        if room_for(self.mine.share, free) >= self.mine.workers:
            self.scene = None
            return
        scene = tuple(sorted(entry.places for entry in queue.entries if entry.places))
        if scene != self.scene:
            self.scene = scene
            self.scene_since = time.monotonic()
        if time.monotonic() < self.scene_since + PREEMPT_AFTER_S:
            return
        for victim in victims_of(self.mine, others, held, free):
            put(MARKS, victim.job, self.mine.job)
            self.marked.add(victim.job)
            self.say(
                f"{victim.run} (priority {victim.priority}) is to make way for this campaign (priority "
                f"{self.mine.priority}): it commits, and waits in the queue again"
            )

    def take(self, places: PlacementGroup) -> None:
        """Say in the queue that this campaign has its places."""
        write(dataclasses.replace(self.mine, places=places.id.hex()))
        told = {"queue": "RUNNING", "priority": str(self.mine.priority), "position": "", "waits_for": ""}
        job_metadata.update(told)

    def take_back_marks(self) -> None:
        """Have nobody make way any more for a driver that does not wait any more."""
        for job in self.marked:
            # They count no more either where this fails.
            with suppress(Exception):
                delete(MARKS, job)

    def tell(self, queue: Queue, missing: str) -> None:
        """Tell the job's metadata where this campaign stands and what it waits for."""
        told = {"queue": "PENDING", "priority": str(self.mine.priority), "waits_for": missing}
        job_metadata.update(told | {"position": self.position(queue)})

    def position(self, queue: Queue) -> str:
        """Return "2 of 3": the place among those that wait."""
        jobs = [entry.job for entry in waiting(queue.entries)]
        return f"{jobs.index(self.mine.job) + 1} of {len(jobs)}"


# ------------------------------------------------------------------------ making way


def watch(folder: Path, job: str, has_ended: threading.Event) -> None:
    """Leave a notice in an attempt's folder when this driver, `job`, is to make way for another, until `has_ended`."""
    while not has_ended.wait(LOOK_S):
        # The head may be away, and the run directory may stutter: the next look asks again.
        with suppress(Exception):
            reason = reason_to_make_way(job)
            if reason:
                give_notice(folder, {"rank": 0, "node": "", "node_id": "", "why": reason, "makes_way": True})
                return


def is_anybody_waiting() -> bool:
    """Tell whether a campaign waits for places that the cluster has when it is empty. Any thread may ask."""
    return placeable(read().entries) != []


def placeable(entries: Sequence[Entry]) -> list[Entry]:
    """Return who waits and would fit into the cluster when it is empty: of the others nobody has to take account."""
    total = staying(ray_state.total_resources_per_node())
    return [entry for entry in waiting(entries) if room_for(entry.share, total) >= entry.workers]


def wait_again() -> None:
    """Say that this campaign has lost its places and wants others, so that nobody who came later takes them."""
    # The head may be away: then the places are asked for like those of a newcomer.
    with suppress(Exception):
        own = read().of_driver(own_job())
        if own is not None and own.places:
            write(dataclasses.replace(own, places=""))


def leave() -> None:
    """Give back the places of this campaign, which wants none for now; when it does, it is as old as it was."""
    placement.release()
    # With a stale entry it would only be asked to make way once more.
    with suppress(Exception):
        delete(ENTRIES, own_job())


def own_job() -> str:
    """Return Ray's id of this driver. For the main thread: without a connection Ray would start a cluster to answer."""
    return ray.get_runtime_context().get_job_id()


def reason_to_make_way(job: str) -> str:
    """Return for whom a driver is to make way; "" where it is not. Any thread may ask."""
    # Nearly always there is none, and then the queue need not be read.
    if _client().internal_kv_get(MARKS + job.encode(), NAMESPACE) is None:
        return ""
    first = read().marks.get(job)
    if first is None:
        return ""
    return f"{first.run} (priority {first.priority}) waits for these places"


# ------------------------------------------------------------------------ in Ray's key-value store


def read() -> Queue:
    """Read what the drivers that are alive have written, and sweep away the rest."""
    client = _client()
    keys = client.internal_kv_keys(ENTRIES, NAMESPACE)
    keys += client.internal_kv_keys(MARKS, NAMESPACE)
    texts = client.internal_kv_multi_get(keys, NAMESPACE)
    # After the texts: a driver that has written has joined before.
    alive = {job["JobID"] for job in ray_state.job_table() if not job["IsDead"]}

    entries = {}
    for key, text in texts.items():
        job = key.removeprefix(ENTRIES).decode()
        if key.startswith(ENTRIES) and job in alive:
            entries[job] = Entry(**json.loads(text))
    marks = {}
    for key, text in texts.items():
        job = key.removeprefix(MARKS).decode()
        first = entries.get(text.decode())
        # Who waits no more, because it was stopped or has found room, needs nobody's places.
        if key.startswith(MARKS) and job in entries and first is not None and not first.places:
            marks[job] = first

    for key, text in texts.items():
        prefix = ENTRIES if key.startswith(ENTRIES) else MARKS
        job = key.removeprefix(prefix).decode()
        is_of_the_dead = prefix == MARKS and text.decode() not in alive
        if job not in alive or is_of_the_dead:
            delete(prefix, job)
    return Queue(list(entries.values()), marks)


def write(entry: Entry) -> None:
    """Write a driver's entry in the place of the one before."""
    put(ENTRIES, entry.job, json.dumps(dataclasses.asdict(entry)))


def put(prefix: bytes, job: str, text: str) -> None:
    """Write a value of a driver."""
    _client().internal_kv_put(prefix + job.encode(), text.encode(), True, NAMESPACE)


def delete(prefix: bytes, job: str) -> None:
    """Delete a value of a driver, where there is one."""
    _client().internal_kv_del(prefix + job.encode(), False, NAMESPACE)


def _client() -> Any:
    """Return this process's connection to the head, which waits while the head is away; compiled: no types."""
    return internal_kv_get_gcs_client()
