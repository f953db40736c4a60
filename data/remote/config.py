"""Settings of the cache for remote shards, and the cache space a run needs; does not import an object-store client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.checks import at_least, more_than_0
from data.errors import ConfigError
from data.files import with_home
from data.index.index import Index
from data.order import Mixture, Order

PIECE = 16 << 20  # bytes per request; a broken response loses at most this much
SMALLEST = PIECE  # bytes; smaller shards arrive in one piece, so reading them by range saves nothing


@dataclass(frozen=True)
class CacheConfig:
    """Settings for a node's cache of remote shards, and for download retries."""

    directory: str = ""  # absolute path; default: below PATCHLINE_CACHE, or in the user's cache folder
    limit_bytes: int = 200 << 30  # size of the cache of a node, without downloads in progress
    attempts: int = 8  # maximum attempts to fetch a piece without any progress
    backoff_s: float = 0.5  # longest pause before the 2nd attempt; doubles up to 30 s; full jitter (Brooker 2015)
    timeout_s: float = 30.0  # a request fails after this long without data
    ahead: int = 64  # steps for which shards are downloaded in advance
    fetchers: int = 4  # number of parallel downloads

    def __post_init__(self) -> None:
        # Each worker runs in a different folder, where a relative path would mean different caches.
        if self.directory and not with_home(self.directory).is_absolute():
            raise ConfigError(f"cache.directory is {self.directory!r}, expected an absolute path")
        more_than_0(self, "limit_bytes attempts timeout_s fetchers", "cache.")
        at_least(self, 0, "backoff_s ahead", "cache.")


def remote_shards_ahead(
    index: Index, order: Order | Mixture, slots: range, step: int, cfg: CacheConfig
) -> tuple[int, int]:
    """Return the number and total size of the remote shards that `slots` read from `step` to `step` + `cfg.ahead`."""
    shards: set[int] = set()
    # The cache must hold the shards of all these steps at once, or it would evict shards before their use.
    for later in range(step, step + cfg.ahead + 1):
        shards.update(shards_of(order, slots, later))
    remote_shards = 0
    remote_bytes = 0
    for shard in shards:
        if "://" in index.location(shard):
            remote_shards += 1
            remote_bytes += index.shards[shard].bytes
    return remote_shards, remote_bytes


def shards_of(order: Order | Mixture, slots: range, step: int) -> list[int]:
    """Return the distinct numbers of the shards that the given slots read at a step."""
    shard_of_slot = order.batch(step)[1]
    return np.unique(shard_of_slot[slots.start : slots.stop]).tolist()
