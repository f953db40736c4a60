"""Run attempts of a stage on a worker group until one succeeds or a further attempt would not help.

    supervise(train, make_task, context, worlds=(4, 2, 1), stall_s=600.0)
    → {"step": 40, "samples_seen": 640, …}: the value of `train(task)` in rank 0 of the attempt that succeeded

Steps of an attempt (`supervise`):
0. Reserve a slot for every worker: wait until the cluster has room or a stop is requested. If the stage allows several
   numbers of workers, choose one.
1. Claim the next attempt number of the run. From then on, no older attempt can commit a checkpoint.
2. Get the task from the stage: the document sent to all workers.
3. Create the attempt's folder, `<stage>/attempts/attempt-000001`, for the workers' files.
4. Run the worker group. About every 0.5 s (`Attempt.check`): report the status; end the attempt if a worker is stuck;
   tell the workers to commit and exit if there is room for more workers, if a node is about to leave, or if a stop is
   requested.
5. The worker function has returned a value: done.

If the worker group has ended in any other way:
6. If another command has taken over the run, because this process was suspended: RunOwned.
7. Record a failure as an incident, unless a worker has committed and stopped (exit code 75).
8. If the workers have committed and stopped because a node is about to leave or there is room for more workers
   (elastic.py), start the next attempt at once on other or more nodes (`move`). This does not count as a restart.
9. If a stop is requested and there was nothing to commit: Preempted.
10. Otherwise the attempt has failed, and the first case that applies decides (`recover`):
    a. A worker requested exit code 75, because it has committed and stopped: Preempted.
    b. A worker requested exit code 73, because another command seemed to own the run: RunOwned if one does; otherwise
       start the next attempt at once.
    c. Workers refused to start, because some nodes differ from the majority: exclude those nodes from this and all
       later attempts, and start the next attempt at once. StageFailed if the other nodes have too little room. This
       does not apply if a stop is requested.
       A node whose worker computed wrong results is excluded too, before the cases below.
    d. The attempt had more workers than the last one that committed, and did not commit: start the next attempt at
       once with that attempt's number of workers and nodes, because a new node may be broken. This does not apply if a
       stop is requested.
    e. A worker requested another exit code: StageFailed with that code, because a restart would not help.
    f. There is no new checkpoint, and either the exception is the same as in the previous attempt or more than
       `max_restarts` attempts have failed in a row: StageFailed.
    g. A stop is requested: Preempted.
    h. Otherwise, start the next attempt from the newest checkpoint: at once if that checkpoint is new, otherwise after
       `backoff_s`, which doubles with each failed attempt.
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

from data.errors import CorruptWorker, ExitCode, MismatchedNodes, Preempted
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

# Parts of messages about exhausted memory: from the kernel's or Ray's OOM killer, CUDA, Python, torch on CPUs, C++.
OUT_OF_MEMORY = ("out-of-memory", "OutOfMemoryError", "MemoryError", "can't allocate memory", "bad_alloc")
LESS_MEMORY = "; to use less memory, decrease micro_batch or data.processes, or increase checkpoint_blocks"
STOP_POLL_S = 0.2  # interval at which a wait checks for a requested stop

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

    `make_task(attempt)` returns the task for the workers of an attempt. `worlds` are the allowed numbers of workers,
    largest first. An attempt fails if one worker blocks all others for `stall_s` seconds. With `can_commit=False`, a
    requested stop ends the workers at once. `carried_files` names the files in the stage's folder that one attempt
    passes to the next. `accompany(task, attempt_folder, cluster)` returns the context manager of a service that runs
    during each attempt.

    Raises Preempted if the stage was stopped, StageFailed if it cannot continue, or RunOwned if another command has
    taken over the run.
    """
    nodes = nodes_of(context.campaign.cluster)
    storage = context.campaign.storage
    history = History(Sizes(worlds))
    while True:
        # 0. Reserve before the claim, so that an attempt without slots leaves no trace.
        sizes = history.sizes
        world = nodes.reserve(storage.address(), sizes.open_worlds(), context.log, partial(end_if_requested, context))
        sizes.record_start(world)
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

        # 4 and 5. Each attempt has a new watchdog, which starts timing at the first report of its workers.
        watch = Watch(world, stall_s, cluster.start_timeout_s)
        group = WorkerGroup(nodes, cluster, folder, is_shared=storage.is_shared, carried_files=carried_files)
        attempt = Attempt(context, number, group, watch, growth, can_commit)
        companion: AbstractContextManager[object] = nullcontext()
        if accompany is not None:
            companion = accompany(task, folder, cluster)
        growth.start()
        try:
            with companion:
                value = group.run(function, task, attempt.check)
            return cast(dict[str, Any], value)
        except (WorkerGroupError, Preempted) as error:
            # 6.
            context.poll(number, 0)
            # 7. Record before reading the store, which may be unreachable and raise another error.
            if isinstance(error, WorkerGroupError) and error.exit_code != ExitCode.PREEMPTED:
                write_incident(context, number, error, group.phases())
            # If a stop is requested and a worker has requested an exit code, the error is raised below in any case. Do
            # not check for progress then, because reading an unreachable store takes a minute.
            is_end_of_stage = context.stop_requested() and error.exit_code is not None
            made_progress = not is_end_of_stage and last_step(context) > step_before
            if made_progress:
                sizes.record_commit(world, {link.agent.node_id for link in group.links})
                history.failures = 0
            # 8. Not if a stop is requested too.
            was_requested = growth.target is not None or bool(group.drain_events)
            if error.exit_code == ExitCode.PREEMPTED and was_requested and not context.stop_requested():
                move(attempt, nodes, sizes)
                history.last_cause = ""  # this attempt did not fail
                continue
            # 9.
            if isinstance(error, Preempted):
                raise
            failure = error
        finally:
            growth.has_ended.set()
            for remark in group.remarks:
                context.log(remark)
            # Workers may have written log lines after the last poll.
            context.poll(number, 0)
        # 10.
        recover(context, nodes, history, failure, world, made_progress=made_progress)


