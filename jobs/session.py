"""One command's life on a run: own the directory, listen for signals, walk the stages, leave status.json behind.

In order (`run_campaign`):
1. the run directory is locked: a second command on it ends with exit code 73; where the run is kept in an object
   store, its small files are fetched, and put there again as they change (mirror.py);
2. SIGTERM, SIGHUP and Ctrl-C are caught: the first asks for a commit and exit code 75, a second Ctrl-C ends at once;
3. what would be refused later is refused now, before anything starts: inputs outside the campaign that are missing,
   sets that cannot be used, files of finished stages that have changed;
4. the Ray cluster is started or joined, where a stage that is still to be run needs workers;
5. the stages are walked in order; a finished one is skipped, and the reason is printed;
6. a table says what each stage did; status.json says how the command ended, whichever way it did.
"""

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from data.errors import ExitCode, Preempted, exit_code
from data.files import explain, write_with_reserve
from jobs.campaigns.campaign import recipe_digest
from jobs.campaigns.choices import settled
from jobs.cluster import backends
from jobs.cluster.backends import ClusterConfig
from jobs.follow import Follower
from jobs.mirror import mirrored
from jobs.monitoring.board import Board, Show
from jobs.monitoring.trackers import Tracker, start_trackers
from jobs.ownership import owned
from jobs.reevaluation import ACCURACY_FIELDS, PROBE_FIELDS, with_new_evaluations
from jobs.resolved_recipe import Campaign, Stage
from jobs.stage_run import (
    changed_warnings,
    check_finished,
    check_inputs,
    check_memory,
    check_unfinished,
    facts_of,
    run_stage,
)
from jobs.stages.sweep import DIVERGED
from pipeline.evaluation.beside import without_single_seeds
from pipeline.monitoring.telemetry import duration

Tick = Callable[[Path, int], None]  # given an attempt's folder and number

STATUS_RESERVE_BYTES = 4096  # blanks in status.json: room for the message of an end on a full disk
MOST_VALUES = 6  # that a row of the closing table shows
LONGEST_MESSAGE = 600  # characters; as JSON each may take six bytes

# Kinds whose work is done by the driver itself; all others run on workers.
WORKERLESS_KINDS = ("pack", "resize", "sweep")


class Stopper:
    """Catches SIGTERM, SIGHUP and SIGINT: the first asks for a commit and code 75, a second SIGINT ends at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self.works_here = False  # the driver itself is at work, and has nothing to commit: a stop ends it at once
        self.say = say
        signal.signal(signal.SIGTERM, self.handle)
        signal.signal(signal.SIGINT, self.handle)
        # A closed terminal or a dropped ssh; under nohup it is ignored, and stays so.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.handle)
        # Whoever started this process may have held them back: a fork server of workers does.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember that somebody asked; raise Preempted where the driver itself works.

        Raises KeyboardInterrupt at a second SIGINT.
        """
        # A second SIGTERM asks for the same thing again; a second Ctrl-C is a person who does not want to wait.
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt("interrupted twice: ended without a commit; the last checkpoint stands")
        if self.asked:
            return
        self.asked = True
        name = signal.Signals(number).name
        if self.works_here:
            raise Preempted(f"stopped by {name}; what is finished is kept, run the same command again to go on")
        self.say(f"{name}: finishing the step, committing, then exit 75; Ctrl-C again ends at once")

    def is_asked(self) -> bool:
        """Tell whether somebody wants this command to end."""
        return self.asked


