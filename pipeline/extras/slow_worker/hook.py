"""Hook that names a worker that is slower than the others, its factor and its cause (`name_slow_workers`).

1. Every worker measures its own seconds of each step by cause (stopwatch.py), and after each PART steps puts them into
   the store of the process group. A thread does so: the training thread only reads clocks.
2. Rank 0 collects a part after the next one, when all workers have sent it, and compares the last WINDOW steps of all
   workers (comparison.py).
3. A slow worker is logged when it is found, again if the cause changes, and when it is as fast as the others again. A
   record of the kind "slow" is added to metrics.jsonl, with a text that `status` and the report show.

In:  eight workers, one of which needs 181 ms more per step for decoding
Out: worker 3 on n1 takes 1.18 times as long as the others in steps 1201 to 1280, because of loading data: 212 ms a
     step, the others 31 ms (27 to 36)
"""

import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipeline.config import Tags, tags
from pipeline.extras.slow_worker.comparison import (
    CAUSES,
    GC,
    LINK,
    PART,
    WINDOW,
    Seconds,
    SlowWorker,
    link_seconds,
    slow_workers,
)
from pipeline.hooks import Hook
from pipeline.training_config import TrainConfig

if TYPE_CHECKING:
    import torch.distributed as dist

    from pipeline.extras.slow_worker.stopwatch import RoundTrips, StepTimes
    from pipeline.worker import Progress, Setup

    Part = tuple[int, int, list[StepTimes]]  # its number, the number of completed steps, and its steps

SKIPPED = 5  # first steps of an attempt, in which kernels are compiled and memory is allocated
KEPT = 8  # parts of each worker in the store
PARTS = WINDOW // PART
COLUMNS = ("data", "compute", "host", "gc", "whole step")  # of a step, as the stopwatch returns them
HEADER = struct.Struct("<qd")  # number of the part, round trip in seconds
REASONS = {
    "data": "loading data",
    "compute": "computing",
    "link": "its network link",
    "host": "other use of its processors",
    "gc": "Python's garbage collection",
}
REMEDIES = {
    "data": "compare the nodes' storage and decoding speed with python -m jobs preflight, or raise data.processes",
    "compute": "check the clock, temperature and other users of its device",
    "link": "compare all links with python -m jobs preflight",
    "host": "look for other programs on its node, a CPU quota, and processes stopped by signals",
    "gc": "find what creates cyclic garbage in that process; gc.freeze() and fewer Python objects shorten a collection",
}


@dataclass(frozen=True)
class SlowWorkerConfig(TrainConfig):
    """Adds the config field `name_slow_workers` to trained stages."""

    # log a worker that is at least 5 % slower than the others, by how much, and why (docs/design/slow-workers.md)
    name_slow_workers: bool = True

    RESUME: ClassVar[Tags] = tags(free="name_slow_workers")


