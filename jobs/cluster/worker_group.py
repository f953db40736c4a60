"""One attempt of a stage on N workers: started by the agents of their nodes, followed by their reports, and judged.

1. The driver makes the attempt's folder and hands every agent the ranks of its node; all workers get the same function
   and the same task.
2. The driver polls the agents, all with the same deadline, about once a second; news comes at once. It merges the
   reports into the state of every worker, and calls `on_tick`, which may end the attempt by raising. An answer is the
   agent's heartbeat: after MISSED_BEATS without one the driver asks at the node itself, and a node that does not answer
   there either is lost.
3. Whatever happens, the agents kill what is left, and no worker is alive when `run` returns.
4. All workers have returned: rank 0's value is the group's. Otherwise failure.py names the worker that failed first.
"""

import math
import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import PatchlineError
from jobs.cluster.agent import NodeAgent, NodeReport, StartRequest, WorkerState
from jobs.cluster.failure import Evidence, WorkerGroupError, has_lost_a_peer
from jobs.cluster.node_files import Mark, begin_as_driver, take_over
from jobs.cluster.nodes import Nodes, nodes_of
from jobs.cluster.worker import RankInfo, Task, WorkerFunction
from jobs.cluster_config import ClusterConfig
from pipeline.monitoring.watchdog import PhaseReport

TICK_S = 0.5  # between two calls of `on_tick`, at most
POLL_S = 1.0  # the period of the heartbeat: an agent without news reports so often
TOGETHER_S = 0.05  # agents that are polled with one deadline answer within this time
# Heartbeats that an agent may miss before its node is asked, counted from the poll that it does not answer. That poll
# may be 1 s old when a link goes: a link that is back after 5 s is whole when the node is asked, which is 5 to 6.5 s
# after it went, at the next tick. The question takes 1 s (ANSWER_S, ASKED_TIMES in ray_places.py): 6 to 7.5 s in all.
MISSED_BEATS = 6
# The same, where a worker says that it has lost a peer: at once, because the attempt is judged 1.5 s after that.
MISSED_BEATS_PEER = 1
STATUS_POLL_S = 1.0  # between two questions which nodes are drained or spare
STOP_AGAIN_S = 5.0  # between two requests to commit and end
END_S = 20.0  # for agents to end their workers
DRAINED = "its node is drained"


@dataclass(frozen=True)
class DrainEvent:
    """Tells that a node is about to leave."""

    node: str
    node_id: str
    why: str


@dataclass
class AgentLink:
    """What the driver knows of one agent in this attempt."""

    agent: NodeAgent
    ranks: list[RankInfo]
    answer: "Future[Any] | None" = None  # of the poll that is under way
    asked: float = 0.0  # when that was, or when the node was asked last
    news: int = 0
    taken: dict[str, Mark] = field(default_factory=dict)  # files of the node that were written here since the last poll
    has_own_folder: bool = False  # the node shares no storage with the driver
    error: BaseException | None = None  # that the last poll raised
    loss: str = ""  # how the node was lost


def do_nothing() -> None:
    """Stand in for an `on_tick` where nobody looks."""


