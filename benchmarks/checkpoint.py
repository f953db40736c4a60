"""What a save costs the training loop: ours against DeepSpeed's plain save_checkpoint, interleaved in one run.

    python benchmarks/checkpoint.py [--model S/16] [--workers 2] [--rounds 10]

Ours: stall = snapshot to host memory plus the commit once all files are written; total = until the folder is renamed
and fsynced, with nothing else running. DeepSpeed's save stalls the loop for all it takes, and neither fsyncs nor
hashes; a third row adds an fsync of its files, which is what durability costs it.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import models
from jobs.cluster.backends import ClusterConfig, run_worker_group
from pipeline.checkpoints.manifest import Manifest, committed
from pipeline.checkpoints.saver import Saver
from pipeline.engine import Engine, deepspeed_config
from pipeline.monitoring.telemetry import Telemetry
from pipeline.optimization.optimizer import OptimConfig
from pipeline.process_group import join_group


def worker(task: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of every round, by row."""
    join_group(600)
    model = models.from_config(models.config_of(task["model"], 224, 1000), torch.Generator().manual_seed(0))
    settings = deepspeed_config(
        zero=task["zero"], precision="fp32", micro_batch=1, accumulation=1, clip=1.0, user_file=None
    )
    engine = Engine(model, models.decayed(model), OptimConfig(), settings)
    folder = Path(task["folder"])
    quiet = Telemetry(folder, 1, 1)  # of a rank that writes nothing
    saver = Saver(folder / "ours", folder, quiet, keep=2, keep_every=0, max_failed_saves=1)
    rows: dict[str, list[float]] = {"ours, stall": [], "ours, total": [], "deepspeed": [], "deepspeed + fsync": []}
    for number in range(task["rounds"] + 1):
        torch.distributed.barrier()
        stall, total = ours(saver, engine, number)
        torch.distributed.barrier()
        plain, durable = theirs(engine, folder / "theirs", number)
        if number:  # the first warms caches and allocators
            for row, seconds in zip(rows, (stall, total, plain, durable), strict=True):
                rows[row].append(seconds)
    rows["MB"] = [sum(p.stat().st_size for p in committed(folder / "ours")[0].iterdir()) / 1e6]
    return rows


def ours(saver: Saver, engine: Engine, number: int) -> tuple[float, float]:
    manifest = Manifest(number, 0, 0, "", 1, 2, 2, {}, "", "")
    began = time.monotonic()
    saver.begin(engine, manifest)
    stall = time.monotonic() - began
    while not saver.written:
        time.sleep(0.001)  # the loop would train here
    commit = time.monotonic()
    saver.finish()  # commits and prunes
    return stall + time.monotonic() - commit, time.monotonic() - began


def theirs(engine: Engine, folder: Path, number: int) -> tuple[float, float]:
    began = time.monotonic()
    engine.engine.save_checkpoint(str(folder), tag=str(number))
    torch.distributed.barrier()
    plain = time.monotonic() - began
    for path in (folder / str(number)).iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    durable = time.monotonic() - began
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder / str(number))
    return plain, durable


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        task = {**vars(options), "folder": folder}
        cluster = ClusterConfig(workers=options.workers, backend="processes")
        rows = run_worker_group(worker, task, cluster=cluster, name="benchmark", directory=Path(folder))
    print(f"{options.model}, {rows.pop('MB')[0]:.0f} MB, {options.workers} workers, ZeRO {options.zero}")
    print("| save | median s | min | max |\n|---|---|---|---|")
    for row, seconds in rows.items():
        print(f"| {row} | {statistics.median(seconds):.3f} | {min(seconds):.3f} | {max(seconds):.3f} |")


if __name__ == "__main__":
    main()
