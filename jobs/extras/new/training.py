"""How `patchline new` trains on images: which model, batch, steps and augmentation, on what this machine has.

1. `this_machine` counts cores and GPUs.
2. `choose` takes the largest model whose passes over the images fit the time: `images_per_s` measures each.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

import models
from data.draws import Draws
from data.extras.survey.survey import FoundSet, Sets
from data.images.augment import AugmentConfig, augment
from data.images.decode import BadImage
from jobs.cluster_config import cores
from jobs.recipe.key import model_at
from jobs.terminal import echo
from models import ModelConfig, vit
from models.masked import MaskedConfig
from pipeline.architecture import model_config
from pipeline.config import build
from pipeline.extras.plan.memory import memory_need
from pipeline.extras.plan.memory_traces import TraceFailed
from pipeline.process_group import memory_free
from pipeline.training_config import TrainConfig
from pipeline.values import counted

MOST_WORKERS = 8  # on CPUs; each computes with its share of the cores
MINUTES_ON_CPU = 10.0
MINUTES_ON_GPU = 60.0
LEAST_STEPS = 10
MOST_PASSES = 300  # over the images, as AugReg's longest training on ImageNet-1k
FEW_PASSES = 30  # a larger model is chosen where the time is enough for as many (AugReg's shortest)
# From which on RandAugment is taken: AugReg's rows on ImageNet-1k are of 300 passes. At 37 passes over 9,000 images of
# CIFAR-10 it cost ten points (benchmarks/README.md, "The first hour").
AUGMENTED_PASSES = 100
FEW_IMAGES = 200_000  # or for as many images, where a set is small
SHARE_OF_PEAK = 0.7  # of the images/s of one forward and backward pass, that a step with all else reaches
SHARE_OF_MEMORY = 0.8
LARGE = 5_000_000  # images, from which on a set is treated as ImageNet-21k
FOR_B = 1_000_000  # images, from which on ViT-B is worth its time
MEASURED_S = 0.5  # how long a model is tried
FLOPS_TRIED = 2e11  # of one pass, at the most
PATCHES = 8  # of a side, at the least
SMALL = 128  # px, below which a crop of 5 % of the area is a smudge
# From the smallest: name, what differs from the table of sizes, and what AugReg's rows call it.
SIZES: tuple[tuple[str, dict[str, int], str], ...] = (
    ("Ti", {"width": 96, "depth": 4, "mlp": 384}, "tiny"),
    ("Ti", {"depth": 6}, "tiny"),
    ("Ti", {}, "Ti"),
    ("S", {}, "S"),
    ("B", {}, "B"),
)
# Steiner et al. 2022, "How to train your ViT?": (RandAugment's layers, its magnitude, mixup).
AUGREG = {
    "none": (0, 0, 0.0),
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
}
LEVELS_I21K = {"tiny": "none", "Ti": "none", "S": "light1", "B": "light2"}  # big_vision configs/vit_i21k.py
LEVELS_I1K = {"tiny": "light1", "Ti": "light1", "S": "medium1", "B": "medium2"}  # big_vision configs/vit_i1k.py
# From so many images on: images of a batch; images that fine-tuning sees at most, which are BiT-HyperRule's steps of
# 512 (Kolesnikov et al. 2020).
GPU_BATCHES = ((500_000, 1024), (50_000, 512), (0, 256))
CPU_BATCHES = ((5000, 128), (0, 64))
LONGEST_FINETUNING = ((500_000, 512 * 20_000), (20_000, 512 * 10_000), (0, 512 * 500))


@dataclass(frozen=True)
class Machine:
    """What this machine has to train with."""

    name: str
    cores: int
    gpus: int
    workers: int
    memory: int  # bytes that a worker may fill: of its GPU, or its share of the machine
    precision: str


class ModelCandidate(NamedTuple):
    """A model that may be trained: as a recipe writes it, and what AugReg's rows call it."""

    section: dict[str, Any]
    model: ModelConfig
    row: str


@dataclass(frozen=True)
class TrainingChoice:
    """How the images are trained on."""

    model: ModelConfig
    section: dict[str, Any]  # the stage's `model:`
    augment: dict[str, Any]
    reasons: list[str]  # for this augmentation
    mixup: float
    batch_size: int
    micro_batch: int
    steps: int
    rate: float  # images a second
    is_over_time: bool  # the least number of steps takes longer than was asked for
    init: str | None  # weights that are fine-tuned


