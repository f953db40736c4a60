"""Test the live audit (`health.audit`) on planted flips and clean steps, and measure its price.

    python -m benchmarks.live_audit flips --cases 100     transient and sticky flips; and 1,000 clean steps
    python -m benchmarks.live_audit price --steps 1000    CPU-seconds of a run with and without an audit

`flips`: four workers in exact mode train a small model, and every part of every step is repeated. In every fourth step
one bit is flipped on one worker: in the gradient of its part, in its moments or master weights between two steps, in
its pixels, or in the weights that its model computes with. A sticky flip also occurs in the worker's repetitions.
Instead of ending the run, each accusation is noted, and the run continues. The seed and the case determine the flip.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

import models
from benchmarks.replay import MODEL, flip, task_of
from data.images.augment import AugmentConfig
from data.shards.packing import pack
from data.sources.samples import digits
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline import train
from pipeline.architecture import model_config
from pipeline.engine.exact import ExactEngine
from pipeline.extras import live_audit
from pipeline.extras.replays.spikes import HealthConfig, SpikeConfig
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import DataConfig

EVERY = 4  # steps from one planted flip to the next
HOOK = "pipeline.extras.live_audit:LiveAudit"
KINDS = ("gradient", "sticky gradient", "moment", "weight", "pixel", "sticky pixel", "working weight")


def config_of(shards: Path, steps: int, share: float) -> SpikeConfig:
    """Return the config of a small run in exact mode with four parts."""
    return SpikeConfig(
        data=DataConfig(train=str(shards), augment=AugmentConfig(min_area=0.7, flip=False)),
        model=MODEL,
        optim=OptimConfig(lr=1e-4, schedule=ScheduleConfig(warmup_steps=20)),
        loss="softmax",
        steps=steps,
        batch_size=16,
        micro_batch=4,
        exact_parts=4,
        precision="fp32",
        zero=2,
        log_every=100,
        save_every=10**9,
        max_skipped=10**6,
        health=HealthConfig(audit=share),
    )


def train_with_flips(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with the planted faults, one for each step in `faults`; return all accusations, as rank 0 noted them."""
    faults: dict[int, dict[str, Any]] = {fault["step"]: fault for fault in task["faults"]}
    now: dict[str, Any] = {"step": -1, "engine": None, "is_planted": False}
    accusations: list[dict[str, Any]] = []
    take_step = train.take_step
    next_batch = train.next_batch
    close_part = ExactEngine.end_micro_batch
    added = ExactEngine.added

    def fault_of(*whats: str) -> dict[str, Any] | None:
        fault = faults.get(now["step"])
        if fault is None or fault["what"] not in whats or fault["rank"] != dist.get_rank():
            return None
        return fault

    def place_of(engine: ExactEngine, fault: dict[str, Any]) -> int:
        return int(fault["u"] * (sum(engine.spans) - 1))

    def state_of(engine: ExactEngine, fault: dict[str, Any]) -> tuple[torch.Tensor, int]:
        kind = "master" if fault["what"] == "weight" else fault["kind"]
        parts = [part for part in engine.fragments((kind,), held=True) if part.tensors[kind].numel()]
        view = parts[int(fault["u"] * len(parts))].tensors[kind]
        return view, int(fault["v"] * view.numel())

    def accuse(self: Any, rank: int | None, text: str, pair: tuple[int, int] = (0, 0)) -> None:
        assert self.drawn is not None
        accusations.append({"step": self.drawn.step, "found": now["step"], "rank": rank, "pair": pair, "text": text})

    def taking(worker: Any, step: int, batches: Any) -> Any:
        now.update(step=step, engine=worker.engine, is_planted=False)
        fault = fault_of("moment", "weight")
        if fault is not None:
            flip(*state_of(worker.engine, fault), fault["bit"])
        fault = fault_of("working weight")
        if fault is not None:
            p = next(worker.engine.model.parameters())
            flip(p.data.view(-1), int(fault["u"] * p.numel()), fault["bit"])
        outcome = take_step(worker, step, batches)
        if faults.get(step, {}).get("what") == "working weight":
            # A step with a non-finite gradient is skipped, and would leave the flip for later steps.
            worker.engine.state.refresh()
        return outcome

    def closing(self: ExactEngine, rate: float, numbers: Any = None) -> list[float]:
        fault = fault_of("gradient")
        if fault is not None and self.part is not None and not now["is_planted"]:
            now["is_planted"] = True
            flip(self.part, place_of(self, fault), fault["bit"])
        return close_part(self, rate, numbers)

    def settling(self: live_audit.LiveAudit) -> None:
        settle(self)
        fault = fault_of("moment", "weight")
        if fault is not None and not now["is_planted"]:
            # Undo the flip after its discovery: the update would spread it, and a run with NaN never updates again.
            now["is_planted"] = True
            flip(*state_of(self.engine, fault), fault["bit"])

    def adding(self: ExactEngine, loss: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
        result = added(self, loss, part)
        fault = fault_of("sticky gradient")
        if fault is not None:
            flip(result, place_of(self, fault), fault["bit"])
        return result

    def flipped(batch: Any, fault: dict[str, Any]) -> Any:
        images = batch.images.clone()
        place = [int(fault["u"] * len(images)), 0, int(fault["v"] * 16), int(fault["w"] * 16)]
        images[tuple(place)] ^= 1 << fault["bit"] % 8
        return replace(batch, images=images)

    def batch_of(worker: Any, *args: Any) -> Any:
        batch = next_batch(worker, *args)
        fault = fault_of("pixel", "sticky pixel")
        return batch if fault is None else flipped(batch, fault)

    decode = live_audit.LiveAudit.batches
    settle = live_audit.LiveAudit.settle

    def decoding(self: Any, *args: Any) -> Any:
        for batch in decode(self, *args):
            fault = fault_of("sticky pixel")
            yield batch if fault is None else flipped(batch, fault)

    ExactEngine.end_micro_batch = closing  # type: ignore[method-assign]
    ExactEngine.added = adding  # type: ignore[method-assign]
    live_audit.LiveAudit.accuse = accuse  # type: ignore[method-assign]
    live_audit.LiveAudit.settle = settling  # type: ignore[method-assign]
    live_audit.LiveAudit.batches = decoding  # type: ignore[method-assign]
    train.take_step, train.next_batch = taking, batch_of  # type: ignore[assignment]
    train.train(task)
    return accusations


def flips(folder: Path, cases: int, clean: int, seed: int, kinds: Sequence[str]) -> None:
    """Plant flips in a run, and print how many were named with the right worker and step."""
    shards = folder / "shards"
    pack(digits(train=True, image_size=16), shards, name="train", shard_samples=100)
    cluster = ClusterConfig(workers=4, backend="processes")
    print("| planted | found | step named | worker named | pair named | accused without a flip | seconds |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for what in kinds:
        rng = random.Random(f"{seed} {what}")
        faults = []
        for number in range(cases if what != "nothing" else 0):
            faults.append(
                {
                    "what": what,
                    "step": EVERY * (number + 1),
                    "rank": rng.randrange(4),
                    "bit": rng.randrange(32),
                    "kind": rng.choice(["exp_avg", "exp_avg_sq"]),
                    **{name: rng.random() for name in "uvw"},
                }
            )
        steps = EVERY * (cases + 2) if faults else clean
        task = task_of(folder / what.replace(" ", "-"), shards, config_of(shards, steps, 1.0))
        task |= {"hooks": {HOOK: {}}, "faults": faults}
        began = time.monotonic()
        accusations: Any = run_worker_group(
            train_with_flips, task, cluster=cluster, name=f"workers-{what}", directory=folder
        )
        counts: Counter[str] = Counter()
        by_step: dict[int, list[dict[str, Any]]] = {}
        for accusation in accusations:
            by_step.setdefault(accusation["found"], []).append(accusation)
        missed = []
        for fault in faults:
            of_step = by_step.pop(fault["step"], [])
            counts["found"] += bool(of_step)
            # A change in memory between two steps is an accusation of the step before.
            counts["step"] += any(fault["step"] - accusation["step"] in (0, 1) for accusation in of_step)
            counts["worker"] += bool(of_step) and all(accusation["rank"] == fault["rank"] for accusation in of_step)
            counts["pair"] += any(
                accusation["rank"] is None and fault["rank"] in accusation["pair"] for accusation in of_step
            )
            if not of_step or any(accusation["rank"] != fault["rank"] for accusation in of_step):
                missed.append({**fault, "accusations": of_step})
        named = f"{counts['step']} | {counts['worker']} | {counts['pair']}"
        others = f"{sum(map(len, by_step.values()))} in {steps} steps"
        print(
            f"| {what} | {counts['found']} of {len(faults)} | {named} | {others} | {time.monotonic() - began:.0f} |",
            flush=True,
        )
        for fault in missed[:5]:
            print("   ", json.dumps(fault), file=sys.stderr, flush=True)


def cpu_seconds(task: dict[str, Any]) -> float:
    """Return the CPU-seconds of all workers for a training run, without start-up."""
    began: list[float] = []
    take_step = train.take_step

    def taking(*args: Any) -> Any:
        began.append(time.process_time())
        return take_step(*args)

    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda: None  # type: ignore[assignment]
    train.take_step = taking  # type: ignore[assignment]
    train.train(task)
    spent = torch.tensor(time.process_time() - began[0])
    dist.all_reduce(spent)
    destroy()
    return float(spent)


def price(folder: Path, steps: int, rounds: int, share: float, model: Mapping[str, Any]) -> None:
    """Print the CPU-seconds of runs with and without an audit of this share, alternately."""
    shards = folder / "shards"
    pack(digits(train=True, image_size=model["image_size"]), shards, name="train", shard_samples=100)
    cluster = ClusterConfig(workers=2, backend="processes")
    for number in range(rounds):
        for audited in (0.0, share):
            run = f"{number}-{audited}"
            cfg = replace(config_of(shards, steps, audited), model=dict(model))
            task = task_of(folder / run, shards, cfg)
            task["job"]["model"] = models.to_dict(model_config(model))
            task["hooks"] = {HOOK: {}} if audited else {"pipeline.extras.replays.spikes:SpikeSearch": {}}
            spent: Any = run_worker_group(cpu_seconds, task, cluster=cluster, name=f"workers-{run}", directory=folder)
            print(f"health.audit {audited}: {spent:.2f} CPU-seconds for {steps} steps on 2 workers", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["flips", "price"])
    parser.add_argument("--kinds", nargs="+", default=["nothing", *KINDS])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--clean", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--model")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if options.what == "flips":
            flips(Path(temporary), options.cases, options.clean, options.seed, options.kinds)
        else:
            model = MODEL
            if options.model is not None:
                model = {"name": options.model, "image_size": options.image_size, "classes": 10}
            price(Path(temporary), options.steps, options.rounds, options.share, model)


if __name__ == "__main__":
    # Workers import functions by their module name.
    from benchmarks import live_audit as module

    module.main()
