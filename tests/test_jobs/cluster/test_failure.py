"""How a worker group interprets its agents' reports: who failed first, which node is lost or about to leave.

No process is started: workers are represented by their records, and agents give the answers of the test.
"""

import dataclasses
import os
import threading
import time
import tracemalloc
from collections.abc import Sequence, Set
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from data.errors import ClusterError
from jobs.cluster import failure, worker, worker_group
from jobs.cluster.agent import NodeAgent, NodeReport, WorkerState
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.worker_group import AgentLink, WorkerGroup
from jobs.cluster_config import ClusterConfig
from tests.support import worker_functions

pytestmark = pytest.mark.quick


def group_of(folder: Path, world: int, **losses: str) -> WorkerGroup:
    """Return a worker group with started workers on separate nodes n0, n1, …, some of which are lost."""
    no_nodes: Any = None  # not used here
    group = WorkerGroup(no_nodes, ClusterConfig(workers=world), folder)
    for rank in range(world):
        info = worker.RankInfo(rank, world, 0, 1, rank, f"10.0.0.{rank}", 1, 0, node_id=f"id{rank}")
        node = NodeAgent(f"n{rank}", f"id{rank}", f"10.0.0.{rank}", 1, lambda *arguments: Future())
        group.links.append(AgentLink(node, [info], loss=losses.get(f"n{rank}", "")))
        group.node_names[rank] = f"n{rank}"
        group.addresses[rank] = f"10.0.0.{rank}"
        left(group, rank)
    return group


def left(group: WorkerGroup, rank: int, **end: Any) -> None:
    """Give a worker this record; `death` is its cause of death, if it has no record of its end."""
    death = end.pop("death", "")
    record: Any = {"rank": rank, "node": f"n{rank}", "pid": 1, "started": 0.0} | end
    group.states[rank] = WorkerState(rank, pid=1, record=record, death=death)


FAILURE = {"kind": "E", "error": "e", "traceback": "t"}
PEER_LOST = {
    "ended": 1.0,
    "exit_code": None,
    "kind": "RuntimeError",
    "error": "[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:34530: Connection reset",
    "traceback": "t",
}


def test_first_failure_is_blamed_unless_a_worker_died_or_requested_an_exit_code(tmp_path) -> None:
    group = group_of(tmp_path, 4)
    left(group, 0, ended=2.0, exit_code=None, **FAILURE)
    left(group, 1, ended=1.0, exit_code=None, **FAILURE)
    assert group.evidence().first_failure().rank == 1
    left(group, 3, ended=3.0, exit_code=65, **FAILURE)
    assert group.evidence().first_failure().rank == 3
    left(group, 2, death="killed")
    died = group.evidence().first_failure()
    assert (died.rank, died.node, died.cause, died.exit_code) == (2, "n2", "killed", None)


@pytest.mark.parametrize("kind", ["OSError", "RuntimeError", "DistNetworkError"])
def test_worker_out_of_open_files_is_blamed_before_the_peers_that_lost_it(tmp_path, kind) -> None:
    group = group_of(tmp_path, 3)
    left(group, 0, **PEER_LOST)
    error = "[third_party/gloo/gloo/transport/tcp/device.cc:84] socket: Too many open files"
    left(group, 2, **PEER_LOST | {"ended": 1.4, "kind": kind, "error": error})
    failure = group.evidence().first_failure()
    assert (failure.rank, failure.node) == (2, "n2")
    assert "Too many open files\n" in failure.cause
    assert "run ulimit -n 65536 on that node" in failure.cause


def test_failed_collective_names_the_lost_peer_without_the_librarys_message(tmp_path) -> None:
    group = group_of(tmp_path, 2)
    left(group, 0, **PEER_LOST)
    failure = group.evidence().first_failure()
    assert str(failure) == (
        "worker 0 on n0: a collective failed: worker 1 on n1 was lost or did not respond, "
        "but no worker is known to have died"
    )
    # It may have been chance, so a second time is not a repetition of the same exception.
    assert failure.kind == ""


