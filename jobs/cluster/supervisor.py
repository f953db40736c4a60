"""Runs attempts of a stage on a worker group until one succeeds, or until another attempt would not help.

    supervise(train, make_task, context, worlds=(4, 2, 1), stall_s=600.0)
    → {"step": 40, "samples_seen": 640, …}: the value of `train(task)` in rank 0 of the attempt that succeeded

One attempt, in order (`supervise`):
0. Reserve a place for every worker: wait until the cluster has room, or until this process is asked to end. If the
   stage allows several numbers of workers, this step chooses one.
1. Claim the next attempt number of the run: from now on no older attempt can commit a checkpoint.
2. Get the task from the stage: the document that all workers receive.
3. Make the attempt's folder, `<stage>/attempts/attempt-000001`, for the files of the workers.
4. Run the worker group. About every 0.5 s, in order (`Attempt.look`): report the status; end the attempt if a worker is
   stuck; log the name of a slow worker; ask the workers to commit and end if there is room for more workers, if a node
   is about to leave, or if this process is asked to end.
5. The worker function returns a value: done.

If the worker group has ended otherwise, in order:
6. Another command owns the run by now, because this process was frozen: RunOwned.
7. A failure is recorded as an incident, unless a worker committed and stopped (exit code 75).
8. If a node is about to leave, or if there is room for more workers (elastic.py), the workers have committed and
   stopped as if this process were asked to end. The next attempt starts at once, on other nodes or on more. This is a
   move (`move`), not a restart.
9. This process is asked to end, and there was nothing to commit: Preempted.
10. Otherwise the attempt has failed, and the first case that applies decides (`recover`):
    a. A worker requested exit code 75, because it committed and stopped: Preempted.
    b. A worker requested exit code 73, because another command seemed to own the run: RunOwned if one does; otherwise
       the next attempt starts at once.
    c. Workers refused to start because some nodes differ from the others: those nodes are excluded from this and all
       later attempts, and the next attempt starts at once. StageFailed if the other nodes have too little room. Not if
       this process is asked to end.
    d. The attempt had more workers than the last one that committed, and made no checkpoint: the next attempt starts at
       once with the workers and nodes of that one, because a new node may be broken. Not if this process is asked to
       end.
    e. A worker requested another exit code: StageFailed with that code, because a restart does not help.
    f. There was no new checkpoint, and the exception is the same as in the previous attempt, or more than
       `max_restarts` attempts have failed in a row: StageFailed.
    g. This process is asked to end: Preempted.
    h. Otherwise wait, then start the next attempt from the newest checkpoint. There is no wait after a new checkpoint;
       without one the wait is `backoff_s`, doubled with every attempt.
"""

import builtins
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from data.errors import ExitCode, MismatchedNodes, Preempted
from jobs.cluster.elastic import Growth, Sizes
from jobs.cluster.failure import StageFailed, WorkerGroupError
from jobs.cluster.nodes import Nodes, nodes_of
from jobs.cluster.worker import Task, WorkerFunction
from jobs.cluster.worker_group import WorkerGroup
from jobs.cluster_config import ClusterConfig
from jobs.ownership import claim_attempt
from jobs.resolved_recipe import Context
from pipeline.identity import MUST_BE_EQUAL, code_mismatch, code_version, differences
from pipeline.monitoring.watchdog import PhaseReport, Watch

RESUME_HINT = "run the same command again to resume"

# Parts of the messages for exhausted memory: the kernel's or Ray's OOM killer, CUDA, Python, torch on a CPU, C++.
OUT_OF_MEMORY = ("out-of-memory", "OutOfMemoryError", "MemoryError", "can't allocate memory", "bad_alloc")
LESS_MEMORY = "; lower micro_batch or data.processes, or raise checkpoint_blocks"
STOP_POLL_S = 0.2  # how often a wait checks whether this process is asked to end

Accompany = Callable[[Task, Path, ClusterConfig], AbstractContextManager[object]]


