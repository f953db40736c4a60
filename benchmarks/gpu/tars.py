"""Train from tars of JPEGs: measure the time waiting for data, the stalls from saves, and the planned memory.

The images are as large as ImageNet's: 500 × 375 pixels, about 110 kB.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import cv2
import numpy as np

import models
from benchmarks.gpu.parts import Context
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample
from jobs.__main__ import KINDS
from jobs.kinds import load_kinds
from jobs.recipe import campaign
from jobs.run.session import run_campaign
from pipeline.extras.plan.memory import memory_need
from pipeline.monitoring.telemetry import read_metrics
from pipeline.training_config import TrainConfig

CLASSES = 1000
SHARD_SAMPLES = 1000
ZERO = 2
WARM_UP_REPORTS = 1  # reports to ignore: compilation and the first batches

RECIPE = """
run: {run}
cluster: {{workers: 1, backend: processes, gpus_per_worker: {gpus}, cpus_per_worker: 2, max_restarts: 0}}
pretrain:
  data: {{train: {shards}, processes: {processes}}}
  model: {{name: {model}, image_size: 224, classes: {classes}}}
  optim: {{schedule: {{warmup_steps: 0}}}}
  loss: softmax
  steps: {steps}
  batch_size: {batch}
  micro_batch: {batch}
  zero: {zero}
  compile: {is_compiled}
  log_every: {log_every}
  save_every: {save_every}
  keep: 2
"""


def pack_images(context: Context) -> None:
    """Draw JPEGs and pack them into tars for the training parts."""
    count = context.size.jpegs
    began = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        images = list(pool.map(draw_jpeg, range(count), chunksize=50))
    samples = [Sample(f"s{number:06d}", image, (number % CLASSES,)) for number, image in enumerate(images)]
    pack(samples, context.work / "shards", shard_samples=SHARD_SAMPLES, classes=CLASSES)
    kilobytes = sum(map(len, images)) / count / 1e3
    context.report(images=count, kilobytes=kilobytes, seconds=time.monotonic() - began)


def draw_jpeg(number: int) -> bytes:
    """Return a JPEG with soft colours and noise, which compresses about as well as a photograph."""
    cv2.setNumThreads(1)
    generator = np.random.default_rng(number)
    colours = generator.integers(0, 256, (24, 32, 3), dtype=np.uint8)
    image = cv2.resize(colours, (500, 375), interpolation=cv2.INTER_CUBIC)
    noisy = np.clip(image + generator.normal(0, 9, image.shape), 0, 255).astype(np.uint8)
    return cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, 92])[1].tobytes()


def train(context: Context, model: str) -> None:
    """Pretrain from the tars, and report speed, waits for data and stalls from saves."""
    batch, steps = context.size.tars[model]
    cores = os.cpu_count() or 1
    run = context.work / f"tars-{model.replace('/', '')}"
    recipe = context.work / f"{run.name}.yaml"
    recipe.write_text(
        RECIPE.format(
            run=run,
            gpus=context.gpus,
            shards=context.work / "shards",
            processes=max(1, cores - 2),
            model=model,
            classes=CLASSES,
            steps=steps,
            batch=batch,
            zero=ZERO,
            is_compiled=str(context.device == "cuda").lower(),
            log_every=max(steps // 6, 1),
            save_every=steps // 2,
        )
    )
    loaded = campaign.load(recipe, [], load_kinds(KINDS))
    run_campaign(loaded)
    context.report(**{"model": model, "batch": batch, **summary_of(loaded.directory(loaded.stage("pretrain")))})


def summary_of(stage: Path) -> dict[str, object]:
    """Return time-weighted means over a stage's reports, except for the first one, and the stalls from saves."""
    reports = read_metrics(stage)[WARM_UP_REPORTS:]
    saves = read_metrics(stage, "checkpoint")
    seconds = sum(report["seconds"] for report in reports)
    summary: dict[str, object] = {}
    for name in ("images_per_s", "mfu", "wait", "wait_storage", "wait_decode", "wait_transfer"):
        if all(report[name] is not None for report in reports):
            summary[name] = sum(report[name] * report["seconds"] for report in reports) / seconds
    summary["memory_gib"] = max(report["memory_gb"] for report in reports)
    summary["first_stall_s"] = saves[0]["stalled_s"]  # the first save allocates host memory, which later saves reuse
    summary["later_stall_s"] = saves[-1]["stalled_s"]
    summary["save_s"] = saves[-1]["took_s"]
    summary["save_gb"] = saves[-1]["bytes"] / 1e9
    return summary


def plan_memory(context: Context, model: str) -> None:
    """Report a worker's planned memory at every ZeRO stage, for comparison with the measurements of engines.py."""
    images = context.size.models[model]
    for zero in (2, 3, 1):
        cfg = TrainConfig(
            model={"name": model},
            loss="softmax",
            steps=1,
            batch_size=images,
            micro_batch=images,
            precision="bf16",
            zero=zero,
        )
        need = memory_need(cfg, models.config_of(model), 1, is_gpu=context.device == "cuda")
        context.report(
            model=model,
            zero=zero,
            is_gpu=context.device == "cuda",
            planned_gib=need.device_bytes / 2**30,
            fullest=need.phase,
            snapshot_gib=need.snapshot / 2**30,
        )
