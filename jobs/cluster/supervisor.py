"""Runs attempts of a stage on a worker group until one succeeds, or until another would not help.

    supervise(train, make_task, context, worlds=(4, 2, 1), stall_s=600.0)
    → {"step": 40, "samples_seen": 640, …}: what `train(task)` returned in rank 0 of the attempt that succeeded

One attempt, in order:
0. Reserve a place for every worker: wait until the cluster has the room; somebody who wants this process to end is
   heard meanwhile. Where the stage may run on several numbers of workers, this says on how many it does.
1. Claim the next attempt number of the run: from now on no older attempt can commit a checkpoint.
2. Ask the stage for its task, the one document that all workers are told.
3. Make the attempt's folder, `<stage>/attempts/attempt-000001`, for what the workers leave behind.
4. Run the worker group. About every 0.5 s, in order: end it where a worker is stuck, and name a worker that is slow;
   ask the workers to commit and end where there is room for more of them, where a node has given notice, and where
   somebody wants this process to end; show the log.
5. It returns a value: done.

Where a node has given notice that it will go, or there is room for more workers (elastic.py), the workers commit and
end as if somebody wanted this process to end; but then the next attempt starts at once, on other nodes or on more. That
is a move, and neither an incident nor a restart.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from data.errors import ExitCode, Preempted
from jobs.cluster.elastic import Growth, Sizes
from jobs.cluster.failure import WorkerGroupError
from jobs.cluster.placement import nodes_of
from jobs.cluster.recovery import (
    GO_ON,
    FailuresInARow,
    StageFailed,
    fall_back,
    is_move,
    last_step,
    move,
    no_progress,
    prepare_restart,
    restart_point,
    write_incident,
)
from jobs.cluster.worker import Task, WorkerFunction
from jobs.cluster.worker_group import WorkerGroup, do_nothing
from jobs.cluster_config import ClusterConfig
from jobs.ownership import claim_attempt
from jobs.resolved_recipe import Context
from pipeline.checkpoints.manifest import attempt_folder
from pipeline.monitoring.watchdog import Watch


@contextmanager
def alone(task: Task, folder: Path, cluster: ClusterConfig) -> Iterator[Callable[[], None]]:
    """Stand in for a companion of an attempt that has none."""
    yield do_nothing


@dataclass(frozen=True)
class Attempt:
    """What the driver knows of an attempt that runs."""

    context: Context
    number: int
    group: WorkerGroup
    watch: Watch
    growth: Growth
    end_companion: Callable[[], None]  # has what works beside the worker group give everything back at once
    can_commit: bool

    def look(self) -> None:
        """Look at the workers once, as they were last reported, about every 0.5 s.

        Raises WorkerGroupError where a worker is stuck, Preempted where somebody wants this process to end and there is
        nothing to commit. Where that ends the attempt, the companion ends first.
        """
        try:
            # The agents read what workers have left: none has to answer, so a frozen one cannot hold this up. A worker
            # that has ended enters no phase any more: then the cluster is clearing up, which is nobody's fault.
            if not self.group.have_all_ended():
                stuck = self.watch.look(self.group.places(), self.group.is_frozen)
                if stuck is not None:
                    raise self.group.failure(stuck.rank, stuck.cause)
                # Slow is not stuck: the run goes on at the pace of its slowest worker, and its user learns which it is.
                slow = self.watch.slow()
                if slow is not None:
                    rank, share = slow
                    self.context.log(
                        f"worker {rank} on {self.group.node_names[rank]} is slow: "
                        f"the others waited for it alone in {share:.0%} of the looks"
                    )
            if self.growth.wanted is None and self.growth.is_due():
                room = f"room for {self.growth.wanted} workers, now {self.watch.world}"
                self.context.log(f"{room}: committing the step, to go on with more")
            is_moved = bool(self.group.drain_events) or self.growth.wanted is not None
            if is_moved or self.context.stop_requested():
                self.request_stop()
            self.context.poll(self.group.folder, self.number)
        except BaseException:
            self.end_companion()
            raise

    def request_stop(self) -> None:
        """Ask the workers to commit and end; called again and again, because the attempt may have just begun."""
        # A worker that has not even started has nothing to commit, and to place it may take minutes.
        if self.context.stop_requested() and not self.group.has_started():
            end_if_asked(self.context)
        if not self.can_commit:
            raise Preempted(f"stopped in {self.context.stage.name}; run the same command again to do it from its start")
        self.group.request_stop()


def supervise(
    function: WorkerFunction,
    make_task: Callable[[int], Task],
    context: Context,
    *,
    worlds: Sequence[int],
    stall_s: float,
    can_commit: bool = True,
    handed_on: Sequence[str] = (),
    accompany: Callable[[Task, Path, ClusterConfig], AbstractContextManager[Callable[[], None]]] = alone,
) -> dict[str, Any]:
    """Run attempts of a stage until one succeeds; return rank 0's value.

    `make_task(attempt)` returns what the workers of an attempt are told. `worlds` are the numbers of workers on which
    the stage may run, the largest first. A worker that holds up all others for `stall_s` seconds is a failure. Workers
    that cannot commit are ended at once where somebody wants this process to end. `handed_on` names the files of the
    stage's folder by which one attempt tells the next. `accompany(task, attempt_folder, cluster)` works beside
    each attempt as long as its block lasts, and gives the function that has it give everything back at once.

    Raises Preempted when the stage was stopped, StageFailed when it cannot go on.
    """
    nodes = nodes_of(context.campaign.cluster)
    failures = FailuresInARow(context.campaign.cluster.max_restarts)
    sizes = Sizes(worlds)
    while True:
        # 0. Before the claim: an attempt that never had a place leaves nothing behind.
        run = context.campaign.storage.address()
        world = nodes.reserve(run, sizes.open_worlds(), context.log, partial(end_if_asked, context))
        sizes.begins(world)
        cluster = dataclasses.replace(context.campaign.cluster, workers=world)
        growth = Growth(
            sizes.larger_than(world), cluster.patience_s, nodes.room, partial(last_step, context), sizes.not_before
        )

        # 1 to 3: what this attempt is called, what its workers are told, and where they write.
        step_before = last_step(context)
        context.check_owned()
        number = claim_attempt(context.campaign.storage, context.directory.name)
        task = make_task(number)
        folder = attempt_folder(context.directory, number)
        folder.mkdir(parents=True)

        # 4 and 5. The watchdog starts anew with each attempt: it counts from the first look at these workers.
        watch = Watch(world, stall_s, cluster.start_timeout_s)
        is_shared = context.campaign.storage.is_shared
        group = WorkerGroup(nodes, cluster, folder, is_shared=is_shared, handed_on=handed_on)
        try:
            with growth, accompany(task, folder, cluster) as end_companion:
                attempt = Attempt(context, number, group, watch, growth, end_companion, can_commit)
                value = group.run(function, task, attempt.look)
            return cast(dict[str, Any], value)
        except (WorkerGroupError, Preempted) as error:
            # First: the store may be gone that is asked below, and its error would come out in the place of this one.
            # A stop that was asked for is no incident, nor is a move.
            if isinstance(error, WorkerGroupError) and error.exit_code != ExitCode.PREEMPTED:
                write_incident(context, error, group.places())
            # Where no attempt follows and a worker has said how it ended, the answer would change nothing: the error
            # is raised below. A store that is gone would be asked for a minute.
            is_end_of_stage = context.stop_requested() and error.exit_code is not None
            made_progress = not is_end_of_stage and last_step(context) > step_before
            if made_progress:
                sizes.has_committed(world, {link.agent.node_id for link in group.links})
            drain_events = list(group.drain_events.values())
            if is_move(context, drain_events, growth, error):
                move(context, nodes, drain_events, growth, sizes, world)
                continue
            # Asked for by whoever wants this process to end.
            if isinstance(error, Preempted):
                raise
            failure = error
        finally:
            # The log may have grown since the last look.
            context.poll(folder, number)

        # a and b.
        if failure.exit_code == ExitCode.PREEMPTED:
            raise Preempted(message_of(failure))
        if not made_progress and fall_back(context, nodes, failure, sizes, world):
            continue
        # c. A worker that asks for an exit code knows what it wants.
        if failure.exit_code is not None:
            raise StageFailed(f"{context.stage.name}: {message_of(failure)}", failure.exit_code, failure.kind)
        # d to f.
        if failures.are_too_many(failure, made_progress):
            raise no_progress(context, failure, failures.count)
        prepare_restart(context, failure, failures.count)


def end_if_asked(context: Context) -> None:
    """Raise Preempted where somebody wants this process to end before any worker has started."""
    if context.stop_requested():
        raise Preempted(f"stopped before the workers had started, at {restart_point(context)}; {GO_ON}")


def message_of(failure: WorkerGroupError) -> str:
    """Return the message of the exception by which a worker has ended, without the exception's name."""
    return failure.cause.partition(": ")[2]
