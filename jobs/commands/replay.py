"""`python -m jobs replay RUN step=N`: rebuild a step's global batch, whatever the world was, to look for what broke it.

RUN is a run directory with one trained stage, or a stage's folder.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import models
from data.errors import UsageError
from data.loader import TrainLoader
from data.order import Mixture, Order
from data.shards.index import Index, load_index
from pipeline import config
from pipeline.telemetry import read_metrics
from pipeline.training_config import TrainConfig, training_order


def replay(run: Path, step: str, target: str | None) -> list[str]:
    """What was in the batch, sample by sample where a number stands out; optionally written as .npz."""
    folder = stage_of(run)
    task = json.loads((folder / "task.json").read_text())
    cfg, job = config.build(TrainConfig, task["config"], "config"), task["job"]
    number = parse(step)
    cfg = dropped(cfg, folder, number)
    index, order = order_of(cfg, job)
    image_size = models.from_dict(job["model"]).image_size[0]
    images, labels, ids, bad = rebuild(cfg, index, order, image_size, number - 1)
    shards = [index.shards[shard].name for shard in ids[:, 1]]
    if target:
        np.savez(target, images=images, labels=labels, ids=ids)
    return [
        f"{folder.name}: step {number}, {len(ids)} samples of {images.shape[1]}×{images.shape[2]}",
        *logged(folder, number),
        f"epochs {sorted(set(ids[:, 0].tolist()))}, shards {', '.join(sorted(set(shards)))}",
        f"labels {dict(sorted(Counter(labels[labels >= 0].tolist()).items()))}",
        *(f"replaced: {b.shard} {b.key}: {b.reason}" for b in bad),
        *outliers(images, ids, shards),
        *([f"written: {target}"] if target else []),
    ]


def stage_of(run: Path) -> Path:
    """The folder of the one trained stage. Raises UsageError with the choices."""
    found = [run] if (run / "task.json").exists() else sorted(p.parent for p in run.glob("*/task.json"))
    if len(found) != 1:
        names = ", ".join(str(path) for path in found) or "none"
        raise UsageError(f"{run} has {len(found)} trained stages: {names}\n  name the folder of one")
    return found[0]


def parse(step: str) -> int:
    text = step.removeprefix("step=")
    if not text.isdigit() or text == "0":
        raise UsageError(f"{step!r} is not a step\n  expected step=N, N from 1, as the log counts them")
    return int(text)


def rebuild(
    cfg: TrainConfig, index: Index, order: Order | Mixture, image_size: int, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Any]]:
    """(images (B, S, S, 3) uint8, labels (B, L), ids (B, 3), bad samples) of the step, counted from 0."""
    loader = TrainLoader(
        index,
        order,
        image_size=image_size,
        slots=range(cfg.batch_size),
        micro_batch=cfg.batch_size,
        start_step=step,
        seed=cfg.seed,
        augment=cfg.data.augment,
        max_labels=cfg.data.max_labels,
        cache=cfg.data.cache,
        decode=cfg.data.decode,
    )
    batch = next(iter(loader))
    return batch.images.permute(0, 2, 3, 1).cpu().numpy(), batch.labels.numpy(), batch.ids.numpy(), list(batch.bad)


def dropped(cfg: TrainConfig, folder: Path, step: int) -> TrainConfig:
    """The config with the `data.drop` of the last attempt that reported the step, or might have: it changes."""
    reported = [r["attempt"] for r in read_metrics(folder) if r["step"] - len(r["losses"]) < step <= r["step"]]
    starts = [
        r
        for r in read_metrics(folder, "start")
        if r["step"] < step and r["attempt"] in (reported[-1:] or [r["attempt"]])
    ]
    drop = starts[-1].get("drop", ()) if starts else cfg.data.drop
    return replace(cfg, data=replace(cfg.data, drop=tuple(drop)))


def order_of(cfg: TrainConfig, job: dict[str, Any]) -> tuple[Index, Order | Mixture]:
    return training_order(cfg, [load_index(path) for path in job["train"]])


def logged(folder: Path, step: int) -> list[str]:
    """The loss that each attempt reported for the step, and what the records of spikes know of it."""
    lines = []
    for spike in read_metrics(folder, "spike"):
        for found in (found for found in spike["recent"] if found["step"] == step):
            lines.append(
                f"attempt {spike['attempt']}: gradient norm {found['grad_norm']:.3g}, loss {found['loss']:.6f} "
                f"(the spike of step {spike['step']}: {spike['grad_norm']:.3g}, usual up to {spike['limit']:.3g})"
            )
    for record in read_metrics(folder):
        first = record["step"] - len(record["losses"]) + 1
        if first <= step <= record["step"]:
            lines.append(f"attempt {record['attempt']}: loss {record['losses'][step - first]:.6f}")
    return lines


def outliers(images: np.ndarray, ids: np.ndarray, shards: list[str]) -> list[str]:
    """The darkest, brightest and flattest image: blank and broken pictures are found at the ends."""
    means, spreads = images.mean((1, 2, 3)), images.std((1, 2, 3))
    chosen = {"darkest": means.argmin(), "brightest": means.argmax(), "flattest": spreads.argmin()}
    return [
        f"{name}: slot {slot}, sample {ids[slot, 2]} of {shards[slot]}, mean {means[slot]:.1f}, std {spreads[slot]:.1f}"
        for name, slot in chosen.items()
    ]
