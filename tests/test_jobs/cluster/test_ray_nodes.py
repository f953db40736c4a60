"""A real Ray cluster with several nodes on this machine: placement, waiting campaigns, and leaving nodes."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import PlacementGroup, placement_group_table

from data.errors import ClusterError
from data.files import import_path
from jobs.cluster import embedded, ray_nodes, ray_places, worker_group
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.ray import connect, disconnect
from jobs.cluster.supervisor import supervise
from jobs.cluster.worker_group import do_nothing, run_worker_group
from jobs.cluster_config import ClusterConfig, WorkerRange
from jobs.recipe import campaign
from jobs.run.reading import StatusMessage
from jobs.run.session import run_campaign
from pipeline.checkpoints.manifest import attempt_folder
from pipeline.monitoring.telemetry import read_metrics
from tests.support import campaigns, worker_functions
from tests.support.contexts import pretrain_context
from tests.support.families import wait_until
from tests.support.watching import EachPoll

ROOT = Path(__file__).parents[3]
NODES = 3  # with one CPU each, and a head without CPUs


class Nodes:
    """A cluster whose nodes a test may kill; they are replaced for the next test."""

    def __init__(self, folder: Path) -> None:
        self.options: dict[str, Any] = {"object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}
        head = {"num_cpus": 0, "gcs_server_port": free_port(), "include_dashboard": False, "temp_dir": str(folder)}
        self.cluster = Cluster(initialize_head=True, head_node_args=self.options | head)

    def alive(self) -> set[str]:
        draining = self.cluster.global_state.get_draining_nodes()
        table = self.cluster.global_state.node_table()
        return {node["NodeID"] for node in table if node["Alive"] and node["Resources"].get("CPU")} - set(draining)

    def fill_up(self) -> None:
        while len(self.alive()) < NODES:
            self.cluster.add_node(num_cpus=1, **self.options)

    def kill(self, node_id: str) -> None:
        """Kill all processes of a node at once, as when its host dies."""
        for node in self.cluster.worker_nodes:
            if node.node_id == node_id:
                raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
                for process in [*raylet.children(recursive=True), raylet]:
                    process.kill()

    def drain(self, node_id: str) -> None:
        """Drain a node as `ray drain-node` does, or a SIGTERM to `ray start --block`."""
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int(time.time() * 1000) + 60_000
        client = ray._raylet.GcsClient(address=self.cluster.address)
        accepted, why = client.drain_node(node_id, reason, "spot", deadline_ms)
        assert accepted, why


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    disconnect()
    with pytest.MonkeyPatch.context() as patch:
        embedded.make_token()
        patch.setenv(embedded.LOOPBACK_ONLY, "0")
        for name, value in (embedded.ENVIRONMENT | embedded.EMBEDDED_ENVIRONMENT).items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", import_path())
        # As in a submitted job, the nodes already have the code.
        patch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
        # Otherwise a file in /tmp/ray would make this the default cluster of all programs on this machine.
        patch.setattr(ray._private.utils, "write_ray_address", lambda address: None)
        folder = embedded.short_directory()
        nodes = Nodes(folder)
        patch.setenv("RAY_ADDRESS", nodes.cluster.address)
        yield nodes
        disconnect()
        nodes.cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def nodes(cluster) -> Iterator[Nodes]:
    cluster.fill_up()
    yield cluster
    disconnect()


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


# ------------------------------------------------------------------------ which nodes have a warm agent


@pytest.fixture
def unplaced(monkeypatch) -> ray_nodes.RayNodes:
    """Return the nodes of a driver outside any cluster."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "own"))
    return ray_nodes.RayNodes(ClusterConfig(), is_embedded=False)


@pytest.mark.quick
def test_a_few_spare_nodes_get_a_warm_agent(unplaced, monkeypatch) -> None:
    started: list[str] = []

    def start(node_id: str) -> None:
        started.append(node_id)
        unplaced.actors[node_id] = None

    monkeypatch.setattr(unplaced, "start_agent", start)
    unplaced.actors["a"] = None
    unplaced.used = {"a"}
    # A node with a worker already has an agent, even if it has room for another worker.
    for spare, expected in [("a", ""), ("bcd", "bc"), ("bcd", ""), ("cde", "d"), ("bcdefg", ""), ("ef", "ef")]:
        unplaced.warm_up_spares(set(spare))
        assert started == list(expected), spare
        started.clear()
    # Agents of workers with GPUs import nothing early.
    unplaced.cluster = ClusterConfig(gpus_per_worker=1)
    unplaced.warm_up_spares({"x", "y"})
    assert not started


