"""One command's life on a run: own the directory, listen for signals, walk the stages, leave status.json behind.

In order (`run_campaign`):
1. the run's lease is taken (jobs/ownership.py): a second command on it ends with exit code 73; where the run is kept
   in an object store, its small files are fetched, and put there again as they change (jobs/run/sync.py);
2. SIGTERM, SIGHUP and Ctrl-C are caught: the first asks for a commit and exit code 75, a second Ctrl-C ends at once;
3. what would be refused later is refused now, before anything starts: inputs outside the campaign that are missing,
   sets that cannot be used, files of finished stages that have changed;
4. the Ray cluster is started or joined, where a stage that is still to be run needs workers;
5. the stages are walked in order; a finished one is skipped, and the reason is printed;
6. a table says what each stage did; status.json says how the command ended, whichever way it did;
7. meanwhile a page shows how the run stands, and in the end how it ended (jobs/extras/report/kept.py).
"""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from data.errors import ConfigError, Preempted
from jobs.cluster.placement import nodes_of, start_early
from jobs.cluster.ray import connect, disconnect
from jobs.cluster_config import ClusterConfig, cores
from jobs.extras.monitor.status_poller import StatusPoller
from jobs.extras.monitor.trackers import facts_of, start_trackers
from jobs.extras.report.kept import kept_page
from jobs.ownership import Lease
from jobs.recipe.records import changed_warnings
from jobs.recipe.references import with_values
from jobs.recipe.validate import refuse, validate_all
from jobs.resolved_recipe import Campaign, Context, Stage
from jobs.run.changed_evaluations import EVALUATION_FIELDS, evaluation_commands
from jobs.run.log import RunLog, log_next, log_table, status_file
from jobs.run.stage_run import run_stage
from jobs.run.sync import synced
from jobs.terminal import typed_command
from models.checks import did_you_mean
from pipeline.artifacts import DIVERGED
from pipeline.values import counted

Poll = Callable[[Path, int], None]  # given an attempt's folder and number


