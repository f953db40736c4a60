"""Select the training settings for `patchline new`: model, batch size, steps and augmentation for this machine.

1. `this_machine` counts CPU cores and GPUs.
2. `choose` measures models with `images_per_s`, and selects the largest one that finishes enough passes in time.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
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
from jobs.extras.new.finetuning import FineTuning, image_size_of, settings_of
from jobs.recipe.key import model_at
from jobs.terminal import echo
from models import ModelConfig, vit
from models.configs import MaskedConfig
from pipeline.architecture import model_config
from pipeline.config import build
from pipeline.evaluation import any_weights
from pipeline.extras.plan.memory import memory_need
from pipeline.extras.plan.memory_traces import TraceFailed
from pipeline.extras.recorded_origin import recorded_form
from pipeline.process_group import memory_free
from pipeline.training_config import TrainConfig
from pipeline.values import counted

MAX_WORKERS = 8  # maximum on CPUs; each worker uses its share of the cores
MINUTES_ON_CPU = 10.0
MINUTES_ON_GPU = 60.0
MIN_STEPS = 10
MAX_PASSES = 300  # maximum passes over the images, as in AugReg's longest training on ImageNet-1k
FEW_PASSES = 30  # a larger model is selected if there is time for this number of passes (AugReg's shortest training)
# Minimum number of passes for RandAugment: AugReg's rows on ImageNet-1k have 300 passes. After 37 passes over 9,000
# images of CIFAR-10, RandAugment cost ten points (benchmarks/README.md, "The first hour").
AUGMENTED_PASSES = 100
FEW_IMAGES = 200_000  # for small data sets: images seen that justify a larger model, instead of FEW_PASSES
SHARE_OF_PEAK = 0.7  # speed of a complete step relative to only a forward and backward pass
SHARE_OF_MEMORY = 0.8
LARGE = 5_000_000  # images; a data set of at least this size is treated like ImageNet-21k
MIN_IMAGES_FOR_B = 1_000_000  # images; smaller data sets do not justify ViT-B
MEASURED_S = 0.5  # duration of a speed measurement
MAX_MEASURED_FLOPS = 2e11  # maximum FLOPs of one measured pass
PATCHES = 8  # minimum number of patches along each side
# Pixels; in smaller images, a crop of 5 % of the area shows almost nothing, and the original RandAugment shifts by 10 ×
# magnitude pixels. AugReg's levels, in proportion to images of 32 pixels, cost two to three points of accuracy
# (benchmarks/README.md, "RandAugment of small images").
SMALL = 128
# Smallest first: name, changes to the row in the table of model sizes, name in AugReg's tables.
SIZES: tuple[tuple[str, dict[str, int], str], ...] = (
    ("Ti", {"width": 96, "depth": 4, "mlp": 384}, "tiny"),
    ("Ti", {"depth": 6}, "tiny"),
    ("Ti", {}, "Ti"),
    ("S", {}, "S"),
    ("B", {}, "B"),
)
# Steiner et al. 2022, "How to train your ViT?": (number of RandAugment layers, magnitude, mixup).
AUGREG = {
    "none": (0, 0, 0.0),
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
}
LEVELS_I21K = {"tiny": "none", "Ti": "none", "S": "light1", "B": "light2"}  # big_vision configs/vit_i21k.py
LEVELS_I1K = {"tiny": "light1", "Ti": "light1", "S": "medium1", "B": "medium2"}  # big_vision configs/vit_i1k.py
# Minimum number of images in the data set → batch size; → maximum number of images seen by fine-tuning. The latter are
# BiT-HyperRule's steps of 512 images (Kolesnikov et al. 2020).
GPU_BATCHES = ((500_000, 1024), (50_000, 512), (0, 256))
CPU_BATCHES = ((5000, 128), (0, 64))
MAX_FINETUNING_IMAGES = ((500_000, 512 * 20_000), (20_000, 512 * 10_000), (0, 512 * 500))


@dataclass(frozen=True)
class Machine:
    """The hardware available for training."""

    name: str
    cores: int
    gpus: int
    workers: int
    memory: int  # bytes that a worker may use, of its GPU or of its share of the machine's memory
    precision: str


class ModelCandidate(NamedTuple):
    """A candidate model: its section in the recipe, its config, and its name in AugReg's tables."""

    section: dict[str, Any]
    model: ModelConfig
    row: str


