"""Measure the quality and the cost of the shuffled sample order, for `docs/design/order.md`.

    python benchmarks/order.py

Each number is a ratio to a full shuffle (1.00 is equally good; `docs/design/order.md` defines the terms):
  labels    how far a batch's class distribution is from that of the data, if each group of ten shards holds one class
  mixing    by how many batches a sample's position in epoch 1 differs from its position in epoch 0
  together  how often two samples from one shard that shared a batch share a batch again in the next epoch
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from data.order import Order

BATCH = 1024
SHARDS = 1000
SAMPLES = 1000  # per shard


def epoch(order: Order, number: int) -> np.ndarray:
    """Return the sample ids (0 … N−1) of an epoch's full batches, as an array (steps, batch)."""
    steps_per_epoch = order.samples_per_epoch / order.batch_size
    steps = range(int(number * steps_per_epoch) + (number > 0), int((number + 1) * steps_per_epoch))
    batches = (order.batch(step) for step in steps)
    return np.stack([shard * SAMPLES + sample for _, shard, sample in batches])


def measures(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    shard = first // SAMPLES
    classes = np.stack([np.bincount(row // 10, minlength=SHARDS // 10) for row in shard]) / first.shape[1]
    when = np.full((2, SHARDS * SAMPLES), -1)
    for row, ids in enumerate((first, second)):
        when[row, ids] = np.arange(len(ids))[:, None]
    seen = (when >= 0).all(0)
    pairs = together = 0
    for ids in first[:: max(1, len(first) // 100)]:
        order = np.argsort(ids // SAMPLES, kind="stable")
        by_shard = ids[order]
        a = by_shard[:-1]
        b = by_shard[1:]
        same = (a // SAMPLES == b // SAMPLES) & seen[a] & seen[b]
        pairs += same.sum()
        together += (when[1, a] == when[1, b])[same].sum()
    return {
        "labels": float(np.abs(classes - 1 / classes.shape[1]).sum(1).mean() / 2),
        "mixing": float(np.abs(when[0] - when[1])[seen].mean()),
        "together": float(together / max(pairs, 1)),
        "shards": float(np.mean([len(np.unique(row)) for row in shard])),
    }


def main() -> None:
    rng = np.random.default_rng(0)
    steps = SHARDS * SAMPLES // BATCH
    full = measures(*(rng.permutation(SHARDS * SAMPLES)[: steps * BATCH].reshape(steps, BATCH) for _ in range(2)))
    print(" lanes   block  labels  mixing  together  shards a batch  open")
    for lanes in (1, 16, 64, 256):
        for block in (1_000, 4_000, 16_000):
            order = Order([SAMPLES] * SHARDS, seed=0, batch_size=BATCH, lanes=lanes, shuffle_block=block)
            measured = measures(epoch(order, 0), epoch(order, 1))
            ratio = {name: measured[name] / full[name] for name in ("labels", "mixing", "together")}
            length = min(block, SHARDS * SAMPLES // lanes)
            shards = lanes * (-(-length // SAMPLES) + 1)
            columns = "  ".join(f"{ratio[name]:>7.2f}" for name in ratio)
            print(f"{lanes:>6} {block:>7} {columns} {measured['shards']:>15.0f} {shards:>5}")
    large = Order([10_000] * 30_000, seed=0, batch_size=4096)
    large.batch(0)
    start = time.process_time()
    for step in range(600_000, 600_100):
        large.batch(step)
    print(f"300M samples, batch 4096: {(time.process_time() - start) * 1e9 / 100 / 4096:.0f} ns a sample")


if __name__ == "__main__":
    main()
