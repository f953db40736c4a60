"""Trace training steps with fake tensors, in a separate process, and report their memory peaks.

    echo '{"model": {…}, "config": {…}, "world": 8, …}' | python -m pipeline.extras.plan.tracer

1. The step uses the real model, DeepSpeed, loss, dropout, activation checkpointing and optimizer. Only the tensors are
   fake (they have shapes, but no data), and so are the other workers (a "fake" process group).
2. `LiveBytes` intercepts every torch operation, and records allocations and frees with their purpose. It also allocates
   the hidden buffers of real collectives and kernels.
3. A first step warms up: optimizers and ZeRO 3 allocate their state in it.
4. One step is recorded with micro-batches of 2 images, and one with 3. The difference between corresponding events is
   the memory per image; the rest does not depend on the micro-batch size.
5. The output is the moments of peak memory for all micro-batch sizes from 2: for small sizes, this may be the optimizer
   step, and for large sizes the middle of the backward pass.

The tracer needs a separate process because the fake process group and the patches to DeepSpeed affect the entire
process. It reads one step per line, and traces each in a fork of itself, so that torch and DeepSpeed are imported once.
"""

import dataclasses
import gc
import json
import os
import select
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
from data.loader import Batch, Wait
from models import ModelConfig, vit
from models.catalog import module_of, normalise
from models.resnet import BiTUnit, StemUnit
from models.vit import Block
from pipeline.batches import OBJECTIVES
from pipeline.config import build as build_config
from pipeline.engine.deepspeed import import_deepspeed, one_order_of_layers
from pipeline.engine.engine import Engine
from pipeline.extras.plan.fake_results import FakeResults
from pipeline.extras.plan.memory_traces import Kind, Moment
from pipeline.start import Worker, build_engine
from pipeline.training_config import Phase, TrainConfig

SMALL = 2  # images per micro-batch; not 1, because tensors with an axis of length 1 are copied less often
LARGE = 3
IDLE_S = 20.0  # the process ends if no step arrives for this long, for example during the training of a long run

PHASES = {
    "build": Kind.STATES,
    "batch": Kind.IMAGES,
    "forward": Kind.ACTIVATIONS,
    "backward": Kind.GRADIENTS,
    "recompute": Kind.ACTIVATIONS,  # during the backward pass
    "update": Kind.GRADIENTS,
}
Event = tuple[str, Kind, int]  # (phase, purpose of the memory, change in bytes)


@dataclass(frozen=True)
class TracedGroup:
    """Stand-in for Group, with only the fields that an objective needs."""

    device: torch.device
    world: int = 1


@dataclass(frozen=True)
class TracedData:
    """Stand-in for StageData, with the only field that an objective needs."""

    phases: Sequence[Phase]  # a single phase with full images


@dataclass(frozen=True)
class TracedWorker:
    """Stand-in for Worker, with only the fields that an objective needs."""

    cfg: TrainConfig
    group: TracedGroup
    model_config: ModelConfig
    engine: Engine
    data: TracedData


def main() -> None:
    """Read descriptions of steps from stdin, one per line; write the memory peaks of each to stdout as a line of JSON.

    The line is empty if a step cannot be traced; the traceback is on stderr. The process exits at the end of stdin, or
    if no step arrives for a while.
    """
    # DeepSpeed and torch print to stdout: redirect it to stderr, and write the result to a copy of the original stdout.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_deepspeed()
    # Load the modules that torch imports at the first fake operation.
    with FakeTensorMode():
        F.layer_norm(torch.empty(2, 8), [8])
    # Collections during a trace need not look at what exists now: all of it stays.
    gc.collect()
    gc.freeze()
    # Each line is written only after the answer to the last one, so nothing is left in a buffer.
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.readline()):
        tracing = os.fork()
        if tracing == 0:
            try:
                print(json.dumps(trace(**json.loads(line))), file=answer, flush=True)
                os._exit(0)  # skip the cleanup, which fake workers and tensors do not need
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        _, status = os.waitpid(tracing, 0)
        if status != 0:
            print(file=answer, flush=True)