@dataclass(frozen=True)
class TrainingChoice:
    """The selected model, augmentation, batch size and training length."""

    model: ModelConfig
    section: dict[str, Any]  # the stage's `model:`
    augment: dict[str, Any]
    reasons: list[str]  # reasons for the augmentation
    mixup: float
    batch_size: int
    micro_batch: int
    steps: int
    rate: float  # images per second
    is_over_time: bool  # whether the minimum number of steps exceeds the time limit
    init: str | None  # weights to fine-tune
    finetuning: FineTuning | None = None  # how to fine-tune them
    preprocess: str | None = None  # evaluation ops recorded with the weights, for the model's size


def this_machine() -> Machine:
    """Return the hardware of this machine."""
    core_count = cores()
    gpus = torch.cuda.device_count()
    if gpus:
        memory = torch.cuda.mem_get_info()[1]
        name = f"{gpus} × {torch.cuda.get_device_name()}"
        return Machine(name, core_count, gpus, gpus, int(SHARE_OF_MEMORY * memory), "bf16")
    workers = min(core_count, MAX_WORKERS)
    memory = int(SHARE_OF_MEMORY * memory_free() / workers)
    return Machine(counted(core_count, "core"), core_count, 0, workers, memory, "fp32")


def choose(sets: Sets, machine: Machine, budget_s: float, *, name: str | None, init: str | None) -> TrainingChoice:
    """Select model, augmentation and length for training from random weights, or for fine-tuning the weights `init`.

    `name` fixes the model. Fine-tuning uses the settings published for weights of their kind (finetuning.py).
    """
    train = sets.train
    # 1. The candidates, smallest first; all have the same image size.
    finetuning: FineTuning | None = None
    preprocess: str | None = None
    if init is None:
        candidates = candidates_for(sets, machine, name)
    else:
        source = model_at(init)
        assert source is not None, "`new` has checked that the folder contains weights"
        if isinstance(source, MaskedConfig):
            source = source.vit
        size = image_size_of(source)
        model = replace(source.with_new_head(), classes=train.classes, image_size=size)
        section: dict[str, Any] = {"classes": train.classes}
        if size != source.image_size:
            section["image_size"] = size[0]
        candidates = [ModelCandidate(section, model, "")]
        finetuning = settings_of(source, recorded_form(init))
        recorded = any_weights.recorded_preprocessing(init)
        if recorded is not None:
            # Ops of an import fit any size; those of a stage fit only its own.
            with suppress(ValueError):
                preprocess = recorded.at_size(size).ops
    image_size = min(candidates[0].model.image_size)
    seen = f"the model sees images of {image_size} px"

    # 2. Crops and flips. Letters and digits must not be mirrored; classes named by ids can be anything.
    crop: dict[str, Any] = {}
    reasons = []
    if image_size < SMALL:
        crop["min_area"] = 0.3
        reasons.append(f"crops of at least 30 % of the area, because {seen}")
    if train.classes and not train.are_ids and max(map(len, train.class_counts)) == 1:
        crop["flip"] = False
        reasons.append("no flips, because letters must not be mirrored")

    # 3. The largest model that can train on enough images in time.
    enough = min(MAX_PASSES * sets.images, max(FEW_IMAGES, FEW_PASSES * sets.images))
    decode_s = decoding_seconds(train, image_size, AugmentConfig(**crop))
    chosen = candidates[0]
    rate = images_per_s(chosen.model, machine, decode_s)
    for candidate in candidates[1:]:
        candidate_rate = images_per_s(candidate.model, machine, decode_s)
        if candidate_rate * budget_s < enough:
            break
        chosen = candidate
        rate = candidate_rate

    # 4. The length.
    most = MAX_PASSES * sets.images
    optimizer = "adam"
    if finetuning is not None:
        most = min(most, by_images(sets.images, MAX_FINETUNING_IMAGES))
        optimizer = finetuning.optimizer
    batch_size, micro_batch = batches(sets.images, chosen.model, machine, optimizer)
    steps = max(MIN_STEPS, round(min(rate * budget_s, most) / batch_size))
    unit = 10 ** max(0, len(str(steps)) - 2)  # round down to two significant digits
    steps = max(MIN_STEPS, steps // unit * unit)

    # 5. The augmentation. AugReg's levels apply to supervised training from random weights.
    level = "none"
    if init is None and sets.images >= LARGE:
        level = LEVELS_I21K[chosen.row]
    elif init is None and train.classes and steps * batch_size >= AUGMENTED_PASSES * sets.images:
        level = LEVELS_I1K[chosen.row]
    layers, magnitude, mixup = AUGREG[level]
    if layers and image_size < SMALL:
        reasons.insert(0, f"no RandAugment, because {seen}, and AugReg's levels lower the accuracy of such images")
    elif layers:
        crop |= {"randaug_layers": layers, "randaug_magnitude": magnitude}
        reasons.insert(0, f"level {level} of AugReg (Steiner et al. 2022)")
    elif init is None:
        reasons.insert(0, "no RandAugment, which needs more passes (Steiner et al. 2022)")
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
        is_over_time=steps == MIN_STEPS and steps * batch_size > 1.5 * rate * budget_s,
        init=init,
        finetuning=finetuning,
        preprocess=preprocess,
    )


