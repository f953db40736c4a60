"""One command's life on a run: own the directory, listen for signals, walk the stages, leave status.json behind."""

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.errors import exit_code
from data.files import write_whole
from jobs import campaign
from jobs.campaign import Campaign
from jobs.cluster import backends as cluster
from jobs.follow import Follower
from jobs.ownership import owned
from pipeline.telemetry import duration

Tick = Callable[[Path, int], None]


class Stopper:
    """The first SIGTERM or SIGINT asks for a commit and exit 75; a second SIGINT ends at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked, self.say = False, say
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.asked:
            name = signal.Signals(number).name
            self.say(f"{name}: finishing the step, committing, then exit 75; Ctrl-C again ends at once")
        self.asked = True


def run_campaign(
    loaded: Campaign,
    *,
    fresh: bool = False,
    only: str | None = None,
    also: Tick | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Run it under this process's name and print the closing table.

    `also` is called with every tick of a worker group; `quiet` leaves the log to log.txt.
    """
    follower = Follower(quiet)
    command = shlex.join(["python", *sys.orig_argv[1:]])

    ticks: list[Tick] = [follower.tick, *([also] if also else [])]

    def tick(folder: Path, number: int) -> None:
        for show in ticks:
            with suppress(OSError):  # a closed terminal or a stale handle costs a look, not the run
                show(folder, number)

    try:
        with owned(loaded.run):
            stopper = Stopper(follower.say)
            write_status(loaded.run, None, "running", command)
            try:
                if loaded.cluster.backend == "ray" and needs_workers(loaded, only):
                    show_cluster(loaded, follower.say)
                    ticks.append(ray_metrics(loaded))
                for stage in loaded.stages:
                    follower.skip(loaded.directory(stage))
                rows = campaign.run(
                    loaded,
                    say=follower.say,
                    tick=tick,
                    stopping=lambda: stopper.asked,
                    fresh=fresh,
                    only=only,
                )
            except BaseException as error:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                with suppress(OSError):  # a full disk may be why we end: say that, not that it is full
                    write_status(loaded.run, exit_code(error), text, command)
                raise
            write_status(loaded.run, 0, "done", command)
            for line in table(rows):
                follower.say(line)
            follower.say(f"run: {loaded.run}")
            return rows
    finally:
        follower.close()
        if "jobs.cluster.ray_backend" in sys.modules:
            cluster.disconnect()


def needs_workers(loaded: Campaign, only: str | None) -> bool:
    """Something that is still to be run runs on workers."""
    todo = [stage for stage in loaded.stages if loaded.done(stage) is None and only in (None, stage.name)]
    return any(stage.kind not in ("pack", "resize") for stage in todo)


def show_cluster(loaded: Campaign, say: Callable[[str], None]) -> None:
    """Start or join the cluster and say where to watch it."""
    info = cluster.connect(loaded.cluster, say)
    kind = "embedded, ends with this command" if info.embedded else f"joined at {info.address}"
    say(f"ray: {info.nodes} nodes, {info.cpus:g} CPUs, {info.gpus:g} GPUs ({kind})")
    if info.dashboard:
        say(f"dashboard: {info.dashboard} (its token: ray get-auth-token)")


def ray_metrics(loaded: Campaign) -> Tick:
    """Gauges on the connected cluster."""
    from jobs.gauges import Gauges  # ray takes seconds to import

    return Gauges(loaded.run).tick


def table(rows: list[dict[str, Any]]) -> list[str]:
    """What each stage did: images seen, accuracy, time."""
    lines = [f"{'stage':12} {'images seen':>12} {'result':44} {'time':>8}"]
    for row in rows:
        metrics = {k: v for k, v in row.get("metrics", {}).items() if "seed" not in k}
        result = "  ".join(f"{name} {value:.1%}" for name, value in metrics.items()) or _counts(row)
        seen = f"{row['samples_seen']:,}" if "samples_seen" in row else "-"
        time_text = duration(row["seconds"]) + ("*" if row["skipped"] else "")
        lines.append(f"{row['stage']:12} {seen:>12} {result:44} {time_text:>8}")
    if any(row["skipped"] for row in rows):
        lines.append("* finished earlier, skipped now")
    return lines


def _counts(row: dict[str, Any]) -> str:
    if "sets" in row:
        return f"{len(row['sets'])} sets, {sum(s['shards'] for s in row['sets'].values())} shards"
    return "  ".join(f"{row[name]} {name}" for name in ("kept", "resized", "new", "dropped") if row.get(name))


def write_status(run: Path, exit_code: int | None, message: str, command: str, **more: Any) -> None:
    """How a command on this run stands or ended; Ray Jobs reduce exit codes to 0 and 1, this file does not."""
    record = {
        "exit_code": exit_code,
        "message": message,
        "command": command,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        **more,
    }
    write_whole(run / "status.json", json.dumps(record, indent=1))
