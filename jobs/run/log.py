"""The output of a command on a run: terminal lines, log.txt, status.json and the table of results.

- `RunLog` prints the lines of the workers and of the driver, and writes them to log.txt.
- `status_file` maintains status.json: whether the command is running, or how it ended. The exit code is not enough,
  because Ray Jobs reports only 0 or 1.
- `log_table` logs the results of all stages.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data.checks import printable_lines
from data.errors import ExitCode, exit_code
from data.files import error_text, write_with_reserve
from jobs.ownership import Lease
from jobs.resolved_recipe import Context
from jobs.run.reading import StatusMessage, outcome_of, size_of
from jobs.run.watchers import Watcher
from jobs.terminal import CLOSE_S, Terminal, activity, write_last
from pipeline.checkpoints.manifest import attempt_folder
from pipeline.monitoring.telemetry import append_whole
from pipeline.values import counted, duration

QUIET_S = 10.0  # after this long without output, log what the run is waiting for
DRIVER_PREFIX = "[driver] "  # prefix of the driver's lines in a stage's log.txt; a worker's is "[worker 2] "
CLOCK = "%Y-%m-%d %H:%M:%S"
STATUS_RESERVE_BYTES = 4096  # padding of status.json, so that the final message fits if the disk is full
MAX_MESSAGE_LENGTH = 600  # characters of the message in status.json; JSON may need six bytes for each
MAX_VALUES = 6  # values in a row of the table of results


class RunLog(Watcher):
    """The log of a command: writes lines to the terminal and to the log.txt files of the run and the stage.

    Worker lines are read from the stage's log.txt, printed, and copied to the run's log.txt. RunLog is the first
    watcher, because the other watchers log through it.
    """

    def __init__(self, quiet: bool = False, start_timeout_s: float = 300.0, file: Path | None = None) -> None:
        self.file = file  # the run's log.txt, with every printed line of all stages and commands
        self.start_timeout_s = start_timeout_s
        self.stage_file: Path | None = None  # log.txt of the running stage; None between stages
        self.last_wait: tuple[str, int] | None = None  # the last logged wait, and its attempt
        self.shown_bytes: dict[Path, int] = {}  # log.txt → number of bytes already shown
        self.last_line_at = time.monotonic()
        # Remove the command's own progress bar: a terminal has room for only one.
        activity.end()
        self.terminal = None if quiet else Terminal(sys.stdout)

    def __call__(self, text: str) -> None:
        """Print a line from the driver, and write it to the logs of the run and of the running stage."""
        if self.stage_file is not None:
            lines = "".join(f"{DRIVER_PREFIX}{line}\n" for line in text.splitlines())
            # If the disk is full, the line is only shown in the terminal.
            append_whole(self.stage_file, lines.encode())
        self.keep(text)
        self.show(text)

    def keep(self, text: str) -> None:
        """Append a line to the run's log."""
        if self.file is not None:
            append_whole(self.file, f"{printable_lines(text)}\n".encode())

    def show(self, text: str) -> None:
        """Print a line to the terminal, above any progress bar."""
        self.last_line_at = time.monotonic()
        # `write` never blocks: a stuck terminal must not delay the watchdog or a stop.
        if self.terminal is not None:
            self.terminal.write(printable_lines(text))

    def show_progress(self, done: int, total: int | None, text: str) -> bool:
        """Update the progress bar; return False if the terminal has no progress bar."""
        if self.terminal is None or not self.terminal.has_bar:
            return False
        self.terminal.move_bar(done, total, text)
        return True

    # -------------------------------------------------------------------- as a watcher

    def stage(self, context: Context) -> None:
        """Log to this stage's folder from now on; do not repeat lines logged by earlier commands."""
        self.stage_file = context.directory / "log.txt"
        self.shown_bytes.setdefault(self.stage_file, size_of(self.stage_file))

    def status(self, message: StatusMessage) -> None:
        """Show new log lines and the stage's progress; after QUIET_S without output, also what it waits for."""
        if message.state == "waiting":
            return
        self.show_new_lines(message)
        if message.state == "ended":
            self.stage_file = None
            return
        report = message.report
        # Ignore a report of the previous attempt.
        if report is not None and report["attempt"] == message.attempt:
            text = f"{message.stage}  loss {report['loss']:.4f}"
            # Rank 0's clock may be ahead of this one.
            age_s = message.time - report["time"]
            if age_s > QUIET_S:
                text += f"  {duration(age_s)} ago"
            self.show_progress(max(message.step, report["step"]), report["steps"], text)
            return

        # Before the first report, show what the run is waiting for: at once on the progress bar, after QUIET_S in the
        # log.
        started = len(list(attempt_folder(message.directory, message.attempt).glob("rank-*.json")))
        wait = f"{started} workers have started; waiting for their first step"
        if not started:
            limit = duration(self.start_timeout_s)
            wait = f"waiting for the workers to start, up to {limit} (cluster.start_timeout_s)"
        self.show_progress(0, None, f"{message.stage}: {wait}")
        if time.monotonic() - self.last_line_at <= QUIET_S:
            return
        wait = f"[{message.stage}] {wait}"
        if (wait, message.attempt) != self.last_wait:
            self(wait)
        self.last_wait = (wait, message.attempt)

    def show_new_lines(self, message: StatusMessage) -> None:
        """Show new lines from the stage's log.txt, and copy them to the run's log.txt."""
        log = message.directory / "log.txt"
        shown = self.shown_bytes.get(log, 0)
        if size_of(log) <= shown:
            return
        with open(log, "rb") as file:
            file.seek(shown)
            added = file.read()
        # An incomplete last line is shown by the next call.
        whole = added[: added.rfind(b"\n") + 1]
        self.shown_bytes[log] = shown + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            # The driver's own lines were shown when they were logged.
            if not line.startswith(DRIVER_PREFIX):
                # The terminal shows only the stage's name, which is unique in a campaign; log.txt has its key too.
                self.keep(f"[{message.directory.name}] {line}")
                self.show(f"[{message.stage}] {line}")

    def close(self) -> None:
        """Remove the progress bar, and give the terminal a few seconds to print its remaining lines."""
        if self.terminal is None:
            return
        lost = self.terminal.close()
        if lost:
            line = f"{lost} lines are not shown: the terminal blocked for {CLOSE_S:g} s; all lines are in {self.file}"
            self.keep(line)
            write_last(line)


