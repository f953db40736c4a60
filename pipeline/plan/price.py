"""What a stage takes in days, worker-hours and money, with failures, and how often to save.

In:  700,000 steps of 0.41 s on 64 workers, 2.50 an hour and worker, a node that fails every 1,000 hours
Out: 3.3 days of steps, 79.7 h with failures; 5,101 worker-hours; 12,752; save every 2,100 steps

Failures come at random, at a rate that does not change, as Young (1974, "A first order approximation to the optimum
checkpoint interval", CACM 17) and Daly (2006, "A higher order estimate of the optimum checkpoint interval for restart
dumps", FGCS 22) take them. A failure costs a restart, in the mean half of the steps between two saves, and those that
were taken while the last save was not on the disk yet.
"""

import math
from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True)
class Failures:
    """How often nodes fail, and what a failure costs before the first step is taken again."""

    mtbf_hours: float  # of one node
    restart_s: float = 120.0  # until it is seen, and the next attempt takes its first step
    nodes: int = 1

    @property
    def interval_s(self) -> float:
        """Return the seconds between two failures of any of the nodes."""
        return self.mtbf_hours * HOUR_S / self.nodes


@dataclass(frozen=True)
class Bill:
    """What a stage takes on one number of workers."""

    world: int
    steps_s: float  # of all steps, if nothing fails
    finish_s: float  # with what failures cost; infinite where it would never finish
    failures: float  # that are to be expected
    worker_hours: float
    cost: float | None  # None: no price is known


def bill(
    world: int,
    steps: int,
    step_s: float,
    *,
    save_every: int,
    failures: Failures | None,
    price: float | None,
    durable_s: float = 0.0,
) -> Bill:
    """Return what so many steps take and cost; `price` is of a worker and an hour, `step_s` holds the saves.

    `durable_s` is the time from a save's beginning until it is on the disk.
    """
    steps_s = steps * step_s
    finish_s = steps_s
    expected = 0.0
    if failures is not None:
        # A save is on the disk only `durable_s` after its step: the one to go back to is older by that in the mean.
        # A stage shorter than `save_every` goes back to its beginning.
        lost_s = failures.restart_s + min(save_every, steps) * step_s / 2 + durable_s
        # While it makes up for failures it fails again: the wall time is steps_s + wall / interval · lost_s.
        share = lost_s / failures.interval_s
        finish_s = steps_s / (1 - share) if share < 1 else math.inf
        expected = finish_s / failures.interval_s
    hours = finish_s / HOUR_S
    cost = None
    if price is not None:
        cost = world * hours * price
    return Bill(world, steps_s, finish_s, expected, world * hours, cost)


def best_save_every(step_s: float, snapshot_s: float, durable_s: float, failures: Failures) -> int:
    """Return the steps between two saves that cost least: Young's √(2 · cost of a save · time between failures).

    `step_s` is of a step without saves, `snapshot_s` what a save holds the loop up, `durable_s` until it is on the
    disk: a save begins only when the one before has ended, so that more often is not possible.
    """
    interval_s = math.sqrt(2 * snapshot_s * failures.interval_s)
    return max(1, round(max(interval_s, durable_s) / step_s))
