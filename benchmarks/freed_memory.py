"""What a step on a CPU costs where malloc keeps the memory that is freed, and where it gives it back to the kernel.

    OMP_NUM_THREADS=1 python -m benchmarks.freed_memory [--rounds 3]

Steps of the training loop without its loader (forward, backward, engine), one worker, as `benchmarks.forecast` takes
them. Both ways take turns, each in a process of its own; processor seconds and page faults of a step, medians.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist

from benchmarks.forecast import Row, Stepper
from pipeline import process_group

ROWS = {
    "S/16, 4 images, fp32, ZeRO 2": Row(1, "S/16", 4, "fp32", 2),
    "B/16, 2 images, bf16, ZeRO 1, all blocks recomputed": Row(1, "B/16", 2, "bf16", 1, recomputed=12),
    "B/32, 8 images, bf16, ZeRO 2": Row(1, "B/32", 8, "bf16", 2),
}
WAYS = ("given back", "kept")
STEPS = 4  # behind the first, which warms caches and allocators


def worker(row: Row, way: str) -> None:
    """Print processor seconds and page faults of a step, medians."""
    if way == "given back":
        process_group.keep_freed_memory = lambda: None
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        stepper = Stepper(row, process_group.join_group(60.0))
        seconds = []
        faults = []
        for number in range(1 + STEPS):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            _, cpu_s = stepper.take()
            if number:
                seconds.append(cpu_s)
                faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        print(statistics.median(seconds), statistics.median(faults))
        dist.destroy_process_group()


def measured(name: str, way: str) -> tuple[float, float]:
    """Return (processor seconds, page faults) of a step, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.freed_memory", "--row", name, "--way", way]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    seconds, faults = answer.split()
    return float(seconds), float(faults)


def main() -> None:
    """Measure both ways in turn, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--row", choices=ROWS, help="be the worker of this row")
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.row:
        worker(ROWS[options.row], options.way)
        return
    results: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(options.rounds):
        for name in ROWS:
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                results.setdefault((name, way), []).append(measured(name, way))
    print("| step | given back: CPU ms | page faults | kept: CPU ms | page faults | kept ÷ given back |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in ROWS:
        cells = [name]
        for way in WAYS:
            seconds, faults = zip(*results[name, way], strict=True)
            cells += [f"{1e3 * statistics.median(seconds):,.0f}", f"{statistics.median(faults):,.0f}"]
        pairs = zip(results[name, "kept"], results[name, "given back"], strict=True)
        ratios = [kept / given_back for (kept, _), (given_back, _) in pairs]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
