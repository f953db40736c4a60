"""Accuracy of a model over a set of shards, each sample exactly once at any world size.

1. `EvaluationSet` gives every worker equally many batches of its part of the set; padding and bad samples are masked.
2. `watched` tells the watchdog at every batch which shards are being read; in training, `agreed` has all workers hear
   of a stop or of a worker that cannot read on, between two batches.
3. `accuracy` counts right predictions over all workers. What needs features goes on in `feature_store`.

    accuracy(model, watched(samples, phases), torch.float32, device)  →  (0.8124, 50000)
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.checks import at_least
from data.errors import ConfigError, PatchlineError, Preempted, exit_code
from data.evaluation import EvaluationBatch, EvaluationSet
from data.images.preprocess import shape_of
from models import ModelConfig
from pipeline.config import require
from pipeline.monitoring.watchdog import Phases
from pipeline.optimization import hits

L2 = 2.0**10  # of the few-shot probe (configs/common_fewshot.py): fixed, never selected on validation data


@dataclass(frozen=True)
class ProbeConfig:
    """The few-shot probe; with a train and a test set it also runs during training, as in the paper."""

    train: str | None = None  # index of the set that the shots are picked from; or "@stage/name"
    test: str | None = None  # index of the set that the fitted map is judged on; or "@stage/name"
    shots: tuple[int, ...] = (1, 5, 10, 25)  # training images a class (big_vision configs/common_fewshot.py)
    seeds: tuple[int, ...] = (0, 1, 2)  # of the pick of the shots; the mean over them is reported too
    l2: float = L2  # weight of the ridge regression's penalty (big_vision configs/common_fewshot.py)

    def __post_init__(self) -> None:
        require((self.train is None) == (self.test is None), "a probe needs both train and test, or neither")
        fewest = min(self.shots, default=0)
        require(fewest > 0, f"probe.shots are {self.shots}, expected 1 or more")
        require(len(self.seeds) > 0, "probe.seeds are empty, expected at least one")
        require(min(self.seeds) >= 0, f"probe.seeds are {self.seeds}, expected 0 or more")
        at_least(self, 0, "l2", "probe.")


def check_ops(ops: str | None) -> None:
    """Raise ConfigError where evaluation could not preprocess with `ops` and their arguments."""
    if not ops:  # then the image is resized to what the model takes
        return
    try:
        shape_of(ops)
    except ValueError as error:
        raise ConfigError(f"preprocess: {error}") from None


def check_shape(ops: str | None, model: ModelConfig, key: str) -> None:
    """Raise ConfigError where `ops` make images of another size than the model takes; `key` is what holds the ops."""
    if not ops or model.family == "bit":  # a ResNet takes any size
        return
    height, width, _ = shape_of(ops)
    expected_height, expected_width = model.image_size
    require(
        (height, width) == (expected_height, expected_width),
        f"{key}: {ops!r} makes images of {height}×{width}, expected the model's {expected_height}×{expected_width}\n"
        f"  type '{key}=resize(({expected_height}, {expected_width}))', or {key}=null, which is the same",
    )


def normalise(images: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bring uint8 pixels to [−1, 1] on the device (SPEC 2.5: value_range(-1, 1))."""
    return images.to(device, non_blocking=True).float().mul_(1 / 127.5).sub_(1).to(dtype)


def watched(samples: EvaluationSet, phases: Phases, step: int = 0) -> Iterator[EvaluationBatch]:
    """Iterate the set's batches, each entered as a phase that names the shards which are read meanwhile."""
    batches = iter(samples)
    size = samples.batch_size
    # The set reads one batch ahead: while it gives the first it reads two, and with any other the next one.
    being_read = samples.rows[: 2 * size]
    for number in range(len(samples)):
        shards = shards_of(samples, being_read)
        phases.enter("evaluate", step, shards)
        batch = next(batches)
        # Once more: who waits for the others' batches has entered one phase more than the one that still reads.
        phases.enter("evaluate", step, shards)
        yield batch
        being_read = samples.rows[(number + 2) * size : (number + 3) * size]
    # No shard is read any more: a worker that hangs in the reduction must not be blamed on the last one.
    phases.enter("evaluate", step)