class Watchers:
    """Calls everybody who wants to see an attempt's progress; a failing look costs the look, never the run."""

    def __init__(self) -> None:
        self.ticks: list[Tick] = []

    def tick(self, attempt_folder: Path, number: int) -> None:
        """Let each of them look at the attempt's folder."""
        for show in self.ticks:
            # A closed terminal, or a stale handle of a shared folder.
            with suppress(OSError):
                show(attempt_folder, number)


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
    # As it was typed: sys.argv has lost the `-m jobs`.
    command = shlex.join(["python", *sys.orig_argv[1:]])
    follower = Follower(quiet, loaded.cluster.start_timeout_s, loaded.run / "log.txt")
    watchers = Watchers()
    watchers.ticks.append(follower.tick)
    board = Board(follower.say)
    watchers.ticks.append(board.tick)
    trackers: list[Tracker] = []
    if also is not None:
        watchers.ticks.append(also)

    try:
        # The lock comes first: the status.json of a run that another process owns is not ours to write.
        with (
            owned(loaded.run),
            mirrored(loaded.run, loaded.remote, follower.say) as put_files,
            status_file(loaded.run, command, follower.keep),
        ):
            stopper = Stopper(follower.say)
            # Once more: of a run in a store, the files of the last owner are here only now.
            loaded = with_new_evaluations(settled(loaded))
            names = names_of_stages(loaded, only)
            stages = [loaded.stage(name) for name in names]
            check_inputs(loaded, stages)
            check_unfinished(loaded, stages, fresh=fresh)
            check_memory(loaded, stages, follower.say)
            unverified = check_finished(loaded, stages, follower.say)
            # Once for all stages: an embedded cluster took 6 to 14 s to start (measured).
            if loaded.cluster.backend == "ray" and needs_workers(loaded, stages):
                show_cluster(loaded, follower.say)
                board.start(shows_of(loaded))
            if needs_workers(loaded, stages):
                backends.start_early(loaded.cluster)
                warn_of_unused_gpus(loaded.cluster, follower.say)
            if loaded.trackers.used():
                trackers += start_trackers(loaded.trackers, order_of_tracking(loaded, stages), loaded.run, follower.say)
            # What earlier commands logged has been shown already.
            for stage in loaded.stages:
                follower.skip(loaded.directory(stage))

            rows = []
            for name in names:
                # What the table of a sweep has just chosen is in the configs that waited for it.
                loaded = settled(loaded)
                stage = loaded.stage(name)
                # Before the stopper is asked, or a signal between the two would be heard after the stage.
                stopper.works_here = stage.kind in WORKERLESS_KINDS
                outcome = loaded.done(stage)
                is_skipped = outcome is not None
                if outcome is not None:
                    follower.say(skip_line(loaded, stage, stage.name not in unverified))
                    for judging in stages_behind(loaded, stage):
                        follower.say(f"{stage.name}: asked to be judged otherwise than it was: {judging.name} does it")
                elif stopper.asked:
                    raise Preempted(f"stopped before {stage.name}; run the same command again to go on")
                else:
                    follower.log = loaded.directory(stage) / "log.txt"
                    if stage.kind not in WORKERLESS_KINDS:
                        board.show_stage(loaded.directory(stage))
                    outcome = run_stage(
                        loaded,
                        stage,
                        say=follower.say,
                        tick=watchers.tick,
                        stopping=stopper.is_asked,
                        check_owned=put_files,  # it looks first whether the run is still ours
                        fresh=fresh,
                    )
                    follower.log = None
                    board.leave_stage()
                    put_files()
                stopper.works_here = False
                rows.append({"stage": stage.name, "skipped": is_skipped, **outcome})

            for line in table(rows):
                follower.say(line)
            follower.say(f"run: {loaded.place}")
        return rows
    finally:
        board.close()
        for tracker in trackers:
            tracker.close()
        follower.close()
        # Ray is imported only where it was needed; without it there is nothing to leave.
        if "jobs.cluster.ray_backend" in sys.modules:
            backends.disconnect()


@contextmanager
def status_file(run: Path, command: str, keep: Callable[[str], None]) -> Iterator[None]:
    """Keep status.json true: running while the block works, then done, or the code and message of what it raised.

    `keep` is given the command and its end, for the run's log.
    """
    write_status(run, None, "running", command)
    keep(f"{clock()} started: {command}")
    try:
        yield
    except BaseException as error:
        keep(f"{clock()} ended with exit code {exit_code(error)}: {message_of(error)}")
        with suppress(OSError):  # a full disk may be why we end: say that, not that it is full
            write_status(run, exit_code(error), message_of(error).splitlines()[0], command)
        raise
    keep(f"{clock()} done")
    write_status(run, ExitCode.DONE, "done", command)


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
    """Return the stages that judge a finished one anew (jobs/reevaluation.py)."""
    return [other for other in loaded.stages if other.judges == stage.name]


