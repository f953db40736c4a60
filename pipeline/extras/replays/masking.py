"""Samples that take no part in training and change nothing else: their rows stay, without weight.

A replay masks samples from its first step on; a run with `health.on_spike: bisect` those that it finds, from the next
commit on, whose manifest holds them. Each range therefore begins with the step, counted from 0, from which it holds.
What the loop does with a masked sample is in pipeline/batches.py: its row stays, its pixels are grey, and its loss has
the weight 0.

In:  Mask([(0, 3, 0, 100), (40, 5, 17, 18)]), which is all of shard 3, and from step 40 on sample 17 of shard 5; a step
     and the ids of its batch
Out: which of its rows are masked
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

Range = Sequence[int]  # the step from which it holds, shard, first sample, the one after the last


class Mask:
    """A set of samples that grows with the steps, as ranges of them; false where it is empty."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.ranges: list[tuple[int, ...]] = []
        self.add(ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def add(self, ranges: Iterable[Range]) -> None:
        """Add ranges; those that are there already change nothing."""
        self.ranges = sorted({*self.ranges, *map(tuple, ranges)})
        self.in_force = -1  # how many of them the table below holds

    def of(self, step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """Return which of these samples are masked in a step, as booleans."""
        in_force = bisect_right(self.ranges, step, key=lambda each: each[0])
        if in_force == 0:
            return np.zeros(len(shard), bool)
        if in_force != self.in_force:
            self.in_force = in_force
            table = np.array(sorted(each[1:] for each in self.ranges[:in_force]), np.int64)
            self.starts = place_of(table[:, 0], table[:, 1])
            # Ranges may lie in each other: a sample is masked where any range that begins before it ends behind it.
            self.stops = np.maximum.accumulate(place_of(table[:, 0], table[:, 2]))
        places = place_of(shard, sample)
        before = np.searchsorted(self.starts, places, side="right") - 1
        return (before >= 0) & (places < self.stops[before])


def place_of(shard: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """Return a number for each sample, in the order of shards and of samples in them."""
    return (np.asarray(shard, np.int64) << 40) + np.asarray(sample, np.int64)


def ranges_of(shard: np.ndarray, sample: np.ndarray) -> list[list[int]]:
    """Return single samples as ranges that hold from step 0 on, neighbours in one."""
    places = np.unique(place_of(shard, sample))
    is_first = np.ones(len(places), bool)
    is_first[1:] = np.diff(places) != 1
    ranges = []
    for stretch in np.split(places, np.flatnonzero(is_first)[1:]):
        if len(stretch):
            first = int(stretch[0])
            ranges.append([0, first >> 40, first & (1 << 40) - 1, (int(stretch[-1]) & (1 << 40) - 1) + 1])
    return ranges
