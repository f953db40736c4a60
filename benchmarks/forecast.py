"""What a calibration forecasts of a step and what the step then takes, on 1 to 8 gloo workers of this machine.

    OMP_NUM_THREADS=1 python -m benchmarks.forecast [--worlds 1 2 4 8] [--rounds 3] [--calibration FILE]

1. `jobs calibrate` of the worlds, with the kinds of engines that the configurations have.
2. For each world a worker group with all its configurations, none of which was calibrated on: steps of the training
   loop without its loader (forward, backward, engine), taking turns in rotated order.
3. A row for each: medians over the rounds, of the slowest worker. Wall time is judged where the machine is quiet; where
   it is shared, processor seconds of a worker are, which a neighbour who takes the core away does not lengthen.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from jobs.cluster.MISSING import worker_group_runner
from jobs.workers.worker_files import SeenRecords

import models
from jobs.cluster_config import ClusterConfig
from jobs.planning.calibrate import Engine, calibrate, engine
from pipeline.arithmetic import batch_arithmetic
from pipeline.plan.calibration import read_calibration
from pipeline.plan.forecast import forecast_step, passes_of, work_of
from pipeline.plan.operations import inputs, loss_of
from pipeline.process_group import join_group
from pipeline.start import build_engine
from pipeline.training_config import TrainConfig

WARM_UP = 2  # steps of each that do not count: in the first ones malloc asks the kernel for memory


@dataclass(frozen=True)
class Row:
    """One configuration."""

    world: int
    name: str
    micro_batch: int
    precision: str
    zero: int
    accumulation: int = 1
    recomputed: int = 0
    changes: tuple[tuple[str, Any], ...] = ()

    def config(self) -> TrainConfig:
        """Return it as a stage's config."""
        return TrainConfig(
            model={"name": self.name, "image_size": 224, "classes": 1000, **dict(self.changes)},
            steps=1000,
            batch_size=self.world * self.micro_batch * self.accumulation,
            micro_batch=self.micro_batch,
            precision=self.precision,  # type: ignore[arg-type]
            zero=self.zero,
            checkpoint_blocks=self.recomputed,
        )

    def model(self) -> Any:
        """Return its architecture."""
        options = dict(self.changes)
        return models.config_of(self.name, options.pop("image_size", 224), 1000, **options)


ROWS = (
    Row(1, "S/16", 4, "fp32", 2),
    Row(1, "S/32", 16, "fp32", 0, accumulation=2),
    Row(1, "B/16", 2, "bf16", 1, recomputed=12),
    Row(1, "S/16", 6, "fp32", 1, changes=(("width", 512), ("heads", 8), ("mlp", 2048), ("depth", 6))),
    Row(2, "S/16", 8, "bf16", 1, accumulation=2),
    Row(2, "B/16", 2, "fp32", 2),
    Row(2, "Ti/16", 8, "fp32", 3),
    Row(2, "B/32", 4, "bf16", 2, recomputed=6),
    Row(2, "S/16", 6, "fp32", 2, changes=(("dropout", 0.1), ("pool", "gap"))),
    Row(2, "R26+S/32", 3, "fp32", 2),
    Row(4, "S/16", 4, "fp32", 1, changes=(("image_size", 160),)),
    Row(4, "Ti/16", 4, "bf16", 2, accumulation=2),
    Row(4, "B/32", 2, "fp32", 0),
    Row(8, "S/16", 1, "fp32", 2),
    Row(8, "Ti/16", 8, "bf16", 1),
    Row(8, "S/32", 4, "bf16", 2),
    # Added when the engine's model had last been changed.
    Row(1, "B/32", 8, "bf16", 2),
    Row(2, "B/32", 8, "fp32", 2),
    Row(4, "S/32", 4, "bf16", 2),
)


# ------------------------------------------------------------------------ the workers


def worker(task: dict[str, Any]) -> dict[str, Any]:
    """Take the steps of all rows in turn; returns (wall, processor) seconds of every step of the slowest worker."""
    device = join_group(600)
    rows = [Row(**{**row, "changes": tuple(tuple(change) for change in row["changes"])}) for row in task["rows"]]
    steps = [Stepper(row, device) for row in rows]
    seconds: list[list[list[float]]] = [[] for _ in rows]
    for number in range(WARM_UP + task["rounds"]):
        order = list(range(len(rows)))
        for place in order[number % len(rows) :] + order[: number % len(rows)]:
            took = torch.tensor(steps[place].take())
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number >= WARM_UP:
                seconds[place].append(took.tolist())
    dist.destroy_process_group()
    return {"seconds": seconds}