@pytest.mark.quick
def test_gpus_of_a_bundle_moved_to_another_node_are_visible_there(unplaced, monkeypatch) -> None:
    """Ray places the bundle of a lost node again, in the same placement group (seen with a real cluster)."""
    unplaced.cluster = ClusterConfig(workers=2, gpus_per_worker=1)
    unplaced.reservation = SimpleNamespace(group=SimpleNamespace(id=b"group"))
    unplaced.warmed_up = {"a": None, "b": None}
    rows = [{"NodeID": name, "NodeManagerHostname": name, "NodeManagerAddress": name} for name in "ab"]
    monkeypatch.setattr(ray, "nodes", lambda: rows)
    monkeypatch.setattr(ray, "wait", lambda replies, timeout: ([], replies))
    monkeypatch.setattr(ray, "get", lambda replies: [[f"gpu of bundle {bundle}"] for bundle in replies])
    monkeypatch.setattr(unplaced, "start_agent", lambda node_id: None)
    # A task in a bundle returns the bundle's number.
    monkeypatch.setattr(
        ray_nodes,
        "PlacementGroupSchedulingStrategy",
        lambda group, placement_group_bundle_index: placement_group_bundle_index,
    )
    task = SimpleNamespace(options=lambda scheduling_strategy: SimpleNamespace(remote=lambda: scheduling_strategy))
    monkeypatch.setattr(ray, "remote", lambda **options: lambda function: task)
    for slots, expected in (
        ({"a": {0: 1}, "b": {1: 1}}, ["gpu of bundle 0", "gpu of bundle 1"]),
        ({"a": {0: 1, 1: 1}}, ["gpu of bundle 0,gpu of bundle 1"]),
    ):
        monkeypatch.setattr(unplaced, "slots", lambda world, slots=slots: slots)
        assert [agent.visible_gpus for agent in unplaced.agents(2)] == expected


@pytest.mark.quick
def test_ending_a_missing_agent_does_nothing(unplaced) -> None:
    unplaced.end_agent("a")
    assert unplaced.actors == {}


@pytest.mark.quick
def test_avoided_nodes_are_kept_for_the_next_connection(monkeypatch) -> None:
    connection = ["first"]
    context = SimpleNamespace(get_node_id=lambda: connection[0], get_job_id=lambda: "01000000")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_nodes, "_joined", {})
    before = ray_nodes.ray_nodes_of(ClusterConfig(), is_embedded=False)
    before.avoid(["a"])
    before.excluded.add("b")
    assert ray_nodes.ray_nodes_of(ClusterConfig(), is_embedded=False) is before
    connection[0] = "second"
    after = ray_nodes.ray_nodes_of(ClusterConfig(), is_embedded=False)
    assert after is not before
    assert after.avoided_now() == {"a", "b"}


# ------------------------------------------------------------------------ what fits


def test_worker_is_not_split_between_nodes_and_an_autoscaler_sees_the_request(nodes, monkeypatch) -> None:
    monkeypatch.setattr(ray_places, "FIRST_LINE_S", 1.5)
    seen: list[Any] = []  # what an autoscaler sees while the command waits

    def look() -> None:
        client = ray._raylet.GcsClient(address=nodes.cluster.address)
        state = get_cluster_resource_state(client)
        for request in state.pending_gang_resource_requests:
            seen.append(request)

    host = os.uname().nodename
    missing = (
        "room for 0 of 1 workers with 2 CPUs each; the whole cluster has room for only 0; "
        f"free: 1 CPUs on {host}, 1 CPUs on {host}, 1 CPUs on {host}"
    )
    said: list[str] = []
    with pytest.raises(ClusterError) as caught:
        reserve(ClusterConfig(cpus_per_worker=2, wait_s=2), "/runs/a", said.append, look)
    assert said == [f"waiting for the cluster: {missing}"]
    assert str(caught.value).startswith(f"{missing}\n  the slots did not become free within 2 s ")
    bundles = seen[0].bundle_selectors[0].resource_requests
    assert [dict(bundle.resources_bundle) for bundle in bundles] == [{"CPU": 2.0}]
    # After the request is cancelled, a smaller one is placed at once.
    assert reserve(ClusterConfig(workers=3, wait_s=4), "/runs/b", said.append)


