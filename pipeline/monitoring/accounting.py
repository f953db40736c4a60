"""Where a stage's wall time went, from its metrics alone: the effective training time ratio and its breakdown.

1. Every attempt leaves one record of its start and one for every report ("train"), each with the time of its writing.
2. The reports' seconds are booked as waiting for data, checkpoints, evaluation and, what remains, compute.
3. Steps that a later attempt did again count as lost; the time between two attempts counts as recovery.

    account(read_metrics(folder, None)).line()  →  "effective 91.2% of 4h10m (start 3.1%, data 2.4%, …)"
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pipeline.monitoring.telemetry import Record, altered, duration


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
        """Return the seconds of all fields together."""
        return sum(asdict(self).values())

    @property
    def ratio(self) -> float:
        """Return the effective training time ratio: the share of compute; 0 where no time has passed."""
        return self.compute / self.wall if self.wall else 0.0

    def line(self) -> str:
        """Return "effective 91.2% of 4h10m" and the shares of the rest, the largest first."""
        seconds = asdict(self)
        shares = []
        for name in reversed(sorted(seconds, key=seconds.__getitem__)):  # of two equal ones the later field comes first
            if name != "compute" and seconds[name] > 0:
                shares.append(f"{name} {seconds[name] / self.wall:.1%}")
        line = f"effective {self.ratio:.1%} of {duration(self.wall)}"
        if not shares:
            return line
        return f"{line} ({', '.join(shares)})"


def account(records: Sequence[Record]) -> Account:
    """Book the time of all attempts. `records` are of all kinds, in the order written.

    A record's `time` is its end; the driver's claim of an attempt is `claimed` in the attempt's "start" record.
    Raises DataError where a record lacks a value, or has one of another type.
    """
    starts: list[Record] = []
    by_attempt: dict[int, list[Record]] = {}
    for record in records:
        by_attempt.setdefault(record["attempt"], []).append(record)
        if record["kind"] == "start":
            starts.append(record)
    # An attempt keeps the steps up to where a later one began; the one that fell back furthest counts.
    kept_steps: dict[int, float] = {}
    furthest = math.inf
    for number in reversed(range(len(starts))):
        kept_steps[number] = furthest
        furthest = min(furthest, starts[number]["step"])

    total = Account()
    previous_end = 0.0
    for number, start in enumerate(starts):
        attempt = by_attempt[start["attempt"]]
        reports = [record for record in attempt if record["kind"] == "train"]
        # An attempt that died leaves no record of its end: its last record of any kind stands for it.
        end = attempt[-1]["time"]
        # A report's time is that of its end. An attempt that left no report is start or recovery as a whole.
        first_step_at = end
        if reports:
            first_step_at = reports[0]["time"] - reports[0]["seconds"]

        # Until its first step an attempt starts or, after another one, recovers. Clocks of nodes may have jumped back.
        if number == 0:
            claimed = start.get("claimed") or start["time"]
            total.start += max(0.0, first_step_at - claimed)
        else:
            total.recovery += max(0.0, first_step_at - previous_end)
        seconds = 0.0
        for report in reports:
            try:
                # Steps after those that the attempt keeps are lost. A later attempt may begin amid a report's steps:
                # their single times are not known, so all count alike.
                steps = len(report["losses"])
                lost_share = min(max(report["step"] - kept_steps[number], 0), steps) / steps
                kept_share = 1 - lost_share
                waited_s = report["wait"] * report["seconds"]
                total.lost += lost_share * report["seconds"]
                total.data += kept_share * waited_s
                total.checkpoint += kept_share * report["stalled_s"]
                total.other += kept_share * report["evaluated_s"]
                working_s = report["seconds"] - waited_s - report["stalled_s"] - report["evaluated_s"]
                total.compute += kept_share * working_s
                seconds += report["seconds"]
            except (TypeError, ArithmeticError):
                raise altered(report, "a value of another type") from None
        total.other += max(0.0, end - first_step_at - seconds)
        previous_end = end
    return total
