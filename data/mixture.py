"""Several sets trained on as one: which samples of each fill the slots of a global batch, by weight.

1. A batch is cut into shares, one a set, by weight.
2. The slots of each share are spread evenly over the batch, so that every worker has its part of every set.
3. Each set fills its slots in an order of its own (`data.order.Order`), epoch after epoch of that set.

Sets of 7 and 3 shards with weights 0.75 and 0.25, batches of 4:

    the first set has 3 slots of every batch, spread to 1/6, 3/6 and 5/6 of it, the second one slot, at 1/2
    so the slots are, in order, of the sets 0 0 1 0
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from data.draws import key_of
from data.order import DEFAULT_BLOCK, Ids, Order, SampleId, Tail

# B batch size


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
    counts = [int(share) for share in exact]
    remainders = np.subtract(exact, counts)
    largest_first = np.argsort(-remainders, kind="stable")  # of equal ones, the set that is named first
    # What rounding down left goes out one by one, so that the shares add up to the batch.
    for group in largest_first[: batch_size - sum(counts)]:
        counts[group] += 1
    if min(counts) == 0:
        raise ValueError(f"weights {list(weights)} leave a set without a sample in a batch of {batch_size}")
    return counts
