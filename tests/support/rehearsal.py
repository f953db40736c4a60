"""Rehearse a worker's GPU step with fake tensors, without a GPU: `python -m tests.support.rehearsal GUARD STEP`.

GUARD is the library compiled from cuda_guard.cpp; STEP is a `pipeline.extras.plan.memory_traces.StepToTrace` and the
micro-batch, as JSON. The real code of the worker runs with fake tensors on the device "cuda":

1. Prefetch the loader's micro-batches, which are real tensors in pinned memory, on a separate stream.
2. Normalise; run the model, the loss and the backward pass in DeepSpeed, on its code paths for GPUs.
3. Compute the norm and the values that the workers reduce together; update with the fused AdamW.

`Looking` observes every operation. The result is one line of JSON:

    {"devices": {"forward": {"cuda": 4100}, …}, "mixed": [], "copies": [], "reads": {"update": 5}, "updates": 3,
     "outputs": {"blocks.0": ["bfloat16", 16, 197, 384], …}, "parts": {"STATES": …}, …}
"""

# Load the library before torch: torch looks for devices only once.
import ctypes
import json
import os
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

import models
from data.loader import Batch, Wait, copied, prefetched_to_device
from models import vit
from models.catalog import module_of, normalise
from pipeline import config
from pipeline.batches import OBJECTIVES
from pipeline.checkpoints.saver import host_memory
from pipeline.extras.plan.memory_traces import Kind
from pipeline.extras.plan.tracer import LiveBytes, TracedData, TracedGroup, TracedWorker, fake_workers, fused_attention
from pipeline.start import Worker, build_engine
from pipeline.train import finish_step
from pipeline.training_config import TrainConfig
from tests.support.waits import Waits, compute_as_on_a_gpu

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)  # an H100's


class Streams:
    """Replaces a GPU's streams, and records errors of copies on a separate stream."""

    def __init__(self) -> None:
        self.is_aside = False  # whether operations are launched on the copy stream now
        self.has_waited = True  # whether the compute stream has waited for all copies so far
        self.unrecorded: dict[int, Tensor] = {}  # tensors from the copy stream without `record_stream`

    @contextmanager
    def aside(self, stream: object) -> Iterator[None]:
        """Replace `torch.cuda.stream`."""
        self.is_aside = True
        yield
        self.is_aside = False

    def computing(self, device: object = None) -> SimpleNamespace:
        """Replace `torch.cuda.current_stream`."""
        return SimpleNamespace(wait_stream=self.wait)

    def wait(self, stream: object) -> None:
        self.has_waited = True

    def record(self, tensor: Tensor, stream: object) -> None:
        """Replace `Tensor.record_stream`."""
        self.unrecorded.pop(id(tensor), None)

    def made(self, tensor: Tensor) -> None:
        """Record a copy on the copy stream."""
        self.has_waited = False
        self.unrecorded[id(tensor)] = tensor


