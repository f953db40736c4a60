"""The agent with a fake fork server: how it interprets answers, how long it waits, and which processes it ends."""

import json
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from jobs.cluster import agent
from jobs.cluster.agent import Agent, StartRequest, WorkerState
from jobs.cluster.fork_server import Forked, Listen, Listening, WorkerEnded
from jobs.cluster.worker import RankInfo, worker_file
from tests.support.families import wait_until

pytestmark = pytest.mark.quick


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Agent, Any]]:
    """An agent, and the other end of its connection to a fork server."""
    ours, theirs = Pipe()
    server = SimpleNamespace(connection=ours, close=lambda: None, is_stopped=lambda: False)
    monkeypatch.setattr(agent, "MEMORY", tmp_path)
    monkeypatch.setattr(agent, "VMSTAT", tmp_path / "vmstat")
    monkeypatch.setattr(agent, "ForkServer", lambda folder, has_gpus: server)
    under_test = Agent()
    yield under_test, theirs
    theirs.close()
    under_test.close()


def order_of(folder: Path, *ranks: int, **fields: Any) -> StartRequest:
    infos = [RankInfo(rank, 4, rank, 4, 0, "127.0.0.1", 1, 0) for rank in ranks]
    return StartRequest(infos, b"", folder, {"GIVEN": "to all"}, **fields)


def hear(under_test: Agent, server: Any, answer: object) -> None:
    """Send an answer, and wait until the agent has processed it."""
    news = under_test.news
    server.send(answer)
    wait_until(lambda: under_test.news > news, 10)


ENDS = [
    # exit code, the worker's record, OOM kills before and after → cause of death
    (0, None, (3, 3), "exited with code 0 without reporting an error"),
    (1, {"started": 1.0}, (3, 4), "exited with code 1 without reporting an error"),
    (-9, {"started": 1.0}, (3, 3), "killed by SIGKILL"),
    (-9, {"started": 1.0}, (3, 4), "killed by the out-of-memory killer"),
    (-11, None, (3, 4), "killed by SIGSEGV"),
    (-35, None, (3, 3), "killed by signal 35"),  # a real-time signal
    (0, {"started": 1.0, "ended": 2.0}, (3, 3), ""),
    (-9, {"started": 1.0, "ended": 2.0}, (3, 4), ""),
]


@pytest.mark.parametrize(("exit_code", "record", "kills", "death"), ENDS)
def test_cause_of_death_follows_from_record_exit_code_and_kernel_counter(
    exit_code, record, kills, death, served, tmp_path
) -> None:
    under_test, server = served
    (tmp_path / "vmstat").write_text(f"pgfault 9\noom_kill {kills[0]}\n")
    under_test.oom_kills = agent.OomKills()
    under_test.start(order_of(tmp_path, 2, 3))
    assert [server.recv().info.rank for _ in range(2)] == [2, 3]
    hear(under_test, server, Forked(2, 4_100_002))
    hear(under_test, server, Forked(3, 4_100_003))
    if record is not None:
        worker_file(under_test.node_folder, 3, ".json").write_text(json.dumps(record))
    (tmp_path / "vmstat").write_text(f"pgfault 9\noom_kill {kills[1]}\n")
    hear(under_test, server, WorkerEnded(4_100_003, exit_code))
    other, ended = under_test.poll(0, 5.0, {}).workers
    assert (ended.death, ended.record, ended.has_ended) == (death, record, True)
    assert (other.death, other.has_ended) == ("", False)
    # When the fork server dies, all other workers count as dead.
    server.close()
    wait_until(lambda: under_test.server is None, 10)
    other, ended = under_test.poll(0, 5.0, {}).workers
    assert ended.death == death
    assert other.death == "its node's fork server died (killed, or crashed)"


def test_result_recorded_before_the_death_of_the_fork_server_counts(served, tmp_path) -> None:
    under_test, server = served
    under_test.start(order_of(tmp_path, 0))
    hear(under_test, server, Forked(0, 4_100_000))
    record = {"ended": 2.0, "value": 40}
    worker_file(under_test.node_folder, 0, ".json").write_text(json.dumps(record))
    server.close()
    wait_until(lambda: under_test.server is None, 10)
    assert under_test.poll(0, 0.0, {}).workers == [WorkerState(0, 4_100_000, record)]


def test_oom_kill_between_two_attempts_is_not_the_cause_of_a_later_death(served, tmp_path) -> None:
    under_test, server = served
    (tmp_path / "vmstat").write_text("oom_kill 3\n")
    under_test.oom_kills.counts = deque([(time.monotonic() - 1000, 3)])
    # Ten minutes later, but before the next attempt, the kernel kills another program.
    (tmp_path / "vmstat").write_text("oom_kill 4\n")
    under_test.start(order_of(tmp_path, 0))
    hear(under_test, server, Forked(0, 4_100_000))
    hear(under_test, server, WorkerEnded(4_100_000, -9))
    assert under_test.poll(0, 0.0, {}).workers[0].death == "killed by SIGKILL"


