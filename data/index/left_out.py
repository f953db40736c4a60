"""Shards that a run does without (`data.drop`), and what they are called.

A shard is named by the end of its path, `train-000007.tar` or `other/train/train-000007.tar`: as much of it as no other
shard's path ends with. It is emptied, not removed, because the order depends on the numbers of all shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from data.errors import DataError
from data.index.columns import MappedShards
from data.index.index import Index, digest_of, rows_of
from data.index.shard import Shard


def without(sets: Sequence[Index], names: Sequence[str]) -> list[Index]:
    """The sets with the shards of these names emptied, so that the others keep their numbers.

    A name may have folders in front, as far as it takes to tell shards apart. A shard that several sets have, subsets
    of one set, is emptied in each. Raises DataError unless each name is of one shard.
    """
    # As nearly always: there is nothing to look through, nor a digest to compute anew.
    if not names:
        return list(sets)
    dropped: list[set[int]] = [set() for _ in sets]  # numbers of shards, for each set
    for name in names:
        for set_number, shard_number in the_only_one_called(name, sets):
            dropped[set_number].add(shard_number)
    return list(map(emptied, sets, dropped))


def the_only_one_called(name: str, sets: Sequence[Index]) -> list[tuple[int, int]]:
    """(number of the set, number in it) of the shard with a name, in every set that has it.

    Raises DataError unless it is exactly one shard.
    """
    shards = called(name, sets)
    if len(shards) != 1:
        which = ", ".join(list(shards)[:3]) or f"as {sets[0].location(0)} is called"
        raise DataError(
            f"data.drop: {len(shards)} shards are called {name}, expected one: {which}; type more of its path"
        )
    (numbers,) = shards.values()
    return numbers


def emptied(index: Index, numbers: set[int]) -> Index:
    """An index whose shards of these numbers have no samples and no bytes."""
    # Emptied instead of removed: the order depends on the numbers of all shards, which must stay as they were.
    shards: Sequence[Shard]
    if isinstance(index.shards, MappedShards):
        shards = index.shards.without(numbers)
    else:
        shards = tuple(
            replace(shard, samples=0, bytes=0) if number in numbers else shard
            for number, shard in enumerate(index.shards)
        )
    digest = digest_of(shards, index.class_counts, index.names, rows_of(index.origin))
    return replace(index, shards=shards, digest=digest)


def shortest(sets: Sequence[Index], place: str) -> str:
    """The shortest end of a shard's path that no other shard's path ends with."""
    parts = place.split("/")
    for count in range(1, len(parts)):
        name = "/".join(parts[-count:])
        if len(called(name, sets)) == 1:
            return name
    return place


def called(name: str, sets: Sequence[Index]) -> dict[str, list[tuple[int, int]]]:
    """Every shard whose path ends with a name: where it is → (number of the set, number in it) in each set with it."""
    shards: dict[str, list[tuple[int, int]]] = {}
    for set_number, index in enumerate(sets):
        for number, shard in enumerate(index.shards):
            # With a slash before both, so that `1.tar` does not name `train-1.tar`.
            place = index.place_of(shard)
            if f"/{place}".endswith(f"/{name}"):
                shards.setdefault(place, []).append((set_number, number))
    return shards
