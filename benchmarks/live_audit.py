"""Test the live audit (`health.audit`) on planted flips and clean steps, and measure its price.

    python -m benchmarks.live_audit flips --cases 100     transient and sticky flips; and 1,000 clean steps
    python -m benchmarks.live_audit bits --cases 20       flips in gradients, by the position of the bit
    python -m benchmarks.live_audit noise                 simulated noise: how often correct results differ too much
    python -m benchmarks.live_audit price --steps 1000    CPU-seconds of a run with and without an audit

`flips`: four workers train a small model, and every step is repeated. At regular intervals one bit is flipped on one
worker: in its gradient, in its moments or master weights between two steps, in its pixels, or in the weights that its
model computes with. A sticky flip also occurs in the worker's repetitions; in a moment or master weight, it occurs in
every update of SLICES steps. Instead of ending the run, each accusation is noted, and the run continues. The seed and
the case determine the flip. `--mode plain` uses DeepSpeed's gradients instead of exact mode; with `--mode noise`, each
forward pass orders the samples of a micro-batch at random, which changes the order of the sums.
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

from benchmarks.replay import MODEL, flip, task_of
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from data.images.augment import AugmentConfig
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline import train
from pipeline.batches import OBJECTIVES
from pipeline.engine.engine import Engine
from pipeline.engine.exact import ExactEngine
from pipeline.extras import live_audit
from pipeline.extras.replays.comparison import Noise, differing, majority, sums_of
from pipeline.extras.replays.spikes import HealthConfig, SpikeConfig
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import DataConfig

EVERY = 2  # steps from one planted flip to the next
HOOK = "pipeline.extras.live_audit:LiveAudit"
NO_AUDIT: dict[str, Any] = {"pipeline.extras.replays.spikes:SpikeSearch": {}}  # a run with the same config keys
OF_UPDATES = ("sticky moment", "sticky weight")
KINDS = (
    "gradient",
    "sticky gradient",
    "moment",
    "sticky moment",
    "weight",
    "sticky weight",
    "pixel",
    "sticky pixel",
    "working weight",
)


def config_of(
    shards: Path, steps: int, share: float, mode: str = "exact", zero: int = 2, precision: str = "fp32"
) -> SpikeConfig:
    """Return the config of a small run, in exact mode with four parts."""
    return SpikeConfig(
        data=DataConfig(train=str(shards), augment=AugmentConfig(min_area=0.7, flip=False)),
        model=MODEL,
        optim=OptimConfig(lr=1e-4, schedule=ScheduleConfig(warmup_steps=20)),
        loss="softmax",
        steps=steps,
        batch_size=16,
        micro_batch=4,
        exact_parts=4 if mode == "exact" else 0,
        precision=precision,  # type: ignore[arg-type]
        zero=zero,
        log_every=100,
        save_every=10**9,
        max_skipped=10**6,
        health=HealthConfig(audit=share),
    )


def duration_of(what: str) -> int:
    """Return the number of steps that a fault lasts."""
    return live_audit.SLICES if what in OF_UPDATES else 1


def train_with_flips(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with the planted faults; return all accusations, as rank 0 noted them."""
    faults: dict[int, dict[str, Any]] = {}
    for fault in task["faults"]:
        for step in range(fault["step"], fault["step"] + duration_of(fault["what"])):
            faults[step] = fault
    now: dict[str, Any] = {"step": -1, "engine": None, "is_planted": False}
    accusations: list[dict[str, Any]] = []
    take_step = train.take_step
    next_batch = train.next_batch
    added = ExactEngine.added

    def fault_of(*whats: str) -> dict[str, Any] | None:
        fault = faults.get(now["step"])
        if fault is None or fault["what"] not in whats or fault["rank"] != dist.get_rank():
            return None
        return fault

    def state_of(engine: Engine, fault: dict[str, Any]) -> tuple[torch.Tensor, int]:
        kind = "master" if fault["what"].endswith("weight") else fault["kind"]
        parts = [part for part in engine.fragments((kind,), held=True) if part.tensors[kind].numel()]
        view = parts[int(fault["u"] * len(parts))].tensors[kind]
        return view, int(fault["v"] * view.numel())

    def accuse(self: Any, rank: int | None, text: str, pair: tuple[int, int] = (0, 0)) -> None:
        accusations.append({"step": self.step, "found": now["step"], "rank": rank, "pair": pair, "text": text})

    def taking(worker: Any, step: int, batches: Any) -> Any:
        now.update(step=step, engine=worker.engine, is_planted=False)
        fault = fault_of("moment", "weight")
        if fault is not None:
            flip(*state_of(worker.engine, fault), fault["bit"])
        fault = fault_of("working weight")
        if fault is not None:
            p = next(worker.engine.model.parameters())
            assert p.dtype == torch.float32, "flips in bf16 weights are not implemented"
            flip(p.data.view(-1), int(fault["u"] * p.numel()), fault["bit"])
        hooks = []
        fault = fault_of("gradient", "sticky gradient")
        if fault is not None and not isinstance(worker.engine, ExactEngine):
            named = list(worker.engine.model.parameters())
            hooks.append(named[int(fault["v"] * len(named))].register_hook(flipped_gradient))
        outcome = take_step(worker, step, batches)
        for hook in hooks:
            hook.remove()
        planted = faults.get(step, {}).get("what")
        if planted in OF_UPDATES:
            # Undo the flip after its discovery: the model would compute with it, and with NaN there are no updates.
            for hook in worker.hooks:
                if isinstance(hook, live_audit.LiveAudit):
                    hook.settle()
            fault = fault_of(*OF_UPDATES)
            if fault is not None and now["is_planted"]:
                flip(*state_of(worker.engine, fault), fault["bit"])
        if planted == "working weight" or planted in OF_UPDATES:
            # A step with a non-finite gradient is skipped, and would leave the flip for later steps.
            worker.engine.state.refresh()
        return outcome

    def flipped_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
        fault = fault_of("gradient", "sticky gradient")
        if fault is None or (fault["what"] == "gradient" and now["is_planted"]):
            return None
        now["is_planted"] = True
        flat = gradient.detach().float().reshape(-1).clone()
        # The upper half of an fp32 number is the bf16 number.
        bit = fault["bit"] if gradient.dtype == torch.float32 else 16 + fault["bit"] % 16
        flip(flat, int(fault["u"] * len(flat)), bit)
        return flat.view_as(gradient).to(gradient.dtype)

    def adding(self: ExactEngine, loss: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
        result = added(self, loss, part)
        fault = fault_of("gradient", "sticky gradient")
        if fault is not None and not (fault["what"] == "gradient" and now["is_planted"]):
            now["is_planted"] = True  # the first is not a repetition
            flip(result, int(fault["u"] * (sum(self.spans) - 1)), fault["bit"])
        return result

    def settling(self: live_audit.LiveAudit) -> None:
        settle(self)
        fault = fault_of("moment", "weight")
        if fault is not None and not now["is_planted"]:
            now["is_planted"] = True
            flip(*state_of(self.engine, fault), fault["bit"])

    def after_update(self: live_audit.LiveAudit, *args: Any) -> None:
        fault = fault_of(*OF_UPDATES)
        if fault is not None and not now["is_planted"]:
            view, element = state_of(self.engine, fault)
            storages = []
            for update in self.updates:
                if not update.after:
                    storages += [t.untyped_storage()._cdata for t in (update.flat, *self.states(update.flat))]
            if view.untyped_storage()._cdata in storages:
                now["is_planted"] = True
                flip(view, element, fault["bit"])
        note_update(self, *args)

    def updated(self: live_audit.LiveAudit, updates: Any, given: Any) -> list[torch.Tensor]:
        results = repeat_update(self, updates, given)
        fault = fault_of(*OF_UPDATES)
        if fault is not None:
            view, element = state_of(self.engine, fault)
            number = 0
            for update in updates:
                for tensor in (update.flat, *self.states(update.flat)):
                    place = view.storage_offset() - tensor.storage_offset() + element
                    is_same = view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
                    if is_same and update.where.start <= place < update.where.stop:
                        flip(results[number].detach(), place - update.where.start, fault["bit"])
                    number += 1
        return results

    def flipped(batch: Any, fault: dict[str, Any]) -> Any:
        images = batch.images.clone()
        place = [int(fault["u"] * len(images)), 0, int(fault["v"] * 16), int(fault["w"] * 16)]
        images[tuple(place)] ^= 1 << fault["bit"] % 8
        return replace(batch, images=images)

    def batch_of(worker: Any, *args: Any) -> Any:
        batch = next_batch(worker, *args)
        fault = fault_of("pixel", "sticky pixel")
        return batch if fault is None else flipped(batch, fault)

    def decoding(self: Any, *args: Any) -> Any:
        for batch in decode(self, *args):
            fault = fault_of("sticky pixel")
            yield batch if fault is None else flipped(batch, fault)

    decode = live_audit.LiveAudit.batches
    settle = live_audit.LiveAudit.settle
    note_update = live_audit.LiveAudit.after_update
    repeat_update = live_audit.LiveAudit.updated
    ExactEngine.added = adding  # type: ignore[method-assign]
    live_audit.LiveAudit.accuse = accuse  # type: ignore[method-assign]
    live_audit.LiveAudit.settle = settling  # type: ignore[method-assign]
    live_audit.LiveAudit.batches = decoding  # type: ignore[method-assign]
    live_audit.LiveAudit.after_update = after_update  # type: ignore[assignment, method-assign]
    live_audit.LiveAudit.updated = updated  # type: ignore[method-assign]
    train.take_step, train.next_batch = taking, batch_of  # type: ignore[assignment]
    if task["mode"] == "noise":
        make_noisy(dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]))
    train.train(task)
    return accusations


