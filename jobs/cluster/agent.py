"""Starts the workers of one node, watches them, and reports to the driver; there is one on every node of a campaign.

Under Ray it is an actor in the campaign's placement group, for plain processes an object in the driver: the same class.

1. It hosts a fork server (fork_server.py), which stays warm from attempt to attempt and from stage to stage.
2. `start` has this node's workers of an attempt forked.
3. `poll` answers after `wait_s`, or at once where a worker has started, ended or been told to go. The answer is small:

       NodeReport(workers=[WorkerState(rank=3, pid=4711, place=PhaseReport(812, "reduce", 1200, ""), …), …])

   What befalls a worker is judged here, where it is: its exit code and signal, whether a signal has stopped it, whether
   the kernel's out-of-memory killer has struck.
4. `stop` asks the workers to commit and end, `end` kills what is left of an attempt.

The agent ends with its driver, and its workers end with it (fork_server.py).
"""

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from jobs.cluster.fork_server import Forked, ForkServer, Listen, Listening, WorkerEnded, kill_group
from jobs.cluster.node_files import Change, Mark, NodeFiles
from jobs.cluster.worker import LOOPBACK, RankInfo, WorkerRecord, WorkerSpec, worker_file
from pipeline.monitoring.watchdog import STOP_FILE, PhaseReport, read_phase

VMSTAT = Path("/proc/vmstat")  # counts the kills of every cgroup, and any container can read it
OOM_WINDOW_S = 10.0  # between the kernel's kill and the end that is seen: a large process takes a while to die
OOM_LOOK_S = 1.0  # between two looks at the kernel's counter
MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "pl-agent-"
LOCK = "lock"
END_S = 10.0  # for a worker that was killed to be gone
STATUS = Path("/proc/self/status")  # Linux

_umask_lock = threading.Lock()


@dataclass(frozen=True)
class StartRequest:
    """Tells an agent which workers of an attempt to start."""

    ranks: Sequence[RankInfo]
    payload: bytes  # (function, task), pickled
    folder: Path  # of the attempt
    variables: Mapping[str, str]  # of every worker, beside those of this node
    # Where nodes may have folders of their own: what an attempt's folder there begins with (NodeFiles.begin).
    token: str = ""  # "" where the attempt's folder is the same on every node
    told: Mapping[str, bytes | None] = field(default_factory=dict)
    earlier: Sequence[str] = ()


@dataclass
class WorkerState:
    """How one worker stands, as its node sees it."""

    rank: int
    pid: int = 0  # 0 until it is forked
    record: WorkerRecord | None = None  # as the worker has written it: its start, then its end
    place: PhaseReport | None = None
    is_stopped: bool = False  # by a signal, as SIGSTOP
    death: str = ""  # how it died that did not write its end

    @property
    def has_ended(self) -> bool:
        """Tell whether the worker is done, well or not."""
        return self.death != "" or (self.record is not None and "ended" in self.record)


@dataclass(frozen=True)
class NodeReport:
    """One answer of an agent."""

    news: int  # counts what has happened here; given back with the next poll
    workers: list[WorkerState] = field(default_factory=list)
    told_to_go: list[int] = field(default_factory=list)  # ranks that were sent SIGTERM
    changes: list[Change] = field(default_factory=list)  # of files, where the nodes share none


@dataclass(frozen=True)
class NodeAgent:
    """The agent of one node, as the driver sees it."""

    name: str  # of the node, for people
    node_id: str  # Ray's; "" without Ray
    address: str
    slots: int  # workers that have a place there
    call: Callable[..., "Future[Any]"]  # (method of Agent, its arguments)
    visible_gpus: str = ""  # CUDA_VISIBLE_DEVICES of its workers; "": those that the node's environment shows


