"""Count the samples that two sets share: the same places of the same tars, and the same bytes."""

from __future__ import annotations

import numpy as np

from data.index.index import Index


def shared_samples(index: Index, other: Index) -> tuple[int, int]:
    """Return how many samples of a set are in another one: the same places of the same tars, and the same bytes.

    Subsets share places with their set and with each other. A set that was packed twice shares bytes alone, and so do
    the copies of an image that many sets hold.
    """
    places_of_tar: dict[str, np.ndarray] = {}
    digests_of_shards = [np.zeros(0, np.uint64)]
    for number, shard in enumerate(index.shards):
        table = index.table(number)
        places_of_tar[shard.sha256] = table["image"]
        digests_of_shards.append(table["digest"])
    digests = np.concatenate(digests_of_shards)
    in_order = np.unique(digests)
    is_found = np.zeros(len(in_order), bool)
    same_places = 0
    for number, shard in enumerate(other.shards):
        table = other.table(number)
        if shard.sha256 in places_of_tar:
            same_places += int(np.isin(places_of_tar[shard.sha256], table["image"]).sum())
        if len(in_order):
            nearest = np.minimum(np.searchsorted(in_order, table["digest"]), len(in_order) - 1)
            is_found[nearest[in_order[nearest] == table["digest"]]] = True
    return same_places, int(np.isin(digests, in_order[is_found]).sum())
