"""Run one attempt of a stage on N workers: start them through their nodes' agents, poll them, and return the result.

1. The driver creates the attempt's folder and sends every agent the ranks of its node. All workers get the same
   function and the same task.
2. The driver polls all agents with the same deadline, about once a second; an agent with news responds at once. The
   driver updates the state of every worker and calls `on_tick`, which may raise to end the attempt. Each reply is a
   heartbeat: after MISSED_BEATS without one, the driver probes the node. A node that does not respond either is lost.
   If only the agent is silent, the driver replaces it after AGENT_SILENT_S.
3. At the end, the agents always kill the remaining workers: no worker is running when `run` returns.
4. If all workers have returned, rank 0's value is the result. Otherwise, failure.py finds the worker that failed first.
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
from jobs.cluster.node_files import Mark, apply_changes, mark_driver_folder
from jobs.cluster.nodes import Nodes, nodes_of
from jobs.cluster.worker import RankInfo, Task, WorkerFunction
from jobs.cluster_config import ClusterConfig
from pipeline.monitoring.watchdog import PhaseReport

TICK_S = 0.5  # maximum interval between calls of `on_tick`
POLL_S = 1.0  # heartbeat period: how often an agent responds if nothing happens
TOGETHER_S = 0.05  # agents with the same deadline respond within this time
# Heartbeats that an agent may miss before its node is probed, counted from the pending poll. That poll may be 1 s
# old when a network link fails, so the probe is 5 to 6.5 s after the failure (at the next tick): a link that recovers
# within 5 s costs nothing. The probe takes 1 s (PROBE_TIMEOUT_S and PROBE_ATTEMPTS in ray_places.py), so a loss
# is known after 6 to 7.5 s.
MISSED_BEATS = 6
# The same limit after a worker has reported a lost peer: probe earlier, because the cause is determined after 1.5 s.
MISSED_BEATS_PEER = 1
# An agent without a response for this long, although its node responds, is suspended (SIGSTOP) or stuck: it is killed,
# its node is avoided, and the attempt fails. If the driver itself was suspended, at most MISSED_BEATS of that time
# count.
AGENT_SILENT_S = 30.0
SILENT_BEATS = 3  # heartbeats that an agent may miss before the last known phases of its workers are outdated
STATUS_POLL_S = 1.0  # interval between queries for draining and spare nodes
STOP_RETRY_S = 5.0  # interval between requests to commit and exit
END_S = 20.0  # maximum wait for agents to kill their workers
DRAINED = "its node is being drained"


@dataclass(frozen=True)
class DrainEvent:
    """The notice that a node will leave the cluster."""

    node: str
    node_id: str
    why: str


@dataclass
class AgentLink:
    """The driver's connection to one agent in this attempt."""

    agent: NodeAgent
    ranks: list[RankInfo]
    reply: "Future[Any] | None" = None  # the pending poll
    called: float = 0.0  # time of that poll
    last_contact: float = 0.0  # time of that poll, or of the last probe of the node
    silent_s: float = 0.0  # how long the agent has not responded although its node did, up to the last probe
    is_up: bool = False  # the agent has responded before; until then it may be starting
    news: int = 0
    acknowledged: dict[str, Mark] = field(default_factory=dict)  # changes written since the last poll
    has_own_folder: bool = False  # the node shares no storage with the driver
    error: BaseException | None = None  # raised by the last poll
    loss: str = ""  # how the node was lost; "" if it was not lost


def do_nothing() -> None:
    """Do nothing: the default `on_tick`."""


