"""Measure the cost of `exact_parts`: training steps with and without it, in turn, for several worker counts.

    OMP_NUM_THREADS=1 python benchmarks/exact.py [--model S/16] [--worlds 1 2 4] [--zero 2] [--rounds 9]

All worker counts compute the same global batches. Ratios are medians of the per-round ratios. Memory is a worker's peak
in runs of three steps with only one kind of engine.
"""

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F

import models
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.engine.engine import Engine
from pipeline.engine.exact import ExactEngine
from pipeline.engine.settings import deepspeed_config
from pipeline.monitoring.telemetry import memory_gb
from pipeline.optimization import OptimConfig
from pipeline.process_group import join_group


def worker(task: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each step by kind of engine, the seconds of its sums, and this worker's peak memory."""
    join_group(600)
    engines = {kind: make(kind, task) for kind in task["kinds"]}
    seconds: dict[str, list[float]] = {kind: [] for kind in engines}
    for number in range(task["rounds"] + 1):
        for kind, engine in list(engines.items())[:: -1 if number % 2 else 1]:
            torch.distributed.barrier()
            began = time.monotonic()
            step(engine, number, task)
            torch.distributed.barrier()
            if number:  # the first step warms up caches and allocators
                seconds[kind].append(time.monotonic() - began)
    weights = {kind: digest(engine) for kind, engine in engines.items()}
    sums = engines["exact"].price(task["rounds"]) if "exact" in engines else None  # type: ignore[attr-defined]
    torch.distributed.destroy_process_group()
    return {"seconds": seconds, "weights": weights, "sums": sums, "memory": memory_gb()}


def make(kind: str, task: dict[str, Any]) -> Engine:
    model = models.from_config(models.config_of(task["model"], 224, 1000), torch.Generator().manual_seed(0))
    settings = deepspeed_config(
        zero=task["zero"],
        precision="fp32",
        micro_batch=task["micro_batch"],
        accumulation=task["parts"] // torch.distributed.get_world_size(),
        clip=1.0,
        user_file=None,
    )
    made = partial(ExactEngine, parts=task["parts"]) if kind == "exact" else Engine
    return made(model, models.decayed_parameters(model), OptimConfig(), settings)


def digest(engine: Engine) -> str:
    total = hashlib.sha256()
    for p in engine.model.parameters():
        total.update(p.detach().numpy().tobytes())
    return total.hexdigest()[:8]


def step(engine: Engine, number: int, task: dict[str, Any]) -> None:
    """Run a step on one global batch, with one micro-batch per part."""
    rank = torch.distributed.get_rank()
    parts_here = task["parts"] // torch.distributed.get_world_size()
    for part in range(rank * parts_here, (rank + 1) * parts_here):
        generator = torch.Generator().manual_seed(number * 1000 + part)
        images = torch.randn(task["micro_batch"], 3, 224, 224, generator=generator)
        labels = torch.randint(1000, (task["micro_batch"],), generator=generator)
        engine.backward(F.cross_entropy(engine.forward(images), labels))
        engine.end_micro_batch(1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print("| workers | plain step s | exact / plain | sum s | all-reduce s | GB | GB exact | weights | weights exact |")
    for world in options.worlds:
        measured = measure(options, world, ["plain", "exact"], options.rounds)
        memory = [measure(options, world, [kind], 2)["memory"] for kind in ("plain", "exact")]
        plain, exact = measured["seconds"].values()
        numbers = [statistics.median(plain), statistics.median(b / a for a, b in zip(plain, exact, strict=True))]
        cells = [world, *(f"{n:.3f}" for n in (*numbers, *measured["sums"], *memory)), *measured["weights"].values()]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def measure(options: argparse.Namespace, world: int, kinds: list[str], rounds: int) -> dict[str, Any]:
    task = {**vars(options), "kinds": kinds, "rounds": rounds}
    with tempfile.TemporaryDirectory() as folder:
        cluster = ClusterConfig(workers=world, backend="processes")
        return run_worker_group(worker, task, cluster=cluster, name="benchmark", directory=Path(folder))


if __name__ == "__main__":
    # Import this module under its name, because workers cannot import functions from `__main__`.
    from benchmarks import exact

    exact.main()
