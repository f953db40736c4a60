"""What the driver shows while workers work: the run's own log, a live bar on a terminal, and what it waits for."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.telemetry import duration, last_metrics

QUIET_S = 10.0  # silence after which a wait says what it waits for


class Follower:
    """Prints new lines of a stage's log.txt; knows the newest metrics record. One a campaign, driver only."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.offset: dict[Path, int] = {}
        self.spoke = time.monotonic()
        self.bar: Any = None
        if sys.stdout.isatty() and not quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                transient=True,
            )
            self.task = self.bar.add_task("", total=None, visible=False)
            self.bar.start()

    def say(self, text: str) -> None:
        """One line to the terminal, above the bar where there is one."""
        self.spoke = time.monotonic()
        if self.quiet:
            return
        with suppress(OSError):  # whoever read it is gone; log.txt has it
            if self.bar is not None:
                self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, flush=True)

    def skip(self, directory: Path) -> None:
        """Lines of earlier attempts have been shown already."""
        log = directory / "log.txt"
        self.offset.setdefault(log, log.stat().st_size if log.exists() else 0)

    def tick(self, attempt_folder: Path, number: int) -> None:
        """Show what the worker group has logged since the last call; after a long silence, what is being waited for."""
        directory = attempt_folder.parents[1]
        log = directory / "log.txt"
        size = log.stat().st_size if log.exists() else 0
        if size > self.offset.get(log, 0):
            with open(log, "rb") as file:
                file.seek(self.offset.get(log, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.offset[log] = self.offset.get(log, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self.say(f"[{directory.name}] {line}")
            self._advance(directory)
        elif time.monotonic() - self.spoke > QUIET_S:
            self.say(f"[{directory.name}] {waiting_for(directory, attempt_folder)}")

    def _advance(self, directory: Path) -> None:
        if self.bar is None:
            return
        last = last_metrics(directory)
        if last:
            text = f"{directory.name}  loss {last['loss']:.4f}"
            self.bar.update(self.task, completed=last["step"], total=last["steps"], description=text, visible=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def waiting_for(directory: Path, attempt_folder: Path) -> str:
    """One line on a silent worker group: which workers have started, and the last step that was reported."""
    started = sorted(path.stem for path in attempt_folder.glob("rank-*.json"))
    if not started:
        return "waiting for the workers to start"
    last = last_metrics(directory)
    if last is None or last["attempt"] != int(attempt_folder.name.rpartition("-")[2]):
        return f"{len(started)} workers are up, waiting for the first step"
    return f"working: step {last['step']}/{last['steps']} was {duration(max(0.0, time.time() - last['time']))} ago"
