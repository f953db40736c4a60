"""Test `jobs audit` and `jobs bisect` on planted faults: bit flips, clean stretches, and poisoned samples.

    python -m benchmarks.replay flips --cases 100        gradients, moments, weights, pixels; and clean stretches
    python -m benchmarks.replay samples --cases 100 --kind relabelled|saturated|nan|duplicated
    python -m benchmarks.replay examples --images FOLDER      the sets of docs/replay.md, in examples/ of this folder

`flips`: a run with two workers in exact mode trains 500 steps with a commit every 5. For each case, two workers repeat
five steps with one bit flipped at a random step, worker, place and bit, and the audit compares them with the original
steps. Clean stretches are repeated without a flip.

`samples`: a network is trained until its loss on 2,048 patterns is small. For each case, a step of 1,024 samples is
poisoned, and `bisect`'s search runs on it as in a worker. The seed and the case determine sample and fault.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import cv2
import numpy as np
import torch
import torch.distributed as dist

import models
from data.extras.shards.packing import pack
from data.extras.sources.samples import Sample, digits
from data.extras.sources.tars import tars
from data.images.augment import AugmentConfig
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from jobs.extras.replays.audit import Finding, classify, compare
from pipeline import config, train
from pipeline.architecture import model_config
from pipeline.engine.exact import ExactEngine
from pipeline.extras.replays import search
from pipeline.extras.replays.batch import TrainedStage
from pipeline.health import RECENT
from pipeline.identity import code_version
from pipeline.monitoring.telemetry import read_metrics
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import DataConfig, TrainConfig
from pipeline.worker import Job

MODEL = {"name": "mu/8", "image_size": 16, "classes": 10, "width": 32, "depth": 2, "mlp": 64, "heads": 2}
EVERY = 5  # steps between commits
STAGE = "pretrain-00000000"
KINDS = ("gradient", "moment", "weight", "pixel")


def task_of(folder: Path, shards: Path, cfg: TrainConfig, until: int | None = None) -> dict[str, Any]:
    """Return the task that the driver would pass to a worker's `train`."""
    job = Job(
        run=str(folder),
        directory=str(folder / STAGE),
        attempt=1,
        key="0" * 64,
        code=code_version(),
        model=models.to_dict(model_config(cfg.model)),
        train=[str(shards)],
        until=until,
    )
    job.stop_file.parent.mkdir(parents=True, exist_ok=True)
    (folder / "attempts").mkdir(parents=True, exist_ok=True)
    (folder / "attempts" / "000001.json").touch()
    return {"config": config.plain(cfg), "job": asdict(job)}


# ------------------------------------------------------------------------ flips


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit in one element of a flat fp32 tensor."""
    view = tensor.view(torch.int32)
    view[element] ^= -(1 << 31) if bit == 31 else 1 << bit


def train_cases(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Train all cases in one process group, each with its fault, if any; return both workers' flipped bits."""
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda: None  # type: ignore[assignment]
    fault: dict[str, Any] = {}
    engines: list[ExactEngine] = []
    close_part = ExactEngine.end_micro_batch
    take_step = train.take_step
    next_batch = train.next_batch

    def is_now(what: str) -> bool:
        return fault.get("what") == what and fault["now"] == fault["step"] and dist.get_rank() == fault["rank"]

    def noting(worker: Any, step: int, batches: Any) -> Any:
        fault["now"] = step + 1
        engines[:] = [worker.engine]
        if is_now("moment") or is_now("weight"):
            kind = "master" if fault["what"] == "weight" else fault["kind"]
            parts = [part for part in worker.engine.fragments((kind,), held=True) if part.tensors[kind].numel()]
            part = parts[int(fault["u"] * len(parts))]
            view = part.tensors[kind]
            element = int(fault["v"] * view.numel())
            fault.update(parameter=part.name, element=part.start + element, before=float(view[element]))
            flip(view, element, fault["bit"])
            fault["after"] = float(view[element])
            # Update the model weights from the flipped master weights.
            worker.engine.state.refresh()
        elif fault.get("what") in ("weight", "moment") and fault["now"] == fault["step"]:
            worker.engine.state.refresh()  # it is collective
        return take_step(worker, step, batches)

    def closing(self: ExactEngine, rate: float, numbers: Any = None) -> list[float]:
        if is_now("gradient") and self.part is not None and "parameter" not in fault:
            names = list(self.sizes)
            name = names[int(fault["u"] * len(names))]
            element = int(fault["v"] * self.sizes[name])
            place = element
            for other in names[: names.index(name)]:
                place += self.sizes[other]
            fault.update(parameter=name, element=element, before=float(self.part[place]))
            flip(self.part, place, fault["bit"])
            fault["after"] = float(self.part[place])
        return close_part(self, rate, numbers)

    def batch_of(worker: Any, *args: Any) -> Any:
        batch = next_batch(worker, *args)
        if is_now("pixel") and "parameter" not in fault:
            images = batch.images.clone()
            place = [int(fault["u"] * len(images)), 0, int(fault["v"] * 16), int(fault["w"] * 16)]
            images[tuple(place)] ^= 1 << fault["bit"] % 8
            fault["parameter"] = ""
            return replace(batch, images=images)
        return batch

    ExactEngine.end_micro_batch = closing  # type: ignore[method-assign]
    train.take_step, train.next_batch = noting, batch_of  # type: ignore[assignment]
    outcomes = []
    for case in task["cases"]:
        fault.clear()
        fault.update(case.get("fault") or {})
        try:
            train.train(case)
        except Exception as error:  # a flip may make the run diverge, which the run detects itself
            fault["error"] = f"{type(error).__name__}: {error}"
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, dict(fault))
        outcomes.append(max(told, key=len))
    ExactEngine.end_micro_batch = close_part  # type: ignore[method-assign]
    destroy()
    return outcomes


