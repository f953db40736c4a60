"""A worker: a forked process with a rank, which runs one function in an attempt of a stage.

1. The fork server (fork_server.py) forks. The new process leads a separate process group and dies with its agent.
2. It sets its environment, working directory and umask, and redirects its output to `rank-00003.log`.
3. It writes a record to the attempt's folder when it starts, and again when its function returns or raises:

       {"rank": 3, "node": "n1", "pid": 4711, "started": 1763800000.0}
       … and "ended": 1763800100.0, "value": {"step": 40}
       … or "ended": 1763800100.0, "exit_code": 65, "kind": "DataError", "error": "…", "traceback": "…"

   These records are meant for people. The agent reads a copy in the node's folder, which is local to the node. The
   worker also reports its phase there (pipeline/monitoring/watchdog.py).
4. It waits until the agent kills it. Until then, rank 0 serves the store through which the workers find each other, and
   the connections of a failed worker stay open, so that its peers do not fail too.
"""

import faulthandler
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, NotRequired, TypedDict

import psutil

from data.checks import encodable
from data.errors import ClusterError
from data.files import SAME_STORAGE, error_text, look_for, write_with_reserve
from pipeline.monitoring.watchdog import NODE_FOLDER

Task = dict[str, Any]  # JSON document sent to the workers of an attempt
WorkerFunction = Callable[[Task], object]  # importable by its module's name; returns JSON

LOOPBACK = "127.0.0.1"
MAX_TRACEBACK_LENGTH = 10_000  # characters, counted from the end
MAX_ERROR_LENGTH = 4_000  # characters, half of them from the end, which says what to do; compilers write megabytes
RECORD_RESERVE_BYTES = 16_384  # space reserved in a worker's record for its error and traceback
# Slurm, and Ctrl-C in a terminal, send these signals to all processes of a job.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class WorkerRecord(TypedDict):
    """The content of `rank-00003.json`; times are seconds since 1970 on the worker's clock."""

    rank: int
    node: str
    node_id: NotRequired[str]  # RankInfo.node_id
    address: NotRequired[str]  # RankInfo.address
    pid: int
    started: float
    ended: NotRequired[float]
    value: NotRequired[object]  # if the worker's function returned
    exit_code: NotRequired[int | None]  # this and the next three fields: if the worker raised
    kind: NotRequired[str]
    error: NotRequired[str]
    traceback: NotRequired[str]


@dataclass(frozen=True)
class RankInfo:
    """A worker's rank and position in the worker group, and the resources that the worker may use."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int
    address: str  # address of this worker's node for the other workers
    threads: int
    gpus: int
    node_id: str = ""  # Ray's node id, because node names may repeat; "" without Ray
    visible_gpus: str = ""  # CUDA_VISIBLE_DEVICES, if Ray has assigned GPUs

    def environment(self) -> dict[str, str]:
        """Return the variables that torch.distributed and DeepSpeed read, except for MASTER_ADDR and MASTER_PORT."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "NODE_RANK": str(self.node_rank),
            "OMP_NUM_THREADS": str(self.threads),
        }
        # Hide the GPUs, because Ray is configured not to hide them (RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO).
        if not self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""
            variables["DS_ACCELERATOR"] = "cpu"
        elif self.visible_gpus:
            # Every worker sees the GPUs of all workers on its node, so that LOCAL_RANK is the device number.
            variables["CUDA_VISIBLE_DEVICES"] = self.visible_gpus
        return variables


@dataclass(frozen=True)
class WorkerSpec:
    """The data that a forked worker needs to start."""

    info: RankInfo
    payload: bytes  # pickled (function, task), so that agent and fork server need not import the function
    folder: Path  # the attempt's folder
    node_folder: Path  # the attempt's folder on this node only
    environment: dict[str, str]
    directory: str  # the working directory
    umask: int
    is_shared: bool  # the attempt's folder is the same on every node


def worker_file(folder: Path, rank: int, suffix: str) -> Path:
    """Return the path of a worker's file in a folder, such as `rank-00003.log`."""
    return folder / f"rank-{rank:05d}{suffix}"


_stores: list[Any] = []  # rank 0's store, referenced here to keep it alive