def make_noisy(seed: int) -> None:
    """Order the samples of each micro-batch at random, so that repetitions add in different orders."""
    generator = torch.Generator().manual_seed(seed)
    objective = OBJECTIVES["classification"]

    def shuffled(worker: Any, step: int, images: torch.Tensor, batch: Any) -> torch.Tensor:
        order = torch.randperm(len(images), generator=generator)
        return objective(worker, step, images[order], replace(batch, labels=batch.labels[order]))

    OBJECTIVES["classification"] = shuffled


def faults_of(what: str, cases: int, seed: int, bits: Sequence[int]) -> list[dict[str, Any]]:
    """Draw the faults of a kind from the seed."""
    rng = random.Random(f"{seed} {what}")
    faults = []
    for number in range(cases):
        faults.append(
            {
                "what": what,
                "step": (EVERY + duration_of(what) - 1) * (number + 1),
                "rank": rng.randrange(4),
                "bit": bits[number % len(bits)] if bits else rng.randrange(32),
                "kind": rng.choice(["exp_avg", "exp_avg_sq"]),
                **{name: rng.random() for name in "uvw"},
            }
        )
    return faults


def accused(folder: Path, faults: list[dict[str, Any]], steps: int, options: argparse.Namespace) -> Any:
    """Run with the faults; return the accusations."""
    shards = folder / "shards"
    if not shards.exists():
        pack(digits(train=True, image_size=16), shards, name="train", shard_samples=100)
    cluster = ClusterConfig(workers=4, backend="processes")
    cfg = config_of(shards, steps, 1.0, options.mode, options.zero, options.precision)
    name = f"run-{len(list(folder.iterdir()))}"
    task = task_of(folder / name, shards, cfg) | {"hooks": {HOOK: {}}, "faults": faults, "mode": options.mode}
    return run_worker_group(train_with_flips, task, cluster=cluster, name=f"workers-{name}", directory=folder)


