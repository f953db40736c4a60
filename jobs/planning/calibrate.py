"""The work of `patchline calibrate [RECIPE…]`: measure a machine, or every node of a cluster, for `plan` to go by.

    fp32       products 89 GFLOP/s (2 … 98), attention 42 GFLOP/s (2 … 76), norms and softmax 22.2 GB/s, …
    ZeRO 2     fp32, 1 worker: 62 ms a step for 7.4M parameters in 56 tensors, 10 ms a micro-batch before it
    all-reduce     2 workers: 0.1 kB in 0.25 ms, 65.5 kB in 0.31 ms, 1.0 MB in 0.59 ms, 16.8 MB in 15 ms
    wrote      ~/.cache/patchline/calibration.json in 173 s; `python -m jobs plan RECIPE` goes by it

1. Say what to measure: a ladder of small models, the recipes' own cut to two blocks, their precisions and ZeRO stages.
2. Run worker groups as a stage would, with a function that trains nothing (pipeline/planning/measure.py): one of one
   worker, one of as many as the recipes have.
3. Put what they found together, and write it to one file.
"""

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import models
from data.decoder import images_per_cpu_s
from data.errors import UsageError
from data.files import size_text
from jobs.cluster import backends
from jobs.cluster.processes import gpus_present
from jobs.cluster.worker_files import SeenRecords
from jobs.cluster.worker_group import ClusterConfig, do_nothing
from jobs.context import index_if_made
from jobs.planning.passing import folder_in
from jobs.resolved_recipe import Campaign
from models import ModelConfig
from pipeline.monitoring.telemetry import counted, milliseconds
from pipeline.planning.calibration import (
    Calibration,
    EngineTime,
    Hardware,
    Storage,
    decode_key,
    kind_of,
    write_calibration,
)
from pipeline.planning.measure import cores, measure, processor
from pipeline.planning.operations import Operation, Work
from pipeline.training_config import TrainConfig
from pipeline.versions import package_versions

Engine: TypeAlias = dict[str, Any]  # what a worker is told of one that it is to measure; JSON

# Names, micro-batches: together they hold the widths and numbers of tokens from Ti to H at 224 px. Two blocks each,
# of which the second computes the class token alone where the whole model's last one does.
LADDER = (("Ti/16", 1), ("Ti/16", 16), ("S/32", 8), ("S/16", 2), ("S/16", 16), ("B/32", 16), ("B/16", 4), ("L/16", 2))
CONVOLUTIONS = (("BiT-R50x1", 2), ("R26+S/32", 2))
GPU_FACTOR = 16  # times the images, where there is a GPU to fill
TINY_IMAGES = (32, 4)  # pixels a side, of a patch: what of small images no larger model shows
MOST_FLOPS = 3e11  # of a recipe's own micro-batch, cut to two blocks; a larger one is measured with fewer images


def calibrate(
    campaigns: Sequence[Campaign],
    output: Path,
    say: Callable[[str], None],
    engines: Mapping[int, Sequence[Engine]] | None = None,
) -> None:
    """Measure, say every line, and write the file.

    `engines` are those that are measured, by world; left out, those of the recipes, with one worker and with the most
    that the recipes have.

    Raises UsageError, ClusterError, WorkerGroupError, OSError.
    """
    began = time.monotonic()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cluster = cluster_of(campaigns)
    stages = stages_of(campaigns)
    works = works_of(stages, bool(cluster.gpus_per_worker))
    if engines is None:
        engines = dict.fromkeys((1, cluster.most), engines_of(stages))
    worlds = sorted(engines)
    names = ", ".join(str(world) for world in worlds)
    say(f"calibrate  {names} workers ({cluster.backend}), {len(works)} models, {len(engines[1])} engines")

    reports = {}
    if cluster.backend == "ray":
        backends.connect(cluster)
    for world in worlds:
        is_largest = world == worlds[-1]
        task = {
            # What a worker computes does not depend on how many others there are: it is measured once.
            "works": [work.plain() for work in works] if is_largest else [],
            "engines": list(engines[world]),
            "collectives": is_largest,
            "folder": storage_folder(campaigns) if is_largest else None,
            "timeout_s": cluster.start_timeout_s,
        }
        reports[world] = run_workers(campaigns, dataclasses.replace(cluster, workers=world), task, say)
    calibration = put_together(reports, cluster, load, storage_folder(campaigns) or "")
    calibration = dataclasses.replace(calibration, decode=decode_rates(campaigns))
    for line in lines(calibration):
        say(line)
    write_calibration(output, calibration)
    say(f"wrote      {output} in {time.monotonic() - began:.0f} s; `python -m jobs plan RECIPE` goes by it")


