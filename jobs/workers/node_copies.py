"""Asks every node of an attempt for what its workers leave there (node_files.py), and does not wait for the answers.

1. `begin`, before the workers start: one actor on each node with a place for a worker, but for the driver's own node.
   They take no CPU, and end with the attempt.
2. `look`, about every 0.5 s: takes the answers that have come, and asks again. In a large group only some nodes are
   asked at each look, in turn, so that a look costs the driver the same whatever the number of nodes.
3. `last_look`, when the workers have ended: waits a few seconds for what they left last.
4. `end`.

A node that is lost takes its actor along: its files stay in the driver's folder as they were last seen.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jobs.workers.node_files import Mark, NodeActor, begin_as_driver, take_over
from jobs.workers.worker_files import worker_file
from jobs.workers.worker_group import WorkerGroupError

ASKED_AT_A_LOOK = 32  # nodes, beside that of rank 0, which hears the stop and writes the log
COVER_S = 5.0  # between two questions where the workers' places are, as long as rank 0 has not started
ANSWER_S = 5.0  # for the last look, which a node that is gone does not answer
POLL_S = 0.1
TRIES = 3  # actors on a node in an attempt: one may be killed on a node that lives


@dataclass
class Node:
    """A node with workers, as the driver knows it."""

    node_id: str
    name: str
    files: Any  # handle of the actor, a NodeActor
    answer: ray.ObjectRef | None  # that is waited for
    has_begun: bool = False
    has_rank_0: bool = False
    taken: dict[str, Mark] = field(default_factory=dict)  # written here since the node was asked last


class NodeCopies:
    """Brings what the workers of an attempt leave on other nodes into the driver's folders of the attempt and stage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stage = folder.parents[1]
        self.token = secrets.token_hex(16)
        self.places: PlacementGroup | None = None  # None: nothing has to be copied
        self.nodes: dict[str, Node] = {}  # by id, the one that was asked longest ago first
        self.tries: Counter[str] = Counter()  # actors so far, by the node's id
        self.covered = 0.0  # when it was last asked where the places are

    def begin(self, places: PlacementGroup, timeout_s: float, on_tick: Callable[[], None]) -> None:
        """Prepare every node for its workers.

        What `on_tick` raises comes out. Raises WorkerGroupError where a node is lost, or does not answer in time.
        """
        begin_as_driver(self.folder, self.token)
        self.places = places
        # The driver's own node needs no actor.
        self.tries[ray.get_runtime_context().get_node_id()] = TRIES
        try:
            self._cover()
            self._wait_for_beginnings(timeout_s, on_tick)
        except BaseException:
            self.end()
            raise

    def _wait_for_beginnings(self, timeout_s: float, on_tick: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self._take_answers(POLL_S)
            late = [node.name for node in self.nodes.values() if not node.has_begun]
            if not late:
                return
            if time.monotonic() > deadline:
                raise WorkerGroupError(None, "", f"no process to send the workers' files has started on {late[0]}")
            on_tick()

    def look(self) -> None:
        """Take what has come, and ask the nodes whose turn it is. Raises WorkerGroupError where one cannot look."""
        if self.places is None:
            return
        self._take_answers(0.0)
        # Ray places anew what was on a node that is lost before its worker has started.
        has_started = worker_file(self.folder, 0, ".json").exists()
        if not has_started and time.monotonic() > self.covered + COVER_S:
            self._cover()
        asked = 0
        for node in list(self.nodes.values()):
            if node.answer is None and (asked < ASKED_AT_A_LOOK or node.has_rank_0):
                self._ask(node)
                asked += 1

    def last_look(self) -> None:
        """Take what the workers left last, of the nodes that answer within seconds."""
        deadline = time.monotonic() + ANSWER_S
        # An answer that is on its way may be older than the workers' last words: so everybody is asked once more.
        for _ in range(2):
            for node in list(self.nodes.values()):
                if node.answer is None:
                    self._ask(node)
            while any(node.answer for node in self.nodes.values()) and time.monotonic() < deadline:
                self._take_answers(POLL_S)

    def end(self) -> None:
        """End all actors."""
        for node in self.nodes.values():
            ray.kill(node.files)
        self.nodes = {}

    # -------------------------------------------------------------------- questions

    def _cover(self) -> None:
        """Start an actor on every node that has places and no actor."""
        # Imported here, because it takes seconds, as the next one.
        from pipeline.health import LEFT_OUT

        assert self.places is not None
        self.covered = time.monotonic()
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        told = {LEFT_OUT: _content(self.stage / LEFT_OUT)}
        earlier = [path.name for path in self.folder.parent.iterdir() if path.is_dir()]
        actor: Any = ray.remote(num_cpus=0)(NodeActor)
        for node_id in sorted(set(placement_group_table(self.places)["bundles_to_node_id"].values())):
            if node_id in self.nodes or node_id not in names or self.tries[node_id] >= TRIES:
                continue
            self.tries[node_id] += 1
            # Not soft: on any other node it would look at the wrong folder.
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            files = actor.options(scheduling_strategy=there).remote(self.folder)
            answer = files.begin.remote(self.token, told, earlier)
            self.nodes[node_id] = Node(node_id, names[node_id], files, answer)

    def _ask(self, node: Node) -> None:
        """Ask a node for what is new there, and hand on what the driver tells the workers."""
        from pipeline.worker import STOP_FILE

        told = {}
        if (self.folder / STOP_FILE).exists():
            told[STOP_FILE] = b""
        node.answer = node.files.look.remote(told, node.taken)
        node.taken = {}
        # To the end of the line: whoever is asked least often is asked next.
        self.nodes[node.node_id] = self.nodes.pop(node.node_id)

    # -------------------------------------------------------------------- answers

    def _take_answers(self, wait_s: float) -> None:
        """Take the answers that come within so many seconds."""
        by_answer = {node.answer: node for node in self.nodes.values() if node.answer is not None}
        if not by_answer:
            return
        # Those that are ready are on this node, so that to get them waits for nobody.
        ready, _ = ray.wait(list(by_answer), num_returns=len(by_answer), timeout=wait_s)
        for answer in ready:
            node = by_answer[answer]
            node.answer = None
            try:
                self._take(node, ray.get(answer))
            except ActorUnavailableError:
                # A connection that broke for a moment: it is asked again.
                continue
            except RayTaskError as error:
                raise WorkerGroupError(
                    None, "", f"{node.name} cannot send its workers' files: {error.cause}"
                ) from error
            except RayError as error:
                self._lose(node, error)

    def _take(self, node: Node, answer: Any) -> None:
        """Take one answer: of `NodeFiles.begin`, which comes first, or of `NodeFiles.look`."""
        if not node.has_begun:
            node.has_begun = True
            if not answer:
                # It shares the driver's storage: all is here already.
                ray.kill(node.files)
                del self.nodes[node.node_id]
                self.tries[node.node_id] = TRIES
            return
        node.taken = take_over(self.stage, answer)
        if any(change.is_rest for change in answer):
            # At once, not with the next question: a driver that is killed in between would get the same lines again.
            node.files.take.remote(node.taken)
            node.taken = {}
        if any(change.name.endswith(worker_file(self.folder, 0, ".json").name) for change in answer):
            node.has_rank_0 = True

    def _lose(self, node: Node, error: RayError) -> None:
        """Go on without the actor of a node, or with another one where the node lives.

        Raises WorkerGroupError where it had not begun: the workers would find no folder there.
        """
        del self.nodes[node.node_id]
        if not node.has_begun:
            reason = str(error).strip().splitlines()[0]
            raise WorkerGroupError(None, "", f"{node.name} was lost before its workers started: {reason}") from error
        self._cover()


def _content(path: Path) -> bytes | None:
    """Return what a file holds; None where it is not there."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
