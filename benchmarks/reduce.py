"""Measure accuracy and cost of reducing bf16 gradients over the workers in fp32 instead of bf16, with our engine.

    OMP_NUM_THREADS=1 python benchmarks/reduce.py [--worlds 2 4 8 16] [--model S/16] [--zero 2] [--rounds 9]

First table: the error of the optimizer's mean gradient relative to the mean in float64. A worker's gradient is a common
part plus noise of four times its size, rounded to bf16 as by autograd. A ring reduction, which adds worker after
worker, is simulated for large numbers of workers. Second table: training steps with either sum, in turn.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import models
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.engine.engine import Engine
from pipeline.engine.settings import deepspeed_config
from pipeline.optimization import OptimConfig
from pipeline.process_group import join_group

ELEMENTS = 100_000  # size of the measured gradient
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def gradient_of(rank: int) -> Tensor:
    common = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1000))
    noise = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))
    return (common + 4 * noise).to(torch.bfloat16)


def mean_of(world: int) -> Tensor:
    total = torch.zeros(ELEMENTS, dtype=torch.float64)
    for rank in range(world):
        total += gradient_of(rank).double()
    return total / world


def error_in_a_ring(world: int, kind: str) -> float:
    """Return the relative error of a ring reduction; each worker adds its gradient, divided by the world size."""
    total = torch.zeros(ELEMENTS, dtype=TYPES[kind])
    for rank in range(world):
        total += (gradient_of(rank).to(TYPES[kind]) / world).to(TYPES[kind])
    expected = mean_of(world)
    return float((total.double() - expected).norm() / expected.norm())


def make(model: nn.Module, kind: str, task: dict[str, Any], clip: float) -> Engine:
    settings = deepspeed_config(
        zero=task["zero"], precision="bf16", micro_batch=1, accumulation=1, clip=clip, user_file=None
    )
    settings["communication_data_type"] = kind
    if task["zero"] == 3:  # partition small parameters too
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return Engine(model, set(), OptimConfig(), settings)


def errors(task: dict[str, Any]) -> dict[str, float]:
    """Return the error of the optimizer's mean gradient, by reduction dtype."""
    join_group(600)
    rank = dist.get_rank()
    expected = mean_of(dist.get_world_size())
    error_of_kind = {}
    for kind in TYPES:
        engine = make(nn.Linear(ELEMENTS, 1, bias=False), kind, task, clip=0.0)
        engine.backward(engine.forward(gradient_of(rank)).float().sum())
        engine.end_micro_batch(0.0)
        squared_error = torch.zeros((), dtype=torch.float64)
        for fragment in engine.fragments(("exp_avg",)):
            handed = fragment.tensors["exp_avg"].double() / (1 - OptimConfig().beta1)
            squared_error += (handed - expected[fragment.start : fragment.start + len(handed)]).square().sum()
        dist.all_reduce(squared_error)
        error_of_kind[kind] = float(squared_error.sqrt() / expected.norm())
        engine.close()
    dist.destroy_process_group()
    return error_of_kind


class Bytes:
    """Counter of the bytes that a worker passes to reductions; install it before DeepSpeed looks up the functions."""

    def __init__(self) -> None:
        self.count = 0
        for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "_reduce_scatter_base"):
            setattr(dist, name, self.counted(getattr(dist, name), of_argument=1 if "scatter" in name else 0))

    def counted(self, reduction: Any, of_argument: int) -> Any:
        def counting(*tensors: Any, **options: Any) -> Any:
            tensor = tensors[of_argument] if len(tensors) > of_argument else options.get("input", options.get("tensor"))
            self.count += tensor.numel() * tensor.element_size()
            return reduction(*tensors, **options)

        return counting


def steps(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the seconds of each step and the bytes of one step, by reduction dtype."""
    reduced = Bytes()
    join_group(600)
    engines = {}
    for kind in TYPES:
        model = models.from_config(models.config_of(task["model"], 224, 1000), torch.Generator().manual_seed(0))
        engines[kind] = make(model, kind, task, clip=1.0)
    seconds: dict[str, list[float]] = {kind: [] for kind in TYPES}
    bytes_of_kind = {}
    for number in range(task["rounds"] + 1):
        order = list(engines.items())
        if number % 2:
            order.reverse()
        for kind, engine in order:
            dist.barrier()
            before = reduced.count
            began = time.monotonic()
            generator = torch.Generator().manual_seed(number * 1000 + dist.get_rank())
            images = torch.randn(1, 3, 224, 224, generator=generator).to(engine.dtype)
            labels = torch.randint(1000, (1,), generator=generator)
            engine.backward(F.cross_entropy(engine.forward(images).float(), labels))
            engine.end_micro_batch(1e-4)
            bytes_of_kind[kind] = reduced.count - before
            dist.barrier()
            if number:  # the first step warms up caches and allocators
                seconds[kind].append(time.monotonic() - began)
    dist.destroy_process_group()
    return {"seconds": seconds, "bytes": bytes_of_kind}


def all_reduces(task: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds that the backend needs to all-reduce `elements` numbers, by dtype, measured in turn."""
    join_group(600)
    seconds: dict[str, list[float]] = {kind: [] for kind in TYPES}
    for number in range(task["rounds"] + 1):
        for kind, dtype in TYPES.items():
            flat = torch.zeros(task["elements"], dtype=dtype)
            dist.barrier()
            began = time.monotonic()
            dist.all_reduce(flat)
            dist.barrier()
            if number:
                seconds[kind].append(time.monotonic() - began)
    dist.destroy_process_group()
    return seconds


def run(function: Any, world: int, task: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        cluster = ClusterConfig(workers=world, backend="processes")
        return run_worker_group(function, task, cluster=cluster, name="benchmark", directory=Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--rings", type=int, nargs="*", default=[2, 16, 64, 256])
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    print("| workers | ZeRO | error, summed in bf16 | in fp32 |\n|--:|---|--:|--:|")
    for world in options.worlds:
        error_of_kind = run(errors, world, {"zero": options.zero})
        print(f"| {world} | {options.zero} | {error_of_kind['bf16']:.2%} | {error_of_kind['fp32']:.0e} |", flush=True)
    for world in options.rings:
        in_bf16 = error_in_a_ring(world, "bf16")
        in_fp32 = error_in_a_ring(world, "fp32")
        print(f"| {world} | simulated ring | {in_bf16:.2%} | {in_fp32:.0e} |", flush=True)

    parameters = models.parameters_of(models.config_of(options.model, 224, 1000))
    rounds = options.rounds
    step = run(steps, 2, {"zero": options.zero, "model": options.model, "rounds": rounds})
    all_reduce = run(all_reduces, 2, {"elements": parameters, "rounds": rounds})
    print("\n| summed in | step, s | reduced MB per step | all-reduce of the same size, s |\n|---|--:|--:|--:|")
    for kind in TYPES:
        seconds = statistics.median(step["seconds"][kind])
        megabytes = step["bytes"][kind] / 1e6
        print(f"| {kind} | {seconds:.3f} | {megabytes:.1f} | {statistics.median(all_reduce[kind]):.3f} |")
    ratios = []
    for in_bf16_s, in_fp32_s in zip(step["seconds"]["bf16"], step["seconds"]["fp32"], strict=True):
        ratios.append(in_fp32_s / in_bf16_s)
    print(f"\nstep time with fp32 relative to bf16, median of the per-round ratios: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    # Import this module under its name, because workers cannot import functions from `__main__`.
    from benchmarks import reduce

    reduce.main()
