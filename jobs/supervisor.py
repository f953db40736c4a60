"""Runs attempts of a stage on a worker group until one succeeds, or until another would not help.

    supervise(train, make_task, context, stall_s=600.0, ask_to_stop=touch_stop_file)
    → {"step": 40, "samples_seen": 640, …}: what `train(task)` returned in rank 0 of the attempt that succeeded

One attempt, in order:
0. Reserve a place for every worker: wait for this campaign's turn in the queue, and until the cluster has the room;
   somebody who wants this process to end is heard meanwhile. Where the stage may run on several numbers of workers,
   this says on how many it does.
1. Claim the next attempt number of the run: from now on no older attempt can commit a checkpoint.
2. Ask the stage for its task, the one document that all workers are told.
3. Make the attempt's folder, `<stage>/attempts/attempt-000001`, for what the workers leave behind.
4. Run the worker group. About every 0.5 s: end it where a worker is stuck, ask it to stop where somebody wants this
   process to end, show its log.
5. It returns a value: done.

Where a node has given notice that it will go, or there is room for more workers (growth.py), the workers commit and
end as if somebody wanted this process to end; but then the next attempt starts at once, on other nodes or on more. That
is a move, and neither an incident nor a restart. The same where a campaign of a higher priority waits for the places;
then the next attempt begins with the wait in the queue.

It raises WorkerGroupError instead: write the incident down, and then, first match wins:
a. A worker asked for exit code 75, because it has committed and stopped: Preempted.
b. The attempt had more workers than the last that has committed, and made no checkpoint: the next has fewer again, at
   once, because a node that has joined may be broken.
c. A worker asked for another exit code: StageFailed with that code, because a restart does not cure it.
d. The exception is the one of the attempt before, or `max_restarts` attempts have failed in a row, and there was no new
   checkpoint meanwhile: StageFailed.
e. Somebody wants this process to end: Preempted.
f. Otherwise wait, and start the next attempt from the newest checkpoint. There is no wait after a new checkpoint;
   else it is `backoff_s`, doubled with every attempt.
"""

import builtins
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from data.errors import ExitCode, PatchlineError, Preempted
from jobs.cluster.backends import (
    leave_nodes,
    must_make_way,
    room_now,
    stay_on_nodes,
    wait_for_resources,
    worker_group_runner,
)
from jobs.cluster.failures import is_stopped_by_signal, node_of, worker_failure
from jobs.cluster.notices import notices
from jobs.cluster.worker_files import SeenRecords, WorkerRecord, records
from jobs.cluster.worker_group import Task, WorkerFunction, WorkerGroupError
from jobs.context import Context
from jobs.growth import Growth, Sizes
from jobs.ownership import claim_attempt
from pipeline.checkpoints.stored import committed_steps
from pipeline.monitoring.watchdog import Watch

# What stands in the message when memory runs out: the kernel's or Ray's killer, CUDA, Python, torch on a CPU, C++.
OUT_OF_MEMORY = ("out-of-memory", "OutOfMemoryError", "MemoryError", "can't allocate memory", "bad_alloc")
LESS_MEMORY = "; lower micro_batch, activation_gb or data.processes"
GO_ON = "run the same command again to go on"
STOP_POLL_S = 0.2  # how often a wait looks whether somebody wants this process to end


