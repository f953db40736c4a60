"""Which operators of torch a micro-batch calls, with what shapes: traced without memory, or timed where it really runs.

1. A `Work` says what is computed: model, micro-batch, precision, recomputed blocks, loss.
2. `traced(work)` runs its forward and backward pass on fake tensors, which have shapes and no memory, and counts the
   operators. It takes one to three CPU-seconds, and is kept in the user's state folder by the work's digest.
3. `timed(work, …)` runs it on real ones and takes the time of every operator; a calibration is made of these.

In:  Work(S/16, micro_batch=8, precision="fp32")
Out: Trace(operations={Operation("addmm", "float32", 1394606080, 7063680, (1576, 1152, 384)): 12, …}, calls=1594, …)
"""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import models
from data.files import state_folder, write_whole
from models import ModelConfig
from models.catalog import FAMILIES
from pipeline.config import require
from pipeline.evaluation.features import normalise
from pipeline.optimization.losses import LOSSES, dense_targets, mixup
from pipeline.plan.memory_traces import forget_unused, mark_used
from pipeline.versions import code_version

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# These hand out memory that is there already, or answer a question: they take a call's time and nothing else.
WITHOUT_WORK = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "detach", "alias", "split", "slice", "select"),
    *("as_strided", "unsqueeze", "squeeze", "unbind", "chunk", "split_with_sizes", "empty", "empty_like", "narrow"),
    *("lift_fresh", "reshape", "unfold", "empty_strided", "new_empty", "diagonal", "is_same_size"),
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class Operation(NamedTuple):
    """One call of an operator, as far as its time depends on it."""

    name: str  # of torch's operator: "addmm"
    dtype: str  # of its result
    flops: int  # 0 for what only moves and maps numbers
    bytes: int  # of all tensors that it reads and writes
    shape: tuple[int, ...]  # of a product: rows, columns, what is summed over, products; () of all others


@dataclass(frozen=True)
class Work:
    """What is computed of a micro-batch by one worker."""

    model: ModelConfig
    micro_batch: int
    precision: str
    recomputed: int = 0  # blocks
    loss: str = "sigmoid"
    label_smoothing: float = 0.0
    mixup: float = 0.0
    device: str = "cpu"  # or cuda, where attention and some others have operators of their own

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**{name: value for name, value in vars(self).items()}, "model": models.to_dict(self.model)}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> "Work":
        """Return what `plain` was made of."""
        return cls(**{**values, "model": models.from_dict(values["model"])})


@dataclass
class Trace:
    """How often a micro-batch calls each operator, in its forward and in its backward pass."""

    forward: Counter[Operation] = field(default_factory=Counter)
    backward: Counter[Operation] = field(default_factory=Counter)
    forward_calls: int = 0  # those that only hand out memory included
    backward_calls: int = 0


# ------------------------------------------------------------------------ what runs


def built(work: Work, device: torch.device) -> nn.Module:
    """Return the freshly initialised model of a work, in training mode, in the work's precision.

    Not with whatever lies in its memory: an engine whose gradient is not finite takes no step.
    """
    model = unfilled(work, device)
    generator = torch.Generator(device).manual_seed(0)
    models.initialize(model, generator)  # type: ignore[arg-type]
    return model


def unfilled(work: Work, device: torch.device) -> nn.Module:
    """Return the model of a work with any weights, in training mode, in the work's precision."""
    _, module = FAMILIES[work.model.family]
    dtype = DTYPES[work.precision]
    with torch.device(device):
        model: nn.Module = module(work.model).train()  # type: ignore[call-arg, arg-type]
    # Put there one by one: fake parameters refuse to be converted in place.
    for part in model.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to(dtype))
    model.recomputed_blocks = work.recomputed  # type: ignore[assignment]
    return model