def this_machine() -> Machine:
    """Return what there is to train with."""
    here = cores()
    gpus = torch.cuda.device_count()
    if gpus:
        memory = torch.cuda.mem_get_info()[1]
        name = f"{gpus} × {torch.cuda.get_device_name()}"
        return Machine(name, here, gpus, gpus, int(SHARE_OF_MEMORY * memory), "bf16")
    workers = min(here, MOST_WORKERS)
    memory = int(SHARE_OF_MEMORY * memory_free() / workers)
    return Machine(counted(here, "core"), here, 0, workers, memory, "fp32")


def choose(sets: Sets, machine: Machine, budget_s: float, *, name: str | None, init: str | None) -> TrainingChoice:
    """Choose how the images are trained on: from random weights, a model of this `name`, or weights to fine-tune.

    Weights are fine-tuned with SGD, as in the paper's table 4.
    """
    train = sets.train
    # 1. The models to choose from, the smallest first; all have one image size.
    if init is None:
        candidates = candidates_for(sets, machine, name)
    else:
        source = model_at(init)
        assert source is not None, "`new` refuses a folder without weights"
        if isinstance(source, MaskedConfig):
            source = source.vit
        model = replace(source.with_new_head(), classes=train.classes)
        candidates = [ModelCandidate({"classes": train.classes}, model, "")]
    image_size = min(candidates[0].model.image_size)

    # 2. How they are cropped. Letters and digits have no mirror image; ids may be of anything.
    crop: dict[str, Any] = {}
    reasons = []
    if image_size < SMALL:
        crop["min_area"] = 0.3
        reasons.append("small images: crops of 30 % of the area or more")
    if train.classes and not train.are_ids and max(map(len, train.class_counts)) == 1:
        crop["flip"] = False
        reasons.append("letters have no mirror image")

    # 3. The largest model whose passes fit the time.
    enough = min(MOST_PASSES * sets.images, max(FEW_IMAGES, FEW_PASSES * sets.images))
    decode_s = decoding_seconds(train, image_size, AugmentConfig(**crop))
    chosen = candidates[0]
    rate = images_per_s(chosen.model, machine, decode_s)
    for candidate in candidates[1:]:
        its_rate = images_per_s(candidate.model, machine, decode_s)
        if its_rate * budget_s < enough:
            break
        chosen = candidate
        rate = its_rate

    # 4. How long.
    most = MOST_PASSES * sets.images
    optimizer = "adam"
    if init is not None:
        most = min(most, by_images(sets.images, LONGEST_FINETUNING))
        optimizer = "sgd"
    batch_size, micro_batch = batches(sets.images, chosen.model, machine, optimizer)
    steps = max(LEAST_STEPS, round(min(rate * budget_s, most) / batch_size))
    unit = 10 ** max(0, len(str(steps)) - 2)  # two digits are read at once
    steps = max(LEAST_STEPS, steps // unit * unit)

    # 5. With which augmentation: AugReg's, which is of training from random weights, on labels.
    level = "none"
    if init is None and sets.images >= LARGE:
        level = LEVELS_I21K[chosen.row]
    elif init is None and train.classes and steps * batch_size >= AUGMENTED_PASSES * sets.images:
        level = LEVELS_I1K[chosen.row]
    layers, magnitude, mixup = AUGREG[level]
    if layers:
        crop |= {"randaug_layers": layers, "randaug_magnitude": magnitude}
        reasons.insert(0, f"level {level} of AugReg (Steiner et al. 2022)")
    elif init is None:
        reasons.insert(0, "RandAugment needs more passes (Steiner et al. 2022)")
    return TrainingChoice(
        model=chosen.model,
        section=chosen.section,
        augment=crop,
        reasons=reasons,
        mixup=mixup,
        batch_size=batch_size,
        micro_batch=micro_batch,
        steps=steps,
        rate=rate,
        is_over_time=steps == LEAST_STEPS and steps * batch_size > 1.5 * rate * budget_s,
        init=init,
    )


def candidates_for(sets: Sets, machine: Machine, name: str | None) -> list[ModelCandidate]:
    """Return the models that images of this size may be trained with from random weights, or that of a name alone."""
    train = sets.train
    side = train.shorter_side
    # Images of a few pixels have small patches; on CPUs photographs are made small too, or nothing would end today.
    if name is not None:
        named = model_config({"name": name, "image_size": 224, "classes": train.classes})
        stride = named.stride[0] if isinstance(named, vit.ViTConfig) else 32
        image_size = max(PATCHES * stride, min(224, side) // stride * stride)
    elif side < 40:
        image_size = max(16, side // 4 * 4)
        patch = 4
    elif side < SMALL or not machine.gpus:
        image_size = 64
        patch = 8
    else:
        image_size = 224
        patch = 16

    rows: list[tuple[dict[str, Any], str]] = []
    if name is not None:
        size = name.partition("/")[0]
        rows.append(({"name": name}, size if size in LEVELS_I1K else "S"))
    else:
        for size, changes, row in SIZES:
            if size != "B" or sets.images >= FOR_B:
                rows.append(({"name": f"{size}/{patch}", **changes}, row))
    candidates = []
    for section, row in rows:
        section["image_size"] = image_size
        if train.classes:
            section["classes"] = train.classes
        else:
            section["name"] = f"Masked-{section['name'].removeprefix('Masked-')}"
        candidates.append(ModelCandidate(section, model_config(section), row))
    return candidates


def by_images(images: int, table: Sequence[tuple[int, int]]) -> int:
    """Return the entry of the first row of a table that asks for no more images."""
    return next(entry for least, entry in table if images >= least)


def batches(images: int, model: ModelConfig, machine: Machine, optimizer: str) -> tuple[int, int]:
    """Return the batch, and the part of it that a worker takes at a time and that its memory holds."""
    workers = machine.workers
    if machine.gpus:
        batch_size = by_images(images, GPU_BATCHES)
        most_at_once = 256
    else:
        batch_size = by_images(images, CPU_BATCHES)
        most_at_once = 64
    # A small set has several steps a pass too.
    while batch_size > 8 and batch_size * 4 > images:
        batch_size //= 2
    share = max(1, batch_size // workers)
    micro_batch = min(share, most_at_once)

    # A small model on small images fits anywhere; another is traced, which takes seconds, as `plan` does.
    values: dict[str, Any] = {
        "steps": 1,
        "batch_size": micro_batch * workers,
        "micro_batch": micro_batch,
        "precision": machine.precision,
        "objective": "classification",
        "optim": {"name": optimizer},
    }
    if isinstance(model, MaskedConfig):
        values["objective"] = "masked"
    is_small = False
    if isinstance(model, vit.ViTConfig):
        activations = micro_batch * model.depth * model.width * math.prod(model.grid)
        is_small = 16 * models.parameters_of(model) + 200 * activations < machine.memory
    if not is_small:
        echo("tracing a step for what it needs of memory …")
        try:
            cfg = build(TrainConfig, values, "")
            while micro_batch > 1:
                cfg = replace(cfg, micro_batch=micro_batch, batch_size=micro_batch * workers)
                if memory_need(cfg, model, workers, is_gpu=machine.gpus > 0).device_bytes <= machine.memory:
                    break
                micro_batch //= 2
        except TraceFailed as error:
            echo(f"  not known: {error}")
    return share // micro_batch * micro_batch * workers, micro_batch


# ------------------------------------------------------------------------------------------------ how fast


def images_per_s(model: ModelConfig, machine: Machine, decode_s: float) -> float:
    """Measure how many images this machine trains on in a second: forward and backward, and decoding."""
    if isinstance(model, MaskedConfig):
        model = model.vit
    device = torch.device("cpu")
    dtype = torch.float32
    clock = time.process_time
    # Of a large model few images, which take a core some seconds.
    batch_size = max(1, min(8, int(FLOPS_TRIED / models.training_flops(model, 1))))
    if machine.gpus:
        device = torch.device("cuda")
        dtype = torch.bfloat16
        clock = time.perf_counter
        batch_size = 64
    # One thread and its CPU time: other programs that run now say nothing of how long the training will take.
    torch.set_num_threads(1)
    module = models.from_config(model).to(device, dtype)
    images = torch.rand(batch_size, 3, *model.image_size, device=device, dtype=dtype)
    began = clock()
    passes = -1  # the first allocates, and is not counted
    while passes < 1 or clock() - began < MEASURED_S:
        module(images).float().square().mean().backward()
        if machine.gpus:
            torch.cuda.synchronize()
        if passes < 0:
            began = clock()
        passes += 1
    compute_s = (clock() - began) / passes / batch_size
    # GPUs compute while cores decode; a core does the one or the other.
    if machine.gpus:
        return SHARE_OF_PEAK / max(compute_s / machine.gpus, decode_s / machine.cores)
    return SHARE_OF_PEAK * machine.cores / (compute_s + decode_s)


def decoding_seconds(train: FoundSet, image_size: int, cfg: AugmentConfig) -> float:
    """Measure how long a core decodes and crops an image."""
    out = np.empty((image_size, image_size, 3), np.uint8)
    began = time.process_time()
    for number, encoded in enumerate(train.examples):
        try:
            augment(encoded, image_size, Draws(number), cfg, out)
        except BadImage:
            continue
    return (time.process_time() - began) / max(len(train.examples), 1)
