"""One command's life on a run: own the directory, listen for signals, walk the stages, leave status.json behind.

In order (`run_campaign`):
1. the run directory is locked: a second command on it ends with exit code 73;
2. SIGTERM and Ctrl-C are caught: the first asks for a commit and exit code 75, a second Ctrl-C ends at once;
3. inputs outside the campaign are looked for, all of them, before anything starts;
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
from data.files import write_whole
from jobs import campaign
from jobs.campaign import Campaign, Stage
from jobs.cluster import backends
from jobs.follow import Follower
from jobs.ownership import owned
from jobs.stage_run import changed_warnings, check_unchanged, run_stage
from pipeline.monitoring.telemetry import duration

Tick = Callable[[Path, int], None]  # given an attempt's folder and number

# Kinds whose work is done by the driver itself; all others run on workers.
WORKERLESS_KINDS = ("pack", "resize")


class Stopper:
    """Catches SIGTERM and SIGINT: the first asks for a commit and exit code 75, a second SIGINT ends at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self.say = say
        signal.signal(signal.SIGTERM, self.handle)
        signal.signal(signal.SIGINT, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember that somebody asked; raise KeyboardInterrupt at a second SIGINT."""
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.asked:
            name = signal.Signals(number).name
            self.say(f"{name}: finishing the step, committing, then exit 75; Ctrl-C again ends at once")
        self.asked = True

    def is_asked(self) -> bool:
        """Whether somebody wants this command to end."""
        return self.asked


class Watchers:
    """Calls everybody who wants to see an attempt's progress; a failing look costs the look, never the run."""

    def __init__(self) -> None:
        self.ticks: list[Tick] = []

    def tick(self, attempt_folder: Path, number: int) -> None:
        """Let each of them look at the attempt's folder."""
        for show in self.ticks:
            with suppress(OSError):  # a closed terminal, or a stale handle of a shared folder
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
    command = shlex.join(["python", *sys.orig_argv[1:]])
    follower = Follower(quiet)
    watchers = Watchers()
    watchers.ticks.append(follower.tick)
    if also is not None:
        watchers.ticks.append(also)
    stages = [stage for stage in loaded.stages if only in (None, stage.name)]

    try:
        with owned(loaded.run), status_file(loaded.run, command):
            stopper = Stopper(follower.say)
            campaign.check_inputs(stages)
            if not fresh:
                check_unchanged(loaded, stages)
            if loaded.cluster.backend == "ray" and needs_workers(loaded, stages):
                show_cluster(loaded, follower.say)
                watchers.ticks.append(ray_metrics(loaded))
            # What earlier commands logged has been shown already.
            for stage in loaded.stages:
                follower.skip(loaded.directory(stage))

            rows = []
            for stage in stages:
                outcome = loaded.done(stage)
                is_skipped = outcome is not None
                if outcome is not None:
                    follower.say(skip_line(loaded, stage))
                elif stopper.asked:
                    raise Preempted(f"stopped before {stage.name}; run the same command again to go on")
                else:
                    outcome = run_stage(
                        loaded,
                        stage,
                        say=follower.say,
                        tick=watchers.tick,
                        stopping=stopper.is_asked,
                        fresh=fresh,
                    )
                rows.append({"stage": stage.name, "skipped": is_skipped, **outcome})

        for line in table(rows):
            follower.say(line)
        follower.say(f"run: {loaded.run}")
        return rows
    finally:
        follower.close()
        # Ray is imported only where it was needed; without it there is nothing to leave.
        if "jobs.cluster.ray_backend" in sys.modules:
            backends.disconnect()


@contextmanager
def status_file(run: Path, command: str) -> Iterator[None]:
    """Keep status.json true: running while the block works, then done, or the code and message of what it raised."""
    write_status(run, None, "running", command)
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # a full disk may be why we end: say that, not that it is full
            write_status(run, exit_code(error), first_line(error), command)
        raise
    write_status(run, ExitCode.DONE, "done", command)


def needs_workers(loaded: Campaign, stages: list[Stage]) -> bool:
    """Whether a stage that is still to be run runs on workers."""
    unfinished = [stage for stage in stages if loaded.done(stage) is None]
    return any(stage.kind not in WORKERLESS_KINDS for stage in unfinished)


def show_cluster(loaded: Campaign, say: Callable[[str], None]) -> None:
    """Start or join the cluster and say where to watch it."""
    info = backends.connect(loaded.cluster, say)
    kind = "embedded, ends with this command" if info.embedded else f"joined at {info.address}"
    say(f"ray: {info.nodes} nodes, {info.cpus:g} CPUs, {info.gpus:g} GPUs ({kind})")
    if info.dashboard:
        say(f"dashboard: {info.dashboard} (its token: ray get-auth-token)")


def ray_metrics(loaded: Campaign) -> Tick:
    """What sets the run's gauges on the connected cluster."""
    from jobs.gauges import Gauges  # ray takes seconds to import

    return Gauges(loaded.run).tick


def skip_line(loaded: Campaign, stage: Stage) -> str:
    """Why a finished stage is not run again, and what it did otherwise than is asked now."""
    line = f"{stage.name}: skipped, finished with the same config and inputs (key {stage.key[:8]})"
    directory = loaded.directory(stage)
    warnings = changed_warnings(directory, stage)
    if warnings:
        line += f", but for {'; '.join(warnings)}; move {directory} away to do it over"
    return line


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its name where it has none."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The closing table as lines: of each stage the images seen, its result and its time."""
    lines = [f"{'stage':12} {'images seen':>12} {'result':44} {'time':>8}"]
    for row in rows:
        images_seen = f"{row['samples_seen']:,}" if "samples_seen" in row else "-"
        time_text = duration(row["seconds"])
        if row["skipped"]:
            time_text += "*"
        lines.append(f"{row['stage']:12} {images_seen:>12} {result_text(row):44} {time_text:>8}")
    if any(row["skipped"] for row in rows):
        lines.append("* finished earlier, skipped now")
    return lines


def result_text(row: Mapping[str, Any]) -> str:
    """What a stage came to: its accuracies, or the shards it wrote, or the parameters it carried over."""
    # Of a few-shot probe the table shows the means; the single draws ("…seed…") are in metrics.json.
    metrics = {name: value for name, value in row.get("metrics", {}).items() if "seed" not in name}
    if metrics:
        return "  ".join(f"{name} {value:.1%}" for name, value in metrics.items())
    if "sets" in row:
        shards = sum(packed["shards"] for packed in row["sets"].values())
        return f"{len(row['sets'])} sets, {shards} shards"
    counts = [f"{row[name]} {name}" for name in ("kept", "resized", "new", "dropped") if row.get(name)]
    return "  ".join(counts)


def write_status(run: Path, exit_code: int | None, message: str, command: str) -> None:
    """Write status.json: how a command on this run stands (code None) or ended. Ray Jobs reduce codes to 0 and 1."""
    record = {
        "exit_code": exit_code,
        "message": message,
        "command": command,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    write_whole(run / "status.json", json.dumps(record, indent=1))
