"""A worker's step on a GPU that is not there, and what its tensors are: `python -m tests.rehearsal GUARD STEP`.

GUARD is the library made of cuda_guard.cpp; STEP is a `pipeline.planning.memory_traces.StepToTrace` as JSON, with the
micro-batch beside it. The worker's own code runs with fake tensors on the device "cuda": normalise, the model, the
loss, DeepSpeed's ZeRO around it, the fused AdamW. One line of JSON comes out:

    {"devices": {"forward": {"cuda": 4100}, …}, "dtypes": {"forward": {"bfloat16": 3900, …}, …}, "mixed": [],
     "shapes": {"logits": [8, 10]}, "updates": 2, "parts": {"STATES": …}}
"""

# The library is loaded before torch: torch asks once which devices there are.
import ctypes
import json
import os
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import gc
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import models
from models import layers, vit
from models.catalog import FAMILIES
from pipeline import config
from pipeline.planning.gpu_kernels import fused_attention
from pipeline.planning.live_bytes import Kind, LiveBytes
from pipeline.planning.memory_trace import TracedWorker, fake_workers, take_step
from pipeline.start import build_engine
from pipeline.training_config import TrainConfig

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)  # an H100's


class Looking(LiveBytes):
    """Counts, beside the bytes of the GPU alone, on which devices and of which types the operations' results are."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: dict[str, Counter[str]] = defaultdict(Counter)
        self.dtypes: dict[str, Counter[str]] = defaultdict(Counter)
        self.mixed: list[str] = []  # operations on tensors of two devices, copies between them excepted
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(function, types, arguments, options)
        self.kernels[function.name()] += 1
        devices = set()
        for leaf in tree_leaves((arguments, options)):
            if isinstance(leaf, Tensor) and leaf.ndim > 0:
                devices.add(leaf.device.type)
        copies = "copy" in function.name()
        if len(devices - {"meta"}) > 1 and not copies:
            self.mixed.append(function.name())
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.devices[self._phase][leaf.device.type] += 1
                self.dtypes[self._phase][str(leaf.dtype).removeprefix("torch.")] += 1
        return result

    def _see(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            super()._see(tensor)


def rehearse(step: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """Take three steps, and describe the last one."""
    # DeepSpeed asks its accelerator where tensors go; the one for CPUs does not ask for a driver.
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    cfg = config.build(TrainConfig, step["config"], "config")
    model_config = models.from_dict(step["model"])
    with (
        fake_workers(step["world"]),
        patch.object(CPU_Accelerator, "device_name", lambda *_: "cuda:0"),
        patch.object(CPU_Accelerator, "current_device_name", lambda *_: "cuda:0"),
        # Torch sums bf16 in another way on older GPUs, and asks the driver how old this one is.
        patch.object(torch.cuda, "get_device_capability", lambda *_: CAPABILITY),
        # Torch would look for the properties of a real device to choose its kernel.
        patch.object(layers, "attend", fused_attention),
        patch.object(vit, "attend", fused_attention),
        FakeTensorMode(allow_non_fake_inputs=True),
        Looking() as look,
    ):
        _, module = FAMILIES[model_config.family]
        with torch.device("cuda"):
            network = module(model_config)
        network.recomputed_blocks = step["recomputed"]
        engine = build_engine(cfg, network, step["accumulation"])
        worker = TracedWorker(cfg, GPU, model_config, engine)
        shapes = {}

        def note(_module: object, _inputs: object, logits: Tensor) -> None:
            shapes["logits"] = list(logits.shape)

        engine.model.register_forward_hook(note)
        for _ in range(2):
            take_step(worker, step["accumulation"], micro_batch, look.enter)
        gc.collect()
        living = Counter()
        for _, kind, size in look.events:
            living[kind] += size
        look.events = []
        look.devices.clear()
        look.dtypes.clear()
        take_step(worker, step["accumulation"], micro_batch, look.enter)
    most: Counter[Kind] = Counter()
    for _, kind, size in look.events:
        living[kind] += size
        if living.total() > most.total():
            most = living.copy()
    return {
        "devices": look.devices,
        "dtypes": look.dtypes,
        "mixed": sorted(set(look.mixed)),
        "kernels": look.kernels,
        "shapes": shapes,
        "parameters": sorted({f"{p.device} {p.dtype}" for p in engine.model.parameters()}),
        "updates": engine.updates,
        "parts": {kind.name: most[kind] for kind in Kind},
    }


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    print(json.dumps(rehearse(**json.loads(sys.argv[2]))))