# ------------------------------------------------------------------------ what to measure


def cluster_of(campaigns: Sequence[Campaign]) -> ClusterConfig:
    """Return whose workers are measured: those of the recipes, or a process for each GPU or core here.

    Raises UsageError where recipes differ in what a worker is.
    """
    if not campaigns:
        gpus = gpus_present()
        return ClusterConfig(workers=gpus or cores(), backend="processes", gpus_per_worker=min(gpus, 1))
    first = campaigns[0].cluster
    most = max(campaign.cluster.most for campaign in campaigns)
    for campaign in campaigns[1:]:
        for name in ("backend", "cpus_per_worker", "gpus_per_worker"):
            if getattr(campaign.cluster, name) != getattr(first, name):
                raise UsageError(
                    f"the recipes differ in cluster.{name}: {getattr(first, name)} and "
                    f"{getattr(campaign.cluster, name)}; a file holds one kind of worker\n"
                    "  calibrate them apart, each with --output FILE"
                )
    return dataclasses.replace(first, workers=most)


def stages_of(campaigns: Sequence[Campaign]) -> list[tuple[TrainConfig, ModelConfig]]:
    """Return the trained stages whose models are known."""
    stages = []
    for campaign in campaigns:
        for stage in campaign.stages:
            if isinstance(stage.config, TrainConfig) and stage.model is not None:
                stages.append((stage.config, stage.model))
    return stages


def works_of(stages: Sequence[tuple[TrainConfig, ModelConfig]], has_gpus: bool) -> list[Work]:
    """Return what is computed: the ladder in every precision asked for, and the stages' own models, cut."""
    precisions = list(dict.fromkeys(cfg.precision for cfg, _ in stages)) or ["fp32", "bf16"]
    families = {model.family for _, model in stages}
    has_stems = any(getattr(model, "stem", None) for _, model in stages)
    named = list(LADDER)
    if not stages or "bit" in families or has_stems:
        named += CONVOLUTIONS
    works = []
    side, patch = TINY_IMAGES
    for precision in precisions:
        tiny = models.config_of("S/16", side, 10, patch=patch)
        works.append(Work(cut(tiny), 16, precision))
        for name, micro_batch in named:
            images = micro_batch * (GPU_FACTOR if has_gpus else 1)
            works.append(Work(cut(models.config_of(name)), images, precision))
    for cfg, model in stages:
        short = cut(model)
        affordable = max(int(MOST_FLOPS / max(models.training_flops(short, 1), 1)), 1)
        micro_batch = min(cfg.micro_batch, affordable)
        work = Work(short, micro_batch, cfg.precision, 0, cfg.loss, cfg.label_smoothing, cfg.mixup)
        if work not in works:
            # In front: the last of each precision shows what company costs, which takes one of some size.
            works.insert(0, work)
    return works


def cut(model: ModelConfig) -> ModelConfig:
    """Return the model with two blocks, or one unit in each stage of a ResNet."""
    changes: dict[str, Any] = {}
    if hasattr(model, "depth"):
        changes["depth"] = min(model.depth, 2)
    if hasattr(model, "units"):
        changes["units"] = tuple(1 for _ in model.units)
    return dataclasses.replace(model, **changes)


def engines_of(stages: Sequence[tuple[TrainConfig, ModelConfig]]) -> list[Engine]:
    """Return the engines that are measured: the stages', or without recipes those that most people have."""
    asked = []
    for cfg, _ in stages:
        asked.append(engine(cfg.zero, cfg.precision, cfg.optim.name, bool(cfg.exact_parts)))
    if not stages:
        for zero in (0, 1, 2, 3):
            asked.append(engine(zero, "fp32", "adam", False))
        for zero in (1, 2, 3):
            asked.append(engine(zero, "bf16", "adam", False))
    unique = []
    for settings in asked:
        if settings not in unique:
            unique.append(settings)
    return unique


def engine(zero: int, precision: str, optimizer: str, exact: bool) -> Engine:
    """Return what a worker is told of an engine."""
    return {"zero": zero, "precision": precision, "optimizer": optimizer, "exact": exact}


def storage_folder(campaigns: Sequence[Campaign]) -> str | None:
    """Return the folder whose storage is measured: where the first recipe's run lies; None of a run in a store."""
    if not campaigns:
        return str(Path.cwd())
    if campaigns[0].remote is not None:
        return None
    folder = campaigns[0].run
    while not folder.exists():
        folder = folder.parent
    return str(folder)