def flips(folder: Path, cases: int, seed: int) -> None:
    """Plant flips in stretches of a run, and print the audit's findings."""
    shards = folder / "shards"
    pack(digits(train=True, image_size=16), shards, name="train", shard_samples=100)
    cfg = TrainConfig(
        data=DataConfig(train=str(shards), augment=AugmentConfig(min_area=0.7, flip=False)),
        model=MODEL,
        optim=OptimConfig(lr=2e-3, schedule=ScheduleConfig(warmup_steps=20)),
        loss="softmax",
        steps=cases * EVERY + 100,
        batch_size=16,
        micro_batch=4,
        exact_parts=4,
        precision="fp32",
        zero=2,
        log_every=EVERY,
        save_every=EVERY,
        keep=10_000,
    )
    cluster = ClusterConfig(workers=2, backend="processes")
    base = folder / "base"
    began = time.monotonic()
    last = cases * EVERY
    run_worker_group(
        train_cases, {"cases": [task_of(base, shards, cfg, last)]}, cluster=cluster, name="w0", directory=folder
    )
    print(f"the run: {last} steps in {time.monotonic() - began:.0f} s", flush=True)
    undisturbed = TrainedStage(base / STAGE)
    print("| planted | found | step named | worker named | parameter named | verdict | seconds |")
    print("|---|--:|--:|--:|--:|---|--:|")
    for what in ("nothing", *KINDS):
        rng = random.Random(f"{seed} {what}")
        tasks = []
        for number in range(cases):
            start = number * EVERY
            run = folder / what / str(number)
            if start:
                target = run / STAGE / "checkpoints" / f"step-{start:010d}"
                shutil.copytree(base / STAGE / "checkpoints" / target.name, target, copy_function=os.link)
            task = task_of(run, shards, replace(cfg, save_every=10**9), start + EVERY)
            if what != "nothing":
                task["fault"] = {
                    "what": what,
                    "step": start + rng.randrange(1, EVERY + 1),
                    "rank": rng.randrange(2),
                    "bit": rng.randrange(32),
                    "kind": rng.choice(["exp_avg", "exp_avg_sq"]),
                    **{name: rng.random() for name in "uvw"},
                }
            tasks.append(task)
        began = time.monotonic()
        faults: Any = run_worker_group(
            train_cases, {"cases": tasks}, cluster=cluster, name=f"w-{what}", directory=folder
        )
        seconds = time.monotonic() - began
        counts: Counter[str] = Counter()
        verdicts: Counter[str] = Counter()
        missed = []
        for number, fault in enumerate(faults):
            if "error" in fault:
                counts["noticed"] += 1
                verdicts["ended by itself"] += 1
                continue
            finding = Finding(number * EVERY, (number + 1) * EVERY)
            compare(TrainedStage(folder / what / str(number) / STAGE), undisturbed, finding)
            if finding.what:
                finding.verdict = classify(finding)
            verdicts[finding.verdict] += 1
            counts["found"] += finding.verdict != "equal"
            if what == "nothing":
                continue
            counts["step"] += finding.step == fault["step"]
            counts["worker"] += finding.worker == fault["rank"]
            most = finding.differing[0] if finding.differing else None
            is_named = most is not None and most.parameter == fault["parameter"]
            counts["parameter"] += is_named
            if finding.step != fault["step"] or finding.worker != fault["rank"] or not (is_named or what == "pixel"):
                missed.append({**fault, "said": [finding.step, finding.worker, finding.what, most and most.parameter]})
        told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        print(
            f"| {what} | {counts['found'] + counts['noticed']} of {cases} | {counts['step']} | {counts['worker']} | "
            f"{counts['parameter'] if what != 'pixel' else ''} | {told} | {seconds:.0f} |",
            flush=True,
        )
        for fault in missed[:12]:
            print("   ", json.dumps(fault), file=sys.stderr, flush=True)