def candidates_for(sets: Sets, machine: Machine, name: str | None) -> list[ModelCandidate]:
    """Return the candidate models for images of this size, or only the model `name` if given."""
    train = sets.train
    side = train.shorter_side
    # Tiny images get small patches. On CPUs, large images are downscaled, because training would take days otherwise.
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
            if size != "B" or sets.images >= MIN_IMAGES_FOR_B:
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
    """Return the value in the first row of `table` whose minimum number of images is reached."""
    return next(entry for least, entry in table if images >= least)


def batches(images: int, model: ModelConfig, machine: Machine, optimizer: str) -> tuple[int, int]:
    """Return the batch size, and a micro-batch size that fits into a worker's memory."""
    workers = machine.workers
    if machine.gpus:
        batch_size = by_images(images, GPU_BATCHES)
        most_at_once = 256
    else:
        batch_size = by_images(images, CPU_BATCHES)
        most_at_once = 64
    # For small data sets, reduce the batch size to get several steps per pass.
    while batch_size > 8 and batch_size * 4 > images:
        batch_size //= 2
    share = max(1, batch_size // workers)
    micro_batch = min(share, most_at_once)

    # A small model on small images always fits; for others, trace a step like `plan`, which takes a few seconds.
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
        echo("estimating the memory of a training step …")
        try:
            cfg = build(TrainConfig, values, "")
            while micro_batch > 1:
                cfg = replace(cfg, micro_batch=micro_batch, batch_size=micro_batch * workers)
                if memory_need(cfg, model, workers, is_gpu=machine.gpus > 0).device_bytes <= machine.memory:
                    break
                micro_batch //= 2
        except TraceFailed as error:
            echo(f"  cannot estimate the memory: {error}")
    return share // micro_batch * micro_batch * workers, micro_batch


# ------------------------------------------------------------------------------------------------ speed


def images_per_s(model: ModelConfig, machine: Machine, decode_s: float) -> float:
    """Measure the training speed of this machine in images/s, including decoding (`decode_s` per image)."""
    if isinstance(model, MaskedConfig):
        model = model.vit
    device = torch.device("cpu")
    dtype = torch.float32
    clock = time.process_time
    # Use few images for a large model, which takes several seconds on one core.
    batch_size = max(1, min(8, int(MAX_MEASURED_FLOPS / models.training_flops(model, 1))))
    if machine.gpus:
        device = torch.device("cuda")
        dtype = torch.bfloat16
        clock = time.perf_counter
        batch_size = 64
    # Measure the CPU time of one thread, which is independent of other running programs.
    torch.set_num_threads(1)
    module = models.from_config(model).to(device, dtype)
    images = torch.rand(batch_size, 3, *model.image_size, device=device, dtype=dtype)
    began = clock()
    passes = -1  # the first pass is a warm-up and is not counted
    while passes < 1 or clock() - began < MEASURED_S:
        module(images).float().square().mean().backward()
        if machine.gpus:
            torch.cuda.synchronize()
        if passes < 0:
            began = clock()
        passes += 1
    compute_s = (clock() - began) / passes / batch_size
    # With GPUs, decoding runs in parallel with training; without GPUs, both share the cores.
    if machine.gpus:
        return SHARE_OF_PEAK / max(compute_s / machine.gpus, decode_s / machine.cores)
    return SHARE_OF_PEAK * machine.cores / (compute_s + decode_s)


def decoding_seconds(train: FoundSet, image_size: int, cfg: AugmentConfig) -> float:
    """Measure the time to decode and crop an image on one core, in seconds."""
    out = np.empty((image_size, image_size, 3), np.uint8)
    began = time.process_time()
    for number, encoded in enumerate(train.examples):
        try:
            augment(encoded, image_size, Draws(number), cfg, out)
        except BadImage:
            continue
    return (time.process_time() - began) / max(len(train.examples), 1)
