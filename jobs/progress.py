"""How far a long count has come: a live bar on a terminal, a line every few seconds anywhere else.

with ProgressMeter("samples", total=60_000) as progress:
    progress(1_200, "3 shards")        1.2k of 60.0k samples  3 shards  240/s  eta 4m05s
"""

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from pipeline.monitoring.telemetry import amount, duration


class LiveBar:
    """One bar at the bottom of a terminal, below whatever is said meanwhile."""

    def __init__(self, file: TextIO | None = None) -> None:
        """Draw on stdout, or on another stream."""
        # rich takes 0.1 s to import, for which a command without a bar does not wait.
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(),
        )
        self.rich = RichProgress(*columns, transient=True, console=Console(file=file))
        # Nothing is shown before the first count: until then there is nothing to say.
        self.task = self.rich.add_task("", total=None, visible=False, count="")
        self.rich.start()

    def update(self, done: int, total: int | None, text: str) -> None:
        count = str(done)
        if total:
            count += f"/{total}"
        self.rich.update(self.task, completed=done, total=total, description=text, count=count, visible=True)

    def write(self, text: str) -> None:
        """Print a line above the bar."""
        # Brackets in a path are no markup, numbers get no colour, and a long line is not broken.
        self.rich.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.rich.stop()


class ProgressMeter:
    """Shows how much of a count is done; with `log`, always as lines, at most one every `every_s` seconds."""

    def __init__(
        self,
        unit: str,
        total: int | None = None,
        *,
        log: Callable[[str], None] | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.unit = unit
        self.total = total
        self.every_s = every_s
        self.clock = clock
        self.log = log or print
        self.bar: LiveBar | None = None
        # A caller that logs lines elsewhere (a stage, into its campaign's log) shows its own bar, if any.
        if log is None and sys.stdout.isatty():
            self.bar = LiveBar()
        self.began = clock()
        self.last_line = self.began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, done: int, note: str = "") -> None:
        """Show that so many are done; `note` is what else there is to say of them."""
        now = self.clock()
        # A first count may come before the clock has moved.
        rate = done / max(now - self.began, 1e-9)
        if self.bar is not None:
            # The bar itself shows the count and the time that is left.
            parts = [self.unit, note, f"{amount(rate)}/s"]
            self.bar.update(done, self.total, "  ".join(filter(None, parts)))
            return
        if now - self.last_line < self.every_s:
            return

        self.last_line = now
        count = amount(done)
        eta = ""
        # When the rest will be done can be told only where the total is known.
        if self.total:
            count += f" of {amount(self.total)}"
            if rate:
                remaining = max(self.total - done, 0)
                eta = f"eta {duration(remaining / rate)}"
        parts = [f"{count} {self.unit}", note, f"{amount(rate)}/s", eta]
        self.log("  ".join(filter(None, parts)))

    def packed(self, shards: int, samples: int) -> None:
        """Show what has been packed: the `report` of data.shards.packing and data.shards.doctor.repair."""
        self(samples, f"{shards} shards")

    def of(self, done: int, total: int) -> None:
        """Show how many are done of a total that every call names: the `report` of indexing and checking."""
        self.total = total
        self(done)