def run_campaign(
    campaign: Campaign,
    *,
    fresh: bool = False,
    only: str | None = None,
    also: Poll | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Run a campaign under this process's name, or go on with it, and print the closing table; returns its rows.

    `fresh` starts a half-done stage over where its config changed. `only` runs one stage or section,
    whose inputs must exist (`stages_of`).
    `also` is called with every poll of a worker group. `quiet` prints nothing, log.txt has the lines; and it keeps no
    page, which costs a replay of ten steps a fifth of its time.
    """
    stages_of(campaign, only)  # an unknown name is refused before anything is written
    log = RunLog(quiet, campaign.cluster.start_timeout_s, campaign.run / "log.txt")
    # What the lease has to say is shown, and not kept: the log.txt of a run that another command owns is not ours.
    lease = Lease(campaign.storage, log.show)
    session = Session(campaign, log, lease, fresh=fresh, also=also)
    kept = nullcontext() if quiet else kept_page(campaign.run, log)
    try:
        # The lease comes first: the status.json of a run that another process owns is not ours to write.
        with (
            lease,
            synced(campaign.storage, lease, log) as put_files,
            kept as page,
            status_file(campaign.run, typed_command(), log.keep, lease),
        ):
            if page is not None:
                session.pollers.append(StatusPoller("page", [page.show], log))
            return session.run(only, put_files)
    finally:
        for poller in session.pollers:
            poller.close()
        log.close()
        disconnect()


class Session:
    """The flow of one command: the campaign as far as it is known, its log, its pollers, and the signals it hears."""

    def __init__(self, campaign: Campaign, log: RunLog, lease: Lease, *, fresh: bool, also: Poll | None) -> None:
        self.campaign = campaign
        self.log = log
        self.lease = lease
        self.fresh = fresh
        self.also = also
        self.pollers: list[StatusPoller] = []  # show the run elsewhere; a thread each

    def run(self, only: str | None, put_files: Callable[[], None]) -> list[dict[str, Any]]:
        """Walk the stages, once the run is ours; returns the rows of the closing table.

        `put_files` puts what has changed into the run's store; it raises RunOwned where the run is ours no more.
        """
        log = self.log
        stopper = Stopper(log, self.lease)
        stages = stages_of(self.campaign, only)
        # What would be refused later is refused now, before anything starts.
        results = validate_all(self.campaign, stages, fresh=self.fresh)
        refuse(results)
        for result in results:
            log(result.text)

        # Once for all stages: an embedded cluster took 6 to 14 s to start (measured).
        unfinished = [stage for stage in stages if self.campaign.done(stage) is None]
        if any(stage.kind.needs_workers for stage in unfinished):
            self.start_workers()
        facts: dict[Path, dict[str, Any]] = {}  # of each stage that has begun, for the trackers
        self.pollers += start_trackers(self.campaign.trackers, facts, log)
        # What earlier commands logged has been shown already.
        for stage in self.campaign.stages:
            log.skip(self.campaign.directory(stage))

        rows = []
        for name in [stage.name for stage in stages]:
            # Values that an earlier stage has just determined.
            self.campaign = with_values(self.campaign)
            stage = self.campaign.stage(name)
            # Before the stopper is asked, or a signal between the two would be heard after the stage.
            stopper.works_here = not stage.kind.needs_workers
            outcome = self.campaign.done(stage)
            is_skipped = outcome is not None
            if outcome is not None:
                self.report_skipped(stage, outcome)
            elif stopper.is_asked():
                raise Preempted(f"stopped before {name}; run the same command again to go on")
            else:
                # Shown from here to the end of the stage; what raises ends the command, and with it the pollers.
                directory = self.campaign.directory(stage)
                log.stage_file = directory / "log.txt"
                if self.campaign.trackers.used():
                    facts[directory] = facts_of(self.campaign, stage)
                for poller in self.pollers:
                    if stage.kind.needs_workers:
                        poller.show_stage(directory)
                context = Context(
                    campaign=self.campaign,
                    stage=stage,
                    log=log,
                    show_progress=log.show_progress,
                    poll=self.poll,
                    stop_requested=stopper.is_asked,
                    check_owned=put_files,  # it looks first whether the run is still ours
                )
                outcome = run_stage(context, fresh=self.fresh)
                log.stage_file = None
                for poller in self.pollers:
                    poller.leave_stage()
                put_files()
            stopper.works_here = False
            rows.append({"stage": name, "skipped": is_skipped, **outcome})
        log_table(rows, log)
        log_next(self.campaign, rows, log)
        return rows

    def start_workers(self) -> None:
        """Start or join the Ray cluster and show the run there, or start the fork server of plain processes."""
        log = self.log
        cluster = self.campaign.cluster
        # What stages import here takes a second, of torch above all. On another core the fork server of plain processes
        # imports it meanwhile, or the processes of an embedded Ray cluster start.
        start_early(cluster)
        import_module("pipeline.train")
        if cluster.backend == "ray":
            info = connect(cluster)
            kind = "embedded, ends with this command" if info.embedded else f"joined at {info.address}"
            log(f"ray: {counted(info.nodes, 'node')}, {info.cpus:g} CPUs, {info.gpus:g} GPUs ({kind})")
            if info.dashboard:
                log(f"dashboard: {info.dashboard} (its token: ray get-auth-token)")
            from jobs.extras.monitor.gauges import Gauges  # ray takes seconds to import

            gauges = Gauges(self.campaign.run, self.lease)
            self.pollers.append(StatusPoller("monitoring", [gauges.show], log, show_run=gauges.show_run))
        nodes_of(cluster).warm_up()
        load = os.getloadavg()[0]
        if cluster.backend == "processes" and load > 2 * cores():
            log(f"busy: other programs run here (load {load:.0f} on {cores()} cores), it will take longer than planned")
        warn_of_unused_gpus(cluster, log)

    def poll(self, attempt_folder: Path, number: int, step: int) -> None:
        """Show how an attempt goes; called about twice a second while its workers work, who have told of this step.

        Raises RunOwned where this process was frozen and another command has taken the run over meanwhile.
        """
        self.lease.confirm()
        watchers: list[Poll] = [partial(self.log.poll, step=step), *(poller.poll for poller in self.pollers)]
        if self.also is not None:
            watchers.append(self.also)
        for watcher in watchers:
            # A closed terminal, or a stale handle of a shared folder, costs the look and never the run.
            with suppress(OSError):
                watcher(attempt_folder, number)

    def report_skipped(self, stage: Stage, outcome: dict[str, Any]) -> None:
        """Report why a finished stage is not run again, which settings have changed, and what evaluates it again."""
        directory = self.campaign.directory(stage)
        end = "diverged" if DIVERGED in outcome else "finished"
        line = f"{stage.name}: skipped, {end} with the same config and inputs (key {stage.key[:8]})"
        warnings = changed_warnings(directory, stage)
        commands = evaluation_commands(self.campaign, stage, warnings)
        changes = [warnings.pop(field) for field in EVALUATION_FIELDS if commands and field in warnings]
        if warnings:
            line += f", but for {'; '.join(warnings.values())}; move {directory} away to do it over"
        self.log(line)
        if commands:
            self.log(f"{stage.name}: evaluation settings changed since it finished: {'; '.join(changes)}")
            self.log("  to evaluate its weights with them, type")
            for command in commands:
                self.log(f"  {command}")


class Stopper:
    """Catches SIGTERM, SIGHUP and SIGINT: the first asks for a commit and code 75, a second SIGINT ends at once.

    A run that another command has taken over ends without a commit, with RunOwned.
    """

    def __init__(self, log: Callable[[str], None], lease: Lease) -> None:
        self.received: int | None = None  # the first signal
        self.lease = lease
        self.works_here = False  # the driver itself is at work, and has nothing to commit: a stop ends it at once
        self.log = log
        signal.signal(signal.SIGTERM, self.handle)
        signal.signal(signal.SIGINT, self.handle)
        # A closed terminal or a dropped ssh; under nohup it is ignored, and stays so.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.handle)
        # The parent process may have held them back: a fork server of workers does.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

    def is_asked(self) -> bool:
        """Tell whether this process is to end."""
        return self.received is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the request; raise Preempted where the driver itself works, RunOwned where the run is lost.

        Raises KeyboardInterrupt at a second SIGINT.
        """
        # A second SIGTERM asks for the same thing again; a second Ctrl-C is a person who does not want to wait.
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("interrupted twice: ended without a commit; the last checkpoint stands")
        if self.received is not None:
            return
        self.received = number
        # The lease's own signal: nothing is committed or written any more (`Session.poll`).
        if self.lease.lost is not None:
            if self.works_here:
                raise self.lease.lost
            return
        name = signal.Signals(number).name
        if self.works_here:
            raise Preempted(f"stopped by {name}; what is finished is kept, run the same command again to go on")
        self.log(f"{name}: finishing the step, committing, then exit 75; Ctrl-C again ends at once")


def stages_of(campaign: Campaign, only: str | None) -> list[Stage]:
    """Return the stages of a command: all, or those that `only` names.

    `only` is a section of the recipe, a stage, or a kind that only one section has. Raises ConfigError otherwise.
    """
    if only is None:
        return list(campaign.stages)
    stages = [stage for stage in campaign.stages if only in (stage.name, stage.source)]
    if stages:
        return stages
    of_kind = [stage for stage in campaign.stages if stage.kind.name == only]
    sections = list(dict.fromkeys(stage.source for stage in of_kind))
    if len(sections) > 1:
        found = f"{len(sections)} stages of kind {only}: {', '.join(sections)}"
        raise ConfigError(f"the recipe has {found}; --only names one")
    if not sections:
        known = list(dict.fromkeys(stage.source for stage in campaign.stages))
        names = [*known, *(stage.name for stage in campaign.stages), *(stage.kind.name for stage in campaign.stages)]
        raise ConfigError(
            f"the recipe has no stage {only!r}{did_you_mean(only, names)}\n  its stages: {', '.join(known)}"
        )
    return [stage for stage in campaign.stages if stage.source in sections]


def warn_of_unused_gpus(cluster: ClusterConfig, log: Callable[[str], None]) -> None:
    """Report once that GPUs are there which no worker uses, and which key is to be set."""
    gpus, place = nodes_of(cluster).gpus_present()
    used = cluster.most * cluster.gpus_per_worker
    unused = f"unused GPUs: {gpus - used} of the {gpus} of this {place}"
    if gpus and not used:
        log(f"{unused}: the workers compute on the CPU; type cluster.gpus_per_worker=1 to use them")
    # The rest of another cluster is for other people.
    elif gpus > used and place == "machine":
        workers_that_fit = gpus // cluster.gpus_per_worker
        key = "cluster.workers" if cluster.least == cluster.most else "cluster.workers.most"
        advice = f"type {key}={workers_that_fit} to use them"
        if workers_that_fit == cluster.most:
            advice = f"too few for one more worker of {cluster.gpus_per_worker}"
        log(f"{unused}; {advice}")


@contextmanager
def temporary_run(run: Path) -> Iterator[Path]:
    """Make a folder in the run directory for the length of the block; a directory that was not there goes again.

    In the main thread a SIGTERM within the block raises KeyboardInterrupt, so that the folder goes then too.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt("ended by SIGTERM")

    # Only the main thread may say what a signal does.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if is_main else None
    try:
        was_there = run.exists()
        run.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".temporary-", dir=run))
        try:
            # Workers may be of another user than the driver: they write here where they may write into the run.
            folder.chmod(run.stat().st_mode & 0o777)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if not was_there:
                with suppress(OSError):
                    run.rmdir()
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
