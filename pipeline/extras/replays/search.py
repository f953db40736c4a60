"""The search for the samples behind a spike: one step, taken again and again with some of its samples masked.

1. The attempt starts from a commit and takes the steps up to the one that is searched. Its state there, and the
   micro-batches of the step, are kept in memory.
2. The step is taken with nothing masked. Its metric and the usual value give the limit between them, on a log scale.
3. Prefixes of the batch are masked, halving what is left: the shortest one that ends the spike ends with a culprit.
   Each sample's part of the metric counts with 1 / batch_size whatever is masked, so that what is left of a batch never
   looks worse than it did as a part of it.
4. The culprit is masked alone. Where the spike stays, samples of the same bytes are masked with it; and where it stays
   then, the search goes on before the culprit, until it ends or has taken 2·log₂(batch) steps.

In:  {"config": …, "job": …, "search": {"step": 120, "metric": "grad_norm", "usual": 0.4}}
Out: {"rows": [517], "is_found": true, "value": 9.1, "limit": 1.9, "value_without": 0.41, "replays": 12,
      "samples": [{"slot": 517, "shard": "train-000002.tar", "key": "train00517", "range": [2, 5, 6], …}], …}
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from data.checks import printable
from data.index.index import Index
from pipeline.batches import micro_batches, next_batch, planned_ids, samples_in_mean
from pipeline.extras.replays.masking import Mask, ranges_of
from pipeline.extras.replays.spikes import Masking
from pipeline.health import SPIKE
from pipeline.monitoring.telemetry import without_nan
from pipeline.start import read_task, set_up
from pipeline.train import take_step
from pipeline.worker import handle_sigterm

LEAST_SPIKE = 2.0  # times the usual value: what is less is no spike to look for


def search(task: Mapping[str, Any]) -> dict[str, Any]:
    """Find the samples of a step without which its metric is usual. Collective; raises what training does.

    Numbers that are not finite are None in what it returns; rows are slots of the global batch, and a sample's range is
    that of a mask.
    """
    worker, progress = set_up(read_task(task))
    cfg = worker.cfg
    (masking,) = (hook for hook in worker.hooks if isinstance(hook, Masking))
    always_masked = masking.mask.ranges
    handle_sigterm(worker.stop.signal)
    step = task["search"]["step"] - 1  # the log counts from 1
    metric = task["search"]["metric"]
    usual = task["search"]["usual"]

    # 1. Up to the step, as training went; then its batch and the state before it.
    batches = micro_batches(worker, progress.step)
    while progress.step < step:
        next_step = worker.health.next_step(progress.step)
        if next_step != progress.step:
            batches = micro_batches(worker, next_step)
            progress.step = next_step
            continue
        take_step(worker, progress.step, batches)
        progress.step += 1
    planned = planned_ids(worker, step)
    own = [next_batch(worker, batches, step, planned) for _ in range(worker.data.arithmetic.accumulation)]
    of_workers: list[list[np.ndarray]] = [[] for _ in range(worker.group.world)]
    dist.all_gather_object(of_workers, [batch.ids.numpy() for batch in own])
    ids = np.concatenate([rows for of_worker in of_workers for rows in of_worker])  # (B, 3), in the order of slots
    state: dict[str, tuple[int, dict[str, Tensor]]] = {}
    for name, start, tensors in worker.engine.fragments(held=True):
        state[name] = (start, {kind: tensor.detach().clone().flatten() for kind, tensor in tensors.items()})
    updates = worker.engine.updates

    def read(name: str, kind: str, start: int, count: int) -> Tensor:
        first, tensors = state[name]
        return tensors[kind][start - first : start - first + count]

    # The last time that the step was taken: loss and norm.
    replays = 0
    loss = math.nan
    norm = math.nan

    def value_without(rows: Sequence[int]) -> float:
        nonlocal replays, loss, norm
        if replays:
            worker.engine.load(read, updates)
        replays += 1
        # Those that the run does without stay masked.
        masking.mask = Mask([*always_masked, *ranges_of(*ids[list(rows), 1:].T)])
        taken = take_step(worker, step, iter(own))
        loss = taken.mean_loss
        norm = worker.engine.gradient_norm
        value = (norm if metric == "grad_norm" else loss) * samples_in_mean(taken.planned) / cfg.batch_size
        worker.group.telemetry.log(f"step {step + 1} without {len(rows)} of {len(ids)} samples: {metric} {value:.4g}")
        return value if math.isfinite(value) else math.inf

    # 2. As it was, and the limit.
    value = value_without([])
    outcome: dict[str, Any] = {"loss": loss, "grad_norm": norm, "value": value, "usual": usual}
    outcome["limit"] = math.sqrt(usual * value) if math.isfinite(value) else SPIKE * usual
    outcome["is_spike"] = value > LEAST_SPIKE * usual
    found = Culprits([], [], False, value)

    # 3 and 4.
    if outcome["is_spike"]:
        most = 2 * math.ceil(math.log2(max(len(ids), 2))) - 1
        twins_of = partial(same_bytes, worker.data.index, ids)
        found = culprits(value_without, len(ids), outcome["limit"], most=most, twins_of=twins_of)
    samples: list[dict[str, Any]] = []
    for row in found.rows:
        _, shard, sample = ids[row].tolist()
        samples.append(
            {
                "slot": row,
                "shard": worker.data.index.shards[shard].name,
                "sample": sample,
                "key": printable(worker.data.index.keys(shard)[sample]),
                "range": [shard, sample, sample + 1],
                "is_twin": row in found.twins,
            }
        )
    worker.group.telemetry.close()
    worker.group.phases.close()
    worker.engine.close()
    dist.destroy_process_group()
    return without_nan({**outcome, **found._asdict(), "replays": replays, "samples": samples})  # type: ignore[return-value]


class Culprits(NamedTuple):
    """Holds the smallest set of rows that is known to end a spike."""

    rows: list[int]
    twins: list[int]  # of them, those that were masked because their bytes are those of another
    is_found: bool  # every one of them is needed, or a twin of one that is
    value_without: float


def culprits(
    value_without: Callable[[Sequence[int]], float],
    count: int,
    limit: float,
    *,
    most: int,
    twins_of: Callable[[int], list[int]],
) -> Culprits:
    """Return the rows without which the value is below the limit, after `most` values at the most.

    `twins_of` returns the rows that hold the same bytes as one. Without any row the value is taken for 0.
    """
    smallest = Culprits(list(range(count)), [], False, 0.0)
    found: list[int] = []
    twins: list[int] = []
    taken = 0
    end = count  # rows[:end], beside those found, are enough

    def are_enough(rows: list[int]) -> bool:
        nonlocal smallest, taken
        taken += 1
        value = value_without(rows)
        if value <= limit and len(rows) <= len(smallest.rows):
            smallest = Culprits(rows, [], False, value)
        return value <= limit

    while end > 0:
        # The shortest prefix that is enough: its last row is needed.
        begin = 0
        while end - begin > 1 and taken < most:
            middle = (begin + end) // 2
            if are_enough(sorted({*range(middle), *found})):
                end = middle
            else:
                begin = middle
        if taken >= most:
            break
        end -= 1
        found = sorted({*found, end})
        if smallest.rows == found or are_enough(found):
            return smallest._replace(twins=twins, is_found=True)
        # Copies of a sample are each enough for the spike: they go together.
        copies = sorted({*twins_of(end)} - {*found})
        twins += copies
        found = sorted({*found, *copies})
        if copies and taken < most and are_enough(found):
            return smallest._replace(twins=twins, is_found=True)
    return smallest


def same_bytes(index: Index, ids: np.ndarray, row: int) -> list[int]:
    """Return the rows of a batch whose samples have the bytes of one of them, itself among them."""
    digests = np.zeros(len(ids), np.uint64)
    for shard in np.unique(ids[:, 1]):
        rows = ids[:, 1] == shard
        digests[rows] = index.table(int(shard))["digest"][ids[rows, 2]]
    return np.flatnonzero(digests == digests[row]).tolist()
