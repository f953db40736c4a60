"""Where a stage's wall time went, from its metrics alone: the effective training time ratio and its breakdown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.telemetry import duration


@dataclass
class Account:
    """Seconds from the first claim of the stage to its last record; `ratio` is compute over all of them.

    lost: steps that a later attempt did again. recovery: from an attempt's last record to the first step of the next.
    other: evaluation, and what ends a stage.
    """

    start: float = 0.0
    data: float = 0.0
    compute: float = 0.0
    checkpoint: float = 0.0
    lost: float = 0.0
    recovery: float = 0.0
    other: float = 0.0

    @property
    def wall(self) -> float:
        return sum(asdict(self).values())

    @property
    def ratio(self) -> float:
        return self.compute / self.wall if self.wall else 0.0

    def line(self) -> str:
        """ "effective 91.2% of 4h10m" and the rest's shares, the largest first."""
        rest = {name: value for name, value in asdict(self).items() if name != "compute" and value > 0}
        shares = ", ".join(f"{name} {rest[name] / self.wall:.1%}" for name in sorted(rest, key=rest.__getitem__)[::-1])
        return f"effective {self.ratio:.1%} of {duration(self.wall)}" + (f" ({shares})" if shares else "")


def account(records: Sequence[Mapping[str, Any]]) -> Account:
    """`records` are of all kinds, in the order written; a record's `time` is its end, a claim's is in `start`."""
    total = Account()
    attempts = [record for record in records if record["kind"] == "start"]
    for number, start in enumerate(attempts):
        later = [attempt["step"] for attempt in attempts[number + 1 :]]  # the furthest back counts
        mine = [r for r in records if r["attempt"] == start["attempt"]]
        windows = [r for r in mine if r["kind"] == "train" and "seconds" in r]
        began = windows[0]["time"] - windows[0]["seconds"] if windows else mine[-1]["time"]
        if number == 0:
            total.start += max(0.0, began - (start.get("claimed") or start["time"]))
        else:
            before = [r for r in records if r["attempt"] == attempts[number - 1]["attempt"]]
            total.recovery += max(0.0, began - before[-1]["time"])  # a clock may have jumped back
        for window in windows:
            add(total, window, min(later, default=window["step"]))
        total.other += max(0.0, mine[-1]["time"] - began - sum(window["seconds"] for window in windows))
    return total


def add(total: Account, window: Mapping[str, Any], kept: int) -> None:
    """Book one report's seconds; the steps after `kept` are lost, each with its share."""
    steps = len(window["losses"])
    lost = min(max(window["step"] - kept, 0), steps) / steps
    waited, saved, judged = window["wait"] * window["seconds"], window["stalled_s"], window["evaluated_s"]
    total.lost += lost * window["seconds"]
    total.data += (1 - lost) * waited
    total.checkpoint += (1 - lost) * saved
    total.compute += (1 - lost) * (window["seconds"] - waited - saved - judged)
    total.other += (1 - lost) * judged
