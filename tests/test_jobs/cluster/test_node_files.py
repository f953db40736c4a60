"""Files of workers on nodes without shared storage reach the driver: with plain folders, and on hosts with Ray.

In the quick tests, two folders on one machine represent a node and the driver; the last test has real hosts
(tests/support/hosts.py), on which nothing below /tmp is shared.
"""

import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from data.errors import DataError
from jobs.cluster import node_files
from jobs.cluster.node_files import Change, NodeFiles, apply_changes, mark_driver_folder
from tests.support import hosts
from tests.support.hostile_names import HOSTILE_NAMES
from tests.support.ray_hosts import RayHosts
from tests.support.worker_records import records

ATTEMPT = Path("attempts") / "attempt-000002"


class Pair:
    """A node and the driver, each with a separate folder of the stage."""

    def __init__(self, folder: Path) -> None:
        self.node = folder / "node" / "stage"
        self.driver = folder / "driver" / "stage"
        (self.driver / ATTEMPT).mkdir(parents=True)
        self.files = NodeFiles(self.node / ATTEMPT)
        self.acknowledged: dict[str, node_files.Mark] = {}

    def begin(self, told: dict[str, bytes | None] | None = None) -> bool:
        mark_driver_folder(self.driver / ATTEMPT, "a")
        return self.files.begin("a", told or {}, ["attempt-000001", "attempt-000002"])

    def look(self) -> list[str]:
        """Exchange one report; return the names of the sent files."""
        self.files.acknowledge(self.acknowledged)
        changes = self.files.changes()
        self.acknowledged = apply_changes(self.driver, changes)
        return [change.name for change in changes]

    def same(self, name: str | Path) -> bool:
        return (self.node / name).read_bytes() == (self.driver / name).read_bytes()


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files count as settled at once."""
    monkeypatch.setattr(node_files, "SETTLED_NS", -1)


def test_records_and_logs_of_a_node_are_copied_to_the_driver(pair, at_once) -> None:
    assert pair.begin()
    assert sorted(path.name for path in (pair.node / "attempts").iterdir()) == ["attempt-000001", "attempt-000002"]
    start = {"rank": 1, "node": "n1", "pid": 7, "started": 1.0, "oom_kills": 0}
    (pair.node / ATTEMPT / "rank-00001.json").write_text(json.dumps(start))
    (pair.node / ATTEMPT / "rank-00001.log").write_bytes(b"\x00\xff torn \xc3")
    pair.look()
    assert records(pair.driver / ATTEMPT, 2) == {1: start}
    assert pair.same(ATTEMPT / "rank-00001.log")
    # Only changed files are sent again.
    (pair.node / ATTEMPT / "rank-00001.json").write_text(json.dumps({**start, "ended": 2.0}))
    assert pair.look() == [str(ATTEMPT / "rank-00001.json")]
    assert records(pair.driver / ATTEMPT, 2)[1]["ended"] == 2.0
    assert pair.look() == []


def test_file_changed_within_a_clock_tick_is_sent_again(pair) -> None:
    pair.begin()
    path = pair.node / ATTEMPT / "rank-00001.json"
    path.write_text("forward")
    state = path.stat()
    pair.look()
    path.write_text("reduced")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    pair.look()
    assert pair.same(ATTEMPT / "rank-00001.json")


def test_log_contains_each_line_of_all_nodes_and_the_driver_once(pair, tmp_path) -> None:
    other = NodeFiles(tmp_path / "other" / "stage" / ATTEMPT)
    pair.begin()
    other.begin("a", {}, [])
    rng = random.Random(3)
    written: list[str] = []
    acknowledged: dict[str, node_files.Mark] = {}
    for number in range(300):
        stage = rng.choice([pair.node, pair.driver, other.stage])
        line = f"{number} é {'x' * rng.randrange(100)}"
        with (stage / "log.txt").open("ab") as file:
            # The last line of a node is sometimes incomplete; the driver writes each line in one call.
            half = 0 if stage == pair.driver else rng.randrange(len(line.encode()) + 1)
            file.write(line.encode()[:half])
            file.flush()
            if rng.random() < 0.5:
                pair.look()
            if rng.random() < 0.5:
                other.acknowledge(acknowledged)
                acknowledged = apply_changes(pair.driver, other.changes())
            file.write(line.encode()[half:] + b"\n")
        written.append(line)
    pair.look()
    other.acknowledge(acknowledged)
    apply_changes(pair.driver, other.changes())
    assert sorted((pair.driver / "log.txt").read_text().splitlines()) == sorted(written)


def test_lost_response_is_sent_again_and_a_restarted_driver_gets_the_rest(pair) -> None:
    pair.begin()
    metrics = pair.node / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    pair.files.changes()  # lost
    assert pair.look() == ["metrics.jsonl"]
    pair.files.acknowledge(pair.acknowledged)
    with metrics.open("a") as file:
        file.write('{"step": 2}\n')
    # The driver was killed before the next poll. The new driver polls a new actor, in another attempt.
    pair.files = NodeFiles(pair.node / ATTEMPT)
    pair.acknowledged = {}
    pair.begin()
    with metrics.open("a") as file:
        file.write('{"step": 3}\n')
    pair.look()
    pair.look()
    assert pair.same("metrics.jsonl")


def test_files_older_than_a_nodes_first_worker_are_not_sent(pair) -> None:
    """These files were written by an earlier driver on that node."""
    pair.node.mkdir(parents=True)
    (pair.node / "log.txt").write_text("old\n")
    pair.begin()
    with (pair.node / "log.txt").open("a") as file:
        file.write("new\n")
    pair.look()
    assert (pair.driver / "log.txt").read_text() == "new\n"
    # The driver moves to this node: its record of sent files is no longer valid.
    mark_driver_folder(pair.node / ATTEMPT, "b")
    assert not (pair.node / node_files.SENT).exists()


def test_tensorboard_files_are_appended_and_long_files_are_truncated(pair, monkeypatch) -> None:
    monkeypatch.setattr(node_files, "LARGEST_BYTES", 100)
    pair.begin()
    events = pair.node / "tensorboard" / "events.1"
    events.parent.mkdir()
    content = random.Random(1).randbytes(250)
    events.write_bytes(content)
    (pair.node / ATTEMPT / "rank-00000.log").write_bytes(content)
    (pair.node / "log.txt").write_text("y" * 120 + "\nlast\n")
    for _ in range(4):
        pair.look()
    assert (pair.driver / "tensorboard" / "events.1").read_bytes() == content
    assert (pair.driver / ATTEMPT / "rank-00000.log").read_bytes() == content[-100:], "it has the stacks"
    assert pair.same("log.txt")


def test_node_receives_the_files_carried_from_the_previous_attempt(pair) -> None:
    pair.begin({"excluded-steps.json": b"[[3, 4]]", "gone.json": None})
    assert (pair.node / "excluded-steps.json").read_bytes() == b"[[3, 4]]"
    (pair.node / "excluded-steps.json").write_bytes(b"[[3, 5]]")
    pair.look()
    assert pair.same("excluded-steps.json")
    # A second agent in the same attempt does not restore the files of its beginning.
    pair.files = NodeFiles(pair.node / ATTEMPT)
    pair.begin({"excluded-steps.json": b"[[3, 4]]"})
    assert (pair.node / "excluded-steps.json").read_bytes() == b"[[3, 5]]"


def test_node_with_shared_storage_copies_nothing(pair) -> None:
    pair.files = NodeFiles(pair.driver / ATTEMPT)
    assert not pair.begin({"excluded-steps.json": None})


def test_changes_are_sent_again_after_the_drivers_disk_was_full(pair, monkeypatch) -> None:
    pair.begin()
    (pair.node / "log.txt").write_text("a\n")
    (pair.node / ATTEMPT / "rank-00000.json").write_text("{}")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(node_files, "_replace", full)
        patch.setattr(node_files, "append_whole", lambda path, content: False)
        assert pair.look() == ["attempts/attempt-000002/rank-00000.json", "log.txt"]
        assert pair.acknowledged == {}
    pair.look()
    assert pair.same("log.txt")
    assert pair.same(ATTEMPT / "rank-00000.json")


# ------------------------------------------------------------------------ on hosts, under Ray

DRIVER = """
import json, sys, time
from pathlib import Path
from jobs.cluster.nodes import nodes_of
from jobs.cluster.ray import disconnect
from tests.support.worker_records import records
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.worker_group import WorkerGroup, do_nothing
from jobs.cluster_config import ClusterConfig
from tests.support import worker_functions

