"""Run a campaign in one command: acquire the lease, handle signals, run the stages, and write status.json.

`run_campaign`, in order:
1. acquire the run's lease (jobs/ownership.py); a second command on the run fails with exit code 73;
2. for a run in an object store: download its small files, and upload them again as they change (jobs/run/sync.py);
3. start the watchers, such as the report and the gauges (jobs/run/watchers.py), and write status.json: running;
4. catch SIGTERM, SIGHUP and Ctrl-C: the first requests a commit and exit code 75, a second Ctrl-C exits at once;
5. report problems that would end the run later: missing inputs from outside the campaign, unusable data sets, changed
   files of finished stages;
6. start or join the Ray cluster, or start the fork server, if an unfinished stage needs workers;
7. run the stages in order; skip finished ones and log the reason;
8. log a table of the stages' results and the commands to run next;
9. always write to status.json how the command ended, and then notify the watchers;
10. close the watchers and the terminal, and leave the cluster.
"""

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from data.errors import ConfigError, Preempted
from jobs.cluster.nodes import start_workers
from jobs.cluster.ray import disconnect
from jobs.ownership import Lease
from jobs.recipe.records import changed_warnings
from jobs.recipe.references import with_values
from jobs.recipe.validate import refuse, validate_all
from jobs.resolved_recipe import Campaign, Context, Stage
from jobs.run.log import RunLog, log_table, status_file
from jobs.run.stage_run import run_stage
from jobs.run.sync import synced
from jobs.run.watchers import Watcher, Watchers
from jobs.terminal import typed_command
from pipeline.artifacts import DIVERGED


