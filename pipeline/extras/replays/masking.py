"""Mask samples; masked samples keep their rows in the batch, but have no weight in the loss.

A replay masks samples from its first step. A run with `health.on_spike: bisect` masks the samples that its searches
identify, starting at the next commit, and stores them in the manifest. Each range therefore includes the first step,
counted from 0, in which it applies. pipeline/batches.py applies the mask: the row of a masked sample stays in the
batch, with grey pixels and loss weight 0.

In:  Mask([(0, 3, 0, 100), (40, 5, 17, 18)]): samples 0 … 99 of shard 3, and from step 40 sample 17 of shard 5; a step
     and the ids of its batch
Out: a boolean array that marks the masked rows
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

Range = Sequence[int]  # first step in which it applies, shard, first sample, last sample + 1


class Mask:
    """A set of sample ranges, each masked from a given step on; an empty mask is falsy."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.ranges: list[tuple[int, ...]] = []
        self.add(ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def add(self, ranges: Iterable[Range]) -> None:
        """Add ranges, ignoring those already present."""
        self.ranges = sorted({*self.ranges, *map(tuple, ranges)})
        self.in_force = -1  # number of ranges in the table that `of` builds; −1: no table yet

    def of(self, step: int, shard: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """Return a boolean array that marks the samples masked in a step."""
        in_force = bisect_right(self.ranges, step, key=lambda each: each[0])
        if in_force == 0:
            return np.zeros(len(shard), bool)
        if in_force != self.in_force:
            self.in_force = in_force
            table = np.array(sorted(each[1:] for each in self.ranges[:in_force]), np.int64)
            self.starts = place_of(table[:, 0], table[:, 1])
            # Ranges may overlap: a sample is masked if any range that starts at or before it ends after it.
            self.stops = np.maximum.accumulate(place_of(table[:, 0], table[:, 2]))
        places = place_of(shard, sample)
        before = np.searchsorted(self.starts, places, side="right") - 1
        return (before >= 0) & (places < self.stops[before])


def place_of(shard: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """Return a sort key for each sample: by shard, then by sample in the shard."""
    return (np.asarray(shard, np.int64) << 40) + np.asarray(sample, np.int64)


def ranges_of(shard: np.ndarray, sample: np.ndarray) -> list[list[int]]:
    """Convert samples to ranges masked from step 0 on, merging adjacent samples."""
    places = np.unique(place_of(shard, sample))
    is_first = np.ones(len(places), bool)
    is_first[1:] = np.diff(places) != 1
    ranges = []
    for stretch in np.split(places, np.flatnonzero(is_first)[1:]):
        if len(stretch):
            first = int(stretch[0])
            ranges.append([0, first >> 40, first & (1 << 40) - 1, (int(stretch[-1]) & (1 << 40) - 1) + 1])
    return ranges
