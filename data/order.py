"""Which sample sits in which slot of which global batch: a pure function of a few integers.

An epoch's shards are permuted and their samples laid end to end as positions 0 … N−1; positions are cut into
lanes; inside a lane, samples are permuted within blocks; a batch takes the next samples of every lane, lane
by lane. Any step is computed alone, without replay and without anything of size N (reasons: `docs/order.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import numpy as np

# S shards, N samples, B batch size, L lanes

Ids = tuple[np.ndarray, np.ndarray, np.ndarray]  # epoch, shard, sample: int64 arrays of one length
ROUNDS = 6  # Feistel rounds; 4 suffice in theory for large domains (Luby & Rackoff 1988), small ones need more
DEFAULT_LANES = 64  # docs/order.md measures it
DEFAULT_BLOCK = 16_384


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al. 2014): a bijection of uint64 that looks random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: np.ndarray | int) -> np.ndarray:
    """Fold integers (or arrays of them) into one uint64 key each."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        part = np.asarray(part, np.int64).astype(np.uint64)
        key = mix(key * np.uint64(0x9E3779B97F4A7C15) + part + np.uint64(0x632BE59BD9B4E019))
    return key


def permute(x: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Element-wise: where the permutation of 0 … size−1 named by `key` sends x.

    A Feistel network over Z_a × Z_b, a·b just above `size`; what falls outside walks on until it is inside.
    """
    size = size.astype(np.uint64)
    a = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    b = (size + a - np.uint64(1)) // a
    out, todo = x.astype(np.uint64), np.arange(len(x))
    while len(todo):
        moved = feistel(out[todo], a[todo], b[todo], key[todo])
        out[todo] = moved
        todo = todo[moved >= size[todo]]
    return out.astype(np.int64)


def feistel(x: np.ndarray, a: np.ndarray, b: np.ndarray, key: np.ndarray) -> np.ndarray:
    left, right = x // b, x % b
    for turn in range(0, ROUNDS, 2):
        left = (left + mix(key + right * np.uint64(ROUNDS) + np.uint64(turn))) % a
        right = (right + mix(key + left * np.uint64(ROUNDS) + np.uint64(turn + 1))) % b
    return left * b + right


class Order:
    """The order of samples of one set of shards; `Order(...).batch(step)` is all that training needs.

    `tail` says what becomes of the samples that do not fill an epoch's last batch: "carry" opens the next
    epoch's first batch with them, so that every sample is used exactly once an epoch; "drop" leaves them out.
    """

    def __init__(
        self,
        shard_samples: Sequence[int],
        *,
        seed: int,
        batch_size: int,
        lanes: int | None = None,
        shuffle_block: int = DEFAULT_BLOCK,
        tail: Literal["carry", "drop"] = "carry",
    ):
        self.shard_samples = np.asarray(shard_samples, np.int64)
        self.samples = int(self.shard_samples.sum())
        self.seed, self.batch_size, self.shuffle_block, self.tail = seed, batch_size, shuffle_block, tail
        self.lanes = min(DEFAULT_LANES, batch_size) if lanes is None else lanes
        self._starts: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the last epochs' permuted shards
        check_order(self)
        self.used = self.samples if tail == "carry" else self.samples // batch_size * batch_size

    @property
    def steps_per_epoch(self) -> float:
        """Steps that one pass over the samples takes; whole when the tail is dropped."""
        return self.used / self.batch_size

    def batch(self, step: int) -> Ids:
        """(epoch, shard, sample) of every slot of global batch `step`: int64 arrays of `batch_size`."""
        return self._at(*self._places(step))

    def replacement(self, step: int, slot: int, attempt: int) -> tuple[int, int, int]:
        """What to use where the sample in `slot` is bad: the attempt-th after it, lane after lane."""
        epoch, position = (column[slot : slot + 1] for column in self._places(step))
        found = self._at(epoch, (position + attempt) % self.samples)
        return int(found[0][0]), int(found[1][0]), int(found[2][0])

    def _places(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, position before the shuffle) of every slot: a batch is cut where an epoch ends."""
        at, end = step * self.batch_size, (step + 1) * self.batch_size
        epochs, positions = [], []
        while at < end:
            epoch, first = divmod(at, self.used)
            last = min(first + end - at, self.used)
            taken, upto = self._taken(first), self._taken(last)
            count = upto - taken
            shift = np.repeat(self._lane_starts() + taken - (np.cumsum(count) - count), count)
            positions.append(shift + np.arange(last - first))
            epochs.append(np.full(last - first, epoch))
            at += last - first
        return np.concatenate(epochs), np.concatenate(positions)

    def _lane_starts(self) -> np.ndarray:
        lane = np.arange(self.lanes)
        return lane * (self.samples // self.lanes) + np.minimum(lane, self.samples % self.lanes)

    def _taken(self, used: int) -> np.ndarray:
        """How many samples each lane has given when an epoch has given `used`: equal to within one."""
        return used // self.lanes + (np.arange(self.lanes) < used % self.lanes)

    def _at(self, epoch: np.ndarray, position: np.ndarray) -> Ids:
        """Shuffle positions inside their lane's blocks, then look up shard and sample."""
        q, r = divmod(self.samples, self.lanes)
        long = r * (q + 1)  # the first r lanes hold one sample more
        lane = np.where(position < long, position // (q + 1), r + (position - long) // max(q, 1))
        start, length = lane * q + np.minimum(lane, r), q + (lane < r)
        block = (position - start) // self.shuffle_block
        start = start + block * self.shuffle_block
        size = np.minimum(self.shuffle_block, length - block * self.shuffle_block)
        place = start + permute(position - start, size, key_of(self.seed, epoch, lane, block))
        shard, sample = np.empty_like(place), np.empty_like(place)
        for e in np.unique(epoch):
            here = epoch == e
            shards, starts = self._epoch_shards(int(e))
            row = np.searchsorted(starts, place[here], side="right") - 1
            shard[here], sample[here] = shards[row], place[here] - starts[row]
        return epoch, shard, sample

    def _epoch_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of shards and the position at which each starts; empty shards are left out."""
        found = self._starts.get(epoch)
        if found is None:
            shards = np.flatnonzero(self.shard_samples)
            shards = shards[np.argsort(key_of(self.seed, epoch, shards), kind="stable")]
            counts = self.shard_samples[shards]
            found = shards, np.cumsum(counts) - counts
            last = list(self._starts.items())[-1:]
            self._starts = {**dict(last), epoch: found}  # a new one: the thread that fetches ahead reads it too
        return found


class Mixture:
    """Several sets by weight: every global batch takes as many samples of each, in the order of each.

    The sets are groups of consecutive shards of one index, `groups[g]` shards each. `shares` tells how much of a
    batch each has: the weights', by largest remainder; its slots are spread evenly over the batch, so that every
    worker has its part of every set. `options` are `Order`'s, the same for each.
    """

    def __init__(
        self, shard_samples: Sequence[int], *, groups: Sequence[int], weights: Sequence[float], seed: int,
        batch_size: int, **options: Any,
    ):  # fmt: skip
        if sum(groups) != len(shard_samples) or len(groups) != len(weights) or min(weights) <= 0:
            raise ValueError(f"groups {groups} must cover {len(shard_samples)} shards, with a weight > 0 each")
        self.shard_samples, self.batch_size = np.asarray(shard_samples, np.int64), batch_size
        self.shares = shares(batch_size, weights)
        spread = [(np.arange(share) + 0.5) / share for share in self.shares]
        self.numbers = np.argsort(np.concatenate(spread), kind="stable")  # of each slot, set by set
        self.starts = np.cumsum([0, *groups])
        self.orders = [
            Order(shard_samples[a:b], seed=int(key_of(seed, a)[0] >> np.uint64(2)), batch_size=share, **options)
            for a, b, share in zip(self.starts, self.starts[1:], self.shares, strict=False)
        ]

    def batch(self, step: int) -> Ids:
        """As `Order.batch`; epochs are each set's own."""
        parts = [order.batch(step) for order in self.orders]
        shifted = [(e, shard + start, sample) for (e, shard, sample), start in zip(parts, self.starts, strict=False)]
        epoch, shard, sample = (np.concatenate(column)[self.numbers] for column in zip(*shifted, strict=True))
        return epoch, shard, sample

    def replacement(self, step: int, slot: int, attempt: int) -> tuple[int, int, int]:
        """As `Order.replacement`, from the same set."""
        ends, number = np.cumsum(self.shares), int(self.numbers[slot])
        group = int(np.searchsorted(ends, number, side="right"))
        first = int(ends[group]) - self.shares[group]
        epoch, shard, sample = self.orders[group].replacement(step, number - first, attempt)
        return epoch, shard + int(self.starts[group]), sample


def shares(batch_size: int, weights: Sequence[float]) -> list[int]:
    """Cut a batch by weight, largest remainders first; raises ValueError where a set would get none."""
    exact = [batch_size * weight / sum(weights) for weight in weights]
    found = [int(share) for share in exact]
    for group in sorted(range(len(exact)), key=lambda g: found[g] - exact[g])[: batch_size - sum(found)]:
        found[group] += 1
    if min(found) == 0:
        raise ValueError(f"weights {list(weights)} leave a set without a sample in a batch of {batch_size}")
    return found


def check_order(order: Order) -> None:
    """Raise ValueError where the numbers do not fit one another."""
    if order.batch_size < 1 or order.shuffle_block < 1 or order.lanes < 1:
        raise ValueError(
            f"batch_size {order.batch_size}, lanes {order.lanes}, shuffle_block {order.shuffle_block}: "
            "each must be 1 or more"
        )
    if order.samples == 0:
        raise ValueError("the shards hold no samples; pack some first")
    if order.tail == "drop" and order.samples < order.batch_size:
        raise ValueError(f'{order.samples} samples do not fill one batch of {order.batch_size}; use tail="carry"')


@dataclass(frozen=True)
class Ledger:
    """The rolling digest of every sample id consumed so far; equal ledgers mean equal data."""

    hex: str

    @classmethod
    def start(cls, index_digest: str, seed: int) -> Ledger:
        """The ledger before the first step."""
        return cls(sha256(f"{index_digest} {seed}".encode()).hexdigest())

    def update(self, step: int, epoch: np.ndarray, shard: np.ndarray, sample: np.ndarray) -> Ledger:
        """The ledger after the global batch `step`."""
        ids = np.stack([epoch, shard, sample]).astype("<i8")
        return Ledger(sha256(bytes.fromhex(self.hex) + np.int64(step).tobytes() + ids.tobytes()).hexdigest())