def trace(
    model: dict[str, Any], config: dict[str, Any], world: int, accumulation: int, recomputed: int, is_gpu: bool
) -> dict[str, Any]:
    """Trace the step described by a `memory_traces.StepToTrace`, and return its moments of peak memory."""
    cfg = build_config(TrainConfig, config, "config")
    model_config: ModelConfig = models.from_dict(model)
    with ExitStack() as around:
        around.enter_context(fake_workers(world))
        around.enter_context(patch("pipeline.engine.deepspeed.over_gloo", lambda: not is_gpu))
        # Replace the kernels that save different tensors on a GPU (with flash attention).
        if is_gpu:
            around.enter_context(patch.object(vit, "attend", fused_attention))
            around.enter_context(patch.object(torch.optim, "AdamW", fused_adamw))
            around.enter_context(patch.object(F, "dropout", cuda_dropout))
        around.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        live = around.enter_context(LiveBytes(over_gloo=not is_gpu))

        # Build the model and the engine as a worker does, but skip the initialisation of weights, which does not affect
        # the memory.
        module = module_of(model_config)
        network = module(model_config)
        network.recomputed_blocks = recomputed
        engine = build_engine(cfg, network, accumulation)
        data = TracedData(cfg.phases(1, model_config))
        worker = TracedWorker(cfg, TracedGroup(torch.device("cpu")), model_config, engine, data)
        for part in engine.model.modules():
            if isinstance(part, (Block, StemUnit, BiTUnit)):
                live.watch(part)

        take_step(worker, accumulation, SMALL, live.enter)
        before = live.events
        steps = []
        for images in (SMALL, LARGE):
            # The garbage collector frees reference cycles at arbitrary times: run it before the step, not during it.
            gc.collect()
            live.events = []
            gc.disable()
            take_step(worker, accumulation, images, live.enter)
            gc.enable()
            steps.append(live.events)
    return peak_moments(before, *steps)


@contextmanager
def fake_workers(world: int) -> Iterator[None]:
    """Join a fake process group as rank 0; its collectives return immediately and have no effect."""
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
    """Replacement for `Module._apply`, which would swap fake tensors; torch forbids that in a fake tensor mode."""
    for child in module.children():
        apply_in_place(child, function)
    for parameter in module._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = function(parameter)
    return module


def take_step(worker: TracedWorker, accumulation: int, images: int, enter: Callable[[str], None]) -> None:
    """Run a training step like `pipeline.train`, with `images` images per micro-batch; call `enter` at each phase."""
    cfg = worker.cfg
    size = worker.model_config.image_size
    loss_sum = torch.zeros((), device=worker.group.device)
    for number in range(accumulation):
        enter("batch")
        pixels = torch.zeros(images, 3, *size, dtype=torch.uint8, device=worker.group.device)
        labels = torch.zeros(images, cfg.data.max_labels, dtype=torch.int64, device=worker.group.device)
        batch = Batch(0, pixels, labels, torch.zeros(images, 3, dtype=torch.int64), (), Wait())
        inputs = normalise(batch.images, worker.model_config, worker.engine.dtype, worker.group.device)
        enter("forward")
        loss = OBJECTIVES[cfg.objective](cast(Worker, worker), 0, inputs, batch)
        enter("backward")
        worker.engine.backward(loss * (1 / images))
        loss_sum = loss_sum + loss.detach()
        del inputs, loss
        enter("update")
        numbers = None
        if number + 1 == accumulation:
            of_host = torch.zeros(3, dtype=torch.float64, device=worker.group.device)
            numbers = torch.cat([loss_sum.double().reshape(1), of_host])
        worker.engine.end_micro_batch(cfg.optim.lr, numbers)


def peak_moments(before: list[Event], small: list[Event], large: list[Event]) -> dict[str, Any]:
    """Return the moments of peak memory for all micro-batch sizes, in total and for activations only.

    `small` and `large` are the events of a step with SMALL and LARGE images, and `before` the events before it.
    """
    _, kinds_before, bytes_before = zip(*before, strict=True)
    phases, kinds, bytes_small = zip(*small, strict=True)
    phases_of_large, kinds_of_large, bytes_large = zip(*large, strict=True)
    is_same = phases == phases_of_large and kinds == kinds_of_large
    assert is_same, "a step's order depends on the micro-batch"
    per_image = (np.array(bytes_large, float) - np.array(bytes_small, float)) / (LARGE - SMALL)
    fixed = np.array(bytes_small, float) - SMALL * per_image

    # Allocated bytes after each event, (kinds, events): the fixed part, and the part per image.
    living_fixed = np.zeros((len(Kind), len(small)))
    living_per_image = np.zeros((len(Kind), len(small)))
    for kind in Kind:
        at_start = np.sum(bytes_before, where=np.array(kinds_before) == kind)
        is_kind = np.array(kinds) == kind
        living_fixed[kind] = at_start + np.cumsum(np.where(is_kind, fixed, 0))
        living_per_image[kind] = np.cumsum(np.where(is_kind, per_image, 0))

    answer: dict[str, Any] = {"start": int(np.cumsum(bytes_before).max())}
    highest = {
        "moments": upper_hull(living_fixed.sum(0), living_per_image.sum(0)),
        "activations": upper_hull(living_fixed[Kind.ACTIVATIONS], living_per_image[Kind.ACTIVATIONS]),
    }
    for name, places in highest.items():
        answer[name] = []
        for place in places:
            living = (tuple(living_fixed[:, place].tolist()), tuple(living_per_image[:, place].tolist()))
            answer[name].append(dataclasses.asdict(Moment(phases[place], *living)))
    return answer


