"""Runs attempts of a stage on a worker group until one succeeds, or until another would not help.

    supervise(train, make_task, context, worlds=(4, 2, 1), stall_s=600.0, ask_to_stop=touch_stop_file)
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

Where it raises WorkerGroupError instead, the incident is written down, but not in case a. Then the first case decides
that applies:
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

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from data.errors import ExitCode, Preempted
from jobs.attempts.attempt import Attempt, Companion, alone, end_if_asked, last_step
from jobs.attempts.growth import Growth, Sizes
from jobs.attempts.restarts import (
    FailuresInARow,
    StageFailed,
    add_what_the_driver_knows,
    fall_back,
    is_move,
    move,
    no_progress,
    nodes_of,
    prepare_restart,
    write_incident,
)
from jobs.cluster.backends import room_now, wait_for_resources, worker_group_runner
from jobs.cluster_config import ClusterConfig
from jobs.context import Context
from jobs.ownership import claim_attempt
from jobs.workers.worker_files import SeenRecords
from jobs.workers.worker_group import Task, WorkerFunction, WorkerGroupError
from pipeline.checkpoints.manifest import attempt_folder
from pipeline.monitoring.watchdog import Watch


def supervise(
    function: WorkerFunction,
    make_task: Callable[[int], Task],
    context: Context,
    *,
    worlds: Sequence[int],
    stall_s: float,
    ask_to_stop: Callable[[Path], None],
    accompany: Callable[[Task, Path, ClusterConfig], Companion] = alone,
) -> dict[str, Any]:
    """Run attempts of a stage until one succeeds; return rank 0's value.

    `make_task(attempt)` returns what the workers of an attempt are told. `worlds` are the numbers of workers on which
    the stage may run, the largest first. `ask_to_stop(attempt_folder)` is called, again and again, while somebody wants
    this process to end; what it raises ends the attempt and comes out here. A worker that holds up all others for
    `stall_s` seconds is a failure. `accompany(task, attempt_folder, cluster)` returns what works beside each attempt.

    Raises Preempted when the stage was stopped, StageFailed when it cannot go on.
    """
    run_worker_group = worker_group_runner(context.cluster)
    failures = FailuresInARow(context.cluster.max_restarts)
    sizes = Sizes(worlds)
    while True:
        # 0. Before the claim: an attempt that never had a place leaves nothing behind.
        world = wait_for_places(context, sizes)
        cluster = dataclasses.replace(context.cluster, workers=world)
        growth = growth_of(context, sizes, world)

        # 1 to 3: what this attempt is called, what its workers are told, and where they write.
        step_before = last_step(context)
        context.check_owned()
        number = claim_attempt(context.storage, context.directory.name)
        task = make_task(number)
        folder = attempt_folder(context.directory, number)
        folder.mkdir(parents=True)

        # 4 and 5. The watchdog starts anew with each attempt: it counts from the first look at these workers.
        watch = Watch(folder, world, stall_s, cluster.start_timeout_s)
        seen = SeenRecords(folder)
        companion = accompany(task, folder, cluster)
        attempt = Attempt(context, number, watch, seen, growth, companion, ask_to_stop)
        try:
            with growth, companion:
                value = run_worker_group(
                    function,
                    task,
                    cluster=cluster,
                    seen=seen,
                    on_tick=attempt.look,
                    is_shared=context.storage.is_shared,
                )
            return cast(dict[str, Any], value)
        except (WorkerGroupError, Preempted) as error:
            # First: the store may be gone that is asked below, and its error would come out in the place of this one.
            # A stop that was asked for is no incident, nor is a move.
            if isinstance(error, WorkerGroupError) and error.exit_code != ExitCode.PREEMPTED:
                add_what_the_driver_knows(error, watch)
                write_incident(context, error)
            # Where no attempt follows and a worker has said how it ended, the answer would change nothing: the error
            # is raised below. A store that is gone would be asked for a minute.
            is_end_of_stage = context.stopping() and error.exit_code is not None
            made_progress = not is_end_of_stage and last_step(context) > step_before
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
            context.tick(folder, number)

        # a and b.
        if failure.exit_code == ExitCode.PREEMPTED:
            raise Preempted(message_of(failure))
        if not made_progress and fall_back(context, failure, sizes, world):
            continue
        # c to f.
        wait_for_next_attempt(context, failure, failures, made_progress=made_progress)


def wait_for_places(context: Context, sizes: Sizes) -> int:
    """Wait until the workers of the next attempt have their places, and return how many they are."""
    heed_stop = partial(end_if_asked, context)
    run = context.storage.address()
    world = wait_for_resources(context.cluster, run, context.say, heed_stop, sizes.open_worlds())
    sizes.begins(world)
    return world


def growth_of(context: Context, sizes: Sizes, world: int) -> Growth:
    """Return what tells when an attempt of `world` workers is to end for a larger one."""
    room = partial(room_now, context.cluster)
    step = partial(last_step, context)
    return Growth(sizes.larger_than(world), context.cluster.patience_s, room, step, sizes.not_before)


def wait_for_next_attempt(
    context: Context, failure: WorkerGroupError, failures: FailuresInARow, *, made_progress: bool
) -> None:
    """Find out whether another attempt may follow the one that has failed, and wait for it.

    Raises StageFailed where it would not help, Preempted where somebody wants this process to end.
    """
    # A worker that asks for an exit code knows what it wants.
    if failure.exit_code is not None:
        raise StageFailed(f"{context.name}: {message_of(failure)}", failure.exit_code, failure.kind)
    if failures.are_too_many(failure, made_progress):
        raise no_progress(context, failure, failures.count)
    prepare_restart(context, failure, failures.count)


def message_of(failure: WorkerGroupError) -> str:
    """Return the message of the exception by which a worker has ended, without the exception's name."""
    return failure.cause.partition(": ")[2]
