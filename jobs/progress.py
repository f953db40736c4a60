"""How far a long count has come: a line every few seconds, with speed and what is left."""

import time
from collections.abc import Callable

from pipeline.telemetry import amount, duration


class Progress:
    """Call it with what is done so far; it speaks at most every `every_s` seconds, and of the end only when known."""

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        say: Callable[[str], None] = print,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.say, self.every_s, self.clock = what, total, say, every_s, clock
        self.began = self.spoke = clock()

    def __call__(self, done: int, note: str = "") -> None:
        now = self.clock()
        if now - self.spoke < self.every_s:
            return
        self.spoke, speed = now, done / (now - self.began)
        parts = [f"{amount(done)}{f' of {amount(self.total)}' if self.total else ''} {self.what}", note]
        parts.append(f"{amount(speed)}/s")
        if self.total and speed:
            parts.append(f"eta {duration(max(self.total - done, 0) / speed)}")
        self.say("  ".join(part for part in parts if part))

    def of(self, done: int, total: int) -> None:
        """The same, told the total with every call."""
        self.total = total
        self(done)
