"""A fork server: a process that imports the workers' modules once and forks a worker in 0.1 s instead of 3 to 6 s.

    python -m jobs.cluster.fork_server CONNECTION LIFELINE FOLDER [imports]      with two inherited file descriptors

1. Its agent (agent.py) starts it. It imports torch, DeepSpeed and other modules while the driver is still preparing.
2. It receives requests through the connection and replies to each:

       Listen("10.0.0.1")        →  Listening(34530)       the port for the next rank 0's store
       WorkerSpec(rank 3, …)    →  Forked(3, pid=4711)

3. When a worker ends, it kills the rest of the worker's process group and sends WorkerEnded(4711, -9).
4. When the agent exits or is killed, the lifeline becomes readable. The server then kills all workers, removes the
   node's folder and exits.

The imports must not start threads or use GPUs, because neither survives a fork. If workers use GPUs, nothing is
imported here and each worker imports separately: a forked process can use CUDA only if its parent has never initialised
it.
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

import psutil

from data.files import import_path
from jobs.cluster.worker import STOP_SIGNALS, WorkerSpec, ignore_signal, run_worker

# Modules imported once for all workers, in addition to DeepSpeed.
PRELOAD = (
    "pipeline.train",  # this and the next: modules of the workers' functions
    "pipeline.evaluation.worker",
    # imports sympy, which workers use to infer shapes on the meta device and to count FLOPs
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.tensorboard",  # used by rank 0 to write event files
)
MALLOC_VARIABLE = "GLIBC_TUNABLES"  # read by glibc's malloc when a process starts
IMPORTS = "imports"  # the argument that enables these imports
# glibc settings for workers on CPUs, which reuse the memory of earlier steps (keep_freed_memory in
# pipeline/process_group.py):
# - One arena for all threads. The heaps of other arenas hold at most 64 MB; larger blocks return to the kernel at once,
#   regardless of mallopt.
# - No per-thread cache. Torch requests aligned memory, from which malloc cuts off remainders of about 64 bytes. Cached
#   remainders count as used, so a freed large block is not merged with its neighbours and is slightly too small for the
#   next request of its size. The heap would then grow by whole tensors every few steps.
MALLOC = {MALLOC_VARIABLE: "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"}


@dataclass(frozen=True)
class Listen:
    """A request to open a socket at this address, on which the next attempt's rank 0 serves the workers' store."""

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
    exit_code: int  # negative: killed by this signal


@dataclass(frozen=True)
class Failed:
    """The last reply of a server that ends because the kernel has refused a request."""

    reason: str


# ------------------------------------------------------------------------ in the agent


class ForkServer:
    """The agent's handle to its fork server: the child process, and a connection for requests and replies."""

    def __init__(self, folder: Path, *, has_gpus: bool) -> None:
        """Start the fork server, which removes `folder` when it ends, and imports nothing if the workers use GPUs."""
        ours, theirs = socket.socketpair()
        lifeline, self.lifeline = os.pipe()
        self.connection = Connection(ours.detach())
        words = [sys.executable, "-m", "jobs.cluster.fork_server", str(theirs.fileno()), str(lifeline), str(folder)]
        environment = {**os.environ, "PYTHONPATH": import_path()}
        if not has_gpus:
            words.append(IMPORTS)
            # DeepSpeed selects its accelerator at import, which happens here for all workers. If a malloc setting is
            # repeated, the last one applies, so ours come after the user's.
            settings = [environment.get(MALLOC_VARIABLE), MALLOC[MALLOC_VARIABLE]]
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
            environment[MALLOC_VARIABLE] = ":".join(filter(None, settings))
        self.process = self.launch(words, environment, (theirs.fileno(), lifeline))
        theirs.close()
        os.close(lifeline)

    def launch(
        self, words: Sequence[str], environment: Mapping[str, str], handles: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """Start the fork server process; it inherits these file descriptors."""
        # Block signals until the new process has installed its handlers; it inherits the mask and unblocks them.
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return subprocess.Popen(
                words,
                env=environment,
                pass_fds=handles,
                stdin=subprocess.DEVNULL,
                # Signals to the driver's process group, from Ctrl-C or `timeout`, must not reach the workers.
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)

    def is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has stopped the process."""
        with suppress(psutil.Error):
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        return False

    def close(self) -> None:
        """Kill the process and all its workers; wait until it has exited."""
        with suppress(OSError):
            os.close(self.lifeline)
        # A stopped process would never see the closed lifeline; its workers do.
        if self.is_stopped():
            self.process.kill()
        self.process.wait()
        self.connection.close()


# ------------------------------------------------------------------------ in the fork server


def main(arguments: Sequence[str]) -> None:
    """Import modules, then fork workers on request."""
    connection, lifeline, folder, *words = arguments
    # Ignore stop signals sent to all processes of a job: the driver decides when workers end.
    for number in STOP_SIGNALS:
        signal.signal(number, ignore_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if IMPORTS in words:
        import_for_workers()
    # Exclude current objects from garbage collection, which would copy the pages that all forks share.
    gc.freeze()
    serve(Connection(int(connection)), int(lifeline), Path(folder))


def import_for_workers() -> None:
    """Import the modules that all workers need; ignore errors, because each worker will raise them with its rank."""
    for name in PRELOAD:
        with suppress(Exception):
            importlib.import_module(name)
    with suppress(Exception):
        from pipeline.engine.deepspeed import import_deepspeed

        import_deepspeed()


def serve(connection: Connection, lifeline: int, folder: Path) -> None:
    """Process requests until the agent is gone; then kill every worker and remove the node's folder."""
    store: socket.socket | None = None  # the socket for the next rank 0
    pids: set[int] = set()  # pids of workers not reaped yet
    action = ""  # what the last request asks for, in an error
    # Two pipes: workers write a byte to the first after each event, and SIGCHLD writes to the second.
    news, news_writer = os.pipe()
    deaths, deaths_writer = os.pipe()
    os.set_blocking(deaths_writer, False)
    signal.set_wakeup_fd(deaths_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, ignore_signal)
    try:
        while True:
            ready = wait([connection, lifeline, news, deaths])
            if lifeline in ready:
                return
            if news in ready:
                os.read(news, 4096)
                connection.send(None)  # a worker has written to the node's folder

            # One SIGCHLD may stand for several ended workers, so check them all.
            if deaths in ready:
                os.read(deaths, 4096)
                for pid in list(pids):
                    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                        continue
                    # Kill the worker's data loaders, which are in its group, before the pid can be reused.
                    kill_group(pid)
                    _, status = os.waitpid(pid, 0)
                    pids.discard(pid)
                    connection.send(WorkerEnded(pid, os.waitstatus_to_exitcode(status)))

            if connection not in ready:
                continue
            request = connection.recv()
            if isinstance(request, Listen):
                action = f"listen at {request.address}"
                # In IPv6-only clusters, addresses look like "fd00::2".
                store = socket.socket(socket.AF_INET6 if ":" in request.address else socket.AF_INET)
                store.bind((request.address, 0))
                store.listen()
                connection.send(Listening(store.getsockname()[1]))
                continue
            assert isinstance(request, WorkerSpec), request
            action = f"start worker {request.info.rank}"
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    # The agent notices the server's death by the end of this connection: workers must not keep it open.
                    connection.close()
                    for handle in (news, deaths, deaths_writer):
                        os.close(handle)
                    run_worker(request, store, lifeline, news_writer)
                finally:
                    # A worker that gets here has written no record, so the agent reports only its exit code.
                    os._exit(1)
            pids.add(pid)
            if request.info.rank == 0 and store is not None:
                store.close()
                store = None
            connection.send(Forked(request.info.rank, pid))
    except (EOFError, ConnectionError):
        return  # the agent is gone
    except OSError as error:
        # For example, the limit on processes is reached, or the node's address belongs to a router.
        with suppress(OSError):
            connection.send(Failed(f"cannot {action}: {error.strerror}"))
    finally:
        for pid in pids:
            kill_group(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def kill_group(pid: int) -> None:
    """Kill a worker and all processes in its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    # Also kill the worker itself, which may not have created its process group yet.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    # Import this file under its real name, because pickled objects refer to its classes by that name.
    from jobs.cluster import fork_server

    fork_server.main(sys.argv[1:])