class Looking(LiveBytes):
    """Counts the devices and types of the operations' results, in addition to the GPU's bytes."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams
        self.devices: dict[str, Counter[str]] = defaultdict(Counter)
        self.dtypes: dict[str, Counter[str]] = defaultdict(Counter)
        self.mixed: list[str] = []  # operations on tensors of two devices, except copies
        self.kernels: Counter[str] = Counter()
        self.copies: list[str] = []  # blocking copies to the GPU: from unpinned memory, or not non_blocking
        self.too_early: list[str] = []  # operations on copied tensors before the compute stream waited
        self.reads: Counter[str] = Counter()  # numbers that the host reads from the GPU, by phase
        self.sums: dict[str, Counter[str]] = defaultdict(Counter)  # types of what collectives send, by their name

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        name = function.name()
        tensors = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        if name == "aten::_local_scalar_dense" and tensors[0].is_cuda:
            self.reads[self._phase] += 1
        is_lifted_from_pinned = name == "aten::lift_fresh" and is_pinned(tensors[0])
        result = super().__torch_dispatch__(function, types, arguments, options)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if is_lifted_from_pinned:
            results[0].lies_in_pinned_memory = True  # type: ignore[attr-defined]

        self.kernels[name] += 1
        self._see_devices(name, tensors)
        if name in ("aten::_to_copy", "aten::copy_"):
            self._see_copy(name, tensors[-1], results[0], arguments, options or {})
        elif any(tensor.is_cuda for tensor in results) and not self.streams.has_waited:
            self.too_early.append(name)
        if name.startswith("c10d::"):
            self.sums[name.removeprefix("c10d::")].update(type_of(tensor) for tensor in tensors)
        for tensor in results:
            self.devices[self._phase][tensor.device.type] += 1
            self.dtypes[self._phase][type_of(tensor)] += 1
        return result

    def _see_devices(self, name: str, tensors: Sequence[Tensor]) -> None:
        devices = {tensor.device.type for tensor in tensors if tensor.ndim > 0}
        if len(devices - {"meta"}) > 1 and "copy" not in name:
            self.mixed.append(name)

    def _see_copy(
        self, name: str, source: Tensor, target: Tensor, arguments: Sequence[Any], options: dict[str, Any]
    ) -> None:
        if source.device.type != "cpu" or not target.is_cuda:
            return
        does_not_block = options.get("non_blocking", False) or (name == "aten::copy_" and arguments[2:] == (True,))
        if not does_not_block or not is_pinned(source):
            self.copies.append(f"{self._phase}: {name} of {type_of(source)} {list(source.shape)}")
        if self.streams.is_aside:
            self.streams.made(target)

    def _track(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            super()._track(tensor)


def type_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a real or fake tensor in host memory is pinned."""
    if type(tensor) is not Tensor:
        return getattr(tensor, "lies_in_pinned_memory", False)
    with _disable_current_modes():  # a fake tensor mode would answer instead
        return tensor.is_pinned()


@dataclass(frozen=True)
class RehearsedWorker(TracedWorker):
    """A worker with the additional fields for the end of a step."""

    saver: Any = field(default_factory=lambda: SimpleNamespace(written=False))
    stop: Any = field(default_factory=lambda: SimpleNamespace(is_requested=lambda: False))


def loaded_batch(cfg: TrainConfig, micro_batch: int, size: tuple[int, int]) -> Batch:
    """Return a micro-batch as the loader yields it on a machine with a GPU: real tensors in pinned memory."""
    pixels = copied(torch.zeros(micro_batch, *size, 3, dtype=torch.uint8))
    labels = copied(torch.zeros(micro_batch, cfg.data.max_labels, dtype=torch.int64))
    ids = copied(torch.zeros(micro_batch, 3, dtype=torch.int64))
    return Batch(0, pixels.permute(0, 3, 1, 2), labels, ids, (), Wait())


def take_step(
    worker: RehearsedWorker, batches: Iterator[Batch], accumulation: int, enter: Callable[[str], None]
) -> None:
    """Take a training step as `pipeline.train` does; `enter` receives the name of each part as it begins."""
    as_worker = cast(Worker, worker)
    loss_sum = torch.zeros((), device=worker.group.device)
    for number in range(accumulation):
        enter("batch")
        batch = next(batches)
        inputs = normalise(batch.images, worker.model_config, worker.engine.dtype, worker.group.device)
        enter("forward")
        loss = OBJECTIVES[worker.cfg.objective](as_worker, 0, inputs, batch)
        enter("backward")
        worker.engine.backward(loss * (1 / len(inputs)))
        loss_sum = loss_sum + loss.detach()
        del inputs, loss
        enter("update")
        if number + 1 < accumulation:
            worker.engine.end_micro_batch(worker.cfg.optim.lr)
    finish_step(as_worker, worker.cfg.optim.lr, loss_sum, bad_samples=0, samples=worker.cfg.batch_size)