stage, act = Path(sys.argv[1]), sys.argv[2]
attempts = stage / "attempts"
attempt = attempts / "attempt-000001"
attempt.mkdir(parents=True)
said = {}

def look():
    places = group.phases()
    if act != "kill" and len(places) == 2 and min(place.step for place in places.values()) >= 3:
        group.request_stop()
        said.setdefault("stop", time.time())
    if len(places) == 2 and "places" not in said:
        said["places"] = group.node_names
        print(json.dumps(said["places"]), flush=True)

config = ClusterConfig(workers=2, start_timeout_s=120)
nodes = nodes_of(config)
if act == "finish":
    nodes.avoid([nodes.own_node])
nodes.reserve(str(stage), [2], print, do_nothing)
group = WorkerGroup(nodes, config, attempt, is_shared=False)
try:
    task = {"folder": str(attempt), "act": act, "rank": 1}
    said["value"] = group.run(worker_functions.work_apart, task, look)
except WorkerGroupError as error:
    said["error"] = str(error)
said["seen"] = sorted(path.name for path in attempt.iterdir() if path.is_file())
said["records"] = {rank: "ended" in record for rank, record in records(attempt, 2).items()}
said["log"] = sorted((stage / "log.txt").read_text().splitlines())
disconnect()
print(json.dumps(said), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(hosts.missing() != "", reason=hosts.missing())
def test_driver_and_workers_communicate_on_hosts_without_shared_storage(tmp_path) -> None:
    """A stop arrives, a worker's error is reported, and a dead host is named. Two of three hosts have a worker."""
    with RayHosts(tmp_path, ["h0", "h1", "h2"]) as cluster:

        def start(act: str) -> tuple[Path, subprocess.Popen[bytes]]:
            log = tmp_path / f"{act}.log"
            with log.open("w") as output:
                words = ["python", "-c", DRIVER, f"/tmp/{act}", act]
                return log, cluster.head.start(words, output, RAY_ADDRESS=cluster.address, OMP_NUM_THREADS="1")

        def places_of(log: Path, process: subprocess.Popen[bytes]) -> dict[str, str]:
            deadline = time.monotonic() + 200
            while '"1"' not in log.read_text():
                assert time.monotonic() < deadline, log.read_text()
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            return json.loads(next(line for line in log.read_text().splitlines() if line.startswith('{"')))

        for act in ("finish", "raise", "kill"):
            log, process = start(act)
            nodes = places_of(log, process)
            assert len(set(nodes.values())) == 2, "the workers are on two hosts"
            # At least one worker does not share the driver's folder.
            victim = next(rank for rank, node in nodes.items() if node != "h0")
            killed = time.monotonic()
            if act == "kill":
                cluster.network[nodes[victim]].kill()
            assert process.wait(200) == 0, log.read_text()
            said = json.loads(log.read_text().splitlines()[-1])
            print(f"{act}: {nodes}, {time.monotonic() - killed:.1f} s; {said}")
            assert {"rank-00000.json", "rank-00001.json", "rank-00001.log"} <= set(said["seen"])
            assert {line.partition(" at ")[0] for line in said["log"]} == {"worker 0", "worker 1"}
            assert len(said["log"]) == len(set(said["log"]))
            if act == "finish":
                assert "h0" not in nodes.values(), "rank 0 finds the stop file in its node's own folder"
                assert said.get("value") == "worker 0 stopped", said
                assert said["records"] == {"0": True, "1": True}
            if act == "raise":
                assert said["error"] == f"worker 1 on {nodes['1']}: ZeroDivisionError: the third batch was empty"
            if act == "kill":
                assert said["error"].startswith(f"worker {victim} on {nodes[victim]}: its node ")


@pytest.mark.quick
@pytest.mark.parametrize("is_appended", [False, True])
@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_node_cannot_write_outside_the_stage_on_the_driver(name, is_appended, tmp_path) -> None:
    stage = tmp_path / "run" / "stage"
    stage.mkdir(parents=True)
    with pytest.raises(DataError, match=r"^a node.s agent: unsafe name"):
        apply_changes(stage, [Change(name, b"attack", is_appended, (6, 0))])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