class StageFailed(PatchlineError):
    """A stage ended for a reason that a restart does not cure; carries the worker's exit code and exception."""

    def __init__(self, message: str, exit_code: int, kind: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.kind = kind  # name of the worker's exception; "" where it raised none


def supervise(
    function: WorkerFunction,
    make_task: Callable[[int], Task],
    context: Context,
    *,
    worlds: Sequence[int],
    stall_s: float,
    ask_to_stop: Callable[[Path], None],
) -> dict[str, Any]:
    """Run attempts of a stage until one succeeds; return rank 0's value.

    `make_task(attempt)` returns what the workers of an attempt are told. `worlds` are the numbers of workers on which
    the stage may run, the largest first. `ask_to_stop(attempt_folder)` is called, again and again, while somebody wants
    this process to end; what it raises ends the attempt and comes out here. A worker that holds up all others for
    `stall_s` seconds is a failure.

    Raises Preempted when the stage was stopped, StageFailed when it cannot go on.
    """
    run_worker_group = worker_group_runner(context.cluster)
    attempts_without_progress = 0
    last_cause = ""
    sizes = Sizes(worlds)
    while True:
        # 0. Before the claim: an attempt that never had a place leaves nothing behind.
        heed_stop = partial(end_if_asked, context)
        run = context.remote or str(context.run)
        world = wait_for_resources(context.cluster, run, context.say, heed_stop, sizes.open_worlds())
        cluster = dataclasses.replace(context.cluster, workers=world)
        sizes.begins(world)
        growth = growth_of(context, sizes, world)

        # 1 to 3: what this attempt is called, what its workers are told, and where they write.
        step_before = last_step(context)
        context.check_owned()
        attempt = claim_attempt(context.run, context.remote, context.directory.name)
        task = make_task(attempt)
        folder = attempt_folder(context.directory, attempt)
        folder.mkdir(parents=True)

        # 4 and 5. The watchdog starts anew with each attempt: it counts from the first look at these workers.
        watch = Watch(folder, world, stall_s, cluster.start_timeout_s)
        seen = SeenRecords(folder)
        look = partial(look_at_attempt, context, watch, seen, growth, attempt, ask_to_stop)
        try:
            with growth:
                value = run_worker_group(
                    function,
                    task,
                    cluster=cluster,
                    seen=seen,
                    on_tick=look,
                    is_shared=context.remote is None,
                )
            return cast(dict[str, Any], value)
        except (WorkerGroupError, Preempted) as error:
            made_progress = last_step(context) > step_before
            if made_progress:
                sizes.has_committed(world, nodes_of(folder, world))
            if is_move(context, folder, growth, error):
                move(context, folder, growth, sizes, world)
                continue
            # Asked for by whoever wants this process to end.
            if isinstance(error, Preempted):
                raise
            failure = error
        finally:
            # The log may have grown since the last look.
            context.tick(folder, attempt)

        # Add what only the driver knows: what the worker was doing, and what a user can lower.
        failure.place = watch.place(failure.rank)
        if any(word in failure.cause for word in OUT_OF_MEMORY):
            failure.cause += LESS_MEMORY

        # a to c: a worker knew what it wanted. The message is its exception's, without the exception's name.
        message = failure.cause.partition(": ")[2]
        # A stop that was asked for is no incident.
        if failure.exit_code == ExitCode.PREEMPTED:
            raise Preempted(message)
        write_incident(context, failure)
        if not made_progress and fall_back(context, failure, sizes, world):
            continue
        if failure.exit_code is not None:
            raise StageFailed(f"{context.name}: {message}", failure.exit_code, failure.kind)

        # d: a new checkpoint is progress, however short the attempt: such a stage may be restarted for ever.
        if made_progress:
            attempts_without_progress = 0
        else:
            attempts_without_progress += 1
        # One restart is enough to know that the same exception comes again. A death may have been chance.
        raised_an_exception = failure.kind != ""
        same_again = raised_an_exception and failure.cause == last_cause and attempts_without_progress > 0
        last_cause = failure.cause
        if same_again or attempts_without_progress > context.cluster.max_restarts:
            raise no_progress(context, failure, attempts_without_progress)

        # e and f
        prepare_restart(context, failure, attempts_without_progress)


def attempt_folder(directory: Path, attempt: int) -> Path:
    """Return where the workers of an attempt leave their records, logs and places, in their stage's directory."""
    return directory / "attempts" / f"attempt-{attempt:06d}"


def last_step(context: Context) -> int:
    """Return the step of the newest committed checkpoint of a stage; −1 where there is none."""
    newest_first = committed_steps(context.directory, context.remote)
    if not newest_first:
        return -1
    return newest_first[0]


# ------------------------------------------------------------------------ while an attempt runs


def look_at_attempt(
    context: Context,
    watch: Watch,
    seen: SeenRecords,
    growth: Growth,
    attempt: int,
    ask_to_stop: Callable[[Path], None],
) -> None:
    """Look at a running attempt once, at what the worker group has just `seen` of its workers.

    Raises WorkerGroupError where a worker is stuck, Preempted where somebody wants this process to end and no worker
    has started, and whatever `ask_to_stop` raises.
    """
    written = seen.by_rank
    end_if_stuck(context, watch, written)
    if growth.wanted is None and growth.is_due():
        context.say(f"room for {growth.wanted} workers, now {watch.world}: committing the step, to go on with more")
    if notices(watch.folder) or growth.wanted is not None:
        ask_to_stop(watch.folder)
    # Again with every look: the attempt may have begun after the signal.
    if context.stopping():
        # A worker that has not even started has nothing to commit, and to place it may take minutes.
        if not written:
            end_if_asked(context)
        ask_to_stop(watch.folder)
    context.tick(watch.folder, attempt)


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


# ------------------------------------------------------------------------ when a node is about to leave, or has joined


def growth_of(context: Context, sizes: Sizes, world: int) -> Growth:
    """Return what tells when an attempt of `world` workers is to end for a larger one."""
    room = partial(room_now, context.cluster)
    step = partial(last_step, context)
    return Growth(sizes.larger_than(world), context.cluster.patience_s, room, step, sizes.not_before)


def is_move(context: Context, folder: Path, growth: Growth, end: WorkerGroupError | Preempted) -> bool:
    """Tell whether an attempt has ended because a node gave notice or there is room for more workers, and only so."""
    was_asked = growth.wanted is not None or notices(folder) != []
    return end.exit_code == ExitCode.PREEMPTED and was_asked and not context.stopping()


def move(context: Context, folder: Path, growth: Growth, sizes: Sizes, world: int) -> None:
    """Say which node is left, or how many workers are wanted, and from where the next attempt starts.

    Raises Preempted where the driver's own node is left: the next attempt needs a driver elsewhere.
    """
    given = notices(folder)
    if growth.wanted is not None and not given:
        sizes.grows(growth.wanted)
        context.say(f"growing from {world} to {growth.wanted} workers, from {restart_point(context)}")
        return
    if all(notice.get("makes_way") for notice in given):
        context.say(f"makes way: {given[0]['why']}; waits in the queue, to go on from {restart_point(context)}")
        return
    given = [notice for notice in given if not notice.get("makes_way")]
    nodes = {notice["node_id"]: f"{notice['node']} ({notice['why']})" for notice in given}
    text = f"about to leave: {', '.join(nodes.values())}"
    for notice in given:
        if notice["rank"] is None:
            raise Preempted(f"{text}; that is this command's own node; stopped at {restart_point(context)}; {GO_ON}")
    leave_nodes(context.cluster, list(nodes))
    context.say(f"{text}; moving to other nodes, from {restart_point(context)}")


def nodes_of(folder: Path, world: int) -> set[str]:
    """Return Ray's ids of the nodes on which the workers of an attempt have started."""
    return {record.get("node_id", "") for record in records(folder, world).values()}


# ------------------------------------------------------------------------ after a failure


def write_incident(context: Context, failure: WorkerGroupError) -> None:
    """Append to the log of incidents that a person can read: when, which worker, why, and the traceback."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with open(context.directory / "incidents.txt", "a") as file:
            file.write(f"{clock} {failure}\n{failure.traceback}\n")
    except OSError as refused:
        # A full disk may be the incident itself: say it, and let the supervisor go on.
        context.say(f"the incident log could not be written ({refused}): {failure}")


def fall_back(context: Context, failure: WorkerGroupError, sizes: Sizes, world: int) -> bool:
    """Have the next attempt go back to the workers and nodes of the last that committed, where this one had more.

    Tells whether that is so.
    """
    proven = sizes.fall_back(world)
    if proven is None or context.stopping():
        return False
    stay_on_nodes(context.cluster, proven.nodes)
    start = restart_point(context)
    context.say(f"{failure}; no commit with {world} workers: back to {proven.world} on their nodes, from {start}")
    return True


def no_progress(context: Context, failure: WorkerGroupError, attempts_without_progress: int) -> StageFailed:
    """Return the error of a stage whose restarts bring no new checkpoint."""
    # A refusal of the disk has an exit code of its own: the storage is to be looked at, not the training.
    exit_code = ExitCode.INTERNAL
    if is_os_error(failure.kind):
        exit_code = ExitCode.IO
    last = restart_point(context)
    return StageFailed(
        f"{context.name}: {failure}\n"
        f"  {attempts_without_progress} attempts in a row made no new checkpoint; the last is {last}\n"
        f"  the traceback is in {context.directory / 'incidents.txt'}",
        exit_code,
    )


def prepare_restart(context: Context, failure: WorkerGroupError, attempts_without_progress: int) -> None:
    """Say what has happened and from where the next attempt starts, and wait as long as the config says.

    Raises Preempted where somebody wants this process to end, before or during the wait.
    """
    start = restart_point(context)
    if context.stopping():
        raise Preempted(f"{failure}; stopped at {start}; {GO_ON}")
    # What has just made a checkpoint starts at once; what makes none is perhaps waiting for a disk or a node.
    wait_s = 0.0
    if attempts_without_progress:
        wait_s = context.cluster.backoff_s * 2 ** (attempts_without_progress - 1)
    remark = f" in {wait_s:.0f}s" if wait_s else ""
    context.say(f"{failure}; restarting from {start}{remark}")

    # In small pieces, so that a signal does not have to wait for the end of the wait. Nor does a campaign that is to
    # have the places.
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and not must_make_way(context.cluster):
        if context.stopping():
            raise Preempted(f"stopped while waiting to restart from {start}; {GO_ON}")
        time.sleep(STOP_POLL_S)


def restart_point(context: Context) -> str:
    """Return where the next attempt starts, in words."""
    step = last_step(context)
    return f"step {step}" if step >= 0 else "the start: nothing was committed yet"


def is_os_error(kind: str) -> bool:
    """Tell whether an exception's name is that of an operating system's refusal, as "PermissionError" is."""
    exception = getattr(builtins, kind, None)
    return isinstance(exception, type) and issubclass(exception, OSError)
