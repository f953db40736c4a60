"""A process that has imported what workers need, and forks the workers of its node: 0.1 s instead of 3 to 6 s each.

    python -m jobs.cluster.fork_server CONNECTION LIFELINE FOLDER [imports]      two inherited file descriptors

1. Its agent (agent.py) starts it; it imports torch, DeepSpeed and more while the driver still prepares.
2. It takes requests from the connection, and answers each:

       Listen("10.0.0.1")        →  Listening(34530)       the socket of the next rank 0's store
       WorkerSpec(rank 3, …)    →  Forked(3, pid=4711)

3. A worker that ends is told of, WorkerEnded(4711, -9), after whatever is left of its process group is killed.
4. When the agent is gone, the lifeline can be read: it kills all workers, removes the node's folder, and ends.

What is imported here must start no thread and touch no GPU: neither outlives a fork. Where workers have GPUs nothing is
imported, and each worker imports for itself: a fork of a process that has never seen CUDA may use it.
"""

import gc
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from data.files import import_path
from jobs.cluster.worker import STOP_SIGNALS, WorkerSpec, outlive, run_worker
from jobs.cluster_config import MALLOC_VARIABLE

# Imported once for all workers, and DeepSpeed with torch's compiler behind them.
PRELOAD = (
    "pipeline.train",  # with the next: what the workers' functions import
    "pipeline.evaluation.worker",
    # It brings sympy, with which a worker works out shapes on the meta device, and counts the products of its model.
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.tensorboard",  # with which rank 0 writes event files
)
IMPORTS = "imports"  # the word by which a fork server is told to import all this
# For workers on CPUs, which keep the memory that a step frees (keep_freed_memory in pipeline/process_group.py):
# - One arena for all threads. Another thread's heaps hold 64 MB at most: whatever is larger goes back to the kernel at
#   once, whatever mallopt was told.
# - No thread sets freed pieces aside. Torch asks for aligned memory, of which malloc cuts off the ends, some 64 bytes.
#   Set aside, they pass for used: a large piece that is freed stays apart from its neighbours, and has some bytes too
#   few for the next request of its own size. The heap then grows by whole tensors every few steps.
MALLOC = {MALLOC_VARIABLE: "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"}


@dataclass(frozen=True)
class Listen:
    """Asks for a socket at this address, on which rank 0 of the next attempt serves the workers' store."""

    address: str


@dataclass(frozen=True)
class Listening:
    port: int


@dataclass(frozen=True)
class Forked:
    rank: int
    pid: int


@dataclass(frozen=True)
class WorkerEnded:
    pid: int
    exit_code: int  # negative: the signal that killed it


# ------------------------------------------------------------------------ in the agent