def reserve(cluster: ClusterConfig, run: str, log=print, look=do_nothing, worlds=()) -> PlacementGroup:
    """Reserve places for a worker group, as a stage does."""
    nodes = nodes_in(cluster)
    nodes.reserve(run, worlds or [cluster.world], log, look)
    assert nodes.reservation is not None
    return nodes.reservation.group


def nodes_in(cluster: ClusterConfig) -> ray_nodes.RayNodes:
    return ray_nodes.ray_nodes_of(cluster, is_embedded=connect(cluster).embedded)


def room_now(cluster: ClusterConfig) -> int:
    return nodes_in(cluster).room()


def held(cluster: ClusterConfig) -> int:
    return nodes_in(cluster).workers_held


RIVAL = """
    import sys
    from jobs.cluster.nodes import nodes_of
    from jobs.cluster.worker_group import do_nothing
    from jobs.cluster_config import ClusterConfig

    def say(line):
        print(line, flush=True)

    run, workers = sys.argv[1:]
    nodes_of(ClusterConfig(workers=int(workers), wait_s=60)).reserve(run, [int(workers)], say, do_nothing)
    say("placed")
    sys.stdin.read()
"""


def start_rival(run: str, workers: int) -> subprocess.Popen[str]:
    """Another driver, which requests its places, prints a line, and holds them until it is killed."""
    command = [sys.executable, "-c", textwrap.dedent(RIVAL), run, str(workers)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_second_campaign_waits_and_names_the_first(nodes, monkeypatch) -> None:
    monkeypatch.setattr(ray_places, "FIRST_LINE_S", 1.5)
    two = ClusterConfig(workers=2, wait_s=60)
    held = reserve(two, "/runs/first")
    rival = start_rival("/runs/second", 2)
    try:
        assert rival.stdout is not None
        line = rival.stdout.readline()
        assert line.startswith("waiting for the cluster: room for 1 of 2 workers with 1 CPUs each; free: 1 CPUs on ")
        assert line.endswith("; held: 2 CPUs by /runs/first\n")
        # The next attempt of the first campaign keeps its places and does not queue after the second one.
        assert reserve(two, "/runs/first") == held
        nodes_in(two).release()
        assert rival.stdout.readline() == "placed\n"
        said: list[str] = []
        with pytest.raises(ClusterError):
            reserve(ClusterConfig(workers=2, wait_s=3), "/runs/first", said.append)
        assert said[0].endswith("; held: 2 CPUs by /runs/second")
        rival.kill()
        assert reserve(two, "/runs/first")
    finally:
        rival.kill()
        rival.wait()


def test_fewer_workers_are_used_after_patience_s_and_more_once_there_is_room(nodes) -> None:
    some = ClusterConfig(workers=WorkerRange(least=1, most=4), patience_s=1, wait_s=30)
    bundles: list[int] = []  # of the waiting group, as an autoscaler sees it
    said: list[str] = []

    def look() -> None:
        state = get_cluster_resource_state(ray._raylet.GcsClient(address=nodes.cluster.address))
        for request in state.pending_gang_resource_requests:
            bundles.append(len(request.bundle_selectors[0].resource_requests))

    began = time.monotonic()
    first = reserve(some, "/runs/a", said.append, look, worlds=(4, 2, 1))
    assert time.monotonic() - began >= 1
    assert set(bundles[:3]) == {4}, "the maximum is requested"
    assert held(some) == 2, "three would fit, but do not divide the batch"
    host = os.uname().nodename
    assert said == [
        "continuing with 2 of up to 4 workers: room for 3 of 4 workers with 1 CPUs each; "
        f"the whole cluster has room for only 3; free: 1 CPUs on {host}, 1 CPUs on {host}, 1 CPUs on {host}"
    ]
    # Without more room, the next attempt gets the held places at once.
    patient = dataclasses.replace(some, patience_s=60)
    began = time.monotonic()
    assert reserve(patient, "/runs/a", said.append, worlds=(4, 2, 1)) == first
    assert time.monotonic() - began < 55
    assert room_now(some) == 3
    joined = nodes.cluster.add_node(num_cpus=1, **nodes.options)
    try:
        wait_until(lambda: room_now(some) == 4)
        # A waiting campaign takes precedence over growing.
        rival = start_rival("/runs/b", 4)
        try:
            wait_until(lambda: room_now(some) == 2, 60)
        finally:
            rival.kill()
            rival.wait()
        wait_until(lambda: room_now(some) == 4)
        reserve(some, "/runs/a", said.append, worlds=(4, 2, 1))
        assert held(some) == 4
    finally:
        nodes.cluster.remove_node(joined)


def test_workers_of_a_node_share_a_bundle_unless_only_smaller_ones_fit(nodes, monkeypatch) -> None:
    monkeypatch.setattr(ray_places, "NEXT_REQUEST_S", 0.5)
    four = ClusterConfig(workers=4, wait_s=30)
    large = nodes.cluster.add_node(num_cpus=3, **nodes.options)
    other: PlacementGroup | None = None
    try:
        wait_until(lambda: room_now(four) == 6)
        group = reserve(four, "/runs/a")
        assert [bundle["CPU"] for bundle in placement_group_table(group)["bundles"].values()] == [3.0, 1.0]
        ours = nodes_in(four)
        first, second = ours.slots(4)
        assert (first, ours.slots(4)) == (large.node_id, {first: {0: 3}, second: {1: 1}})
        assert ours.slots(2) == {first: {0: 2}}
        assert ours.nodes_held(3) == {first}
        # Another program uses two of the three CPUs.
        ours.release()
        selector = [{"ray.io/node-id": large.node_id}]
        other = ray.util.placement_group([{"CPU": 2}], bundle_label_selector=selector)
        assert other.wait(30)
        group = reserve(four, "/runs/a")
        assert [bundle["CPU"] for bundle in placement_group_table(group)["bundles"].values()] == [1.0] * 4
        assert sum(map(len, ours.slots(4).values())) == 4
        assert len(ours.slots(4)) == 4
    finally:
        nodes_in(four).release()
        if other is not None:
            ray.util.remove_placement_group(other)
        nodes.cluster.remove_node(large)


def test_excluded_node_is_never_used_and_exclusion_needs_enough_other_nodes(nodes) -> None:
    two = ClusterConfig(workers=2, wait_s=4)
    group = reserve(two, "/runs/a")
    ours = nodes_in(two)
    odd = placement_group_table(group)["bundles_to_node_id"][0]
    assert ours.exclude({odd}, 3) == 2, "three workers need it"
    assert not ours.excluded, "three workers need it"
    assert ours.exclude({odd}, 2) == 2
    assert odd not in placement_group_table(reserve(two, "/runs/a"))["bundles_to_node_id"].values()
    assert ours.room() == 2
    assert odd not in ours.status()[1]
    with pytest.raises(ClusterError, match=r"room for 2 of 3 workers .*; the whole cluster has room for only 2"):
        reserve(ClusterConfig(workers=3, wait_s=1), "/runs/a")
    assert set(ours.identities()) >= nodes.alive(), "excluded nodes are queried too"


@pytest.mark.slow
def test_places_on_a_lost_node_are_replaced_by_fewer_places(nodes) -> None:
    some = ClusterConfig(workers=WorkerRange(least=1, most=3), patience_s=1, start_timeout_s=60)
    said: list[str] = []
    first = reserve(some, "/runs/a", said.append, worlds=(3, 2, 1))
    row = placement_group_table(first)
    nodes.kill(row["bundles_to_node_id"][0])
    wait_until(lambda: placement_group_table(first)["state"] == "RESCHEDULING", 60)
    began = time.monotonic()
    reserve(some, "/runs/a", said.append, worlds=(3, 2, 1))
    assert time.monotonic() - began >= 1
    assert held(some) == 2
    assert said == [
        "continuing with 2 of up to 3 workers: room for 2 of 3 workers with 1 CPUs each; "
        "the whole cluster has room for only 2"
    ]


@pytest.mark.slow
def test_run_survives_a_broken_node_that_joins(nodes, tmp_path) -> None:
    some = ClusterConfig(workers=WorkerRange(least=3, most=4), patience_s=1, max_restarts=0)
    said: list[str] = []
    joined: list[Any] = []

    def tick(attempt: int, _step: int) -> None:
        folder = context.attempt_folder(attempt)
        if attempt == 1 and len(records(folder)) == 3 and not joined:
            joined.append(nodes.cluster.add_node(num_cpus=1, **nodes.options))
        if attempt == 3 and len(records(folder)) == 3:
            (tmp_path / "finish").touch()

    context = pretrain_context(tmp_path, some, log=said.append, poll=tick)

    def task(attempt: int) -> dict[str, Any]:
        return {
            "most": 3,
            "finish": str(tmp_path / "finish"),
            "checkpoints": str(context.directory / "checkpoints"),
            "folder": str(attempt_folder(context.directory, attempt)),
        }

    try:
        value = supervise(
            worker_functions.commit_until_stopped,
            task,
            context,
            worlds=(4, 3),
            stall_s=600,
        )
    finally:
        for node in joined:
            nodes.cluster.remove_node(node)
    attempts = [records(attempt_folder(context.directory, number)) for number in (1, 2, 3)]
    assert [len(workers) for workers in attempts] == [3, 4, 3]
    assert joined[0].node_id in {worker["node_id"] for worker in attempts[1]}
    assert joined[0].node_id not in {worker["node_id"] for worker in attempts[2]}
    assert value["step"] > 1
    assert any(line.startswith("scaling up from 3 to 4 workers, resuming from step ") for line in said)
    (back,) = (line for line in said if "RuntimeError: this node is broken" in line)
    assert (
        "; no commit with 4 workers, so falling back to 3 workers on the previous nodes and resuming from step " in back
    )


# ------------------------------------------------------------------------ leaving nodes


@pytest.mark.slow
def test_worker_on_the_lost_node_is_blamed_instead_of_its_peer(nodes, tmp_path) -> None:
    lost: list[str] = []

    def lose_rank_0() -> None:
        if not lost and all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            lost.append(records(tmp_path / "attempt")[0]["node_id"])
            nodes.kill(lost[0])

    task = {"ready": str(tmp_path / "ready"), "stop": str(tmp_path / "stop")}
    with pytest.raises(WorkerGroupError) as caught:
        run_worker_group(
            worker_functions.meet_and_reduce,
            task,
            cluster=ClusterConfig(workers=2),
            name="attempt",
            directory=tmp_path,
            on_tick=lose_rank_0,
        )
    peer = records(tmp_path / "attempt")[1]
    assert "gloo/transport" in peer["error"], "the peer has noticed"
    assert caught.value.rank == 0
    assert caught.value.cause in ("its node does not respond", "its node left the cluster")
    # Ray may take 15 s to find out; the next attempt does not wait for that.
    began = time.monotonic()
    group = reserve(ClusterConfig(workers=2), "/runs/a")
    assert time.monotonic() - began < 15
    assert lost[0] not in placement_group_table(group)["bundles_to_node_id"].values()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["between stages", "before the workers start", "during the stage", "at its end"])
