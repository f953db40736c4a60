"""The objectives that a stage may learn: the summed loss of a micro-batch, for each value of `objective` in a recipe.

In:  the worker's parts, the step, images (b, 3, S, S) in [−1, 1], and the loader's Batch, both on the device
Out: a scalar tensor, the loss summed over the b samples; the loop weights it and calls backward

Everything that is drawn (mixup, corruption, dropout, patches that are left out) depends on the seed, the step and the
samples alone: not on the rank, the world size, or where the run started.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import models
from data.loader import Batch
from pipeline import config
from pipeline.optimization import LOSSES, dense_targets, mixup
from pipeline.start import Worker
from pipeline.token_dropping import kept_patches, phase_at, phases

# b samples of a micro-batch, S image side

# A purpose keeps one kind of draw apart from another that has the same seed, step and samples; masked prediction
# has none.
DROPOUT = 1

Objective = Callable[[Worker, int, Tensor, Batch], Tensor]


def classification_loss(worker: Worker, step: int, images: Tensor, batch: Batch) -> Tensor:
    """Return the summed loss against the labels, smoothed and mixed as the recipe says."""
    cfg = worker.cfg
    targets = dense_targets(batch.labels, worker.model_config.classes, cfg.label_smoothing)
    # Seeded by the step alone, so that all micro-batches of a step blend with the same share; the partner is the
    # neighbour within the micro-batch, as in the original it is the neighbour on the same device.
    if cfg.mixup:
        images, targets = mixup(images, targets, cfg.mixup, (cfg.seed, step))
    inputs = [images, *patches_to_keep(worker, step, batch)]
    logits = worker.engine.forward(*inputs)
    # A sum, not a mean: where workers own one sample more or less, a mean of means would weight samples unequally.
    return LOSSES[cfg.loss](logits, targets).sum()


def patches_to_keep(worker: Worker, step: int, batch: Batch) -> list[Tensor]:
    """Return the patches (b, K) that the step keeps of every image, on the device; nothing where it keeps all."""
    phase = phase_at(step, phases(worker.cfg.thinning, worker.steps, worker.model_config))
    if phase.kept is None:
        return []
    kept = kept_patches(worker.cfg.seed, step, batch.ids, phase.patches, phase.kept)
    if worker.device.type == "cuda":
        kept = kept.pin_memory()  # else the copy would hold up the host
    return [kept.to(worker.device, non_blocking=True)]


def masked_loss(worker: Worker, step: int, images: Tensor, batch: Batch) -> Tensor:
    """Return the summed loss of masked patch prediction.

    What is corrupted depends on the step and on the micro-batch's samples, so it is the same at every world size that
    cuts the batch into the same micro-batches.
    """
    generator = torch.Generator(worker.device).manual_seed(seed_of_micro_batch(worker.cfg.seed, step, batch.ids))
    summed_loss, _ = models.masked.objective(worker.engine.forward, images, generator)
    return summed_loss


OBJECTIVES: dict[str, Objective] = {
    "classification": classification_loss,
    "masked": masked_loss,
}


def seed_of_micro_batch(seed: int, step: int, ids: Tensor, *purpose: int) -> int:
    """Derive the seed of a micro-batch's draws from the recipe's seed, the step, its sample ids and the purpose."""
    # 15 hex digits are 60 bits, which fit the 64-bit seeds of torch's generators.
    return int(config.digest((seed, step, *ids.flatten().tolist(), *purpose))[:15], 16)