@dataclass
class History:
    """The supervisor's state that persists between attempts of a stage."""

    sizes: Sizes
    failures: int = 0  # failed attempts in a row without a new checkpoint
    last_cause: str = ""  # cause of the last failure


@dataclass(frozen=True)
class Attempt:
    """The driver's view of a running attempt."""

    context: Context
    number: int
    group: WorkerGroup
    watch: Watch
    growth: Growth
    can_commit: bool

    def check(self) -> None:
        """Check the workers' last reported states; called about every 0.5 s.

        Raises WorkerGroupError if a worker is stuck, or Preempted if a stop is requested with nothing to commit.
        """
        context = self.context
        group = self.group
        # Poll first: if the driver was suspended, another command may own the run, and its files must not be changed.
        step = min((phase.step for phase in group.phases().values()), default=0)
        context.poll(self.number, step)
        # The agents read files that the workers write, so a suspended worker cannot block this. After all workers have
        # ended, they enter no new phases: the remaining time is cleanup and not a stall.
        if not group.have_all_ended():
            stuck = self.watch.find_stall(group.phases(), group.is_frozen)
            # If an agent stays silent, the worker group ends the attempt soon, and names the agent.
            if stuck is not None and not group.has_silent_agent():
                raise group.evidence().silent_failure(stuck.rank, stuck.cause)
        if self.growth.target is None and self.growth.is_due():
            room = f"room for {self.growth.target} workers, currently {self.watch.world}"
            context.log(f"{room}; committing this step, then continuing with more workers")

        # Repeat the request at each check, because workers may not have started yet.
        if group.drain_events or self.growth.target is not None or context.stop_requested():
            # Before the workers have started there is nothing to commit, and starting them may take minutes.
            if not group.request_stop():
                end_if_requested(context)
            if not self.can_commit:
                raise Preempted(f"stopped in {context.stage.name}; run the same command again to restart this stage")


def end_if_requested(context: Context) -> None:
    """Raise Preempted if a stop is requested; called before any worker has started."""
    if context.stop_requested():
        raise Preempted(f"stopped before the workers started, at {restart_point(context)}; {RESUME_HINT}")


def last_step(context: Context) -> int:
    """Return the step of a stage's newest committed checkpoint; −1 if there are no checkpoints."""
    newest_first = context.checkpoints.committed_steps()
    return newest_first[0] if newest_first else -1


def restart_point(context: Context) -> str:
    """Describe where the next attempt starts: at "step 40", or at the beginning."""
    step = last_step(context)
    return f"step {step}" if step >= 0 else "the beginning (no checkpoint yet)"


# ------------------------------------------------------------------------ an attempt has ended


def write_incident(
    context: Context, attempt: int, failure: WorkerGroupError, phases: Mapping[int, PhaseReport]
) -> None:
    """Append a failure to incidents.txt: time, attempt, worker, the worker's phase (from `phases`), and cause."""
    # Store phase and advice in the failure, because the log and the stage's error show them too.
    if failure.rank is not None and failure.rank in phases:
        failure.phase = str(phases[failure.rank])
    if any(word in failure.cause for word in OUT_OF_MEMORY):
        failure.cause += LESS_MEMORY

    clock = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        # Independent of the locale, which may not be able to encode a name or a message.
        with open(context.directory / "incidents.txt", "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{clock} attempt {attempt}: {failure}\n{failure.traceback}\n")
    except OSError as refused:
        # A full disk may be the incident itself: log the incident, and let the supervisor continue.
        context.log(f"could not write incidents.txt ({refused}): {failure}")


def move(attempt: Attempt, nodes: Nodes, sizes: Sizes) -> None:
    """Arrange that the next attempt avoids leaving nodes or uses more workers, and log the reason.

    Raises Preempted if the driver's node is leaving, because the next attempt needs a driver on another node.
    """
    context = attempt.context
    target = attempt.growth.target
    drain_events = attempt.group.drain_events
    if target is not None and not drain_events:
        sizes.record_scale_up(target)
        context.log(
            f"scaling up from {attempt.watch.world} to {target} workers, resuming from {restart_point(context)}"
        )
        return
    leaving = {}
    for event in drain_events.values():
        leaving[event.node_id] = f"{event.node} ({event.why})"
    text = f"leaving the cluster: {', '.join(leaving.values())}"
    if None in drain_events:
        raise Preempted(
            f"{text}; stopped at {restart_point(context)}, because this command runs on that node; {RESUME_HINT}"
        )
    nodes.avoid(list(leaving))
    context.log(f"{text}; moving the workers to other nodes, resuming from {restart_point(context)}")


