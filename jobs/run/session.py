"""One command's life on a run: own the directory, listen for signals, walk the stages, leave status.json behind.

In order (`run_campaign`):
1. the run directory is locked: a second command on it ends with exit code 73; where the run is kept in an object
   store, its small files are fetched, and put there again as they change (jobs/run/sync.py);
2. SIGTERM, SIGHUP and Ctrl-C are caught: the first asks for a commit and exit code 75, a second Ctrl-C ends at once;
3. what would be refused later is refused now, before anything starts: inputs outside the campaign that are missing,
   sets that cannot be used, files of finished stages that have changed;
4. the Ray cluster is started or joined, where a stage that is still to be run needs workers;
5. the stages are walked in order; a finished one is skipped, and the reason is printed;
6. a table says what each stage did; status.json says how the command ended, whichever way it did.
"""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import Preempted
from jobs.cluster import backends
from jobs.cluster_config import ClusterConfig
from jobs.monitor.status_poller import Board, Show
from jobs.monitor.trackers import Tracker, start_trackers
from jobs.ownership import owned
from jobs.recipe.changes import changed_warnings
from jobs.recipe.choices import resolve_sweep
from jobs.recipe.key import recipe_digest
from jobs.recipe.validate import refuse, validate_all
from jobs.resolved_recipe import Campaign, Stage, StageKind
from jobs.run.ending import status_file, table
from jobs.run.log import Follower
from jobs.run.stale_evaluations import ACCURACY_FIELDS, PROBE_FIELDS, with_new_evaluations
from jobs.run.stage_metadata import facts_of
from jobs.run.stage_run import run_stage
from jobs.run.stopper import Stopper
from jobs.run.sync import synced
from jobs.stages.sweep import DIVERGED

Tick = Callable[[Path, int], None]  # given an attempt's folder and number


class Watchers:
    """Calls everybody who wants to see an attempt's progress; a failing look costs the look, never the run."""

    def __init__(self, ticks: list[Tick]) -> None:
        self.ticks = ticks

    def tick(self, attempt_folder: Path, number: int) -> None:
        """Let each of them look at the attempt's folder."""
        for show in self.ticks:
            # A closed terminal, or a stale handle of a shared folder.
            with suppress(OSError):
                show(attempt_folder, number)


@dataclass
class Displays:
    """Everybody who shows what a command does, for as long as it works."""

    follower: Follower  # prints, and writes the logs
    watchers: Watchers
    board: Board
    trackers: list[Tracker] = field(default_factory=list)

    def begin_stage(self, directory: Path, kind: StageKind) -> None:
        """Show a stage from now on."""
        self.follower.log = directory / "log.txt"
        if kind.needs_workers:
            self.board.show_stage(directory)

    def end_stage(self) -> None:
        """Show no stage any more."""
        self.follower.log = None
        self.board.leave_stage()

    def close(self) -> None:
        """Let all of them finish."""
        self.board.close()
        for tracker in self.trackers:
            tracker.close()
        self.follower.close()