def test_lost_node_is_blamed_unless_a_worker_has_requested_an_exit_code(tmp_path) -> None:
    group = group_of(tmp_path, 3, n1="its node does not respond")
    left(group, 0, **PEER_LOST)
    assert str(group.evidence().first_failure()) == "worker 1 on n1: its node does not respond"
    left(group, 1, **PEER_LOST)
    assert "a collective failed" in str(group.evidence().first_failure()), "a worker that recorded its end was not lost"
    # A drained node disappears as soon as its worker has committed and ended.
    left(group, 0, **PEER_LOST | {"exit_code": 75, "kind": "Preempted", "error": "stopped at step 9"})
    left(group, 1)
    assert group.evidence().first_failure().exit_code == 75


def test_workers_without_a_result_are_a_failure_unless_all_have_returned(tmp_path) -> None:
    group = group_of(tmp_path, 3)
    for rank in range(3):
        assert str(group.evidence().first_failure()) == "the worker group: its workers ended without reporting a result"
        left(group, rank, ended=1.0, value={})
    assert group.evidence().first_failure() is None


@pytest.mark.parametrize("characters", [0, 9_999, 10_000, 25_000])
def test_error_contains_the_end_of_a_dead_workers_log(characters, tmp_path) -> None:
    group = group_of(tmp_path, 2)
    text = "".join(str(number % 10) for number in range(characters))
    worker.worker_file(tmp_path, 1, ".log").write_text(text)
    assert group.evidence().silent_failure(1, "killed").traceback == text[max(0, characters - 10_000) :]
    assert group.evidence().silent_failure(0, "killed").traceback == ""


class SilentNodes:
    """Fake nodes, some of which do not answer; records which were probed, and how often."""

    def __init__(self, dead: set[str]) -> None:
        self.dead = dead
        self.asked: list[str] = []
        self.times = 0
        self.given_up: list[str] = []

    def give_up(self, agent: NodeAgent) -> None:
        self.given_up.append(agent.name)

    def losses_of(self, calls: Sequence[tuple[NodeAgent, BaseException | None]]) -> list[str]:
        self.times += 1
        names = [agent.name for agent, _ in calls]
        self.asked.extend(names)
        return ["its node does not respond" if name in self.dead else "" for name in names]


@pytest.mark.parametrize(
    ("peer_lost", "dead", "beats_asked_after", "lost_after"),
    [(False, {"n1"}, [6], 6), (True, {"n1"}, [1], 1), (False, set(), [6, 12, 18], None)],
)
def test_node_is_probed_after_missed_heartbeats_and_lost_if_it_does_not_answer(
    peer_lost, dead, beats_asked_after, lost_after, tmp_path, monkeypatch
) -> None:
    """A heartbeat is a second of the test's clock; n0 and n1 miss all of them, n2 none."""
    monkeypatch.setattr(worker_group, "TOGETHER_S", 0.0)
    group = group_of(tmp_path, 3)
    nodes = SilentNodes(dead)
    now = [100.25]
    group.nodes = nodes  # type: ignore[assignment]
    group.clock = lambda: now[0]
    heard: Future[Any] = Future()
    heard.set_result(NodeReport(1, []))
    group.links[2].agent = dataclasses.replace(group.links[2].agent, call=lambda *arguments: heard)
    if peer_lost:
        left(group, 2, **PEER_LOST)
    group.poll(0.0)
    asked_after = []
    for beats in range(1, 19):
        # First 99 % of the interval has passed, then all of it.
        for share in (0.99, 1.0):
            now[0] = 100.25 + beats - 1 + share
            before = len(nodes.asked)
            group.poll(0.0)
            if len(nodes.asked) > before:
                assert share == 1.0, "both together"
                assert nodes.asked[before:] == ["n0", "n1"], "both together"
                asked_after.append(beats)
        if group.evidence().losses:
            assert beats == lost_after
            break
    assert asked_after == beats_asked_after
    assert set(group.evidence().losses) == {int(name[1:]) for name in dead}
    assert nodes.times == len(beats_asked_after)


