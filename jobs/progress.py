"""The progress of a long count: a live bar on a terminal, a line every few seconds elsewhere.

    progress = ProgressMeter("samples", total=60_000)
    progress(1_200, "3 shards")        1.2k of 60.0k samples  3 shards  240/s  eta 4m05s

Every command shows what it does after one second (`activity`), even if it has nothing to count.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from data.checks import printable_lines
from pipeline.values import amount, duration

WAIT_S = 1.0  # after which a command shows what it does


class LiveBar:
    """One bar at the bottom of a terminal, below the lines that are printed; it turns while the process lives."""

    def __init__(self, file: TextIO | None = None) -> None:
        """Draw on stdout, or on another stream."""
        # rich takes 0.1 s to import; a command without a bar does not wait for it.
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            SpinnerColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(),
        )
        self.rich = RichProgress(*columns, transient=True, console=Console(file=file))
        # Hidden before the first count.
        self.task = self.rich.add_task("", total=None, visible=False, count="")
        self.rich.start()

    def update(self, done: int, total: int | None, text: str) -> None:
        """Move the bar; without a total it pulses."""
        # rich stops the clock of a count that has ended: start it again for the next count.
        shown = self.rich.tasks[0]
        if shown.finished and (total is None or done < shown.completed):
            self.rich.reset(self.task)
        count = amount(done) if done else ""
        if total:
            count = f"{done}/{total} eta"
        self.rich.update(self.task, completed=done, total=total, description=text, count=count, visible=True)

    def write(self, text: str) -> None:
        """Print a line above the bar."""
        # Print brackets in a path as they are, numbers without colour, and long lines unbroken.
        self.rich.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.rich.stop()


class Activity:
    """Shows what this process does, after WAIT_S: by a bar on a terminal, elsewhere by a line on stderr."""

    def __init__(self) -> None:
        self.text = ""  # "" if there is nothing to show
        self.bar: LiveBar | None = None
        self.timer = threading.Timer(0, str)
        self.lock = threading.RLock()  # the timer's thread shows it

    def now(self, text: str) -> None:
        """Show this activity from now on."""
        with self.lock:
            self.text = printable_lines(text)
            self.timer.cancel()
            if self.bar is not None:
                self.bar.update(0, None, self.text)
                return
            self.timer = threading.Timer(WAIT_S, self.speak)
            self.timer.daemon = True
            self.timer.start()

    def speak(self) -> None:
        """Show the activity, which has taken longer than WAIT_S."""
        with self.lock:
            if self.text and not self.show(0, None, self.text):
                print(self.text, file=sys.stderr, flush=True)

    def show(self, done: int, total: int | None, text: str) -> bool:
        """Show progress on a bar; return whether stdout is a terminal, which has one."""
        with self.lock:
            if self.bar is None and sys.stdout.isatty():
                self.bar = LiveBar()
            if self.bar is not None:
                self.bar.update(done, total, text)
            return self.bar is not None

    def end(self) -> None:
        """Remove the bar, and show nothing more."""
        with self.lock:
            self.text = ""
            self.timer.cancel()
            if self.bar is not None:
                self.bar.close()
            self.bar = None


activity = Activity()  # of this process: a terminal has one bar at its bottom


class ProgressMeter:
    """Shows how much of a count is done: by `show`, or if that returns False, by a line every `every_s` seconds."""

    def __init__(
        self,
        unit: str,
        total: int | None = None,
        *,
        log: Callable[[str], None] = print,
        show: Callable[[int, int | None, str], bool] = activity.show,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.unit = unit
        self.total = total
        self.every_s = every_s
        self.clock = clock
        self.log = log
        self.show = show
        self.began = clock()
        self.last_line = self.began

    def __call__(self, done: int, note: str = "") -> None:
        """Show that so many are done, with a note."""
        now = self.clock()
        # A first count may come before the clock has moved.
        rate = done / max(now - self.began, 1e-9)
        # The bar itself shows the count and the time that is left.
        parts = [self.unit, note, f"{amount(rate)}/s"]
        if self.show(done, self.total, "  ".join(filter(None, parts))):
            return
        if now - self.last_line < self.every_s:
            return

        self.last_line = now
        count = amount(done)
        eta = ""
        # The remaining time is known only if the total is.
        if self.total:
            count += f" of {amount(self.total)}"
            if rate:
                remaining = max(self.total - done, 0)
                eta = f"eta {duration(remaining / rate)}"
        parts = [f"{count} {self.unit}", note, f"{amount(rate)}/s", eta]
        self.log("  ".join(filter(None, parts)))

    def packed(self, shards: int, samples: int) -> None:
        """Show what has been packed; this is the `report` of data.shards.packing and of a repair."""
        self(samples, f"{shards} shards")

    def of(self, done: int, total: int) -> None:
        """Show how many of a total are done; this is the `report` of indexing and checking."""
        self.total = total
        self(done)
