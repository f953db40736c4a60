"""Runs a step of training without computing it, in a process of its own, and says what lives at its fullest moments.

    echo '[{"model": {…}, "config": {…}, "world": 8, …}]' | python -m pipeline.plan.memory_trace

1. Everything is the real thing: the model, DeepSpeed around it, the recipe's loss, dropout, recomputed blocks and
   optimizer. Only its tensors are fake: they have shapes and no numbers. So are the other workers (a "fake" group);
   what gloo would allocate between real ones on CPUs is allocated in its place (`hidden_buffers`), and so is
   what a kernel allocates for itself.
2. One step is taken to start with: optimizers and ZeRO 3 set things apart at their first.
3. One step is written down with micro-batches of 2 images and one with 3. Event for event, what does not differ
   between them does not depend on the micro-batch, and what does grows with every image.
4. Out come the moments at which most lives, for each micro-batch from 2 on: at small ones it may be the optimizer's
   step, at large ones the middle of the backward pass.

It has its own process: a fake group, and what takes the place of DeepSpeed's checks, are there for a whole process.
"""

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import models
from data.loader import Batch, Wait
from models import ModelConfig
from models.catalog import FAMILIES
from models.resnet import BiTUnit, StemUnit
from models.vit import Block
from pipeline.config import build as build_config
from pipeline.engine.deepspeed import import_deepspeed, one_order_of_layers
from pipeline.engine.engine import Engine
from pipeline.evaluation.features import normalise
from pipeline.objectives import OBJECTIVES
from pipeline.plan.gpu_kernels import as_on_a_gpu
from pipeline.plan.hidden_buffers import GlooBuffers, KernelBuffers
from pipeline.plan.live_bytes import Event, Kind, LiveBytes
from pipeline.plan.memory_traces import Moment
from pipeline.start import build_engine
from pipeline.training_config import TrainConfig
from pipeline.worker import Worker

SMALL = 2  # images of a micro-batch; with one image, axes of length 1 are copied less often than any other
LARGE = 3


@dataclass(frozen=True)
class TracedWorker:
    """Has of a Worker what an objective asks for."""

    cfg: TrainConfig
    device: torch.device
    model_config: ModelConfig
    engine: Engine
    steps: int = 1  # of the stage: what it leaves out of images depends on the step, and here nothing is left out


