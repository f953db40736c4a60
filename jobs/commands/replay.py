"""The work of `patchline replay RUN step=N`: rebuild a step's global batch to look for what broke the step.

1. The stage's task.json says with which config and which sets it was trained.
2. metrics.jsonl says which shards the attempt that took the step had left out.
3. The order of samples is a function of these and the seed, whatever the number of workers was: one loader makes the
   whole batch.

A path is a run directory with one trained stage, or a stage's folder.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

import models
from data.decoder import BadSample
from data.errors import UsageError
from data.files import whole_file
from data.index.document import load_index
from data.index.index import Index
from data.loader import TrainLoader
from data.order import Mixture, Order
from jobs.terminal import echo
from pipeline import artifacts, config
from pipeline.checkpoints.manifest import attempt_of_stage
from pipeline.monitoring.telemetry import Record, read_metrics
from pipeline.token_dropping import phase_at, phases
from pipeline.training_config import TrainConfig, steps_of, training_order

# B images of the global batch, S image side, L labels of a sample at most


class Rebuilt(NamedTuple):
    """The global batch of a step."""

    images: np.ndarray  # (B, S, S, 3) uint8
    labels: np.ndarray  # (B, L), -1 where a sample has fewer
    ids: np.ndarray  # (B, 3): epoch, shard, sample in the shard
    bad: list[BadSample]  # those that were replaced


def replay(run: Path, step: str, target: str | None) -> None:
    """Print the batch of a step, and the samples that stand out; with a target, write the batch there as .npz.

    Raises UsageError where the words do not fit the run, DataError where a file of it was altered.
    """
    # Before the work, where the batch could not be written under this very name.
    if target:
        file = Path(target)
        if file.suffix != ".npz":
            raise UsageError(f"--to {file} does not end in .npz\n  expected a file's name, as batch.npz")
        if file.is_dir():
            raise UsageError(f"--to {file} is a folder\n  expected a file's name, as {file / 'batch.npz'}")
        if not file.parent.is_dir():
            raise UsageError(f"--to {file}: there is no folder {file.parent}\n  make it, or name a file elsewhere")
    folder = stage_of(run)
    task = artifacts.read_record(folder / artifacts.TASK)
    job = task["job"]
    text = step.removeprefix("step=")
    if not text.isdigit() or text == "0":
        raise UsageError(f"{step!r} is not a step\n  expected step=N, N from 1, as the log counts them")
    number = int(text)

    records = read_metrics(folder, None)
    cfg = with_recorded_drop(config.build(TrainConfig, task["config"], "config"), records, number)
    sets = [load_index(path) for path in job["train"]]
    index, order = training_order(cfg, sets)
    steps = steps_of(cfg, sum(training_set.samples for training_set in sets))
    if number > steps:
        raise UsageError(
            f"step {number} is beyond the last of {folder.name}, {steps}\n  expected step=1 … step={steps}"
        )
    # The log counts steps from 1, the order from 0.
    phase = phase_at(number - 1, phases(cfg.thinning, steps, models.from_dict(job["model"])))
    batch = rebuild(cfg, index, order, phase.image_size, number - 1)
    if target:
        with whole_file(Path(target)) as temporary:
            np.savez(temporary, images=batch.images, labels=batch.labels, ids=batch.ids)

    # What the batch is, and what each attempt that took the step has recorded of it.
    shards = [index.shards[shard].name for shard in batch.ids[:, 1]]
    labels = Counter(batch.labels[batch.labels >= 0].tolist())
    echo(f"{folder.name}: step {number}, {len(batch.ids)} samples of {batch.images.shape[1]}×{batch.images.shape[2]}")
    for spike in records:
        if spike["kind"] != "spike":
            continue
        attempt = attempt_of_stage(folder, spike["attempt"])
        # It holds the steps before it too, which tell how it came.
        for recent in spike["recent"]:
            if recent["step"] == number:
                echo(
                    f"attempt {attempt}: gradient norm {recent['grad_norm']:.3g}, loss {recent['loss']:.6f} "
                    f"(the spike of step {spike['step']}: {spike['grad_norm']:.3g}, usual up to {spike['limit']:.3g})"
                )
    # A report holds the losses of all steps since the one before it.
    for report in reports_of(records, number):
        first_step = report["step"] - len(report["losses"]) + 1
        attempt = attempt_of_stage(folder, report["attempt"])
        echo(f"attempt {attempt}: loss {report['losses'][number - first_step]:.6f}")
    echo(f"epochs {sorted(set(batch.ids[:, 0].tolist()))}, shards {', '.join(sorted(set(shards)))}")
    echo(f"labels {dict(sorted(labels.items()))}")
    for sample in batch.bad:
        echo(f"replaced: {sample.shard} {sample.key}: {sample.reason}")

    # Blank and broken images are found at the ends: the darkest, the brightest and the flattest.
    means = batch.images.mean((1, 2, 3))
    spreads = batch.images.std((1, 2, 3))
    for name, slot in {"darkest": means.argmin(), "brightest": means.argmax(), "flattest": spreads.argmin()}.items():
        echo(
            f"{name}: slot {slot}, sample {batch.ids[slot, 2]} of {shards[slot]}, "
            f"mean {means[slot]:.1f}, std {spreads[slot]:.1f}"
        )
    if target:
        echo(f"written: {target}")


def stage_of(run: Path) -> Path:
    """Return the folder of the one trained stage. Raises UsageError, which names them, where there are several."""
    if (run / artifacts.TASK).exists():
        return run
    folders = sorted(task.parent for task in run.glob("*/task.json"))
    if not folders:
        raise UsageError(
            f"there is no trained stage in {run}\n  expected a run directory with one, or a stage's folder"
        )
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in folders)
        raise UsageError(f"{run} has {len(folders)} trained stages: {names}\n  name the folder of one")
    return folders[0]


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
        if record["kind"] == "train" and record["step"] - len(record["losses"]) < step <= record["step"]:
            reports.append(record)
    return reports


def rebuild(cfg: TrainConfig, index: Index, order: Order | Mixture, image_size: int, step: int) -> Rebuilt:
    """Make the batch of a step, counted from 0, with one loader that takes the slots of all workers."""
    # One micro-batch may stand for those of all workers: augmentation is seeded by sample, so every worker makes the
    # same pixels of it.
    loader = TrainLoader(
        index,
        order,
        image_size=image_size,
        slots=range(cfg.batch_size),
        micro_batch=cfg.batch_size,
        start_step=step,
        seed=cfg.seed,
        augment=cfg.data.augment,
        max_labels=cfg.labels_read,
        cache=cfg.data.cache,
        decode=cfg.data.decode,
    )
    batch = next(iter(loader))
    images = batch.images.permute(0, 2, 3, 1).cpu().numpy()  # (B, 3, S, S) → (B, S, S, 3)
    return Rebuilt(images, batch.labels.numpy(), batch.ids.numpy(), list(batch.bad))