def run_campaign(
    loaded: Campaign,
    *,
    fresh: bool = False,
    only: str | None = None,
    also: Tick | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Run a campaign under this process's name, or go on with it, and print the closing table; returns its rows.

    `fresh` starts a half-done stage over where its config changed. `only` runs one stage, whose inputs must exist.
    `also` is called with every tick of a worker group. `quiet` prints nothing; log.txt has the lines.
    """
    # The lock comes first: the status.json of a run that another process owns is not ours to write.
    with (
        displayed(loaded, also, quiet=quiet) as displays,
        owned(loaded.run),
        synced(loaded.run, loaded.remote, displays.follower.say) as put_files,
        status_file(loaded.run, typed_command(), displays.follower.keep),
    ):
        say = displays.follower.say
        stopper = Stopper(say)
        # Once more: of a run in a store, the files of the last owner are here only now.
        loaded = with_new_evaluations(resolve_sweep(loaded))
        names = names_of_stages(loaded, only)
        stages = [loaded.stage(name) for name in names]
        # What would be refused later is refused now, before anything starts.
        results = validate_all(loaded, stages, fresh=fresh)
        refuse(results)
        for result in results:
            say(result.text)
        start_what_stages_need(loaded, stages, displays)

        rows = []
        for name in names:
            # What the table of a sweep has just chosen is in the configs that waited for it.
            loaded = resolve_sweep(loaded)
            stage = loaded.stage(name)
            # Before the stopper is asked, or a signal between the two would be heard after the stage.
            stopper.works_here = not stage.kind.needs_workers
            outcome = loaded.done(stage)
            is_skipped = outcome is not None
            if outcome is not None:
                say_skipped(loaded, stage, say)
            elif stopper.asked:
                raise Preempted(f"stopped before {name}; run the same command again to go on")
            else:
                displays.begin_stage(loaded.directory(stage), stage.kind)
                outcome = run_stage(
                    loaded,
                    stage,
                    say=say,
                    tick=displays.watchers.tick,
                    stopping=stopper.is_asked,
                    check_owned=put_files,  # it looks first whether the run is still ours
                    fresh=fresh,
                )
                displays.end_stage()
                put_files()
            stopper.works_here = False
            rows.append({"stage": name, "skipped": is_skipped, **outcome})

        for line in table(rows):
            say(line)
        say(f"run: {loaded.place}")
        return rows


def typed_command() -> str:
    """Return the command as it was typed."""
    # Not sys.argv, which has lost the `-m jobs`.
    return shlex.join(["python", *sys.orig_argv[1:]])


@contextmanager
def displayed(loaded: Campaign, also: Tick | None, *, quiet: bool) -> Iterator[Displays]:
    """Show what a command does within the block, at first no stage and by no tracker; leave the cluster at its end."""
    follower = Follower(quiet, loaded.cluster.start_timeout_s, loaded.run / "log.txt")
    board = Board(follower.say)
    ticks: list[Tick] = [follower.tick, board.tick]
    if also is not None:
        ticks.append(also)
    displays = Displays(follower, Watchers(ticks), board)
    try:
        yield displays
    finally:
        displays.close()
        # Ray is imported only where it was needed; without it there is no cluster to leave.
        if "jobs.cluster.ray_backend" in sys.modules:
            backends.disconnect()


def start_what_stages_need(loaded: Campaign, stages: list[Stage], displays: Displays) -> None:
    """Start or join the cluster where a stage needs workers, and whoever shows the run to others."""
    say = displays.follower.say
    has_work_for_workers = needs_workers(loaded, stages)
    # Once for all stages: an embedded cluster took 6 to 14 s to start (measured).
    if loaded.cluster.backend == "ray" and has_work_for_workers:
        show_cluster(loaded, say)
        displays.board.start(shows_of(loaded))
    if has_work_for_workers:
        # Mostly it runs since before our imports (early_start.py), and this does nothing.
        backends.start_early(loaded.cluster, has_compiler=need_compiler(loaded, stages))
        warn_of_unused_gpus(loaded.cluster, say)
    if loaded.trackers.used():
        displays.trackers += start_trackers(loaded.trackers, order_of_tracking(loaded, stages), loaded.run, say)
    # What earlier commands logged has been shown already.
    for stage in loaded.stages:
        displays.follower.skip(loaded.directory(stage))


def say_skipped(loaded: Campaign, stage: Stage, say: Callable[[str], None]) -> None:
    """Say why a finished stage is not run again, and which stages judge it anew."""
    say(skip_line(loaded, stage))
    for judging in stages_behind(loaded, stage):
        say(f"{stage.name}: asked to be judged otherwise than it was: {judging.name} does it")


def names_of_stages(loaded: Campaign, only: str | None) -> list[str]:
    """Return the stages that the command is of: all, or those of one section with what judges them anew."""
    names = []
    for stage in loaded.stages:
        wanted = [None, stage.name, stage.source]
        if stage.judges:
            wanted += [stage.judges, loaded.stage(stage.judges).source]
        if only in wanted:
            names.append(stage.name)
    return names


def stages_behind(loaded: Campaign, stage: Stage) -> list[Stage]:
    """Return the stages that judge a finished one anew (jobs/run/stale_evaluations.py)."""
    return [other for other in loaded.stages if other.judges == stage.name]


def needs_workers(loaded: Campaign, stages: list[Stage]) -> bool:
    """Tell whether a stage that has not finished runs on workers."""
    unfinished = [stage for stage in stages if loaded.done(stage) is None]
    return any(stage.kind.needs_workers for stage in unfinished)


def need_compiler(loaded: Campaign, stages: list[Stage]) -> bool:
    """Tell whether workers of a stage that has not finished come to import torch's compiler."""
    unfinished = [stage for stage in stages if loaded.done(stage) is None]
    return any(stage.config.needs_compiler for stage in unfinished if stage.kind.trains)


def show_cluster(loaded: Campaign, say: Callable[[str], None]) -> None:
    """Start or join the cluster and say where to watch it; a stage waits for its workers' places when it needs them."""
    info = backends.connect(loaded.cluster)
    kind = "embedded, ends with this command" if info.embedded else f"joined at {info.address}"
    say(f"ray: {info.nodes} nodes, {info.cpus:g} CPUs, {info.gpus:g} GPUs ({kind})")
    if info.dashboard:
        say(f"dashboard: {info.dashboard} (its token: ray get-auth-token)")


def warn_of_unused_gpus(cluster: ClusterConfig, say: Callable[[str], None]) -> None:
    """Say once that GPUs are there which no worker uses, and which key is to be set."""
    gpus, place = backends.gpus_present(cluster)
    used = cluster.most * cluster.gpus_per_worker
    unused = f"unused GPUs: {gpus - used} of the {gpus} of this {place}"
    if gpus and not used:
        say(f"{unused}: the workers compute on the CPU; type cluster.gpus_per_worker=1 to use them")
    # The rest of another cluster is for other people.
    elif gpus > used and place == "machine":
        workers_that_fit = gpus // cluster.gpus_per_worker
        key = "cluster.workers" if cluster.least == cluster.most else "cluster.workers.most"
        advice = f"type {key}={workers_that_fit} to use them"
        if workers_that_fit == cluster.most:
            advice = f"too few for one more worker of {cluster.gpus_per_worker}"
        say(f"{unused}; {advice}")


def shows_of(loaded: Campaign) -> list[Show]:
    """Return who shows the run in the connected Ray cluster, and begin with what stays the same."""
    from jobs.monitor import gauges, job_metadata, metadata  # ray takes seconds to import

    job_metadata.update({"run": str(loaded.run), "recipe": recipe_digest(loaded)})
    return [gauges.Gauges().show, metadata.show]


def order_of_tracking(loaded: Campaign, stages: list[Stage]) -> dict[str, Any]:
    """Return what a tracker's process is told: which stages there are, and all about them but their numbers."""
    told = []
    for stage in stages:
        told.append({"directory": str(loaded.directory(stage)), "name": stage.name, "facts": facts_of(loaded, stage)})
    return {"run": loaded.run.name, "stages": told}


def skip_line(loaded: Campaign, stage: Stage) -> str:
    """Why a finished stage is not run again, and what it did otherwise than is asked now."""
    line = f"{stage.name}: skipped, finished with the same config and inputs (key {stage.key[:8]})"
    directory = loaded.directory(stage)
    if DIVERGED in (loaded.done(stage) or {}):
        line = f"{stage.name}: skipped, diverged with the same config and inputs (key {stage.key[:8]})"
    warnings = changed_warnings(directory, stage)
    if stages_behind(loaded, stage):
        judged = (*ACCURACY_FIELDS, *PROBE_FIELDS)
        warnings = {field: text for field, text in warnings.items() if field not in judged}
    if warnings:
        line += f", but for {'; '.join(warnings.values())}; move {directory} away to do it over"
    return line