def upper_hull(fixed: NDArray[np.float64], slope: NDArray[np.float64]) -> list[int]:
    """Return the indices of the lines fixed + slope · x that are the maximum for some x ≥ 1, from left to right."""
    # Start with the highest line at x = 1; if there are several, take the steepest, which stays above the others.
    place = int(np.lexsort((slope, fixed + slope))[-1])
    places = [place]
    while True:
        steeper = np.flatnonzero(slope > slope[place])
        if not len(steeper):
            return places
        crossings = (fixed[place] - fixed[steeper]) / (slope[steeper] - slope[place])
        place = int(steeper[np.lexsort((-slope[steeper], crossings))[0]])
        places.append(place)


# ------------------------------------------------------------------------------------------------ live memory


class LiveBytes(TorchDispatchMode):
    """Tracks the live bytes of tensors in a `with` block; `events` lists the changes by phase and kind.

    The memory of an operation's result is counted once, for any number of views, until the last tensor that uses it is
    freed. With fake tensors nothing is computed, but the byte counts are the same, for models of any size.

        with LiveBytes() as live: live.enter("forward"); y = x @ w; live.enter("backward"); y.backward(…)
        → live.events = [("forward", Kind.ACTIVATIONS, 4096), …, ("backward", Kind.ACTIVATIONS, -4096)]
    """

    def __init__(self, *, over_gloo: bool = False) -> None:
        super().__init__()
        self.over_gloo = over_gloo
        self.events: list[Event] = []
        self._phase = "build"
        self._results = FakeResults()
        self._living: dict[int, tuple[weakref.ref[Any], Kind, int]] = {}  # by the address of the storage

    def enter(self, phase: str) -> None:
        """Start a phase of the step; `phase` is one of `PHASES`."""
        assert phase in PHASES, phase
        self._phase = phase

    def watch(self, block: nn.Module) -> None:
        """Hook a block so that its recomputation during the backward pass counts as the phase `recompute`."""

        def begin(*_: object) -> None:
            if self._phase == "backward":
                self._phase = "recompute"

        def end(*_: object) -> None:
            if self._phase == "recompute":
                self._phase = "backward"

        block.register_forward_pre_hook(begin)
        # Recomputation stops early, with an exception, as soon as all needed tensors exist.
        block.register_forward_hook(end, always_call=True)

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        # Most calls are these, because every access to `tensor.device` is an operation.
        if function is torch.ops.prim.device.default and isinstance(arguments[0], FakeTensor):
            return arguments[0].fake_device
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(arguments[0], FakeTensor):
            # Return a value with which a training step continues: norms and losses are finite, and flags are False.
            if arguments[0].dtype.is_floating_point:
                return 1.0
            return False if arguments[0].dtype == torch.bool else 0
        if function is torch.ops.aten.mse_loss.default:
            return self._mse_loss(*arguments, **(options or {}))
        # Collectives are operations too: DeepSpeed calls those of c10d.
        name = function.name()
        buffers: list[Tensor] = []  # buffers that exist during the collective
        if self.over_gloo:
            for tensor in copied_by_gloo(name, arguments):
                buffers.append(torch.empty_like(tensor))
                self._track(buffers[-1])
        result = self._results.of(function, arguments, options or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._track(leaf)
        # An all-gather fills tensors that were allocated earlier: only now is their purpose known.
        if "c10d::" in name and "allgather" in name:
            for leaf in tree_leaves(arguments[:1]):
                if not isinstance(leaf, Tensor) or leaf.untyped_storage()._cdata not in self._living:
                    continue
                address = leaf.untyped_storage()._cdata
                reference, before, size = self._living[address]
                if before is not Kind.STATES and before is not Kind.GATHERED:
                    self._living[address] = (reference, Kind.GATHERED, size)
                    self.events += [(self._phase, before, -size), (self._phase, Kind.GATHERED, size)]
        return result

    def _mse_loss(self, predictions: Tensor, answers: Tensor, reduction: int = 1) -> Tensor:
        """Replacement for torch's kernel (Loss.cpp), with the same shapes and memory but without meaningful values.

        With a reduction (`reduction` is not 0), the kernel writes the errors to a temporary tensor of full size. The
        result is a single number, but its storage also has the full size.
        """
        result = torch.ops.aten.mse_loss(predictions, answers, 0)
        self._track(result)
        if reduction == 0:
            return result
        errors = torch.empty_like(result)
        self._track(errors)
        del errors
        return result.resize_(())

    def _track(self, tensor: Tensor) -> None:
        # Tensors on the meta device use no memory; DeepSpeed stores the shapes of parameters in them.
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        size = storage.nbytes()
        if address in self._living:
            reference, kind, known_size = self._living[address]
            # Storages may be resized in place, as ZeRO 3 does with gathered weights.
            if size != known_size:
                self._living[address] = (reference, kind, size)
                self.events.append((self._phase, kind, size - known_size))
            return
        kind = PHASES[self._phase]
        # ZeRO 3 gathers weights in hooks of the forward pass, which run without gradients.
        if self._phase == "forward" and not torch.is_grad_enabled():
            kind = Kind.GATHERED
        self._living[address] = (weakref.ref(storage, partial(self._untrack, address)), kind, size)
        self.events.append((self._phase, kind, size))

    def _untrack(self, address: int, _: object) -> None:
        # The memory at this address has been freed.
        _, kind, size = self._living.pop(address)
        self.events.append((self._phase, kind, -size))


def copied_by_gloo(name: str, arguments: Sequence[Any]) -> list[Tensor]:
    """Return the arguments of a collective that gloo, on CPUs, copies internally (ProcessGroupGloo.cpp).

    Reduce-scatter sums a copy of the full input. All-gather uses an internal tensor, which it copies into the result.
    All-reduce and send work in place. NCCL uses only the given tensors and preallocated buffers. `arguments` are the
    arguments of the torch operator. Raises AssertionError for a collective whose internal copies are unknown.
    """
    if name == "c10d::_reduce_scatter_base_":
        _, whole, *_ = arguments
        return [whole]
    if name == "c10d::_allgather_base_":
        whole, *_ = arguments
        return [whole]
    if name == "c10d::allgather_":
        (parts,), *_ = arguments
        return list(parts)
    in_place = ("c10d::allreduce_", "c10d::broadcast_", "c10d::send", "c10d::recv_", "c10d::barrier")
    is_collective = name.startswith(("c10d::", "_c10d_functional::"))
    assert not is_collective or name in in_place, f"{name}: unknown memory use of this collective in gloo"
    return []


# ------------------------------------------------------------------------------------------------ GPU kernels

# Torch's kernels for CPU and for CUDA save different tensors for the backward pass in three cases:
# 1. attention: the CUDA kernel is fused, and saves one number per query and head instead of a matrix of tokens ×
#    tokens. With an attention bias (relative positions), a different fused kernel is used, which saves the bias;
# 2. dropout: the mask has one byte per element on CUDA, and the dtype of the activations on the CPU;
# 3. AdamW: the CUDA kernel is fused, and needs no temporary copy of the state.

HEAD_MULTIPLE = 8  # flash attention pads the width of a head to a multiple of this
BIAS_MULTIPLE = 16  # the kernel with bias pads a row of the bias to a multiple of this


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replacement for `models.vit.attend` that uses the CUDA kernels."""
    # Flash attention supports only half precision and no bias; otherwise torch chooses the memory-efficient kernel.
    if q.dtype == torch.bfloat16 and bias is None:
        width = q.shape[-1]
        missing = -width % HEAD_MULTIPLE
        if missing:
            q, k, v = (F.pad(part, (0, missing)) for part in (q, k, v))
        mixed = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
        return mixed[..., :width]
    if bias is not None:
        length = bias.shape[-1]
        bias = F.pad(bias, (0, -length % BIAS_MULTIPLE))[..., :length].expand(*q.shape[:3], length)
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[0]


def fused_adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
    """Replacement for torch.optim.AdamW: its fused version."""
    return ADAMW(groups, **{**options, "fused": True})


ADAMW = torch.optim.AdamW


def cuda_dropout(x: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
    """Replacement for `torch.nn.functional.dropout` that uses the CUDA kernel, with a mask of one byte per element."""
    if not training or p == 0.0:
        return x
    return torch.ops.aten.native_dropout(x, p, True)[0]


if __name__ == "__main__":
    main()
