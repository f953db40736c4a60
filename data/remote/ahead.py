"""The shards of coming steps, fetched into the cache in the background, so that a step finds them there.

1. The order says which shards the slots of a step need (`shards_of`).
2. A thread fetches those of one step after the other, `CacheConfig.fetchers` at a time, and never more than
   `CacheConfig.ahead` steps before training, which says where it is (`Ahead.reached`).
3. A failure is kept, and raised where somebody waits for a batch: it may be over before the shard is needed.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from data.errors import DataError, StorageError
from data.index.index import Index
from data.mixture import Mixture
from data.order import Order
from data.remote.cache import Cache, CacheConfig
from data.remote.urls import redacted


def wanted(index: Index, order: Order | Mixture, slots: range, step: int, cfg: CacheConfig) -> tuple[int, int]:
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


def waited_for(index: Index, order: Order | Mixture, slots: range, step: int, cfg: CacheConfig) -> str:
    """Return what some slots of a step need, and how much of it is here: of remote shards, those that the cache has."""
    shards = shards_of(order, slots, step)
    cache = Cache(cfg)
    missing = []
    for shard in shards:
        if "://" in index.location(shard) and not cache.has(index.shards[shard]):
            missing.append(shard)
    line = f"{len(slots)} samples of {len(shards)} shards"
    if not missing:
        return f"{line}, all of which are here"
    size = sum(index.shards[shard].bytes for shard in missing)
    return (
        f"{line}; {len(shards) - len(missing)} of them are here, {len(missing)} ({size / 2**30:.3g} GiB) are not: "
        f"{redacted(index.location(missing[0]))} …"
    )


def shards_of(order: Order | Mixture, slots: range, step: int) -> list[int]:
    """Return numbers of the shards that some slots read at a step, each once."""
    shard_of_slot = order.batch(step)[1]
    return np.unique(shard_of_slot[slots.start : slots.stop]).tolist()


class Ahead:
    """Fetches, in the background, the shards that coming steps need; `reached(step)` moves the window."""

    def __init__(self, index: Index, order: Order | Mixture, slots: range, step: int, cfg: CacheConfig):
        self.index = index
        self.order = order
        self.slots = slots
        self.cfg = cfg
        self.step = step  # that training has reached
        self.changed = threading.Condition()  # of step or stopped
        self.stopped = False
        self.failure: StorageError | None = None  # why nothing arrives
        # The cache is told of our end, else the process would wait for its downloads to end.
        self.cache = Cache(cfg, lambda: self.stopped)
        self.thread = threading.Thread(target=self.run, args=(step,), daemon=True)
        self.thread.start()

    def reached(self, step: int) -> None:
        """Say which step training has reached."""
        with self.changed:
            self.step = step
            self.changed.notify()

    def stop(self) -> None:
        """Fetch nothing more; a piece that is on its way still arrives."""
        with self.changed:
            self.stopped = True
            self.changed.notify()

    def run(self, first_step: int) -> None:
        """Fetch the shards of one step after the other, never more than `ahead` steps before training."""
        step = first_step
        with ThreadPoolExecutor(self.cfg.fetchers) as pool:
            while True:
                # One lock for step and stop: a change between the check and the wait would otherwise be missed.
                with self.changed:
                    while not self.stopped and step > self.step + self.cfg.ahead:
                        self.changed.wait()
                    if self.stopped:
                        return
                # The shards of one step are waited for before the next step's are asked for: they are needed first.
                list(pool.map(self.fetch, shards_of(self.order, self.slots, step)))
                # Training does not wait for shards whose samples it reads by range: it may be ahead of us.
                step = max(step + 1, self.step)

    def fetch(self, shard: int) -> None:
        """Fetch one shard; a failure is kept for the loader to raise, as it may be over before the shard is needed."""
        url = self.index.location(shard)
        is_here = "://" not in url  # a mixture may have sets here and sets elsewhere
        if self.stopped or is_here:
            return
        try:
            self.cache.path(url, self.index.shards[shard])
            self.failure = None
        except StorageError as error:
            self.failure = error
        except (DataError, OSError):
            return  # whoever needs the shard meets and reports it
