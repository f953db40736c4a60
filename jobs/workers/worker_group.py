"""One attempt of a stage on N workers: what each is told, and what each leaves behind.

1. The driver makes the attempt's folder and starts N workers (processes.py or jobs/cluster/ray_backend.py). All get the
   same function and the same task; each gets its own RankInfo.
2. In the worker, `worker_records` prepares the process for its rank: environment, threads, network interface.
3. It writes a record into the attempt's folder when the worker starts, and once more when it ends (worker_files.py).
4. The driver reads the records: rank 0's value when all has gone well, otherwise who failed first (failures.py).
"""

import faulthandler
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from data.errors import ClusterError
from data.files import refusal
from jobs.cluster_config import ClusterConfig
from jobs.workers.worker_files import SeenRecords, WorkerRecord, oom_kills, worker_file, write_record
from pipeline.checkpoints.shared_storage_check import SAME_STORAGE, look_for

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Task = dict[str, Any]  # what the workers of an attempt are told; JSON
WorkerFunction = Callable[[Task], object]  # importable by its module's name; what it returns is JSON

LOOPBACK = "127.0.0.1"
LONGEST_TRACEBACK = 10_000  # characters, from the end
PEER_GRACE_S = 1.5  # a dead peer makes the others raise within 0.1 s; they wait this long, so that its death is seen


class RunWorkerGroup(Protocol):
    """The contract of both backends: run `function(task)` once in every worker and return rank 0's value.

    Workers find RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT in their
    environment, and initialise torch.distributed themselves; under Ray they run outside the main thread. The folder
    of `seen` exists and is new with every call. All nodes share it; where they do not (`is_shared`), each has a folder
    of its own under the same path, and the caller's comes to hold copies of what workers leave in theirs, and in the
    stage's folder around it (node_files.py). About every 0.5 s `seen` looks at the records there, and `on_tick` runs,
    in the caller's thread; what it raises ends the worker group and comes out here.

    Raises WorkerGroupError, naming the worker that failed first, with the exit code it wanted if it did. However
    this returns, no worker is alive.
    """

    def __call__(
        self,
        function: WorkerFunction,
        task: Task,
        *,
        cluster: ClusterConfig,
        seen: SeenRecords,
        on_tick: Callable[[], None],
        is_shared: bool = True,
    ) -> object: ...


class WorkerGroupError(Exception):
    """A worker has ended an attempt, and no worker is alive.

    `exit_code` is what the worker asked for, by SystemExit or by an exception that has an `exit_code`; None
    for a crash, a signal, a lost node. `kind` is the exception's class name, "" where none was raised.
    """

    def __init__(
        self,
        rank: int | None,
        node: str,
        cause: str,
        traceback: str = "",
        *,
        exit_code: int | None = None,
        kind: str = "",
    ) -> None:
        super().__init__(cause)
        self.rank = rank  # None where no single worker is to blame
        self.node = node
        self.cause = cause
        self.traceback = traceback
        self.exit_code = exit_code
        self.kind = kind
        self.place = ""  # where the worker was, as far as the driver knows: "backward of step 12"

    def __str__(self) -> str:
        worker = "the worker group"
        if self.rank is not None:
            worker = f"worker {self.rank} on {self.node}"
        if self.place:
            worker += f", in {self.place}"
        return f"{worker}: {self.cause}"


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

    def environment(self) -> dict[str, str]:
        """Return what torch.distributed and DeepSpeed read, all but where the workers meet (`meeting_place`)."""
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
        return variables


@dataclass
class WorkerResult:
    """Takes the value that a worker's function returns."""

    value: object = None


# ------------------------------------------------------------------------ in the worker


def require_folder(folder: Path) -> None:
    """Raise ClusterError where the attempt's folder, which the driver has made, is not there on this node."""
    # With patience, because a network file system may show it late.
    unseen, waited_s = look_for(folder.parent, {folder.name: None})
    if unseen:
        raise ClusterError(
            f"{folder}, which the driver has made, is not there on {socket.gethostname()} after {waited_s:.0f} s\n"
            f"  {SAME_STORAGE}"
        )


@contextmanager
def worker_records(folder: Path, info: RankInfo) -> Iterator[WorkerResult]:
    """Prepare this process for its rank, and write down the start and the end of the block that runs the function.

    The block sets the result's `value`, which must be JSON. It initialises torch.distributed itself, from the
    environment. What it raises is written down and raised again.
    """
    _prepare_process(info)
    start: WorkerRecord = {
        "rank": info.rank,
        "node": socket.gethostname(),
        "node_id": info.node_id,
        "address": info.address,
        "pid": os.getpid(),
        "started": time.time(),
        "oom_kills": oom_kills(),
    }
    # From here on the driver knows which process is which rank, and may kill it or ask how it is.
    write_record(folder, start)
    result = WorkerResult()
    with worker_file(folder, info.rank, ".log").open("a", buffering=1) as log:
        # A crash in C leaves no exception, only what Python's fault handler writes.
        faulthandler.enable(log)
        try:
            yield result
            # A value that is not JSON raises here, and so is the worker's own error.
            write_record(folder, {**start, "ended": time.time(), "value": result.value})
        except BaseException as error:
            wanted = _wanted_exit_code(error)
            end: WorkerRecord = {
                **start,
                "ended": time.time(),
                "exit_code": wanted,
                "kind": type(error).__name__,
                "error": refusal(error) if isinstance(error, OSError) else str(error),
                "traceback": traceback.format_exc()[-LONGEST_TRACEBACK:],
            }
            write_record(folder, end)
            # This may only be the echo of a peer's death: the driver must see that death before it sees our end.
            if wanted is None and info.world > 1:
                time.sleep(PEER_GRACE_S)
            raise
        finally:
            # The log is about to be closed, and the handler would write into whatever gets its number next.
            faulthandler.enable()


def _prepare_process(info: RankInfo) -> None:
    os.environ.update(info.environment())
    # Where the host's name does not resolve, gloo looks for its peers on the loopback: name the interface.
    for interface, interface_addresses in psutil.net_if_addrs().items():
        if any(entry.address == info.address for entry in interface_addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # A forked worker has torch already, which no longer reads OMP_NUM_THREADS: it has to be told.
    import torch

    torch.set_num_threads(info.threads)


def _wanted_exit_code(error: BaseException) -> int | None:
    """Return the exit code that an exception asks for; None where it is a failure like any other."""
    code = getattr(error, "exit_code", None)
    if isinstance(error, SystemExit):
        code = error.code
    if isinstance(code, int):
        return code
    # sys.exit("a text") counts as a failure.
    return None


def serve_store(address: str) -> "TCPStore":
    """Serve the store in which the workers of a group find each other, as long as the returned object lives.

    torch's rank 0 would serve one on all interfaces, to whoever asks; this one listens on `address` alone.
    """
    from torch.distributed import TCPStore

    # A cluster may have IPv6 alone, and then its nodes' addresses are "fd00::2".
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    server.bind((address, 0))
    server.listen()
    port = server.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def meeting_place(address: str, port: int) -> dict[str, str]:
    """Return the environment that leads torch.distributed in every worker to the store of `serve_store`."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # torchrun's word for a store that somebody else serves; without it rank 0 opens one of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


# ------------------------------------------------------------------------ in the driver


def do_nothing() -> None:
    """Stand in for an `on_tick` where nobody looks."""
