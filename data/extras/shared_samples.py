"""Count the samples that two data sets share, by their positions in the same tars and by their bytes."""

from __future__ import annotations

import numpy as np

from data.index.index import Index


def shared_samples(index: Index, other: Index) -> tuple[int, int]:
    """Return two counts of the samples of `index` that are also in `other`: by position in the same tar, by content.

    Subsets share positions with their parent and with each other. Images packed twice, or copied to another data set,
    match only by content.
    """
    places_of_tar: dict[str, np.ndarray] = {}
    digests_of_shards = [np.zeros(0, np.uint64)]
    for number, shard in enumerate(index.shards):
        table = index.table(number)
        places_of_tar[shard.sha256] = table["image"]
        digests_of_shards.append(table["digest"])
    digests = np.concatenate(digests_of_shards)
    sorted_digests = np.unique(digests)
    is_shared = np.zeros(len(sorted_digests), bool)
    same_places = 0
    for number, shard in enumerate(other.shards):
        table = other.table(number)
        if shard.sha256 in places_of_tar:
            same_places += int(np.isin(places_of_tar[shard.sha256], table["image"]).sum())
        if len(sorted_digests):
            nearest = np.minimum(np.searchsorted(sorted_digests, table["digest"]), len(sorted_digests) - 1)
            is_shared[nearest[sorted_digests[nearest] == table["digest"]]] = True
    return same_places, int(np.isin(digests, sorted_digests[is_shared]).sum())
