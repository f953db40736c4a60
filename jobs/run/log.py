"""What a command on a run shows, and keeps in the run directory.

- `RunLog` shows the lines of the workers, the driver's own, and what it waits for; log.txt keeps them.
- `status_file` keeps status.json: that the command runs, or how it has ended. That is needed beside the exit code,
  because Ray Jobs reduce it to 0 and 1.
- `log_table` logs the closing table of a campaign.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data.checks import printable_lines
from data.errors import ExitCode, exit_code
from data.files import explain, write_with_reserve
from jobs.extras.monitor.status_poller import size_of
from jobs.named_stages import STAGE_FOLDER
from jobs.ownership import Lease
from jobs.progress import activity
from jobs.resolved_recipe import Campaign, Stage
from jobs.terminal import CLOSE_S, COMMAND, Terminal, write_last
from pipeline.artifacts import DIVERGED, STOPPED
from pipeline.monitoring.telemetry import append_whole, last_metrics, without_single_seeds
from pipeline.values import counted, duration

QUIET_S = 10.0  # silence after which a wait says what it waits for
DRIVER_MARK = "[driver] "  # before the driver's own lines in a log.txt, as "[worker 2] " is before a worker's
CLOCK = "%Y-%m-%d %H:%M:%S"
STATUS_RESERVE_BYTES = 4096  # blanks in status.json: room for the message of an end on a full disk
LONGEST_MESSAGE = 600  # characters of status.json's message; as JSON each may take six bytes
MOST_VALUES = 6  # that a row of the closing table shows


class RunLog:
    """Prints what workers write into a stage's log.txt, writes there what the driver prints, keeps both in the run's.

    There is one a campaign.
    """

    def __init__(self, quiet: bool = False, start_timeout_s: float = 300.0, file: Path | None = None) -> None:
        self.file = file  # the run's log.txt, with every line that is printed, of all stages and commands
        self.start_timeout_s = start_timeout_s
        self.stage_file: Path | None = None  # log.txt of the stage that runs; None between stages
        self.last_wait: tuple[str, Path] | None = None  # the wait that was reported last, and in which attempt
        self.shown_bytes: dict[Path, int] = {}  # log.txt → how much of it has been shown
        self.spoke = time.monotonic()
        # What the command has shown of itself until now ends: a terminal has one bar.
        activity.end()
        self.terminal = None if quiet else Terminal(sys.stdout)

    def __call__(self, text: str) -> None:
        """Print the driver's line to the terminal, and keep it in the logs of the run and of the stage that runs."""
        if self.stage_file is not None:
            lines = "".join(f"{DRIVER_MARK}{line}\n" for line in text.splitlines())
            # A full disk costs the line in the log; the terminal has it.
            append_whole(self.stage_file, lines.encode())
        self.keep(text)
        self.show(text)

    def keep(self, text: str) -> None:
        """Append a line to the run's log."""
        if self.file is not None:
            append_whole(self.file, f"{printable_lines(text)}\n".encode())

    def show(self, text: str) -> None:
        """Print a line to the terminal, above the bar where there is one."""
        self.spoke = time.monotonic()
        # It returns at once: a terminal that takes no line must not hold up the watchdog, nor a stop.
        if self.terminal is not None:
            self.terminal.write(printable_lines(text))

    def show_progress(self, done: int, total: int | None, text: str) -> bool:
        """Move the bar, which is the sign of life; returns whether there is one."""
        if self.terminal is None or not self.terminal.has_bar:
            return False
        self.terminal.move_bar(done, total, text)
        return True

    def skip(self, directory: Path) -> None:
        """Count what a stage's log holds now as shown: earlier commands have shown it."""
        log = directory / "log.txt"
        self.shown_bytes.setdefault(log, size_of(log))

    def poll(self, attempt_folder: Path, number: int, step: int = 0) -> None:
        """Show what an attempt has logged since the last call and how far it is; after a silence, what it waits for.

        `step` is the last whole one that the workers have told of, which may be behind the newest report.
        """
        # The stage's folder: an attempt's is <stage>/attempts/attempt-000001.
        directory = attempt_folder.parents[1]
        stage = directory.name
        # On the terminal a stage goes by its name, which no other of the campaign has; log.txt has the key too.
        name = stage
        if parts := STAGE_FOLDER.fullmatch(stage):
            name = parts["name"]
        last = last_metrics(directory)
        log = directory / "log.txt"
        shown = self.shown_bytes.get(log, 0)
        if size_of(log) > shown:
            with open(log, "rb") as file:
                file.seek(shown)
                added = file.read()
            # The last line may be half written; the next call shows it.
            whole = added[: added.rfind(b"\n") + 1]
            self.shown_bytes[log] = shown + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                # The driver's own lines were shown when they were logged.
                if not line.startswith(DRIVER_MARK):
                    self.keep(f"[{stage}] {line}")
                    self.show(f"[{name}] {line}")
        # The newest report may be of the attempt before, which says nothing about these workers.
        is_working = last is not None and last["attempt"] == number
        if last is not None and is_working:
            text = f"{name}  loss {last['loss']:.4f}"
            # The time is that of rank 0's clock, which may be ahead of this one.
            age = time.time() - last["time"]
            if age > QUIET_S:
                text += f"  {duration(age)} ago"
            self.show_progress(max(step, last["step"]), last["steps"], text)
            return

        # Of a group without a step: what it waits for, on the bar at once, as a line after a silence, each once.
        started = len(list(attempt_folder.glob("rank-*.json")))
        wait = f"{started} workers are up, waiting for the first step"
        if not started:
            limit = duration(self.start_timeout_s)
            wait = f"waiting for the workers to start, for up to {limit} (cluster.start_timeout_s)"
        self.show_progress(0, None, f"{name}: {wait.partition(', for up to')[0]}")
        if time.monotonic() - self.spoke <= QUIET_S:
            return
        wait = f"[{name}] {wait}"
        if (wait, attempt_folder) != self.last_wait:
            self(wait)
        self.last_wait = (wait, attempt_folder)

    def close(self) -> None:
        """Take the bar away, and give the terminal a few seconds for the lines that it has not taken yet."""
        if self.terminal is None:
            return
        lost = self.terminal.close()
        if lost:
            line = f"{lost} lines are not shown: in the last {CLOSE_S:g}s the terminal took none; {self.file} has all"
            self.keep(line)
            write_last(line)


