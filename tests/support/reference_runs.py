"""Data sets, cases and worker functions with which test_reference_loop.py runs Patchline.

This is a separate module because workers import it by name. No part is mocked: shards, order, loader, engine,
evaluation and probe are real. Training does not crop, so that the model sees exactly the packed pixels.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import models
from data.images.augment import AugmentConfig
from data.order import Order
from models import ModelConfig
from pipeline import config, train
from pipeline.architecture import model_config, trained_model
from pipeline.identity import code_version
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import DataConfig, ProbeConfig, TrainConfig
from pipeline.worker import Job
from tests.support.reference_loop import Plan
from tests.support.shards import Picture, write_set

CLASSES = 5
SIZE = 16  # px: side of training images, and of the others after their crop
MODEL = {"name": "mu/8", "image_size": SIZE, "classes": CLASSES, "width": 16, "depth": 2, "mlp": 32, "heads": 2}
SHARD_SAMPLES = 20
# The last two sets divide evenly among neither batches nor workers.
SAMPLES = {"train": 60, "shots": 41, "test": 37}
PREPROCESS = f"central_crop({SIZE})"  # for the larger images of the sets "shots" and "test"
PROBE = {"shots": (1, 3), "seeds": (0, 1)}
TIMEOUT_S = 321.0

Images = tuple[np.ndarray, np.ndarray]  # (N, H, W, 3) uint8 and labels (N,)


@dataclass(frozen=True)
class Case:
    """A plan, and the training settings that must not change its result."""

    plan: Plan
    world: int
    zero: int
    batch_size: int = 16
    micro_batch: int = 4
    keeps_weights: bool = True  # starts from given weights instead of random ones from the plan's seed
    changes: dict[str, Any] = field(default_factory=dict)  # of TrainConfig
    masked: tuple[tuple[int, int, int, int], ...] = ()  # samples with weight zero: since, shard, first, stop


ADAM = {"steps": 6, "rate": 2e-3, "weight_decay": 0.5, "warmup_steps": 2, "clip": 0.5}
SGD = {"steps": 6, "rate": 0.05, "optimizer": "sgd", "decay": "cosine", "warmup_steps": 1, "clip": 0.5}
NO_DROPOUT = {"model": {"dropout": 0.0}}  # all else as the weights to start from have it

CASES = {
    "label smoothing": Case(Plan(**ADAM, loss="sigmoid", smoothing=0.1), world=1, zero=0, micro_batch=8),
    "kept head": Case(Plan(**SGD), world=1, zero=0, micro_batch=16, changes=NO_DROPOUT),
    "new head": Case(Plan(**SGD), world=1, zero=1, micro_batch=8, changes={**NO_DROPOUT, "new_head": True}),
    "random weights": Case(Plan(**ADAM, seed=3, end=1e-3), world=1, zero=2, keeps_weights=False),
    "mixup": Case(Plan(**ADAM, mixup=0.4, smoothing=0.2, seed=5), world=2, zero=2),
    "uneven": Case(Plan(**SGD), world=2, zero=1, batch_size=15, changes={"uneven": True}),
    "polyak": Case(Plan(**ADAM, polyak=0.8), world=2, zero=3),
    "masked": Case(Plan(**ADAM, smoothing=0.1), world=2, zero=2, masked=((0, 0, 3, 5), (0, 1, 0, 20), (2, 2, 0, 19))),
    # Two steps, and the first has rate 0: after an update the noise of float32 decides to which of two numbers of
    # bf16 a weight that lies in the middle is rounded.
    "bf16, ZeRO 2": Case(Plan(**{**SGD, "steps": 2}, bf16=True), world=2, zero=2, micro_batch=2),
    "bf16, ZeRO 3": Case(Plan(**{**SGD, "steps": 2}, bf16=True), world=2, zero=3, micro_batch=2),
}
# Its draws of dropout are not repeated: only what it evaluates is compared, on the weights that it ends with.
WITH_DROPOUT = Case(
    Plan(steps=2, rate=0.05, optimizer="sgd"), world=1, zero=0, changes={"model": {**MODEL, "dropout": 0.5}}
)


def make_sets(folder: Path) -> dict[str, Images]:
    """Pack three sets of noisy patterns, one pattern per class; in larger images it fills only the middle."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(CLASSES, 4, 4, 3)).repeat(4, axis=1).repeat(4, axis=2)
    sets: dict[str, Images] = {}
    for name, count in SAMPLES.items():
        labels = rng.integers(CLASSES, size=count)
        middle = 128 + 40 * patterns[labels] + 35 * rng.normal(size=(count, SIZE, SIZE, 3))
        images = middle
        if name != "train":
            images = 128 + 60 * rng.normal(size=(count, 2 * SIZE, 2 * SIZE, 3))
            images[:, SIZE // 2 : -SIZE // 2, SIZE // 2 : -SIZE // 2] = middle
        images = images.clip(0, 255).astype(np.uint8)
        # 127 becomes −1/255, which lies so near the middle between two numbers of bf16 that the last bit of float32
        # decides which one it is rounded to.
        images[images == 127] = 128
        samples = []
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            encoded = cv2.imencode(".png", image[..., ::-1])[1].tobytes()
            samples.append(Picture(f"{number:03d}", encoded, (int(label),), "png"))
        write_set(iter(samples), folder / name, name=name, classes=CLASSES, shard_samples=SHARD_SAMPLES)
        sets[name] = (images, labels)
    return sets


def given_weights(folder: Path) -> nn.Module:
    """Write initial weights with a nonzero head and dropout in their config; return their network."""
    generator = torch.Generator().manual_seed(7)
    network = models.from_config(replace(model_config(MODEL), dropout=0.1), generator)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    models.save_weights(network, folder)
    return network


def train_config(case: Case, sets: Path, init: Path) -> TrainConfig:
    """Convert a case to Patchline's training config."""
    plan = case.plan
    values: dict[str, Any] = {"model": {**MODEL}, **case.changes}
    if case.keeps_weights:
        values["init"] = str(init)
    return TrainConfig(
        data=DataConfig(
            train=str(sets / "train"),
            evaluate=str(sets / "test"),
            preprocess=PREPROCESS,
            augment=AugmentConfig(crop="none", flip=False),
        ),
        probe=ProbeConfig(train=str(sets / "shots"), test=str(sets / "test"), **PROBE),
        optim=OptimConfig(
            name=plan.optimizer,  # type: ignore[arg-type]
            lr=plan.rate,
            weight_decay=plan.weight_decay,
            clip=plan.clip,
            schedule=ScheduleConfig(decay=plan.decay, warmup_steps=plan.warmup_steps, end=plan.end),  # type: ignore[arg-type]
        ),
        loss=plan.loss,  # type: ignore[arg-type]
        label_smoothing=plan.smoothing,
        mixup=plan.mixup,
        polyak=plan.polyak,
        steps=plan.steps,
        seed=plan.seed,
        precision="bf16" if plan.bf16 else "fp32",
        batch_size=case.batch_size,
        micro_batch=case.micro_batch,
        zero=case.zero,
        timeout_s=TIMEOUT_S,
        **values,
    )


def recipe_of(cfg: TrainConfig) -> dict[str, Any]:
    """Return a config as a section of a recipe."""
    section: dict[str, Any] = json.loads(json.dumps(config.plain(cfg)))
    return section


def task_of(case: Case, name: str, sets: Path, init: Path, run: Path) -> dict[str, Any]:
    """Return the task of a worker's `train`, as the driver would create it."""
    cfg = train_config(case, sets, init)
    source: ModelConfig | None = models.load_weights(init)[1] if cfg.init else None
    job = Job(
        run=str(run),
        directory=str(run / name),
        attempt=1,
        key="reference",
        code=code_version(),
        model=models.to_dict(trained_model(cfg, source)),
        train=[str(sets / "train")],
        evaluate=str(sets / "test"),
        init=cfg.init,
        probe_train=str(sets / "shots"),
        probe_test=str(sets / "test"),
    )
    job.stop_file.parent.mkdir(parents=True)
    # The claim of the attempt, which the driver writes.
    (run / "attempts").mkdir(parents=True, exist_ok=True)
    (run / "attempts" / "000001.json").touch()
    hooks = {"pipeline.extras.replays.spikes:Masking": {"masked": case.masked}} if case.masked else {}
    return {"config": config.plain(cfg), "job": asdict(job), "hooks": hooks}


def train_all(task: dict[str, Any]) -> list[float]:
    """Run `pipeline.train.train` for each case in turn; return the timeouts of all process groups at the end."""
    destroy = dist.destroy_process_group
    # The next case adopts the process group, as a worker of Ray Train adopts Ray's.
    dist.destroy_process_group = lambda: None  # type: ignore[assignment]
    for case in task["cases"]:
        train.train(case)
    timeouts = set()
    for group in dist.distributed_c10d._world.pg_map:
        options = group._get_backend(torch.device("cpu")).options
        timeouts.add(options._timeout.total_seconds())
    destroy()
    return sorted(timeouts)


def batches_of(case: Case) -> list[list[np.ndarray]]:
    """Return, for every step, the training rows of each micro-batch, worker by worker.

    The order of samples comes from data/order.py, which tests/test_data/test_order.py tests; the division of a batch
    is computed here independently.
    """
    shards = [SHARD_SAMPLES] * (SAMPLES["train"] // SHARD_SAMPLES)
    order = Order(shards, seed=case.plan.seed, batch_size=case.batch_size)
    batches = []
    for step in range(case.plan.steps):
        ids = order.batch(step)
        rows = ids.shard * SHARD_SAMPLES + ids.sample
        left_out = []
        for first_step, shard, *samples in case.masked:
            if step >= first_step:
                left_out += [shard * SHARD_SAMPLES + sample for sample in range(*samples)]
        kept = [part[~np.isin(part, left_out)] for part in micro_batches(rows, case)]
        batches.append([part for part in kept if len(part)])
    return batches


def micro_batches(rows: np.ndarray, case: Case) -> list[np.ndarray]:
    """Divide a batch's slots among workers, then among micro-batches; sizes of parts differ by at most one."""
    largest_share = -(-len(rows) // case.world)
    count = -(-largest_share // case.micro_batch)
    parts = []
    for share in cut(rows, case.world):
        parts += cut(share, count)
    return parts


def cut(rows: np.ndarray, parts: int) -> Sequence[np.ndarray]:
    """Cut rows into parts, rounding every edge down."""
    edges = [len(rows) * part // parts for part in range(parts + 1)]
    return [rows[first:stop] for first, stop in pairwise(edges)]