def exclude_unlike_nodes(context: Context, nodes: Nodes, failure: WorkerGroupError, least: int) -> None:
    """Exclude and log the nodes whose code or packages differ from the majority of all nodes.

    Nodes without workers are compared too. Raises StageFailed if no node differs, if there is no majority, or if the
    other nodes have too little room.
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
        message += f"\n  without {names}, the cluster has room for only {room} of {least} workers"
        raise StageFailed(message, ExitCode.UNAVAILABLE, failure.kind)
    why = "; ".join(dict.fromkeys(odd.values()))
    context.log(f"excluded from this campaign: {names} ({why}); restarting from {restart_point(context)}")


def exclude_node(context: Context, nodes: Nodes, failure: WorkerGroupError, least: int) -> None:
    """Exclude a worker's node from the campaign, if the other nodes have room for at least `least` workers."""
    if failure.node_id and nodes.exclude({failure.node_id}, least) >= least:
        context.log(f"excluded from this campaign: {failure.node}, whose worker {failure.rank} computed wrong results")
    else:
        context.log(
            f"{failure.node} computed wrong results but cannot be excluded, because the other nodes do not have "
            "enough room"
        )


def recover(
    context: Context, nodes: Nodes, history: History, failure: WorkerGroupError, world: int, *, made_progress: bool
) -> None:
    """Handle a failed attempt with `world` workers (step 10 of the module's docstring).

    Returns when the next attempt may start. Raises Preempted if the workers have committed and stopped or a stop is
    requested, RunOwned if another command owns the run, or StageFailed if another attempt would not help.
    """
    # a. The cause is "Exception: message"; report only the message.
    message = failure.cause.partition(": ")[2]
    if failure.exit_code == ExitCode.PREEMPTED:
        raise Preempted(message)
    # b. This command may still own the run: a driver that lost it may have claimed a last attempt number.
    if failure.exit_code == ExitCode.OWNED:
        context.check_owned()
        context.log(f"{failure}; restarting from {restart_point(context)}")
        return
    # c. This comes before d, which would not exclude the differing nodes.
    if failure.kind == MismatchedNodes.__name__ and not context.stop_requested():
        exclude_unlike_nodes(context, nodes, failure, min(history.sizes.worlds))
        return
    # Like any other failure, but without the node of the worker that computed wrong results.
    if failure.kind == CorruptWorker.__name__:
        exclude_node(context, nodes, failure, min(history.sizes.worlds))
    # d. Fall back to the workers and nodes of the last attempt that committed.
    if not made_progress:
        proven = history.sizes.fall_back(world)
        if proven is not None and not context.stop_requested():
            nodes.stay_on(proven.nodes)
            text = f"no commit with {world} workers, so falling back to {proven.world} workers on the previous nodes"
            context.log(f"{failure}; {text} and resuming from {restart_point(context)}")
            return
    # e.
    if failure.exit_code is not None:
        raise StageFailed(f"{context.stage.name}: {message}", failure.exit_code, failure.kind)

    # f. A new checkpoint is progress even if the attempt was short, so the number of such restarts is not limited. An
    # exception that repeats after one restart ends the stage; a death, which has no kind, may have been chance.
    if not made_progress:
        history.failures += 1
    is_same_again = failure.kind != "" and failure.cause == history.last_cause and history.failures > 0
    history.last_cause = failure.cause
    start = restart_point(context)
    if is_same_again or history.failures > context.campaign.cluster.max_restarts:
        # I/O errors have a separate exit code, so that the user checks the storage and not the training.
        exception = getattr(builtins, failure.kind, None)  # built-in exceptions such as PermissionError
        is_os_error = isinstance(exception, type) and issubclass(exception, OSError)
        raise StageFailed(
            f"{context.stage.name}: {failure}\n"
            f"  {history.failures} attempts in a row ended without a new checkpoint; the next would "
            f"start from {start}\n"
            f"  for the traceback, see {context.directory / 'incidents.txt'}",
            ExitCode.IO if is_os_error else ExitCode.INTERNAL,
        )
    # g.
    if context.stop_requested():
        raise Preempted(f"{failure}; stopped at {start}; {RESUME_HINT}")
    # h. After a new checkpoint, restart at once; otherwise wait, because a disk or node may need time to recover.
    wait_s = 0.0
    if history.failures:
        wait_s = context.campaign.cluster.backoff_s * 2 ** (history.failures - 1)
    remark = f" in {wait_s:.0f} s" if wait_s else ""
    context.log(f"{failure}; restarting from {start}{remark}")
    # Sleep in short intervals, to notice a stop during the wait.
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if context.stop_requested():
            raise Preempted(f"stopped while waiting to restart from {start}; {RESUME_HINT}")
        time.sleep(STOP_POLL_S)