class ForkServer:
    """A fork server as its agent sees it: a child process, and a connection of requests and answers."""

    def __init__(self, folder: Path, *, has_gpus: bool) -> None:
        """Start the process; `folder` is removed when it ends. For workers with GPUs it imports nothing ahead."""
        ours, theirs = socket.socketpair()
        lifeline, self.lifeline = os.pipe()
        self.connection = Connection(ours.detach())
        words = [sys.executable, "-m", "jobs.cluster.fork_server", str(theirs.fileno()), str(lifeline), str(folder)]
        environment = {**os.environ, "PYTHONPATH": import_path()}
        if not has_gpus:
            words.append(IMPORTS)
            # DeepSpeed chooses its accelerator when it is imported, which happens here for all workers. Of what malloc
            # is told it takes the last, so the user's own settings come first.
            settings = [environment.get(MALLOC_VARIABLE), MALLOC[MALLOC_VARIABLE]]
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
            environment[MALLOC_VARIABLE] = ":".join(filter(None, settings))
        self.process = self.launch(words, environment, (theirs.fileno(), lifeline))
        theirs.close()
        os.close(lifeline)

    def launch(
        self, words: Sequence[str], environment: Mapping[str, str], handles: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """Start the process, which inherits these file descriptors."""
        # A new process inherits which signals are blocked; this one unblocks them when it has handlers.
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return subprocess.Popen(
                words,
                env=environment,
                pass_fds=handles,
                stdin=subprocess.DEVNULL,
                # A signal to the driver's whole process group, as of `timeout` or Ctrl-C, is not for the workers.
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)

    def close(self) -> None:
        """End the process with all its workers, and wait for that."""
        with suppress(OSError):
            os.close(self.lifeline)
        self.process.wait()
        self.connection.close()


# ------------------------------------------------------------------------ in the fork server


def main(arguments: Sequence[str]) -> None:
    """Import, then serve."""
    connection, lifeline, folder, *words = arguments
    # Who stops a job may signal all its processes. The driver tells the workers when to end.
    for number in STOP_SIGNALS:
        signal.signal(number, outlive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if IMPORTS in words:
        import_for_workers()
    # What is here now is shared by all forks: the collector need not touch it, which would copy its pages.
    gc.freeze()
    serve(Connection(int(connection)), int(lifeline), Path(folder))


def import_for_workers() -> None:
    """Import once what all workers need. What is missing is missing in the worker too, whose error has a rank."""
    for name in PRELOAD:
        with suppress(Exception):
            importlib.import_module(name)
    with suppress(Exception):
        from pipeline.engine.deepspeed import import_deepspeed

        import_deepspeed()


def serve(connection: Connection, lifeline: int, folder: Path) -> None:
    """Take requests until the agent is gone; then kill every worker, and remove the node's folder."""
    store: socket.socket | None = None  # where the next rank 0 will serve
    pids: set[int] = set()  # workers that have not been reaped
    # Written by workers, a byte each time, and by the arrival of SIGCHLD.
    news, news_writer = os.pipe()
    deaths, deaths_writer = os.pipe()
    os.set_blocking(deaths_writer, False)
    signal.set_wakeup_fd(deaths_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, outlive)
    try:
        while True:
            ready = wait([connection, lifeline, news, deaths])
            if lifeline in ready:
                return
            if news in ready:
                os.read(news, 4096)
                connection.send(None)  # a worker has left something in the node's folder

            # One signal may stand for several workers that have ended: all are asked.
            if deaths in ready:
                os.read(deaths, 4096)
                for pid in list(pids):
                    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                        continue
                    # Before the pid may be given to another process: the worker's loaders are in its group.
                    kill_group(pid)
                    _, status = os.waitpid(pid, 0)
                    pids.discard(pid)
                    connection.send(WorkerEnded(pid, os.waitstatus_to_exitcode(status)))

            if connection not in ready:
                continue
            request = connection.recv()
            if isinstance(request, Listen):
                # A cluster may have IPv6 alone, and then its nodes' addresses are "fd00::2".
                store = socket.socket(socket.AF_INET6 if ":" in request.address else socket.AF_INET)
                store.bind((request.address, 0))
                store.listen()
                connection.send(Listening(store.getsockname()[1]))
                continue
            assert isinstance(request, WorkerSpec), request
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    # The agent learns of the server's death by the end of this connection, which no worker may hold.
                    connection.close()
                    for handle in (news, deaths, deaths_writer):
                        os.close(handle)
                    run_worker(request, store, lifeline, news_writer)
                finally:
                    # What has come here has no worker's record; the exit code has to do.
                    os._exit(1)
            pids.add(pid)
            if request.info.rank == 0 and store is not None:
                store.close()
                store = None
            connection.send(Forked(request.info.rank, pid))
    except (EOFError, OSError):
        return  # the agent is gone
    finally:
        for pid in pids:
            kill_group(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def kill_group(pid: int) -> None:
    """Kill a worker and all processes that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    # A worker that has not come as far as its own process group is killed by itself.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    # Under its own name: workers and what they pickle know these classes by it, and not as those of `__main__`.
    from jobs.cluster import fork_server

    fork_server.main(sys.argv[1:])
