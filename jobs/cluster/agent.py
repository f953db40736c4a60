"""A node's agent: starts and monitors the workers on its node, and reports to the driver. Every node has one agent.

On a Ray cluster, the agent is an actor; without Ray, it is an object in the driver. Both use the same class.

1. The agent runs a fork server (fork_server.py), which stays warm between attempts and stages.
2. `start` forks this node's workers for an attempt.
3. `poll` returns after `wait_s`, or at once if a worker has started, ended or received SIGTERM. The report is small:

       NodeReport(workers=[WorkerState(rank=3, pid=4711, phase=PhaseReport(812, "reduce", 1200, ""), …), …])

   The agent determines what can be observed only on the worker's node: the worker's exit code or signal, and whether
   it is suspended by a signal or was killed by the kernel's out-of-memory killer. A suspended fork server is killed and
   replaced.
4. `stop` tells the workers to commit and exit; `end` kills the remaining processes of an attempt.

If the driver exits or is killed, its agents and workers exit too (fork_server.py).
"""

import dataclasses
import fcntl
import json
import math
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

from data.errors import StorageError
from data.files import is_own, open_regular
from jobs.cluster.fork_server import Failed, Forked, ForkServer, Listen, Listening, WorkerEnded, kill_group
from jobs.cluster.node_files import Change, Mark, NodeFiles
from jobs.cluster.worker import LOOPBACK, RankInfo, WorkerRecord, WorkerSpec, worker_file
from pipeline.monitoring.watchdog import STOP_FILE, PhaseReport, read_phase

VMSTAT = Path("/proc/vmstat")  # counts OOM kills of all cgroups; readable in any container
OOM_WINDOW_S = 10.0  # maximum time from an OOM kill to the worker's end; a large process takes a while to die
CHECK_EVERY_S = 1.0  # interval between reads of the kernel's counter and of the fork server's state
MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "pl-agent-"
LOCK = "lock"
END_S = 10.0  # maximum wait for killed workers to disappear
# A fork server that a signal such as SIGSTOP has suspended for this long is killed: it can neither start workers nor
# report that one has ended.
FROZEN_S = 10.0
STATUS = Path("/proc/self/status")  # Linux

_umask_lock = threading.Lock()


@dataclass(frozen=True)
class StartRequest:
    """A request to an agent to start an attempt's workers on its node."""

    ranks: Sequence[RankInfo]
    payload: bytes  # pickled (function, task)
    folder: Path  # the attempt's folder
    variables: Mapping[str, str]  # environment variables for every worker, in addition to those of the node
    # For nodes without shared storage: the initial content of the attempt's folder (NodeFiles.begin).
    token: str = ""  # "" if the attempt's folder is the same on every node
    carried: Mapping[str, bytes | None] = field(default_factory=dict)
    earlier: Sequence[str] = ()


@dataclass
class WorkerState:
    """The state of a worker, as determined by its node's agent."""

    rank: int
    pid: int = 0  # 0 before the fork
    record: WorkerRecord | None = None  # written by the worker when it starts and ends
    phase: PhaseReport | None = None
    is_stopped: bool = False  # suspended by a signal such as SIGSTOP
    death: str = ""  # cause of death, if the worker ended without writing a record

    @property
    def has_ended(self) -> bool:
        """Return whether the worker has ended, successfully or not."""
        return self.death != "" or (self.record is not None and "ended" in self.record)


@dataclass(frozen=True)
class NodeReport:
    """An agent's reply to a poll."""

    news: int  # number of events on this node so far; the next poll sends it back
    workers: list[WorkerState] = field(default_factory=list)
    sigterm_ranks: list[int] = field(default_factory=list)  # ranks of the workers with a pending SIGTERM
    # Changed files, if the node does not share the driver's storage.
    changes: list[Change] = field(default_factory=list)
    fault: str = ""  # why the agent's fork server was killed or has failed in this attempt