def supervise(
    function: WorkerFunction,
    make_task: Callable[[int], Task],
    context: Context,
    *,
    worlds: Sequence[int],
    stall_s: float,
    can_commit: bool = True,
    carried_files: Sequence[str] = (),
    accompany: Accompany | None = None,
) -> dict[str, Any]:
    """Run attempts of a stage until one succeeds; return rank 0's value.

    `make_task(attempt)` returns the task that the workers of an attempt receive. `worlds` are the allowed numbers of
    workers, largest first. An attempt fails if a worker holds up all others for `stall_s` seconds. If this process is
    asked to end, workers that cannot commit are ended at once. `carried_files` names the files in the stage's folder
    that one attempt passes to the next. `accompany(task, attempt_folder, cluster)` returns the context manager of a
    service that runs during each attempt.

    Raises Preempted if the stage was stopped, StageFailed if it cannot continue.
    """
    nodes = nodes_of(context.campaign.cluster)
    storage = context.campaign.storage
    history = History(Sizes(worlds))
    while True:
        # 0. Before the claim: an attempt that never had a place leaves no trace.
        sizes = history.sizes
        world = nodes.reserve(storage.address(), sizes.open_worlds(), context.log, partial(end_if_requested, context))
        sizes.begins(world)
        cluster = dataclasses.replace(context.campaign.cluster, workers=world)
        larger = [other for other in worlds if other > world]
        growth = Growth(larger, cluster.patience_s, nodes.room, partial(last_step, context), sizes.not_before)

        # 1 to 3. The attempt's number, the workers' task, and the attempt's folder.
        step_before = last_step(context)
        context.check_owned()
        number = claim_attempt(storage, context.directory.name)
        task = make_task(number)
        folder = context.attempt_folder(number)
        folder.mkdir(parents=True)

        # 4 and 5. Each attempt has a new watchdog, which starts to count at the first report of these workers.
        watch = Watch(world, stall_s, cluster.start_timeout_s)
        group = WorkerGroup(nodes, cluster, folder, is_shared=storage.is_shared, carried_files=carried_files)
        attempt = Attempt(context, number, group, watch, growth, can_commit)
        companion: AbstractContextManager[object] = nullcontext()
        if accompany is not None:
            companion = accompany(task, folder, cluster)
        growth.start()
        try:
            with companion:
                value = group.run(function, task, attempt.look)
            return cast(dict[str, Any], value)
        except (WorkerGroupError, Preempted) as error:
            # 6.
            context.poll(number, 0)
            # 7. Before the store is read: it may be gone, and its error would replace this one.
            if isinstance(error, WorkerGroupError) and error.exit_code != ExitCode.PREEMPTED:
                write_incident(context, number, error, group.places())
            # If no attempt follows and a worker has reported its end, progress makes no difference: the error is raised
            # below. Reading a lost store takes a minute.
            is_end_of_stage = context.stop_requested() and error.exit_code is not None
            made_progress = not is_end_of_stage and last_step(context) > step_before
            if made_progress:
                sizes.has_committed(world, {link.agent.node_id for link in group.links})
            # 8. Only if this process is not asked to end as well.
            was_asked = growth.target is not None or bool(group.drain_events)
            if error.exit_code == ExitCode.PREEMPTED and was_asked and not context.stop_requested():
                move(attempt, nodes, sizes)
                continue
            # 9.
            if isinstance(error, Preempted):
                raise
            failure = error
        finally:
            growth.has_ended.set()
            for remark in group.remarks:
                context.log(remark)
            # Workers may have logged something after the last poll.
            context.poll(number, 0)
        # 10.
        recover(context, nodes, history, failure, world, made_progress=made_progress)


@dataclass
class History:
    """What the supervisor remembers between the attempts of a stage."""

    sizes: Sizes
    failures: int = 0  # failed attempts in a row without a new checkpoint
    last_cause: str = ""  # cause of the last failure