# ------------------------------------------------------------------------ poisoned samples

SAMPLES = 2048
BATCH = 1024
COPIES = 3
FAMILIES = 100


def pattern(seed: int, rng: np.random.Generator, noise: float) -> tuple[bytes, int]:
    """Return a noisy image of a random class, and the class; the seed determines what the classes look like."""
    of_class = np.random.default_rng(seed).normal(size=(10, 4, 4, 3)).repeat(4, axis=1).repeat(4, axis=2)
    label = int(rng.integers(10))
    image = (128 + 45 * of_class[label] + noise * rng.normal(size=(16, 16, 3))).clip(0, 255).astype(np.uint8)
    return cv2.imencode(".png", image)[1].tobytes(), label


def patterns(seed: int) -> list[Sample]:
    """Return noisy patterns, one base pattern per class; each of the first FAMILIES has COPIES identical copies."""
    rng = np.random.default_rng([seed, 1])
    samples: list[Sample] = []
    while len(samples) < SAMPLES:
        encoded, label = pattern(seed, rng, 10)
        copies = COPIES if len(samples) < FAMILIES * COPIES else 1
        for _ in range(copies):
            samples.append(Sample(f"{len(samples):05d}", encoded, (label,), "png"))
    return samples


def search_cases(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Train the network, then search for the fault in each case; return the planted and the found samples."""
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda: None  # type: ignore[assignment]
    began = time.monotonic()
    result = train.train(task["train"])
    print(f"trained to step {result['step']} in {time.monotonic() - began:.0f} s", flush=True)
    # The median of the previous steps, as in the command.
    recent: list[float] = []
    for record in read_metrics(Path(task["train"]["job"]["directory"])):
        recent += record["grad_norms" if task["metric"] == "grad_norm" else "losses"]
    usual = statistics.median(recent[-RECENT:])
    print(f"usual {usual:.3g}, the last {recent[-1]:.3g}", file=sys.stderr, flush=True)
    plant: dict[str, Any] = {}
    next_batch, begin_forward = search.next_batch, train.begin_forward

    def poisoned(worker: Any, batches: Any, step: int, planned: Any) -> Any:
        batch = next_batch(worker, batches, step, planned)
        rng = random.Random(plant["seed"])
        ids = batch.ids.numpy()
        places = ids[:, 1] * task["shard_samples"] + ids[:, 2]
        in_families = places < FAMILIES * COPIES
        rows = [rng.choice(np.flatnonzero(~in_families).tolist())]
        if plant["kind"] == "duplicated":
            family = rng.choice(sorted(set((places[in_families] // COPIES).tolist())))
            rows = np.flatnonzero(in_families & (places // COPIES == family)).tolist()
        plant.setdefault("rows", rows)
        images, labels = batch.images.clone(), batch.labels.clone()
        if plant["kind"] in ("relabelled", "duplicated"):
            labels[rows] = (labels[rows] + rng.randrange(1, 10)) % 10
        elif plant["kind"] == "saturated":
            images[rows] = 255
        else:
            plant["nan"] = ids[rows[0], 1:].tolist()
        return replace(batch, images=images, labels=labels)

    def forward(worker: Any, step: int, batch: Any) -> Any:
        images = begin_forward(worker, step, batch)
        if "nan" in plant:
            is_it = (batch.ids[:, 1:] == torch.tensor(plant["nan"])).all(1)
            if batch.masked is not None:
                is_it &= ~batch.masked
            images = images.clone()
            images[is_it] = torch.nan
        return images

    search.next_batch, train.begin_forward = poisoned, forward  # type: ignore[assignment]
    outcomes = []
    for number in range(task["first"], task["first"] + task["count"]):
        plant.clear()
        plant.update(kind=task["kind"], seed=f"{task['seed']} {task['kind']} {number}")
        case = {**task["search"], "search": {"step": task["step"], "metric": task["metric"], "usual": usual}}
        found = search.search(case)
        outcomes.append({**found, "planted": plant["rows"]})
    destroy()
    return outcomes


def samples(folder: Path, cases: int, seed: int, kind: str, metric: str, steps: int) -> None:
    """Plant poisoned samples in steps of 1,024, and print how many were found."""
    shards = folder / "shards"
    pack(iter(patterns(seed)), shards, name="train", classes=10, shard_samples=256)
    cfg = TrainConfig(
        data=DataConfig(train=str(shards), augment=AugmentConfig(crop="none", flip=False)),
        model=MODEL,
        optim=OptimConfig(lr=1e-2, schedule=ScheduleConfig(warmup_steps=10, end=5e-3)),
        loss="softmax",
        steps=steps + 1,
        batch_size=BATCH,
        micro_batch=BATCH,
        precision="fp32",
        zero=0,
        log_every=10,
        save_every=10**9,
    )
    run = folder / "run"
    task = {
        "train": task_of(run, shards, cfg, steps),
        "search": task_of(run, shards, cfg, steps + 1),
        "seed": seed,
        "kind": kind,
        "metric": metric,
        "step": steps + 1,
        "first": 0,
        "count": cases,
        "shard_samples": 256,
    }
    cluster = ClusterConfig(workers=1, backend="processes")
    began = time.monotonic()
    outcomes: Any = run_worker_group(search_cases, task, cluster=cluster, name="w", directory=folder)
    spikes = [one for one in outcomes if one["is_spike"]]
    right = [one for one in spikes if one["is_found"] and sorted(one["rows"]) == sorted(one["planted"])]
    replays = [one["replays"] for one in spikes]
    seconds = (time.monotonic() - began) / cases
    print(
        f"| {kind}, {metric} | {len(spikes)} of {cases} | {len(right)} of {len(spikes)} | "
        f"{statistics.median(replays or [0]):.0f}, at most {max(replays, default=0)} | {seconds:.1f} |"
    )
    for one in outcomes:
        if one not in right:
            print("   ", json.dumps(one)[:300], file=sys.stderr)


# ------------------------------------------------------------------------ the worked examples

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def examples(images: Path, folder: Path) -> None:
    """Pack the sets of docs/replay.md from CIFAR-10's tars.

    sources: 8 shards of 500 images, with the labels of shard 5 shifted to the next class; test: 2,000 images; known:
    256 images; delivery: the same images, but number 100 has the label of a frog.
    """
    train = list(tars(sorted(images.glob("cifar10-train-*.tar"))))
    test = list(tars(sorted(images.glob("cifar10-test-*.tar"))))
    sources = []
    for number, sample in enumerate(train[:4000]):
        is_poisoned = number // 500 == 5
        sources.append(replace(sample, labels=((sample.labels[0] + is_poisoned) % 10,)))
    known = train[4000:4256]
    delivery = [*known[:100], replace(known[100], labels=(6,)), *known[101:]]
    for name, chosen in {"sources": sources, "test": test, "known": known, "delivery": delivery}.items():
        pack(chosen, folder / name, name=name, names=CIFAR10, shard_samples=500)
        print(f"{folder / name}: {len(chosen)} images", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["flips", "samples", "examples"])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="relabelled")
    parser.add_argument("--metric", default="grad_norm")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--images", type=Path, help="folder of cifar10-train-*.tar and cifar10-test-*.tar")
    options = parser.parse_args()
    if options.what == "examples":
        examples(options.images, Path("examples"))
        return
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        if options.what == "flips":
            flips(Path(folder), options.cases, options.seed)
        else:
            samples(Path(folder), options.cases, options.seed, options.kind, options.metric, options.steps)


if __name__ == "__main__":
    # Workers import functions by their module name.
    from benchmarks import replay

    replay.main()
