"""One function on N workers, with the same behavior as plain processes and on an embedded Ray cluster."""

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
from jobs.cluster.nodes import nodes_of, warn_of_unused_gpus
from jobs.cluster.ray import connect, disconnect
from jobs.cluster.supervisor import Attempt
from jobs.cluster.worker_group import AgentLink, WorkerGroup, do_nothing, run_worker_group
from jobs.cluster_config import ClusterConfig, WorkerRange
from jobs.run.session import run_campaign
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
# Ray's own processes on every node: two agents, and idle workers.
OF_EVERY_NODE = {"DashboardAgent", "RuntimeEnvAgent", "IDLE"}
# Dispensable processes of Ray's head.
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
    """A config with two workers for each backend; all tests of this file share one Ray cluster."""
    yield {backend: ClusterConfig(workers=2, backend=backend) for backend in BACKENDS}
    disconnect()


@pytest.fixture
def full(two) -> Iterator["ClusterInfo"]:
    """The embedded cluster with all its CPUs in use."""
    import ray

    info = connect(two["ray"])
    nodes_of(two["ray"]).release()  # places that an earlier test has kept for its next attempt
    group = ray.util.placement_group([{"CPU": info.cpus}])
    assert group.wait(60)
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
    """Run a worker group in the folder `name` of the directory; return rank 0's value."""
    return run_worker_group(function, task, cluster=cluster, name=name, directory=directory, on_tick=on_tick)


def listening_addresses(process: psutil.Process) -> set[str]:
    """Return the addresses on which a process listens; IPv4 addresses in IPv6 notation are converted."""
    connections = process.net_connections("inet")
    listening = [connection for connection in connections if connection.status == psutil.CONN_LISTEN]
    return {connection.laddr.ip.removeprefix("::ffff:") for connection in listening}


def ray_processes() -> list[psutil.Process]:
    """Return the long-lived processes of the embedded cluster."""
    family = []
    for process in family_of():
        with suppress(psutil.NoSuchProcess):  # short-lived ones of Ray's agents
            if process.name().split(":")[0] in ("ray", "raylet", "gcs_server"):
                family.append(process)
    return family


def cluster_directories(family: list[psutil.Process]) -> set[Path]:
    """Return the temporary directories of the raylets among the processes, from their command lines."""
    words = answers(family, lambda process: process.cmdline() if process.name() == "raylet" else [])
    return {Path(word.partition("=")[2]) for word in words if word.startswith("--temp_dir=")}


def note_workers_of_ray(has_torch: dict[str, bool]) -> None:
    """Record the classes of the embedded cluster's actors, and whether an actor of the class has loaded torch.

    Idle workers are named IDLE.
    """
    for process in ray_processes():
        with suppress(psutil.Error):  # gone meanwhile
            words = process.cmdline()
            if words and words[0].startswith("ray::"):
                # "ray::RayAgent", and "ray::digits agent 1 4f1a:RayAgent.poll" while it works.
                name = words[0].strip().removeprefix("ray::").rpartition(":")[2].partition(".")[0]
                has_torch[name] = has_torch.get(name, False) or "libtorch" in str(maps_of(process))


def shared_memory(family: list[psutil.Process]) -> set[Path]:
    """Return the files under /dev/shm that the processes have mapped."""
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
    assert value["sum"] == 1.0
    assert value["given"] == 3
    assert [value[name] for name in worker_functions.NAMES[:5]] == ["0", "2", "0", "2", "0"]
    assert value["threads"] == 1
    assert value["cwd"] == os.getcwd()
    assert value["GIVEN"] == "to every worker"
    assert "GIVEN" not in os.environ
    # Ray's worker runs the function in a thread; its malloc settings must not reach the processes that it starts.
    assert value["malloc"] == ""
    assert value["GLIBC_TUNABLES"] == os.environ.get("GLIBC_TUNABLES")
    # The fork server of these tests may have started in another directory.
    assert value["frees_at_once"] or backend == "processes"
    assert value["MASTER_ADDR"].startswith("127.")  # an embedded worker group stays on this machine
    assert ticks
    assert not alive(tmp_path / "attempt")
    # The agent is the only actor, and its fork server imports torch: no process of Ray does.
    assert not any(has_torch.values()), has_torch
    assert has_torch.keys() - OF_EVERY_NODE == ({"RayAgent"} if backend == "ray" else set())
    if backend == "ray":
        scripts = {Path(word).name for word in answers(family_of(), lambda process: process.cmdline()[:3])}
        assert "dashboard.py" in scripts
        assert not scripts & NOT_NEEDED_OF_HEAD