@dataclass(frozen=True)
class Attempt:
    """A running attempt, as the driver sees it."""

    context: Context
    number: int
    group: WorkerGroup
    watch: Watch
    growth: Growth
    can_commit: bool

    def look(self) -> None:
        """Check the workers once, as they were last reported, about every 0.5 s.

        Raises WorkerGroupError if a worker is stuck, Preempted if this process is asked to end and there is nothing to
        commit.
        """
        context = self.context
        group = self.group
        # This comes first: if the driver was frozen, another command may own the run, and its files must not change.
        step = min((place.step for place in group.places().values()), default=0)
        context.poll(self.number, step)
        # The agents read the files of the workers; no worker has to answer, so a frozen one cannot block this. A worker
        # that has ended enters no new phase: the rest of the time is cleanup and not a stall.
        if not group.have_all_ended():
            stuck = self.watch.find_stall(group.places(), group.is_frozen)
            # If an agent stays silent, the worker group ends the attempt soon, and names the agent.
            if stuck is not None and not group.has_silent_agent():
                raise group.evidence().silent_failure(stuck.rank, stuck.cause)
            # A slow worker does not end the attempt: the run continues at its pace, and the user learns which it is.
            slow = self.watch.slow()
            if slow is not None:
                rank, share = slow
                context.log(
                    f"worker {rank} on {group.node_names[rank]} is slow: "
                    f"in {share:.0%} of the checks, all other workers were waiting for it"
                )
        if self.growth.target is None and self.growth.is_due():
            room = f"room for {self.growth.target} workers, currently {self.watch.world}"
            context.log(f"{room}: committing this step, then continuing with more workers")

        # Repeatedly, because the attempt may have just begun.
        if group.drain_events or self.growth.target is not None or context.stop_requested():
            # Workers have nothing to commit before their start, and placing them may take minutes.
            if not group.request_stop():
                end_if_requested(context)
            if not self.can_commit:
                raise Preempted(
                    f"stopped in {context.stage.name}; "
                    "run the same command again to start this stage from its beginning"
                )


def end_if_requested(context: Context) -> None:
    """Raise Preempted if this process is asked to end and no worker has started yet."""
    if context.stop_requested():
        raise Preempted(f"stopped before the workers started, at {restart_point(context)}; {RESUME_HINT}")


def last_step(context: Context) -> int:
    """Return the step of a stage's newest committed checkpoint; −1 if there is none."""
    newest_first = context.checkpoints.committed_steps()
    return newest_first[0] if newest_first else -1


def restart_point(context: Context) -> str:
    """Describe where the next attempt starts: "step 40", or at the beginning."""
    step = last_step(context)
    return f"step {step}" if step >= 0 else "the beginning (no checkpoint yet)"


# ------------------------------------------------------------------------ an attempt has ended


def write_incident(
    context: Context, attempt: int, failure: WorkerGroupError, places: Mapping[int, PhaseReport]
) -> None:
    """Append a failure to incidents.txt: time, attempt, worker, its phase (one of `places`), and cause."""
    # Stored in the failure, because the log and the stage's error show them too.
    if failure.rank is not None and failure.rank in places:
        failure.place = str(places[failure.rank])
    if any(word in failure.cause for word in OUT_OF_MEMORY):
        failure.cause += LESS_MEMORY

    clock = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with open(context.directory / "incidents.txt", "a") as file:
            file.write(f"{clock} attempt {attempt}: {failure}\n{failure.traceback}\n")
    except OSError as refused:
        # A full disk may be the incident itself: log it, and let the supervisor continue.
        context.log(f"could not write incidents.txt ({refused}): {failure}")


def move(attempt: Attempt, nodes: Nodes, sizes: Sizes) -> None:
    """Log why the next attempt moves: which nodes are leaving, or how many workers it grows to.

    Raises Preempted if the driver's own node is leaving, because the next attempt needs a driver elsewhere.
    """
    context = attempt.context
    target = attempt.growth.target
    drain_events = attempt.group.drain_events
    if target is not None and not drain_events:
        sizes.grows(target)
        context.log(f"growing from {attempt.watch.world} to {target} workers, resuming from {restart_point(context)}")
        return
    leaving = {}
    for event in drain_events.values():
        leaving[event.node_id] = f"{event.node} ({event.why})"
    text = f"leaving the cluster: {', '.join(leaving.values())}"
    if None in drain_events:
        raise Preempted(f"{text}; this command runs on that node; stopped at {restart_point(context)}; {RESUME_HINT}")
    nodes.avoid(list(leaving))
    context.log(f"{text}; moving the workers to other nodes, resuming from {restart_point(context)}")


