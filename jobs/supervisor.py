"""Attempts of a stage until one succeeds: judged by the watchdog, restarted from the last commit, or given up."""

import builtins
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.errors import PatchlineError, Preempted
from jobs.cluster import backends as cluster
from jobs.cluster.worker_group import Function, WorkerGroupError, blame, frozen, node_of, records
from jobs.context import Context
from pipeline import checkpoint
from pipeline.watchdog import Watch

OUT_OF_MEMORY = ("out-of-memory", "OutOfMemoryError", "MemoryError", "can't allocate memory", "bad_alloc")
LESS_MEMORY = "; lower micro_batch, activation_gb or data.processes"


class StageFailed(PatchlineError):
    """A stage ended for a reason that a restart does not cure; carries the worker's exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def until_done(context: Context, attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Attempts until one returns. Raises Preempted, or StageFailed with the code the worker wanted."""
    without_progress, cause = 0, ""
    while True:
        before = last_step(context.directory)
        try:
            return attempt()
        except WorkerGroupError as error:
            write_incident(context, error)
            if error.exit_code == Preempted.exit_code:
                raise Preempted(error.cause.partition(": ")[2]) from None
            if error.exit_code is not None:
                raise StageFailed(f"{context.name}: {error.cause.partition(': ')[2]}", error.exit_code) from None
            without_progress = 0 if last_step(context.directory) > before else without_progress + 1
            again = error.kind != "" and error.cause == cause and without_progress > 0
            cause = error.cause
            give_up_or_wait(context, error, without_progress, again)


def run_watched(
    function: Function, task: dict[str, Any], context: Context, number: int, stall_s: float, stop: Callable[[], None]
) -> Any:
    """One attempt on a worker group under the watchdog; `stop` is called while somebody wants this process to end."""
    folder, name = context.directory / "attempts", f"attempt-{number:06d}"
    watch = Watch(folder / name, context.cluster.workers, stall_s, context.cluster.start_timeout_s)

    def tick() -> None:
        judge(watch, context)
        if context.stopping():
            stop()
        context.tick(folder / name, number)

    try:
        return cluster.run_worker_group(
            function, task, cluster=context.cluster, name=name, directory=folder, on_tick=tick
        )
    except WorkerGroupError as error:
        error.place = watch.place(error.rank)
        if any(word in error.cause for word in OUT_OF_MEMORY):
            error.cause += LESS_MEMORY
        raise
    finally:
        context.tick(folder / name, number)


def judge(watch: Watch, context: Context) -> None:
    """Raise WorkerGroupError where one worker has held up all others too long; name a slow one."""
    known = records(watch.folder, watch.world)
    if len(known) == watch.world and all("ended" in record for record in known.values()):
        return  # the cluster is clearing up
    found = watch.look(lambda rank: frozen(known.get(rank, {})))
    if found is not None:
        raise blame(watch.folder, found.rank, known, found.cause)
    slow = watch.slow()
    if slow is not None:
        rank, share = slow
        node = node_of(known, rank)
        context.say(f"worker {rank} on {node} is slow: the others waited for it alone in {share:.0%} of the looks")


def last_step(directory: Path) -> int:
    """Step of the newest committed checkpoint; −1 where there is none."""
    found = checkpoint.committed(directory / "checkpoints")
    return checkpoint.step_of(found[0]) if found else -1


def give_up_or_wait(context: Context, error: WorkerGroupError, without_progress: int, again: bool) -> None:
    """Say what happened and what follows; back off, or raise StageFailed when restarts bring no new checkpoint.

    `again`: the same exception as the time before, without progress between: one restart was enough to know.
    """
    last = last_step(context.directory)
    where = f"step {last}" if last >= 0 else "the start: nothing was committed yet"
    if again or without_progress > context.cluster.max_restarts:
        raise StageFailed(
            f"{context.name}: {error}\n"
            f"  {without_progress} attempts in a row made no new checkpoint; the last is {where}\n"
            f"  the traceback is in {context.directory / 'incidents.txt'}",
            exit_code=74 if is_os_error(error.kind) else 70,
        )
    if context.stopping():
        raise Preempted(f"{error}; stopped at {where}; run the same command again to go on")
    wait = context.cluster.backoff_s * 2 ** max(without_progress - 1, 0) if without_progress else 0.0
    context.say(f"{error}; restarting from {where}" + (f" in {wait:.0f}s" if wait else ""))
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        if context.stopping():
            raise Preempted(f"stopped while waiting to restart from {where}; run the same command again to go on")
        time.sleep(0.2)


def is_os_error(kind: str) -> bool:
    """Whether an exception's name is that of an operating system's refusal."""
    found = getattr(builtins, kind, None)
    return isinstance(found, type) and issubclass(found, OSError)


def write_incident(context: Context, error: WorkerGroupError) -> None:
    """The incident log that a person can read: when, who, why, and the traceback."""
    try:
        with open(context.directory / "incidents.txt", "a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {error}\n{error.traceback}\n")
    except OSError as refused:  # a full disk may be the incident
        context.say(f"the incident log could not be written ({refused}): {error}")
