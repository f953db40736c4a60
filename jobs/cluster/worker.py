"""One worker: a process that an agent has forked, prepared for its rank, which runs one function of an attempt.

1. The fork server (fork_server.py) forks; the new process leads a process group of its own and dies with its agent.
2. It takes the environment, the folder and the umask of its spec, and writes what it prints to `rank-00003.log`.
3. It leaves a record in the attempt's folder when it starts, and again when its function returns or raises:

       {"rank": 3, "node": "n1", "pid": 4711, "started": 1763800000.0}
       … and "ended": 1763800100.0, "value": {"step": 40}
       … or "ended": 1763800100.0, "exit_code": 65, "kind": "DataError", "error": "…", "traceback": "…"

   People read these records. The agent reads the same record in the node's own folder, which no other node shares and
   where the worker also says in which phase it is (pipeline/monitoring/watchdog.py).
4. Then it waits for its end, which the agent brings. So rank 0 serves the store in which the workers meet for as long
   as any of them needs it, and the peers of a worker that has raised do not raise because its connections close.
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

from data.errors import ClusterError
from data.files import SAME_STORAGE, error_text, look_for, write_with_reserve
from pipeline.monitoring.watchdog import NODE_FOLDER

Task = dict[str, Any]  # what the workers of an attempt are told; JSON
WorkerFunction = Callable[[Task], object]  # importable by its module's name; what it returns is JSON

LOOPBACK = "127.0.0.1"
LONGEST_TRACEBACK = 10_000  # characters, from the end
RECORD_RESERVE_BYTES = 16_384  # in a worker's record, for its error and traceback
# Who stops a job may signal all its processes, as Slurm and a terminal's Ctrl-C do.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class WorkerRecord(TypedDict):
    """What a worker writes into `rank-00003.json`; times are seconds since 1970 on the worker's clock."""

    rank: int
    node: str
    node_id: NotRequired[str]  # RankInfo.node_id
    address: NotRequired[str]  # RankInfo.address
    pid: int
    started: float
    ended: NotRequired[float]
    value: NotRequired[object]  # of a worker that returned
    exit_code: NotRequired[int | None]  # of a worker that raised, as the next three
    kind: NotRequired[str]
    error: NotRequired[str]
    traceback: NotRequired[str]