def test_start_request_contains_all_that_a_worker_needs(served, tmp_path) -> None:
    under_test, server = served
    shared = tmp_path / "attempt"
    shared.mkdir()
    assert under_test.start(order_of(shared, 0, 1)) is False
    first, second = server.recv(), server.recv()
    assert (first.info.rank, second.info.rank, first.is_shared) == (0, 1, True)
    assert first.environment == {**os.environ, "GIVEN": "to all"}
    assert first.directory == os.getcwd()
    assert first.folder == shared
    assert first.node_folder == under_test.node_folder != under_test.base
    assert first.node_folder.is_dir()
    assert first.umask == agent.current_umask()
    for rank in (0, 1):
        hear(under_test, server, Forked(rank, 4_100_000 + rank))
        hear(under_test, server, WorkerEnded(4_100_000 + rank, 0))
    # The next attempt has a new node folder. With a token, the attempt's folder is not the driver's.
    earlier = under_test.node_folder
    assert under_test.start(order_of(tmp_path / "stage" / "attempts" / "a", 1, token="other")) is True
    assert server.recv().is_shared is False
    assert under_test.node_folder != earlier
    assert not earlier.exists()
    hear(under_test, server, Forked(1, 4_100_001))
    hear(under_test, server, WorkerEnded(4_100_001, 0))


def test_store_uses_the_port_of_the_fork_server(served) -> None:
    under_test, server = served
    orders: list[Listen] = []

    def answer(*ports: int) -> None:
        """Answer a request with ports, or die if there are none."""
        orders.append(server.recv())
        for port in ports:
            server.send(Listening(port))
        if not ports:
            server.close()

    threading.Thread(target=answer, args=(34530,), daemon=True).start()
    assert under_test.listen() == 34530
    assert orders == [Listen("127.0.0.1")]
    dying = threading.Thread(target=answer, daemon=True)
    dying.start()
    with pytest.raises(RuntimeError, match=r"the fork server of .* has died"):
        under_test.listen()
    # A connection that two threads close at once closes its descriptor twice.
    dying.join(60)


def test_address_of_another_machine_is_reported_as_the_cause() -> None:
    under_test = Agent("203.0.113.7", has_gpus=True)  # with a real fork server
    try:
        with pytest.raises(RuntimeError, match=r"cannot listen at 203\.0\.113\.7: Cannot assign requested address"):
            under_test.listen()
    finally:
        under_test.close()


@pytest.mark.parametrize("behind", [0, 1, -1])
def test_poll_returns_at_once_with_news_and_otherwise_after_its_wait(behind, served, monkeypatch) -> None:
    under_test, _ = served
    under_test.news = 5
    waited: list[float] = []
    clock = [100.2]

    def wait(seconds: float) -> None:
        waited.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(under_test.changed, "wait", wait)
    monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    under_test.poll(5 - behind, 2.5, {})
    # In intervals of a second, because the kernel's counter is read in between.
    assert waited == pytest.approx([1.0, 1.0, 0.5] if behind == 0 else [])


def test_ending_an_attempt_does_not_wait_for_ended_workers(served, tmp_path, monkeypatch) -> None:
    under_test, server = served
    under_test.start(order_of(tmp_path, 0, 1))
    for rank in (0, 1):
        hear(under_test, server, Forked(rank, 4_100_000 + rank))
        hear(under_test, server, WorkerEnded(4_100_000 + rank, 0))
    folder = under_test.node_folder
    waits: list[float] = []
    monkeypatch.setattr(under_test.changed, "wait", waits.append)
    under_test.end()
    assert waits == []
    assert under_test.workers == {}
    assert not folder.exists()


def test_ending_an_attempt_kills_living_workers_and_waits_for_the_fork_server(served, tmp_path) -> None:
    under_test, server = served
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    under_test.start(order_of(tmp_path, 0))
    hear(under_test, server, Forked(0, sleeper.pid))
    state = under_test.poll(0, 0.0, {}).workers[0]
    assert (state.pid, state.is_stopped, state.has_ended) == (sleeper.pid, False, False)
    psutil.Process(sleeper.pid).suspend()
    wait_until(lambda: under_test.poll(0, 0.0, {}).workers[0].is_stopped, 10)
    threading.Timer(0.1, server.send, [WorkerEnded(sleeper.pid, -9)]).start()
    under_test.end()
    assert sleeper.wait(60) == -9


def test_worker_forked_after_the_end_of_its_attempt_is_killed(served, tmp_path, monkeypatch) -> None:
    """A fork server that imports for longer than END_S forks the workers of an attempt that has already ended."""
    under_test, server = served
    monkeypatch.setattr(agent, "END_S", 0.1)
    under_test.start(order_of(tmp_path, 0, 1))
    hear(under_test, server, Forked(0, 4_100_000))
    hear(under_test, server, WorkerEnded(4_100_000, 0))
    under_test.end()
    under_test.start(order_of(tmp_path, 2))
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as late:
        hear(under_test, server, Forked(1, late.pid))
        assert late.wait(10) == -9
    hear(under_test, server, WorkerEnded(late.pid, -9))
    hear(under_test, server, Forked(2, 4_100_002))
    assert under_test.poll(0, 0.0, {}).workers == [WorkerState(2, 4_100_002)]


