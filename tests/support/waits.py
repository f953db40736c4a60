"""Count the points of a training step at which the host would wait for a GPU; workers import this module by name.

The tests have no GPU, so this module intercepts the operations that would make the host wait:
1. reads of a number computed on the device: `item`, `float`, `bool` (all call `_local_scalar_dense`), `tolist`, `cpu`,
   `numpy`, and operations whose output shape depends on values;
2. copies from host memory to the device without `non_blocking`, and tensors created on the device from the host's
   numbers;
3. `synchronize` of a device, a stream or an event. DeepSpeed takes different code paths on a CPU. Here its accelerator
   therefore answers like a GPU's, with streams and events that only count.

Tensors that would be in host memory on a GPU machine too are marked, and reading them does not count: tensors created
without a device, results computed only from them, the loader's batches, and AdamW's step counter, which its fused CUDA
kernel reads on the device. Copies to host memory by `to(…)` are missed: here they look like copies to the device.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import batches, train
from pipeline.engine.deepspeed import import_deepspeed
from pipeline.engine.engine import Engine

READS = (Tensor.tolist, Tensor.cpu, Tensor.numpy)
BY_VALUE = ("nonzero", "masked_select", "unique", "_unique2", "is_nonzero", "equal")
FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.from_numpy)


class Seen(Exception):
    """Raised after enough steps: ends the loop without the work at a stage's end."""


class Waits:
    """Lists, for every step, the places in the code at which the host would have waited."""

    def __init__(self, last: int) -> None:
        self.last = last  # step whose waits are counted
        self.steps: list[list[str]] = []

    def begin_step(self) -> None:
        """Assign all later waits to the next step."""
        if len(self.steps) == self.last:
            raise Seen
        self.steps.append([])

    def note(self, kind: str) -> None:
        """Record a wait of the host in the innermost function of Patchline or DeepSpeed."""
        if not self.steps:
            return
        for frame in reversed(traceback.extract_stack()):
            path = Path(frame.filename)
            if path.name == "waits.py" or "torch" in path.parts or "contextlib" in path.name:
                continue
            self.steps[-1].append(f"{kind} in {path.name}:{frame.name}")
            return


def mark(tensor: Tensor) -> Tensor:
    """Mark a tensor that would be in host memory on a GPU machine too."""
    tensor.on_host = True  # type: ignore[attr-defined]
    return tensor


def is_marked(value: object) -> bool:
    return getattr(value, "on_host", False)


class Calls(TorchFunctionMode):
    """Intercepts Python's calls of torch functions."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in args if isinstance(value, Tensor)]
        device = kwargs.get("device")
        if function is Tensor.to:
            device = device or next((value for value in args[1:] if isinstance(value, (torch.device, str))), None)
            if is_marked(args[0]) and device is not None and not kwargs.get("non_blocking", False):
                self.waits.note("to")
        if function in READS and not is_marked(args[0]):
            self.waits.note(function.__name__)
        if function in FROM_NUMBERS and device is not None:
            self.waits.note(function.__name__)

        result = function(*args, **kwargs)
        is_of_host = all(is_marked(tensor) for tensor in tensors) and device is None
        if isinstance(result, Tensor) and is_of_host and (tensors or function in FROM_NUMBERS):
            mark(result)
        return result


class Operations(TorchDispatchMode):
    """Intercepts torch's operations."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name == "_local_scalar_dense" and not is_marked(args[0]):
            self.waits.note("item")
        if name in BY_VALUE and not is_marked(args[0]):
            self.waits.note(name)
        return function(*args, **(kwargs or {}))


class Stream:
    """Replaces a GPU stream."""

    waits: Waits

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None:
        self.waits.note("stream.synchronize")


class Event:
    """Replaces a GPU event that has always completed."""

    waits: Waits

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits.note("event.synchronize")


def compute_as_on_a_gpu(waits: Waits) -> None:
    """Make DeepSpeed use its GPU code paths in this process from now on."""
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    Stream.waits = waits
    Event.waits = waits
    stream = Stream()
    accelerator = type(get_accelerator())
    accelerator.is_synchronized_device = lambda self: False  # type: ignore[method-assign]
    accelerator.synchronize = lambda self, index=None: waits.note("device.synchronize")  # type: ignore[method-assign]
    accelerator.Stream = property(lambda self: Stream)  # type: ignore[assignment]
    accelerator.Event = property(lambda self: Event)  # type: ignore[assignment]
    accelerator.current_stream = lambda self, index=None: stream  # type: ignore[method-assign]
    accelerator.default_stream = lambda self, index=None: stream  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]


@contextmanager
def seen(waits: Waits) -> Iterator[None]:
    """Record the training loop's waits in the block, step by step."""
    learning_rate = train.learning_rate
    make = Engine.__init__
    wait_for_first_batch = batches.wait_for_first_batch

    def begin_step(*args: Any) -> float:
        waits.begin_step()
        return learning_rate(*args)

    def mark_counts(engine: Engine, *args: Any, **options: Any) -> None:
        make(engine, *args, **options)
        for state in engine.state.optimizer.state.values():
            if "step" in state:
                mark(state["step"])

    def mark_batches(*args: Any) -> Iterator[Any]:
        for batch in wait_for_first_batch(*args):
            for tensor in (batch.images, batch.labels, batch.ids):
                mark(tensor)
            yield batch

    train.learning_rate = begin_step  # type: ignore[assignment]
    Engine.__init__ = mark_counts  # type: ignore[method-assign]
    batches.wait_for_first_batch = mark_batches
    try:
        with Calls(waits), Operations(waits):
            yield
    finally:
        train.learning_rate = learning_rate
        Engine.__init__ = make  # type: ignore[method-assign]
        batches.wait_for_first_batch = wait_for_first_batch


def count(task: dict[str, Any]) -> dict[str, list[str]]:
    """Train every case for this many steps; return the waits of the last step, which neither reports nor saves."""
    waits = Waits(task["steps"])
    compute_as_on_a_gpu(waits)
    counted = {}
    for name, case in task["cases"].items():
        waits.steps.clear()
        with suppress(Seen), seen(waits):
            train.train(case)
        counted[name] = waits.steps[-1]
    dist.destroy_process_group()
    return counted
