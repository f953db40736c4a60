"""What a recipe says about remote shards, and how much of the cache they need: known without any client of a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.checks import at_least, more_than_0
from data.errors import ConfigError
from data.index.index import Index
from data.order import Mixture, Order

PIECE = 16 << 20  # bytes of one request: what a broken answer costs at most
SMALLEST = PIECE  # bytes of a shard: what comes in one piece is not worth ranges


@dataclass(frozen=True)
class CacheConfig:
    """Where remote shards are kept on a node, and how patient fetching is."""

    directory: str = ""  # absolute path; empty: in PATCHLINE_CACHE, or else in the user's cache folder
    limit_bytes: int = 200 << 30  # what a node keeps, besides what is being fetched
    attempts: int = 8  # to fetch one piece, without any progress between them
    backoff_s: float = 0.5  # before the next attempt; doubled each time, with full jitter (Brooker 2015), 30 s at most
    timeout_s: float = 30.0  # of silence, after which a request is given up
    ahead: int = 64  # steps whose shards are fetched before they are needed
    fetchers: int = 4  # downloads at once

    def __post_init__(self) -> None:
        # Workers run in folders of their own, where a relative path would be another one for each.
        if self.directory and not Path(self.directory).expanduser().is_absolute():
            raise ConfigError(f"cache.directory is {self.directory!r}, expected an absolute path")
        more_than_0(self, "limit_bytes attempts timeout_s fetchers", "cache.")
        at_least(self, 0, "backoff_s ahead", "cache.")


def remote_shards_ahead(
    index: Index, order: Order | Mixture, slots: range, step: int, cfg: CacheConfig
) -> tuple[int, int]:
    """Return (remote shards, their bytes) that some slots read from `step` to the last step that is fetched ahead."""
    shards: set[int] = set()
    # The shards of all these steps must fit the cache at once, or it would evict what it has just fetched.
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
    """Return numbers of the shards that some slots read at a step, each once."""
    shard_of_slot = order.batch(step)[1]
    return np.unique(shard_of_slot[slots.start : slots.stop]).tolist()
