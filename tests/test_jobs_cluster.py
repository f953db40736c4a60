"""One function on N workers: the same contract as plain processes and under an embedded Ray."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jobs.cluster import ClusterConfig, ClusterError, GangError, connect, disconnect, run_gang
from tests import gangs

ROOT = Path(__file__).parents[1]
BACKENDS = ["processes", "ray"]
FAILURES = [
    # act, cause, exit code
    ("die", "killed", None),
    ("raise", "ZeroDivisionError: the third batch was empty", None),
    ("stop", "WantsToStop: shard 7 is short", 65),
    ("exit", "SystemExit: 75", 75),
]


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> Iterator[dict[str, ClusterConfig]]:
    """A cluster of two workers for each backend; one Ray for the whole module."""
    yield {backend: ClusterConfig(workers=2, backend=backend) for backend in BACKENDS}
    disconnect()


def alive(folder: Path) -> list[int]:
    pids = [json.loads(path.read_text())["pid"] for path in folder.glob("rank-*.json")]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_find_their_seats_and_each_other(backend, two, tmp_path) -> None:
    ticks = []
    value = run_gang(
        gangs.add_ranks,
        {"x": 3},
        cluster=two[backend],
        name=f"sum-{backend}",
        directory=tmp_path,
        on_tick=lambda: ticks.append(time.monotonic()),
    )
    assert value["sum"] == 1.0 and value["given"] == 3
    assert [value[name] for name in gangs.NAMES[:5]] == ["0", "2", "0", "2", "0"]
    assert value["threads"] == 1 and value["cwd"] == os.getcwd()
    assert value["MASTER_ADDR"].startswith("127.")  # nothing of an embedded gang leaves this machine
    assert ticks and not alive(tmp_path / f"sum-{backend}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("act", "cause", "exit_code"), FAILURES, ids=[f[0] for f in FAILURES])
def test_the_worker_to_blame_is_named_and_its_peers_are_dead(
    backend, act, cause, exit_code, two, tmp_path
) -> None:
    name = f"{act}-{backend}"
    with pytest.raises(GangError) as caught:
        config = {"rank": 1, "act": act}
        run_gang(gangs.wait_for_peers, config, cluster=two[backend], name=name, directory=tmp_path)
    error = caught.value
    assert (error.rank, error.exit_code) == (1, exit_code)
    assert cause in error.cause and str(error).startswith(f"worker 1 on {os.uname().nodename}: ")
    assert act == "die" or "in misbehave" in error.traceback
    assert not alive(tmp_path / name)


def test_a_crash_leaves_its_stack(two, tmp_path) -> None:
    with pytest.raises(GangError) as caught:
        config = {"rank": 0, "act": "crash"}
        run_gang(gangs.wait_for_peers, config, cluster=two["processes"], name="crash", directory=tmp_path)
    assert caught.value.rank == 0 and caught.value.cause == "killed by SIGSEGV"
    assert "in misbehave" in caught.value.traceback


def test_a_value_that_is_not_json_is_the_workers_error(two, tmp_path) -> None:
    with pytest.raises(GangError, match="not JSON serializable"):
        run_gang(gangs.return_a_path, {}, cluster=two["processes"], name="path", directory=tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_on_tick_raises_ends_the_gang_at_once(backend, two, tmp_path) -> None:
    folder = tmp_path / "hang"

    def give_up_on_a_hang() -> None:
        if len(list(folder.glob("rank-*.json"))) == 2:
            raise TimeoutError("rank 1 hangs")

    with pytest.raises(TimeoutError):
        run_gang(
            gangs.wait_for_peers,
            {"rank": 1, "act": "hang"},
            cluster=two[backend],
            name="hang",
            directory=tmp_path,
            on_tick=give_up_on_a_hang,
        )
    assert not alive(folder)


def test_a_name_is_used_once(two, tmp_path) -> None:
    (tmp_path / "twice").mkdir()
    with pytest.raises(FileExistsError):
        run_gang(gangs.add_ranks, {"x": 0}, cluster=two["processes"], name="twice", directory=tmp_path)


# -------------------------------------------------------------------------------- what is too small or absent


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_gpu_is_said_with_what_to_type(backend, tmp_path) -> None:
    cluster = ClusterConfig(workers=64, gpus_per_worker=1, backend=backend)
    with pytest.raises(ClusterError, match=r"(0 of 64 GPUs|want 64 GPUs)[\s\S]*type .*cluster.workers"):
        run_gang(gangs.add_ranks, {"x": 0}, cluster=cluster, name="gpu", directory=tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("workers", 0), ("cpus_per_worker", 0), ("gpus_per_worker", -1)]
)
def test_a_size_that_makes_no_sense_is_refused(field, value) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}, expected"):
        ClusterConfig(**{field: value})


# -------------------------------------------------------------------------------------- nothing is left behind

DRIVER = """
    import sys, time
    from pathlib import Path
    from jobs.cluster import ClusterConfig, connect, run_gang
    from tests import gangs

    if __name__ == "__main__":
        backend, folder = sys.argv[1], Path(sys.argv[2])
        cluster = ClusterConfig(workers=2, backend=backend)
        config = {"ready": str(folder / "ready"), "stop": str(folder / "stop")}
        run_gang(gangs.sleep_until_told, config, cluster=cluster, name="a", directory=folder)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_driver_leaves_no_process(backend, tmp_path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    command = [sys.executable, str(script), backend, str(tmp_path)]
    driver = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    try:
        wait_until(lambda: (tmp_path / "ready").exists() or driver.poll() is not None, 120)
        family = psutil.Process(driver.pid).children(recursive=True)
        assert len(family) >= 3  # two workers and what carries them
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    gone, left = psutil.wait_procs(family, timeout=20)
    assert not left and gone


def wait_until(claim, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_an_embedded_cluster_ends_with_its_directory_and_its_processes(two) -> None:
    info = connect(two["ray"])
    assert info.embedded and info.dashboard.startswith("http://127.0.0.1:") and info.nodes == 1
    before = [p for p in psutil.Process().children(recursive=True) if "ray" in p.name() or "gcs" in p.name()]
    directories = [
        d for d in Path("/tmp").glob("pl-ray-*") if any(str(d) in " ".join(cmd(p)) for p in before)
    ]
    assert before and directories
    disconnect()
    assert not psutil.wait_procs(before, timeout=10)[1]
    assert not any(d.exists() for d in directories)


def cmd(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
