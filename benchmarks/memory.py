"""Compare the memory need that `plan` reports with the peak of torch's allocator in real training steps on a CPU.

    python -m benchmarks.memory                   # all configurations; the lines of the table in benchmarks/README.md
    python -m benchmarks.memory 0:15              # the first 15
    python -m benchmarks.memory "dropout"         # configurations whose description contains the word

Each configuration runs in separate workers (gloo) with real tensors. The counter is an allocator that replaces torch's
(counting_allocator.cpp), independent of the tracer. The models have small widths but complete structures.
"""

import ctypes
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import models
from pipeline.config import build
from pipeline.engine.deepspeed import import_deepspeed
from pipeline.extras.plan.memory import MemoryNeed, memory_need
from pipeline.extras.plan.tracer import TracedData, TracedGroup, TracedWorker, take_step
from pipeline.start import build_engine
from pipeline.training_config import TrainConfig
from pipeline.training_data import batch_arithmetic

PAIR = 2  # workers of a multi-worker configuration


@dataclass(frozen=True)
class Case:
    """A configuration: a model, and overrides of the recipe below."""

    name: str
    model: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)
    world: int = 1

    @property
    def cfg(self) -> TrainConfig:
        micro_batch = self.train.get("micro_batch", 8)
        values = {"data": {"train": "shards"}, "steps": 1, "micro_batch": 8, "loss": "softmax", **self.train}
        values.setdefault("batch_size", micro_batch * self.world)
        return build(TrainConfig, values, "case")

    @property
    def model_config(self) -> models.ModelConfig:
        values = {"image_size": 64, "classes": 10, **self.model}
        name = values.pop("name")
        return models.config_of(name, values.pop("image_size"), values.pop("classes"), **values)


VIT = {"name": "S/16", "width": 96, "depth": 4, "heads": 3, "mlp": 384, "image_size": 128}
LARGE = {"name": "S/16", "width": 256, "depth": 6, "heads": 4, "mlp": 1024, "image_size": 64}
FP32 = {"precision": "fp32"}
CASES = (
    Case("ViT S/16, whole", {"name": "S/16", "image_size": 224}, {"micro_batch": 4}),
    Case("ViT B/16, whole, fp32", {"name": "B/16", "image_size": 224}, {"micro_batch": 2, **FP32}),
    Case("ViT", VIT),
    Case("ViT, fp32", VIT, FP32),
    Case("ViT, ZeRO 0, fp32", VIT, {**FP32, "zero": 0}),
    Case("ViT, ZeRO 1", VIT, {"zero": 1}),
    Case("ViT, ZeRO 3", VIT, {"zero": 3}),
    Case("ViT, sigmoid, smoothing, mixup", VIT, {"loss": "sigmoid", "label_smoothing": 0.1, "mixup": 0.2}),
    Case("ViT, dropout", {**VIT, "dropout": 0.1}),
    Case("ViT, dropout, fp32", {**VIT, "dropout": 0.1}, FP32),
    Case("ViT, stochastic depth", {**VIT, "drop_path": 0.1}),
    Case("ViT, relative positions", {**VIT, "positions": "relative"}),
    Case("ViT, relative positions, fp32", {**VIT, "positions": "relative"}, FP32),
    Case("ViT, learned2d positions", {**VIT, "positions": "learned2d"}),
    Case("ViT, MAP head", {**VIT, "pool": "map"}),
    Case("ViT, GAP, registers", {**VIT, "pool": "gap", "registers": 4}),
    Case("ViT, tanh layer", {**VIT, "representation": 96}),
    Case("ViT, 2 of 4 blocks recomputed", VIT, {"checkpoint_blocks": 2}),
    Case("ViT, all blocks recomputed", VIT, {"checkpoint_blocks": 4, "micro_batch": 16}),
    Case("ViT, dropout, all blocks recomputed", {**VIT, "dropout": 0.1}, {"checkpoint_blocks": 4}),
    Case("ViT, accumulation 3", VIT, {"batch_size": 24}),
    Case("ViT, SGD", VIT, {"optim": {"name": "sgd"}}),
    Case("ViT, Polyak", VIT, {"polyak": 0.999}),
    Case("ViT, exact in 4 parts", VIT, {"exact_parts": 4, "batch_size": 32}),
    Case("wide ViT, few images", LARGE, {"micro_batch": 2}),
    Case("wide ViT, few images, ZeRO 3", LARGE, {"micro_batch": 2, "zero": 3}),
    Case("wide ViT, few images, Polyak, fp32", LARGE, {"micro_batch": 2, "polyak": 0.999, **FP32}),
    Case("wide ViT, ZeRO 1, 2 workers", LARGE, {"zero": 1}, PAIR),
    Case("wide ViT, ZeRO 2, 2 workers", LARGE, {}, PAIR),
    Case("wide ViT, ZeRO 2, 2 workers, accumulation 2", LARGE, {"batch_size": 32}, PAIR),
    Case("wide ViT, ZeRO 3, 2 workers", LARGE, {"zero": 3}, PAIR),
    Case("wide ViT, ZeRO 3, 2 workers, fp32", LARGE, {"zero": 3, **FP32}, PAIR),
    Case("wide ViT, exact in 4 parts, 2 workers", LARGE, {"exact_parts": 4, "batch_size": 32}, PAIR),
    Case("hybrid R50+B/16, narrow", {**VIT, "name": "R50+B/16", "stem_width": 32}),
    Case("hybrid R26+S/32, narrow, fp32", {**VIT, "name": "R26+S/32", "stem_width": 32}, FP32),
    Case("hybrid R26+S/32, whole", {"name": "R26+S/32", "image_size": 128}, {"micro_batch": 4}),
    Case("BiT-R50, narrow", {"name": "BiT-R50x1", "width": 32}),
    Case("BiT-R50, narrow, fp32", {"name": "BiT-R50x1", "width": 32}, FP32),
    Case("BiT-R50, narrow, 8 units recomputed", {"name": "BiT-R50x1", "width": 32}, {"checkpoint_blocks": 8}),
    Case("Axial", {**VIT, "name": "Axial-S/16"}),
    Case("Axial, fp32", {**VIT, "name": "Axial-S/16"}, FP32),
    Case("masked, mean colours", {**VIT, "name": "Masked-S/16"}, {"objective": "masked"}),
    Case("masked, pixels", {**VIT, "name": "Masked-S/16", "target": "pixels"}, {"objective": "masked"}),
)


