"""One attempt of a stage on N workers: what each is told, what each leaves behind, and who was to blame.

Every worker writes `rank-00003.json` into the attempt's folder when it starts (node, pid) and again when it
ends (value, or error and traceback), and keeps `rank-00003.log` open for a crash to write its stack into. The
verdict on a failed worker group is read from these files, so it is the same whatever ran the workers.
"""

import faulthandler
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil

from data.files import write_whole

Function = Callable[[dict[str, Any]], Any]
Tick = Callable[[], None]

LOOPBACK = "127.0.0.1"
VMSTAT = Path("/proc/vmstat")  # counts the kills of every cgroup, and any container can read it
PEER_GRACE_S = 1.5  # a dead peer makes the others raise within 0.1 s; they wait this long, so that its death is seen


class WorkerGroupError(Exception):
    """A worker ended an attempt, and the whole worker group is dead.

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
        self.rank, self.node, self.cause, self.traceback = rank, node, cause, traceback
        self.exit_code, self.kind = exit_code, kind
        self.place = ""  # where the worker was, as far as the driver knows: "backward of step 12"

    def __str__(self) -> str:
        who = f"worker {self.rank} on {self.node}" if self.rank is not None else "the worker group"
        return f"{who}{', in ' if self.place else ''}{self.place}: {self.cause}"


@dataclass(frozen=True)
class ClusterConfig:
    workers: int = 1  # processes that train together, each a rank
    backend: Literal["ray", "processes"] = "ray"  # Ray, embedded or joined; or plain processes of this machine
    cpus_per_worker: int = 1  # reserved in Ray, and the threads a worker computes with
    gpus_per_worker: int = 0  # reserved in Ray; 0: workers compute on the CPU
    max_restarts: int = 3  # attempts in a row that may end without a new checkpoint
    backoff_s: float = 10.0  # before the first restart; doubles with each
    start_timeout_s: float = 300.0  # how long to wait for the workers' resources, and for them to start

    RESUME: ClassVar[Mapping[str, str]] = dict.fromkeys(
        [
            "workers",
            "backend",
            "cpus_per_worker",
            "gpus_per_worker",
            "max_restarts",
            "backoff_s",
            "start_timeout_s",
        ],
        "free",
    )

    def __post_init__(self) -> None:
        for name, least in {
            "workers": 1,
            "cpus_per_worker": 1,
            "gpus_per_worker": 0,
            "max_restarts": 0,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {least} or more")


@dataclass(frozen=True)
class Seat:
    """One worker's place in the worker group."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int
    address: str  # of the worker's own node, as the other workers reach it
    threads: int
    gpus: int

    def environment(self) -> dict[str, str]:
        """What torch.distributed and DeepSpeed read, all but MASTER_ADDR and MASTER_PORT."""
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world,
            "NODE_RANK": self.node_rank,
            "OMP_NUM_THREADS": self.threads,
        }
        without_gpu = {} if self.gpus else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        return {name: str(number) for name, number in numbers.items()} | without_gpu


# ------------------------------------------------------------------------ in the worker


