"""Measure the cost of a CPU training step with malloc keeping freed memory, and with malloc returning it to the kernel.

    OMP_NUM_THREADS=1 python -m benchmarks.freed_memory [--rounds 3] [--only B/16] [--thread]

Each variant runs training steps without the loader (forward, backward, engine) on one worker. The variants take turns,
each in a separate process. The table shows the median and the maximum of CPU seconds and page faults per step. With
`--thread`, the loop does not run in the main thread, as under Ray.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F

import models
from jobs.cluster.fork_server import MALLOC
from pipeline import process_group
from pipeline.start import build_engine
from pipeline.training_config import TrainConfig


class Row(NamedTuple):
    """Configuration of a measured step."""

    model: str
    micro_batch: int
    precision: Literal["bf16", "fp32"]
    zero: int
    recomputed: int = 0  # number of recomputed blocks


ROWS = {
    "S/16, 4 images, fp32, ZeRO 2": Row("S/16", 4, "fp32", 2),
    "B/16, 2 images, bf16, ZeRO 1, all blocks recomputed": Row("B/16", 2, "bf16", 1, recomputed=12),
    "B/32, 8 images, bf16, ZeRO 2": Row("B/32", 8, "bf16", 2),
}
GIVEN_BACK = "given back"  # glibc's defaults
MALLOPT = "mallopt alone"  # mallopt, but without the environment variables of workers
KEPT = "kept"  # the settings of workers on CPUs
WAYS = (GIVEN_BACK, MALLOPT, KEPT)
STEPS = 10  # steps to measure, after one that warms caches and allocators


class Stepper:
    """A model wrapped by the engine, and a micro-batch of black images."""

    def __init__(self, row: Row, device: torch.device) -> None:
        cfg = TrainConfig(
            steps=1000, batch_size=row.micro_batch, micro_batch=row.micro_batch, precision=row.precision, zero=row.zero
        )
        config = models.config_of(row.model)
        network = models.from_config(config, torch.Generator().manual_seed(0)).to(device)
        network.recomputed_blocks = row.recomputed  # type: ignore[assignment]
        self.engine = build_engine(cfg, network, 1)
        self.images = torch.zeros(row.micro_batch, 3, *config.image_size, device=device).to(self.engine.dtype)
        self.targets = torch.zeros(row.micro_batch, config.classes, device=device)

    def take(self) -> float:
        """Run a step, and return the CPU seconds of this process."""
        began = time.process_time()
        logits = self.engine.forward(self.images).float()
        loss = F.binary_cross_entropy_with_logits(logits, self.targets, reduction="sum")
        self.engine.backward(loss / len(self.images))
        numbers = torch.cat([loss.detach().double().reshape(1), torch.zeros(3, dtype=torch.float64)])
        self.engine.end_micro_batch(1e-4, numbers)
        return time.process_time() - began


class Steps(NamedTuple):
    """CPU seconds and page faults of the steps in a process: medians and maxima."""

    seconds: float
    faults: float
    most_seconds: float
    most_faults: float


def worker(row: Row, way: str) -> None:
    """Measure and print the cost of training steps; runs in a worker process."""
    if way == GIVEN_BACK:
        process_group.keep_freed_memory = lambda: ""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        stepper = Stepper(row, process_group.join_group(60.0))
        seconds = []
        faults = []
        for number in range(1 + STEPS):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            cpu_s = stepper.take()
            if number:
                seconds.append(cpu_s)
                faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        print(*Steps(statistics.median(seconds), statistics.median(faults), max(seconds), max(faults)))
        dist.destroy_process_group()


def measured(name: str, way: str, *, in_thread: bool) -> Steps:
    """Measure the cost of steps in a separate process."""
    command = [sys.executable, "-m", "benchmarks.freed_memory", "--row", name, "--way", way]
    if in_thread:
        command.append("--thread")
    environment = {key: value for key, value in os.environ.items() if key not in MALLOC}
    if way == KEPT:
        environment.update(MALLOC)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return Steps(*(float(word) for word in done.stdout.splitlines()[-1].split()))


def main() -> None:
    """Measure the variants in turn, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="measure only rows with this word")
    parser.add_argument("--thread", action="store_true", help="run the loop in a separate thread")
    parser.add_argument("--row", choices=ROWS, help="be the worker of this row")
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.row and options.thread:
        thread = threading.Thread(target=worker, args=(ROWS[options.row], options.way))
        thread.start()
        thread.join()
        return
    if options.row:
        worker(ROWS[options.row], options.way)
        return
    names = [name for name in ROWS if options.only in name]
    results: dict[tuple[str, str], list[Steps]] = {}
    for number in range(options.rounds):
        for name in names:
            turn = number % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                results.setdefault((name, way), []).append(measured(name, way, in_thread=options.thread))
    print("| step | malloc | CPU ms | dearest step | page faults | dearest step | ÷ given back |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name in names:
        for way in WAYS:
            steps = results[name, way]
            pairs = zip(steps, results[name, GIVEN_BACK], strict=True)
            ratios = [ours.seconds / given_back.seconds for ours, given_back in pairs]
            cells = [
                name,
                way,
                f"{1e3 * statistics.median(step.seconds for step in steps):,.0f}",
                f"{1e3 * max(step.most_seconds for step in steps):,.0f}",
                f"{statistics.median(step.faults for step in steps):,.0f}",
                f"{max(step.most_faults for step in steps):,.0f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