# ------------------------------------------------------------------------ how a command ends


@contextmanager
def status_file(run: Path, command: str, keep: Callable[[str], None], lease: Lease) -> Iterator[None]:
    """Keep status.json true: running while the block works, then done, or the code and message of what it raised.

    `keep` is given the command and its end, for the run's log. Raises RunOwned in the place of any other end where
    another command has taken the run over: then the file is that command's.
    """
    write_status(run, None, "running", command)
    keep(f"{time.strftime(CLOCK)} started: {command}")
    try:
        yield
    except BaseException as error:
        # A worker may have failed at its commit, or have stopped as it was asked to. Neither exit code would say that
        # another command goes on with the run, and a batch system would start one that asks to be run again.
        lease.check_at_end()
        text = explain(error) if isinstance(error, OSError) else str(error)
        message = text.strip() or type(error).__name__
        keep(f"{time.strftime(CLOCK)} ended with exit code {exit_code(error)}: {message}")
        with suppress(OSError):  # a full disk may be why we end: say that, not that it is full
            write_status(run, exit_code(error), message.splitlines()[0], command)
        raise
    lease.check_at_end()
    keep(f"{time.strftime(CLOCK)} done")
    write_status(run, ExitCode.DONE, "done", command)


def write_status(run: Path, code: int | None, message: str, command: str) -> None:
    """Write status.json: how a command on this run ended, or, with code None, that it is running.

    The end can be written on a full disk too, into the room that "running" has kept.
    """
    record = {
        "exit_code": code,
        "message": message[:LONGEST_MESSAGE],
        "command": command,
        "time": time.strftime(CLOCK),
    }
    write_with_reserve(run / "status.json", json.dumps(record, indent=1), STATUS_RESERVE_BYTES)