def inputs(work: Work, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a micro-batch as the loader gives it: images (b, 3, S, S) uint8, labels (b, 1) int64."""
    height, width = work.model.image_size
    images = torch.zeros(work.micro_batch, 3, height, width, dtype=torch.uint8, device=device)
    return images, torch.zeros(work.micro_batch, 1, dtype=torch.int64, device=device)


def loss_of(work: Work, forward: Callable[..., Any], images: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss of a micro-batch, as pipeline.objectives computes it."""
    pixels = normalise(images, DTYPES[work.precision], images.device)
    if work.model.family == "masked":
        return models.masked.objective(forward, pixels, torch.Generator(images.device).manual_seed(0))[0]
    targets = dense_targets(labels, work.model.classes, work.label_smoothing)
    if work.mixup:
        pixels, targets = mixup(pixels, targets, work.mixup, (0, 0))
    return LOSSES[work.loss](forward(pixels), targets).sum()


# ------------------------------------------------------------------------ looking on


class Onlooker(TorchDispatchMode):
    """Sees every operator that torch calls within the block, also in the backward pass."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """With a `clock` the seconds of every call are kept, else they are only counted."""
        super().__init__()
        self.clock = clock
        self.calls = 0
        self.counts: Counter[Operation] = Counter()
        self.seconds: list[tuple[Operation, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        # Fake tensors are asked for their device, real ones are not.
        if namespace == "prim":
            return func(*args, **kwargs)
        self.calls += 1
        if name in WITHOUT_WORK:
            return func(*args, **kwargs)
        began = self.clock() if self.clock else 0.0
        out = func(*args, **kwargs)
        ended = self.clock() if self.clock else 0.0
        operation = described(name, func, args, kwargs, out)
        if self.clock:
            self.seconds.append((operation, ended - began))
        else:
            self.counts[operation] += 1
        return out


def described(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Operation:
    """Return what an operator's time depends on, from one call of it."""
    read = list(tensors_in(args))
    written = list(tensors_in(out))
    size = 0
    for tensor in (*read, *written):
        # An expanded tensor has fewer numbers than its shape says.
        distinct = 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            distinct *= length if stride else 1
        size += distinct * tensor.element_size()
    dtype = str((written or read)[0].dtype).removeprefix("torch.") if (written or read) else ""
    shape: tuple[int, ...] = ()
    flops = 0
    if name in PRODUCTS:
        left, right = read[-2], read[-1]
        rows, summed = left.shape[-2:]
        products = math.prod(left.shape[:-2])
        shape = (rows, right.shape[-1], summed, products)
        flops = 2 * math.prod(shape)
    elif name.startswith("_scaled_dot_product"):
        is_backward = name.endswith("_backward")
        query, key = read[1:3] if is_backward else read[:2]
        products = math.prod(query.shape[:-1]) * key.shape[-2] * query.shape[-1]
        # Forward two products, backward five: the scores are computed again.
        flops = 2 * products * (5 if is_backward else 2)
    elif func.overloadpacket in flop_registry:
        flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
    return Operation(name, dtype, int(flops), size, tuple(int(length) for length in shape))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate the tensors in arguments or results, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


# ------------------------------------------------------------------------ tracing


def traced(work: Work) -> Trace:
    """Return the operators of a work; kept by its digest, so that it is traced once."""
    path = kept_at(work)
    try:
        trace = of_plain_trace(json.loads(path.read_text()))
        mark_used(path)
        return trace
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or torn: it is made again
    trace = trace_of(work)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plain_trace(trace)))
        forget_unused(path.parent)
    except OSError:
        pass  # the next plan traces again
    return trace


def trace_of(work: Work) -> Trace:
    """Run a work's forward and backward pass on fake tensors. Raises ConfigError where this torch lacks the device."""
    require(
        work.device == "cpu" or torch.cuda.is_available(),
        "the calibration is of GPUs, and torch has none here: plan where the workers run",
    )
    from torch._subclasses.fake_tensor import FakeTensorMode

    trace = Trace()
    with FakeTensorMode():
        device = torch.device(work.device)
        model = unfilled(work, device)
        images, labels = inputs(work, device)
        with Onlooker() as forward:
            loss = loss_of(work, model, images, labels)
        with Onlooker() as backward:
            loss.backward()  # type: ignore[no-untyped-call]
    trace.forward = forward.counts
    trace.backward = backward.counts
    trace.forward_calls = forward.calls
    trace.backward_calls = backward.calls
    return trace


def kept_at(work: Work) -> Path:
    """Return the file in which a work's trace is kept."""
    # What the code or torch calls may change with either.
    described_work = json.dumps([work.plain(), code_version(), torch.__version__], sort_keys=True)
    digest = hashlib.sha256(described_work.encode()).hexdigest()
    return state_folder() / "traces" / f"{digest[:24]}.json"


def plain_trace(trace: Trace) -> dict[str, Any]:
    """Return a trace as JSON has it."""
    plain = asdict(trace)
    for part in ("forward", "backward"):
        plain[part] = [[*operation, count] for operation, count in getattr(trace, part).items()]
    return plain


def of_plain_trace(plain: Mapping[str, Any]) -> Trace:
    """Return what `plain_trace` was made of."""
    trace = Trace(forward_calls=plain["forward_calls"], backward_calls=plain["backward_calls"])
    for part in ("forward", "backward"):
        for name, dtype, flops, size, shape, count in plain[part]:
            getattr(trace, part)[Operation(name, dtype, flops, size, tuple(shape))] = count
    return trace


# ------------------------------------------------------------------------ timing


@dataclass
class Timing:
    """What a work took where it really ran."""

    seconds: dict[Operation, list[float]]  # of each call
    rounds: int  # under the onlooker
    calls: int  # of a round
    without_onlooker_s: list[float]  # of the forward and backward pass as it runs in training; [] where not asked for


def timed(
    work: Work,
    device: torch.device,
    rounds: int,
    clock: Callable[[], float],
    *,
    plainly: bool = False,
    long_s: float = math.inf,
) -> Timing:
    """Run a work `rounds` times under an onlooker with this clock; `plainly` as often without one too.

    A work whose passes take `long_s` under the onlooker is run under it once.
    """
    model = built(work, device)
    images, labels = inputs(work, device)

    def run() -> None:
        # Training's gradients are new in every step.
        model.zero_grad(set_to_none=True)
        loss_of(work, model, images, labels).backward()  # type: ignore[no-untyped-call]

    seconds: dict[Operation, list[float]] = {}
    plain_s = []
    calls = 0
    looked_on = 0
    is_long = False
    # The first one makes what is kept, and says nothing of how long the others take.
    run()
    for _ in range(rounds):
        if not is_long:
            began = clock()
            with Onlooker(clock) as onlooker:
                run()
            is_long = clock() - began > long_s
            looked_on += 1
            calls = onlooker.calls
            for operation, took in onlooker.seconds:
                seconds.setdefault(operation, []).append(took)
        if plainly:
            began = clock()
            run()
            plain_s.append(clock() - began)
    return Timing(seconds, looked_on, calls, plain_s)


def cuda_clock() -> float:
    """Return the time when all that was given to the GPU is done."""
    torch.cuda.synchronize()
    return time.perf_counter()