class WorkerGroup:
    """Runs a function once in every worker of an attempt.

    Workers find RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT in their
    environment and initialise torch.distributed themselves. `folder` is the attempt's new folder. If `is_shared`, all
    nodes share it. Otherwise, each node has a separate folder under the same path, and the workers' files are copied to
    the driver's folders of the attempt and the stage (node_files.py). `carried_files` names the files in the stage's
    folder that one attempt passes to the next.
    """

    def __init__(
        self,
        nodes: Nodes,
        cluster: ClusterConfig,
        folder: Path,
        *,
        is_shared: bool = True,
        carried_files: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nodes = nodes
        self.cluster = cluster
        self.folder = folder
        self.is_shared = is_shared
        self.carried_files = carried_files
        self.clock = clock  # in seconds, for heartbeats
        self.links: list[AgentLink] = []
        self.states: dict[int, WorkerState] = {}  # last reported states, by rank
        self.node_names: dict[int, str] = {}  # by rank
        self.addresses: dict[int, str] = {}  # addresses of the workers' nodes, by rank
        # Rank of a worker on the node → event; None stands for the driver's node, from which the driver cannot move.
        self.drain_events: dict[int | None, DrainEvent] = {}
        self.remarks: list[str] = []  # about agents replaced without harm to the attempt; for the log
        self.stop_requested = -math.inf
        self.has_ended = threading.Event()
        self.draining: set[str] = set()  # ids of draining nodes; like `spare`, set by a thread
        self.spare: Set[str] = frozenset()

    # -------------------------------------------------------------------- for `on_tick`

    def phases(self) -> dict[int, PhaseReport]:
        """Return the last known phase of every worker."""
        return {rank: state.phase for rank, state in self.states.items() if state.phase is not None}

    def have_all_ended(self) -> bool:
        """Return whether every worker has ended, successfully or not."""
        return len(self.states) == self.cluster.world and all(state.has_ended for state in self.states.values())

    def is_frozen(self, rank: int) -> bool:
        """Return whether a worker is suspended by a signal such as SIGSTOP."""
        return rank in self.states and self.states[rank].is_stopped

    def has_silent_agent(self) -> bool:
        """Return whether an agent has stopped responding, so the last known phases of its workers are outdated."""
        now = self.clock()
        return any(link.reply is not None and now >= link.called + SILENT_BEATS * POLL_S for link in self.links)

    def request_stop(self) -> bool:
        """Tell the workers to commit and exit; return whether any worker has started."""
        now = time.monotonic()
        has_started = any(state.record is not None for state in self.states.values())
        # Repeat the request after a while, because a broken connection may have lost it.
        if not has_started or now > self.stop_requested + STOP_RETRY_S:
            self.stop_requested = now
            replies = [link.agent.call("stop") for link in self.links if not link.loss]
            # The last report may be a second old, so a worker may have started since then.
            if not has_started:
                for reply in wait(replies, POLL_S).done:
                    has_started |= reply.exception() is None and reply.result()
        return has_started

    def evidence(self) -> Evidence:
        """Return the workers' states as evidence for the cause of a failure."""
        losses = {}
        for link in self.links:
            if link.loss:
                for info in link.ranks:
                    losses[info.rank] = link.loss
        return Evidence(self.folder, self.cluster.world, self.states, self.node_names, self.addresses, losses)

    # -------------------------------------------------------------------- the attempt

    def run(self, function: WorkerFunction, task: Task, on_tick: Callable[[], None] = do_nothing) -> object:
        """Run `function(task)` in every worker and return rank 0's value.

        `on_tick` is called about every 0.5 s in the caller's thread; an exception that it raises ends the workers and
        is raised here. Raises WorkerGroupError with the worker that failed first, and the exit code that it requested.
        """
        threading.Thread(target=self._watch_nodes, name="nodes", daemon=True).start()
        try:
            # 1. Send every agent a request to start its workers.
            deadline = time.monotonic() + self.cluster.start_timeout_s
            requests = self._start_requests(pickle.dumps((function, task)), deadline, on_tick)
            calls = []
            for link, request in zip(self.links, requests, strict=True):
                calls.append((link, link.agent.call("start", request)))
            for link, is_own in zip(self.links, self._wait_for_replies(calls, deadline, on_tick), strict=True):
                link.has_own_folder = is_own

            # 2. Poll the workers until all have ended, or until the first failure is known.
            decide_at = math.inf  # after a failure: when to determine its cause
            next_tick = 0.0
            while True:
                self.poll(max(0.0, min(next_tick, decide_at) - time.monotonic()))
                # Record draining nodes. At the next tick, the workers are requested to commit and exit.
                for link in self.links:
                    agent = link.agent
                    if agent.node_id in self.draining:
                        rank = link.ranks[0].rank
                        self.drain_events.setdefault(rank, DrainEvent(agent.name, agent.node_id, DRAINED))
                own_node = self.nodes.own_node
                if own_node in self.draining:
                    self.drain_events.setdefault(None, DrainEvent(os.uname().nodename, own_node, DRAINED))
                # Look for deaths before the tick, which ends the attempt if a worker is stuck: a death explains more.
                evidence = self.evidence()
                now = time.monotonic()
                if self.have_all_ended() or evidence.deaths() or now >= decide_at:
                    break
                if decide_at == math.inf:
                    decide_at = now + evidence.grace_s()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    on_tick()
                    # Wait until all workers have started, because the agents' imports use the CPU until then.
                    if len(self.states) == self.cluster.world and all(state.record for state in self.states.values()):
                        self.nodes.warm_up_spares(self.spare)
        finally:
            # 3. Always kill all workers, but copy their last files first.
            self.has_ended.set()
            if any(link.has_own_folder for link in self.links if not link.loss):
                # Poll twice: a pending poll may be older than the workers' last files.
                for _ in range(2):
                    self.poll(POLL_S)
            with suppress(Exception):
                self._end_workers()

        # 4. Raise the error of the worker that failed first, or return rank 0's value.
        failure = self.evidence().first_failure()
        if failure is not None:
            raise failure
        record = self.states[0].record
        assert record is not None
        return record["value"]

    def _start_requests(self, payload: bytes, deadline: float, on_tick: Callable[[], None]) -> list[StartRequest]:
        """Assign ranks to the agents, and return their start requests in the order of `links`."""
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
            self.links.append(AgentLink(agent, infos, is_up=agent.is_up))

        # Nodes without shared storage get the folder names and carried files of earlier attempts (None for a missing
        # file).
        token = ""
        carried: dict[str, bytes | None] = {}
        earlier = []
        if not self.is_shared:
            token = secrets.token_hex(16)
            mark_driver_folder(self.folder, token)
            for name in self.carried_files:
                path = self.folder.parents[1] / name
                carried[name] = path.read_bytes() if path.exists() else None
            earlier = [path.name for path in self.folder.parent.iterdir() if path.is_dir()]

        # Rank 0 serves the store through which the workers find each other. Its agent selects the port.
        first = self.links[0]
        (port,) = self._wait_for_replies([(first, first.agent.call("listen"))], deadline, on_tick)
        variables = {
            **self.cluster.environment,
            "MASTER_ADDR": first.agent.address,
            "MASTER_PORT": str(port),
            # Like torchrun, tell torch that the store already exists; otherwise rank 0 would open another one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        requests = []
        for link in self.links:
            requests.append(StartRequest(link.ranks, payload, self.folder, variables, token, carried, earlier))
        return requests

    def _wait_for_replies(
        self, calls: Sequence[tuple[AgentLink, "Future[Any]"]], deadline: float, on_tick: Callable[[], None]
    ) -> list[Any]:
        """Wait for the agents' replies, and return them. Raises WorkerGroupError if an agent is lost or times out."""
        replies = []
        for link, _ in calls:
            link.last_contact = self.clock()
        for link, future in calls:
            cause = ""
            sign_of_life = link.agent.call("ping")
            while not cause and not wait([future], POLL_S / 4).done:
                on_tick()
                if sign_of_life.done() and sign_of_life.exception() is None:
                    link.is_up = True
                    link.last_contact = self.clock()
                    link.silent_s = 0.0
                    sign_of_life = link.agent.call("ping")
                # An agent may take long to start, so probe its node to decide whether to wait.
                self.check_nodes([link], MISSED_BEATS)
                cause = link.loss
                if not cause and time.monotonic() > deadline:
                    cause = (
                        f"its node's agent did not start within {self.cluster.start_timeout_s:.0f} s "
                        "(cluster.start_timeout_s)"
                    )
                    self.nodes.give_up(link.agent)
            if not cause:
                try:
                    replies.append(future.result())
                    link.is_up = True
                    continue
                except PatchlineError:
                    raise
                except Exception as error:
                    (loss,) = self.nodes.losses_of([(link.agent, error)])
                    cause = loss or f"its node's agent failed: {error}"
                    self.nodes.avoid([link.agent.node_id])
            raise WorkerGroupError(link.ranks[0].rank, link.agent.name, cause)
        return replies

    def poll(self, wait_s: float) -> None:
        """Poll every agent without a pending poll, and process the replies that arrive within `wait_s` seconds."""
        now = self.clock()
        for link in self.links:
            if link.reply is None and not link.loss:
                # Use the same deadline for all agents, so that they report the workers' phases at the same moment.
                link.reply = link.agent.call("poll", link.news, POLL_S - now % POLL_S, link.acknowledged)
                link.acknowledged = {}
                link.called = now
                link.last_contact = now
        replies = [link.reply for link in self.links if link.reply is not None]
        done, _ = wait(replies, wait_s, return_when=FIRST_COMPLETED)
        if done and len(replies) > 1:
            wait(replies, TOGETHER_S)

        # Probe the nodes of silent agents: after one missed heartbeat if a worker has lost a peer, else after several,
        # because the agent may only be slow.
        limit = MISSED_BEATS
        if any(map(has_lost_a_peer, self.evidence().ends().values())):
            limit = MISSED_BEATS_PEER
        self.check_nodes([link for link in self.links if link.reply is not None and not link.reply.done()], limit)

        failed = []
        for link in self.links:
            reply = link.reply
            if reply is None or not reply.done():
                continue
            link.reply = None
            try:
                report: NodeReport = reply.result()
            except Exception as error:
                link.error = error
                failed.append(link)
                continue

            link.news = report.news
            link.is_up = True
            link.silent_s = 0.0
            if report.fault:
                # Its workers have ended with the fork server, so the attempt fails; the next one avoids the node.
                self.nodes.avoid([link.agent.node_id])
            for state in report.workers:
                self.states[state.rank] = state
            for rank in report.sigterm_ranks:
                # Only with Ray: otherwise this process receives the signal too, and there is no other node to move to.
                agent = link.agent
                if agent.node_id:
                    event = DrainEvent(agent.name, agent.node_id, f"worker {rank} was sent SIGTERM")
                    self.drain_events.setdefault(rank, event)
            if report.changes:
                link.acknowledged = apply_changes(self.folder.parents[1], report.changes)
                if any(change.is_appended for change in report.changes):
                    # Acknowledge at once instead of with the next poll: if the driver is killed in between, the lines
                    # are sent again.
                    link.agent.call("acknowledge", link.acknowledged)
                    link.acknowledged = {}
        if failed:
            # The connection may have been interrupted only briefly: unless the node is lost, the agent is polled again.
            self.check_nodes(failed, 0)
            time.sleep(TOGETHER_S)

    def _end_workers(self) -> None:
        """Kill all workers through their agents; wait up to END_S for all reachable agents to reply."""
        ending = []
        for link in self.links:
            if not link.loss:
                link.last_contact = self.clock()
                ending.append((link, link.agent.call("end")))
        deadline = self.clock() + END_S
        while ending and self.clock() < deadline:
            wait([reply for _, reply in ending], POLL_S)
            self.check_nodes([link for link, reply in ending if not reply.done()], MISSED_BEATS_PEER)
            silent = []
            for link, reply in ending:
                if not reply.done() and not link.loss:
                    silent.append((link, reply))
                elif reply.done() and reply.exception() is None and reply.result():
                    self.remarks.append(f"{link.agent.name}: {reply.result()}")
            ending = silent
        # Otherwise the next attempt would wait for them.
        for link, _ in ending:
            self.remarks.append(
                f"{link.agent.name}: its agent did not end its workers within {END_S:.0f} s; the next attempt starts "
                "another agent, if possible on another node"
            )
            self.nodes.give_up(link.agent)

    def check_nodes(self, links: Sequence[AgentLink], limit: int) -> None:
        """Probe the nodes of agents with at least `limit` missed heartbeats, and record which nodes are lost.

        Pass a `limit` of 0 for agents whose last call has failed.
        """
        now = self.clock()
        silent = [link for link in links if not link.loss and now >= link.last_contact + limit * POLL_S]
        if not silent:
            return
        for link, loss in zip(silent, self.nodes.losses_of([(link.agent, link.error) for link in silent]), strict=True):
            # Without an error, the agent has been silent since it was last polled or probed.
            if not loss and link.error is None and link.is_up:
                link.silent_s += min(now - link.last_contact, MISSED_BEATS * POLL_S)
                if link.silent_s >= AGENT_SILENT_S:
                    loss = (
                        f"its node's agent has not responded for {link.silent_s:.0f} s, but the node accepts "
                        "connections (agent suspended by a signal, or node overloaded)"
                    )
                    self.nodes.give_up(link.agent)
            link.loss = loss
            link.error = None
            # If the node has responded, count its missed heartbeats from now.
            link.last_contact = self.clock()

    def _watch_nodes(self) -> None:
        """Query draining and spare nodes once a second; runs in a thread, because the head may be unreachable."""
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
    """Run a single attempt without restarts, in the new folder `directory/name`; return rank 0's value."""
    # Make the path absolute, because the workers' working directory may differ.
    folder = directory.resolve() / name
    folder.mkdir(parents=True)
    nodes = nodes_of(cluster)
    nodes.reserve(str(folder), [cluster.world], log, on_tick)
    return WorkerGroup(nodes, cluster, folder, is_shared=is_shared).run(function, task, on_tick)
