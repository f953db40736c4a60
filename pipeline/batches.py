"""A worker's micro-batches: loaded ahead, waited for, made into the images that the model takes, and into a loss.

1. `micro_batches` iterates them from a step on, on the worker's device, in the image size of the step's phase; a stop
   ends the wait for the first of all.
2. `next_batch` takes the next one of a step, and tells the driver meanwhile which shard it waits for.
3. `begin_forward` seeds what the forward pass will draw, and makes floats of the images.
4. One of OBJECTIVES, as the recipe's `objective` says, returns the loss summed over the micro-batch; the loop weights
   it and calls backward.

In:  the worker's part of the order, as `data.loader` decodes it: Batch, images (b, 3, S, S) uint8
Out: the same Batch on the device, images (b, 3, S, S) in [−1, 1], in the type that the model computes in, and a scalar

Everything that is drawn (mixup, corruption, dropout, patches that are left out) depends on the seed, the step and the
samples alone: not on the rank, the world size, or where the run started.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from itertools import islice

import torch
from torch import Tensor

import models
from data.errors import Preempted
from data.loader import Batch, TrainLoader, moved_ahead
from data.order import Ids
from pipeline import config
from pipeline.evaluation.features import normalise
from pipeline.extras.token_dropping import kept_patches, phase_at, phases
from pipeline.losses import LOSSES, dense_targets, mixup
from pipeline.start import Worker
from pipeline.training_config import training_loader

LOG_EVERY_S = 20.0  # what the first batch waits for, until it is there
STOP_POLL_S = 0.2  # how often the wait for the first batch looks whether the run is asked to stop
# A purpose keeps one kind of draw apart from another that has the same seed, step and samples; masked prediction has
# none, and token_dropping.PATCH_DROPOUT is 2.
DROPOUT = 1

# b samples of a micro-batch, S image side


def micro_batches(worker: Worker, start_step: int) -> Iterator[Batch]:
    """Iterate this worker's micro-batches from a step on, on its device, images in the size of the step's phase."""
    cfg = worker.cfg
    for phase in phases(cfg.thinning, worker.steps, worker.model_config):
        first_step = max(start_step, phase.steps.start)
        if first_step >= phase.steps.stop:
            continue
        # A loader works ahead, in one size: another size is another loader's.
        loader = training_loader(
            cfg,
            worker.index,
            worker.order,
            image_size=phase.image_size,
            slots=worker.arithmetic.slots(worker.rank),
            start_step=first_step,
            micro_batch=cfg.micro_batch,
            accumulation=worker.arithmetic.accumulation,
            processes=cfg.data.processes,
        )
        is_start = first_step == start_step
        # Behind a phase its steps are not committed yet: the step agrees on a stop, and commits.
        batches = once_the_first_is_there(worker, loader) if is_start else iter(loader)
        with closing(batches):
            count = (phase.steps.stop - first_step) * worker.arithmetic.accumulation
            yield from moved_ahead(islice(batches, count), worker.device)


def once_the_first_is_there(worker: Worker, loader: TrainLoader) -> Generator[Batch]:
    """Iterate the loader's batches; a stop ends the wait for the first, which takes minutes where the cache is cold.

    Raises Preempted in the worker that waits. Only for where the loop starts: every step that was taken is
    committed there, and there is nothing to agree on.
    """
    batches = iter(loader)
    answers: queue.SimpleQueue[Batch | Exception] = queue.SimpleQueue()

    def fetch() -> None:
        try:
            if worker.device.type == "cuda":  # which GPU is the current one is known to each thread apart
                torch.cuda.set_device(worker.device)
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
            loader.log_wait(worker.telemetry.log)
        # Every worker looks for the driver's file: rank 0 may have its batch, and wait for the others' gradients.
        is_asked = worker.sigterm.is_set() or worker.job.stop_file.exists()
        if first is None and is_asked:
            loader.stop()
            raise Preempted("stopped while waiting for the first batch; run the same command again to go on")
    if isinstance(first, Exception):
        raise first
    # Held here as long as the others come, it would keep its place in the memory that the loader decodes into.
    ready = [first]
    del first
    yield ready.pop()
    yield from batches


def next_batch(worker: Worker, batches: Iterator[Batch], step: int, planned: Ids) -> Batch:
    """Return the next micro-batch of a step, whose samples over all workers are `planned`, once it is there."""
    # The driver hears of the shard with this worker's first sample of the batch, in case the wait is long.
    first_slot = worker.arithmetic.slots(worker.rank).start
    worker.phases.enter("data", step, worker.index.shards[planned.shard[first_slot]].name)
    batch = next(batches)
    assert batch.step == step, f"the loader is at step {batch.step}, the loop at {step}"
    worker.window.waits.append(batch.wait)
    return worker.mask.apply(batch)


def begin_forward(worker: Worker, step: int, batch: Batch) -> Tensor:
    """Seed what a micro-batch's forward pass draws, and return its images (b, 3, S, S) as the model takes them."""
    # Dropout's draws depend on the samples alone: a resumed run repeats those of an uninterrupted one.
    torch.manual_seed(seed_of_micro_batch(worker.cfg.seed, step, batch.ids, DROPOUT))
    worker.phases.enter("forward", step)
    return normalise(batch.images, worker.engine.dtype, worker.device)


def seed_of_micro_batch(seed: int, step: int, ids: Tensor, *purpose: int) -> int:
    """Derive the seed of a micro-batch's draws from the recipe's seed, the step, its sample ids and the purpose."""
    # 15 hex digits are 60 bits, which fit the 64-bit seeds of torch's generators.
    return int(config.digest((seed, step, *ids.flatten().tolist(), *purpose))[:15], 16)


# ------------------------------------------------------------------------ objectives


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
    losses = LOSSES[cfg.loss](logits, targets)
    if batch.masked is not None:
        losses = losses.masked_fill(batch.masked, 0.0)
    return losses.sum()


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
    summed_loss, _ = models.masked.objective(worker.engine.forward, images, generator, left_out=batch.masked)
    return summed_loss


OBJECTIVES: dict[str, Objective] = {
    "classification": classification_loss,
    "masked": masked_loss,
}
