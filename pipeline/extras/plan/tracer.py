"""Runs a step of training without computing it, in a process of its own, and says what lives at its fullest moments.

    echo '{"model": {…}, "config": {…}, "world": 8, …}' | python -m pipeline.extras.plan.tracer

1. Everything is the real thing: the model, DeepSpeed around it, the recipe's loss, dropout, recomputed blocks and
   optimizer. Only its tensors are fake: they have shapes and no numbers. So are the other workers (a "fake" group).
2. `LiveBytes` sees every operation of torch, and notes memory that is made and given back, with what it is for. It also
   allocates what real workers and kernels would beside what is seen of them.
3. One step is taken to start with: optimizers and ZeRO 3 set things apart at their first.
4. One step is written down with micro-batches of 2 images and one with 3. Event for event, what does not differ
   between them does not depend on the micro-batch, and what does grows with every image.
5. Out come the moments at which most lives, for each micro-batch from 2 on: at small ones it may be the optimizer's
   step, at large ones the middle of the backward pass.

It has its own process: a fake group, and what takes the place of DeepSpeed's checks, are there for a whole process.
"""

import dataclasses
import gc
import json
import os
import sys
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
from pipeline.extras.plan.memory_traces import Kind, Moment
from pipeline.phases import Phase
from pipeline.start import Worker, build_engine
from pipeline.training_config import TrainConfig

SMALL = 2  # images of a micro-batch; with one image, axes of length 1 are copied less often than any other
LARGE = 3

PHASES = {
    "build": Kind.STATES,
    "batch": Kind.IMAGES,
    "forward": Kind.ACTIVATIONS,
    "backward": Kind.GRADIENTS,
    "recompute": Kind.ACTIVATIONS,  # amid the backward pass
    "update": Kind.GRADIENTS,
}
Event = tuple[str, Kind, int]  # (phase, what the memory is for, bytes more or less)


@dataclass(frozen=True)
class TracedGroup:
    """Has the fields of a Group that an objective needs."""

    device: torch.device
    world: int = 1


@dataclass(frozen=True)
class TracedData:
    """Has the field of StageData that an objective needs."""

    phases: Sequence[Phase]  # one, of whole images


@dataclass(frozen=True)
class TracedWorker:
    """Has the fields of a Worker that an objective needs."""

    cfg: TrainConfig
    group: TracedGroup
    model_config: ModelConfig
    engine: Engine
    data: TracedData


def main() -> None:
    """Read a step from stdin, write what lives in it to stdout: a line of JSON."""
    # DeepSpeed and torch print what they like: the answer gets a place of its own.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(trace(**json.load(sys.stdin))), file=answer, flush=True)
    os._exit(0)  # fake workers and tensors leave nothing that an orderly end would have to close


def trace(
    model: dict[str, Any], config: dict[str, Any], world: int, accumulation: int, recomputed: int, is_gpu: bool
) -> dict[str, Any]:
    """Trace the step that a `memory_traces.StepToTrace` describes; return its fullest moments."""
    cfg = build_config(TrainConfig, config, "config")
    model_config: ModelConfig = models.from_dict(model)
    with ExitStack() as around:
        around.enter_context(fake_workers(world))
        around.enter_context(patch("pipeline.engine.deepspeed.over_gloo", lambda: not is_gpu))
        # Models, losses and optimizers keep what they would on a GPU with flash attention.
        if is_gpu:
            around.enter_context(patch.object(vit, "attend", fused_attention))
            around.enter_context(patch.object(torch.optim, "AdamW", fused_adamw))
            around.enter_context(patch.object(F, "dropout", cuda_dropout))
        around.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        live = around.enter_context(LiveBytes(over_gloo=not is_gpu))

        # Model and engine as a worker builds them. First weights are not drawn: that takes no memory which stays.
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
            # What lies in cycles is given back whenever Python looks for them: here before the step and not amid it.
            gc.collect()
            live.events = []
            gc.disable()
            take_step(worker, accumulation, images, live.enter)
            gc.enable()
            steps.append(live.events)
    return fullest_moments(before, *steps)


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


def take_step(worker: TracedWorker, accumulation: int, images: int, enter: Callable[[str], None]) -> None:
    """Take a step as `pipeline.train` does, with `images` in every micro-batch; `enter` hears where it is."""
    cfg = worker.cfg
    size = worker.model_config.image_size
    loss_sum = torch.zeros((), device=worker.group.device)
    for number in range(accumulation):
        enter("batch")
        pixels = torch.zeros(images, 3, *size, dtype=torch.uint8, device=worker.group.device)
        labels = torch.zeros(images, cfg.data.max_labels, dtype=torch.int64, device=worker.group.device)
        batch = Batch(0, pixels, labels, torch.zeros(images, 3, dtype=torch.int64), (), Wait())
        inputs = normalise(batch.images, worker.engine.dtype, worker.group.device)
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


def fullest_moments(before: list[Event], small: list[Event], large: list[Event]) -> dict[str, Any]:
    """Return the moments at which most lives for some micro-batch, all kinds together and activations alone.

    The step has been taken with SMALL and with LARGE images, `before` is what happened until then.
    """
    _, kinds_before, bytes_before = zip(*before, strict=True)
    phases, kinds, bytes_small = zip(*small, strict=True)
    phases_of_large, kinds_of_large, bytes_large = zip(*large, strict=True)
    is_same = phases == phases_of_large and kinds == kinds_of_large
    assert is_same, "a step's order depends on the micro-batch"
    per_image = (np.array(bytes_large, float) - np.array(bytes_small, float)) / (LARGE - SMALL)
    fixed = np.array(bytes_small, float) - SMALL * per_image

    # What lives after each event, (kinds, events): the fixed bytes, and those of every image.
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


