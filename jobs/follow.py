"""What the driver shows while workers work: the run's own log, a live bar on a terminal, and what it waits for."""

import time
from contextlib import suppress
from pathlib import Path

from data.checks import printable_lines
from jobs.progress import live_bar
from pipeline.monitoring.telemetry import duration, last_metrics

QUIET_S = 10.0  # silence after which a wait says what it waits for


class Follower:
    """Prints new lines of a stage's log.txt; knows the newest metrics record. One a campaign, driver only."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.shown_bytes: dict[Path, int] = {}  # log.txt → how much of it has been shown
        self.spoke = time.monotonic()
        self.bar = None if quiet else live_bar()

    def say(self, text: str) -> None:
        """One line to the terminal, above the bar where there is one."""
        self.spoke = time.monotonic()
        text = printable_lines(text)
        if self.quiet:
            return
        with suppress(OSError):  # whoever read it is gone; log.txt has it
            if self.bar is not None:
                self.bar.say(text)
            else:
                print(text, flush=True)

    def skip(self, directory: Path) -> None:
        """Take what a stage's log holds for shown: earlier commands have."""
        log = directory / "log.txt"
        self.shown_bytes.setdefault(log, size_of(log))

    def tick(self, attempt_folder: Path, number: int) -> None:
        """Show what the worker group has logged since the last call; after a long silence, what is being waited for."""
        directory = attempt_folder.parents[1]
        lines = self.new_lines(directory / "log.txt")
        if lines is not None:
            for line in lines:
                self.say(f"[{directory.name}] {line}")
            self.advance_bar(directory)
        elif time.monotonic() - self.spoke > QUIET_S:
            self.say(f"[{directory.name}] {waiting_for(directory, attempt_folder)}")

    def new_lines(self, log: Path) -> list[str] | None:
        """The whole lines that were added since the last call; None where nothing was."""
        shown = self.shown_bytes.get(log, 0)
        if size_of(log) <= shown:
            return None
        with open(log, "rb") as file:
            file.seek(shown)
            added = file.read()
        # The last line may be half written; the next call shows it.
        whole = added[: added.rfind(b"\n") + 1]
        self.shown_bytes[log] = shown + len(whole)
        return whole.decode(errors="replace").splitlines()

    def advance_bar(self, directory: Path) -> None:
        """Move the bar, where there is one, to the newest step."""
        if self.bar is None:
            return
        last = last_metrics(directory)
        if last is not None:
            self.bar.update(last["step"], last["steps"], f"{directory.name}  loss {last['loss']:.4f}")

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()


def size_of(log: Path) -> int:
    """Bytes of a file, 0 where it is not there yet."""
    return log.stat().st_size if log.exists() else 0


def waiting_for(directory: Path, attempt_folder: Path) -> str:
    """One line on a silent worker group: which workers have started, and the last step that was reported."""
    started = sorted(path.stem for path in attempt_folder.glob("rank-*.json"))
    if not started:
        return "waiting for the workers to start"
    last = last_metrics(directory)
    if last is None or last["attempt"] != int(attempt_folder.name.rpartition("-")[2]):
        return f"{len(started)} workers are up, waiting for the first step"
    return f"working: step {last['step']}/{last['steps']} was {duration(max(0.0, time.time() - last['time']))} ago"
