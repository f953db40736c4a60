"""The global batch of a step that was taken, rebuilt as every worker saw it, in one process and without a model.

1. The stage's task.json says with which config and which sets it was trained.
2. metrics.jsonl says which shards the attempt that took the step had left out.
3. The order of samples is a function of these and the seed, whatever the number of workers was: one loader makes the
   whole batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

import models
from data.decoder import BadSample
from data.errors import UsageError
from data.index.document import load_index
from data.index.index import Index
from data.order import Mixture, Order
from pipeline import artifacts, config
from pipeline.monitoring.telemetry import Record, steps_in
from pipeline.token_dropping import phase_at, phases
from pipeline.training_config import TrainConfig, steps_of, training_loader, training_order

# B images of the global batch, S image side, L labels of a sample at most


class Rebuilt(NamedTuple):
    """The global batch of a step."""

    images: np.ndarray  # (B, S, S, 3) uint8
    labels: np.ndarray  # (B, L), -1 where a sample has fewer
    ids: np.ndarray  # (B, 3): epoch, shard, sample in the shard
    bad: list[BadSample]  # those that were replaced
    source: Index  # of all sets that are trained on, where the ids are numbers of shards and samples


def with_recorded_drop(cfg: TrainConfig, records: Sequence[Record], step: int) -> TrainConfig:
    """Return the config with the `data.drop` of the last attempt that took the step, or may have.

    It may change from attempt to attempt, and task.json has only that of the newest.
    """
    # Of several attempts that reported the step, the last is the one whose weights went on.
    reports = reports_of(records, step)
    drop = cfg.data.drop
    for record in records:
        if record["kind"] != "start":
            continue
        # A step that no attempt has reported may have ended any of those that started before it.
        took_the_step = not reports or record["attempt"] == reports[-1]["attempt"]
        if took_the_step and record["step"] < step:
            drop = record.get("drop", ())
    return replace(cfg, data=replace(cfg.data, drop=tuple(drop)))


def reports_of(records: Sequence[Record], step: int) -> list[Record]:
    """Return the reports that hold the losses of a step: a step may have several, by different attempts."""
    reports = []
    for record in records:
        if record["kind"] == "train" and step in steps_in(record):
            reports.append(record)
    return reports


def rebuild_step(folder: Path, step: int, records: Sequence[Record], most: int | None = None) -> Rebuilt:
    """Make the global batch of a step, counted from 1, or the first `most` samples of it, with one loader.

    `records` are those of the stage. Raises UsageError where the stage has no such step.
    """
    task = artifacts.read_record(folder / artifacts.TASK)
    job = task["job"]
    cfg = with_recorded_drop(config.build(TrainConfig, task["config"], "config"), records, step)
    sets = [load_index(path) for path in job["train"]]
    index, order = training_order(cfg, sets)
    steps = steps_of(cfg, sum(training_set.samples for training_set in sets))
    if step > steps:
        raise UsageError(f"step {step} is beyond the last of {folder.name}, {steps}\n  expected step=1 … step={steps}")
    # The log counts steps from 1, the order from 0.
    phase = phase_at(step - 1, phases(cfg.thinning, steps, models.from_dict(job["model"])))
    return rebuild(cfg, index, order, phase.image_size, step - 1, most)


def rebuild(
    cfg: TrainConfig, index: Index, order: Order | Mixture, image_size: int, step: int, most: int | None = None
) -> Rebuilt:
    """Make the batch of a step, counted from 0, with one loader that takes the slots of all workers, or the first."""
    samples = min(cfg.batch_size, most or cfg.batch_size)
    # One micro-batch may stand for those of all workers: augmentation is seeded by sample, so every worker makes the
    # same pixels of it.
    loader = training_loader(
        cfg, index, order, image_size=image_size, slots=range(samples), start_step=step, micro_batch=samples
    )
    batch = next(iter(loader))
    images = batch.images.permute(0, 2, 3, 1).cpu().numpy()  # (B, 3, S, S) → (B, S, S, 3)
    return Rebuilt(images, batch.labels.numpy(), batch.ids.numpy(), list(batch.bad), index)
