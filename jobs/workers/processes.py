"""A worker group of plain processes on this machine: seconds to start, the same contract as Ray's.

1. Refuse a worker group that wants more GPUs than this machine has.
2. Start one process a rank. Each leads its own process group, writes to `rank-00003.log`, and dies with the driver.
   They are forks of a fork server, which has imported what they need (preload.py). `start_early` has it begin before
   there is work for it.
3. Twice a second: see whether a worker has ended, and call `on_tick`, which may raise.
4. Kill each worker's process group, whatever has happened.
5. All exit codes are 0: return rank 0's value. Otherwise raise the error of the worker that failed first.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from data.errors import ClusterError
from jobs.cluster_config import ClusterConfig
from jobs.workers.environment import malloc_set
from jobs.workers.failures import describe_exit_code, group_failure
from jobs.workers.worker_files import SeenRecords, oom_kills, rank_zero_value, worker_file
from jobs.workers.worker_group import (
    LOOPBACK,
    PEER_GRACE_S,
    RankInfo,
    Task,
    WorkerFunction,
    meeting_place,
    serve_store,
    worker_records,
)

TICK_S = 0.5
OOM_WINDOW_S = 10.0  # between the kernel's kill and the end that we see: a large process takes a while to die
# Imported once by the fork server, then shared by all its children; the first brings what their functions import.
PRELOAD = ["jobs.stages.fewshot", "jobs.workers.preload"]
# Who stops a job may signal its whole process group, as `timeout`, Slurm and a terminal's Ctrl-C do.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
COMPILER = "torch._dynamo"  # imported there too where a stage needs it: 1.3 CPU-seconds
STATUS = Path("/proc/self/status")  # Linux

_umask_lock = threading.Lock()


def run_worker_group(
    function: WorkerFunction,
    task: Task,
    *,
    cluster: ClusterConfig,
    seen: SeenRecords,
    on_tick: Callable[[], None],
    is_shared: bool = True,
) -> object:
    """Run `function(task)` in every worker and return rank 0's value; see worker_group.RunWorkerGroup.

    All are on this machine, so that they share its folders in any case.
    """
    folder = seen.folder
    _require_gpus(cluster)
    # It listens as long as this function runs: the workers meet there.
    store = serve_store(LOOPBACK)
    workers = _make_workers(function, task, cluster, folder, store.port)
    # Counts once before any worker starts: a kill is seen as a difference, however early it comes.
    recent_oom_kills = RecentOomKills()
    try:
        for worker in workers:
            worker.start()
        while _is_whole(workers):
            recent_oom_kills.look()
            # The end of any worker ends the wait; otherwise it is the pause between two looks.
            alive = [worker.sentinel for worker in workers if worker.is_alive()]
            wait(alive, timeout=TICK_S)
            seen.look()
            on_tick()
        # Read before the kill below: None is a worker that still worked when a peer failed, and not to blame.
        exit_codes = [worker.exitcode for worker in workers]
    finally:
        # A worker that is still alive waits for a dead peer for ever, and its loaders wait for it.
        _kill(workers)

    oom_killer_struck = recent_oom_kills.any()
    deaths = {}
    for rank, exit_code in enumerate(exit_codes):
        if exit_code:
            deaths[rank] = describe_exit_code(exit_code, oom_killer_struck)
    if deaths:
        raise group_failure(folder, cluster.world, deaths)
    return rank_zero_value(folder)


class RecentOomKills:
    """Tells whether the kernel has killed a process of this machine for want of memory in the last ten seconds.

    It goes by the clock and not by the number of looks: a dying worker wakes us before it has an exit code, and up to
    1,000 looks were counted in the 20 ms between.
    """

    def __init__(self) -> None:
        self.counts: deque[tuple[float, int]] = deque()  # (when, kills since the machine started), oldest first
        self.look()

    def look(self) -> None:
        """Remember the count of now, and forget those that are older than the window."""
        now = time.monotonic()
        self.counts.append((now, oom_kills()))
        while self.counts[0][0] < now - OOM_WINDOW_S:
            self.counts.popleft()

    def any(self) -> bool:
        """Compare the count of now with the oldest that is remembered."""
        _, count_before = self.counts[0]
        return oom_kills() > count_before


def _make_workers(
    function: WorkerFunction, task: Task, cluster: ClusterConfig, folder: Path, port: int
) -> list[BaseProcess]:
    context = _process_context(cluster)
    # The fork server keeps the environment and the umask of its own start; credentials may have come since.
    environment = {**os.environ, **cluster.environment, **meeting_place(LOOPBACK, port)}
    umask = current_umask()
    workers = []
    for rank in range(cluster.world):
        info = RankInfo(
            rank=rank,
            world=cluster.world,
            local_rank=rank,
            local_world=cluster.world,
            node_rank=0,
            address=LOOPBACK,
            threads=cluster.cpus_per_worker,
            gpus=cluster.gpus_per_worker,
        )
        process = context.Process(target=_worker, args=(function, task, folder, environment, umask, info))  # type: ignore[attr-defined]
        workers.append(process)
    return workers


def current_umask() -> int:
    """Return this process's umask. Several threads may ask."""
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    # Elsewhere it can only be read by setting it: of two threads at a time one would read the other's 0.
    with _umask_lock:
        umask = os.umask(0)
        os.umask(umask)
    return umask