class SlowWorkers(Hook):
    """Hook that measures this worker and, on rank 0, compares all workers."""

    Config = SlowWorkerConfig

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Collective: connect to the store, exchange the nodes' names and addresses, and start to measure."""
        import psutil
        import torch.distributed as dist  # imported here because checking a recipe does not need torch

        from pipeline.extras.slow_worker.stopwatch import RoundTrips, seconds_by_cause

        group = worker.group
        # Without an address there is no store that all workers can reach.
        if group.world == 1 or "MASTER_ADDR" not in os.environ:
            return
        store, _, _ = next(dist.rendezvous("env://"))
        self.store = dist.PrefixStore(f"slow-workers/{self.job.attempt}", store)
        self.telemetry = group.telemetry
        addresses = {address.address for card in psutil.net_if_addrs().values() for address in card}
        nodes: list[tuple[str, list[str]]] = [("", [])] * group.world
        dist.all_gather_object(nodes, (socket.gethostname(), sorted(addresses)))
        peers = {address for _, of_node in nodes for address in of_node} - addresses
        on_gpu = group.device.type == "cuda"
        self.measure(on_gpu=on_gpu)
        by_cause = partial(seconds_by_cause, on_gpu=on_gpu, has_forward_collectives=self.cfg.zero == 3)
        comparer = None
        if group.rank == 0:
            comparer = Comparer([node for node, _ in nodes])
        round_trips = RoundTrips(peers, int(os.environ.get("MASTER_PORT", "0")))
        exchange = Exchange(self.store, group.rank, round_trips, by_cause, comparer, self.news)
        threading.Thread(target=exchange.run, args=(self.parts,), name="slow workers", daemon=True).start()
        group.phases.on_enter = self.on_enter

    def measure(self, *, on_gpu: bool) -> None:
        """Start to measure the calling thread's steps."""
        from pipeline.extras.slow_worker.stopwatch import Stopwatch

        self.stopwatch = Stopwatch(on_gpu=on_gpu)
        self.step = -1  # the step being measured, counted from 0
        self.skipped = -1  # steps so far that are not measured; the first call begins a step and ends none
        self.number = 0  # of the current part
        self.steps: list[StepTimes] = []  # of the current part
        self.parts: queue.SimpleQueue[Part] = queue.SimpleQueue()
        self.news: queue.SimpleQueue[tuple[dict[str, Any], str]] = queue.SimpleQueue()

    def on_enter(self, phase: str, step: int) -> None:
        """Measure the last phase; at the end of a step, add the step to the part."""
        stopwatch = self.stopwatch
        if threading.get_ident() != stopwatch.thread:
            return
        # An event of the next step would not have completed: end the step first.
        is_new = phase == "data" and step != self.step
        if not is_new:
            stopwatch.enter(phase)
            return
        stopwatch.enter("")
        times = stopwatch.step()
        stopwatch.enter(phase)
        self.step = step
        self.skipped += 1
        if self.skipped < SKIPPED:
            return
        self.steps.append(times)
        if len(self.steps) == PART:
            self.parts.put((self.number, step, self.steps))
            self.steps = []
            self.number += 1
        while not self.news.empty():
            values, line = self.news.get()
            self.telemetry.report("slow", values, line)


class Exchange:
    """Sends the parts of a worker to the store and, on rank 0, collects and compares those of all workers."""

    def __init__(
        self,
        store: "dist.Store",
        rank: int,
        round_trips: "RoundTrips",
        by_cause: "Callable[[list[StepTimes]], Seconds]",
        comparer: "Comparer | None",
        news: "queue.SimpleQueue[tuple[dict[str, Any], str]]",
    ) -> None:
        self.store = store
        self.rank = rank
        self.round_trips = round_trips
        self.by_cause = by_cause
        self.comparer = comparer
        self.news = news
        self.wanted = 0  # next part to collect

    def run(self, parts: "queue.SimpleQueue[Part]") -> None:
        """Handle each part that the training thread has measured, until the process ends."""
        # The store ends with rank 0, and a run must not end because its speed cannot be measured.
        try:
            while True:
                number, step, times = parts.get()
                value = HEADER.pack(number, self.round_trips.shortest_s()) + self.by_cause(times).tobytes()
                self.store.set(f"{number % KEPT}/{self.rank}", value)  # type: ignore[arg-type]  # bytes work, too
                if self.comparer is not None:
                    self.collect(self.comparer, number, step)
        except (RuntimeError, OSError):
            return

    def collect(self, comparer: "Comparer", number: int, step: int) -> None:
        """Compare the workers after each complete part before `number`, which ends with `step` completed steps."""
        while self.wanted < number:
            keys = [f"{self.wanted % KEPT}/{rank}" for rank in range(len(comparer.nodes))]
            if number - self.wanted >= KEPT:
                comparer.clear()
                self.wanted = number
                return
            if not self.store.check(keys):
                return
            values = [bytes(value) for value in self.store.multi_get(keys)]
            headers = [HEADER.unpack_from(value) for value in values]
            if any(header[0] != self.wanted for header in headers):
                return
            rows = [np.frombuffer(value, np.float32, offset=HEADER.size).reshape(PART, -1) for value in values]
            last_step = step - (number - self.wanted) * PART
            for entry in comparer.add(np.stack(rows), np.array([header[1] for header in headers]), last_step):
                self.news.put(entry)
            self.wanted += 1