@dataclass(frozen=True)
class NodeAgent:
    """The driver's handle to a node's agent."""

    name: str  # the node's name, for messages
    node_id: str  # Ray's node id; "" without Ray
    address: str
    slots: int  # number of workers placed on the node
    call: Callable[..., "Future[Any]"]  # calls a method of Agent by name, with these arguments
    visible_gpus: str = ""  # CUDA_VISIBLE_DEVICES of its workers; "": as in the node's environment
    is_up: bool = False  # it has responded before, so it is not starting: silence means that it is frozen


class Agent:
    """Runs the workers on its node, one attempt at a time. Thread-safe."""

    def __init__(self, address: str = LOOPBACK, *, has_gpus: bool = False) -> None:
        self.address = address  # this node's address for workers on other nodes
        self.has_gpus = has_gpus
        self.server: ForkServer | None = None
        self.changed = threading.Condition()  # held while the following attributes are read or written
        self.port = 0  # port of the store that the next rank 0 serves; 0 until the fork server has opened it
        self.news = 0
        self.number = 0  # number of attempts started on this node
        self.folder = Path()  # the attempt's folder
        self.workers: dict[int, WorkerState] = {}  # workers of the running attempt, by rank
        self.ended_pids: set[int] = set()  # pids of this attempt's ended workers
        self.unwanted_forks = 0  # workers of ended attempts that a slow fork server has not forked yet
        self.files: NodeFiles | None = None
        self.stopped_since = math.inf  # when the fork server was first seen stopped by a signal; inf if it runs
        self.fault = ""  # why the fork server was killed or has failed in this attempt
        self.oom_kills = OomKills()

        # This agent's folder is in memory, so that workers can report their phase even if the disk is full. The agent
        # holds its lock as long as it is alive.
        parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self.base = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
        self.node_folder = self.base  # the current attempt's folder on this node
        self.lock = os.open(self.base / LOCK, os.O_WRONLY | os.O_CREAT)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        remove_folders_of_killed_agents(parent)

    def warm_up(self) -> None:
        """Start the fork server if it is not running yet; return before it is ready.

        The fork server imports modules only for workers without GPUs: importing torch or DeepSpeed may initialise CUDA,
        after which a process must not fork.
        """
        with self.changed:
            if self.server is None:
                self.server = ForkServer(self.base, has_gpus=self.has_gpus)
                self.unwanted_forks = 0
                threading.Thread(
                    target=self._process_replies, args=(self.server,), name="fork server", daemon=True
                ).start()

    def ping(self) -> None:
        """Reply to a heartbeat at once, even during `listen` and `start`, which may take minutes."""

    def listen(self) -> int:
        """Return the port of the store that rank 0 of the next attempt will serve on this node."""
        self.warm_up()
        with self.changed:
            self.port = 0
            self.fault = ""
            assert self.server is not None
            self.server.connection.send(Listen(self.address))
            # The fork server responds only after all its imports.
            while not self.port and self.server is not None:
                self.changed.wait(CHECK_EVERY_S)
                self._end_frozen_server(FROZEN_S)
            if self.server is None:
                raise RuntimeError(self.fault or f"the fork server of {socket.gethostname()} has died")
            return self.port

    def start(self, request: StartRequest) -> bool:
        """Kill the workers of the previous attempt, and fork this node's workers for a new attempt.

        Returns whether the attempt's folder on this node is separate from the driver's.
        """
        self.end()
        self.warm_up()
        with self.changed:
            self.folder = request.folder
            self.files = None
            self.fault = ""
            self.oom_kills = OomKills()  # nothing has read the counter since the last attempt
            if request.token:
                files = NodeFiles(request.folder)
                if files.begin(request.token, request.carried, request.earlier):
                    self.files = files
            self.number += 1
            assert self.server is not None
            self.node_folder = self.base / str(self.number)
            self.node_folder.mkdir(parents=True)
            # Send the current environment and umask: they may have changed since the fork server's start, for example
            # by added credentials.
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

    def poll(self, news: int, wait_s: float, acknowledged: Mapping[str, Mark]) -> NodeReport:
        """Return the workers' states after `wait_s` seconds, or at once if there are events newer than `news`.

        `news` is the number of the last event in the previous report. `acknowledged` contains the marks of the file
        changes already written by the driver.
        """
        deadline = time.monotonic() + wait_s
        with self.changed:
            if self.files is not None:
                self.files.acknowledge(acknowledged)
            while self.news == news and time.monotonic() < deadline:
                self.changed.wait(min(CHECK_EVERY_S, max(0.0, deadline - time.monotonic())))
                self.oom_kills.are_recent()
            self._end_frozen_server(FROZEN_S)
            self._read_records()
            sigterm_ranks = []
            for worker in self.workers.values():
                worker.phase = read_phase(self.node_folder, worker.rank)
                worker.is_stopped = False
                with suppress(psutil.Error):
                    worker.is_stopped = worker.pid != 0 and psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
                if worker_file(self.node_folder, worker.rank, ".sigterm").exists():
                    sigterm_ranks.append(worker.rank)
            changes = self.files.changes() if self.files is not None else []
            # Return copies: without Ray, the driver would get these objects, which change when the attempt ends.
            states = [dataclasses.replace(worker) for worker in self.workers.values()]
            return NodeReport(self.news, states, sigterm_ranks, changes, self.fault)

    def acknowledge(self, acknowledged: Mapping[str, Mark]) -> None:
        """Record which file changes have been written by the driver."""
        with self.changed:
            if self.files is not None:
                self.files.acknowledge(acknowledged)

    def stop(self) -> bool:
        """Tell the workers to commit and exit; return whether any worker has started."""
        with self.changed:
            # Every worker checks for this file.
            if self.workers:
                (self.node_folder / STOP_FILE).touch()
            self._read_records()
            return any(worker.record is not None for worker in self.workers.values())

    def end(self) -> str:
        """Kill the attempt's workers and their data loaders, and wait until they have exited.

        Returns the reason why the fork server was killed or has failed; "" if it is usable.
        """
        with self.changed:
            # A suspended fork server would not report that its workers have ended.
            self._end_frozen_server(0.0)
            # Wait for all forks: a worker has no pid before its fork.
            self.changed.wait_for(
                lambda: self.server is None or all(state.pid for state in self.workers.values()), END_S
            )
            pids = {state.pid for state in self.workers.values() if state.pid}
            for pid in pids - self.ended_pids:
                kill_group(pid)
            self.changed.wait_for(lambda: self.server is None or pids <= self.ended_pids, END_S)
            # If the fork server has died, it cannot report the end of its workers: check the processes.
            deadline = time.monotonic() + END_S
            for pid in pids - self.ended_pids:
                with suppress(psutil.Error):  # the process is gone
                    process = psutil.Process(pid)
                    while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                        time.sleep(0.01)
            self.unwanted_forks += sum(not state.pid and not state.has_ended for state in self.workers.values())
            self.workers = {}
            self.ended_pids = set()
            self.port = 0
            if self.node_folder != self.base:
                shutil.rmtree(self.node_folder, ignore_errors=True)
            return self.fault

    def close(self) -> None:
        """Stop the fork server and all other processes of this agent."""
        with self.changed:
            server = self.server
            self.server = None
        if server is not None:
            server.close()
        shutil.rmtree(self.base, ignore_errors=True)

    def _process_replies(self, server: ForkServer) -> None:
        """Process the replies from a fork server until the server ends; runs in a thread."""
        with suppress(EOFError, OSError):
            while True:
                reply = server.connection.recv()
                with self.changed:
                    if isinstance(reply, Listening):
                        self.port = reply.port
                    elif isinstance(reply, Failed):
                        self.fault = f"its node's fork server failed: {reply.reason}"
                    elif isinstance(reply, Forked) and self.unwanted_forks:
                        # The fork server replies in the order of the requests.
                        self.unwanted_forks -= 1
                        kill_group(reply.pid)
                    elif isinstance(reply, Forked):
                        self.workers[reply.rank].pid = reply.pid
                    elif isinstance(reply, WorkerEnded):
                        # A worker writes its record before it ends; if there is no record, it was killed or crashed. A
                        # negative exit code is a signal. The kernel's OOM killer sends SIGKILL too, but reports no pid:
                        # its counter is the only evidence readable everywhere.
                        self._read_records()
                        self.ended_pids.add(reply.pid)
                        if reply.exit_code >= 0:
                            death = f"exited with code {reply.exit_code} without reporting an error"
                        elif reply.exit_code == -signal.SIGKILL and self.oom_kills.are_recent():
                            death = "killed by the out-of-memory killer"
                        else:
                            death = f"killed by {signal_name(-reply.exit_code)}"
                        for worker in self.workers.values():
                            if worker.pid == reply.pid and not worker.has_ended:
                                worker.death = death
                    self.news += 1
                    self.changed.notify_all()

        # The fork server has ended. Its workers should exit too; kill them in case they do not.
        with self.changed:
            self._read_records()
            for worker in self.workers.values():
                if worker.pid and not worker.has_ended:
                    kill_group(worker.pid)
                if not worker.has_ended:
                    worker.death = self.fault or "its node's fork server died (killed, or crashed)"
            has_died = self.server is server
            if has_died:
                self.server = None
            self.news += 1
            self.changed.notify_all()
        if has_died:
            server.close()

    def _end_frozen_server(self, limit_s: float) -> None:
        """Kill the fork server if a signal has stopped the server for `limit_s`; called with the lock held."""
        if self.server is None or not self.server.is_stopped():
            self.stopped_since = math.inf
            return
        now = time.monotonic()
        self.stopped_since = min(self.stopped_since, now)
        if now >= self.stopped_since + limit_s:
            stopped_s = now - self.stopped_since
            self.fault = f"its node's fork server was frozen: stopped by a signal for {stopped_s:.0f} s, then killed"
            # `_process_replies` ends its workers, and the next attempt starts another one.
            self.server.process.kill()

    def _read_records(self) -> None:
        for worker in self.workers.values():
            if worker.pid and not worker.has_ended:
                with suppress(OSError, ValueError):
                    worker.record = json.loads(worker_file(self.node_folder, worker.rank, ".json").read_text())


