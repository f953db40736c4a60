"""Sets as a run takes them: several as one index, and without the shards that it excludes (`data.drop`).

    join([flowers, pets], [0.3, 0.7])           an index whose shard 12 may be shard 2 of pets
    exclude([flowers], ["train-000007.tar"])    the same set, whose shard 7 is empty

A shard is named by the end of its path, `train-000007.tar` or `other/train/train-000007.tar`: as much of it as no other
shard's path ends with. It is emptied, not removed, because the order depends on the numbers of all shards.
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

from data.errors import DataError
from data.index.columns import MappedShards
from data.index.index import Index, digest_of
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
        """Return (the set that a shard comes from, its number in there)."""
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
    def bytes(self) -> int:
        return sum(index.bytes for index in self.sets)

    @property
    def shard_samples(self) -> np.ndarray:
        return np.concatenate([index.shard_samples for index in self.sets])

    @property
    def remote(self) -> bool:
        return any(index.remote for index in self.sets)

    def table(self, shard: int) -> np.ndarray:
        """Return a shard's table, out of the set that the shard comes from."""
        index, number = JoinedShards(self.sets).place(shard)
        return index.table(number)


def join(sets: Sequence[Index], weights: Sequence[float]) -> JoinedIndex:
    """Join sets that are trained on together; the digest is of theirs and of the weights, wherever they lie."""
    samples_of_class: Counter[int] = Counter()
    digests = []
    named_sets = []
    classes = 0
    for index in sets:
        for label, samples in enumerate(index.class_counts):
            samples_of_class[label] += samples
        digests.append(index.digest)
        classes = max(classes, index.classes)
        named_sets.append((str(index.tables), index.names))
    class_counts = tuple(samples_of_class[label] for label in range(classes))
    digest = sha256(json.dumps([digests, list(weights)]).encode()).hexdigest()
    names = agreed(named_sets, "data.mixture")
    sets = tuple(sets)
    return JoinedIndex(JoinedShards(sets), classes, class_counts, digest, "", Path(), names=names, sets=sets)


# ------------------------------------------------------------------------------------- shards that are excluded


def exclude(sets: Sequence[Index], names: Sequence[str]) -> list[Index]:
    """Return the sets with the shards of these names emptied, so that the others keep their numbers.

    A name may have folders in front, as far as it takes to tell shards apart. A shard that several sets have, subsets
    of one set, is emptied in each. Raises DataError unless each name is of one shard.
    """
    # As nearly always: there is nothing to look through, nor a digest to compute anew.
    if not names:
        return list(sets)
    dropped: list[set[int]] = [set() for _ in sets]  # numbers of shards, for each set
    for name in names:
        named = called(name, sets)
        if len(named) != 1:
            which = ", ".join(list(named)[:3]) or f"as {sets[0].location(0)} is called"
            raise DataError(
                f"data.drop: {len(named)} shards are called {name}, expected one: {which}; type more of its path"
            )
        (numbers,) = named.values()
        for set_number, shard_number in numbers:
            dropped[set_number].add(shard_number)

    # Emptied instead of removed: the order depends on the numbers of all shards, which must stay as they were.
    remaining = []
    for index, dropped_numbers in zip(sets, dropped, strict=True):
        shards: Sequence[Shard]
        if isinstance(index.shards, MappedShards):
            shards = index.shards.without(dropped_numbers)
        else:
            kept = list(index.shards)
            for number in dropped_numbers:
                kept[number] = replace(kept[number], samples=0, bytes=0)
            shards = tuple(kept)
        digest = digest_of(shards, index.class_counts, index.names, index.origin)
        remaining.append(replace(index, shards=shards, digest=digest))
    return remaining


def shortest(sets: Sequence[Index], place: str) -> str:
    """Return the shortest end of a shard's path that no other shard's path ends with."""
    parts = place.split("/")
    for count in range(1, len(parts)):
        name = "/".join(parts[-count:])
        if len(called(name, sets)) == 1:
            return name
    return place


def called(name: str, sets: Sequence[Index]) -> dict[str, list[tuple[int, int]]]:
    """Find the shards whose path ends with a name: path → (number of the set, number in it) in each set with it."""
    shards: dict[str, list[tuple[int, int]]] = {}
    for set_number, index in enumerate(sets):
        for number, shard in enumerate(index.shards):
            # With a slash before both, so that `1.tar` does not name `train-1.tar`.
            place = index.place_of(shard)
            if f"/{place}".endswith(f"/{name}"):
                shards.setdefault(place, []).append((set_number, number))
    return shards
