"""Find the samples that cause a gradient spike, by repeating a step with different samples masked.

1. The attempt starts from a commit and repeats the steps up to the step with the spike. It keeps the state before this
   step and the micro-batches of the step in memory.
2. The step is repeated without a mask. The limit is the midpoint, on a log scale, of its metric and the usual value.
3. A bisection masks prefixes of the batch: the last sample of the shortest prefix that removes the spike is a culprit.
   Each sample contributes to the metric with the weight 1 / batch_size for any mask, so that a smaller batch is not
   noisier than the full batch.
4. Only the culprit is masked. If the spike remains, samples with the same bytes are masked too. If it still remains,
   the search continues among the samples before the culprit, until the spike is gone or 2·log₂(batch) steps have run.

In:  {"config": …, "job": …, "search": {"step": 120, "metric": "grad_norm", "usual": 0.4}}
Out: {"rows": [517], "is_found": true, "value": 9.1, "limit": 1.9, "value_without": 0.41, "replays": 12,
      "samples": [{"slot": 517, "shard": "train-000002.tar", "key": "train00517", "range": [2, 5, 6], …}], …}
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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

MIN_SPIKE = 2.0  # a metric below this multiple of the usual value is not a spike


def search(task: Mapping[str, Any]) -> dict[str, Any]:
    """Collective: find the samples that cause the spike at a step. Raises the same errors as training.

    In the result, non-finite numbers are None, rows are slots of the global batch, and `range` is a range for a mask.
    """
    worker, progress = set_up(read_task(task))
    cfg = worker.cfg
    (masking,) = (hook for hook in worker.hooks if isinstance(hook, Masking))
    always_masked = masking.mask.ranges
    handle_sigterm(worker.stop.signal)
    step = task["search"]["step"] - 1  # the log counts from 1
    metric = task["search"]["metric"]
    usual = task["search"]["usual"]
    # A rollback may have excluded the step in the meantime. The run computed it before, without skipping its range.
    worker.health.excluded = [steps for steps in worker.health.excluded if step not in steps]
    # A live audit would take the state that each repetition restores for an error of the memory.
    worker.engine.around_backward = nullcontext

    # 1. Repeat training up to the step, then save its batch and the state before it.
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

    # Loss and gradient norm of the last repetition.
    replays = 0
    loss = math.nan
    norm = math.nan

    def value_without(rows: Sequence[int]) -> float:
        nonlocal replays, loss, norm
        if replays:
            worker.engine.load(read, updates)
        replays += 1
        # Samples that the run itself masks stay masked.
        masking.mask = Mask([*always_masked, *ranges_of(*ids[list(rows), 1:].T)])
        step_result = take_step(worker, step, iter(own))
        loss = step_result.mean_loss
        norm = worker.engine.gradient_norm
        value = (norm if metric == "grad_norm" else loss) * samples_in_mean(step_result.planned) / cfg.batch_size
        worker.group.telemetry.log(f"step {step + 1} without {len(rows)} of {len(ids)} samples: {metric} {value:.4g}")
        return value if math.isfinite(value) else math.inf

    # 2. The original value and the limit.
    value = value_without([])
    outcome: dict[str, Any] = {"loss": loss, "grad_norm": norm, "value": value, "usual": usual}
    outcome["limit"] = limit_of(value, usual)
    outcome["is_spike"] = is_spike(value, usual)
    result = Culprits([], [], False, value)

    # 3 and 4: search with these two functions.
    if outcome["is_spike"]:
        most = 2 * math.ceil(math.log2(max(len(ids), 2))) - 1
        twins_of = partial(same_bytes, worker.data.index, ids)
        result = culprits(value_without, len(ids), outcome["limit"], most=most, twins_of=twins_of)
    samples: list[dict[str, Any]] = []
    for row in result.rows:
        _, shard, sample = ids[row].tolist()
        samples.append(
            {
                "slot": row,
                "shard": worker.data.index.shards[shard].name,
                "sample": sample,
                "key": printable(worker.data.index.keys(shard)[sample]),
                "range": [shard, sample, sample + 1],
                "is_twin": row in result.twins,
            }
        )
    worker.group.telemetry.close()
    worker.group.phases.close()
    worker.engine.close()
    dist.destroy_process_group()
    return without_nan({**outcome, **result._asdict(), "replays": replays, "samples": samples})  # type: ignore[return-value]


def is_spike(value: float, usual: float) -> bool:
    """Return whether a step's metric is so far above its usual value that samples can be the cause."""
    return value > MIN_SPIKE * usual


def limit_of(value: float, usual: float) -> float:
    """Return the limit for a step's metric once all culprits are masked; `value` is the metric with all samples."""
    return math.sqrt(usual * value) if math.isfinite(value) else SPIKE * usual


class Culprits(NamedTuple):
    """The smallest known set of rows that removes a spike when masked."""

    rows: list[int]
    twins: list[int]  # the rows masked because their bytes equal those of a culprit
    is_found: bool  # True if every row is necessary, or is a twin of a necessary row
    value_without: float  # metric with these rows masked


def culprits(
    value_without: Callable[[Sequence[int]], float],
    count: int,
    limit: float,
    *,
    most: int,
    twins_of: Callable[[int], list[int]],
) -> Culprits:
    """Find a smallest set of rows that, when masked, brings the value within the limit, in at most `most` evaluations.

    `twins_of` returns the rows with the same bytes as a given row. With all rows masked, the value is assumed to be 0.
    """
    smallest = Culprits(list(range(count)), [], False, 0.0)
    needed: list[int] = []
    twins: list[int] = []
    evaluations = 0
    end = count  # masking rows[:end] and `needed` removes the spike

    def are_enough(rows: list[int]) -> bool:
        nonlocal smallest, evaluations
        evaluations += 1
        value = value_without(rows)
        if value <= limit and len(rows) <= len(smallest.rows):
            smallest = Culprits(rows, [], False, value)
        return value <= limit

    while end > 0:
        # Find the shortest sufficient prefix: its last row is necessary.
        begin = 0
        while end - begin > 1 and evaluations < most:
            middle = (begin + end) // 2
            if are_enough(sorted({*range(middle), *needed})):
                end = middle
            else:
                begin = middle
        if evaluations >= most:
            break
        end -= 1
        needed = sorted({*needed, end})
        if smallest.rows == needed or are_enough(needed):
            return smallest._replace(twins=twins, is_found=True)
        # Each copy of a sample causes the spike: mask all copies together.
        copies = sorted({*twins_of(end)} - {*needed})
        twins += copies
        needed = sorted({*needed, *copies})
        if copies and evaluations < most and are_enough(needed):
            return smallest._replace(twins=twins, is_found=True)
    return smallest


def same_bytes(index: Index, ids: np.ndarray, row: int) -> list[int]:
    """Return the rows of a batch with the same bytes as a given row, including the row itself."""
    digests = np.zeros(len(ids), np.uint64)
    for shard in np.unique(ids[:, 1]):
        rows = ids[:, 1] == shard
        digests[rows] = index.table(int(shard))["digest"][ids[rows, 2]]
    return np.flatnonzero(digests == digests[row]).tolist()