def shards_of(samples: EvaluationSet, rows: range) -> str:
    """Return the name of the shard that rows of a set lie in, or "first … last"; "" where there is no row."""
    if not rows:  # nothing is left to read, or the batch is padding alone
        return ""
    first, _ = samples.place(rows[0])
    last, _ = samples.place(rows[-1])
    name = samples.index.shards[first].name
    if last == first:
        return name
    return f"{name} … {samples.index.shards[last].name}"


class EvaluationStopped(Preempted):
    """The run was asked to stop, and all workers have left an evaluation between two batches."""


class EvaluationFailed(PatchlineError):
    """An evaluation cannot be finished, which all workers know; carries the exit code of what went wrong."""

    exit_code: int

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def agreed(
    batches: Iterator[EvaluationBatch], wants_stop: Callable[[], bool], device: torch.device, log: IO[str]
) -> Iterator[EvaluationBatch]:
    """Iterate batches, each once every worker has its own: none goes into the model alone. Collective.

    Raises EvaluationFailed or EvaluationStopped, on all workers alike, where one cannot read on or is asked to stop.
    """
    while True:
        batch = None
        failure = None
        try:
            batch = next(batches, None)
        except Exception as error:  # whatever reading and decoding may raise
            failure = error
        go_on_together(failure, wants_stop, device, log)
        if batch is None:
            return
        yield batch


def go_on_together(
    failure: Exception | None, wants_stop: Callable[[], bool], device: torch.device, log: IO[str]
) -> None:
    """Collective: return where no worker has failed or wants to stop; `log` gets the traceback of this one's failure.

    Raises EvaluationFailed and EvaluationStopped, on all workers alike.
    """
    flags = torch.tensor([failure is not None, wants_stop()], dtype=torch.float64, device=device)
    dist.all_reduce(flags)
    failures, stops = flags.tolist()
    if failures:
        mine = None
        if failure is not None:
            traceback.print_exception(failure, file=log)
            log.flush()
            mine = (f"worker {dist.get_rank()}: {type(failure).__name__}: {failure}", exit_code(failure))
        all_failures: list[tuple[str, int] | None] = [mine] * dist.get_world_size()
        dist.all_gather_object(all_failures, mine)
        for first_failure in all_failures:
            if first_failure is not None:
                raise EvaluationFailed(*first_failure) from failure
    if stops:
        raise EvaluationStopped("stopped in an evaluation")


def evaluated(model: nn.Module, samples: Iterable[EvaluationBatch]) -> Iterator[EvaluationBatch]:
    """Iterate batches with the model in eval mode, which is restored afterwards, and without gradients.

    Every worker gets equally many batches: ZeRO-3 gathers weights in lockstep.
    """
    # Whether gradients are kept is the thread's mode, not this function's: while the generator is paused at a batch,
    # the caller's forward pass keeps none either.
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield from samples
    finally:
        model.train(training)


def accuracy(
    model: nn.Module, samples: Iterable[EvaluationBatch], dtype: torch.dtype, device: torch.device
) -> tuple[float, int]:
    """Return (top-1 accuracy, samples judged); a prediction is right if it is one of the sample's labels.

    Collective: all workers return the same.
    """
    # float64 counts exactly far beyond any set; float32 would stop at 16,777,216.
    counts = torch.zeros(2, dtype=torch.float64, device=device)  # right, judged
    for batch in evaluated(model, samples):
        logits = model(normalise(batch.images, dtype, device))
        # Labels are padded with −1, which no prediction equals; a row without a good sample is masked besides.
        is_right = hits(logits, batch.labels.to(device))
        is_judged = batch.mask.to(device)
        counts += torch.stack([(is_right & is_judged).sum(), is_judged.sum()])
    if dist.is_initialized():
        dist.all_reduce(counts)
    right, judged = counts.tolist()
    return right / max(judged, 1), int(judged)