def flips(folder: Path, options: argparse.Namespace) -> None:
    """Plant flips in a run, and print how many were named with the right worker and step."""
    print("| planted | found | step named | worker named | pair named | accused without a flip | seconds |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for what in options.kinds:
        faults = faults_of(what, options.cases if what != "nothing" else 0, options.seed, options.bits)
        steps = faults[-1]["step"] + duration_of(what) + EVERY if faults else options.clean
        began = time.monotonic()
        accusations = accused(folder, faults, steps, options)
        counts: Counter[str] = Counter()
        by_step: dict[int, list[dict[str, Any]]] = {}
        for accusation in accusations:
            by_step.setdefault(accusation["found"], []).append(accusation)
        missed = []
        for fault in faults:
            of_fault = []
            for step in range(fault["step"], fault["step"] + duration_of(what)):
                of_fault += by_step.pop(step, [])
            counts["found"] += bool(of_fault)
            # A change in memory between two steps is an accusation of the step before.
            counts["step"] += any(-1 <= accusation["step"] - accusation["found"] <= 0 for accusation in of_fault)
            counts["worker"] += bool(of_fault) and all(accusation["rank"] == fault["rank"] for accusation in of_fault)
            counts["pair"] += any(
                accusation["rank"] is None and fault["rank"] in accusation["pair"] for accusation in of_fault
            )
            if not of_fault or any(accusation["rank"] != fault["rank"] for accusation in of_fault):
                missed.append({**fault, "accusations": of_fault})
        named = f"{counts['step']} | {counts['worker']} | {counts['pair']}"
        others = f"{sum(map(len, by_step.values()))} in {steps} steps"
        print(
            f"| {what} | {counts['found']} of {len(faults)} | {named} | {others} | {time.monotonic() - began:.0f} |",
            flush=True,
        )
        for fault in missed[:5]:
            print("   ", json.dumps(fault), file=sys.stderr, flush=True)


def bits(folder: Path, options: argparse.Namespace) -> None:
    """Plant flips in gradients, and print how many of each bit were found."""
    faults = faults_of("gradient", 32 * options.cases, options.seed, range(32))
    steps = faults[-1]["step"] + EVERY
    found_at = {accusation["found"] for accusation in accused(folder, faults, steps, options)}
    counts = Counter(fault["bit"] for fault in faults if fault["step"] in found_at)
    print("| bit | found |\n|--:|--:|")
    for bit in range(32):
        print(f"| {bit} | {counts[bit]} of {options.cases} |")
    print(f"accused without a flip: {len(found_at - {fault['step'] for fault in faults})} in {steps} steps")


def noise(rounds: int, seed: int) -> None:
    """Simulate noise of correct results; print how often they differ too much, and are called wrong by a majority."""
    # Tensors of S/16, as the engine's parameters: (elements, noise relative to the gradient's root mean square)
    sizes = [384, 384 * 197, 384 * 768, *[384 * 384 * 12, 384 * 13] * 12, 384, 384, 384 * 1000, 1000]
    generator = torch.Generator().manual_seed(seed)
    print("| noise | workers | grows to | repetitions | differ too much | called wrong |\n|---|--:|--:|--:|--:|--:|")
    for kind in ("normal", "exponential tails", "Student, 5 degrees"):
        for workers in (2, 8):
            for growth in (1, 30):
                differ = wrong = 0
                counts = [sums_of(size) for size in sizes]
                # The number of sums suffices: each has noise of the same kind.
                for _ in range(rounds):

                    def votes(number: int, level: float, kind: str = kind, counts: list[int] = counts) -> torch.Tensor:
                        drawn = torch.randn(number, sum(counts), generator=generator, dtype=torch.float64)
                        if kind == "exponential tails":
                            drawn *= torch.empty_like(drawn).exponential_(generator=generator)
                        elif kind != "normal":
                            squares = torch.randn(5, *drawn.shape, generator=generator, dtype=torch.float64).square()
                            drawn /= squares.mean(0).sqrt()
                        return torch.stack([drawn * 1e-7 * level, torch.ones_like(drawn)], 1)

                    measured = Noise.of(votes(2 * workers, 1.0), counts, 0.0)
                    for _ in range(20):
                        pair = votes(2, growth)
                        if not differing(*pair, measured).any():
                            continue
                        differ += 1
                        again = torch.cat([pair, votes(2 * workers, growth)])
                        measured = measured.grown(again[2:])
                        right = majority(
                            list(again), lambda a, b, limit=measured: not bool(differing(a, b, limit).any())
                        )
                        wrong += right is None or any(differing(v, again[right], measured).any() for v in pair)
                print(f"| {kind} | {workers} | {growth} | {20 * rounds} | {differ} | {wrong} |", flush=True)


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
            task["hooks"] = {HOOK: {}} if audited else NO_AUDIT
            spent: Any = run_worker_group(cpu_seconds, task, cluster=cluster, name=f"workers-{run}", directory=folder)
            print(f"health.audit {audited}: {spent:.2f} CPU-seconds for {steps} steps on 2 workers", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["flips", "bits", "noise", "price"])
    parser.add_argument("--mode", choices=["exact", "plain", "noise"], default="exact")
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--bits", type=int, nargs="+", default=[], help="only flip these bits, 0 to 31 (default: any)")
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
            flips(Path(temporary), options)
        elif options.what == "bits":
            bits(Path(temporary), options)
        elif options.what == "noise":
            noise(options.rounds, options.seed)
        else:
            model = MODEL
            if options.model is not None:
                model = {"name": options.model, "image_size": options.image_size, "classes": 10}
            price(Path(temporary), options.steps, options.rounds, options.share, model)


if __name__ == "__main__":
    # Workers import functions by their module name.
    from benchmarks import live_audit as module

    module.main()