def measured(case: Case) -> int:
    """Return the peak number of bytes allocated on rank 0, from building the model to the end of two steps."""
    # Import before forking, because imports take longer than the steps.
    import_deepspeed()
    counting_allocator()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(case.world):
            workers.append(context.Process(target=worker, args=(case, rank, folder)))
        for process in workers:
            process.start()
        # If one worker dies, the others would wait for it.
        while any(process.is_alive() for process in workers):
            multiprocessing.connection.wait([process.sentinel for process in workers if process.is_alive()])
            if any(process.exitcode for process in workers):
                for process in workers:
                    process.terminate()
                    process.join()
        codes = [process.exitcode for process in workers]
        if any(codes):
            raise RuntimeError(f"{case.name}: workers have ended with {codes}, expected 0 of each; see above")
        return int((Path(folder) / "0.json").read_text())


@functools.cache
def counting_allocator() -> ctypes.CDLL:
    """Build and load the counting allocator, once for this process and its forked children."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++, c++): cannot build the counting allocator; install one")
    torch_folder = Path(torch.__file__).parent
    source = Path(__file__).with_name("counting_allocator.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/counting_allocator.so"
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_folder}/include", str(source)]
        command += [f"-L{torch_folder}/lib", "-lc10", f"-Wl,-rpath,{torch_folder}/lib", "-o", library]
        subprocess.run(command, check=True)
        counter = ctypes.CDLL(library)  # the file is not needed after loading
    for function in (counter.most_bytes, counter.living_bytes):
        function.restype = ctypes.c_int64
    return counter


def worker(case: Case, rank: int, folder: str) -> None:
    """Run one worker of a configuration: build the model, and run two real steps with the counting allocator."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.world))
    deepspeed = import_deepspeed()
    store = dist.FileStore(f"{folder}/store", case.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world)
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    cfg = case.cfg
    accumulation = batch_arithmetic(cfg, case.world).accumulation
    counter = counting_allocator()
    counter.start_counting()
    model = models.from_config(case.model_config, torch.Generator().manual_seed(0))
    model.recomputed_blocks = cfg.checkpoint_blocks
    engine = build_engine(cfg, model, accumulation)
    data = TracedData(cfg.phases(1, case.model_config))
    traced = TracedWorker(cfg, TracedGroup(torch.device("cpu")), case.model_config, engine, data)
    for _ in range(2):
        take_step(traced, accumulation, cfg.micro_batch, lambda phase: None)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(counter.most_bytes()))
    engine.close()
    dist.destroy_process_group()


def planned(case: Case) -> MemoryNeed:
    """Return the memory need that `plan` reports."""
    return memory_need(case.cfg, case.model_config, case.world, is_gpu=False)


def main() -> None:
    """Print a line of the table for each configuration."""
    asked = " ".join(sys.argv[1:])
    part = re.fullmatch(r"(\d+):(\d+)", asked)
    cases = [case for case in CASES if asked in case.name]
    names = "\n".join(case.name for case in CASES)
    if part:
        cases = list(CASES[int(part[1]) : int(part[2])])
    if not cases:
        raise SystemExit(f"no configuration matches {asked!r}, expected A:B within 0:{len(CASES)} or words of\n{names}")
    print("| configuration | planned, MiB | measured, MiB | planned ÷ measured |\n|---|--:|--:|--:|", flush=True)
    ratios = []
    for case in cases:
        plan = planned(case).device_bytes
        most = measured(case)
        ratios.append(plan / most)
        print(f"| {case.name} | {plan / 2**20:.1f} | {most / 2**20:.1f} | {plan / most:.3f} |", flush=True)
    print(f"{len(ratios)} configurations, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
