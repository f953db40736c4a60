"""Which sample sits in which slot of which global batch: a pure function of a few integers.

How `Order.batch(step)` finds the samples of a step:

1. The slots of the step are numbers on one long line, epoch after epoch; a batch is cut where an epoch ends.
2. The shards of an epoch are permuted, and their samples laid end to end as positions 0 … N−1.
3. The positions are cut into lanes, and a batch takes the next samples of every lane, lane after lane.
4. Inside a lane, the samples of a block change places.
5. The position is looked up: it lies in this shard, and is that sample of it.

Any step is computed alone, without replay and without anything of size N (reasons: `docs/design/order.md`).

Shards of 3, 4 and 2 samples, seed 0, batches of 4, 2 lanes (positions 0 … 4 and 5 … 8), blocks of 3:

    epoch 0 permutes the shards to 2, 1, 0, which start at the positions 0, 2, 6
    step 0 takes the positions 0 1 | 5 6, which hold (shard, sample) (2, 0) (2, 1) | (1, 3) (0, 0)
    step 1 takes the positions 2 3 | 7 8, which hold (shard, sample) (1, 0) (1, 1) | (0, 1) (0, 2)
    step 2 takes the position 4, which holds (1, 2): all 9 are used, so epoch 1 gives the other three slots

A `Mixture` is trained on several sets at once, by weight. A batch is cut into shares, one a set, whose slots are spread
evenly over the batch; each set fills its slots in an order of its own, epoch after epoch of that set.

Sets of 7 and 3 shards with weights 0.75 and 0.25, batches of 4:

    the first set has 3 slots of every batch, spread to 1/6, 3/6 and 5/6 of it, the second one slot, at 1/2
    so the slots are, in order, of the sets 0 0 1 0
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, NamedTuple

import numpy as np

from data.draws import key_of, permute

# S shards, N samples, B batch size, L lanes

DEFAULT_LANES = 64  # docs/design/order.md measures it
DEFAULT_BLOCK = 16_384
MANY_SHARDS = 50_000  # whose permutation leaves megabytes behind that were needed for a moment

Tail = Literal["carry", "drop"]


class Ids(NamedTuple):
    """The samples of a batch: three int64 arrays of one length."""

    epoch: np.ndarray
    shard: np.ndarray
    sample: np.ndarray


class SampleId(NamedTuple):
    """One sample: the pass over its set, its shard, and its number in there."""

    epoch: int
    shard: int
    sample: int


class Order:
    """The order of samples of one set of shards; `Order(...).batch(step)` is all that training needs.

    `tail` says what becomes of the samples that do not fill an epoch's last batch: "carry" opens the next
    epoch's first batch with them, so that every sample is used exactly once an epoch; "drop" leaves them out.
    Raises ValueError where the numbers do not fit one another.
    """

    def __init__(
        self,
        shard_samples: Sequence[int] | np.ndarray,
        *,
        seed: int,
        batch_size: int,
        lanes: int | None = None,  # default: DEFAULT_LANES, or the batch size if that is smaller
        shuffle_block: int = DEFAULT_BLOCK,  # samples
        tail: Tail = "carry",
    ):
        self.shard_samples = np.asarray(shard_samples, np.int64)
        self.samples = int(self.shard_samples.sum())
        self.seed = seed
        self.batch_size = batch_size
        self.shuffle_block = shuffle_block
        self.tail = tail
        self.lanes = min(DEFAULT_LANES, batch_size) if lanes is None else lanes
        self._starts: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the last epochs' permuted shards
        if batch_size < 1 or shuffle_block < 1 or self.lanes < 1:
            raise ValueError(
                f"batch_size {batch_size}, lanes {self.lanes}, shuffle_block {shuffle_block}: each must be 1 or more"
            )
        if self.samples == 0:
            raise ValueError("the shards hold no samples; pack some first")
        if tail == "drop" and self.samples < batch_size:
            raise ValueError(f'{self.samples} samples do not fill one batch of {batch_size}; use tail="carry"')

        self.samples_per_epoch = self.samples
        if tail == "drop":
            # With whole batches in every epoch none is left to be carried: `_places` needs no other rule.
            self.samples_per_epoch = self.samples // batch_size * batch_size

    def batch(self, step: int) -> Ids:
        """Return the sample of every slot of the global batch `step`: arrays of `batch_size`."""
        return self._samples_at(*self._places(step))

    def without_sizes(self) -> Order:
        """Return a copy that lacks the shards' sizes, for another process that has them already (`with_sizes`)."""
        order = copy(self)
        order.with_sizes(np.empty(0, np.int64))
        return order

    def with_sizes(self, shard_samples: np.ndarray) -> None:
        """Take the shards' sizes, the same numbers as before, from this array."""
        self.shard_samples = shard_samples
        self._starts = {}

    def replacement(self, step: int, slot: int, attempt: int) -> SampleId:
        """Return the sample to use where the one in `slot` is bad: the attempt-th after it, lane after lane."""
        # The replacement keeps its own place in the order as well: without it, all later steps would change.
        epochs, positions = self._places(step)
        epoch = epochs[slot : slot + 1]
        position = (positions[slot : slot + 1] + attempt) % self.samples
        ids = self._samples_at(epoch, position)
        return SampleId(int(ids.epoch[0]), int(ids.shard[0]), int(ids.sample[0]))

    def _places(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (epoch, position before the shuffle) of every slot."""
        at = step * self.batch_size  # counted over all epochs
        end = at + self.batch_size
        lanes = np.arange(self.lanes)
        epochs = []
        positions = []
        # Usually this runs once; it runs again for each epoch that ends inside the batch.
        while at < end:
            epoch, first = divmod(at, self.samples_per_epoch)
            stop = min(first + end - at, self.samples_per_epoch)
            epochs.append(np.full(stop - first, epoch))

            # The epoch gives its samples number `first` to `stop` − 1, lane after lane. When it has given n samples,
            # each lane has given n / L of them, equal to within one.
            given_before = first // self.lanes + (lanes < first % self.lanes)  # (L,)
            given_after = stop // self.lanes + (lanes < stop % self.lanes)
            counts = given_after - given_before
            first_slots = np.cumsum(counts) - counts  # (L,) where each lane's part of these slots begins
            # A lane's slots and its positions both rise by one: they differ by a shift, the same in all of its slots.
            shifts = self._lane_starts(lanes) + given_before - first_slots  # (L,)
            positions.append(np.repeat(shifts, counts) + np.arange(stop - first))
            at += stop - first
        return np.concatenate(epochs), np.concatenate(positions)

    def _lane_starts(self, lane: np.ndarray) -> np.ndarray:
        """Return the first position of each lane; the first N mod L lanes hold one sample more than the others."""
        return lane * (self.samples // self.lanes) + np.minimum(lane, self.samples % self.lanes)

    def _samples_at(self, epoch: np.ndarray, position: np.ndarray) -> Ids:
        """Return the samples that the positions of these epochs hold, once those of each block have changed places."""
        length = self.samples // self.lanes
        longer_lanes = self.samples % self.lanes  # the first ones, of length + 1
        end_of_longer = longer_lanes * (length + 1)
        # With more lanes than samples the length is 0: no position is past the longer lanes, and 1 only avoids 0 / 0.
        lane = np.where(
            position < end_of_longer,
            position // (length + 1),
            longer_lanes + (position - end_of_longer) // max(length, 1),
        )
        lane_start = self._lane_starts(lane)
        lane_length = length + (lane < longer_lanes)

        # Inside its lane's block, each position is sent to another. A lane's last block is shorter than the others
        # where the lengths do not divide.
        block = (position - lane_start) // self.shuffle_block
        block_start = lane_start + block * self.shuffle_block
        block_size = np.minimum(self.shuffle_block, lane_length - block * self.shuffle_block)
        key = key_of(self.seed, epoch, lane, block)
        position = block_start + permute(position - block_start, block_size, key)

        # The shard in which a position lies is looked up, epoch by epoch, and the number of the sample in there.
        shard = np.empty_like(position)
        sample = np.empty_like(position)
        for number in np.unique(epoch):
            of_this_epoch = epoch == number
            shards, starts = self._epoch_shards(int(number))
            row = np.searchsorted(starts, position[of_this_epoch], side="right") - 1
            shard[of_this_epoch] = shards[row]
            sample[of_this_epoch] = position[of_this_epoch] - starts[row]
        return Ids(epoch, shard, sample)

    def _epoch_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the epoch's order of shards and the position at which each starts; empty shards are left out."""
        known = self._starts.get(epoch)
        if known is not None:
            return known
        # int32, and few arrays on the way: with 300,000 shards this takes 3.6 MB of every process for each epoch.
        shards = np.flatnonzero(self.shard_samples).astype(np.int32)
        # Sorted by our own hash, because the streams of NumPy's permutations may change between versions.
        shards = shards[np.argsort(key_of(self.seed, epoch, shards), kind="stable")]
        starts = np.zeros(len(shards), np.int64)
        np.cumsum(self.shard_samples[shards[:-1]], out=starts[1:])
        if len(shards) >= MANY_SHARDS:
            # Freed memory goes back to the system; glibc keeps some for the process, of which a node has 64 and more.
            with suppress(AttributeError, OSError):  # of another C library
                ctypes.CDLL(None).malloc_trim(0)
        # The epoch before is kept: a batch may lie across both. The dict is a new one, because the thread that fetches
        # shards ahead reads the old one at the same time.
        newest = list(self._starts.items())[-1:]
        self._starts = {**dict(newest), epoch: (shards, starts)}
        return shards, starts


# ----------------------------------------------------------------------------- several sets by weight


class Mixture:
    """Several sets by weight: every global batch takes as many samples of each, in the order of each.

    The sets are groups of consecutive shards of one index, `groups[g]` shards each. `shares` tells how much of a
    batch each has: the weights', by largest remainder; its slots are spread evenly over the batch, so that every
    worker has its part of every set. `lanes`, `shuffle_block` and `tail` are `Order`'s, the same for each.
    Raises ValueError where the numbers do not fit one another.
    """

    def __init__(
        self,
        shard_samples: Sequence[int] | np.ndarray,
        *,
        groups: Sequence[int],
        weights: Sequence[float],
        seed: int,
        batch_size: int,
        lanes: int | None = None,
        shuffle_block: int = DEFAULT_BLOCK,
        tail: Tail = "carry",
    ):
        if sum(groups) != len(shard_samples) or len(groups) != len(weights) or min(weights) <= 0:
            raise ValueError(f"groups {groups} must cover {len(shard_samples)} shards, with a weight > 0 each")
        self.batch_size = batch_size
        self.shares = shares(batch_size, weights)
        self.starts = np.cumsum([0, *groups])  # the first shard of each set, and the end of the last

        # Each set spreads its samples evenly over the batch; all of them, sorted, give the slots. `order_of_slots[s]`
        # is the place of slot s when the sets' parts of the batch are laid end to end.
        spread = [(np.arange(share) + 0.5) / share for share in self.shares]  # in 0 … 1
        self.order_of_slots = np.argsort(np.concatenate(spread), kind="stable")  # (B,)

        sizes = np.asarray(shard_samples, np.int64)
        self.orders = []
        for group, share in enumerate(self.shares):
            first = self.starts[group]
            stop = self.starts[group + 1]
            # Each set has a seed of its own, or sets of equal sizes would be shuffled alike. Its 62 bits fit the
            # int64 that `key_of` takes.
            set_seed = int(key_of(seed, first)[0] >> np.uint64(2))
            order = Order(
                sizes[first:stop],
                seed=set_seed,
                batch_size=share,
                lanes=lanes,
                shuffle_block=shuffle_block,
                tail=tail,
            )
            self.orders.append(order)

    @property
    def shard_samples(self) -> np.ndarray:
        """The samples of each shard of all sets."""
        return np.concatenate([order.shard_samples for order in self.orders])

    def batch(self, step: int) -> Ids:
        """Return what `Order.batch` does; epochs are each set's own."""
        epochs = []
        shards = []
        samples = []
        for group, order in enumerate(self.orders):
            ids = order.batch(step)
            epochs.append(ids.epoch)
            shards.append(ids.shard + self.starts[group])
            samples.append(ids.sample)
        slots = self.order_of_slots
        return Ids(np.concatenate(epochs)[slots], np.concatenate(shards)[slots], np.concatenate(samples)[slots])

    def without_sizes(self) -> Mixture:
        """Do as `Order.without_sizes`."""
        mixture = copy(self)
        mixture.orders = [order.without_sizes() for order in self.orders]
        return mixture

    def with_sizes(self, shard_samples: np.ndarray) -> None:
        """Do as `Order.with_sizes`; the sizes are of all sets."""
        for group, order in enumerate(self.orders):
            order.with_sizes(shard_samples[self.starts[group] : self.starts[group + 1]])

    def replacement(self, step: int, slot: int, attempt: int) -> SampleId:
        """Return what `Order.replacement` does, from the same set."""
        # From the slot back to the set that fills it, and to the slot of that set's own batch.
        place = int(self.order_of_slots[slot])
        ends = np.cumsum(self.shares)
        group = int(np.searchsorted(ends, place, side="right"))
        first_place = int(ends[group]) - self.shares[group]
        sample_id = self.orders[group].replacement(step, place - first_place, attempt)
        return sample_id._replace(shard=sample_id.shard + int(self.starts[group]))


def shares(batch_size: int, weights: Sequence[float]) -> list[int]:
    """Cut a batch by weight, largest remainders first; raises ValueError where a set would get none."""
    exact = [batch_size * weight / sum(weights) for weight in weights]
    counts = list(map(int, exact))
    remainders = np.subtract(exact, counts)
    largest_first = np.argsort(-remainders, kind="stable")  # of equal ones, the set that is named first
    # What rounding down left goes out one by one, so that the shares add up to the batch.
    for group in largest_first[: batch_size - sum(counts)]:
        counts[group] += 1
    if min(counts) == 0:
        raise ValueError(f"weights {list(weights)} leave a set without a sample in a batch of {batch_size}")
    return counts


# ----------------------------------------------------------------------------- the proof of what was consumed


@dataclass(frozen=True)
class Ledger:
    """The rolling digest of every sample id consumed so far; equal ledgers mean equal data."""

    hex: str

    @classmethod
    def start(cls, index_digest: str, seed: int) -> Ledger:
        """Return the ledger before the first step."""
        return cls(sha256(f"{index_digest} {seed}".encode()).hexdigest())

    def update(self, step: int, epoch: np.ndarray, shard: np.ndarray, sample: np.ndarray) -> Ledger:
        """Return the ledger after the global batch `step`."""
        # Little-endian on every machine, so that all of them give the same ledger.
        step_bytes = int(step).to_bytes(8, "little", signed=True)
        ids = np.stack([epoch, shard, sample]).astype("<i8")
        digest = sha256(bytes.fromhex(self.hex) + step_bytes + ids.tobytes())
        return Ledger(digest.hexdigest())