def _process_context(cluster: ClusterConfig, preload: Sequence[str] = PRELOAD) -> BaseContext:
    # A process that has touched CUDA must not fork, and importing deepspeed may touch it.
    if cluster.gpus_per_worker:
        return multiprocessing.get_context("spawn")
    # DeepSpeed chooses its accelerator when it is imported, which the fork server does for all workers.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    if context.get_start_method() == "forkserver":
        _start_fork_server()
    return context


def _start_fork_server() -> None:
    """Start the fork server, where none runs yet, such that it does not hear what asks the driver to stop.

    It would die, and every worker would pass for dead: the fork server alone sees how its children end.
    """
    # First, because its start would unblock the signals. It ignores them by itself.
    resource_tracker.ensure_running()
    # A new process inherits which signals are blocked; those of the driver come when they are unblocked here.
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with malloc_set():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


def start_early(cluster: ClusterConfig, *, has_compiler: bool = False) -> None:
    """Start the fork server, where workers compute on CPUs: it imports while the driver still prepares their work.

    With `has_compiler` torch's compiler too, for workers that come to need it (`TrainConfig.needs_compiler`).
    """
    if cluster.gpus_per_worker:
        return
    preload = list(PRELOAD)
    if has_compiler:
        preload.append(COMPILER)
    _process_context(cluster, preload)


def _worker(
    function: WorkerFunction, task: Task, folder: Path, environment: dict[str, str], umask: int, info: RankInfo
) -> None:
    """Be one worker: lead a process group, die with the driver, write to the worker's own log, run the function."""
    # Loaders that this worker starts then belong to its process group, and are killed with it.
    os.setsid()
    # The fork server's environment is out of date: the driver has sent its own (see _make_workers).
    os.environ.clear()
    os.environ.update(environment)
    os.umask(umask)
    # The driver tells the worker group when to stop, and kills it if it must.
    for number in STOP_SIGNALS:
        signal.signal(number, _do_nothing)
    # They are blocked in the fork server; programs that this worker starts must hear them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    # PR_SET_PDEATHSIG would not do: the parent is the fork server, which outlives a killed driver.
    threading.Thread(target=_die_with_driver, daemon=True).start()
    # What C libraries print goes past sys.stdout, so the streams themselves lead to the log.
    log = os.open(worker_file(folder, info.rank, ".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    with worker_records(folder, info) as result:
        result.value = function(task)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal without ending. SIG_IGN would do so as well, but programs that a worker starts inherit it."""


def _die_with_driver() -> None:
    """Kill this worker and its loaders when the driver is gone; no signal tells the child of a fork server."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    wait([driver.sentinel])
    # 0 is this worker's own process group, with the loaders that it has started.
    os.killpg(0, signal.SIGKILL)


def _is_whole(workers: list[BaseProcess]) -> bool:
    """Tell whether no worker has failed and some still work."""
    exit_codes = [worker.exitcode for worker in workers]
    if any(exit_codes):
        # The first to fail gives its peers time to fail as well: one of them may know why.
        time.sleep(PEER_GRACE_S / 3)
        return False
    return None in exit_codes


def _kill(workers: list[BaseProcess]) -> None:
    """Kill each worker's process group, loaders included, and wait until the workers are gone."""
    # When a start fails half way, some workers have no process yet, and cannot be killed or joined.
    started = [worker for worker in workers if worker.pid]
    for worker in started:
        assert worker.pid
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        # A worker that has not come as far as its own process group is killed by itself.
        if worker.is_alive():
            worker.kill()
    for worker in started:
        worker.join()


def gpus_present() -> int:
    """Return how many GPUs this process sees: CUDA_VISIBLE_DEVICES may hide some, and then somebody chose so."""
    import torch

    return torch.cuda.device_count()


def largest_world(cluster: ClusterConfig, worlds: Sequence[int]) -> int:
    """Return the largest of these numbers of workers for which this machine has the GPUs, or the smallest of them."""
    if not cluster.gpus_per_worker:
        return worlds[0]
    workers_that_fit = gpus_present() // cluster.gpus_per_worker
    # The smallest is refused with words when it starts.
    return max([world for world in worlds if world <= workers_that_fit], default=worlds[-1])


def _require_gpus(cluster: ClusterConfig) -> None:
    """Raise ClusterError where this machine has fewer GPUs than the worker group wants."""
    if not cluster.gpus_per_worker:
        return
    wanted = cluster.world * cluster.gpus_per_worker
    present = gpus_present()
    if present < wanted:
        raise ClusterError(
            f"{cluster.world} workers want {wanted} GPUs and this machine has {present}\n"
            f"the processes backend stays on one machine\n"
            f"type cluster.workers={max(1, present // cluster.gpus_per_worker)}, cluster.gpus_per_worker=0 "
            f"or cluster.backend=ray for more machines"
        )
