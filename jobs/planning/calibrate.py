"""The work of `patchline calibrate [RECIPE…]`: measure a machine, or every node of a cluster, for `plan` to go by.

    fp32       products 89 GFLOP/s (2 … 98), attention 42 GFLOP/s (2 … 76), norms and softmax 22.2 GB/s, …
    ZeRO 2     fp32, 1 worker: 395 ms a step for 38.6M parameters in 44 tensors, 98 ms a micro-batch more
    all-reduce     2 workers: 0.1 kB in 0.25 ms, 65.5 kB in 0.31 ms, 1.0 MB in 0.59 ms, 16.8 MB in 15 ms
    wrote      ~/.cache/patchline/calibration.json in 173 s; `python -m jobs plan RECIPE` goes by it

1. Say what to measure: a ladder of small models, the recipes' own cut to two blocks, their precisions and ZeRO stages.
2. Run worker groups as a stage would, with a function that trains nothing (pipeline/plan/measure.py): one of one
   worker, one of as many as the recipes have.
3. Put what they found together, and write it to one file.
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import models
from data.decoder import images_per_cpu_s
from data.errors import UsageError
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from jobs.context import index_if_made
from jobs.planning.calibration_lines import lines
from jobs.planning.passing import folder_in
from jobs.planning.slowest_node import put_together
from jobs.resolved_recipe import Campaign
from models import ModelConfig
from pipeline.plan.calibration import decode_key, write_calibration
from pipeline.plan.engine_cost import EngineTime
from pipeline.plan.measure import measure
from pipeline.plan.operations import Work
from pipeline.preflight.machine import cores
from pipeline.training_config import TrainConfig

Engine: TypeAlias = dict[str, Any]  # what a worker is told of one that it is to measure; JSON

# Names, micro-batches: together they hold the widths and numbers of tokens from Ti to L at 224 px. Two blocks each,
# of which the second computes the class token alone where the whole model's last one does.
# Few images of wide layers are there because their weights take longer to read than to multiply with.
LADDER = (
    *(("Ti/16", 1), ("Ti/16", 16), ("S/32", 8), ("S/16", 2), ("S/16", 12)),
    *(("B/32", 12), ("B/32", 2), ("B/16", 3), ("L/16", 1)),
)
CONVOLUTIONS = (("BiT-R50x1", 2), ("R26+S/32", 2))
# Stages and precisions that are measured without a recipe, those that most people have first.
KINDS = ((2, "bf16"), (2, "fp32"), (1, "bf16"), (0, "fp32"), (1, "fp32"), (3, "bf16"), (3, "fp32"))
ENGINES_S = 16.0  # after which the largest worker group begins no other of them
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
    # Without a recipe the engines come in order of worth; the last are left out where a minute has no room for them.
    has_limit = engines is None and not campaigns
    if engines is None:
        engines = dict.fromkeys((1, cluster.most), engines_of(stages))
    largest = max(engines)
    names = ", ".join(str(world) for world in sorted(engines))
    say(f"calibrate  {names} workers ({cluster.backend}), {len(works)} models, {len(engines[1])} engines")

    reports = reports_of(campaigns, cluster, works, engines, say, has_limit=has_limit)
    calibration = put_together(reports, cluster, load, storage_folder(campaigns) or "")
    calibration = dataclasses.replace(calibration, decode=decode_rates(campaigns))
    for line in lines(calibration):
        say(line)
    left_out = engines[largest][engines_in(reports[largest]) :]
    if left_out:
        say(f"left out   {kinds_text(left_out)}, to end in a minute; a recipe that has one of them measures it")
    write_calibration(output, calibration)
    say(f"wrote      {output} in {time.monotonic() - began:.0f} s; `python -m jobs plan RECIPE` goes by it")


# ------------------------------------------------------------------------ what to measure


def cluster_of(campaigns: Sequence[Campaign]) -> ClusterConfig:
    """Return whose workers are measured: those of the recipes, or a process for each GPU or core here.

    Raises UsageError where recipes differ in what a worker is.
    """
    if not campaigns:
        import torch

        gpus = torch.cuda.device_count()
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
        for zero, precision in KINDS:
            asked.append(engine(zero, precision, "adam", False))
    unique = []
    for settings in asked:
        if settings not in unique:
            unique.append(settings)
    return unique


def engine(zero: int, precision: str, optimizer: str, exact: bool) -> Engine:
    """Return what a worker is told of an engine."""
    return {"zero": zero, "precision": precision, "optimizer": optimizer, "exact": exact}


def engines_in(report: Mapping[str, Any]) -> int:
    """Return how many engines a worker group has measured, in the order in which it was asked."""
    return len({EngineTime(**engine_time).kind for engine_time in report["workers"][0]["engines"]})


def kinds_text(engines: Sequence[Engine]) -> str:
    """Return "ZeRO 3 in bf16, ZeRO 3 in fp32"."""
    return ", ".join(f"ZeRO {asked['zero']} in {asked['precision']}" for asked in engines)


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


def reports_of(
    campaigns: Sequence[Campaign],
    cluster: ClusterConfig,
    works: Sequence[Work],
    engines: Mapping[int, Sequence[Engine]],
    say: Callable[[str], None],
    *,
    has_limit: bool,
) -> dict[int, Mapping[str, Any]]:
    """Run a worker group of each world, the largest first, and return by world what rank 0 has reported.

    With a limit the largest leaves out the last engines for want of time, and the others measure those that it has.
    """
    worlds = sorted(engines, reverse=True)
    largest = worlds[0]
    reports: dict[int, Mapping[str, Any]] = {}
    for world in worlds:
        asked = list(engines[world])
        if has_limit and world != largest:
            asked = asked[: engines_in(reports[largest])]
        task = {
            # What a worker computes does not depend on how many others there are: it is measured once.
            "works": [work.plain() for work in works] if world == largest else [],
            "engines": asked,
            "engines_s": ENGINES_S if has_limit and world == largest else None,
            "collectives": world == largest,
            "folder": storage_folder(campaigns) if world == largest else None,
            "timeout_s": cluster.start_timeout_s,
        }
        reports[world] = run_workers(campaigns, dataclasses.replace(cluster, workers=world), task, say)
    return reports


def run_workers(
    campaigns: Sequence[Campaign], cluster: ClusterConfig, task: Mapping[str, Any], say: Callable[[str], None]
) -> Mapping[str, Any]:
    """Run a worker group once, as a stage would have it."""
    run = campaigns[0].run if campaigns else Path(tempfile.gettempdir()) / f"patchline-calibrate-{os.getpid()}"
    with folder_in(run) as folder:
        report = run_worker_group(
            measure,
            dict(task),
            cluster=cluster,
            name="attempt",
            directory=folder / "calibrate" / "attempts",
            log=say,
            is_shared=not campaigns or campaigns[0].remote is None,
        )
    return cast(Mapping[str, Any], report)