def decode_rates(campaigns: Sequence[Campaign]) -> dict[str, float]:
    """Return the images a CPU-second of every set that lies on this machine."""
    rates = {}
    for campaign in campaigns:
        for cfg, model in stages_of([campaign]):
            side = max(model.image_size)
            for value, _weight in cfg.data.sets().values():
                path = campaign.resolve(value)
                index = index_if_made(path) if path else None
                if path is None or index is None or index.remote:
                    continue
                rate = images_per_cpu_s(index, side, cfg.data.augment)
                if rate is not None:
                    rates[decode_key(path, side, cfg.data.augment)] = rate
    return rates


# ------------------------------------------------------------------------ the workers


def run_workers(
    campaigns: Sequence[Campaign], cluster: ClusterConfig, task: Mapping[str, Any], say: Callable[[str], None]
) -> Mapping[str, Any]:
    """Run a worker group once, as a stage would have it."""
    run = campaigns[0].run if campaigns else Path(tempfile.gettempdir()) / f"patchline-calibrate-{os.getpid()}"
    backends.wait_for_resources(cluster, str(run), say, do_nothing, [cluster.world])
    with folder_in(run) as folder:
        group_folder = folder / "workers" / "calibrate"
        group_folder.mkdir(parents=True)
        report = backends.worker_group_runner(cluster)(
            measure,
            dict(task),
            cluster=cluster,
            seen=SeenRecords(group_folder),
            on_tick=do_nothing,
            is_shared=not campaigns or campaigns[0].remote is None,
        )
    return cast(Mapping[str, Any], report)


def put_together(
    reports: Mapping[int, Mapping[str, Any]], cluster: ClusterConfig, load: float, folder: str
) -> Calibration:
    """Make a calibration of what the worker groups have found out; the slowest node counts."""
    workers = reports[max(reports)]["workers"]
    by_node: dict[str, list[Mapping[str, Any]]] = {}
    for worker in workers:
        by_node.setdefault(worker["node"], []).append(worker)
    # By precision and node: the medians over the node's workers, all at once.
    operations: dict[str, list[tuple[Operation, float]]] = {}
    call_s: dict[str, float] = {}
    together: dict[str, list[tuple[int, float]]] = {}
    slowest_node = next(iter(by_node))
    computing = {node: [worker for worker in by_node[node] if "compute" in worker] for node in by_node}
    for precision in computing[slowest_node][0]["compute"]:
        slowest_s = -1.0
        for node, node_workers in computing.items():
            table = node_table([worker["compute"][precision] for worker in node_workers])
            node_s = sum(seconds for _, seconds in table)
            if node_s <= slowest_s:
                continue
            slowest_s = node_s
            slowest_node = node
            at_once = by_node[node][0]["at_once"]
            ratio = ratio_to_alone(by_node[node], node_workers, precision)
            operations[precision] = [(operation, seconds / ratio) for operation, seconds in table]
            call_s[precision] = statistics.median(worker["compute"][precision]["call_s"] for worker in node_workers)
            call_s[precision] /= ratio
            together[precision] = [(at_once, ratio)] if at_once > 1 else []
    engines = []
    for report in reports.values():
        # All workers have the same numbers: those of the slowest.
        engines += [EngineTime(**engine_time) for engine_time in report["workers"][0]["engines"]]
    collectives: dict[int, Mapping[str, Sequence[tuple[int, float]]]] = {}
    for members, times in workers[0]["collectives"].items():
        named = {}
        for name, points in times.items():
            if points:
                named[name] = [(int(size), seconds) for size, seconds in points]
        collectives[int(members)] = named
    rates = [worker["storage"] for worker in workers if worker.get("storage")]
    storage = None
    if rates:
        storage = Storage(folder, min(rate[0] for rate in rates), min(rate[1] for rate in rates))
    probes = [worker["probes"] for worker in workers]
    return Calibration(
        date=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        driver=Hardware(processor(), cores(), "cpu"),
        worker=Hardware(*by_node[slowest_node][0]["hardware"]),
        versions=package_versions(),
        threads=workers[0]["threads"],
        gpus=cluster.gpus_per_worker,
        backend=cluster.backend,
        nodes=len(by_node),
        workers_on_a_node=max(len(node_workers) for node_workers in by_node.values()),
        operations=operations,
        call_s=call_s,
        together=together,
        engines=engines,
        collectives=collectives,
        copy_bytes_per_s=min(worker["copy_bytes_per_s"] for worker in workers),
        storage=storage,
        noise=statistics.median(spread(times) for times in probes),
        load=round(load, 2),
    )