def main() -> None:
    """Read steps from stdin, write what lives in each to stdout: one line of JSON for each step."""
    # DeepSpeed and torch print what they like: the answers get a place of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for step in json.load(sys.stdin):
        # DeepSpeed can be started once in a process; forks share what was imported.
        child = os.fork()
        if child == 0:
            print(json.dumps(trace(**step)), file=answers, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            sys.exit(1)


def trace(
    model: dict[str, Any], config: dict[str, Any], world: int, accumulation: int, recomputed: int, is_gpu: bool
) -> dict[str, Any]:
    """Trace the step that a `pipeline.plan.memory_traces.StepToTrace` describes; return its fullest moments."""
    cfg = build_config(TrainConfig, config, "config")
    model_config: ModelConfig = models.from_dict(model)
    with ExitStack() as around:
        around.enter_context(fake_workers(world))
        around.enter_context(patch("pipeline.engine.deepspeed.over_gloo", lambda: not is_gpu))
        if is_gpu:
            around.enter_context(as_on_a_gpu())
        around.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        live = around.enter_context(LiveBytes())
        # Entered after it, they are asked before it: what they allocate is counted as the step's own.
        around.enter_context(KernelBuffers())
        if not is_gpu:
            around.enter_context(GlooBuffers())
        worker = traced_worker(cfg, model_config, accumulation, recomputed)
        for module in worker.engine.model.modules():
            if isinstance(module, (Block, StemUnit, BiTUnit)):
                live.watch(module)
        take_step(worker, accumulation, SMALL, live.enter)
        before = live.events
        small = events_of_step(live, worker, accumulation, SMALL)
        large = events_of_step(live, worker, accumulation, LARGE)
    return fullest_moments(before, small, large)


@contextmanager
def fake_workers(world: int) -> Iterator[None]:
    """Be rank 0 of a group whose other workers do not exist: collectives return at once and change nothing."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE="1")
    deepspeed = import_deepspeed()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    apply = nn.Module._apply
    nn.Module._apply = apply_in_place  # type: ignore[assignment]
    try:
        with one_order_of_layers():
            yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]
        dist.destroy_process_group()


def apply_in_place(module: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Do what `Module._apply` does with real tensors; fake ones it would swap, which torch refuses amid a mode."""
    for child in module.children():
        apply_in_place(child, function)
    for parameter in module._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = function(parameter)
    return module


def traced_worker(cfg: TrainConfig, model_config: ModelConfig, accumulation: int, recomputed: int) -> TracedWorker:
    """Build model and engine as a worker does. First weights are not drawn: that takes no memory which stays."""
    _, module = FAMILIES[model_config.family]
    network: Any = cast(Any, module)(model_config)
    network.recomputed_blocks = recomputed
    engine = build_engine(cfg, network, accumulation)
    return TracedWorker(cfg, torch.device("cpu"), model_config, engine)


def take_step(worker: TracedWorker, accumulation: int, images: int, enter: Callable[[str], None]) -> None:
    """Take a step as `pipeline.train` does, with `images` in every micro-batch; `enter` hears where it is."""
    cfg = worker.cfg
    size = worker.model_config.image_size
    loss_sum = torch.zeros((), device=worker.device)
    for number in range(accumulation):
        enter("batch")
        pixels = torch.zeros(images, 3, *size, dtype=torch.uint8, device=worker.device)
        labels = torch.zeros(images, cfg.data.max_labels, dtype=torch.int64, device=worker.device)
        batch = Batch(0, pixels, labels, torch.zeros(images, 3, dtype=torch.int64), (), Wait())
        inputs = normalise(batch.images, worker.engine.dtype, worker.device)
        enter("forward")
        loss = OBJECTIVES[cfg.objective](cast(Worker, worker), 0, inputs, batch)
        enter("backward")
        worker.engine.backward(loss * (1 / images))
        loss_sum = loss_sum + loss.detach()
        del inputs, loss
        enter("update")
        numbers = None
        if number + 1 == accumulation:
            of_host = torch.zeros(3, dtype=torch.float64, device=worker.device)
            numbers = torch.cat([loss_sum.double().reshape(1), of_host])
        worker.engine.end_micro_batch(cfg.optim.lr, numbers)


def events_of_step(live: LiveBytes, worker: TracedWorker, accumulation: int, images: int) -> list[Event]:
    """Return what a step allocates and gives back."""
    # What lies in cycles is given back whenever Python looks for them: here before the step and not amid it.
    gc.collect()
    live.events = []
    gc.disable()
    try:
        take_step(worker, accumulation, images, live.enter)
    finally:
        gc.enable()
    return live.events


def fullest_moments(before: list[Event], small: list[Event], large: list[Event]) -> dict[str, Any]:
    """Return the moments at which most lives for some micro-batch, all kinds together and activations alone."""
    fixed, per_image = living_after_each(before, small, large)
    of_all = upper_hull(fixed.sum(0), per_image.sum(0))
    of_activations = upper_hull(fixed[Kind.ACTIVATIONS], per_image[Kind.ACTIVATIONS])

    def moments(places: list[int]) -> list[dict[str, Any]]:
        described = []
        for place in places:
            phase = small[place][0]
            moment = Moment(phase, tuple(fixed[:, place].tolist()), tuple(per_image[:, place].tolist()))
            described.append(dataclasses.asdict(moment))
        return described

    living_at_start = np.cumsum([size for _, _, size in before])
    return {
        "start": int(living_at_start.max()),
        "moments": moments(of_all),
        "activations": moments(of_activations),
    }


def living_after_each(
    before: list[Event], small: list[Event], large: list[Event]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what lives after each event of a step, (kinds, events): the fixed bytes, and those of every image.

    The step has been taken with SMALL and with LARGE images, `before` is what happened until then.
    """
    assert [event[:2] for event in small] == [event[:2] for event in large], "a step's order depends on the micro-batch"
    bytes_small = np.array([size for _, _, size in small], float)
    bytes_large = np.array([size for _, _, size in large], float)
    per_image = (bytes_large - bytes_small) / (LARGE - SMALL)
    fixed = bytes_small - SMALL * per_image

    kinds = np.array([kind for _, kind, _ in small])
    living_fixed = np.zeros((len(Kind), len(small)))
    living_per_image = np.zeros((len(Kind), len(small)))
    for kind in Kind:
        at_start = sum(size for _, of, size in before if of == kind)
        living_fixed[kind] = at_start + np.cumsum(np.where(kinds == kind, fixed, 0))
        living_per_image[kind] = np.cumsum(np.where(kinds == kind, per_image, 0))
    return living_fixed, living_per_image


def upper_hull(fixed: NDArray[np.float64], slope: NDArray[np.float64]) -> list[int]:
    """Return which of the lines fixed + slope · x are the highest somewhere at x ≥ 1, from the left to the right."""
    # At 1 the highest; of several the steepest, which stays above the others.
    place = int(np.lexsort((slope, fixed + slope))[-1])
    places = [place]
    while True:
        steeper = np.flatnonzero(slope > slope[place])
        if not len(steeper):
            return places
        crossings = (fixed[place] - fixed[steeper]) / (slope[steeper] - slope[place])
        place = int(steeper[np.lexsort((-slope[steeper], crossings))[0]])
        places.append(place)


if __name__ == "__main__":
    main()