class Agent:
    """Runs workers on its node, one attempt at a time. Several threads may call it."""

    def __init__(self, address: str = LOOPBACK, *, has_gpus: bool = False) -> None:
        self.address = address  # of this node, as the workers of others reach it
        self.has_gpus = has_gpus
        self.server: ForkServer | None = None
        self.changed = threading.Condition()  # held wherever what follows is read or written
        self.port = 0  # where the next rank 0 serves its store; 0 until the fork server has said it
        self.news = 0
        self.number = 0  # of attempts that were started here
        self.folder = Path()  # of the attempt
        self.workers: dict[int, WorkerState] = {}  # by rank, of the attempt that runs
        self.ended_pids: set[int] = set()  # of this attempt's workers
        self.files: NodeFiles | None = None
        self.oom_kills = OomKills()

        # This agent's folder, in memory: a disk that is full does not keep a worker from saying where it is. Its lock
        # is held as long as the agent lives.
        parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self.base = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
        self.node_folder = self.base  # of the attempt
        self.lock = os.open(self.base / LOCK, os.O_WRONLY | os.O_CREAT)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        # Agents that were killed with their fork servers have left theirs, whose locks are free.
        for other in parent.glob(f"{FOLDER_PREFIX}*/{LOCK}"):
            # That of another user, or gone meanwhile.
            with suppress(OSError), other.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other.parent, ignore_errors=True)

    def warm_up(self) -> None:
        """Start the fork server where none runs, which takes seconds and is not waited for.

        A process that has touched CUDA must not fork, and importing torch or DeepSpeed may touch it: for workers with
        GPUs nothing is imported ahead.
        """
        with self.changed:
            if self.server is None:
                self.server = ForkServer(self.base, has_gpus=self.has_gpus)
                threading.Thread(target=self._hear, args=(self.server,), name="fork server", daemon=True).start()

    def listen(self) -> int:
        """Return the port at which rank 0 of the next attempt, on this node, will serve the workers' store."""
        self.warm_up()
        with self.changed:
            self.port = 0
            assert self.server is not None
            self.server.connection.send(Listen(self.address))
            # The fork server answers when it has imported everything.
            self.changed.wait_for(lambda: self.port or self.server is None)
            if self.server is None:
                raise RuntimeError(f"the fork server of {socket.gethostname()} has died")
            return self.port

    def start(self, request: StartRequest) -> bool:
        """Have this node's workers of an attempt forked; what is left of the attempt before is ended first.

        Returns whether the attempt's folder is this node's own, and not the driver's.
        """
        self.end()
        self.warm_up()
        with self.changed:
            self.folder = request.folder
            self.files = None
            if request.token:
                files = NodeFiles(request.folder)
                if files.begin(request.token, request.told, request.earlier):
                    self.files = files
            self.number += 1
            assert self.server is not None
            self.node_folder = self.base / str(self.number)
            self.node_folder.mkdir(parents=True)
            # The fork server keeps the environment and the umask of its own start; credentials may have come since.
            environment = {**os.environ, **request.variables}
            for info in request.ranks:
                self.workers[info.rank] = WorkerState(info.rank)
                self.server.connection.send(
                    WorkerSpec(
                        info=info,
                        payload=request.payload,
                        folder=request.folder,
                        node_folder=self.node_folder,
                        environment=environment,
                        directory=os.getcwd(),
                        umask=current_umask(),
                        is_shared=self.files is None,
                    )
                )
            return self.files is not None

    def poll(self, news: int, wait_s: float, taken: Mapping[str, Mark]) -> NodeReport:
        """Return how the workers stand, after `wait_s` or as soon as something has happened since `news`.

        `taken` are the marks of file changes that the driver has written down.
        """
        deadline = time.monotonic() + wait_s
        with self.changed:
            if self.files is not None:
                self.files.take(taken)
            while self.news == news and time.monotonic() < deadline:
                self.changed.wait(min(OOM_LOOK_S, max(0.0, deadline - time.monotonic())))
                self.oom_kills.are_recent()
            self._read_records()
            told_to_go = []
            for worker in self.workers.values():
                worker.place = read_phase(self.node_folder, worker.rank)
                worker.is_stopped = False
                with suppress(psutil.Error):
                    worker.is_stopped = worker.pid != 0 and psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
                if worker_file(self.node_folder, worker.rank, ".sigterm").exists():
                    told_to_go.append(worker.rank)
            changes = self.files.look() if self.files is not None else []
            # Copies: the driver of plain processes has the same objects, and an attempt's end would change them.
            states = [dataclasses.replace(worker) for worker in self.workers.values()]
            return NodeReport(self.news, states, told_to_go, changes)

    def take(self, taken: Mapping[str, Mark]) -> None:
        """Count as sent what the driver has written down."""
        with self.changed:
            if self.files is not None:
                self.files.take(taken)

    def stop(self) -> bool:
        """Ask the workers to commit and end; tell whether any of them has started, as of this moment."""
        with self.changed:
            # All of them look for this file.
            if self.workers:
                (self.node_folder / STOP_FILE).touch()
            self._read_records()
            return any(worker.record is not None for worker in self.workers.values())

    def end(self) -> None:
        """Kill the workers of the attempt, loaders included, and return when they are gone."""
        with self.changed:
            # A worker that is being forked has no pid yet; the fork server answers in the order of the requests.
            self.changed.wait_for(
                lambda: self.server is None or all(state.pid for state in self.workers.values()), END_S
            )
            pids = {state.pid for state in self.workers.values() if state.pid}
            for pid in pids - self.ended_pids:
                kill_group(pid)
            self.changed.wait_for(lambda: self.server is None or pids <= self.ended_pids, END_S)
            # Of a fork server that has died nobody says how its workers end.
            deadline = time.monotonic() + END_S
            for pid in pids - self.ended_pids:
                with suppress(psutil.Error):  # it is gone
                    process = psutil.Process(pid)
                    while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                        time.sleep(0.01)
            self.workers = {}
            self.ended_pids = set()
            self.port = 0
            if self.node_folder != self.base:
                shutil.rmtree(self.node_folder, ignore_errors=True)

    def close(self) -> None:
        """End the fork server with everything on this node."""
        with self.changed:
            server = self.server
            self.server = None
        if server is not None:
            server.close()
        shutil.rmtree(self.base, ignore_errors=True)

    def _hear(self, server: ForkServer) -> None:
        """Take the answers of a fork server until it ends; runs in a thread of its own."""
        with suppress(EOFError, OSError):
            while True:
                answer = server.connection.recv()
                with self.changed:
                    if isinstance(answer, Listening):
                        self.port = answer.port
                    elif isinstance(answer, Forked):
                        self.workers[answer.rank].pid = answer.pid
                    elif isinstance(answer, WorkerEnded):
                        # A worker writes its record before it ends; one that has not was ended by something else. A
                        # negative exit code is a signal. The kernel kills with SIGKILL as well, and tells nobody whom:
                        # its counter is all that can be read everywhere.
                        self._read_records()
                        self.ended_pids.add(answer.pid)
                        if answer.exit_code >= 0:
                            death = f"exited with code {answer.exit_code} without a word"
                        elif answer.exit_code == -signal.SIGKILL and self.oom_kills.are_recent():
                            death = "killed by the out-of-memory killer"
                        else:
                            death = f"killed by {signal.Signals(-answer.exit_code).name}"
                        for worker in self.workers.values():
                            if worker.pid == answer.pid and not worker.has_ended:
                                worker.death = death
                    self.news += 1
                    self.changed.notify_all()

        # The fork server has ended: its workers end by themselves, and are killed in case they do not.
        with self.changed:
            for worker in self.workers.values():
                if worker.pid and not worker.has_ended:
                    kill_group(worker.pid)
                if not worker.has_ended:
                    worker.death = "its node's fork server died (killed, or crashed)"
            has_died = self.server is server
            if has_died:
                self.server = None
            self.news += 1
            self.changed.notify_all()
        if has_died:
            server.close()

    def _read_records(self) -> None:
        for worker in self.workers.values():
            if worker.pid and not worker.has_ended:
                with suppress(OSError, ValueError):
                    worker.record = json.loads(worker_file(self.node_folder, worker.rank, ".json").read_text())


class OomKills:
    """Knows how many processes of this machine the kernel has lately killed for want of memory."""

    def __init__(self) -> None:
        self.counts: deque[tuple[float, int]] = deque()  # (when, kills since the machine started), oldest first
        self.are_recent()

    def are_recent(self) -> bool:
        """Read the kernel's count, and tell whether it has grown in the last ten seconds; not where it cannot be read.

        Called about once a second: the count that it is compared with is at least as old as the window.
        """
        now = time.monotonic()
        kills = 0
        with suppress(OSError):
            for line in VMSTAT.read_text().splitlines():
                if line.startswith("oom_kill "):
                    kills = int(line.split()[1])
        self.counts.append((now, kills))
        while len(self.counts) > 1 and self.counts[1][0] < now - OOM_WINDOW_S:
            self.counts.popleft()
        _, kills_before = self.counts[0]
        return kills > kills_before


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