class WorkerGroup:
    """Runs one function once in every worker of an attempt.

    Workers find RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT in their
    environment, and initialise torch.distributed themselves. `folder`, of the attempt, exists and is new. All nodes
    share it; where they do not (`is_shared`), each has a folder of its own under the same path, and the caller's comes
    to hold copies of what workers leave in theirs, and in the stage's folder around it (node_files.py). `handed_on`
    names the files of the stage's folder by which one attempt tells the next.
    """

    def __init__(
        self,
        nodes: Nodes,
        cluster: ClusterConfig,
        folder: Path,
        *,
        is_shared: bool = True,
        handed_on: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nodes = nodes
        self.cluster = cluster
        self.folder = folder
        self.is_shared = is_shared
        self.handed_on = handed_on
        self.clock = clock  # seconds; heartbeats are counted by it
        self.links: list[AgentLink] = []
        self.states: dict[int, WorkerState] = {}  # by rank, as last reported
        self.node_names: dict[int, str] = {}  # by rank
        self.addresses: dict[int, str] = {}  # by rank, of the worker's node
        # By the rank of a worker there; None is the node of the driver, which cannot move.
        self.drain_events: dict[int | None, DrainEvent] = {}
        self.stop_requested = -math.inf
        self.has_ended = threading.Event()
        self.draining: set[str] = set()  # ids of nodes; filled by a thread, as the next
        self.spare: Set[str] = frozenset()

    # -------------------------------------------------------------------- what an `on_tick` may read and ask

    def places(self) -> dict[int, PhaseReport]:
        """Return in which phase every worker was when it was last seen."""
        return {rank: state.place for rank, state in self.states.items() if state.place is not None}

    def have_all_ended(self) -> bool:
        """Tell whether every worker is done, well or not."""
        return len(self.states) == self.cluster.world and all(state.has_ended for state in self.states.values())

    def is_frozen(self, rank: int) -> bool:
        """Tell whether a signal has stopped a worker."""
        return rank in self.states and self.states[rank].is_stopped

    def request_stop(self) -> bool:
        """Ask the workers to commit and end; tell whether any of them has started."""
        now = time.monotonic()
        has_started = any(state.record is not None for state in self.states.values())
        # Again after a while: a request may be lost with a connection that broke for a moment.
        if not has_started or now > self.stop_requested + STOP_AGAIN_S:
            self.stop_requested = now
            asked = [link.agent.call("stop") for link in self.links if not link.loss]
            # The last report may be a second old, and a worker that has started since may have taken steps.
            if not has_started:
                for answer in wait(asked, POLL_S).done:
                    has_started |= answer.exception() is None and answer.result()
        return has_started

    def evidence(self) -> Evidence:
        """Return what is known of the workers, from which their failure is judged."""
        losses = {}
        for link in self.links:
            if link.loss:
                for info in link.ranks:
                    losses[info.rank] = link.loss
        return Evidence(self.folder, self.cluster.world, self.states, self.node_names, self.addresses, losses)

    # -------------------------------------------------------------------- the attempt

    def run(self, function: WorkerFunction, task: Task, on_tick: Callable[[], None] = do_nothing) -> object:
        """Run `function(task)` in every worker and return rank 0's value.

        About every 0.5 s `on_tick` runs, in the caller's thread; what it raises ends the worker group and comes out
        here. Raises WorkerGroupError, naming the worker that failed first, with the exit code that it wanted if it did.
        """
        threading.Thread(target=self._watch_nodes, name="nodes", daemon=True).start()
        try:
            # 1. Tell the agents which workers to start.
            deadline = time.monotonic() + self.cluster.start_timeout_s
            requests = self._start_requests(pickle.dumps((function, task)), deadline, on_tick)
            calls = []
            for link, request in zip(self.links, requests, strict=True):
                calls.append((link, link.agent.call("start", request)))
            for link, is_own in zip(self.links, self._answers(calls, deadline, on_tick), strict=True):
                link.has_own_folder = is_own

            # 2. Follow the workers' states until all have ended, or until it is known which one failed first.
            judge_at = math.inf  # when the first failure is judged, once there is a sign of one
            next_tick = 0.0
            while True:
                self.poll(max(0.0, min(next_tick, judge_at) - time.monotonic()))
                # A node that was told to go: the next tick has the workers commit and end.
                for link in self.links:
                    agent = link.agent
                    if agent.node_id in self.draining:
                        rank = link.ranks[0].rank
                        self.drain_events.setdefault(rank, DrainEvent(agent.name, agent.node_id, DRAINED))
                own_node = self.nodes.own_node
                if own_node in self.draining:
                    self.drain_events.setdefault(None, DrainEvent(os.uname().nodename, own_node, DRAINED))
                # Judged before the tick, which ends the attempt where a worker is stuck: its death explains more.
                evidence = self.evidence()
                now = time.monotonic()
                if self.have_all_ended() or evidence.deaths() or now >= judge_at:
                    break
                if judge_at == math.inf:
                    judge_at = now + evidence.grace_s()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    on_tick()
                    # Not while the agents of the attempt itself import.
                    if len(self.states) == self.cluster.world and all(state.record for state in self.states.values()):
                        self.nodes.warm_up_spares(self.spare)
        finally:
            # 3. Whatever has happened, no worker is left alive. What agents say last is taken with it.
            self.has_ended.set()
            if any(link.has_own_folder for link in self.links if not link.loss):
                # A poll that is under way may be older than the workers' last words: every agent is asked once more.
                for _ in range(2):
                    self.poll(POLL_S)
            with suppress(Exception):
                self._end_workers()

        # 4. Name the worker that failed first, or return rank 0's value.
        failure = self.evidence().first_failure()
        if failure is not None:
            raise failure
        record = self.states[0].record
        assert record is not None
        return record["value"]

    def _start_requests(self, payload: bytes, deadline: float, on_tick: Callable[[], None]) -> list[StartRequest]:
        """Give every agent the ranks of its node, and return what each is told, in the order of `links`."""
        agents = self.nodes.agents(self.cluster.world)
        ranks = iter(range(self.cluster.world))
        for node_rank, agent in enumerate(agents):
            infos = []
            for local_rank in range(agent.slots):
                info = RankInfo(
                    rank=next(ranks),
                    world=self.cluster.world,
                    local_rank=local_rank,
                    local_world=agent.slots,
                    node_rank=node_rank,
                    address=agent.address,
                    threads=self.cluster.cpus_per_worker,
                    gpus=self.cluster.gpus_per_worker,
                    node_id=agent.node_id,
                    visible_gpus=agent.visible_gpus,
                )
                infos.append(info)
                self.node_names[info.rank] = agent.name
                self.addresses[info.rank] = agent.address
            self.links.append(AgentLink(agent, infos))

        # Nodes that share no storage with the driver get the attempt's folder, and what earlier attempts tell this one:
        # None for a file that is not there.
        token = ""
        told: dict[str, bytes | None] = {}
        earlier = []
        if not self.is_shared:
            token = secrets.token_hex(16)
            begin_as_driver(self.folder, token)
            for name in self.handed_on:
                path = self.folder.parents[1] / name
                told[name] = path.read_bytes() if path.exists() else None
            earlier = [path.name for path in self.folder.parent.iterdir() if path.is_dir()]

        # Rank 0 serves the store in which the workers find each other; it is told at which port.
        first = self.links[0]
        (port,) = self._answers([(first, first.agent.call("listen"))], deadline, on_tick)
        variables = {
            **self.cluster.environment,
            "MASTER_ADDR": first.agent.address,
            "MASTER_PORT": str(port),
            # torchrun's word for a store that somebody else serves; without it rank 0 opens one of its own.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        requests = []
        for link in self.links:
            requests.append(StartRequest(link.ranks, payload, self.folder, variables, token, told, earlier))
        return requests

    def _answers(
        self, calls: Sequence[tuple[AgentLink, "Future[Any]"]], deadline: float, on_tick: Callable[[], None]
    ) -> list[Any]:
        """Return what agents answer. Raises WorkerGroupError where one is lost, or does not answer in time."""
        answers = []
        for link, _ in calls:
            link.asked = self.clock()
        for link, future in calls:
            cause = ""
            while not cause and not wait([future], POLL_S / 4).done:
                on_tick()
                # An agent that starts may take long: its node tells whether to wait on.
                self.ask_at_nodes([link], MISSED_BEATS)
                cause = link.loss
                if not cause and time.monotonic() > deadline:
                    cause = f"no agent has started there in {self.cluster.start_timeout_s:.0f} s"
            if not cause:
                try:
                    answers.append(future.result())
                    continue
                except PatchlineError:
                    raise
                except Exception as error:
                    (loss,) = self.nodes.losses_of([(link.agent, error)])
                    cause = loss or f"its agent failed: {error}"
            raise WorkerGroupError(link.ranks[0].rank, link.agent.name, cause)
        return answers

    def poll(self, wait_s: float) -> None:
        """Ask the agents that are not asked yet, and take the answers that come within so many seconds."""
        now = self.clock()
        for link in self.links:
            if link.answer is None and not link.loss:
                # All with the same deadline: the workers' places are then of the same moment.
                link.answer = link.agent.call("poll", link.news, POLL_S - now % POLL_S, link.taken)
                link.taken = {}
                link.asked = now
        answers = [link.answer for link in self.links if link.answer is not None]
        done, _ = wait(answers, wait_s, return_when=FIRST_COMPLETED)
        if done and len(answers) > 1:
            wait(answers, TOGETHER_S)

        # Agents that are silent for too long. Without a peer that says so, one that misses a beat may only be slow.
        limit = MISSED_BEATS
        if any(map(has_lost_a_peer, self.evidence().ends().values())):
            limit = MISSED_BEATS_PEER
        self.ask_at_nodes([link for link in self.links if link.answer is not None and not link.answer.done()], limit)

        failed = []
        for link in self.links:
            answer = link.answer
            if answer is None or not answer.done():
                continue
            link.answer = None
            try:
                report: NodeReport = answer.result()
            except Exception as error:
                link.error = error
                failed.append(link)
                continue

            link.news = report.news
            for state in report.workers:
                self.states[state.rank] = state
            for rank in report.told_to_go:
                # Without Ray whoever signals one process signals this one too, and there is nowhere else to go.
                agent = link.agent
                if agent.node_id:
                    event = DrainEvent(agent.name, agent.node_id, f"worker {rank} was sent SIGTERM")
                    self.drain_events.setdefault(rank, event)
            if report.changes:
                link.taken = take_over(self.folder.parents[1], report.changes)
                if any(change.is_rest for change in report.changes):
                    # At once, not with the next poll: a driver that is killed in between would get these lines again.
                    link.agent.call("take", link.taken)
                    link.taken = {}
        if failed:
            # Where a connection broke for a moment the agent is asked again.
            self.ask_at_nodes(failed, 0)
            time.sleep(TOGETHER_S)

    def _end_workers(self) -> None:
        """Have every agent end its workers; return when all have answered whose nodes are there, or after a while."""
        ending = []
        for link in self.links:
            if not link.loss:
                link.asked = self.clock()
                ending.append((link, link.agent.call("end")))
        deadline = self.clock() + END_S
        while ending and self.clock() < deadline:
            wait([answer for _, answer in ending], POLL_S)
            self.ask_at_nodes([link for link, answer in ending if not answer.done()], MISSED_BEATS_PEER)
            ending = [(link, answer) for link, answer in ending if not link.loss and not answer.done()]

    def ask_at_nodes(self, links: Sequence[AgentLink], limit: int) -> None:
        """Ask the nodes whose agents have missed `limit` heartbeats whether they are there, and note which are lost.

        A node of which an agent's answer was an error is asked about with a limit of 0.
        """
        now = self.clock()
        silent = [link for link in links if not link.loss and now >= link.asked + limit * POLL_S]
        if not silent:
            return
        for link, loss in zip(silent, self.nodes.losses_of([(link.agent, link.error) for link in silent]), strict=True):
            link.loss = loss
            link.error = None
            # A node that answers is given as many beats again.
            link.asked = self.clock()

    def _watch_nodes(self) -> None:
        """Ask once a second which nodes are drained or spare, in a thread of its own: the head may be away."""
        while not self.has_ended.wait(STATUS_POLL_S):
            with suppress(Exception):
                draining, self.spare = self.nodes.status()
                self.draining |= draining


def run_worker_group(
    function: WorkerFunction,
    task: Task,
    *,
    cluster: ClusterConfig,
    name: str,
    directory: Path,
    on_tick: Callable[[], None] = do_nothing,
    log: Callable[[str], None] = print,
    is_shared: bool = True,
) -> object:
    """Run one worker group that nobody supervises, in a new folder `name` of `directory`; return rank 0's value."""
    # Workers may have another working directory.
    folder = directory.resolve() / name
    folder.mkdir(parents=True)
    nodes = nodes_of(cluster)
    nodes.reserve(str(folder), [cluster.world], log, on_tick)
    return WorkerGroup(nodes, cluster, folder, is_shared=is_shared).run(function, task, on_tick)