def work(function: Function, config: dict[str, Any], folder: Path, seat: Seat) -> Any:
    """Run `function(config)` in this process as `seat`, leaving its start and its end in `folder`.

    torch.distributed is not initialised here: the function does it, from the environment. Its value is JSON.
    """
    _take(seat)
    record = {"rank": seat.rank, "node": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
    record["oom_kills"] = oom_kills()
    _write(folder, record)
    with _path(folder, seat.rank, ".log").open("a", buffering=1) as log:
        faulthandler.enable(log)
        try:
            value = function(config)
            _write(folder, record | {"ended": time.time(), "value": value})
            return value
        except BaseException as error:
            failure = _failure(error)
            _write(folder, record | {"ended": time.time()} | failure)
            if failure["exit_code"] is None and seat.world > 1:
                time.sleep(PEER_GRACE_S)
            raise
        finally:
            faulthandler.enable()


def _take(seat: Seat) -> None:
    os.environ.update(seat.environment())
    # Where the host's name does not resolve, gloo looks for its peers on the loopback: name the interface.
    address = LOOPBACK if seat.address.startswith("127.") else seat.address
    for interface, found in psutil.net_if_addrs().items():
        if any(a.address == address for a in found):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    import torch

    torch.set_num_threads(seat.threads)  # a forked worker has torch already, which no longer reads the variable


def _failure(error: BaseException) -> dict[str, Any]:
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", None)
    return {
        "exit_code": code if isinstance(code, int) else None,
        "kind": type(error).__name__,
        "error": str(error),
        "traceback": traceback.format_exc(),
    }


# ------------------------------------------------------------------------ in the driver


def records(folder: Path, world: int) -> dict[int, dict[str, Any]]:
    """What the workers have written so far, by rank."""
    paths = {rank: _path(folder, rank, ".json") for rank in range(world)}
    found = {}
    for rank, path in paths.items():
        with suppress(OSError, ValueError):  # not there yet; or a shared folder stutters, and the next look has it
            found[rank] = json.loads(path.read_text())
    return found


def verdict(folder: Path, world: int, dead: Mapping[int, str]) -> WorkerGroupError:
    """Who ended the attempt; `dead` says how workers died that could not say so themselves.

    A death comes before an error, because it makes the peers raise; a wanted exit before a crash; then the
    earliest.
    """
    left = records(folder, world)
    failed = [record for record in left.values() if "error" in record]
    silent = [rank for rank in sorted(dead) if "ended" not in left.get(rank, {})]
    if silent or not failed:
        rank = (silent or sorted(dead) or [0])[0]
        return blame(folder, rank, left, dead.get(rank, "ended without a word"))
    first = min(failed, key=lambda record: (record["exit_code"] is None, record["ended"]))
    cause = f"{first['kind']}: {first['error']}".rstrip(": ")
    return WorkerGroupError(
        first["rank"],
        first["node"],
        cause,
        first["traceback"],
        exit_code=first["exit_code"],
        kind=first["kind"],
    )


def blame(folder: Path, rank: int, left: Mapping[int, Mapping[str, Any]], cause: str) -> WorkerGroupError:
    """The verdict on a worker that cannot speak for itself, with the stacks that its log holds."""
    log = _path(folder, rank, ".log")
    stack = log.read_text(errors="replace")[-10_000:] if log.exists() else ""
    return WorkerGroupError(rank, node_of(left, rank), cause, stack)


def node_of(left: Mapping[int, Mapping[str, Any]], rank: int) -> str:
    """Where a worker runs, as far as its record says."""
    return left.get(rank, {}).get("node", "an unknown node")


def terminate_workers(folder: Path, world: int, timeout_s: float = 10.0) -> None:
    """Return when no worker of the worker group lives on this host, killing after `timeout_s` what still does."""
    host = socket.gethostname()
    workers = [_process(record) for record in records(folder, world).values() if record["node"] == host]
    _, alive = psutil.wait_procs([worker for worker in workers if worker is not None], timeout=timeout_s)
    for worker in alive:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


def _process(record: Mapping[str, Any]) -> psutil.Process | None:
    """The process that wrote the record, unless it is gone and its pid perhaps another's."""
    try:
        process = psutil.Process(record["pid"])
        return process if process.create_time() <= record["started"] else None
    except psutil.NoSuchProcess:
        return None


def frozen(record: Mapping[str, Any]) -> bool:
    """Whether the worker that wrote the record is stopped by a signal; False where this host cannot know."""
    process = _process(record) if record.get("node") == socket.gethostname() else None
    with suppress(psutil.Error):
        return process is not None and process.status() == psutil.STATUS_STOPPED
    return False


def died(exitcode: int, oom: bool = False) -> str:
    """An exit code of a process in words; `oom`: the kernel has killed somebody for want of memory meanwhile."""
    if exitcode >= 0:
        return f"exited with code {exitcode} without a word"
    if oom and exitcode == -signal.SIGKILL:
        return "killed by the out-of-memory killer"
    return f"killed by {signal.Signals(-exitcode).name}"


def oom_kills() -> int:
    """How many processes of this machine the kernel has killed for want of memory; 0 where it does not say."""
    with suppress(OSError):
        for line in VMSTAT.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _path(folder: Path, rank: int, suffix: str) -> Path:
    return folder / f"rank-{rank:05d}{suffix}"


def _write(folder: Path, record: dict[str, Any]) -> None:
    write_whole(_path(folder, record["rank"], ".json"), json.dumps(record))