class Stepper:
    """A model under the engine, and its micro-batches."""

    def __init__(self, row: Row, device: torch.device) -> None:
        cfg = row.config()
        model_config = row.model()
        self.accumulation = batch_arithmetic(cfg, row.world).accumulation
        model = models.from_config(model_config, torch.Generator().manual_seed(0)).to(device)
        model.recomputed_blocks = row.recomputed  # type: ignore[assignment]
        self.work = work_of(cfg, model_config)
        self.engine = build_engine(cfg, model, self.accumulation)
        self.images, self.labels = inputs(self.work, device)

    def take(self) -> tuple[float, float]:
        """Take a step; returns (seconds, processor seconds of this process)."""
        dist.barrier()
        began = time.perf_counter()
        cpu_began = time.process_time()
        loss_sum = torch.zeros(())
        for number in range(self.accumulation):
            loss = loss_of(self.work, self.engine.forward, self.images, self.labels)
            self.engine.backward(loss / self.work.micro_batch)
            loss_sum = loss_sum + loss.detach()
            del loss
            if number + 1 < self.accumulation:
                self.engine.end_micro_batch(1e-4)
        numbers = torch.cat([loss_sum.double().reshape(1), torch.zeros(3, dtype=torch.float64)])
        self.engine.end_micro_batch(1e-4, numbers)
        return time.perf_counter() - began, time.process_time() - cpu_began


def run_rows(rows: list[Row], rounds: int) -> list[list[list[float]]]:
    """Run a worker group of the rows' world."""
    world = rows[0].world
    with tempfile.TemporaryDirectory() as folder:
        report = worker_group_runner(ClusterConfig(backend="processes"))(
            worker,
            {"rows": [vars(row) for row in rows], "rounds": rounds},
            cluster=ClusterConfig(workers=world, backend="processes"),
            seen=SeenRecords(Path(folder)),
            on_tick=lambda: None,
        )
    assert isinstance(report, dict)
    return report["seconds"]


def engines_by_world(worlds: list[int]) -> dict[int, list[Engine]]:
    """Return the kinds of engines that the rows have: those of each world, and with one worker all of them."""
    engines: dict[int, list[Engine]] = {1: []}
    for row in ROWS:
        kind = engine(row.zero, row.precision, "adam", False)
        for world in {1, row.world}:
            known = engines.setdefault(world, [])
            if row.world in worlds and kind not in known:
                known.append(kind)
    return {world: kinds for world, kinds in engines.items() if kinds}


# ------------------------------------------------------------------------ the table


def main() -> None:
    """Calibrate, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calibration", type=Path, help="take this one instead of measuring one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = options.calibration or Path(folder) / "calibration.json"
        if not file.exists():
            calibrate([], file, lambda line: print(line, flush=True), engines_by_world(options.worlds))
        calibration = read_calibration(file)
    print(f"\nload {os.getloadavg()[0]:.1f} when the steps begin")
    print(
        "| workers | model | micro-batch × accumulation | type, ZeRO, recomputed | forecast ms (compute, host, reduce) "
        "| measured ms | ratio | forecast CPU ms | measured CPU ms | ratio |"
    )
    print("|--:|---|---|---|---|--:|--:|--:|--:|--:|")
    ratios = []
    cpu_ratios = []
    for world in options.worlds:
        rows = [row for row in ROWS if row.world == world]
        for row, times in zip(rows, run_rows(rows, options.rounds), strict=True):
            passes = passes_of(row.config(), row.model(), calibration)
            forecast = forecast_step(row.config(), row.model(), world, passes, calibration)
            wall_s = statistics.median(wall for wall, _ in times)
            cpu_s = statistics.median(cpu for _, cpu in times)
            ratios.append(forecast.training_s / wall_s)
            cpu_ratios.append(forecast.cpu_s / cpu_s)
            changes = "".join(f" {name}={value}" for name, value in row.changes)
            parts = []
            for part_s in (forecast.compute_s, forecast.host_s, forecast.reduce_s):
                parts.append(f"{1e3 * part_s:.0f}")
            print(
                f"| {world} | {row.name}{changes} | {row.micro_batch} × {row.accumulation} "
                f"| {row.precision}, {row.zero}, {row.recomputed} "
                f"| {1e3 * forecast.training_s:.0f} ({', '.join(parts)}) "
                f"| {1e3 * wall_s:.0f} | {ratios[-1]:.2f} | {1e3 * forecast.cpu_s:.0f} | {1e3 * cpu_s:.0f} | "
                f"{cpu_ratios[-1]:.2f} |",
                flush=True,
            )
    for name, values in (("wall", ratios), ("processor", cpu_ratios)):
        within = sum(1 for ratio in values if abs(ratio - 1) <= 0.15)
        print(f"\n{name}: within 15 % in {within} of {len(values)}; ratios {min(values):.2f} … {max(values):.2f}")
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
