"""A worker's micro-batches: loaded ahead, waited for, converted into the model's images, and into a loss.

1. `planned_ids` returns the samples of a step's global batch, and marks those that a hook masks.
2. `micro_batches` iterates a worker's part from a step on, on its device, in the image size of the step's phase; a stop
   ends the wait for the first of all.
3. `next_batch` takes the next one of a step, and tells the driver meanwhile which shard it waits for.
4. `begin_forward` seeds what the forward pass will draw, and converts the images to floats.
5. One of OBJECTIVES, as the recipe's `objective` says, returns the loss summed over the micro-batch; the loop weights
   it and calls backward.

In:  the worker's part of the order, as `data.loader` decodes it: Batch, images (b, 3, S, S) uint8
Out: the same Batch on the device, images (b, 3, S, S) in [−1, 1], in the type that the model computes in, and a scalar

Everything that is drawn (mixup, corruption, dropout, kept patches) depends on the seed, the step and the samples alone:
not on the rank, the world size, or where the run started.

A masked sample takes no part in training and changes nothing else:
1. It is read and decoded in its slot, so that every other sample keeps its row, augmentation and random draws.
2. Its pixels become grey and its labels are removed: nothing of it reaches a neighbour through mixup, or a gradient as
   NaN. Its loss has the weight 0.
3. A step's loss and gradient are means over the planned samples that are not masked, of the whole batch, so that they
   are the same on any number of workers. If all are masked the gradient is 0, and the step counts all the same.
4. The ledger of a step counts a masked sample n as −1 − n: equal ledgers still mean equal data.
A row is masked by the sample that it really holds: a bad sample's replacement may be masked, or replace a masked one.
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

import models
from data.errors import Preempted
from data.loader import Batch, TrainLoader, moved_ahead
from data.order import Ids
from models.catalog import normalise
from pipeline import config
from pipeline.hooks import masked_by
from pipeline.losses import LOSSES, dense_targets, mixup
from pipeline.phases import phase_at
from pipeline.training_data import training_loader

if TYPE_CHECKING:
    from pipeline.start import Worker

LOG_EVERY_S = 20.0  # what the first batch waits for, until it is there
STOP_POLL_S = 0.2  # how often the wait for the first batch looks whether the run is asked to stop
# A purpose keeps one kind of draw apart from another that has the same seed, step and samples; masked prediction has
# none, and token_dropping.PATCH_DROPOUT is 2.
DROPOUT = 1
GREY = 128  # of 255: a pixel that is nearly 0 once it is normalised

# b samples of a micro-batch, B of the global batch, S image side


def planned_ids(worker: "Worker", step: int) -> Ids:
    """Return the samples of a step's global batch, as the ledger counts them: a masked sample n is −1 − n."""
    planned = worker.data.order.batch(step)
    masked = masked_by(worker.hooks, step, planned.shard, planned.sample)
    if masked is None:
        return planned
    return planned._replace(sample=np.where(masked, ~planned.sample, planned.sample))


def samples_in_mean(planned: Ids) -> int:
    """Return how many samples of a global batch the mean of a step is over; 1 if all are masked."""
    return max(int((planned.sample >= 0).sum()), 1)


def micro_batches(worker: "Worker", start_step: int) -> Iterator[Batch]:
    """Iterate this worker's micro-batches from a step on, on its device, images in the size of the step's phase."""
    cfg = worker.cfg
    data = worker.data
    for phase in data.phases:
        first_step = max(start_step, phase.steps.start)
        if first_step >= phase.steps.stop:
            continue
        # A loader works ahead, in one size: another size is another loader's.
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
        # After a phase its steps are not committed yet: the step agrees on a stop, and commits.
        batches = wait_for_first_batch(worker, loader) if is_start else iter(loader)
        with closing(batches):
            count = (phase.steps.stop - first_step) * data.arithmetic.accumulation
            yield from moved_ahead(islice(batches, count), worker.group.device)


