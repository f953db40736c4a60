"""Samples that take no part in training and change nothing else: their rows stay, and weigh nothing.

A replay masks samples from its first step on; a run with `health.on_spike: bisect` those that it finds, from the next
commit on, whose manifest says so. Every range therefore begins with the step, counted from 0, from which it holds.

1. The order is what it was. A masked sample is read and decoded in its slot, so that every other sample keeps its row,
   its augmentation and its random draws.
2. Its pixels become grey and its labels go (`Mask.apply`): nothing of it reaches a neighbour through mixup, nor a
   gradient as NaN. Its loss has the weight 0.
3. A step's loss and gradient are means over the planned samples that are not masked (`Mask.left`): of the whole batch,
   so that they are the same on any number of workers. Without any the gradient is 0, and the step is one all the same.
4. The ledger of a step counts a masked sample n as −1 − n: equal ledgers still mean equal data.

A row is masked by the sample that it really holds. Where a bad sample's replacement is masked, its row weighs nothing
and is counted in the mean; a masked sample that is bad gives its row to its replacement, which weighs something.

In:  Mask([(0, 3, 0, 100), (40, 5, 17, 18)]), which is all of shard 3, and from step 40 on sample 17 of shard 5; a step
     and the ids of its batch
Out: which of its rows are masked
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from data.loader import Batch
from data.order import Ids

GREY = 128  # of 255: a pixel that is nearly 0 once it is normalised

# b samples of a micro-batch, B of the global batch

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

    def left(self, step: int, planned: Ids) -> int:
        """Return how many samples of a global batch the mean of a step is over; 1 where all are masked."""
        return max(len(planned.shard) - int(self.of(step, planned.shard, planned.sample).sum()), 1)

    def in_ledger(self, step: int, planned: Ids) -> Ids:
        """Return the ids of a global batch as the ledger counts them."""
        if not self.ranges:
            return planned
        is_masked = self.of(step, planned.shard, planned.sample)
        return planned._replace(sample=np.where(is_masked, ~planned.sample, planned.sample))

    def apply(self, batch: Batch) -> Batch:
        """Return a micro-batch, on its device, without what its masked rows hold; the same where none is masked."""
        _, shard, sample = batch.ids.numpy().T
        is_masked = self.of(batch.step, shard, sample)
        if not is_masked.any():
            return batch
        rows = torch.from_numpy(is_masked).to(batch.images.device)
        images = batch.images.masked_fill(rows[:, None, None, None], GREY)
        labels = batch.labels.masked_fill(rows[:, None], -1)
        return replace(batch, images=images, labels=labels, masked=rows)


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