def test_agent_that_does_not_end_its_workers_is_reported_and_replaced(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(worker_group, "END_S", 0.3)
    record: Any = {"rank": 0, "started": 0.0, "ended": 1.0, "value": "done"}

    def report(number: int) -> NodeReport:
        return NodeReport(1, [WorkerState(number, pid=7, record=record)])

    answers = {"poll": report, "end": lambda number: ... if number else "its fork server was frozen"}
    nodes: Any = Agents(2, answers, set())
    group = WorkerGroup(nodes, ClusterConfig(workers=2), tmp_path)
    assert group.run(worker_functions.add_ranks, {}) == "done"
    assert group.remarks[0] == "n0: its fork server was frozen"
    assert group.remarks[1].startswith("n1: its agent did not end its workers within 0 s; ")
    assert nodes.replaced == ["id1"]


def group_with_clock(folder: Path, count: int) -> tuple[WorkerGroup, SilentNodes, list[float]]:
    """Return a worker group on nodes that accept connections, its nodes, and the time that its clock shows."""
    group = group_of(folder, count)
    nodes = SilentNodes(set())
    group.nodes = nodes  # type: ignore[assignment]
    now = [1000.0]
    group.clock = lambda: now[0]
    return group, nodes, now


@pytest.mark.parametrize(("is_up", "limit", "lost_after"), [(True, 6, 30), (True, 1, 30), (False, 6, None)])
def test_silent_agent_of_a_living_node_is_named_and_given_up_unless_it_is_starting(
    is_up, limit, lost_after, tmp_path
) -> None:
    group, nodes, now = group_with_clock(tmp_path, 2)
    link = group.links[1]
    link.is_up = is_up
    link.last_contact = now[0]
    lost = None
    for second in range(1, 90):
        now[0] += 1.0
        group.check_nodes([link], limit)
        if link.loss and lost is None:
            lost = second
    assert lost == lost_after
    assert nodes.given_up == (["n1"] if lost_after else [])
    if lost_after:
        assert "its node's agent has not responded for 30 s, but the node accepts connections" in link.loss
        assert set(group.evidence().losses) == {1}


def test_driver_that_was_itself_frozen_does_not_give_up_an_agent(tmp_path) -> None:
    group, nodes, now = group_with_clock(tmp_path, 1)
    link = group.links[0]
    link.is_up = True
    for _ in range(2):  # the poll before the pause, and the next one, which takes a while
        link.last_contact = now[0]
        now[0] += 3600.0
        group.check_nodes([link], 6)
    assert not link.loss
    assert not nodes.given_up


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_number_of_requests_per_round_grows_only_with_the_nodes(workers, tmp_path, monkeypatch) -> None:
    """One poll per agent and one query for all lost nodes, whether their agents are silent or raise."""
    monkeypatch.setattr(worker_group, "TOGETHER_S", 0.0)
    group = group_of(tmp_path, workers)
    nodes = SilentNodes({f"n{number}" for number in range(workers)})
    group.nodes = nodes  # type: ignore[assignment]
    polls: list[str] = []

    def poll(method: str, *arguments: Any) -> "Future[Any]":
        polls.append(method)
        answer: Future[Any] = Future()
        answer.set_exception(ConnectionError("reset by peer"))
        return answer

    for link in group.links:
        link.agent = dataclasses.replace(link.agent, call=poll)
    group.poll(0.0)
    assert polls == ["poll"] * workers
    assert nodes.times == 1
    assert len(group.evidence().losses) == workers
    group.poll(0.0)
    assert len(polls) == workers, "a lost node gets no more requests"
    assert nodes.times == 1, "a lost node gets no more requests"


class Agents:
    """Fake nodes n0, n1, … with one worker each, whose agents give the test's answers; some are draining."""

    own_node = "own"

    def __init__(self, world: int, answers: dict[str, Any], drained: set[str]) -> None:
        self.world = world
        self.answers = {"listen": 4711, "start": False, "end": "", "stop": True, "ping": ..., **answers}
        self.replaced: list[str] = []
        self.drained = drained
        self.asked: list[tuple[str, str]] = []

    def agents(self, world: int) -> list[NodeAgent]:
        nodes = []
        for number in range(self.world):

            def call(method: str, *arguments: Any, number: int = number) -> "Future[Any]":
                self.asked.append((f"n{number}", method))
                answer: Future[Any] = Future()
                value = self.answers[method]
                if callable(value):
                    value = value(number)
                if isinstance(value, Exception):
                    answer.set_exception(value)
                elif value is not ...:
                    answer.set_result(value)
                return answer

            nodes.append(NodeAgent(f"n{number}", f"id{number}", f"10.0.0.{number}", 1, call))
        return nodes

    def status(self) -> tuple[Set[str], Set[str]]:
        return self.drained, frozenset()

    def warm_up_spares(self, spare: Set[str]) -> None:
        pass

    def losses_of(self, calls: Sequence[tuple[NodeAgent, BaseException | None]]) -> list[str]:
        return [""] * len(calls)

    def avoid(self, node_ids: Sequence[str]) -> None:
        self.replaced.extend(node_ids)

    def give_up(self, agent: NodeAgent) -> None:
        self.replaced.append(agent.node_id)


@pytest.mark.parametrize(
    ("drained", "sigterm_ranks", "events"),
    [
        (set(), [], {}),
        ({"id1"}, [], {1: ("n1", "id1", "its node is being drained")}),
        ({"own"}, [], {None: (os.uname().nodename, "own", "its node is being drained")}),
        (
            {"id0", "own"},
            [],
            {
                0: ("n0", "id0", "its node is being drained"),
                None: (os.uname().nodename, "own", "its node is being drained"),
            },
        ),
        ({"elsewhere"}, [2], {2: ("n2", "id2", "worker 2 was sent SIGTERM")}),
    ],
)
def test_leaving_nodes_are_recorded_with_their_workers(drained, sigterm_ranks, events, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(worker_group, "STATUS_POLL_S", 0.01)
    began = time.monotonic()

    def report(number: int) -> NodeReport:
        record: Any = {"rank": number, "started": 0.0}
        if number != 0 or time.monotonic() > began + 0.2:
            record |= {"ended": 1.0, "value": f"of {number}"}
        told = [number] if number in sigterm_ranks else []
        return NodeReport(1, [WorkerState(number, pid=7, record=record)], told)

    nodes: Any = Agents(3, {"poll": report}, drained)
    group = WorkerGroup(nodes, ClusterConfig(workers=3), tmp_path)
    daemons: list[bool] = []

    def look() -> None:
        daemons.extend(thread.daemon for thread in threading.enumerate() if thread.name == "nodes")

    assert group.run(worker_functions.add_ranks, {}, look) == "of 0"
    noted = {rank: (event.node, event.node_id, event.why) for rank, event in group.drain_events.items()}
    assert noted == events
    # A head that never answers must not keep the driver from ending.
    assert daemons
    assert all(daemons)
    requests = [request for request in nodes.asked if request[1] != "ping"]
    assert requests[:4] == [("n0", "listen"), ("n0", "start"), ("n1", "start"), ("n2", "start")]
    assert nodes.asked[-3:] == [("n0", "end"), ("n1", "end"), ("n2", "end")]


@pytest.mark.parametrize(
    ("method", "answer", "error", "message"),
    [
        ("listen", ClusterError("no room"), ClusterError, "^no room$"),
        ("start", ClusterError("no room"), ClusterError, "^no room$"),
        ("start", ValueError("broken"), WorkerGroupError, "worker 0 on n0: its node's agent failed: broken"),
        (
            "listen",
            ...,
            WorkerGroupError,
            r"worker 0 on n0: its node's agent did not start within 1 s \(cluster\.",
        ),
    ],
)
def test_attempt_ends_if_an_agent_cannot_start_its_workers(method, answer, error, message, tmp_path) -> None:
    nodes: Any = Agents(2, {method: answer}, set())
    group = WorkerGroup(nodes, ClusterConfig(workers=2, start_timeout_s=0.6), tmp_path)
    with pytest.raises(error, match=message):
        group.run(worker_functions.add_ranks, {})
    assert nodes.asked[-2:] == [("n0", "end"), ("n1", "end")]
    assert nodes.replaced == ([] if error is ClusterError else ["id0"])


def test_only_the_end_of_a_dead_workers_log_is_read(tmp_path) -> None:
    """A library has filled the log with gigabytes; reading all of it could exhaust the driver's memory."""
    group = group_of(tmp_path, 2)
    log = worker.worker_file(tmp_path, 1, ".log")
    log.touch()
    os.truncate(log, 1 << 28)
    with log.open("a") as file:
        file.write("é" * 30_000)
    tracemalloc.start()
    error = group.evidence().silent_failure(1, "killed by SIGSEGV")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error.traceback == "é" * failure.STACK_CHARACTERS
    assert peak_bytes < 1 << 20
