"""Start checks: incompatible workers are refused, other differences are logged."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from data.errors import ClusterError, ExitCode
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline import process_group
from pipeline.identity import DEVICE, MUST_BE_EQUAL, SHOULD_BE_EQUAL, WORKERS_PER_GPU, code_mismatch, differences
from pipeline.process_group import Arrival, check_device_memory, gpu_of_worker, log_differences, log_network
from tests.support import hosts, preflights
from tests.support.identities import worker

NODE = socket.gethostname()
TWO = ClusterConfig(workers=2, backend="processes")


def logged(arrivals: list[Arrival], claimed: float) -> list[str]:
    """Return the lines that rank 0 logs about these workers."""
    lines: list[str] = []
    log_differences(arrivals, claimed, lines.append)
    return lines


# ------------------------------------------------------------------------ what differs


def test_no_difference_is_reported_for_identical_workers() -> None:
    group = [worker(0), worker(1), worker(2)]
    assert differences(group, [*MUST_BE_EQUAL, *SHOULD_BE_EQUAL, *DEVICE]) == []
    assert code_mismatch(group, "a" * 64) == ""
    assert logged([Arrival(each, 100.0, True) for each in group], claimed=90.0) == []


def test_step_that_does_not_fit_is_reported_with_worker_and_free_memory() -> None:
    gib = 2**30
    gpus = [Arrival(worker(rank, device="H100"), 0.0, True, room) for rank, room in enumerate((40 * gib, 20 * gib))]
    check_device_memory(gpus, 20 * gib)
    check_device_memory(gpus, 0)
    with pytest.raises(
        ClusterError, match=r"^worker 1 on n1 needs 30.0 GiB for a step, but only 20.0 GiB is free\n"
    ) as no:
        check_device_memory(gpus, 30 * gib)
    assert "\n  run `python -m jobs plan RECIPE cluster.gpu_memory_gb=20.0`, which" in str(no.value)
    # Workers that compute on the CPU share their node's memory.
    cpus = [Arrival(worker(rank, node="n"), 0.0, True, 50 * gib) for rank in range(3)]
    check_device_memory(cpus, 16 * gib)
    with pytest.raises(ClusterError, match=r"but the 3 workers of this node share 50.0 GiB of free memory"):
        check_device_memory(cpus, 17 * gib)


@pytest.mark.quick
def test_cached_files_of_a_container_count_as_free_memory(tmp_path, monkeypatch) -> None:
    """A container that has read a large data set has used its whole limit, mostly for cached files."""
    monkeypatch.setattr(process_group, "CGROUP", tmp_path)
    mib = 2**20
    (tmp_path / "memory.max").write_text(f"{100 * mib}\n")
    (tmp_path / "memory.current").write_text(f"{99 * mib}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon {20 * mib}\nfile {79 * mib}\nshmem {9 * mib}\ninactive_file {30 * mib}\nactive_file {40 * mib}\n"
    )
    assert process_group.memory_free() == 71 * mib
    (tmp_path / "memory.max").write_text("max\n")
    assert process_group.memory_free() > 100 * mib


def test_clock_difference_above_a_second_is_logged() -> None:
    arrivals = [Arrival(worker(rank), clock_s, True) for rank, clock_s in enumerate((100.0, 100.9, 97.5))]
    assert logged(arrivals, claimed=100.5)[0].startswith(
        "the clock of worker 2 on n2 is 2.5 s behind the clock of worker 0"
    )
    assert len(logged(arrivals, claimed=100.5)) == 1
    assert logged(arrivals[:2], claimed=110.0) == [
        "the clock of worker 0 on n0 is at least 10.0 s behind the driver's; synchronise them with NTP"
    ]


# ------------------------------------------------------------------------ at every start


def start(tmp_path: Path, act: str = "") -> Any:
    """Run the start check on two real workers; `act` makes worker 1 differ."""
    task = preflights.start_task(tmp_path, act)
    return run_worker_group(preflights.start, task, cluster=TWO, name="group", directory=tmp_path)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("other code", r"worker 1 on \S+ runs different code from this command: [0-9a-f]{12} in /.*copy"),
        (
            "own disk",
            r"worker 1 on \S+ wrote /.*/rank-00001.log, but rank 0 on \S+ still cannot see the file after 0 s",
        ),
        pytest.param("no claim", r"worker 1 on \S+ cannot see /.*/attempts/000001.json", marks=pytest.mark.slow),
        pytest.param("other torch", r"worker 1 on \S+ has torch 1.0, 1 of 1 nodes 2", marks=pytest.mark.slow),
    ],
)
def test_incompatible_worker_is_refused(act, message, tmp_path) -> None:
    if act in ("own disk", "no claim") and hosts.missing():
        pytest.skip(hosts.missing())
    with pytest.raises(WorkerGroupError) as caught:
        start(tmp_path, act)
    kind = "MismatchedNodes" if act.startswith("other") else "ClusterError"
    assert re.match(f"{kind}: {message}", caught.value.cause), caught.value.cause
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert "\n  " in caught.value.cause, "a remedy follows"


def test_start_check_logs_a_wrong_clock(tmp_path) -> None:
    value = start(tmp_path, "other clock")
    print(f"check_start on two workers: {value['seconds']:.3f} s")
    (line,) = value["log"]
    assert line.startswith(f"the clock of worker 1 on {NODE} is 3600.0 s ahead of the clock of worker 0 on {NODE}")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("backend", "settings", "expected"),
    [
        ("gloo", [("n1", "GLOO_SOCKET_IFNAME=eth0"), ("n2", "GLOO_SOCKET_IFNAME=eth0")], "gloo over eth0"),
        (
            "gloo",
            [("n1", "GLOO_SOCKET_IFNAME=eth0"), ("n1", "GLOO_SOCKET_IFNAME=eth0"), ("n2", "GLOO_SOCKET_IFNAME=ib0")],
            "gloo over eth0 on n1, ib0 on n2",
        ),
        (
            "nccl",
            [("n1", "GLOO_SOCKET_IFNAME=e"), ("n2", "GLOO_SOCKET_IFNAME=e")],
            "NCCL over the default interface",
        ),
        (
            "nccl",
            [("n1", "NCCL_SOCKET_IFNAME=ib0 NCCL_DEBUG=INFO"), ("n2", "NCCL_SOCKET_IFNAME=ib0")],
            "NCCL over ib0; NCCL_DEBUG=INFO on n1, not set on n2",
        ),
        ("nccl", [(f"n{node}", f"NCCL_SOCKET_IFNAME=e{node}") for node in range(10)], None),
    ],
)
def test_network_line_lists_interfaces_and_settings(backend, settings, expected, monkeypatch) -> None:
    places = [(node, dict(word.split("=") for word in text.split())) for node, text in settings]

    def gather(gathered: list[object], own: object) -> None:
        gathered[:] = places

    monkeypatch.setattr(dist, "get_world_size", lambda: len(places))
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    lines: list[str] = []
    log_network(lines.append)
    if expected is None:
        shown = ", ".join(f"e{node} on n{node}" for node in range(8))
        expected = f"NCCL over {shown} and 2 more nodes"
    (line,) = lines
    assert line.replace("; GLOO_SOCKET_IFNAME=e", "") == f"network: {expected}"


# ------------------------------------------------------------------------ GPU and backend of a worker


@pytest.mark.quick
@pytest.mark.parametrize(
    ("local_rank", "count", "per_gpu", "expected"),
    [(0, 1, 1, 0), (3, 4, 1, 3), (1, 1, 2, 0), (3, 2, 2, 1), (1, 1, 1, None), (2, 1, 2, None)],
)
def test_worker_gets_the_gpu_of_its_local_rank_or_is_refused(local_rank, count, per_gpu, expected, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv(WORKERS_PER_GPU, str(per_gpu))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if expected is not None:
        assert gpu_of_worker() == torch.device("cuda", expected)
        return
    with pytest.raises(
        ClusterError, match=rf"^at least {local_rank + 1} workers are on {NODE}, but torch sees only 1 GPUs there\n"
    ):
        gpu_of_worker()


@pytest.mark.parametrize(
    ("addresses", "machines", "backend"),
    [
        ([(0, 26, 0), (0, 28, 0)], "aa", "nccl"),
        ([(0, 26, 0), (0, 26, 0)], "aa", "gloo"),
        # The same bus in another domain is another GPU.
        ([(0, 26, 0), (1, 26, 0)], "aa", "nccl"),
        # So is the same address on another machine of the same name.
        ([(0, 26, 0), (0, 26, 0)], "ab", "nccl"),
    ],
)
def test_workers_that_share_a_gpu_use_gloo_and_others_nccl(addresses, machines, backend, tmp_path) -> None:
    """Join real workers with made-up GPU addresses; NCCL itself is not started."""
    for machine in set(machines):
        (tmp_path / machine).write_text(machine)
    task = {"addresses": addresses, "boots": [str(tmp_path / machine) for machine in machines]}
    asked = run_worker_group(preflights.choose_backend, task, cluster=TWO, name="group", directory=tmp_path)
    assert asked == [backend, backend]


def test_instructions_are_part_of_the_conditions_of_arithmetic() -> None:
    """Two processes, one of which must not use AVX, differ in what torch uses and in the variable that forbids it."""
    code = (
        "import json; from pipeline.process_group import arithmetic_conditions; "
        "print(json.dumps(arithmetic_conditions()))"
    )
    values = []
    for variables in ({}, {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}):
        environment = {**os.environ, **variables}
        output = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        values.append(json.loads(output.stdout.splitlines()[-1]))
    here, other = values
    assert other["instructions of torch"] == "DEFAULT"
    assert (other["ATEN_CPU_CAPABILITY"], other["MKL_CBWR"]) == ("default", "COMPATIBLE")
    assert "MKL_CBWR" not in here
    assert here["processor"] == other["processor"]