def test_another_process_with_the_pid_of_an_ended_worker_survives(served, tmp_path) -> None:
    """The kernel reuses pids: after a worker has ended, its pid can belong to a process of somebody else."""
    under_test, server = served
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        for way in (b"end of an attempt\n", b"death of the fork server\n"):
            under_test.start(order_of(tmp_path, 0))
            hear(under_test, server, Forked(0, other.pid))
            hear(under_test, server, WorkerEnded(other.pid, 0))
            if way == b"end of an attempt\n":
                under_test.end()
            else:
                server.close()
                wait_until(lambda: under_test.server is None, 10)
            other.stdin.write(way)
            other.stdin.flush()
            assert other.stdout.readline() == way


def test_stop_returns_whether_any_worker_has_started(served, tmp_path) -> None:
    under_test, server = served
    assert under_test.stop() is False
    assert not (under_test.base / agent.STOP_FILE).exists()
    under_test.start(order_of(tmp_path, 0, 1))
    for rank in (0, 1):
        hear(under_test, server, Forked(rank, 4_100_000 + rank))
    assert under_test.stop() is False
    assert (under_test.node_folder / agent.STOP_FILE).exists()
    worker_file(under_test.node_folder, 1, ".json").write_text('{"started": 1.0}')
    worker_file(under_test.node_folder, 0, ".sigterm").touch()
    assert under_test.stop() is True
    assert under_test.poll(0, 0.0, {}).sigterm_ranks == [0]
    # The report is a copy, which does not change at the attempt's end.
    reported = under_test.poll(0, 0.0, {}).workers[1]
    under_test.workers[1] = WorkerState(1, death="gone")
    assert reported.death == ""
    for rank in (0, 1):
        hear(under_test, server, WorkerEnded(4_100_000 + rank, 0))


def test_oom_kill_is_remembered_however_often_the_driver_polls(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(agent, "VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("oom_kill 4\n")
    kills = agent.OomKills()
    assert not kills.are_recent()
    (tmp_path / "vmstat").write_text("oom_kill 5\n")
    # A dying worker wakes the driver before it has an exit code.
    assert all(kills.are_recent() for _ in range(1000))
    monkeypatch.setattr(agent, "OOM_WINDOW_S", 0.0)
    kills.are_recent()
    assert not kills.are_recent(), "kills before the window are forgotten"


def test_umask_is_read_without_setting_it_if_proc_is_available(tmp_path, monkeypatch) -> None:
    previous = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(agent, "STATUS", tmp_path / "absent")
            assert agent.current_umask() == agent.current_umask() == 0o027
        with monkeypatch.context() as patched:
            patched.setattr(agent.os, "umask", None)  # a concurrent thread would read the temporary value
            assert agent.current_umask() == 0o027
    finally:
        os.umask(previous)


def plant_link_to_file(folder: Path, victim: Path) -> None:
    folder.mkdir()
    (folder / "lock").symlink_to(victim / "lock")


def plant_link_to_folder(folder: Path, victim: Path) -> None:
    folder.symlink_to(victim)


def plant_pipe(folder: Path, victim: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "lock")


def plant_folder(folder: Path, victim: Path) -> None:
    (folder / "lock").mkdir(parents=True)


def plant_file(folder: Path, victim: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize("attack", [plant_link_to_file, plant_link_to_folder, plant_pipe, plant_folder, plant_file])
def test_planted_agent_folder_neither_damages_a_file_nor_blocks_the_start(attack, tmp_path, monkeypatch) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "lock").write_text("precious")
    shared = tmp_path / "shm"
    shared.mkdir()
    attack(shared / "pl-agent-attack", victim)
    monkeypatch.setattr(agent, "MEMORY", shared)
    Agent().close()
    assert (victim / "lock").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("attack", [plant_link_to_file, plant_link_to_folder, plant_pipe, plant_folder, plant_file])
def test_another_local_user_can_neither_damage_a_file_nor_block_the_start(attack, tmp_path, monkeypatch) -> None:
    """A process of another user plants it in a folder that everybody may write to, like /dev/shm."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "lock").write_text("precious")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o111)
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            attack(shared / "pl-agent-attack", victim)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    monkeypatch.setattr(agent, "MEMORY", shared)
    Agent().close()
    assert (victim / "lock").read_text() == "precious"
    assert os.path.lexists(shared / "pl-agent-attack"), "what belongs to another user stays"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_agent_folder_of_another_user_stays(tmp_path, monkeypatch) -> None:
    other = tmp_path / "pl-agent-other"
    other.mkdir()
    (other / "lock").write_text("theirs")
    os.chown(other, 65534, 65534)
    monkeypatch.setattr(agent, "MEMORY", tmp_path)
    Agent().close()
    assert (other / "lock").read_text() == "theirs"


def test_folder_of_a_killed_agent_is_removed(tmp_path, monkeypatch) -> None:
    killed = tmp_path / "pl-agent-killed"
    killed.mkdir()
    (killed / "lock").write_text("")
    monkeypatch.setattr(agent, "MEMORY", tmp_path)
    Agent().close()
    assert not killed.exists()