def wait_for_first_batch(worker: "Worker", loader: TrainLoader) -> Generator[Batch]:
    """Iterate the loader's batches; a stop ends the wait for the first, which takes minutes where the cache is cold.

    Raises Preempted in the worker that waits. Only for where the loop starts: every step that was taken is
    committed there, and there is nothing to agree on.
    """
    batches = iter(loader)
    answers: queue.SimpleQueue[Batch | Exception] = queue.SimpleQueue()

    def fetch() -> None:
        try:
            if worker.group.device.type == "cuda":  # each thread has a current GPU of its own
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
        # Every worker checks the driver's file: rank 0 may have its batch, and wait for the others' gradients.
        if first is None and worker.stop.is_requested_on_node():
            loader.stop()
            raise Preempted("stopped while waiting for the first batch; run the same command again to go on")
    if isinstance(first, Exception):
        raise first
    # Held here as long as the others come, it would keep its place in the memory that the loader decodes into.
    ready = [first]
    del first
    yield ready.pop()
    yield from batches


def next_batch(worker: "Worker", batches: Iterator[Batch], step: int, planned: Ids) -> Batch:
    """Return the next micro-batch of a step, whose samples over all workers are `planned`, once it is there."""
    # The driver hears of the shard with this worker's first sample of the batch, in case the wait is long.
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
    """Return a micro-batch, on its device, without the content of its masked rows."""
    rows = torch.from_numpy(masked).to(batch.images.device)
    images = batch.images.masked_fill(rows[:, None, None, None], GREY)
    labels = batch.labels.masked_fill(rows[:, None], -1)
    return replace(batch, images=images, labels=labels, masked=rows)


def begin_forward(worker: "Worker", step: int, batch: Batch) -> Tensor:
    """Seed what a micro-batch's forward pass draws, and return its images (b, 3, S, S) as the model takes them."""
    # Dropout's draws depend on the samples alone: a resumed run repeats those of an uninterrupted one.
    torch.manual_seed(seed_of_micro_batch(worker.cfg.seed, step, batch.ids, DROPOUT))
    worker.group.phases.enter("forward", step)
    return normalise(batch.images, worker.engine.dtype, worker.group.device)


def seed_of_micro_batch(seed: int, step: int, ids: Tensor, *purpose: int) -> int:
    """Derive the seed of a micro-batch's draws from the recipe's seed, the step, its sample ids and the purpose."""
    # 15 hex digits are 60 bits, which fit the 64-bit seeds of torch's generators.
    return int(config.digest((seed, step, *ids.flatten().tolist(), *purpose))[:15], 16)


# ------------------------------------------------------------------------ objectives


Objective = Callable[["Worker", int, Tensor, Batch], Tensor]


def classification_loss(worker: "Worker", step: int, images: Tensor, batch: Batch) -> Tensor:
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
    losses = LOSSES[cfg.loss](logits, targets)
    if batch.masked is not None:
        losses = losses.masked_fill(batch.masked, 0.0)
    return losses.sum()


def patches_to_keep(worker: "Worker", step: int, batch: Batch) -> list[Tensor]:
    """Return the patches (b, K) that the step keeps of every image, on the device; nothing where it keeps all."""
    draw_patches = phase_at(step, worker.data.phases).draw_patches
    if draw_patches is None:
        return []
    kept = draw_patches(step, batch.ids)
    if worker.group.device.type == "cuda":
        kept = kept.pin_memory()  # else the copy would hold up the host
    return [kept.to(worker.group.device, non_blocking=True)]


def masked_loss(worker: "Worker", step: int, images: Tensor, batch: Batch) -> Tensor:
    """Return the summed loss of masked patch prediction.

    What is corrupted depends on the step and on the micro-batch's samples, so it is the same at every world size that
    cuts the batch into the same micro-batches.
    """
    generator = torch.Generator(worker.group.device).manual_seed(seed_of_micro_batch(worker.cfg.seed, step, batch.ids))
    summed_loss, _ = models.masked.objective(worker.engine.forward, images, generator, left_out=batch.masked)
    return summed_loss


OBJECTIVES: dict[str, Objective] = {
    "classification": classification_loss,
    "masked": masked_loss,
}
