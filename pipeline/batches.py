"""Feeds a worker's micro-batches from the loader to the model, and computes their loss.

1. `planned_ids` returns the samples of a step's global batch and marks those that a hook masks.
2. `micro_batches` iterates over this worker's micro-batches, starting at a given step. The images are on the worker's
   device and have the size set for the step's phase. A stop request interrupts the wait for the first batch.
3. `next_batch` returns the next micro-batch, and reports to the driver which shard it is waiting for.
4. `begin_forward` seeds the random draws of the forward pass and converts the images to floats.
5. One of OBJECTIVES, chosen by the recipe's `objective`, returns the loss summed over the micro-batch; the loop weights
   the loss and calls backward.

In:  the worker's part of the sample order, decoded by `data.loader`: Batch, images (b, 3, S, S) uint8
Out: the same Batch on the device, images (b, 3, S, S) in [−1, 1] in the model's data type, and a scalar loss

All random draws (mixup, corruption, dropout, kept patches) depend only on the seed, the step and the samples, and not
on the rank, the world size, or the step that the run started from.

A masked sample is excluded from training and changes nothing else:
1. It is read and decoded in its slot, so every other sample keeps its row, augmentation and random draws.
2. Its pixels become grey and its labels are removed, so that nothing reaches another sample through mixup, or a
   gradient as NaN. Its loss has weight 0.
3. A step's loss and gradient are means over the planned, unmasked samples of the global batch: the same at any world
   size. If all samples are masked, the gradient is 0 and the step still counts.
4. The ledger counts a masked sample n as −1 − n, so equal ledgers still mean equal data.
Whether a row is masked depends on the sample that it actually holds: the replacement of a bad sample may be masked, and
the replacement of a masked sample may be unmasked.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from data.errors import Preempted
from data.loader import Batch, TrainLoader, prefetched_to_device
from data.order import Ids
from models.catalog import normalise
from pipeline import config
from pipeline.hooks import masked_by
from pipeline.losses import LOSSES, dense_targets, mixup
from pipeline.training_config import phase_at
from pipeline.training_data import training_loader

if TYPE_CHECKING:
    from pipeline.start import Worker

LOG_EVERY_S = 20.0  # while waiting for the first batch
STOP_POLL_S = 0.2  # between checks for a stop request while waiting for the first batch
# The purpose separates draws with the same seed, step and samples. Masked prediction has no purpose number;
# token_dropping.PATCH_DROPOUT is 2.
DROPOUT = 1
GREY = 128  # pixel value out of 255; nearly 0 after normalisation

# b: samples per micro-batch, B: samples per global batch, S: side of an image in pixels


def planned_ids(worker: "Worker", step: int) -> Ids:
    """Return the sample ids of a step's global batch as the ledger counts them: a masked sample n becomes −1 − n."""
    planned = worker.data.order.batch(step)
    masked = masked_by(worker.hooks, step, planned.shard, planned.sample)
    if masked is None:
        return planned
    return planned._replace(sample=np.where(masked, ~planned.sample, planned.sample))


def samples_in_mean(planned: Ids) -> int:
    """Return the number of unmasked samples, over which a step's loss is averaged; 1 if all samples are masked."""
    return max(int((planned.sample >= 0).sum()), 1)


def micro_batches(worker: "Worker", start_step: int) -> Iterator[Batch]:
    """Iterate over this worker's micro-batches, starting at `start_step`, with their tensors on the worker's device.

    The images have the size set for each step's phase.
    """
    cfg = worker.cfg
    data = worker.data
    for phase in data.phases:
        first_step = max(start_step, phase.steps.start)
        if first_step >= phase.steps.stop:
            continue
        # A loader prefetches images of a single size, so each phase needs its own loader.
        loader = training_loader(
            cfg,
            data.index,
            data.order,
            image_size=phase.image_size,
            slots=data.arithmetic.slots(worker.group.rank),
            start_step=first_step,
            micro_batch=cfg.micro_batch,
            accumulation=data.arithmetic.accumulation,
            processes=cfg.data.processes,
        )
        is_start = first_step == start_step
        # When a later phase begins, some steps are uncommitted; a stop request is then handled after the next step,
        # which commits them.
        batches = wait_for_first_batch(worker, loader) if is_start else iter(loader)
        with closing(batches):
            count = (phase.steps.stop - first_step) * data.arithmetic.accumulation
            yield from prefetched_to_device(islice(batches, count), worker.group.device)


def wait_for_first_batch(worker: "Worker", loader: TrainLoader) -> Generator[Batch]:
    """Iterate over the loader's batches; a stop request interrupts the wait for the first batch.

    With a cold cache, this wait can take minutes.

    Call this only at the start of the loop, when all steps are committed and each worker may stop independently.
    Raises Preempted in the waiting worker.
    """
    batches = iter(loader)
    answers: queue.SimpleQueue[Batch | Exception] = queue.SimpleQueue()

    def fetch() -> None:
        try:
            if worker.group.device.type == "cuda":  # the current GPU is a per-thread setting
                torch.cuda.set_device(worker.group.device)
            answers.put(next(batches))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=fetch, name="first batch", daemon=True).start()
    first = None
    logged_at = time.monotonic()
    while first is None:
        with suppress(queue.Empty):
            first = answers.get(timeout=STOP_POLL_S)
        if first is None and time.monotonic() - logged_at > LOG_EVERY_S:
            logged_at = time.monotonic()
            loader.log_wait(worker.group.telemetry.log)
        # Every worker checks the stop file, because rank 0 may already be waiting for the others' gradients.
        if first is None and worker.stop.is_requested_on_node():
            loader.stop()
            raise Preempted("stopped while waiting for the first batch; run the same command again to resume")
    if isinstance(first, Exception):
        raise first
    # Drop the reference: a live batch occupies a slot of the loader's decoding buffer.
    ready = [first]
    del first
    yield ready.pop()
    yield from batches