def exclude_unlike_nodes(context: Context, nodes: Nodes, failure: WorkerGroupError, least: int) -> None:
    """Exclude and report the nodes that differ from the majority of all nodes, with or without workers.

    Raises StageFailed if no node differs, if there is no majority, or if the other nodes have too little room.
    """
    identities = nodes.identities()
    code = code_version()
    odd: dict[str, str] = {}  # node id → how the node differs
    ties = []
    for node_id, identity in identities.items():
        if identity["code"] != code:
            odd[node_id] = code_mismatch([identity], code)
    for difference in differences(list(identities.values()), MUST_BE_EQUAL):
        if difference.is_tie:
            ties.append(str(difference))
        for node_id, identity in identities.items():
            if identity in difference.odd:
                odd[node_id] = str(difference)

    message = f"{context.stage.name}: {failure.cause.partition(': ')[2]}"
    if ties:
        raise StageFailed(f"{message}\n  among all nodes: {'; '.join(ties)}", ExitCode.UNAVAILABLE, failure.kind)
    if not odd:
        raise StageFailed(message, ExitCode.UNAVAILABLE, failure.kind)
    names = ", ".join(identities[node_id]["node"] for node_id in odd)
    room = nodes.exclude(odd.keys(), least)
    if room < least:
        message += f"\n  without {names} the cluster has room for {room} of {least} workers"
        raise StageFailed(message, ExitCode.UNAVAILABLE, failure.kind)
    why = "; ".join(dict.fromkeys(odd.values()))
    context.log(f"excluded from this campaign: {names} ({why}); restarting from {restart_point(context)}")


def recover(
    context: Context, nodes: Nodes, history: History, failure: WorkerGroupError, world: int, *, made_progress: bool
) -> None:
    """Decide what follows a failed attempt of `world` workers; return when the next attempt may start.

    Follows cases a to h of the module's docstring. Raises Preempted (also if this process is asked to end during a
    wait), RunOwned and StageFailed.
    """
    # a. The message of the worker's exception, without the exception's name.
    message = failure.cause.partition(": ")[2]
    if failure.exit_code == ExitCode.PREEMPTED:
        raise Preempted(message)
    # b. A driver that lost the run may have claimed an attempt number as its last act; this one then still owns it.
    if failure.exit_code == ExitCode.OWNED:
        context.check_owned()
        context.log(f"{failure}; restarting from {restart_point(context)}")
        return
    # c. Before d, which would not exclude the differing nodes.
    if failure.kind == MismatchedNodes.__name__ and not context.stop_requested():
        exclude_unlike_nodes(context, nodes, failure, min(history.sizes.worlds))
        return
    # d. Back to the workers and nodes of the last attempt that committed.
    if not made_progress:
        proven = history.sizes.fall_back(world)
        if proven is not None and not context.stop_requested():
            nodes.stay_on(proven.nodes)
            text = f"no commit with {world} workers: falling back to {proven.world} workers on their previous nodes"
            context.log(f"{failure}; {text}, resuming from {restart_point(context)}")
            return
    # e.
    if failure.exit_code is not None:
        raise StageFailed(f"{context.stage.name}: {message}", failure.exit_code, failure.kind)

    # f. A new checkpoint is progress, however short the attempt was: such a stage may be restarted any number of times.
    # One restart is enough to know that an exception repeats; a death, which has no kind, may have been chance.
    history.failures = 0 if made_progress else history.failures + 1
    is_same_again = failure.kind != "" and failure.cause == history.last_cause and history.failures > 0
    history.last_cause = failure.cause
    start = restart_point(context)
    if is_same_again or history.failures > context.campaign.cluster.max_restarts:
        # An error of the disk has a separate exit code: the user should check the storage, not the training.
        exception = getattr(builtins, failure.kind, None)  # built-in: "PermissionError" and others
        is_os_error = isinstance(exception, type) and issubclass(exception, OSError)
        raise StageFailed(
            f"{context.stage.name}: {failure}\n"
            f"  {history.failures} attempts in a row made no new checkpoint; the next one would start from {start}\n"
            f"  for the traceback, see {context.directory / 'incidents.txt'}",
            ExitCode.IO if is_os_error else ExitCode.INTERNAL,
        )
    # g.
    if context.stop_requested():
        raise Preempted(f"{failure}; stopped at {start}; {RESUME_HINT}")
    # h. Restart at once after a new checkpoint; otherwise wait, because a disk or node may need time to recover.
    wait_s = 0.0
    if history.failures:
        wait_s = context.campaign.cluster.backoff_s * 2 ** (history.failures - 1)
    remark = f" in {wait_s:.0f} s" if wait_s else ""
    context.log(f"{failure}; restarting from {start}{remark}")
    # Sleep in short intervals, so that a signal is noticed during the wait.
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if context.stop_requested():
            raise Preempted(f"stopped while waiting to restart from {start}; {RESUME_HINT}")
        time.sleep(STOP_POLL_S)
