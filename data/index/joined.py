"""Several sets that are trained on together, as one index: their shards one set after the other.

join([flowers, pets], [0.3, 0.7])    →   an index whose shard 12 may be shard 2 of pets
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from data.index.index import Index
from data.index.names import agreed
from data.index.shard import Shard


class JoinedShards(Sequence[Shard]):
    """The shards of several sets, one set after the other, each named by where it is; made when they are asked for."""

    def __init__(self, sets: Sequence[Index]):
        self.sets = sets

    def __len__(self) -> int:
        return sum(len(index.shards) for index in self.sets)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self[at] for at in range(*number.indices(len(self))))
        index, number_in_set = self.place(range(len(self))[number])
        return replace(index.shards[number_in_set], name=index.location(number_in_set))

    def __iter__(self) -> Iterator[Shard]:
        for index in self.sets:
            for shard in index.shards:
                yield replace(shard, name=index.place_of(shard))

    def place(self, number: int) -> tuple[Index, int]:
        """(the set that a shard comes from, its number in there)."""
        for index in self.sets:
            if number < len(index.shards):
                return index, number
            number -= len(index.shards)
        raise IndexError(number)


@dataclass(frozen=True)
class JoinedIndex(Index):
    """Several sets as one: their shards one set after the other, each named by where it is; labels are shared."""

    sets: tuple[Index, ...] = field(default=(), compare=False)

    @property
    def sees_rot(self) -> bool:
        return all(index.sees_rot for index in self.sets)

    @property
    def bytes(self) -> int:
        return sum(index.bytes for index in self.sets)

    @property
    def shard_samples(self) -> np.ndarray:
        return np.concatenate([index.shard_samples for index in self.sets])

    @property
    def remote(self) -> bool:
        return any(index.remote for index in self.sets)

    def table(self, shard: int) -> np.ndarray:
        """A shard's table, out of the set that the shard comes from."""
        index, number = JoinedShards(self.sets).place(shard)
        return index.table(number)


def join(sets: Sequence[Index], weights: Sequence[float]) -> JoinedIndex:
    """Sets that are trained on together; the digest is of theirs and of the weights, wherever the sets are."""
    samples_of_class: Counter[int] = Counter()
    digests = []
    for index in sets:
        for label, samples in enumerate(index.class_counts):
            samples_of_class[label] += samples
        digests.append(index.digest)
    classes = max((index.classes for index in sets), default=0)
    class_counts = tuple(samples_of_class[label] for label in range(classes))
    digest = sha256(json.dumps([digests, list(weights)]).encode()).hexdigest()
    names = agreed([(str(index.tables), index.names) for index in sets], "data.mixture")
    sets = tuple(sets)
    return JoinedIndex(JoinedShards(sets), classes, class_counts, digest, "", Path(), names=names, sets=sets)