def needs_workers(loaded: Campaign, stages: list[Stage]) -> bool:
    """Tell whether a stage that has not finished runs on workers."""
    unfinished = [stage for stage in stages if loaded.done(stage) is None]
    return any(stage.kind not in WORKERLESS_KINDS for stage in unfinished)


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
    from jobs.cluster import job_metadata  # ray takes seconds to import
    from jobs.monitoring import gauges, metadata

    job_metadata.update({"run": str(loaded.run), "recipe": recipe_digest(loaded)})
    return [gauges.Gauges().show, metadata.show]


def order_of_tracking(loaded: Campaign, stages: list[Stage]) -> dict[str, Any]:
    """Return what a tracker's process is told: which stages there are, and all about them but their numbers."""
    told = []
    for stage in stages:
        told.append({"directory": str(loaded.directory(stage)), "name": stage.name, "facts": facts_of(loaded, stage)})
    return {"run": loaded.run.name, "stages": told}


def skip_line(loaded: Campaign, stage: Stage, is_verified: bool) -> str:
    """Why a finished stage is not run again, and what it did otherwise than is asked now."""
    line = f"{stage.name}: skipped, finished with the same config and inputs (key {stage.key[:8]})"
    directory = loaded.directory(stage)
    if DIVERGED in (loaded.done(stage) or {}):
        line = f"{stage.name}: skipped, diverged with the same config and inputs (key {stage.key[:8]})"
    if not is_verified:
        line += ", unverified: it finished before stages recorded digests of what they hand on"
    warnings = changed_warnings(directory, stage)
    if stages_behind(loaded, stage):
        judged = (*ACCURACY_FIELDS, *PROBE_FIELDS)
        warnings = {field: text for field, text in warnings.items() if field not in judged}
    if warnings:
        line += f", but for {'; '.join(warnings.values())}; move {directory} away to do it over"
    return line


def message_of(error: BaseException) -> str:
    """Return an error's message, or the error's name where the message is empty."""
    text = explain(error) if isinstance(error, OSError) else str(error)
    return text.strip() or type(error).__name__


def clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the closing table as lines: of each stage the images seen, its result and its time."""
    width = max([12, *(len(row["stage"]) for row in rows)])
    lines = [f"{'stage':{width}} {'images seen':>12} {'result':44} {'time':>8}"]
    for row in rows:
        images_seen = f"{row['samples_seen']:,}" if "samples_seen" in row else "-"
        time_text = duration(row["seconds"])
        if row["skipped"]:
            time_text += "*"
        lines.append(f"{row['stage']:{width}} {images_seen:>12} {result_text(row):44} {time_text:>8}")
    if any(row["skipped"] for row in rows):
        lines.append("* finished earlier, skipped now")
    return lines


def result_text(row: Mapping[str, Any]) -> str:
    """Say what a stage came to: its accuracies, or the shards it wrote, or the parameters it carried over."""
    # Of a few-shot probe the table shows the means; the single draws ("…seed…") are in metrics.json.
    metrics = without_single_seeds(row.get("metrics", {}))
    if metrics:
        shown = [f"{name} {value:.1%}" for name, value in metrics.items()]
        if len(shown) > MOST_VALUES:
            shown[MOST_VALUES - 1 :] = [f"… {len(shown)} values in all"]
        return "  ".join(shown)
    if DIVERGED in row:
        return "diverged"
    if "summary" in row:  # of a sweep's table
        return row["summary"]
    if "sets" in row:
        shards = sum(packed["shards"] for packed in row["sets"].values())
        return f"{len(row['sets'])} sets, {shards} shards"
    counts = [f"{row[name]} {name}" for name in ("kept", "resized", "new", "dropped") if row.get(name)]
    return "  ".join(counts)


def write_status(run: Path, exit_code: int | None, message: str, command: str) -> None:
    """Write status.json: how a command on this run ended, or, with code None, that it is running.

    It is needed beside the exit code, because Ray Jobs reduce that to 0 and 1. The end can be written on a full disk
    too, into the room that "running" has kept.
    """
    record = {
        "exit_code": exit_code,
        "message": message[:LONGEST_MESSAGE],
        "command": command,
        "time": clock(),
    }
    write_with_reserve(run / "status.json", json.dumps(record, indent=1), STATUS_RESERVE_BYTES)