def run_campaign(
    campaign: Campaign,
    *,
    watchers: Sequence[Watcher | str] = (),
    fresh: bool = False,
    only: str | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Run or resume a campaign, and log the table of results; return the rows of the table.

    `watchers` are objects, or strings "module:Class" for watchers to create. `fresh` restarts an unfinished stage whose
    config has changed. `only` runs one stage or section, whose inputs must exist (`stages_of`). With `quiet`, lines are
    written to log.txt but not to the terminal.
    """
    stages = stages_of(campaign, only)  # raises an error for an unknown name before anything is written
    log = RunLog(quiet, campaign.cluster.start_timeout_s, campaign.run / "log.txt")
    # The lease logs only to the terminal, because log.txt may belong to another command.
    lease = Lease(campaign.storage, log.show)
    watching = Watchers([log, *watchers], log)
    try:
        with (
            lease,  # 1, first: if another command owns the run, its status.json must not be written
            synced(campaign.storage, lease, log) as upload_files,  # 2
            watching.of_command(campaign, lease),  # 3 and 9
            status_file(campaign.run, typed_command(), log.keep, lease),
        ):
            sweep(campaign.run)
            stopper = Stopper(log, lease)  # 4
            results = validate_all(campaign, stages, fresh=fresh)  # 5
            refuse(results)
            for result in results:
                log(result.text)
            unfinished = [stage for stage in stages if campaign.done(stage) is None]
            if any(stage.kind.needs_workers for stage in unfinished):
                # 6, once for all stages. Meanwhile import the training code, which takes a second, mostly for torch.
                start_workers(campaign.cluster, log, partial(import_module, "pipeline.train"))
            session = Session(campaign, log, lease, watching, stopper, upload_files, fresh)
            rows = []
            for stage in stages:
                rows.append(session.run_or_skip(stage.name))  # 7
            stopper.is_run_done = True
            log_table(rows, log)  # 8
            log(f"run: {campaign.storage.address()}")
            watching.finished(session.campaign, rows)
            return rows
    finally:
        watching.close()  # 10
        disconnect()


def sweep(run: Path) -> None:
    """Delete temporary files left by killed drivers and workers; call this only while owning the run.

    Temporary files of the report and of leases are kept, because other commands may be writing them.
    """
    leftovers = list(run.glob(".tmp-*-status.json"))
    for record in run.glob("*/stage.json"):
        for pattern in (".tmp-*", "attempts/*/.tmp-*", "evaluations/.tmp-*"):
            leftovers += record.parent.glob(pattern)
    for path in leftovers:
        if path.is_file():
            with suppress(OSError):
                path.unlink()


@dataclass
class Session:
    """One execution of `run` on a run directory: runs the stages in order, and skips finished ones."""

    campaign: Campaign
    log: RunLog
    lease: Lease
    watching: Watchers
    stopper: "Stopper"
    upload_files: Callable[[], None]  # uploads changed files to the run's store; raises RunOwned if the run is lost
    fresh: bool  # restart an unfinished stage whose config has changed

    def run_or_skip(self, name: str) -> dict[str, Any]:
        """Run a stage unless it has finished; return the stage's row for the table of results."""
        # Fill in the values determined by earlier stages.
        self.campaign = with_values(self.campaign)
        stage = self.campaign.stage(name)
        outcome = self.campaign.done(stage)
        if outcome is not None:
            self.report_skipped(stage, outcome)
            return {"stage": name, "skipped": True, **outcome}
        context = Context(
            campaign=self.campaign,
            stage=stage,
            log=self.log,
            show_progress=self.log.show_progress,
            poll=self.poll,
            stop_requested=self.stopper.is_stop_requested,
            check_owned=self.upload_files,  # it first checks that this command still owns the run
        )
        # Set before checking for a stop; otherwise, a signal between the two would take effect only after the stage.
        self.stopper.works_here = not stage.kind.needs_workers
        if self.stopper.is_stop_requested():
            raise Preempted(f"stopped before {name}; run the same command again to resume")
        with self.watching.of_stage(context):
            outcome = run_stage(context, fresh=self.fresh)
        self.upload_files()
        self.stopper.works_here = False
        return {"stage": name, "skipped": False, **outcome}

    def poll(self, attempt: int, step: int) -> None:
        """Send an attempt's status to the watchers; called about twice a second while the attempt's workers run.

        Raises RunOwned if another command has taken over the run while this process was suspended.
        """
        self.lease.confirm()
        self.watching.status("working", attempt, step)

    def report_skipped(self, stage: Stage, outcome: dict[str, Any]) -> None:
        """Log why a finished stage is skipped, which settings have changed, and how to evaluate it again."""
        directory = self.campaign.directory(stage)
        end = "diverged" if DIVERGED in outcome else "finished"
        inputs = " and inputs" if stage.inputs else ""  # of a pack stage, the key does not include the source's images
        line = f"{stage.name}: skipped, {end} with the same config{inputs} (key {stage.key[:8]})"
        warnings = changed_warnings(directory, stage)
        fields, commands = stage.kind.repeat_evaluation(self.campaign, stage, warnings)
        changes = [warnings.pop(field) for field in fields if field in warnings]
        if warnings:
            line += f", except for {'; '.join(warnings.values())}; to run it again, move {directory} elsewhere"
        self.log(line)
        if commands:
            self.log(f"{stage.name}: evaluation settings changed since it finished: {'; '.join(changes)}")
            self.log("  to evaluate its weights with the new settings, run")
            for command in commands:
                self.log(f"  {command}")


class Stopper:
    """Handles SIGTERM, SIGHUP and SIGINT: the first requests a commit and exit code 75, a second SIGINT exits at once.

    If another command has taken over the run, this command raises RunOwned and does not commit.
    """

    def __init__(self, log: Callable[[str], None], lease: Lease) -> None:
        self.received: int | None = None  # the first signal
        self.lease = lease
        self.is_run_done = False  # all stages have finished, so there is nothing to stop
        self.works_here = False  # the driver itself runs the stage and has nothing to commit: a stop ends it at once
        self.log = log
        signal.signal(signal.SIGTERM, self.handle)
        signal.signal(signal.SIGINT, self.handle)
        # SIGHUP: a closed terminal or a dropped ssh connection. Under nohup it stays ignored.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.handle)
        # A parent process such as a fork server may have blocked these signals.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

    def is_stop_requested(self) -> bool:
        """Return whether a signal has requested a stop."""
        return self.received is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal as a stop request.

        Raises Preempted if the driver itself runs the stage, RunOwned if another command has taken over the run, or
        KeyboardInterrupt at a second SIGINT.
        """
        # A second SIGTERM only repeats the request; a second Ctrl-C comes from a user who does not want to wait.
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("interrupted twice, so stopped without a commit; the last checkpoint is intact")
        if self.received is not None:
            return
        self.received = number
        if self.is_run_done:
            return
        # Sent by the lease, because another command has taken over the run: this one must not commit or write any more
        # (`Session.poll`).
        if self.lease.lost is not None:
            if self.works_here:
                raise self.lease.lost
            return
        name = signal.Signals(number).name
        if self.works_here:
            raise Preempted(f"stopped by {name}; finished work is kept, run the same command again to resume")
        self.log(
            f"{name}: finishing the step and committing, then exiting with code 75; press Ctrl-C again to exit at once"
        )


def stages_of(campaign: Campaign, only: str | None) -> list[Stage]:
    """Return the stages to run: all stages, or only those selected by `--only`.

    `only` names a stage, a section of the recipe, or a kind that only one section has. Raises ConfigError for any other
    name.
    """
    if only is None:
        return list(campaign.stages)
    stages = [stage for stage in campaign.stages if only in (stage.name, stage.source)]
    if stages:
        return stages
    of_kind = [stage for stage in campaign.stages if stage.kind.name == only]
    sections = list(dict.fromkeys(stage.source for stage in of_kind))
    if len(sections) > 1:
        matches = f"{len(sections)} stages of kind {only}: {', '.join(sections)}"
        raise ConfigError(f"the recipe has {matches}\n  use one of these names after --only")
    if not sections:
        campaign.stage(only)  # raises ConfigError, which suggests a similar name
    return [stage for stage in campaign.stages if stage.source in sections]