def next_batch(worker: "Worker", batches: Iterator[Batch], step: int, planned: Ids) -> Batch:
    """Return the next micro-batch of a step; `planned` holds the sample ids of the step's global batch."""
    # Report the shard of this worker's first sample to the driver, which shows it if the wait is long.
    first_slot = worker.data.arithmetic.slots(worker.group.rank).start
    worker.group.phases.enter("data", step, worker.data.index.shards[planned.shard[first_slot]].name)
    batch = next(batches)
    assert batch.step == step, f"the loader is at step {batch.step}, the loop at {step}"
    worker.log.window.waits.append(batch.wait)
    _, shard, sample = batch.ids.numpy().T
    masked = masked_by(worker.hooks, step, shard, sample)
    if masked is None or not masked.any():
        return batch
    return without_rows(batch, masked)


def without_rows(batch: Batch, masked: np.ndarray) -> Batch:
    """Return the micro-batch with the images of its masked rows replaced with grey and their labels removed."""
    rows = torch.from_numpy(masked).to(batch.images.device)
    images = batch.images.masked_fill(rows[:, None, None, None], GREY)
    labels = batch.labels.masked_fill(rows[:, None], -1)
    return replace(batch, images=images, labels=labels, masked=rows)


def begin_forward(worker: "Worker", step: int, batch: Batch) -> Tensor:
    """Seed the random draws for a micro-batch's forward pass; return the images (b, 3, S, S) as the model's input."""
    # Seeded only by the step and the samples, so a resumed run draws the same dropout as an uninterrupted one. Seed the
    # generators directly: torch.manual_seed also formats a stack trace for each kind of device that is not initialised,
    # which takes up to a millisecond.
    seed = seed_of_micro_batch(worker.cfg.seed, step, batch.ids, DROPOUT)
    torch.default_generator.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    worker.group.phases.enter("forward", step)
    return normalise(batch.images, worker.model_config, worker.engine.dtype, worker.group.device)


def seed_of_micro_batch(seed: int, step: int, ids: Tensor, *purpose: int) -> int:
    """Derive the seed for a micro-batch's random draws from the run's seed, the step, sample ids and purpose."""
    # Torch's generators take 64-bit seeds; 15 hexadecimal digits are 60 bits.
    return int(config.digest((seed, step, *ids.flatten().tolist(), *purpose))[:15], 16)


# ------------------------------------------------------------------------ objectives


Objective = Callable[["Worker", int, Tensor, Batch], Tensor]


def classification_loss(worker: "Worker", step: int, images: Tensor, batch: Batch) -> Tensor:
    """Return the classification loss summed over a micro-batch, with label smoothing and mixup as configured."""
    cfg = worker.cfg
    targets = dense_targets(batch.labels, worker.model_config.classes, cfg.label_smoothing)
    # Seeded by the step alone, so that all micro-batches of a step use the same mixing ratio. The partner is the
    # neighbour in the micro-batch; in the original implementation it is the neighbour on the same device.
    if cfg.mixup:
        images, targets = mixup(images, targets, cfg.mixup, (cfg.seed, step))
    inputs = [images, *patches_to_keep(worker, step, batch)]
    logits = worker.engine.forward(*inputs)
    # Sum, not mean: if workers have different numbers of samples, a mean of means would weight samples unequally.
    losses = LOSSES[cfg.loss](logits, targets)
    if batch.masked is not None:
        losses = losses.masked_fill(batch.masked, 0.0)
    return losses.sum()


def patches_to_keep(worker: "Worker", step: int, batch: Batch) -> list[Tensor]:
    """Return a list with a tensor (b, K): the patches to keep in each image, on the device; [] to keep all patches."""
    draw_patches = phase_at(step, worker.data.phases).draw_patches
    if draw_patches is None:
        return []
    patches = draw_patches(step, batch.ids)
    if worker.group.device.type == "cuda":
        patches = patches.pin_memory()  # a copy from unpinned memory would block the host
    return [patches.to(worker.group.device, non_blocking=True)]


def masked_loss(worker: "Worker", step: int, images: Tensor, batch: Batch) -> Tensor:
    """Return the masked-patch-prediction loss summed over a micro-batch.

    The corruption depends only on the step and the samples of the micro-batch, so it is the same at every world size
    that splits the batch into the same micro-batches.
    """
    generator = torch.Generator(worker.group.device).manual_seed(seed_of_micro_batch(worker.cfg.seed, step, batch.ids))
    from data.optional import load_optional  # imported here, because few stages have this objective

    objective = load_optional("models.extras.masked:objective", "objective=masked")
    summed_loss, _ = objective(worker.engine.forward, images, generator, left_out=batch.masked)
    return summed_loss


OBJECTIVES: dict[str, Objective] = {
    "classification": classification_loss,
    "masked": masked_loss,
}
