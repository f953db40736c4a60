"""One attempt of a stage while its workers are at work, as the driver looks at it about every 0.5 s.

At each look, in order:
1. end the attempt where a worker is stuck; name one that is slow;
2. ask the workers to commit and end where there is room for more of them, where a node has given notice, and where
   somebody wants this process to end;
3. show the log.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from data.errors import Preempted
from jobs.attempts.growth import Growth
from jobs.cluster_config import ClusterConfig
from jobs.context import Context
from jobs.workers.failures import is_stopped_by_signal, node_of, worker_failure
from jobs.workers.notices import notices
from jobs.workers.worker_files import SeenRecords, WorkerRecord
from jobs.workers.worker_group import Task
from pipeline.monitoring.watchdog import Watch

GO_ON = "run the same command again to go on"


class Companion(Protocol):
    """Works beside the worker group of an attempt, and takes no part in it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def end(self) -> None:
        """Give everything back at once."""


class Alone:
    """Stands in for a companion where there is none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def end(self) -> None:
        pass


def alone(task: Task, folder: Path, cluster: ClusterConfig) -> Companion:
    """Return the companion of an attempt that has none."""
    return Alone()


@dataclass(frozen=True)
class Attempt:
    """What the driver knows of an attempt that runs."""

    context: Context
    number: int
    watch: Watch
    seen: SeenRecords  # of the workers, as the worker group reads them at each look
    growth: Growth
    companion: Companion
    ask_to_stop: Callable[[Path], None]

    def look(self) -> None:
        """Look once, as `look_at_workers` does; where that ends the attempt, the companion ends first."""
        try:
            self.look_at_workers()
        except BaseException:
            # Before the backend leaves the cluster: who is inside Ray then takes this process along.
            self.companion.end()
            raise

    def look_at_workers(self) -> None:
        """Look once at what the worker group has just seen of its workers.

        Raises WorkerGroupError where a worker is stuck, Preempted where somebody wants this process to end and no
        worker has started, and whatever `ask_to_stop` raises.
        """
        written = self.seen.by_rank
        folder = self.watch.folder
        end_if_stuck(self.context, self.watch, written)
        if self.growth.wanted is None and self.growth.is_due():
            room = f"room for {self.growth.wanted} workers, now {self.watch.world}"
            self.context.say(f"{room}: committing the step, to go on with more")
        if notices(folder) or self.growth.wanted is not None:
            self.ask_to_stop(folder)
        # Again with every look: the attempt may have begun after the signal.
        if self.context.stopping():
            # A worker that has not even started has nothing to commit, and to place it may take minutes.
            if not written:
                end_if_asked(self.context)
            self.ask_to_stop(folder)
        self.context.tick(folder, self.number)


def end_if_asked(context: Context) -> None:
    """Raise Preempted where somebody wants this process to end before any worker has started."""
    if context.stopping():
        raise Preempted(f"stopped before the workers had started, at {restart_point(context)}; {GO_ON}")


def end_if_stuck(context: Context, watch: Watch, written: Mapping[int, WorkerRecord]) -> None:
    """Raise WorkerGroupError where one worker has held up all others too long; say which worker is slow."""
    # The driver reads only what the workers have left: no worker has to answer, so a frozen one cannot hold this up.
    ended = [rank for rank, record in written.items() if "ended" in record]
    # Whoever has ended enters no phase any more: now the cluster is clearing up, which is nobody's fault.
    if len(ended) == watch.world:
        return

    def is_frozen(rank: int) -> bool:
        return is_stopped_by_signal(written.get(rank))

    stuck = watch.look(is_frozen)
    if stuck is not None:
        raise worker_failure(watch.folder, stuck.rank, written, stuck.cause)
    # Slow is not stuck: the run goes on, at the pace of its slowest worker, and somebody should know which it is.
    slow = watch.slow()
    if slow is not None:
        rank, share = slow
        node = node_of(written, rank)
        context.say(f"worker {rank} on {node} is slow: the others waited for it alone in {share:.0%} of the looks")


def last_step(context: Context) -> int:
    """Return the step of the newest committed checkpoint of a stage; −1 where there is none."""
    newest_first = context.checkpoints.committed_steps()
    if not newest_first:
        return -1
    return newest_first[0]


def restart_point(context: Context) -> str:
    """Return where the next attempt starts, in words."""
    step = last_step(context)
    return f"step {step}" if step >= 0 else "the start: nothing was committed yet"