def note_outputs(network: torch.nn.Module, outputs: dict[str, list[Any]]) -> None:
    """Make every layer record the type and shape of its output."""

    def noting(name: str) -> Callable[..., None]:
        def note(_module: object, _inputs: object, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[name] = [type_of(output), *output.shape]

        return note

    for name, layer in network.named_modules():
        layer.register_forward_hook(noting(name or "logits"))


def rehearse(step: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """Take three steps and return the report of the last one."""
    # DeepSpeed's accelerator determines the tensors' device; the one for CPUs needs no driver.
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    cfg = config.build(TrainConfig, step["config"], "config")
    model_config = models.from_dict(step["model"])
    compute_as_on_a_gpu(Waits(0))
    streams = Streams()
    with patch.object(torch.cuda, "is_available", lambda: True):
        batch = loaded_batch(cfg, micro_batch, model_config.image_size)
        snapshot = host_memory(1000)
    outputs: dict[str, list[Any]] = {}
    with (
        fake_workers(step["world"]),
        patch.object(CPU_Accelerator, "device_name", lambda *_: "cuda:0"),
        patch.object(CPU_Accelerator, "current_device_name", lambda *_: "cuda:0"),
        # Torch sums bf16 differently on older GPUs, and asks the driver for the GPU's generation.
        patch.object(torch.cuda, "get_device_capability", lambda *_: CAPABILITY),
        # Torch would read a real device's properties to choose its kernel.
        patch.object(vit, "attend", fused_attention),
        patch.object(torch.cuda, "Stream", lambda *_: None),
        patch.object(torch.cuda, "stream", streams.aside),
        patch.object(torch.cuda, "current_stream", streams.computing),
        patch.object(Tensor, "record_stream", lambda tensor, stream: streams.record(tensor, stream)),
        FakeTensorMode(allow_non_fake_inputs=True),
        Looking(streams) as look,
    ):
        module = module_of(model_config)
        with torch.device("cuda"):
            network = module(model_config)
        network.recomputed_blocks = step["recomputed"]
        engine = build_engine(cfg, network, step["accumulation"])
        data = TracedData(cfg.phases(1, model_config))
        worker = RehearsedWorker(cfg, TracedGroup(GPU, step["world"]), model_config, engine, data)
        note_outputs(engine.model, outputs)
        batches = prefetched_to_device(iter(lambda: batch, None), GPU)
        for _ in range(2):
            take_step(worker, batches, step["accumulation"], look.enter)
        gc.collect()
        living = Counter()
        for _, kind, size in look.events:
            living[kind] += size
        look.events = []
        for noted in (look.devices, look.dtypes, look.mixed, look.copies, look.reads, look.sums, look.kernels):
            noted.clear()
        take_step(worker, batches, step["accumulation"], look.enter)
    most: Counter[Kind] = Counter()
    for _, kind, size in look.events:
        living[kind] += size
        if living.total() > most.total():
            most = living.copy()
    states = [state for of_flat in engine.state.optimizer.state.values() for state in of_flat.values()]
    return {
        "devices": look.devices,
        "dtypes": look.dtypes,
        "mixed": sorted(set(look.mixed)),
        "copies": look.copies,
        "too_early": look.too_early,
        "unrecorded": len(streams.unrecorded),
        "reads": look.reads,
        "sums": look.sums,
        "kernels": look.kernels,
        "outputs": outputs,
        "parameters": sorted({f"{p.device} {p.dtype}" for p in engine.model.parameters()}),
        "masters": sorted({f"{flat.device} {flat.dtype}" for flat in engine.state.flats}),
        "moments": sorted({f"{state.device} {state.dtype}" for state in states}),
        "of_this_worker": sum(flat.numel() for flat in engine.state.flats),
        "is_snapshot_pinned": is_pinned(snapshot),
        "updates": engine.updates,
        "parts": {kind.name: most[kind] for kind in Kind},
    }


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    print(json.dumps(rehearse(**json.loads(sys.argv[2]))))
