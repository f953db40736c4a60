"""A worker group of plain processes on this machine: seconds to start, the same contract as Ray's."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from data.errors import ClusterError
from jobs.cluster.worker_group import (
    LOOPBACK,
    PEER_GRACE_S,
    ClusterConfig,
    Function,
    Seat,
    Tick,
    died,
    oom_kills,
    verdict,
    work,
)

TICK_S = 0.5
PRELOAD = [
    "torch",
    "torch._dynamo",
    "deepspeed",
]  # imported once, then forked: 3 s a worker group instead of 10 to 25


def run(function: Function, config: dict[str, Any], *, cluster: ClusterConfig, folder: Path, on_tick: Tick) -> None:
    """Run the worker group to its end and leave no worker alive; raises WorkerGroupError when one fails."""
    _require_gpus(cluster)
    workers = _workers(function, config, cluster, folder)
    kills = deque([oom_kills()], maxlen=20)  # ten seconds of looks: a large process takes a while to die
    try:
        for worker in workers:
            worker.start()
        while _running(workers):
            kills.append(oom_kills())
            wait([worker.sentinel for worker in workers if worker.is_alive()], timeout=TICK_S)
            on_tick()
        ended = {rank: worker.exitcode for rank, worker in enumerate(workers)}
    finally:
        _kill(workers)
    dead = {rank: died(code, oom_kills() > kills[0]) for rank, code in ended.items() if code}
    if dead:
        raise verdict(folder, cluster.workers, dead)


def _workers(function: Function, config: dict[str, Any], cluster: ClusterConfig, folder: Path) -> list[BaseProcess]:
    # A process that has touched CUDA must not fork, and importing deepspeed may touch it.
    context: Any = multiprocessing.get_context("spawn" if cluster.gpus_per_worker else "forkserver")
    if not cluster.gpus_per_worker:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # chosen at import, which the forkserver does
        context.set_forkserver_preload(PRELOAD)
    port, world = _free_port(), cluster.workers
    seats = [
        Seat(rank, world, rank, world, 0, LOOPBACK, cluster.cpus_per_worker, cluster.gpus_per_worker)
        for rank in range(world)
    ]
    master = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    # The forkserver keeps the environment of its own start; credentials may have come since.
    task = (function, config, folder, dict(os.environ) | master)
    return [context.Process(target=_worker, args=(*task, seat)) for seat in seats]


def _worker(function: Function, config: dict[str, Any], folder: Path, environment: dict[str, str], seat: Seat) -> None:
    """The life of one worker: leads its own process group, dies with the driver, writes to its own log."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    # Who stops a job signals its whole tree; the driver tells the worker group when to stop, and kills it if it must.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    threading.Thread(target=_die_with_driver, daemon=True).start()
    log = os.open(folder / f"rank-{seat.rank:05d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    work(function, config, folder, seat)


def _die_with_driver() -> None:
    """Kill this worker and its loaders when the driver is gone; no signal tells the child of a forkserver."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    wait([driver.sentinel])
    os.killpg(0, signal.SIGKILL)


def _running(workers: list[BaseProcess]) -> bool:
    """Whether the worker group is still whole; a first failure gets the time in which its peers may tell why."""
    codes = [worker.exitcode for worker in workers]
    if any(codes):
        time.sleep(PEER_GRACE_S / 3)
        return False
    return None in codes


def _kill(workers: list[BaseProcess]) -> None:
    """Kill each worker's process group, loaders included, and wait until the workers are gone."""
    started = [worker for worker in workers if worker.pid]
    for worker in started:
        assert worker.pid
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        if worker.is_alive():
            worker.kill()
    for worker in started:
        worker.join()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind((LOOPBACK, 0))
        return server.getsockname()[1]


def _require_gpus(cluster: ClusterConfig) -> None:
    if not cluster.gpus_per_worker:
        return
    import torch

    wanted, found = cluster.workers * cluster.gpus_per_worker, torch.cuda.device_count()
    if found < wanted:
        raise ClusterError(
            f"{cluster.workers} workers want {wanted} GPUs and this machine has {found}\n"
            f"the processes backend stays on one machine\n"
            f"type cluster.workers={found // cluster.gpus_per_worker or 1}, cluster.gpus_per_worker=0 "
            f"or cluster.backend=ray for more machines"
        )
