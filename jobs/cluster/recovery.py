"""What becomes of a stage whose attempt has ended: the next one on other nodes or on fewer workers, or none.

A **move** is an attempt that ended because a node gave notice, or for more workers: neither an incident nor a restart.
"""

import builtins
import time
from collections.abc import Mapping, Sequence

from data.errors import ExitCode, PatchlineError, Preempted
from jobs.cluster.elastic import Growth, Sizes
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.nodes import Nodes
from jobs.cluster.worker_group import DrainEvent
from jobs.resolved_recipe import Context
from pipeline.monitoring.watchdog import Place

GO_ON = "run the same command again to go on"

# What stands in the message when memory runs out: the kernel's or Ray's killer, CUDA, Python, torch on a CPU, C++.
OUT_OF_MEMORY = ("out-of-memory", "OutOfMemoryError", "MemoryError", "can't allocate memory", "bad_alloc")
LESS_MEMORY = "; lower micro_batch, activation_gb or data.processes"
STOP_POLL_S = 0.2  # how often a wait looks whether somebody wants this process to end


class StageFailed(PatchlineError):
    """A stage ended for a reason that a restart does not cure; carries the worker's exit code and exception."""

    def __init__(self, message: str, exit_code: int, kind: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.kind = kind  # name of the worker's exception; "" where it raised none


class FailuresInARow:
    """Counts attempts that failed without a new checkpoint between them, and knows when another would not help."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.count = 0
        self.last_cause = ""

    def are_too_many(self, failure: WorkerGroupError, made_progress: bool) -> bool:
        """Count one more, or begin anew where it made a checkpoint; tell whether the stage cannot go on."""
        # A new checkpoint is progress, however short the attempt: such a stage may be restarted for ever.
        self.count = 0 if made_progress else self.count + 1
        # One restart is enough to know that the same exception comes again. A death may have been chance.
        raised_an_exception = failure.kind != ""
        is_same_again = raised_an_exception and failure.cause == self.last_cause and self.count > 0
        self.last_cause = failure.cause
        return is_same_again or self.count > self.max_restarts


def is_move(
    context: Context, drain_events: Sequence[DrainEvent], growth: Growth, end: WorkerGroupError | Preempted
) -> bool:
    """Tell whether an attempt has ended because a node gave notice or there is room for more workers, and only so."""
    was_asked = growth.wanted is not None or bool(drain_events)
    return end.exit_code == ExitCode.PREEMPTED and was_asked and not context.stop_requested()


def move(
    context: Context, nodes: Nodes, drain_events: Sequence[DrainEvent], growth: Growth, sizes: Sizes, world: int
) -> None:
    """Say which node is left, or how many workers are wanted, and from where the next attempt starts.

    Raises Preempted where the driver's own node is left: the next attempt needs a driver elsewhere.
    """
    if growth.wanted is not None and not drain_events:
        sizes.grows(growth.wanted)
        context.log(f"growing from {world} to {growth.wanted} workers, from {restart_point(context)}")
        return
    leaving = {event.node_id: f"{event.node} ({event.why})" for event in drain_events}
    text = f"about to leave: {', '.join(leaving.values())}"
    if any(event.rank is None for event in drain_events):
        raise Preempted(f"{text}; that is this command's own node; stopped at {restart_point(context)}; {GO_ON}")
    nodes.avoid(list(leaving))
    context.log(f"{text}; moving to other nodes, from {restart_point(context)}")


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


def write_incident(context: Context, failure: WorkerGroupError, places: Mapping[int, Place]) -> None:
    """Append to the log of incidents that a person can read: when, which worker, in which of `places`, and why."""
    # These go into the failure itself, because the log and the stage's error say them too.
    if failure.rank is not None and failure.rank in places:
        failure.place = str(places[failure.rank])
    if any(word in failure.cause for word in OUT_OF_MEMORY):
        failure.cause += LESS_MEMORY

    clock = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with open(context.directory / "incidents.txt", "a") as file:
            file.write(f"{clock} {failure}\n{failure.traceback}\n")
    except OSError as refused:
        # A full disk may be the incident itself: say it, and let the supervisor go on.
        context.log(f"the incident log could not be written ({refused}): {failure}")


def fall_back(context: Context, nodes: Nodes, failure: WorkerGroupError, sizes: Sizes, world: int) -> bool:
    """Have the next attempt go back to the workers and nodes of the last that committed, where this one had more.

    Tells whether that is so.
    """
    proven = sizes.fall_back(world)
    if proven is None or context.stop_requested():
        return False
    nodes.stay_on(proven.nodes)
    start = restart_point(context)
    context.log(f"{failure}; no commit with {world} workers: back to {proven.world} on their nodes, from {start}")
    return True


def no_progress(context: Context, failure: WorkerGroupError, attempts_without_progress: int) -> StageFailed:
    """Return the error of a stage whose restarts bring no new checkpoint."""
    # A refusal of the disk has an exit code of its own: the storage is to be looked at, not the training.
    exit_code = ExitCode.INTERNAL
    if is_os_error(failure.kind):
        exit_code = ExitCode.IO
    last = restart_point(context)
    return StageFailed(
        f"{context.stage.name}: {failure}\n"
        f"  {attempts_without_progress} attempts in a row made no new checkpoint; the last is {last}\n"
        f"  the traceback is in {context.directory / 'incidents.txt'}",
        exit_code,
    )


def prepare_restart(context: Context, failure: WorkerGroupError, attempts_without_progress: int) -> None:
    """Say what has happened and from where the next attempt starts, and wait as long as the config says.

    Raises Preempted where somebody wants this process to end, before or during the wait.
    """
    start = restart_point(context)
    if context.stop_requested():
        raise Preempted(f"{failure}; stopped at {start}; {GO_ON}")
    # What has just made a checkpoint starts at once; what makes none is perhaps waiting for a disk or a node.
    wait_s = 0.0
    if attempts_without_progress:
        wait_s = context.campaign.cluster.backoff_s * 2 ** (attempts_without_progress - 1)
    remark = f" in {wait_s:.0f}s" if wait_s else ""
    context.log(f"{failure}; restarting from {start}{remark}")

    # In small pieces, so that a signal does not have to wait for the end of the wait.
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if context.stop_requested():
            raise Preempted(f"stopped while waiting to restart from {start}; {GO_ON}")
        time.sleep(STOP_POLL_S)


def is_os_error(kind: str) -> bool:
    """Tell whether an exception's name is that of an operating system's refusal, as "PermissionError" is."""
    exception = getattr(builtins, kind, None)
    return isinstance(exception, type) and issubclass(exception, OSError)