def remove_folders_of_killed_agents(parent: Path) -> None:
    """Remove the folders of this user's killed agents, whose locks are free, from the shared folder `parent`."""
    for other in parent.glob(f"{FOLDER_PREFIX}*"):
        # Another user may have created the folder, or a link or pipe of this name: do not open anything in it.
        if not (is_own(other) and is_own(other / LOCK)):
            continue
        # The folder may have disappeared, or its lock may be held.
        with suppress(OSError, StorageError), open(other / LOCK, "a", opener=open_regular) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)


class OomKills:
    """Detects recent kills by the kernel's out-of-memory killer on this machine."""

    def __init__(self) -> None:
        self.counts: deque[tuple[float, int]] = deque()  # (time, kills since boot), oldest first
        self.are_recent()

    def are_recent(self) -> bool:
        """Return whether the kernel's OOM-kill counter rose in the last OOM_WINDOW_S seconds; False if unknown.

        This is called about once a second, so the oldest stored count is at least as old as the window.
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


def signal_name(number: int) -> str:
    """Return a signal's name, such as "SIGKILL"; most real-time signals have none in Python: "signal 35"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def current_umask() -> int:
    """Return this process's umask. Thread-safe."""
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    # Without /proc, the umask can only be read by setting it. Lock, because another thread would read the temporary 0.
    with _umask_lock:
        umask = os.umask(0)
        os.umask(umask)
    return umask