def node_table(tables: Sequence[Mapping[str, Any]]) -> list[tuple[Operation, float]]:
    """Return the median over a node's workers of every operator's seconds."""
    seconds: dict[Operation, list[float]] = {}
    for table in tables:
        for name, dtype, flops, size, shape, took in table["operations"]:
            seconds.setdefault(Operation(name, dtype, flops, size, tuple(shape)), []).append(took)
    return [(operation, statistics.median(times)) for operation, times in seconds.items()]


def ratio_to_alone(
    node_workers: Sequence[Mapping[str, Any]], computing: Sequence[Mapping[str, Any]], precision: str
) -> float:
    """Return how many times as long the last model's passes took where all computed as where one did."""
    for worker in node_workers:
        if precision in worker["alone"]:
            alone_s = worker["alone"][precision]["passes_s"]
            at_once_s = statistics.median(other["compute"][precision]["passes_s"] for other in computing)
            return max(at_once_s / alone_s, 1.0)
    return 1.0


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range of times over their median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


# ------------------------------------------------------------------------ what is said


def lines(calibration: Calibration) -> list[str]:
    """Return what was measured, a line each, with units."""
    worker = calibration.worker
    said = [
        f"machine    {worker.processor}, {worker.cores} cores, {worker.device}; {counted(calibration.nodes, 'node')}, "
        f"{counted(calibration.threads, 'thread')} a worker"
    ]
    for precision, samples in calibration.operations.items():
        call_us = 1e6 * calibration.call_s[precision]
        said.append(f"{precision:10} {compute_text(samples)}; a call {call_us:.1f} µs beside")
        for workers, ratio in calibration.together[precision]:
            said.append(f"{precision:10} {workers} workers of a node at once take {ratio:.2f} × as long")
    for engine_time in calibration.engines:
        # The second of the three small models has most tensors.
        said += engine_lines(engine_time) if engine_time.tensors > 40 else []
    for world, times in calibration.collectives.items():
        for name, points in times.items():
            parts = [f"{size_text(size)} in {milliseconds(seconds)}" for size, seconds in points]
            said.append(f"{name.replace('_', '-'):14} {counted(world, 'worker')}: {', '.join(parts)}")
    said.append(f"copying    {size_text(round(calibration.copy_bytes_per_s))}/s in memory")
    if calibration.storage is not None:
        storage = calibration.storage
        said.append(
            f"storage    {size_text(round(storage.write_bytes_per_s))}/s written, fsync included, "
            f"{size_text(round(storage.read_bytes_per_s))}/s read, in {storage.folder}"
        )
    for name, rate in calibration.decode.items():
        said.append(f"decode     {rate:,.0f} images a CPU-second of {name}")
    said.append(
        f"noise      one product's times through the measurement: interquartile range {calibration.noise:.0%} of the "
        f"median; load {calibration.load} when it began"
    )
    return said


def compute_text(samples: Sequence[tuple[Operation, float]]) -> str:
    """Return the rates of the kinds of operators: FLOP/s of what computes, bytes a second of what moves."""
    kinds: dict[str, list[tuple[Operation, float]]] = {}
    for operation, seconds in samples:
        name = kind_of(operation)[0]
        label = "others"
        if name in ("mm", "bmm"):
            label = "products"
        elif name.startswith("_scaled_dot_product"):
            label = "attention"
        elif name.startswith("convolution"):
            label = "convolutions"
        elif "norm" in name or "softmax" in name:
            label = "norms and softmax"
        kinds.setdefault(label, []).append((operation, seconds))
    parts = []
    for label in ("products", "attention", "convolutions", "norms and softmax", "others"):
        group = [(operation, seconds) for operation, seconds in kinds.get(label, []) if seconds > 1e-4]
        if not group:
            continue
        if label in ("products", "attention", "convolutions"):
            rates = sorted(operation.flops / seconds / 1e9 for operation, seconds in group)
            parts.append(f"{label} {statistics.median(rates):,.0f} GFLOP/s ({rates[0]:,.0f} … {rates[-1]:,.0f})")
        else:
            rates = sorted(operation.bytes / seconds / 1e9 for operation, seconds in group)
            parts.append(f"{label} {statistics.median(rates):.1f} GB/s")
    return ", ".join(parts)


def engine_lines(engine_time: EngineTime) -> list[str]:
    """Return what the engine adds to a small model."""
    kind = ", exact" if engine_time.exact else ""
    return [
        f"ZeRO {engine_time.zero}     {engine_time.precision}{kind}, {counted(engine_time.world, 'worker')}: "
        f"{milliseconds(engine_time.step_s)} a step for {engine_time.elements / 1e6:.1f}M parameters in "
        f"{engine_time.tensors} tensors, {milliseconds(engine_time.micro_s)} a micro-batch before it"
    ]
