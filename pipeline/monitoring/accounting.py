"""Where a stage's wall time went, from its metrics alone: the effective training time ratio and its breakdown.

1. Every attempt leaves one record of its start and one for every report ("train"), each with the time of its writing.
2. The reports' seconds are booked as waiting for data, checkpoints, evaluation and, what remains, compute.
3. Steps that a later attempt did again count as lost; the time between two attempts counts as recovery.

    account_rows(MetricsIndex(folder).rows).line()  →  "effective 91.2% of 4h10m (start 3.1%, data 2.4%, …)"
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from pipeline.monitoring.metrics_index import table
from pipeline.monitoring.telemetry import Record, duration


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
    """
    return account_rows(table(records))


def account_rows(rows: np.ndarray) -> Account:
    """Book the time of all attempts, as `account` does; `rows` are those of a MetricsIndex."""
    total = Account()
    starts = rows[rows["kind"] == b"start"]
    # The records of an attempt side by side, in the order written.
    rows = rows[np.argsort(rows["attempt"], kind="stable")]
    begins = np.searchsorted(rows["attempt"], starts["attempt"], "left")
    ends = np.searchsorted(rows["attempt"], starts["attempt"], "right")
    previous_end = 0.0
    for number, start in enumerate(starts):
        # An attempt that died leaves no record of its end: its last record of any kind stands for it.
        attempt = rows[begins[number] : ends[number]]
        windows = attempt[(attempt["kind"] == b"train") & ~np.isnan(attempt["seconds"])]
        end = float(attempt["time"][-1])
        # A report's time is that of its end. An attempt that left no report is start or recovery as a whole.
        first_step_at = end
        if len(windows):
            first_step_at = float(windows["time"][0] - windows["seconds"][0])

        # Until its first step an attempt starts or, after another one, recovers. Clocks of nodes may have jumped back.
        if number == 0:
            total.start += max(0.0, first_step_at - float(start["claimed"]))
        else:
            total.recovery += max(0.0, first_step_at - previous_end)

        # An attempt keeps the steps up to where a later one began; the one that fell back furthest counts.
        kept = windows["step"]
        if number + 1 < len(starts):
            kept = np.minimum(kept, starts["step"][number + 1 :].min())
        add(total, windows, kept)
        total.other += max(0.0, end - first_step_at - float(windows["seconds"].sum()))
        previous_end = end
    return total


def add(total: Account, windows: np.ndarray, kept: np.ndarray) -> None:
    """Book the seconds of reports; of each, its steps after step `kept` are lost, each with its share."""
    steps = windows["count"]
    lost_steps = np.clip(windows["step"] - kept, 0, steps)
    # A later attempt may begin amid a report's steps. Their single times are not known, so all count alike.
    lost_share = lost_steps / steps
    kept_share = 1 - lost_share
    seconds = windows["seconds"]
    waited_s = windows["wait"] * seconds
    stalled_s = windows["stalled_s"]
    evaluated_s = windows["evaluated_s"]
    total.lost += float((lost_share * seconds).sum())
    total.data += float((kept_share * waited_s).sum())
    total.checkpoint += float((kept_share * stalled_s).sum())
    total.compute += float((kept_share * (seconds - waited_s - stalled_s - evaluated_s)).sum())
    total.other += float((kept_share * evaluated_s).sum())