# ------------------------------------------------------------------------ how a command ends


@contextmanager
def status_file(run: Path, command: str, keep: Callable[[str], None], lease: Lease) -> Iterator[None]:
    """Maintain status.json: "running" during the block, then "done" or, after an error, its exit code and message.

    `keep` appends lines to the run's log: first the command, and at the end the result. If another command has taken
    over the run, status.json belongs to that command, and RunOwned is raised instead of any other error.
    """
    write_status(run, None, "running", command)
    keep(f"{time.strftime(CLOCK)} started: {command}")
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    # If another command has taken over the run, a worker's failed commit or a requested stop must not decide the exit
    # code: a batch system would start this command again.
    lease.check_at_end()
    if failure is None:
        keep(f"{time.strftime(CLOCK)} done")
        write_status(run, ExitCode.DONE, "done", command)
        return
    text = error_text(failure) if isinstance(failure, OSError) else str(failure)
    message = text.strip() or type(failure).__name__
    keep(f"{time.strftime(CLOCK)} ended with exit code {exit_code(failure)}: {message}")
    with suppress(OSError):  # if the disk is full, report the original error instead
        write_status(run, exit_code(failure), message.splitlines()[0], command)
    raise failure


def write_status(run: Path, code: int | None, message: str, command: str) -> None:
    """Write status.json: how a command on this run ended, or that it is running if `code` is None.

    The "running" record reserves space, so that the final record can be written even if the disk is full.
    """
    record = {
        "exit_code": code,
        "message": message[:MAX_MESSAGE_LENGTH],
        "command": command,
        "time": time.strftime(CLOCK),
    }
    write_with_reserve(run / "status.json", json.dumps(record, indent=1), STATUS_RESERVE_BYTES)


def log_table(rows: Sequence[Mapping[str, Any]], log: Callable[[str], None]) -> None:
    """Log a table with one row per stage: images seen, result and time."""
    width = max([12, *(len(row["stage"]) for row in rows)])
    log(f"{'stage':{width}} {'images seen':>12} {'result':44} {'time':>8}")
    for row in rows:
        images_seen = "-"
        # Subsets and indexed tars are made without opening any image.
        if row.get("samples_seen"):
            images_seen = f"{row['samples_seen']:,}"
        time_text = duration(row["seconds"])
        if row["skipped"]:
            time_text += "*"
        log(f"{row['stage']:{width}} {images_seen:>12} {'  '.join(result_parts(row)):44} {time_text:>8}")
    if any(row["skipped"] for row in rows):
        log("* skipped: finished by an earlier command")


def result_parts(row: Mapping[str, Any]) -> list[str]:
    """Return a stage's result as strings for the table: accuracies, chosen values, shards or parameters."""
    outcome = outcome_of(row)
    parts: list[str] = []
    if outcome.metrics:
        parts = [f"{name} {value:.1%}" for name, value in outcome.metrics.items()]
        if len(parts) > MAX_VALUES:
            parts[MAX_VALUES - 1 :] = [f"… {len(parts)} values in total"]
    elif outcome.diverged:
        parts = ["diverged"]
    elif outcome.summary:
        parts = [outcome.summary]
    elif "sets" in row:
        shards = sum(packed["shards"] for packed in outcome.sets.values())
        parts = [f"{counted(len(outcome.sets), 'set')}, {counted(shards, 'shard')}"]
    else:
        for name in ("kept", "resized", "new", "dropped"):
            if row.get(name):
                parts.append(f"{row[name]} {name}")
    return parts
