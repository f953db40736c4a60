"""One function on N workers: the same contract as plain processes and under an embedded Ray."""

import dataclasses
import http.client
import importlib
import json
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from data.errors import ClusterError, Preempted
from data.files import import_path
from jobs.cluster import embedded
from jobs.cluster.agent import NodeAgent
from jobs.cluster.elastic import Growth
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.nodes import nodes_of
from jobs.cluster.ray import connect, disconnect
from jobs.cluster.supervisor import Attempt
from jobs.cluster.worker_group import AgentLink, WorkerGroup, do_nothing, run_worker_group
from jobs.cluster_config import ClusterConfig, WorkerRange
from jobs.run.session import run_campaign, warn_of_unused_gpus
from pipeline.monitoring.watchdog import Watch
from pipeline.process_group import device_name
from tests.support import campaigns, worker_functions
from tests.support.contexts import pretrain_context
from tests.support.families import answers, family_of, maps_of, wait_until
from tests.test_jobs.cluster.test_failure import left

if TYPE_CHECKING:
    from jobs.cluster.ray import ClusterInfo

ROOT = Path(__file__).parents[3]
BACKENDS = ["processes", "ray"]
# What Ray itself starts on every node: two agents, and workers that wait for an actor.
OF_EVERY_NODE = {"DashboardAgent", "RuntimeEnvAgent", "IDLE"}
# Processes of Ray's head that this has no use for.
NOT_NEEDED_OF_HEAD = {"monitor.py", "log_monitor.py"}
FAILURES = [
    # backend, act, cause, exit code
    ("processes", "die", "killed by SIGKILL", None),
    ("processes", "crash", "killed by SIGSEGV", None),
    ("processes", "raise", "ZeroDivisionError: the third batch was empty", None),
    ("processes", "stop", "WantsToStop: shard 7 is short", 65),
    ("processes", "exit", "SystemExit: 75", 75),
    ("ray", "die", "killed by SIGKILL", None),
    pytest.param("ray", "stop", "WantsToStop: shard 7 is short", 65, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def two() -> Iterator[dict[str, ClusterConfig]]:
    """A worker group of two for each backend; one Ray for the whole module."""
    yield {backend: ClusterConfig(workers=2, backend=backend) for backend in BACKENDS}
    disconnect()


@pytest.fixture
def full(two) -> Iterator["ClusterInfo"]:
    """The embedded cluster, whose CPUs are all taken."""
    import ray

    info = connect(two["ray"])
    nodes_of(two["ray"]).release()  # what an earlier test has left reserved for its next attempt
    group = ray.util.placement_group([{"CPU": info.cpus}])
    assert group.wait(30)
    yield info
    ray.util.remove_placement_group(group)


def alive(folder: Path) -> list[int]:
    pids = [json.loads(path.read_text())["pid"] for path in folder.glob("rank-*.json")]
    assert pids, f"no worker has ever started in {folder}"
    alive = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
    return alive


def run(
    function: Callable[[dict[str, Any]], object],
    task: dict[str, Any],
    cluster: ClusterConfig,
    directory: Path,
    on_tick: Callable[[], None] = do_nothing,
    name: str = "attempt",
) -> Any:
    """Rank 0's value of a worker group whose folder is `name` in the directory."""
    return run_worker_group(function, task, cluster=cluster, name=name, directory=directory, on_tick=on_tick)


def listening_addresses(process: psutil.Process) -> set[str]:
    """The addresses at which a process takes connections; the IPv6 spelling of an IPv4 address is the same one."""
    connections = process.net_connections("inet")
    listening = [connection for connection in connections if connection.status == psutil.CONN_LISTEN]
    return {connection.laddr.ip.removeprefix("::ffff:") for connection in listening}


def ray_processes() -> list[psutil.Process]:
    """The processes of the embedded cluster that live as long as it does."""
    family = []
    for process in family_of():
        with suppress(psutil.NoSuchProcess):  # short-lived ones of Ray's agents
            if process.name().split(":")[0] in ("ray", "raylet", "gcs_server"):
                family.append(process)
    return family


def cluster_directories(family: list[psutil.Process]) -> set[Path]:
    """The temporary directories of the raylets among the processes, from their command lines."""
    words = answers(family, lambda process: process.cmdline() if process.name() == "raylet" else [])
    return {Path(word.partition("=")[2]) for word in words if word.startswith("--temp_dir=")}


def note_workers_of_ray(has_torch: dict[str, bool]) -> None:
    """Note the classes of the actors of the embedded cluster, and whether one of each has had torch in its memory.

    A worker that waits for an actor has the name IDLE.
    """
    for process in ray_processes():
        with suppress(psutil.Error):  # gone meanwhile
            words = process.cmdline()
            if words and words[0].startswith("ray::"):
                # "ray::RayAgent", and "ray::digits agent 1 4f1a:RayAgent.poll" while it works.
                name = words[0].strip().removeprefix("ray::").rpartition(":")[2].partition(".")[0]
                has_torch[name] = has_torch.get(name, False) or "libtorch" in str(maps_of(process))


def shared_memory(family: list[psutil.Process]) -> set[Path]:
    """The files under /dev/shm that the processes have mapped."""
    return {path for path in answers(family, maps_of) if path.is_relative_to("/dev/shm")}


# ------------------------------------------------------------------------ one attempt


@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_find_their_ranks_and_each_other(backend, two, tmp_path) -> None:
    ticks = []
    has_torch: dict[str, bool] = {}

    def look() -> None:
        ticks.append(time.monotonic())
        note_workers_of_ray(has_torch)

    cluster = dataclasses.replace(two[backend], environment={"GIVEN": "to every worker"})
    value = run(worker_functions.add_ranks, {"x": 3}, cluster, tmp_path, look)
    assert value["sum"] == 1.0 and value["given"] == 3
    assert [value[name] for name in worker_functions.NAMES[:5]] == ["0", "2", "0", "2", "0"]
    assert value["threads"] == 1 and value["cwd"] == os.getcwd()
    assert value["GIVEN"] == "to every worker" and "GIVEN" not in os.environ
    # Ray's worker computes in a thread; what its malloc was told at the start is not for the processes that it starts.
    assert value["malloc"] == "" and value["GLIBC_TUNABLES"] == os.environ.get("GLIBC_TUNABLES")
    # The fork server of these tests may have started elsewhere.
    assert value["frees_at_once"] or backend == "processes"
    assert value["MASTER_ADDR"].startswith("127.")  # nothing of an embedded worker group leaves this machine
    assert ticks and not alive(tmp_path / "attempt")
    # Of actors there is the agent alone, and its fork server has torch: no process of Ray's needs it.
    assert not any(has_torch.values()), has_torch
    assert has_torch.keys() - OF_EVERY_NODE == ({"RayAgent"} if backend == "ray" else set())
    if backend == "ray":
        scripts = {Path(word).name for word in answers(family_of(), lambda process: process.cmdline()[:3])}
        assert "dashboard.py" in scripts and not scripts & NOT_NEEDED_OF_HEAD


@pytest.mark.parametrize(("backend", "act", "cause", "exit_code"), FAILURES)
def test_the_worker_to_blame_is_named_and_its_peers_die(backend, act, cause, exit_code, two, tmp_path) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        run(worker_functions.wait_for_peers, {"rank": 1, "act": act}, two[backend], tmp_path)
    error = caught.value
    assert (error.rank, error.exit_code, error.cause) == (1, exit_code, cause)
    assert str(error) == f"worker 1 on {os.uname().nodename}: {cause}"
    assert act == "die" or "in misbehave" in error.traceback
    assert not alive(tmp_path / "attempt")


def test_a_value_that_is_not_json_is_the_workers_error(two, tmp_path) -> None:
    with pytest.raises(WorkerGroupError, match="not JSON serializable"):
        run(worker_functions.return_a_path, {}, two["processes"], tmp_path)


def test_a_name_is_used_once(two, tmp_path) -> None:
    (tmp_path / "attempt").mkdir()
    with pytest.raises(FileExistsError):
        run(worker_functions.add_ranks, {"x": 0}, two["processes"], tmp_path)


def test_a_lost_node_and_a_lost_agent_are_told_apart(two, monkeypatch) -> None:
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError

    nodes: Any = nodes_of(two["ray"])
    raylet = socket.create_server(("127.0.0.1", 0))
    port = raylet.getsockname()[1]
    row = {"NodeID": "n", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    with monkeypatch.context() as patched:
        patched.setattr(ray, "nodes", lambda: [row])
        node = NodeAgent("n1", "n", "127.0.0.1", 1, lambda *arguments: Future())
        # A node that has come back under its old name is another one.
        before = dataclasses.replace(node, node_id="before")
        unavailable = ActorUnavailableError("for a moment", None)
        evicted = OutOfMemoryError("8 worker(s) were killed\nConsidered workers: …")
        asked = [(node, None), (node, unavailable), (node, ActorDiedError()), (node, evicted), (before, None)]
        assert nodes.losses_of(asked) == [
            "",
            "",
            "its node's agent died (killed, or crashed), and its workers with it",
            "its node's agent was killed by Ray's out-of-memory killer: 8 worker(s) were killed",
            "its node left the cluster",
        ]
        raylet.close()
        assert nodes.losses_of([(node, None)]) == ["its node does not answer"]
        assert {"before", "n"} <= nodes.avoided.keys() and nodes.reservation is None
        # Sixteen silent ones cost one question to Ray, and the wait for one.
        rows = [row | {"NodeID": str(number)} for number in range(16)]
        questions: list[float] = []
        patched.setattr(ray, "nodes", lambda: questions.append(time.monotonic()) or rows)
        patched.setattr("jobs.cluster.ray_nodes.takes_connections", lambda _: time.sleep(0.2))
        silent = [(dataclasses.replace(node, node_id=str(number)), None) for number in range(16)]
        assert set(nodes.losses_of(silent)) == {"its node does not answer"} and len(questions) == 1
        assert time.monotonic() - questions[0] < 16 * 0.2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_that_a_signal_has_stopped_is_seen_and_named(backend, two, tmp_path) -> None:
    """By its agent, wherever the driver is."""
    nodes = nodes_of(two[backend])
    nodes.reserve("test", [2], print, do_nothing)
    folder = tmp_path / "run" / "stage-1" / "attempts" / "attempt-000001"
    folder.mkdir(parents=True)
    group = WorkerGroup(nodes, two[backend], folder)
    watch = Watch(2, stall_s=2.0, start_s=60.0)

    def look() -> None:
        if (tmp_path / "ready1").exists() and not group.is_frozen(1):
            os.kill(group.states[1].pid, signal.SIGSTOP)
        stuck = watch.find_stall(group.places(), group.is_frozen)
        if stuck is not None:
            raise group.evidence().silent_failure(stuck.rank, stuck.cause)

    task = {"folder": str(folder), "ready": str(tmp_path / "ready")}
    with pytest.raises(WorkerGroupError, match=r"worker 1 on .*: frozen: stopped by a signal, \d+s without a sign"):
        group.run(worker_functions.step_for_ever, task, look)
    assert not alive(folder)


@pytest.mark.parametrize(
    ("backend", "victim", "cause"),
    [
        ("processes", "jobs.cluster.fork_server", "fork server died"),
        ("ray", "jobs.cluster.fork_server", "fork server died"),
        ("ray", "RayAgent", r"its node's agent died \(killed, or crashed\)"),
    ],
)
def test_a_killed_fork_server_or_agent_takes_its_workers_along_and_the_next_attempt_has_another(
    backend, victim, cause, two, tmp_path
) -> None:
    killed: list[int] = []

    def kill() -> None:
        for process in family_of():
            with suppress(psutil.Error):
                is_victim = victim in " ".join(process.cmdline()) and process.children() != []
                if (tmp_path / "ready").exists() and is_victim and not killed:
                    killed.append(process.pid)
                    process.kill()

    task = {"ready": str(tmp_path / "ready"), "stop": str(tmp_path / "stop")}
    sleep = worker_functions.sleep_until_told
    with pytest.raises(WorkerGroupError, match=cause):
        run(sleep, task, two[backend], tmp_path, kill)
    wait_until(lambda: not alive(tmp_path / "attempt"), 10 if victim == "RayAgent" else 0)
    (tmp_path / "stop").touch()
    assert run(sleep, task, two[backend], tmp_path, name="next") == "stopped"


# ------------------------------------------------------------------------ what is too small or absent


@dataclasses.dataclass
class Restart:
    """What was seen when an embedded cluster that was too small made room for a larger one."""

    cpus_before: float
    cpus: float
    before: Any  # what this process had in the one, with places for two workers, and has in the other
    after: Any
    sigterms: list[int]  # that our handler has heard meanwhile


LARGE = (os.cpu_count() or 1) + 8


@pytest.fixture(scope="module")
def restart(two) -> Restart:
    """Start a larger cluster, which counts the GPUs that torch sees, of which it has none.

    A SIGTERM comes while it starts, which takes seconds, in which Ray's own handler would end this process with code
    15. Another one comes afterwards.
    """
    cpus_before = connect(two["ray"]).cpus
    before: Any = nodes_of(two["ray"])
    before.reserve("test", [2], print, do_nothing)
    first = list(embedded._started)
    sigterms: list[int] = []

    def send_sigterm() -> None:
        # Not while the first cluster is left: then Ray's handler is there.
        wait_until(lambda: embedded._started not in ([], first), 60)
        os.kill(os.getpid(), signal.SIGTERM)

    handler_before = signal.signal(signal.SIGTERM, lambda number, frame: sigterms.append(number))
    try:
        threading.Thread(target=send_sigterm).start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            cpus = connect(ClusterConfig(workers=LARGE, gpus_per_worker=1)).cpus
        sigterms.append(0)  # the start is over
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, handler_before)
    return Restart(cpus_before, cpus, before, nodes_of(two["ray"]), sigterms)


def test_an_embedded_cluster_counts_enough_cpus_for_a_larger_worker_group(restart) -> None:
    assert restart.cpus_before == max(os.cpu_count() or 1, 2)
    assert restart.cpus == LARGE


def test_places_of_an_embedded_cluster_that_has_ended_are_not_taken_for_places_of_the_next(restart) -> None:
    """Each cluster gives its first driver the same id."""
    assert restart.after is not restart.before
    assert restart.after.workers_held == 0
    assert restart.after.reserve("test", [2], print, do_nothing) == 2


def test_sigterm_during_and_after_the_start_of_a_cluster_is_heard_by_our_handler(restart) -> None:
    assert restart.sigterms == [signal.SIGTERM, 0, signal.SIGTERM]


def test_without_a_gpu_the_refusal_says_what_to_type(restart) -> None:
    with pytest.raises(ClusterError) as raised:
        nodes_of(ClusterConfig(gpus_per_worker=1)).warm_up()
    assert str(raised.value).splitlines() == [
        "room for 0 of 1 workers of 1 CPUs and 1 GPUs",
        "neither Ray nor torch sees a GPU here",
        "type cluster.gpus_per_worker=0 to compute on the CPU; or type fewer cluster.workers, or RAY_ADDRESS=host:port "
        "of more machines",
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_gpu_is_said_with_what_to_type(backend, restart, tmp_path) -> None:
    cluster = ClusterConfig(workers=2, gpus_per_worker=32, backend=backend)
    with pytest.raises(
        ClusterError,
        match=r"(room for 0 of 2 workers of 1 CPUs and 32 GPUs|want 64 GPUs)[\s\S]*\ntype .*cluster.workers",
    ):
        run(worker_functions.add_ranks, {"x": 0}, cluster, tmp_path)


def test_a_wait_says_what_for_and_ends(two, full, monkeypatch) -> None:
    monkeypatch.setattr("jobs.cluster.ray_places.FIRST_LINE_S", 1.5)
    said: list[str] = []
    cluster = dataclasses.replace(two["ray"], wait_s=2)
    with pytest.raises(ClusterError, match=r"^room for 0 of 2 workers of 1 CPUs\nwaited 2 s\ntype"):
        nodes_of(cluster).reserve("/runs/a", [2], said.append, do_nothing)
    assert said == ["waiting for the cluster: room for 0 of 2 workers of 1 CPUs"]


def test_a_stop_is_heard_soon_while_the_cluster_is_full(two, full) -> None:
    asked_at: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked_at.append(time.monotonic())

    def end_if_asked() -> None:
        if asked_at:
            raise Preempted("stopped")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.3)
        with pytest.raises(Preempted):
            nodes_of(two["ray"]).reserve("/runs/a", [2], lambda line: None, end_if_asked)
        assert time.monotonic() - asked_at[0] < 5.0, "unheard, it would wait for ever"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_command_that_waits_for_a_full_cluster_ends_with_75_at_a_signal(full, recipe, tmp_path) -> None:
    command = [sys.executable, "-m", "jobs", "run", str(recipe), "cluster.backend=ray"]
    # As on macOS: otherwise Ray replaces 127.0.0.1 of this address by an outside one, where nothing listens.
    environment = os.environ | {"RAY_ADDRESS": full.address, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with (tmp_path / "said").open("w") as said:
        driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
    try:
        wait_until(lambda: "waiting for the cluster: room for 0 of 2 workers" in (tmp_path / "said").read_text(), 60)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(20) == 75  # cluster.wait_s is for ever
    finally:
        driver.kill()
    assert "stopped before the workers had started, at the start: nothing" in (tmp_path / "said").read_text()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 75


def test_a_signal_to_the_whole_process_group_commits_and_ends_with_75(recipe, tmp_path) -> None:
    """As `timeout`, Slurm and a terminal send it: first while the fork server starts, then amid the steps."""
    command = [sys.executable, "-m", "jobs", "run", str(recipe), "pretrain.steps=5000", "pretrain.log_every=1"]
    command += ["--only", "pretrain"]
    run = tmp_path / "run"

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "said").open("w") as said:
            return subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True)

    driver = start()
    try:
        wait_until(lambda: has_fork_server(driver.pid) and catches_sigterm(driver.pid), 60)
        os.killpg(driver.pid, signal.SIGTERM)
        assert driver.wait(60) == 75, (tmp_path / "said").read_text()
        # The first one may have come as far as a few steps by the time it heard.
        steps_before = steps_of(run)
        driver = start()
        wait_until(lambda: steps_of(run) > steps_before + 5, 60)
        os.killpg(driver.pid, signal.SIGINT)
        assert driver.wait(60) == 75
    finally:
        driver.kill()
    text = (tmp_path / "said").read_text()
    # Steps are saved every 8; the stop itself saves the step that it comes in.
    (stopped,) = re.findall(r"^stopped at step (\d+) after committing it", text, re.MULTILINE)
    assert list(run.glob(f"pretrain-*/checkpoints/step-{int(stopped):010d}")), text
    # Plain processes talk over the loopback, and rank 0 alone says so, once an attempt.
    assert len(re.findall(r"^\[pretrain\] network: gloo over lo$", text, re.MULTILINE)) == 1
    # Nobody was killed, at the first signal or at the second, and a stop is no incident.
    assert not list(run.glob("pretrain-*/incidents.txt"))


def steps_of(run: Path) -> int:
    """How many lines with a step the metrics of a run have."""
    return sum(path.read_text().count('"step": ') for path in run.glob("*/metrics.jsonl"))


def has_fork_server(pid: int) -> bool:
    """Whether a process has started a fork server."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            if "jobs.cluster.fork_server" in child.cmdline():
                return True
    return False


def catches_sigterm(pid: int) -> bool:
    """Whether a process has a handler of its own: before that a signal ends it, as it ends any program."""
    mask = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return mask is not None and int(mask[1], 16) >> (signal.SIGTERM - 1) & 1 == 1


def test_a_stop_before_any_worker_has_started_ends_the_attempt(two, tmp_path) -> None:
    context = pretrain_context(tmp_path, two["processes"], stop_requested=lambda: True)
    no_nodes: Any = None
    group = WorkerGroup(no_nodes, two["processes"], tmp_path)
    asked: list[str] = []
    has_started = False

    def call(method: str, *arguments: object) -> "Future[bool]":
        asked.append(method)
        answer: Future[bool] = Future()
        answer.set_result(has_started)
        return answer

    group.links.append(AgentLink(NodeAgent("n", "", "127.0.0.1", 2, call), []))
    growth = Growth([], 60.0, lambda: 0, lambda: -1)
    attempt = Attempt(context, 1, group, Watch(2, stall_s=60), growth, can_commit=True)
    with pytest.raises(Preempted, match="stopped before the workers had started, at the start: nothing was committed"):
        attempt.look()
    assert asked == ["stop"], "the last report may be older than a worker's start"
    has_started = True
    attempt.look()
    assert asked == ["stop", "stop"], "a worker that has started is asked to commit"
    has_started = False
    left(group, 1)
    attempt.look()
    assert asked[2:] == [], "it is asked again after a while only"
    with pytest.raises(Preempted, match="stopped in pretrain; run the same command again to do it from its start"):
        dataclasses.replace(attempt, can_commit=False).look()


# ------------------------------------------------------------------------ which devices


@pytest.mark.parametrize(
    ("gpus", "cluster", "said"),
    [
        (0, {}, []),
        (8, {"gpus_per_worker": 1, "workers": 8}, []),
        (8, {"gpus_per_worker": 2, "workers": 3}, ["unused GPUs: 2 of the 8 of this machine; type cluster.workers=4"]),
        (
            8,
            {"gpus_per_worker": 2, "workers": WorkerRange(least=1, most=3)},
            ["unused GPUs: 2 of the 8 of this machine; type cluster.workers.most=4"],
        ),
        (8, {"gpus_per_worker": 3, "workers": 2}, ["unused GPUs: 2 of the 8 of this machine; too few for one more"]),
        (1, {"workers": 4}, ["unused GPUs: 1 of the 1 of this machine: the workers compute on the CPU; type"]),
    ],
)
def test_unused_gpus_are_counted_on_both_backends(gpus, cluster, said, two, restart, monkeypatch) -> None:
    import ray

    connect(two["ray"])
    resources = ray.cluster_resources() | {"GPU": float(gpus)}
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for backend in BACKENDS:
        lines: list[str] = []
        warn_of_unused_gpus(ClusterConfig(backend=backend, **cluster), lines.append)
        assert [line.startswith(start) for line, start in zip(lines, said, strict=True)] == [True] * len(said)


# ------------------------------------------------------------------------ nobody else gets in


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_listens_beyond_the_loopback_while_workers_work(backend, two, tmp_path) -> None:
    ready = [tmp_path / f"ready{rank}" for rank in range(2)]
    addresses: set[str] = set()
    directories: set[Path] = set()

    def look() -> None:
        if not all(path.exists() for path in ready):
            return
        family = [psutil.Process(), *family_of()]
        for process in family:
            with suppress(psutil.NoSuchProcess):  # short-lived ones of Ray's agents
                addresses.update(listening_addresses(process))
                directories.update(cluster_directories([process]))
        (tmp_path / "stop").touch()

    task = {"ready": str(tmp_path / "ready"), "stop": str(tmp_path / "stop")}
    run(worker_functions.meet_and_wait, task, two[backend], tmp_path, look)
    # docs/design/cluster.md, "Who listens", names no other address.
    assert addresses == {"127.0.0.1"}
    # Ray opens its own directory to everybody; the one around it lets nobody through.
    assert len(directories) == 1 or backend == "processes"
    assert all(directory.parent.stat().st_mode & 0o777 == 0o700 for directory in directories)


# What answers without a token: pages and health checks without our content, and docs/design/cluster.md's metrics.
OPEN_PATHS = {"/", "/favicon.ico", "/api/authentication_mode", "/api/gcs_healthz", "/api/healthz"}
OPEN_PATHS.add("/api/local_raylet_healthz")
OPEN_CALLS = {"/grpc.health.v1.Health/Check"}
ROUTE = re.compile(r"""routes\.(get|post|put|delete|patch|view)\(\s*["'](/[^"']*)["']""")


def listening_ports() -> dict[int, str]:
    """Every port on which a process of the embedded cluster takes connections, and the process's name."""
    ports = {}
    for process in family_of():
        with suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    ports[connection.laddr.port] = process.name()
    return ports


def http_routes() -> set[tuple[str, str]]:
    """(method, path) of every endpoint that Ray's dashboard and agents have, from their sources."""
    import ray

    routes = {("GET", "/metrics")}
    for path in (Path(ray.__file__).parent / "dashboard").rglob("*.py"):
        for method, route in ROUTE.findall(path.read_text()):
            routes.add((method.upper().replace("VIEW", "GET"), re.sub(r"\{[^}]*\}", "x", route)))
    return routes


def grpc_methods() -> list[str]:
    """Every method of every service that Ray's processes have, from its compiled descriptions."""
    import ray.core.generated as generated

    # Ray's Python has no description of the object manager; these names stand in the raylet.
    methods = ["/ray.rpc.ObjectManagerService/Push", "/ray.rpc.ObjectManagerService/Pull"]
    for module in pkgutil.iter_modules(generated.__path__):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(f"ray.core.generated.{module.name}").DESCRIPTOR
            for service in descriptor.services_by_name.values():
                methods += [f"/{service.full_name}/{method.name}" for method in service.methods]
    return methods


def http_answer(port: int, method: str, path: str) -> tuple[int, str] | None:
    """Status and content of the answer to a request without a token; None of a port that does not speak HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (http.client.HTTPException, OSError):
        return None
    finally:
        connection.close()


def grpc_statuses(port: int, methods: list[str]) -> dict[str, str]:
    """The answer to an empty call of each method without a token; empty of a port that does not speak gRPC."""
    import grpc

    statuses = {}
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(5)
        except grpc.FutureTimeoutError:
            return {}
        calls = {method: channel.unary_unary(method).future(b"", timeout=20) for method in methods}
        for method, call in calls.items():
            statuses[method] = "OK" if call.exception() is None else call.code().name
    return statuses


@pytest.mark.slow
def test_every_endpoint_of_an_embedded_cluster_asks_for_a_token(two) -> None:
    """Without one: all routes of its sources on every HTTP port, all methods of its services on every gRPC port."""
    import ray

    connect(two["ray"])
    holder = ray.remote(num_cpus=0)(worker_functions.Holder).remote()
    ray.get(holder.ready.remote())
    routes = http_routes()
    methods = [*grpc_methods(), *OPEN_CALLS]
    assert len(routes) > 50 and len(methods) > 100, "Ray keeps them elsewhere now"
    assert {("POST", "/api/jobs/"), ("GET", "/api/version"), ("GET", "/nodes")} <= routes
    assert "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo" in methods
    answers = Counter[str]()
    told: dict[str, set[str]] = {}  # process → the endpoints that told something
    for port, name in listening_ports().items():
        anywhere = http_answer(port, "GET", "/nowhere")
        # A metrics port has one page under every path. Ray has no token for it; it listens on 127.0.0.1.
        if anywhere is not None and anywhere[0] == 200:
            for line in anywhere[1].splitlines():
                assert re.match(r"# |\w+({.*})? [-+.\w]+$", line), f"{name} tells more than numbers: {line}"
            answers[f"metrics of {name}"] += 1
        elif anywhere is not None:
            for method, path in routes:
                answer = http_answer(port, method, path)
                assert answer is not None
                answers[f"http {answer[0]}"] += 1
                # 404 tells nothing: a path of the agent, asked of the dashboard, is open there.
                if answer[0] not in (401, 404):
                    told.setdefault(name, set()).add(path)
        else:
            statuses = grpc_statuses(port, methods)
            assert not statuses or "UNAUTHENTICATED" in statuses.values(), f"none of the methods of {name} is known"
            for method, status in statuses.items():
                answers[f"grpc {status}"] += 1
                if status not in ("UNAUTHENTICATED", "UNIMPLEMENTED"):
                    told.setdefault(name, set()).add(method)
    ray.kill(holder)
    print(answers, told)
    assert answers["http 401"] > 50 and answers["grpc UNAUTHENTICATED"] > 100
    for name, endpoints in told.items():
        assert endpoints <= OPEN_PATHS | OPEN_CALLS, name


# ------------------------------------------------------------------------ nothing is left behind


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_on_tick_raises_ends_the_worker_group_and_leaving_ends_an_embedded_cluster(backend, two, tmp_path) -> None:
    if backend == "ray":
        info = connect(two["ray"])
        assert info.embedded and info.dashboard.startswith("http://127.0.0.1:") and info.nodes == 1

    def give_up_on_a_hang() -> None:
        if len(list((tmp_path / "attempt").glob("rank-*.json"))) == 2:
            raise TimeoutError("rank 1 hangs")

    with pytest.raises(TimeoutError):
        run(worker_functions.wait_for_peers, {"rank": 1, "act": "hang"}, two[backend], tmp_path, give_up_on_a_hang)
    assert not alive(tmp_path / "attempt")
    if backend == "ray":
        family = ray_processes()
        directories = cluster_directories(family)
        assert len(directories) == 1
        disconnect()
        assert not psutil.wait_procs(family, timeout=5)[1]
        assert not any(directory.exists() for directory in directories)


DRIVER = """
    import sys
    from pathlib import Path
    from jobs.cluster_config import ClusterConfig
    from jobs.cluster.nodes import start_early
    from jobs.cluster.worker_group import run_worker_group
    from tests.support import worker_functions

    if __name__ == "__main__":
        backend, folder, function = sys.argv[1], Path(sys.argv[2]), getattr(worker_functions, sys.argv[3])
        cluster = ClusterConfig(workers=2, backend=backend)
        mine = (folder / "mine").open("w")
        start_early(cluster)
        task = {"ready": str(folder / "ready"), "stop": str(folder / "stop")}
        print(run_worker_group(function, task, cluster=cluster, name="a", directory=folder))
"""


def start_driver(backend: str, folder: Path, function: str) -> subprocess.Popen[str]:
    """A driver of two workers, which started early what they need."""
    script = folder / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    command = [sys.executable, str(script), backend, str(folder), function]
    environment = os.environ | {"PYTHONPATH": import_path()}
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_forked_worker_has_the_compiler_and_keeps_freed_memory(tmp_path) -> None:
    out, _ = start_driver("processes", tmp_path, "has_compiler").communicate()
    assert out.splitlines()[-1] == "True ['', True]", "malloc keeps freed memory in a thread too"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_driver_leaves_no_process(backend, tmp_path) -> None:
    driver = start_driver(backend, tmp_path, "sleep_until_told")
    try:
        # Two workers and what carries them: the first one is ready before the second is there.
        everybody = lambda: (tmp_path / "ready").exists() and len(family_of(driver.pid)) >= 3  # noqa: E731
        wait_until(lambda: everybody() or driver.poll() is not None, 120)
        family = family_of(driver.pid)
        directories = cluster_directories(family)
        assert len(family) >= 3
        # The fork server has what the driver has imported, and none of its files: a lock among them would outlive it.
        assert has_fork_server(driver.pid) == (backend == "processes")
        open_files = answers(family, lambda process: [file.path for file in process.open_files()])
        assert str(tmp_path / "mine") not in open_files
        assert len(directories) == (backend == "ray")
        shared = shared_memory(family)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert not psutil.wait_procs(family, timeout=20)[1]
    wait_until(lambda: not any(path.exists() for path in directories | shared), 20)


# A campaign of this process leaves the embedded cluster when it ends: it comes after the tests that share that.
def test_a_machine_whose_gpus_nobody_uses_says_so_once_and_the_start_line_names_the_device(
    recipe, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    loaded = campaigns.load(recipe, ["pretrain.steps=2", "pretrain.optim.schedule.warmup_steps=1"])
    run_campaign(loaded, only="pretrain")
    out = capsys.readouterr().out
    line = "unused GPUs: 8 of the 8 of this machine: the workers compute on the CPU; type cluster.gpus_per_worker=1"
    assert out.count(line) == out.count("unused") == 1
    assert "; 2 workers on cpu × micro_batch 4 × accumulation 2 = batch 16, 2 steps" in out
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H100 80GB HBM3 {device.index}")
    assert device_name(torch.device("cuda", 3)) == "NVIDIA H100 80GB HBM3 3"
