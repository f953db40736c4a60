"""The queue of campaigns on one cluster: its order and who makes way, by tables made by hand, and for real."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.cluster import ray_backend
from jobs.cluster_config import ClusterConfig, WorkerRange
from jobs.scheduling import placement, queue, room
from jobs.scheduling.queue_order import Entry, ahead_of, victims_of, waiting
from pipeline.monitoring.telemetry import read_metrics
from tests.test_ray_nodes import ROOT, cluster, nodes  # the last two are fixtures

NODES = {"n1": {"CPU": 4.0, "GPU": 2.0}, "n2": {"CPU": 4.0, "GPU": 2.0}}


def entry(run: str, priority: int, since: float, workers: int, gpus: int = 0, places: str = "") -> Entry:
    share = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
    return Entry(f"job-{run}", run, priority, since, workers, share, places)


def runs(entries: list[Entry]) -> str:
    return "".join(entry.run for entry in entries)


# ------------------------------------------------------------------------ the order


def test_the_higher_priority_comes_first_and_among_equals_the_older() -> None:
    queue = [
        entry("a", 0, 10, 1),
        entry("b", 5, 30, 1),
        entry("c", 0, 5, 1),
        entry("d", 5, 20, 1),
        entry("e", -1, 1, 1),
        entry("r", 9, 0, 1, places="pr"),
    ]
    assert runs(waiting(queue)) == "dbcae", "who runs does not wait"
    assert runs(ahead_of(queue[0], queue, NODES)) == "dbc"
    assert runs(ahead_of(queue[3], queue, NODES)) == ""
    # The same for whoever looks, also where two are as old.
    twins = [entry("y", 0, 10, 1), entry("x", 0, 10, 1)]
    assert runs(waiting(twins)) == runs(waiting(twins[::-1])) == "xy"


def test_what_never_fits_holds_up_nobody() -> None:
    small = entry("s", 0, 10, 1)
    # Nine CPUs of eight; five GPUs of four; two GPUs on one node fit twice and not three times.
    for large in (entry("l", 5, 1, 9), entry("l", 5, 1, 5, gpus=1), entry("l", 5, 1, 3, gpus=2)):
        assert ahead_of(small, [small, large], NODES) == []
    # These fit, when the cluster is empty: the small one waits for them.
    for large in (entry("l", 5, 1, 8), entry("l", 5, 1, 4, gpus=1), entry("l", 5, 1, 2, gpus=2)):
        assert runs(ahead_of(small, [small, large], NODES)) == "l"


# ------------------------------------------------------------------------ who makes way

# Who runs: run → priority, since when, and its CPUs on the first and on the second node.
RUNNING = {"a": (0, 10, 1, 1), "b": (0, 20, 2, 0), "c": (3, 5, 0, 2), "d": (7, 1, 1, 0)}  # one of four is free on n2


@pytest.mark.parametrize(
    ("priority", "workers", "cpus", "free", "expected"),
    [
        pytest.param(5, 1, 1, (0, 1), "", id="there is room"),
        pytest.param(5, 2, 1, (0, 1), "b", id="the youngest of the lowest"),
        pytest.param(5, 4, 1, (0, 1), "ba", id="as many as are needed"),
        pytest.param(5, 7, 1, (0, 1), "bac", id="then the next priority"),
        pytest.param(5, 8, 1, (0, 1), "", id="none where all lower ones would not do"),
        pytest.param(9, 8, 1, (0, 1), "bacd", id="with the highest it would"),
        pytest.param(0, 2, 1, (0, 1), "", id="none of its own priority"),
        pytest.param(3, 4, 1, (0, 1), "ba", id="only lower ones"),
        # A place for a worker of three CPUs is on one node: c alone would do, beside the one that is free.
        pytest.param(5, 1, 3, (0, 1), "ba", id="the lowest first, although one higher would do"),
        pytest.param(9, 1, 4, (0, 1), "ac", id="who is not needed beside the others is spared"),
    ],
)
def test_who_makes_way(priority, workers, cpus, free, expected) -> None:
    held: dict[str, Mapping[str, Mapping[str, float]]] = {}
    entries = []
    for run, (its_priority, since, on_n1, on_n2) in RUNNING.items():
        entries.append(entry(run, its_priority, since, on_n1 + on_n2, places=f"p{run}"))
        held[f"p{run}"] = {"n1": {"CPU": on_n1}, "n2": {"CPU": on_n2}}
    mine = Entry("job-m", "m", priority, 99, workers, {"CPU": cpus})
    room = {"n1": {"CPU": free[0]}, "n2": {"CPU": free[1]}}
    assert sorted(runs(victims_of(mine, [*entries, mine], held, room))) == sorted(expected)


# ------------------------------------------------------------------------ what drivers write and read


class FakeRay:
    """Ray's key-value store and its tables, as a test sets them; by hand, so that a look costs no cluster."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.alive = {"job-m", "job-a", "job-b"}
        self.total = {"n1": {"CPU": 2.0}, "n2": {"CPU": 2.0}}
        self.free = {"n1": {"CPU": 0.0}, "n2": {"CPU": 0.0}}
        self.draining: dict[str, int] = {}
        self.groups: dict[str, dict[str, Any]] = {}

    def internal_kv_keys(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        return [key for key in self.values if key.startswith(prefix)]

    def internal_kv_multi_get(self, keys: list[bytes], namespace: bytes) -> dict[bytes, bytes]:
        return {key: self.values[key] for key in keys}

    def internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
        return self.values.get(key)

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> None:
        self.values[key] = value

    def internal_kv_del(self, key: bytes, by_prefix: bool, namespace: bytes) -> None:
        self.values.pop(key, None)

    def job_table(self) -> list[dict[str, Any]]:
        return [{"JobID": job, "IsDead": job not in self.alive} for job in ["job-m", "job-a", "job-b", "job-x"]]

    def total_resources_per_node(self) -> dict[str, dict[str, float]]:
        return self.total

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        return self.free

    def get_draining_nodes(self) -> dict[str, int]:
        return self.draining

    def runs(self, run: str, priority: int, since: float, on: Mapping[str, int]) -> Entry:
        """Have a campaign run, with so many CPUs on each node."""
        bundles = [node for node, count in on.items() for _ in range(count)]
        self.groups[f"p{run}"] = {
            "state": "CREATED",
            "name": f"{placement.OWNER}{run} 1",
            "bundles": {number: {"CPU": 1.0} for number in range(len(bundles))},
            "bundles_to_node_id": dict(enumerate(bundles)),
        }
        its_entry = entry(run, priority, since, len(bundles), places=f"p{run}")
        queue.write(its_entry)
        return its_entry


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(queue, "_client", lambda: fake)
    monkeypatch.setattr(queue, "own_job", lambda: "job-m")
    for module in (queue, placement, room):
        monkeypatch.setattr(module, "ray_state", fake)
        monkeypatch.setattr(module, "placement_group_table", lambda: fake.groups)
    monkeypatch.setattr(placement, "_avoided", {})
    monkeypatch.setattr(placement, "_reservations", [])
    monkeypatch.setattr(queue, "PREEMPT_AFTER_S", 0.0)
    return fake


MAKES_WAY = "a (priority 0) is to make way for this campaign (priority 5): it commits, and waits in the queue again"


def place_of(mine: Entry, said: list[str]) -> queue.Place:
    queue.write(mine)
    return queue.Place(mine, math.inf, said.append, lambda: None)


def test_what_is_free_on_a_node_that_is_avoided_is_no_room(fake_ray) -> None:
    """Ray was asked for places elsewhere: somebody has to make way, as if nothing were free."""
    fake_ray.runs("a", 0, 10, {"n1": 1, "n2": 2})
    fake_ray.free = {"n1": {"CPU": 1.0}, "n2": {"CPU": 0.0}}
    said: list[str] = []
    place = place_of(entry("m", 5, 99, 1), said)
    place.preempt(queue.read())
    assert said == [], "there is room"
    placement.avoid("n1")
    place.preempt(queue.read())
    assert queue.reason_to_make_way("job-a") == "m (priority 5) waits for these places"
    assert said == [MAKES_WAY]
    # Where the others would have no room even when they are empty, the node is taken, and is room.
    large = place_of(entry("b", 5, 99, 3), said)
    assert placement.avoided_for(large.mine.share, large.mine.workers) == set()


def test_what_the_dead_have_written_counts_no_more_and_is_swept_away(fake_ray) -> None:
    fake_ray.runs("a", 0, 10, {"n1": 1})
    queue.write(entry("x", 9, 1, 1))
    queue.put(queue.MARKS, "job-a", "job-x")
    queue.put(queue.MARKS, "job-x", "job-a")
    state = queue.read()
    assert runs(state.entries) == "a" and state.marks == {}
    assert list(fake_ray.values) == [b"queue/job-a"]
    assert not queue.reason_to_make_way("job-a")


def test_nobody_makes_way_for_a_driver_that_has_its_places(fake_ray) -> None:
    fake_ray.runs("a", 0, 10, {"n1": 1})
    queue.write(entry("b", 5, 20, 1))
    queue.put(queue.MARKS, "job-a", "job-b")
    assert queue.reason_to_make_way("job-a") == "b (priority 5) waits for these places"
    fake_ray.runs("b", 5, 20, {"n2": 1})
    assert not queue.reason_to_make_way("job-a")


def test_who_leaves_has_nothing_in_the_queue_and_nobody_waits_for_its_places(fake_ray, monkeypatch) -> None:
    released = []
    monkeypatch.setattr(placement, "release", lambda: released.append(True))
    fake_ray.runs("m", 0, 10, {"n1": 1})
    queue.write(entry("b", 5, 20, 1))
    queue.put(queue.MARKS, "job-m", "job-b")
    assert queue.reason_to_make_way("job-m")
    queue.leave()
    assert released and runs(queue.read().entries) == "b", "or it would wait for itself"
    assert not queue.reason_to_make_way("job-m")


def test_what_is_free_on_a_node_that_is_about_to_leave_is_no_room(fake_ray) -> None:
    fake_ray.runs("a", 0, 10, {"n2": 2})
    fake_ray.free = {"n1": {"CPU": 2.0}, "n2": {"CPU": 0.0}}
    fake_ray.draining = {"n1": 0}
    place_of(entry("m", 5, 99, 1), []).preempt(queue.read())
    assert queue.reason_to_make_way("job-a")


def test_no_second_campaign_makes_way_while_the_first_is_about_to(fake_ray) -> None:
    fake_ray.runs("a", 0, 10, {"n1": 2})
    fake_ray.runs("b", 0, 20, {"n2": 2})
    place = place_of(entry("m", 5, 99, 2), [])
    for _ in range(3):
        place.preempt(queue.read())
    assert place.marked == {"job-b"}


def test_nobody_makes_way_while_places_are_just_being_given_back(fake_ray, monkeypatch) -> None:
    """Ray takes a moment to have them free, and the wait begins anew with each that comes or goes."""
    monkeypatch.setattr(queue, "PREEMPT_AFTER_S", 0.2)
    fake_ray.runs("a", 0, 10, {"n1": 2})
    place = place_of(entry("m", 5, 99, 1), [])
    place.preempt(queue.read())
    time.sleep(0.21)
    fake_ray.runs("b", 0, 20, {"n2": 2})
    place.preempt(queue.read())
    assert place.marked == set()
    time.sleep(0.21)
    place.preempt(queue.read())
    assert place.marked == {"job-b"}


class FakePlacement:
    """Stands in for placement.reserve: gives a group at once, after what a test does meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Sequence[int]] = []  # the worlds of every call
        self.released = 0
        self.held = 0
        self.has_to_wait = False
        self.meanwhile: Callable[[], None] = lambda: None
        monkeypatch.setattr(placement, "reserve", self.reserve)
        monkeypatch.setattr(placement, "release", self.release)
        monkeypatch.setattr(placement, "workers_held", lambda: self.held)
        monkeypatch.setattr(placement, "missing_places", lambda workers, share: "no room")
        monkeypatch.setattr(placement, "POLL_S", 0.001)
        monkeypatch.setattr(queue, "LOOK_S", 0.001)
        monkeypatch.setattr(queue, "_first_asked", {})

    def reserve(self, cluster, run, is_embedded, say, on_tick, worlds) -> Any:
        self.asked.append(worlds)
        self.meanwhile()
        if self.has_to_wait:
            on_tick()
        return SimpleNamespace(id=b"m")

    def release(self) -> None:
        self.released += 1


def own_entry() -> Entry:
    (own,) = (of for of in queue.read().entries if of.job == "job-m")
    return own


def test_who_came_ahead_while_ray_placed_us_has_the_places(fake_ray, monkeypatch) -> None:
    fake = FakePlacement(monkeypatch)
    waited: list[int] = []

    def tick() -> None:
        waited.append(fake.released)
        fake_ray.runs("b", 9, 20, {"n1": 1})

    def another_comes() -> None:
        if len(fake.asked) == 1:
            queue.write(entry("b", 9, 20, 1))

    fake.meanwhile = another_comes
    queue.reserve(ClusterConfig(), "m", print, tick)
    assert len(fake.asked) == 2 and waited[0] == 1
    assert own_entry().places == b"m".hex()


def test_who_is_told_to_make_way_gives_its_places_back_and_waits_as_old_as_it_was(fake_ray, monkeypatch) -> None:
    fake = FakePlacement(monkeypatch)
    queue.reserve(ClusterConfig(), "m", print, lambda: None)
    since = own_entry().since
    queue.write(entry("b", 9, 20, 1))
    queue.put(queue.MARKS, "job-m", "job-b")
    waited: list[Entry] = []

    def tick() -> None:
        if fake.released:
            waited.append(own_entry())
            fake_ray.runs("b", 9, 20, {"n1": 1})

    queue.reserve(ClusterConfig(), "m", print, tick)
    assert fake.released == 1 and waited[0].places == "" and waited[0].since == since == own_entry().since


def test_who_has_places_takes_no_more_while_somebody_waits(fake_ray, monkeypatch) -> None:
    fake = FakePlacement(monkeypatch)
    some = ClusterConfig(workers=WorkerRange(least=1, most=4))
    queue.reserve(some, "m", print, lambda: None, (4, 2, 1))
    fake.held = 2
    queue.reserve(some, "m", print, lambda: None, (4, 2, 1))
    queue.write(entry("b", 0, 20, 1))
    queue.reserve(some, "m", print, lambda: None, (4, 2, 1))
    monkeypatch.setattr(placement, "room_now", lambda share: 4)
    assert ray_backend.room_now(some) == 2, "nor does an attempt end for more"
    queue.write(entry("b", 0, 20, 99))
    queue.reserve(some, "m", print, lambda: None, (4, 2, 1))
    assert fake.asked == [(4, 2, 1), (4, 2, 1), [2, 1], (4, 2, 1)], "what never fits holds up nobody"
    assert ray_backend.room_now(some) == 4


def test_who_waits_no_more_leaves_no_mark_and_who_lost_its_places_waits_again(fake_ray, monkeypatch) -> None:
    FakePlacement(monkeypatch).has_to_wait = True
    fake_ray.runs("a", 0, 10, {"n1": 2, "n2": 2})
    said: list[str] = []
    high = ClusterConfig(priority=5)
    queue.reserve(high, "m", said.append, lambda: None)
    assert said == [MAKES_WAY], "it was told"
    assert not [key for key in fake_ray.values if key.startswith(queue.MARKS)]
    queue.wait_again()
    assert own_entry().places == ""
    # What ends the wait ends the entry.
    with pytest.raises(ZeroDivisionError):
        queue.reserve(high, "m", print, lambda: 1 / 0)
    assert not [of for of in queue.read().entries if of.job == "job-m"]


# ------------------------------------------------------------------------ for real

__all__ = ["cluster", "nodes"]

# Campaigns on three nodes of one CPU: name → priority, workers, steps.
CAMPAIGNS = {"a": (0, 3, 1000), "b": (5, 2, 60), "c": (0, 1, 60), "d": (10, 3, 60), "e": (5, 1, 60), "f": (0, 3, 60)}
# In which order they have their places, by hand. `a` runs, and makes way for `b`; `c` would fit beside `b`, and `a` is
# older. `a` again, and makes way for `d`, before `e` and `f` come. Then `e`, the highest; `a`, the oldest; `c`; `f`.
PLACED = ["a", "b", "a", "d", "e", "a", "c", "f"]


class Command:
    """`python -m jobs.pretrain` in its own process, beside the cluster or on plain processes."""

    def __init__(self, recipe: Path, folder: Path, name: str, *words: str) -> None:
        priority, workers, steps = CAMPAIGNS[name]
        self.run = folder / name
        self.log = folder / f"{name}.log"
        sizes = [f"cluster.workers={workers}", f"cluster.priority={priority}", f"pretrain.steps={steps}"]
        # A batch that one, two and three workers can share.
        sizes += [
            "pretrain.batch_size=24",
            "finetune.batch_size=24",
            "finetune.micro_batch=4",
            "pretrain.log_every=1",
            "pretrain.save_every=100000",
        ]
        command = [sys.executable, "-m", "jobs.pretrain", str(recipe), f"run={self.run}", *sizes, *words]
        with self.log.open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def stage(self) -> Path:
        (folder,) = self.run.glob("pretrain-*")
        return folder

    def step(self) -> int:
        """The last step that was reported."""
        lines = [line for folder in self.run.glob("pretrain-*") for line in read_metrics(folder)]
        return lines[-1]["step"] if lines else 0

    def until(self, claim: Callable[[], bool], timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not claim():
            assert time.monotonic() < deadline, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.2)

    def outcome(self) -> tuple[str, str]:
        """The ledger and the sha256 of the weights, of a command that has ended well."""
        assert self.process.wait(600) == 0, self.said
        done = json.loads((self.stage / "done.json").read_text())
        return done["ledger"], done["files"]["weights.safetensors"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_six_campaigns_of_three_priorities_run_in_order_and_end_like_undisturbed_ones(nodes, recipe, tmp_path) -> None:
    started: dict[str, Command] = {}

    def start(name: str) -> Command:
        started[name] = Command(recipe, tmp_path, name, "cluster.backend=ray")
        return started[name]

    try:
        a = start("a")
        a.until(lambda: a.step() >= 20)
        b = start("b")
        a.until(lambda: "makes way: " in a.said)
        c = start("c")
        c.until(lambda: "in the queue, behind " in c.said)
        stopped_at = a.step()
        a.until(lambda: a.step() >= stopped_at + 20)
        d = start("d")
        a.until(lambda: a.said.count("makes way: ") == 2)
        e = start("e")
        e.until(lambda: "waiting for the cluster: " in e.said)
        f = start("f")
        outcomes = {name: command.outcome() for name, command in started.items()}
    finally:
        for command in started.values():
            command.process.kill()
            command.process.wait()

    claims = []
    for name, command in started.items():
        for path in (command.run / "attempts").glob("*.json"):
            claims.append((json.loads(path.read_text())["time"], name))
    assert [name for _, name in sorted(claims)] == PLACED
    for command in (a, b, c, d, e, f):
        assert not (command.stage / "incidents.txt").exists(), command.said
        steps = [line["step"] for line in read_metrics(command.stage)]
        assert steps == list(range(1, len(steps) + 1)), "every step once"
    assert (
        "makes way: " + str(b.run) + " (priority 5) waits for these places; waits in the queue, to go on from" in a.said
    )
    assert "resumed from step " in a.said
    # The same campaigns alone, without Ray and without a queue.
    folder = tmp_path / "alone"
    folder.mkdir()
    for name in CAMPAIGNS:
        alone = Command(recipe, folder, name, "cluster.backend=processes")
        assert alone.outcome() == outcomes[name], name