@dataclass(frozen=True)
class RankInfo:
    """Which worker of the worker group a process is, and what it may use."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int
    address: str  # of the worker's own node, as the other workers reach it
    threads: int
    gpus: int
    node_id: str = ""  # Ray's, which tells a node from another one of the same name; "" without Ray
    visible_gpus: str = ""  # CUDA_VISIBLE_DEVICES, where Ray has chosen among the node's GPUs

    def environment(self) -> dict[str, str]:
        """Return the variables that torch.distributed and DeepSpeed read, but for the place where the workers meet."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "NODE_RANK": str(self.node_rank),
            "OMP_NUM_THREADS": str(self.threads),
        }
        # The worker hides the GPUs itself, because Ray is told not to (RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO).
        if not self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""
            variables["DS_ACCELERATOR"] = "cpu"
        elif self.visible_gpus:
            # All GPUs of the node's workers, so that LOCAL_RANK is the device's number.
            variables["CUDA_VISIBLE_DEVICES"] = self.visible_gpus
        return variables


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a fork of the fork server is told."""

    info: RankInfo
    payload: bytes  # (function, task), pickled: neither the agent nor the fork server imports what they name
    folder: Path  # of the attempt
    node_folder: Path  # of the attempt on this node alone
    environment: dict[str, str]
    directory: str  # the working directory
    umask: int
    is_shared: bool  # the attempt's folder is the same on every node


def worker_file(folder: Path, rank: int, suffix: str) -> Path:
    """Return the path of a file that a worker leaves in a folder: `rank-00003` and the suffix."""
    return folder / f"rank-{rank:05d}{suffix}"


_stores: list[Any] = []  # in the process of rank 0: the store that it serves, as long as the process lives


def run_worker(spec: WorkerSpec, server: socket.socket | None, lifeline: int, news: int) -> None:
    """Be one worker in a process that was just forked; this never returns.

    `server` listens where the workers meet, in rank 0. `lifeline` becomes readable when the agent is gone. A byte
    written to `news` has the agent look at the node's folder.
    """
    # Loaders that this worker starts belong to its process group, and are killed with it.
    os.setsid()
    info = spec.info
    os.environ.clear()
    os.environ.update(spec.environment | info.environment() | {NODE_FOLDER: str(spec.node_folder)})
    os.chdir(spec.directory)
    os.umask(spec.umask)

    # What asks a whole machine's processes to end is ignored, and SIGTERM noted for the agent at once. Python calls a
    # handler only between two of its own instructions, and a worker may sit in a collective; what `set_wakeup_fd` names
    # is written by the signal itself.
    for number in STOP_SIGNALS:
        signal.signal(number, outlive)
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
    try:
        _prepare(spec)
        _write_record(spec, record)
        os.write(news, b".")
        if info.rank == 0:
            from torch.distributed import TCPStore

            # torch's rank 0 would serve a store on all interfaces, to whoever asks; this one listens where the fork
            # server has bound.
            assert server is not None
            address, port = server.getsockname()[:2]
            handle = server.detach()
            _stores.append(TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=handle))
        function, task = pickle.loads(spec.payload)
        value = function(task)
        end: WorkerRecord = {**record, "ended": time.time(), "value": value}
        # A value that is not JSON raises here, and so is the worker's own error.
        json.dumps(end)
    except BaseException as error:
        exit_code = getattr(error, "exit_code", None)
        if isinstance(error, SystemExit):
            exit_code = error.code
        end = {
            **record,
            "ended": time.time(),
            # sys.exit("a text") is a failure like any other.
            "exit_code": exit_code if isinstance(exit_code, int) else None,
            "kind": type(error).__name__,
            "error": error_text(error) if isinstance(error, OSError) else str(error),
            "traceback": traceback.format_exc()[-LONGEST_TRACEBACK:],
        }
        traceback.print_exc()
    _write_record(spec, end)
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(news, b".")
    # The agent ends this process; see the fourth point above.
    while True:
        signal.pause()


def _prepare(spec: WorkerSpec) -> None:
    """Open the worker's log, and prepare torch and gloo for its rank. Raises ClusterError where there is no folder."""
    info = spec.info
    folder = spec.folder
    if spec.is_shared:
        # With patience, because a network file system may show late what the driver has made.
        unseen, waited_s = look_for(folder.parent, {folder.name: None})
        if unseen:
            raise ClusterError(
                f"{folder}, which the driver has made, is not there on {socket.gethostname()} after {waited_s:.0f} s\n"
                f"  {SAME_STORAGE}"
            )
    # What C libraries print goes past sys.stdout, so the streams themselves lead to the log.
    log = os.open(worker_file(folder, info.rank, ".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    # A crash in C leaves no exception, only what Python's fault handler writes.
    faulthandler.enable(2)
    # Where the host's name does not resolve, gloo looks for its peers on the loopback: name the interface.
    for interface, interface_addresses in psutil.net_if_addrs().items():
        if any(entry.address == info.address for entry in interface_addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # A forked worker has torch already, which no longer reads OMP_NUM_THREADS: it has to be told.
    import torch

    torch.set_num_threads(info.threads)


def _write_record(spec: WorkerSpec, record: WorkerRecord) -> None:
    """Write a worker's record into the node's folder, where the agent reads it, and into the attempt's for people."""
    # With room for the end, which is written on a full disk too: the disk may be why the worker ends.
    text = json.dumps(record)
    rank = spec.info.rank
    write_with_reserve(worker_file(spec.node_folder, rank, ".json"), text, RECORD_RESERVE_BYTES)
    with suppress(OSError):
        write_with_reserve(worker_file(spec.folder, rank, ".json"), text, RECORD_RESERVE_BYTES)


def _listen(lifeline: int, signals: int, sigterm_file: Path, news: int) -> None:
    """Note a SIGTERM for the agent, and kill this worker with its loaders when the agent is gone."""
    # No signal tells the child of a fork server that the agent is gone.
    while lifeline not in wait([lifeline, signals]):
        if signal.SIGTERM in os.read(signals, 4096):
            # A node's memory that is full costs the notice, and not the worker.
            with suppress(OSError):
                sigterm_file.touch()
                os.write(news, b".")
    # 0 is this worker's own process group, with the loaders that it has started.
    os.killpg(0, signal.SIGKILL)


def outlive(number: int, frame: FrameType | None) -> None:
    """Handle a signal without ending. SIG_IGN would do so as well, but programs that are started here inherit it."""