def run_worker(spec: WorkerSpec, server: socket.socket | None, lifeline: int, news: int) -> None:
    """Run one worker in a newly forked process; never returns.

    In rank 0, `server` is the socket of the store through which the workers find each other. `lifeline` becomes
    readable when the agent is gone. A byte written to `news` makes the agent read the node's folder.
    """
    # Start a new process group, which includes this worker's data loaders and is killed as a whole.
    os.setsid()
    info = spec.info
    os.environ.clear()
    os.environ.update(spec.environment | info.environment() | {NODE_FOLDER: str(spec.node_folder)})
    os.chdir(spec.directory)
    os.umask(spec.umask)

    # Ignore signals sent to all processes of a machine, but report SIGTERM to the agent at once. A Python handler would
    # run only after a collective returns; the file descriptor of `set_wakeup_fd` is written by the signal itself.
    for number in STOP_SIGNALS:
        signal.signal(number, ignore_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    signals, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    sigterm_file = worker_file(spec.node_folder, info.rank, ".sigterm")
    threading.Thread(target=_listen, args=(lifeline, signals, sigterm_file, news), daemon=True).start()

    record: WorkerRecord = {
        "rank": info.rank,
        "node": socket.gethostname(),
        "node_id": info.node_id,
        "address": info.address,
        "pid": os.getpid(),
        "started": time.time(),
    }
    trace = ""
    try:
        _prepare(spec)
        _write_record(spec, record)
        os.write(news, b".")
        if info.rank == 0:
            from torch.distributed import TCPStore

            # By default, torch's rank 0 serves the store on all interfaces. Use the fork server's socket instead, which
            # is bound to one address.
            assert server is not None
            address, port = server.getsockname()[:2]
            handle = server.detach()
            _stores.append(TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=handle))
        function, task = pickle.loads(spec.payload)
        value = function(task)
        end: WorkerRecord = {**record, "ended": time.time(), "value": value}
        # If the value is not JSON, this raises, so that it is reported as this worker's error.
        json.dumps(end)
    except BaseException as error:
        # Both may contain names of files.
        trace = encodable(traceback.format_exc())
        text = encodable(error_text(error) if isinstance(error, OSError) else str(error))
        if len(text) > MAX_ERROR_LENGTH:
            text = f"{text[: MAX_ERROR_LENGTH // 2]} … {text[-MAX_ERROR_LENGTH // 2 :]}"
        exit_code = getattr(error, "exit_code", None)
        if isinstance(error, SystemExit):
            exit_code = error.code
        end = {
            **record,
            "ended": time.time(),
            # sys.exit("some text") is reported like a failure without an exit code. So is sys.exit(0): the function has
            # not returned, and the command must not exit with 0.
            "exit_code": exit_code if isinstance(exit_code, int) and exit_code % 256 else None,
            "kind": type(error).__name__,
            "error": text,
            "traceback": trace[-MAX_TRACEBACK_LENGTH:],
        }
    # Write the record first: if the disk is full, writing to the log raises.
    _write_record(spec, end)
    os.write(news, b".")
    with suppress(OSError, ValueError):  # ValueError: the function has closed the stream
        sys.stderr.write(trace)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # The agent kills this process; see step 4 of the module's docstring.
    while True:
        signal.pause()


def _prepare(spec: WorkerSpec) -> None:
    """Redirect output to the worker's log, and configure torch and gloo.

    Raises ClusterError if the attempt's folder does not appear on this node.
    """
    info = spec.info
    folder = spec.folder
    if spec.is_shared:
        # Retry, because a network file system may show the driver's new folder late.
        unseen, waited_s = look_for(folder.parent, {folder.name: None})
        if unseen:
            raise ClusterError(
                f"the driver's folder {folder} did not appear on {socket.gethostname()} within {waited_s:.0f} s\n"
                f"  {SAME_STORAGE}"
            )
    # Redirect the file descriptors, because C libraries bypass sys.stdout.
    log = os.open(worker_file(folder, info.rank, ".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    # A crash in C code raises no exception; only Python's fault handler reports it.
    faulthandler.enable(2)
    # If the host name does not resolve, gloo uses the loopback interface, so select the right one.
    for interface, interface_addresses in psutil.net_if_addrs().items():
        if any(entry.address == info.address for entry in interface_addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # A forked worker ignores OMP_NUM_THREADS, because torch was imported before the fork.
    import torch

    torch.set_num_threads(info.threads)


def _write_record(spec: WorkerSpec, record: WorkerRecord) -> None:
    """Write a worker's record to the node's folder for the agent, and to the attempt's folder for people."""
    # The first record reserves space, so that the final one can be written even if the disk is full.
    text = json.dumps(record)
    rank = spec.info.rank
    write_with_reserve(worker_file(spec.node_folder, rank, ".json"), text, RECORD_RESERVE_BYTES)
    with suppress(OSError):
        write_with_reserve(worker_file(spec.folder, rank, ".json"), text, RECORD_RESERVE_BYTES)


def _listen(lifeline: int, signals: int, sigterm_file: Path, news: int) -> None:
    """Report SIGTERM to the agent; kill this worker and its data loaders when the agent is gone."""
    # The agent is not this process's parent, so no signal reports its end; the lifeline does.
    while lifeline not in wait([lifeline, signals]):
        if signal.SIGTERM in os.read(signals, 4096):
            # If the in-memory folder is full, only this report is lost.
            with suppress(OSError):
                sigterm_file.touch()
                os.write(news, b".")
    # 0 selects this worker's process group, which includes its data loaders.
    os.killpg(0, signal.SIGKILL)


def ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing; used as a signal handler because, unlike SIG_IGN, child programs do not inherit it."""