class Comparer:
    """Compares the workers after each part, and says what has changed."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = nodes
        self.parts: list[Seconds] = []  # each (W, PART, columns)
        self.round_trips: list[Seconds] = []  # each (W,)
        self.lowest = np.full(len(nodes), np.inf)  # round trips so far
        self.named: dict[int, tuple[str, int]] = {}  # slow worker → its cause, and the last step at which it was slow

    def clear(self) -> None:
        """Forget all parts, because the next one does not follow the last one."""
        self.parts = []
        self.round_trips = []

    def add(self, rows: Seconds, round_trips: Seconds, step: int) -> list[tuple[dict[str, Any], str]]:
        """Add a part that ends with `step` completed steps; return records and log lines."""
        self.parts = [*self.parts[1 - PARTS :], rows]
        self.round_trips = [*self.round_trips[1 - PARTS :], round_trips]
        self.lowest = np.fmin(self.lowest, round_trips)
        if len(self.parts) < PARTS:
            return []
        measured = np.concatenate(self.parts, 1)
        own = measured[..., :-1].sum(-1)
        whole = np.median(measured[..., -1], 0)
        seconds = np.zeros((*own.shape, len(CAUSES)), np.float32)
        for column, cause in enumerate(COLUMNS[:-1]):
            seconds[..., CAUSES.index(cause)] = measured[..., column]
        seconds[..., LINK] = link_seconds(own, whole, np.stack(self.round_trips, 1), self.lowest)
        return self.changes(slow_workers(seconds), step)

    def changes(self, slow: Sequence[SlowWorker], step: int) -> list[tuple[dict[str, Any], str]]:
        """Return a record and a log line for each slow worker that is new, and each that is not slow any more."""
        entries = []
        for worker in slow:
            cause, _ = self.named.get(worker.rank, ("", 0))
            self.named[worker.rank] = (worker.cause, step)
            if cause != worker.cause:
                line = self.message(worker, slow, step)
                values = {"step": step, "node": self.nodes[worker.rank], **asdict(worker)}
                entries.append((values | notice(worker.rank, line), line))
        for rank, (cause, last) in list(self.named.items()):
            if step - last >= WINDOW:
                del self.named[rank]
                line = f"worker {rank} on {self.nodes[rank]} is as fast as the others again since step {last}"
                values = {"step": step, "rank": rank, "factor": 1.0, "cause": cause}
                entries.append((values | notice(rank, line, is_over=True), line))
        return entries

    def message(self, worker: SlowWorker, slow: Sequence[SlowWorker], step: int) -> str:
        """Return the log line for a slow worker."""
        which = f"worker {worker.rank} on {self.nodes[worker.rank]}"
        usual = f"the others {text_of(worker.others)}"
        if worker.low < worker.high:
            usual += f" ({text_of(worker.low)} to {text_of(worker.high)})"
        reason = REASONS[worker.cause]
        if worker.cause == CAUSES[LINK] and len(self.nodes) == 2:
            reason = "the link to the other worker"
        if worker.cause == CAUSES[GC]:
            usual += ", on average"
        return (
            f"{which} takes {worker.factor:.2f} times as long as the others in steps {step - WINDOW + 1} to {step}, "
            f"because of {reason}: {text_of(worker.seconds)} a step, {usual}\n  {REMEDIES[worker.cause]}"
        )


def notice(rank: int, line: str, *, is_over: bool = False) -> dict[str, Any]:
    """Return the values that make a record a notice, which `status` and the report show."""
    return {"about": f"worker {rank}", "notice": line.partition("\n")[0], "is_over": is_over}


def text_of(seconds: float) -> str:
    """Format seconds as milliseconds with two or more digits, such as "212 ms" or "0.31 ms"."""
    milliseconds = 1000 * seconds
    if milliseconds >= 10 or milliseconds == 0:
        return f"{milliseconds:,.0f} ms"
    return f"{milliseconds:.2g} ms"