@pytest.mark.parametrize(("backend", "act", "cause", "exit_code"), FAILURES)
def test_failed_worker_is_named_and_its_peers_are_killed(backend, act, cause, exit_code, two, tmp_path) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        run(worker_functions.wait_for_peers, {"rank": 1, "act": act}, two[backend], tmp_path)
    error = caught.value
    assert (error.rank, error.exit_code, error.cause) == (1, exit_code, cause)
    assert str(error) == f"worker 1 on {os.uname().nodename}: {cause}"
    assert act == "die" or "in misbehave" in error.traceback
    assert not alive(tmp_path / "attempt")


def test_value_that_is_not_json_is_the_workers_error(two, tmp_path) -> None:
    with pytest.raises(WorkerGroupError, match="not JSON serializable"):
        run(worker_functions.return_a_path, {}, two["processes"], tmp_path)


def test_worker_group_name_cannot_be_reused(two, tmp_path) -> None:
    (tmp_path / "attempt").mkdir()
    with pytest.raises(FileExistsError):
        run(worker_functions.add_ranks, {"x": 0}, two["processes"], tmp_path)


def test_lost_node_and_lost_agent_are_distinguished(two, monkeypatch) -> None:
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError

    nodes: Any = nodes_of(two["ray"])
    raylet = socket.create_server(("127.0.0.1", 0))
    port = raylet.getsockname()[1]
    row = {"NodeID": "n", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    with monkeypatch.context() as patched:
        patched.setattr(ray, "nodes", lambda: [row])
        node = NodeAgent("n1", "n", "127.0.0.1", 1, lambda *arguments: Future())
        # A node that returns under its old name counts as a new node.
        before = dataclasses.replace(node, node_id="before")
        unavailable = ActorUnavailableError("for a moment", None)
        evicted = OutOfMemoryError("8 worker(s) were killed\nConsidered workers: …")
        asked = [(node, None), (node, unavailable), (node, ActorDiedError()), (node, evicted), (before, None)]
        assert nodes.losses_of(asked) == [
            "",
            "",
            "its node's agent died (killed, or crashed), together with its workers",
            "its node's agent was killed by Ray's out-of-memory killer: 8 worker(s) were killed",
            "its node left the cluster",
        ]
        raylet.close()
        assert nodes.losses_of([(node, None)]) == ["its node does not respond"]
        assert {"before", "n"} <= nodes.avoided.keys()
        assert nodes.reservation is None
        # Sixteen silent nodes cost one request to Ray and a single timeout.
        rows = [row | {"NodeID": str(number)} for number in range(16)]
        questions: list[None] = []
        patched.setattr(ray, "nodes", lambda: questions.append(None) or rows)
        # Every time-out waits until all sixteen have begun; one after another, they would break the barrier.
        all_at_once = threading.Barrier(16, timeout=100)
        patched.setattr("jobs.cluster.ray_nodes.takes_connections", lambda _: all_at_once.wait() < 0)
        silent = [(dataclasses.replace(node, node_id=str(number)), None) for number in range(16)]
        assert set(nodes.losses_of(silent)) == {"its node does not respond"}
        assert len(questions) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_worker_stopped_by_a_signal_is_detected_and_named(backend, two, tmp_path) -> None:
    """The agent detects it, wherever the driver runs."""
    nodes = nodes_of(two[backend])
    nodes.reserve("test", [2], print, do_nothing)
    folder = tmp_path / "run" / "stage-1" / "attempts" / "attempt-000001"
    folder.mkdir(parents=True)
    group = WorkerGroup(nodes, two[backend], folder)
    watch = Watch(2, stall_s=2.0, start_s=60.0)

    def look() -> None:
        if (tmp_path / "ready1").exists() and not group.is_frozen(1):
            os.kill(group.states[1].pid, signal.SIGSTOP)
        stuck = watch.find_stall(group.phases(), group.is_frozen)
        if stuck is not None:
            raise group.evidence().silent_failure(stuck.rank, stuck.cause)

    task = {"folder": str(folder), "ready": str(tmp_path / "ready")}
    with pytest.raises(WorkerGroupError, match=r"worker 1 on .*: frozen: stopped by a signal, no progress for \d+s"):
        group.run(worker_functions.step_for_ever, task, look)
    assert not alive(folder)


@pytest.mark.parametrize(
    ("backend", "victim", "cause"),
    [
        ("processes", "jobs.cluster.fork_server", "fork server died"),
        pytest.param("ray", "jobs.cluster.fork_server", "fork server died", marks=pytest.mark.slow),
        ("ray", "RayAgent", r"its node's agent died \(killed, or crashed\)"),
    ],
)
def test_workers_die_with_their_fork_server_or_agent_and_the_next_attempt_has_a_new_one(
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


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("before the workers start", marks=pytest.mark.slow),
        "during the stage",
        pytest.param("at its end", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("backend", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_frozen_fork_server_is_named_and_replaced(backend, phase, two, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("jobs.cluster.agent.FROZEN_S", 2.0)  # of the agent in this process; Ray's waits 10 s
    ready = tmp_path / "ready"
    stop = tmp_path / "stop"
    sleep = worker_functions.sleep_until_told
    task = {"ready": str(ready), "stop": str(stop)}
    servers: list[psutil.Process] = []

    def note_server() -> None:
        if ready.exists() and not servers:
            (pid, _) = alive(tmp_path / "warm")
            servers.extend(filter(None, [psutil.Process(pid).parent()]))
            stop.touch()

    assert run(sleep, task, two[backend], tmp_path, note_server, name="warm") == "stopped"
    ready.unlink()
    stop.unlink()
    (server,) = servers
    if phase == "before the workers start":
        server.suspend()

    def freeze() -> None:
        if ready.exists():
            server.suspend()
            if phase == "at its end":
                stop.touch()

    began = time.monotonic()
    if phase == "at its end":
        # Workers report their results without the fork server.
        assert run(sleep, task, two[backend], tmp_path, freeze) == "stopped"
    else:
        cause = r"its node's (agent failed: .*)?fork server was frozen: stopped by a signal for \d+ s, then killed"
        with pytest.raises(WorkerGroupError, match=cause) as caught:
            run(sleep, task, two[backend], tmp_path, freeze)
        assert caught.value.node == os.uname().nodename
    assert time.monotonic() - began < 100, "the limit is 10 s; without it, the start of a stage waits for 300 s"
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    stop.touch()
    assert run(sleep, task, two[backend], tmp_path, name="next") == "stopped"


# ------------------------------------------------------------------------ a cluster too small or absent


@dataclasses.dataclass
class Restart:
    """Observations while a larger embedded cluster replaces one that is too small."""

    cpus_before: float
    cpus: float
    before: Any  # this process's nodes in the old cluster, with two places, and in the new one
    after: Any
    sigterms: list[int]  # received by our handler meanwhile


LARGE = (os.cpu_count() or 1) + 8


@pytest.fixture(scope="module")
def restart(two) -> Restart:
    """Start a larger cluster, which counts the GPUs that torch sees (none).

    A SIGTERM comes while it starts, which takes seconds, in which Ray's own handler would end this process with code
    15. Another one comes afterwards.
    """
    cpus_before = connect(two["ray"]).cpus
    before: Any = nodes_of(two["ray"])
    before.reserve("test", [2], print, do_nothing)
    first = list(embedded._started)
    sigterms: list[int] = []

    def send_sigterm() -> None:
        # Not while leaving the first cluster, because Ray's handler is installed then.
        wait_until(lambda: embedded._started not in ([], first), 60)
        os.kill(os.getpid(), signal.SIGTERM)

    handler_before = signal.signal(signal.SIGTERM, lambda number, frame: sigterms.append(number))
    try:
        threading.Thread(target=send_sigterm).start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            cpus = connect(ClusterConfig(workers=LARGE, gpus_per_worker=1)).cpus
        sigterms.append(0)  # the start has finished
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, handler_before)
    return Restart(cpus_before, cpus, before, nodes_of(two["ray"]), sigterms)


def test_embedded_cluster_is_replaced_for_a_larger_worker_group(restart) -> None:
    assert restart.cpus_before == max(os.cpu_count() or 1, 2)
    assert restart.cpus == LARGE


def test_places_of_an_ended_embedded_cluster_are_not_used_in_the_next(restart) -> None:
    """Each cluster gives its first driver the same id."""
    assert restart.after is not restart.before
    assert restart.after.workers_held == 0
    assert restart.after.reserve("test", [2], print, do_nothing) == 2


def test_sigterm_during_and_after_the_start_of_a_cluster_reaches_our_handler(restart) -> None:
    assert restart.sigterms == [signal.SIGTERM, 0, signal.SIGTERM]


def test_without_a_gpu_the_refusal_says_what_to_type(restart) -> None:
    with pytest.raises(ClusterError) as raised:
        nodes_of(ClusterConfig(gpus_per_worker=1)).warm_up()
    assert str(raised.value).splitlines() == [
        "there is room for only 0 of 1 workers, which need 1 CPUs and 1 GPUs each",
        "  neither Ray nor torch sees a GPU on this machine",
        "  to train on the CPU, set cluster.gpus_per_worker=0; or use a smaller cluster.workers, or set "
        "RAY_ADDRESS=HOST:PORT to use a larger cluster",
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_gpu_is_reported_with_advice(backend, restart, tmp_path) -> None:
    cluster = ClusterConfig(workers=2, gpus_per_worker=32, backend=backend)
    with pytest.raises(
        ClusterError,
        match=r"(of 2 workers, which need 1 CPUs and 32 GPUs each|expected at least 64 GPUs)[\s\S]*\n  .*"
        "(set cluster.gpus_per_worker=0|use a smaller cluster.workers)",
    ):
        run(worker_functions.add_ranks, {"x": 0}, cluster, tmp_path)


def test_wait_logs_its_reason_and_ends(two, full, monkeypatch) -> None:
    monkeypatch.setattr("jobs.cluster.ray_places.FIRST_LINE_S", 1.5)
    said: list[str] = []
    cluster = dataclasses.replace(two["ray"], wait_s=2)
    with pytest.raises(
        ClusterError, match=r"^room for 0 of 2 workers with 1 CPUs each\n  the slots did not become free within 2"
    ):
        nodes_of(cluster).reserve("/runs/a", [2], said.append, do_nothing)
    assert said == ["waiting for the cluster: room for 0 of 2 workers with 1 CPUs each"]


def test_stop_is_noticed_while_the_cluster_is_full(two, full) -> None:
    """Otherwise the wait would never end."""
    requested: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        requested.append(number)

    def end_if_requested() -> None:
        if requested:
            raise Preempted("stopped")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.3)
        with pytest.raises(Preempted):
            nodes_of(two["ray"]).reserve("/runs/a", [2], lambda line: None, end_if_requested)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_command_waiting_for_a_full_cluster_ends_with_75_after_a_signal(full, recipe, tmp_path) -> None:
    command = [sys.executable, "-m", "jobs", "run", str(recipe), "cluster.backend=ray"]
    # As on macOS: otherwise Ray replaces 127.0.0.1 by an external address, on which nothing listens.
    environment = os.environ | {"RAY_ADDRESS": full.address, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with (tmp_path / "said").open("w") as said:
        driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
    try:
        wait_until(lambda: "waiting for the cluster: room for 0 of 2 workers" in (tmp_path / "said").read_text(), 60)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 75  # cluster.wait_s has no limit
    finally:
        driver.kill()
    assert "stopped before the workers started, at the beginning (no checkpoint" in (tmp_path / "said").read_text()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 75


def test_a_signal_to_the_whole_process_group_commits_and_ends_with_75(recipe, tmp_path) -> None:
    """As sent by `timeout`, Slurm and a terminal: first while the fork server starts, then during the steps."""
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
        # The first run may have taken a few steps before it noticed the signal.
        steps_before = steps_of(run)
        driver = start()
        wait_until(lambda: steps_of(run) > steps_before + 5, 60)
        os.killpg(driver.pid, signal.SIGINT)
        assert driver.wait(60) == 75
    finally:
        driver.kill()
    text = (tmp_path / "said").read_text()
    # Every eighth step is saved; the stop saves the current step.
    (stopped,) = re.findall(r"^stopped at step (\d+) after committing it", text, re.MULTILINE)
    assert list(run.glob(f"pretrain-*/checkpoints/step-{int(stopped):010d}")), text
    # Plain processes communicate over the loopback; only rank 0 logs that, once per attempt.
    assert len(re.findall(r"^\[pretrain\] network: gloo over lo$", text, re.MULTILINE)) == 1
    # Neither signal killed a worker, and a stop is not an incident.
    assert not list(run.glob("pretrain-*/incidents.txt"))


def steps_of(run: Path) -> int:
    """Return how many lines of a run's metrics have a step."""
    return sum(path.read_text().count('"step": ') for path in run.glob("*/metrics.jsonl"))


def has_fork_server(pid: int) -> bool:
    """Return whether a process has started a fork server."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            if "jobs.cluster.fork_server" in child.cmdline():
                return True
    return False


def catches_sigterm(pid: int) -> bool:
    """Return whether a process has installed its signal handler; before that, a signal ends it."""
    mask = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return mask is not None and int(mask[1], 16) >> (signal.SIGTERM - 1) & 1 == 1


def test_stop_before_any_worker_has_started_ends_the_attempt(two, tmp_path) -> None:
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
    with pytest.raises(Preempted, match="stopped before the workers started, at the beginning"):
        attempt.check()
    assert asked == ["stop"], "the last report may be older than a worker's start"
    has_started = True
    attempt.check()
    assert asked == ["stop", "stop"], "a worker that has started is asked to commit"
    has_started = False
    left(group, 1)
    attempt.check()
    assert asked[2:] == [], "the request is repeated only after a while"
    with pytest.raises(Preempted, match="stopped in pretrain; run the same command again to restart this stage"):
        dataclasses.replace(attempt, can_commit=False).check()


# ------------------------------------------------------------------------ devices


@pytest.mark.parametrize(
    ("gpus", "cluster", "said"),
    [
        (0, {}, []),
        (8, {"gpus_per_worker": 1, "workers": 8}, []),
        (8, {"gpus_per_worker": 2, "workers": 3}, ["unused GPUs: 2 of 8 in this machine; set cluster.workers=4"]),
        (
            8,
            {"gpus_per_worker": 2, "workers": WorkerRange(least=1, most=3)},
            ["unused GPUs: 2 of 8 in this machine; set cluster.workers.most=4"],
        ),
        (8, {"gpus_per_worker": 3, "workers": 2}, ["unused GPUs: 2 of 8 in this machine; too few for one more worker"]),
        (1, {"workers": 4}, ["unused GPUs: 1 of 1 in this machine: the workers use only the CPU; set"]),
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
        config = ClusterConfig(backend=backend, **cluster)
        warn_of_unused_gpus(config, nodes_of(config), lines.append)
        assert [line.startswith(start) for line, start in zip(lines, said, strict=True)] == [True] * len(said)


# ------------------------------------------------------------------------ access by others


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_port_is_open_beyond_the_loopback_during_training(backend, two, tmp_path) -> None:
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
    # docs/design/cluster.md, "What listens on which address", names no other address.
    assert addresses == {"127.0.0.1"}
    # Ray's own directory is open to everybody; the directory around it is not.
    assert len(directories) == 1 or backend == "processes"
    assert all(directory.parent.stat().st_mode & 0o777 == 0o700 for directory in directories)


# Open without a token: pages and health checks without our content, and the metrics (docs/design/cluster.md).
OPEN_PATHS = {"/", "/favicon.ico", "/api/authentication_mode", "/api/gcs_healthz", "/api/healthz"}
OPEN_PATHS.add("/api/local_raylet_healthz")
OPEN_CALLS = {"/grpc.health.v1.Health/Check"}
ROUTE = re.compile(r"""routes\.(get|post|put|delete|patch|view)\(\s*["'](/[^"']*)["']""")


def listening_ports() -> dict[int, str]:
    """Return every port on which a process of the embedded cluster listens, and the process's name."""
    ports = {}
    for process in family_of():
        with suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    ports[connection.laddr.port] = process.name()
    return ports


def http_routes() -> set[tuple[str, str]]:
    """Return (method, path) of every endpoint of Ray's dashboard and agents, from their sources."""
    import ray

    routes = {("GET", "/metrics")}
    for path in (Path(ray.__file__).parent / "dashboard").rglob("*.py"):
        for method, route in ROUTE.findall(path.read_text()):
            routes.add((method.upper().replace("VIEW", "GET"), re.sub(r"\{[^}]*\}", "x", route)))
    return routes


def grpc_methods() -> list[str]:
    """Return every method of every service of Ray's processes, from their compiled descriptions."""
    import ray.core.generated as generated

    # Ray's Python package does not describe the object manager; these names are in the raylet's binary.
    methods = ["/ray.rpc.ObjectManagerService/Push", "/ray.rpc.ObjectManagerService/Pull"]
    for module in pkgutil.iter_modules(generated.__path__):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(f"ray.core.generated.{module.name}").DESCRIPTOR
            for service in descriptor.services_by_name.values():
                methods += [f"/{service.full_name}/{method.name}" for method in service.methods]
    return methods


def http_answer(port: int, method: str, path: str) -> tuple[int, str] | None:
    """Return status and content of the answer to a request without a token; None if the port does not speak HTTP."""
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
    """Return the status of an empty call of each method without a token; empty if the port does not speak gRPC."""
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
def test_every_endpoint_of_an_embedded_cluster_requires_a_token(two) -> None:
    """Without a token, try all routes on every HTTP port, and all methods on every gRPC port."""
    import ray

    connect(two["ray"])
    holder = ray.remote(num_cpus=0)(worker_functions.Holder).remote()
    ray.get(holder.ready.remote())
    routes = http_routes()
    methods = [*grpc_methods(), *OPEN_CALLS]
    assert len(routes) > 50, "Ray has moved its endpoints"
    assert len(methods) > 100, "Ray has moved its endpoints"
    assert {("POST", "/api/jobs/"), ("GET", "/api/version"), ("GET", "/nodes")} <= routes
    assert "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo" in methods
    answers = Counter[str]()
    told: dict[str, set[str]] = {}  # process → the endpoints that answered
    for port, name in listening_ports().items():
        anywhere = http_answer(port, "GET", "/nowhere")
        # A metrics port shows the same page under every path. It needs no token, and listens on 127.0.0.1.
        if anywhere is not None and anywhere[0] == 200:
            for line in anywhere[1].splitlines():
                assert re.match(r"# |\w+({.*})? [-+.\w]+$", line), f"{name} tells more than numbers: {line}"
            answers[f"metrics of {name}"] += 1
        elif anywhere is not None:
            for method, path in routes:
                answer = http_answer(port, method, path)
                assert answer is not None
                answers[f"http {answer[0]}"] += 1
                # 404 is no evidence: the path may belong to the agent instead of the dashboard.
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
    assert answers["http 401"] > 50
    assert answers["grpc UNAUTHENTICATED"] > 100
    for name, endpoints in told.items():
        assert endpoints <= OPEN_PATHS | OPEN_CALLS, name


# ------------------------------------------------------------------------ cleanup


@pytest.mark.parametrize("backend", BACKENDS)
def test_exception_in_on_tick_ends_the_worker_group_and_disconnecting_ends_the_cluster(backend, two, tmp_path) -> None:
    if backend == "ray":
        info = connect(two["ray"])
        assert info.embedded
        assert info.dashboard.startswith("http://127.0.0.1:")
        assert info.nodes == 1

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
        assert not psutil.wait_procs(family, timeout=60)[1]
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
    """A driver with two workers, which has started the preparations early."""
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
def test_killed_driver_leaves_no_process(backend, tmp_path) -> None:
    driver = start_driver(backend, tmp_path, "sleep_until_told")
    try:
        # Two workers and their parents: the first worker is ready before the second exists.
        everybody = lambda: (tmp_path / "ready").exists() and len(family_of(driver.pid)) >= 3  # noqa: E731
        wait_until(lambda: everybody() or driver.poll() is not None, 120)
        family = family_of(driver.pid)
        directories = cluster_directories(family)
        assert len(family) >= 3
        # The fork server must not inherit the driver's open files: a lock among them would outlive the driver.
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


# A campaign in this process leaves the embedded cluster at its end, so this test comes after those that share it.
def test_idle_gpus_are_logged_once_and_the_start_line_names_the_device(recipe, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    loaded = campaigns.load(recipe, ["pretrain.steps=2", "pretrain.optim.schedule.warmup_steps=1"])
    run_campaign(loaded, only="pretrain")
    out = capsys.readouterr().out
    line = "unused GPUs: 8 of 8 in this machine: the workers use only the CPU; set cluster.gpus_per_worker=1"
    assert out.count(line) == out.count("unused") == 1
    assert "; 2 workers on cpu × micro_batch 4 × accumulation 2 = batch 16, 2 steps" in out
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H100 80GB HBM3 {device.index}")
    assert device_name(torch.device("cuda", 3)) == "NVIDIA H100 80GB HBM3 3"