def test_frozen_agent_is_named_and_replaced_and_its_node_avoided(phase, nodes, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(worker_group, "AGENT_SILENT_S", 12.0)
    said: list[str] = []
    agents: dict[str, psutil.Process] = {}  # by node id
    victim: list[str] = []  # the node id of the frozen agent
    names = {name: str(tmp_path / name) for name in ("ready", "finish", "ended")}

    def freeze(worker: dict[str, Any]) -> None:
        if not victim:
            victim.append(worker["node_id"])
            agents[worker["node_id"]].suspend()

    def tick(attempt: int, _step: int) -> None:
        workers = records(context.attempt_folder(attempt))
        has_stepped = (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists()
        for worker in workers:
            with suppress(psutil.Error, AttributeError):
                agents[worker["node_id"]] = psutil.Process(worker["pid"]).parent().parent()  # type: ignore[union-attr]
        if has_stepped and len(workers) == 2:
            if phase == "during the stage" and attempt == 1:
                freeze(workers[1])
            else:
                Path(names["finish"]).touch()
        if phase == "at its end" and (tmp_path / "ended1").exists():
            freeze(workers[1])

    def run_stage() -> dict[str, Any]:
        def task(attempt: int) -> dict[str, Any]:
            for path in (*tmp_path.glob("ready*"), *tmp_path.glob("finish"), *tmp_path.glob("ended*")):
                path.unlink()
            return names | {"folder": str(context.attempt_folder(attempt)), "lingers_s": 3.0}

        # `stall_s` is shorter than the agent's limit: no worker must be blamed instead of the agent.
        return supervise(worker_functions.step_until_told, task, context, worlds=(2,), stall_s=5.0)

    two_workers = ClusterConfig(workers=2, backoff_s=0.1)
    context = pretrain_context(tmp_path / "run", two_workers, log=said.append, poll=tick)
    nodes_in(two_workers).avoided.clear()  # of earlier tests
    attempt = 1
    if phase in ("between stages", "before the workers start"):
        assert run_stage()["step"] > 0
        # Rank 0's agent opens the workers' store; that of rank 1 only starts its worker.
        freeze(records(context.attempt_folder(1))[0 if phase == "between stages" else 1])
        attempt = 2
    began = time.monotonic()
    assert run_stage()["step"] > 0
    assert time.monotonic() - began < 100, "12 s to notice, and two starts; without a limit, one wait takes 300 s"

    (failed,) = [line for line in said if "restarting" in line]
    assert "its node's agent has not responded for 12 s, but the node accepts connections" in failed, said
    assert f" on {os.uname().nodename}" in failed
    assert "stuck" not in failed
    workers = records(context.attempt_folder(attempt + 1))
    assert len(workers) == 2
    assert victim[0] not in {worker["node_id"] for worker in workers}
    wait_until(lambda: not agents[victim[0]].is_running(), 30)


@pytest.mark.parametrize(
    ("notice", "moves"),
    [
        pytest.param("drain", 1, marks=pytest.mark.slow),
        pytest.param("sigterm", 1, marks=pytest.mark.slow),
        pytest.param("drain", 20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_draining_a_node_loses_no_step_and_is_not_an_incident(notice, moves, nodes, recipe, capsys) -> None:
    given: dict[int, dict[str, Any]] = {}  # attempt → the record of the worker on the leaving node

    def give_notice(message: StatusMessage) -> None:
        attempt = message.attempt
        workers = records(attempt_folder(message.directory, attempt))
        lines = [line for line in read_metrics(message.directory) if line["attempt"] == attempt]
        if attempt in given or len(given) == moves or len(lines) < 2:
            return
        nodes.fill_up()
        given[attempt] = workers[attempt % 2]
        if notice == "drain":
            nodes.drain(given[attempt]["node_id"])
        else:
            os.kill(given[attempt]["pid"], signal.SIGTERM)

    # The only saves are those before a move. Steps have eight micro-batches, so that the next node joins in time.
    steps = 300 + 50 * moves
    changes = ["cluster.backend=ray", "pretrain.save_every=100000", "pretrain.log_every=1", f"pretrain.steps={steps}"]
    changes.append("pretrain.micro_batch=1")
    loaded = campaigns.load(recipe, changes)
    rows = run_campaign(loaded, only="pretrain", watchers=[EachPoll(give_notice)])
    stage = loaded.directory(loaded.stage("pretrain"))
    said = capsys.readouterr().out

    assert not (stage / "incidents.txt").exists()
    attempts = {int(folder.name[-6:]): records(folder) for folder in (stage / "attempts").iterdir()}
    assert sorted(attempts) == list(range(1, moves + 2))
    for attempt, record in given.items():
        assert record["node_id"] not in [worker["node_id"] for worker in attempts[attempt + 1]]
    assert [line["step"] for line in read_metrics(stage)] == list(range(1, steps + 1)), "every step once"
    assert rows[0]["step"] == steps
    why = "its node is being drained" if notice == "drain" else "worker 1 was sent SIGTERM"
    assert f"leaving the cluster: {given[1]['node']} ({why}" in said
    assert said.count("; moving the workers to other nodes, resuming from step ") == moves


# ------------------------------------------------------------------------ nodes with wrong results


@pytest.mark.slow
def test_node_with_a_flipped_bit_is_left_and_the_run_ends_as_if_it_had_not_flipped(nodes, recipe, capsys) -> None:
    pytest.importorskip("jobs.extras.live_audit")
    from tests.support import audited_runs

    nodes_in(ClusterConfig(workers=2)).excluded.clear()  # by earlier tests
    loaded = campaign.load(
        recipe, ["cluster.backend=ray", *audited_runs.changes(recipe.parent / "flipped", 1.0)], audited_runs.kinds()
    )
    run_campaign(loaded, only="pretrain")
    stage = loaded.directory(loaded.stage("pretrain"))
    said = capsys.readouterr().out
    clean = campaigns.load(recipe, audited_runs.changes(recipe.parent / "clean", 0.0))
    run_campaign(clean, only="pretrain")

    assert "CorruptWorker: live audit of step 6: worker 1 computed wrong results: the gradient of " in said
    assert f"excluded from this campaign: {os.uname().nodename}, whose worker 1 computed wrong results" in said
    first, second = (records(attempt_folder(stage, number)) for number in (1, 2))
    assert len(second) == 2
    assert first[1]["node_id"] not in [worker["node_id"] for worker in second]
    assert first[0]["node_id"] in [worker["node_id"] for worker in second]
    assert audited_runs.losses_of(stage) == audited_runs.losses_of(clean.directory(clean.stage("pretrain")))