def log_table(rows: Sequence[Mapping[str, Any]], log: Callable[[str], None]) -> None:
    """Log the closing table: of each stage the images seen, its result and its time; `rows` are their outcomes."""
    width = max([12, *(len(row["stage"]) for row in rows)])
    log(f"{'stage':{width}} {'images seen':>12} {'result':44} {'time':>8}")
    for row in rows:
        # 1. The result: accuracies, what a sweep has chosen, the shards written, or the parameters carried over. Of a
        # few-shot probe people see the means; the single draws ("…seed…") are in metrics.json.
        metrics = without_single_seeds(row.get("metrics", {}))
        parts: list[str] = []
        if metrics:
            parts = [f"{name} {value:.1%}" for name, value in metrics.items()]
            if len(parts) > MOST_VALUES:
                parts[MOST_VALUES - 1 :] = [f"… {len(parts)} values in all"]
        elif DIVERGED in row:
            parts = ["diverged"]
        elif "summary" in row:
            parts = [row["summary"]]
        elif STOPPED in row:
            parts = ["not run"]
        elif "sets" in row:
            shards = sum(packed["shards"] for packed in row["sets"].values())
            parts = [f"{counted(len(row['sets']), 'set')}, {counted(shards, 'shard')}"]
        else:
            for name in ("kept", "resized", "new", "dropped"):
                if row.get(name):
                    parts.append(f"{row[name]} {name}")

        if STOPPED in row and metrics:
            parts.append("stopped")

        # 2. The line.
        images_seen = "-"
        # Sets that are parts of others, or tars that are indexed, have had no image opened.
        if row.get("samples_seen"):
            images_seen = f"{row['samples_seen']:,}"
        time_text = duration(row["seconds"])
        if row["skipped"]:
            time_text += "*"
        log(f"{row['stage']:{width}} {images_seen:>12} {'  '.join(parts):44} {time_text:>8}")
    if any(row["skipped"] for row in rows):
        log("* finished earlier, skipped now")


def log_next(campaign: Campaign, rows: Sequence[Mapping[str, Any]], log: Callable[[str], None]) -> None:
    """Log where the run is and, where it has made weights, what to type next with those of the last section.

    Of the runs of a sweep the one with the best accuracy is named.
    """
    address = campaign.storage.address()
    log(f"run: {address}")
    stage: Stage | None = None
    best = 0.0
    for row in rows:
        made = campaign.stage(row["stage"])
        accuracy = row.get("metrics", {}).get("accuracy", 0.0)
        is_first = stage is None or made.source != stage.source
        if made.kind.makes_weights and not {DIVERGED, STOPPED} & row.keys() and (is_first or accuracy > best):
            stage = made
            best = accuracy
    if stage is None:
        return
    is_vit = stage.model is not None and stage.model.family == "vit"
    evaluated = campaign.path_of(stage.config.data.evaluate) if stage.kind.trains else None
    # As short as it can be typed here.
    run = os.path.relpath(address) if Path(address).is_relative_to(Path.cwd()) else address
    weights = f"{run}/{stage.name}"
    commands = [["report", run, "--open"]]
    if evaluated is not None:
        if Path(evaluated).is_relative_to(Path.cwd()):
            evaluated = os.path.relpath(evaluated)
        # A set of the run's own goes by its stage's name, as the weights do.
        made_by = STAGE_FOLDER.fullmatch(Path(evaluated).parent.name)
        if made_by is not None and Path(evaluated).parents[1] == Path(run):
            evaluated = f"{run}/{made_by['name']}/{Path(evaluated).name}"
        commands.append(["evaluate", weights, evaluated])
    commands.append(["export", weights, "exported", "--format", "timm" if is_vit else "safetensors"])
    log("next, for example:")
    for command in commands:
        log(f"  {COMMAND} {shlex.join(command)}")
    if best and stage.kind.trains and stage.config.init is None:
        log("to do better: more images, or `new` with more --minutes, or with trained weights as --init")
