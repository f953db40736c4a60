"""Compute which sample fills each slot of a global batch: a pure function of the seed and the step.

`Order.batch(step)` works in five steps:

1. Number the slots of all steps consecutively. Slot k of step s is number s·B + k, and each epoch covers N of these
   numbers. If an epoch ends inside a batch, split the batch there.
2. Permute the shards of the epoch. Their samples, laid end to end, form the positions 0 … N−1.
3. Cut the positions into L lanes of equal length (to within one). A batch takes the next samples of every lane.
4. Divide each lane into blocks, and shuffle the samples inside each block.
5. Look up the shard that contains the position, and the sample's number in that shard.

Any step can be computed on its own: nothing is replayed, and no array has one entry per sample. docs/design/order.md
gives the reasons.

Example: shards of 3, 4 and 2 samples, seed 0, batch size 4, two lanes (positions 0 … 4 and 5 … 8), blocks of 3:

    epoch 0 visits the shards in the order 2, 1, 0; they start at the positions 0, 2, 6
    step 0 takes the positions 0 1 | 5 6, which hold (shard, sample) (2, 0) (2, 1) | (1, 3) (0, 0)
    step 1 takes the positions 2 3 | 7 8, which hold (shard, sample) (1, 0) (1, 1) | (0, 1) (0, 2)
    step 2 takes the position 4, which holds (1, 2); all 9 samples are used, so epoch 1 fills the other three slots

A `Mixture` trains on several data sets by weight. Each set owns a fixed number of slots in every batch, spread evenly
over the batch, and fills them in its own order. Epochs are counted separately for each set.

Example: data sets of 7 and 3 shards, weights 0.75 and 0.25, batch size 4:

    set 0 owns three slots, centred at 1/6, 3/6 and 5/6 of the batch; set 1 owns one slot, centred at 1/2
    sorted by these centres, the slots belong to the sets 0 0 1 0
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

# S: number of shards, N: samples, B: batch size, L: lanes

DEFAULT_LANES = 64  # default number of lanes, measured in docs/design/order.md
DEFAULT_BLOCK = 16_384  # default shuffle block in samples
TRIM_FROM_SHARDS = 50_000  # free memory after permuting this many shards, which takes megabytes

Tail = Literal["carry", "drop"]


class Ids(NamedTuple):
    """The samples of a batch: three int64 arrays of equal length."""

    epoch: np.ndarray
    shard: np.ndarray
    sample: np.ndarray


class SampleId(NamedTuple):
    """One sample: its epoch, its shard, and its number within the shard."""

    epoch: int
    shard: int
    sample: int


class Order:
    """The sample order of one set of shards; training calls only `Order(...).batch(step)`.

    `tail` decides what happens to the last samples of an epoch if they do not fill a batch. "carry" completes that
    batch with samples of the next epoch, so every sample is used exactly once per epoch. "drop" skips the samples.
    Raises ValueError if an argument is below 1, all shards are empty, or "drop" leaves no complete batch.
    """

    def __init__(
        self,
        shard_samples: Sequence[int] | np.ndarray,
        *,
        seed: int,
        batch_size: int,
        lanes: int | None = None,  # default: the smaller of DEFAULT_LANES and the batch size
        shuffle_block: int = DEFAULT_BLOCK,  # number of samples shuffled together
        tail: Tail = "carry",
    ):
        self.shard_samples = np.asarray(shard_samples, np.int64)
        self.samples = int(self.shard_samples.sum())
        self.seed = seed
        self.batch_size = batch_size
        self.shuffle_block = shuffle_block
        self.tail = tail
        self.lanes = min(DEFAULT_LANES, batch_size) if lanes is None else lanes
        self._shard_orders: dict[
            int, tuple[np.ndarray, np.ndarray]
        ] = {}  # epoch: permuted shards, their first positions
        if batch_size < 1 or shuffle_block < 1 or self.lanes < 1:
            raise ValueError(
                f"batch_size is {batch_size}, lanes is {self.lanes} and shuffle_block is {shuffle_block}, expected 1 "
                "or more for each"
            )
        if self.samples == 0:
            raise ValueError("the shards contain no samples; pack a data set first")
        if tail == "drop" and self.samples < batch_size:
            raise ValueError(
                f"{self.samples:,} samples do not fill a batch of {batch_size:,}, so tail=drop would skip all of them"
            )

        self.samples_per_epoch = self.samples
        if tail == "drop":
            # A multiple of the batch size: no batch crosses an epoch boundary, and `_positions` needs no special case.
            self.samples_per_epoch = self.samples // batch_size * batch_size

    def batch(self, step: int) -> Ids:
        """Return the samples of the global batch at `step`, one per slot: arrays of length `batch_size`."""
        return self._samples_at(*self._positions(step))

    def without_sizes(self) -> Order:
        """Return a copy without the shard sizes, to be pickled; the receiver restores the sizes with `with_sizes`."""
        order = copy(self)
        order.with_sizes(np.empty(0, np.int64))
        return order

    def with_sizes(self, shard_samples: np.ndarray) -> None:
        """Restore the shard sizes that `without_sizes` removed; they must equal the original ones."""
        self.shard_samples = shard_samples
        self._shard_orders = {}

    def replacement(self, step: int, slot: int, attempt: int) -> SampleId:
        """Return the sample that replaces a bad one in `slot`: the one `attempt` positions later, cyclically."""
        # The replacement is also used at its own position. Skipping it there would change all later steps.
        epochs, positions = self._positions(step)
        epoch = epochs[slot : slot + 1]
        position = (positions[slot : slot + 1] + attempt) % self.samples
        ids = self._samples_at(epoch, position)
        return SampleId(int(ids.epoch[0]), int(ids.shard[0]), int(ids.sample[0]))

    def _positions(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return every slot's epoch and its position before the block shuffle, as two arrays (B,)."""
        number = step * self.batch_size  # slot numbers count from the first slot of step 0
        end = number + self.batch_size
        lanes = np.arange(self.lanes)
        epochs = []
        positions = []
        # Runs once, and once more for each epoch that ends inside the batch.
        while number < end:
            epoch, first = divmod(number, self.samples_per_epoch)
            stop = min(first + end - number, self.samples_per_epoch)
            epochs.append(np.full(stop - first, epoch))

            # These slots use the samples first … stop−1 of the epoch. After n samples of an epoch, each lane has
            # supplied n / L of them, to within one.
            used_before = first // self.lanes + (lanes < first % self.lanes)  # (L,)
            used_after = stop // self.lanes + (lanes < stop % self.lanes)  # (L,)
            counts = used_after - used_before
            first_slots = np.cumsum(counts) - counts  # (L,) the first slot that each lane fills
            # Inside a lane, slots and positions both increase by one, so their difference is constant.
            shifts = self._lane_starts(lanes) + used_before - first_slots  # (L,)
            positions.append(np.repeat(shifts, counts) + np.arange(stop - first))
            number += stop - first
        return np.concatenate(epochs), np.concatenate(positions)

    def _lane_starts(self, lane: np.ndarray) -> np.ndarray:
        """Return the first position of each lane; each of the first N mod L lanes has one extra sample."""
        return lane * (self.samples // self.lanes) + np.minimum(lane, self.samples % self.lanes)

    def _samples_at(self, epoch: np.ndarray, position: np.ndarray) -> Ids:
        """Shuffle the positions inside their blocks, and return the samples at the new positions."""
        length = self.samples // self.lanes
        longer_lanes = self.samples % self.lanes  # these come first and have length + 1 samples
        end_of_longer = longer_lanes * (length + 1)
        # If there are more lanes than samples, `length` is 0 and every position lies in a longer lane. max(length, 1)
        # only avoids a division by zero.
        lane = np.where(
            position < end_of_longer,
            position // (length + 1),
            longer_lanes + (position - end_of_longer) // max(length, 1),
        )
        lane_start = self._lane_starts(lane)
        lane_length = length + (lane < longer_lanes)

        # Permute each position inside its block. The last block of a lane may be shorter than the others.
        block = (position - lane_start) // self.shuffle_block
        block_start = lane_start + block * self.shuffle_block
        block_size = np.minimum(self.shuffle_block, lane_length - block * self.shuffle_block)
        key = key_of(self.seed, epoch, lane, block)
        position = block_start + permute(position - block_start, block_size, key)

        # Look up shards epoch by epoch, because each epoch permutes the shards differently.
        shard = np.empty_like(position)
        sample = np.empty_like(position)
        for number in np.unique(epoch):
            is_in_epoch = epoch == number
            shards, starts = self._epoch_shards(int(number))
            row = np.searchsorted(starts, position[is_in_epoch], side="right") - 1
            shard[is_in_epoch] = shards[row]
            sample[is_in_epoch] = position[is_in_epoch] - starts[row]
        return Ids(epoch, shard, sample)

    def _epoch_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the permuted non-empty shards of an epoch, and the first position of each."""
        cached = self._shard_orders.get(epoch)
        if cached is not None:
            return cached
        # int32 saves memory: 300,000 shards take 3.6 MB per epoch in every process.
        shards = np.flatnonzero(self.shard_samples).astype(np.int32)
        # Sort by our own hash, because NumPy's random permutations may change between versions.
        shards = shards[np.argsort(key_of(self.seed, epoch, shards), kind="stable")]
        starts = np.zeros(len(shards), np.int64)
        np.cumsum(self.shard_samples[shards[:-1]], out=starts[1:])
        if len(shards) >= TRIM_FROM_SHARDS:
            # Return freed memory to the system: glibc would keep it in each of the 64 or more processes of a node.
            with suppress(AttributeError, OSError):  # C libraries other than glibc have no malloc_trim
                ctypes.CDLL(None).malloc_trim(0)
        # Keep the previous epoch, because a batch may span both. Replace the dict instead of changing it: the thread
        # that prefetches shards may be reading it.
        previous = list(self._shard_orders.items())[-1:]
        self._shard_orders = {**dict(previous), epoch: (shards, starts)}
        return shards, starts


# ----------------------------------------------------------------------------- mixtures of sets


class Mixture:
    """The sample order of several weighted data sets; every batch has a fixed number of samples from each set.

    Set g consists of the next `groups[g]` shards of the index. `shares[g]` slots of every batch belong to it: its
    weight's part of the batch, rounded by largest remainder. The slots of a set are spread evenly over the batch, so
    every worker gets samples from every set. Each set is ordered by an `Order` with these `lanes`, `shuffle_block` and
    `tail`. Raises ValueError if the groups do not cover the shards, a weight is not positive, or a set gets no slot.
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
            raise ValueError(
                f"groups must cover {len(shard_samples)} shards, and each group needs a positive weight; found groups "
                f"{groups} with weights {list(weights)}"
            )
        self.batch_size = batch_size
        self.shares = shares(batch_size, weights)
        self.starts = np.cumsum([0, *groups])  # the first shard of each set, then the number of shards

        # Centre the samples of each set in equal parts of the batch, and sort all samples by their centres. Slot s
        # takes row `rows_of_slots[s]` of the sets' batches, concatenated.
        centres = [(np.arange(share) + 0.5) / share for share in self.shares]  # fractions of the batch
        self.rows_of_slots = np.argsort(np.concatenate(centres), kind="stable")  # (B,)

        sizes = np.asarray(shard_samples, np.int64)
        self.orders = []
        for group, share in enumerate(self.shares):
            first = self.starts[group]
            stop = self.starts[group + 1]
            # A separate seed per set: sets of equal sizes would otherwise be shuffled identically. 62 bits fit into the
            # int64 that `key_of` expects.
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
        """The number of samples in each shard, over all data sets."""
        return np.concatenate([order.shard_samples for order in self.orders])

    def batch(self, step: int) -> Ids:
        """Return the samples of the global batch at `step`, like `Order.batch`; each set counts its own epochs."""
        epochs = []
        shards = []
        samples = []
        for group, order in enumerate(self.orders):
            ids = order.batch(step)
            epochs.append(ids.epoch)
            shards.append(ids.shard + self.starts[group])
            samples.append(ids.sample)
        slots = self.rows_of_slots
        return Ids(np.concatenate(epochs)[slots], np.concatenate(shards)[slots], np.concatenate(samples)[slots])

    def without_sizes(self) -> Mixture:
        """Return a copy without the shard sizes, like `Order.without_sizes`."""
        mixture = copy(self)
        mixture.orders = [order.without_sizes() for order in self.orders]
        return mixture

    def with_sizes(self, shard_samples: np.ndarray) -> None:
        """Restore the shard sizes of all sets, like `Order.with_sizes`."""
        for group, order in enumerate(self.orders):
            order.with_sizes(shard_samples[self.starts[group] : self.starts[group + 1]])

    def replacement(self, step: int, slot: int, attempt: int) -> SampleId:
        """Return the sample that replaces a bad one in `slot`, from the same set, like `Order.replacement`."""
        # Find the set that fills this slot, and the slot of that set's own batch.
        row = int(self.rows_of_slots[slot])
        ends = np.cumsum(self.shares)
        group = int(np.searchsorted(ends, row, side="right"))
        first_row = int(ends[group]) - self.shares[group]
        sample_id = self.orders[group].replacement(step, row - first_row, attempt)
        return sample_id._replace(shard=sample_id.shard + int(self.starts[group]))


def shares(batch_size: int, weights: Sequence[float]) -> list[int]:
    """Return the number of slots of each data set, by weight and largest remainder.

    Raises ValueError if a data set gets no slots.
    """
    exact = [batch_size * weight / sum(weights) for weight in weights]
    counts = list(map(int, exact))
    remainders = np.subtract(exact, counts)
    largest_first = np.argsort(-remainders, kind="stable")  # ties: the earlier set first
    # Rounding down leaves some slots unassigned: each of the largest remainders gets one.
    for group in largest_first[: batch_size - sum(counts)]:
        counts[group] += 1
    if min(counts) == 0:
        raise ValueError(f"with weights {list(weights)}, one data set gets no samples in a batch of {batch_size}")
    return counts


# ----------------------------------------------------------------------------- record of consumed samples


@dataclass(frozen=True)
class Ledger:
    """A rolling digest of all sample ids consumed so far; equal ledgers mean that two runs saw the same data."""

    hex: str

    @classmethod
    def start(cls, index_digest: str, seed: int) -> Ledger:
        """Return the initial ledger: its state before the first step."""
        return cls(sha256(f"{index_digest} {seed}".encode()).hexdigest())

    def update(self, step: int, epoch: np.ndarray, shard: np.ndarray, sample: np.ndarray) -> Ledger:
        """Return the ledger after the global batch at `step`."""
        # Little-endian, so the ledger is the same on every machine.
        step_bytes = int(step).to_bytes(8, "little", signed=True)
        ids = np.stack([epoch, shard, sample]).astype("<i8")
        digest = sha256(bytes.fromhex(self.hex) + step_bytes + ids.tobytes())
        return Ledger(digest.hexdigest())