# ------------------------------------------------------------------------------------------------ what lives


class LiveBytes(TorchDispatchMode):
    """Counts, inside its block, the bytes that live; `events` are changes of that number with their kind.

    Memory that an operation made is counted once, however many views there are of it, until its last tensor is gone.
    With fake tensors no number is ever computed: it is the same memory to the byte, of a model of any size.

        with LiveBytes() as live: live.enter("forward"); y = x @ w; live.enter("backward"); y.backward(…)
        → live.events = [("forward", Kind.ACTIVATIONS, 4096), …, ("backward", Kind.ACTIVATIONS, -4096)]
    """

    def __init__(self, *, over_gloo: bool = False) -> None:
        super().__init__()
        self.over_gloo = over_gloo
        self.events: list[Event] = []
        self._phase = "build"
        self._living: dict[int, tuple[weakref.ref[Any], Kind, int]] = {}  # by the storage's address

    def enter(self, phase: str) -> None:
        """Name what is computed from here on: one of `PHASES`."""
        assert phase in PHASES, phase
        self._phase = phase

    def watch(self, block: nn.Module) -> None:
        """Tell a block's second forward pass, amid the backward pass, from the backward pass itself."""

        def begin(*_: object) -> None:
            if self._phase == "backward":
                self._phase = "recompute"

        def end(*_: object) -> None:
            if self._phase == "recompute":
                self._phase = "backward"

        block.register_forward_pre_hook(begin)
        # A second forward pass ends as soon as everything that is needed is there: by an exception.
        block.register_forward_hook(end, always_call=True)

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(arguments[0], FakeTensor):
            # A number that lets a step of training go on: norms and losses are finite, flags say no.
            if arguments[0].dtype.is_floating_point:
                return 1.0
            return False if arguments[0].dtype == torch.bool else 0
        if function is torch.ops.aten.mse_loss.default:
            return self._mse_loss(*arguments, **(options or {}))
        # Collectives are operations too: DeepSpeed's are c10d's.
        name = function.name()
        buffers: list[Tensor] = []  # as long as the collective lasts
        if self.over_gloo:
            for tensor in copied_by_gloo(name, arguments):
                buffers.append(torch.empty_like(tensor))
                self._track(buffers[-1])
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._track(leaf)
        # A collective fills tensors that were made before it: only now it is known what they are for.
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
        """Take the place of torch's kernel (Loss.cpp): the same shape and memory, and no right number.

        Where the errors are added up (`reduction` is not 0) it computes every element's into a tensor of its own, and
        the result, one number, keeps the memory of another one for as long as it lives.
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
        # A tensor of the meta device has a size and no memory; DeepSpeed keeps the shapes of parameters in some.
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        size = storage.nbytes()
        if address in self._living:
            reference, kind, known_size = self._living[address]
            # Storages are resized in place: ZeRO 3 does so with what it has gathered.
            if size != known_size:
                self._living[address] = (reference, kind, size)
                self.events.append((self._phase, kind, size - known_size))
            return
        kind = PHASES[self._phase]
        # ZeRO 3 gathers weights by hooks of the forward pass, for which none are recorded.
        if self._phase == "forward" and not torch.is_grad_enabled():
            kind = Kind.GATHERED
        self._living[address] = (weakref.ref(storage, partial(self._untrack, address)), kind, size)
        self.events.append((self._phase, kind, size))

    def _untrack(self, address: int, _: object) -> None:
        # The memory at this address is given back.
        _, kind, size = self._living.pop(address)
        self.events.append((self._phase, kind, -size))


def copied_by_gloo(name: str, arguments: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of a collective that gloo, on CPUs, copies beside what is seen of it (ProcessGroupGloo.cpp).

    It reduce-scatters by summing a copy of the whole input, and gathers into a tensor of its own, which it then copies
    into the result. It sums and sends in place. NCCL takes the tensors that it is given, and buffers that it has from
    the start. `arguments` are those of torch's operator. Raises AssertionError where what gloo takes is not known.
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
    assert not is_collective or name in in_place, f"{name}: what gloo allocates for it has not been counted"
    return []


# ------------------------------------------------------------------------------------------------ as on a GPU

# Three things differ between torch's kernels for CPUs and for CUDA, in what they hold on to for the backward pass:
# 1. attention: fused there, so that no matrix of tokens × tokens is kept, but a number for every query and head. A bias
#    on the attention (relative positions) needs another fused kernel, which keeps the bias;
# 2. dropout: a mask of one byte an element there, and of the activations' own type on CPUs;
# 3. AdamW: fused there, without a copy of the state on the way.

HEAD_MULTIPLE = 8  # flash attention pads the width of a head to it
BIAS_MULTIPLE = 16  # and the other kernel a row of the bias


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Take the place of `models.vit.attend`."""
    # Flash attention takes half precision and no bias; the kernel that torch chooses otherwise takes both.
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
    """Take the place of torch.optim.AdamW."""
    return ADAMW(groups, **{**options, "fused": True})


ADAMW = torch.optim.AdamW


def cuda_dropout(x: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
    """Take the place of `torch.nn.functional.dropout`."""
    if not training or p == 0.0:
        return x
    return torch.ops.aten.native_dropout(x, p, True)[0]


if __name__ == "__main__":
    main()
