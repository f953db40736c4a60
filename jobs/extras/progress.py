"""Show the progress of a long-running command: a bar on a terminal, or else a line every few seconds.

progress = ProgressMeter("samples", total=60_000)
progress(1_200, "3 shards")        1.2k of 60.0k samples  3 shards  240/s  eta 4m05s
"""

import time
from collections.abc import Callable

from jobs.terminal import activity


class ProgressMeter:
    """Shows a long task's progress with `show` or, if that returns False, with a line every `every_s` seconds."""

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
        """Show that `done` units are complete, followed by a note."""
        from pipeline.values import amount, duration  # imports models, which would slow down --help

        now = self.clock()
        # The first call may come before the clock has advanced.
        rate = done / max(now - self.began, 1e-9)
        # The bar itself shows the count and the remaining time.
        parts = [self.unit, note, f"{amount(rate)}/s"]
        if self.show(done, self.total, "  ".join(filter(None, parts))):
            return
        if now - self.last_line < self.every_s:
            return

        self.last_line = now
        count = amount(done)
        eta = ""
        # The remaining time is known only if the total is known.
        if self.total:
            count += f" of {amount(self.total)}"
            if rate:
                remaining = max(self.total - done, 0)
                eta = f"eta {duration(remaining / rate)}"
        parts = [f"{count} {self.unit}", note, f"{amount(rate)}/s", eta]
        self.log("  ".join(filter(None, parts)))

    def packed(self, shards: int, samples: int) -> None:
        """Show the number of packed samples; the `report` callback for data.extras.shards.packing and for repairs."""
        self(samples, f"{shards} shards")

    def of(self, done: int, total: int) -> None:
        """Show how many items of a total are done; the `report` callback for indexing and checking."""
        self.total = total
        self(done)
