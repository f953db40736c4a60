"""`python -m jobs plan recipe.yaml`: what would run, how the batch falls on the workers, and what it costs."""

from math import ceil

import models
from data.decoder import images_per_cpu_s
from data.errors import DataError, PatchlineError
from data.order import shares as shares_of
from data.shards.index import Index, load_index
from jobs.campaign import Campaign, Stage
from jobs.context import reference
from pipeline.arithmetic import batch_arithmetic, memory_estimate, recomputed_blocks, steps_of
from pipeline.telemetry import PEAK, amount
from pipeline.training_config import TrainConfig, cache_line, training_order

GPU_FLOPS = 0.4 * PEAK["H100"]  # in bf16, at 40 % of its peak
CPU_RATE = 650.0  # ImageNet-1k photographs a core decodes in a second, busy (e2babf2); idle 925, benchmarks/README.md


def plan(campaign: Campaign) -> list[str]:
    """Lines for people: every stage, whether it would run, its arithmetic, parameters and FLOPs."""
    cluster = campaign.cluster
    lines = [
        f"run directory  {campaign.run}",
        f"cluster        {cluster.workers} workers ({cluster.backend})",
    ]
    changed: set[str] = set()
    for stage in campaign.stages:
        done = campaign.done(stage)
        reason = why(campaign, stage, changed)
        if done is None:
            changed.add(stage.name)
        lines += ["", f"{stage.name} ({stage.kind}, key {stage.key[:8]}): {reason}"]
        lines += [f"  reads   {field} = {value}" for field, value in stage.parents.items()]
        if stage.model is not None:
            lines.append(f"  model   {model_line(stage)}")
        lines += [f"  MISSING {message}" for message in stage.missing]
        if isinstance(stage.config, TrainConfig):
            lines += training_lines(campaign, stage)
    return lines


def why(campaign: Campaign, stage: Stage, changed: set[str]) -> str:
    """Skipped, resumed or run, and the reason."""
    if campaign.done(stage) is not None:
        return "finished, would be skipped"
    if any((campaign.directory(stage) / "checkpoints").glob("step-*")):
        return "half done, would be resumed from its newest checkpoint"
    upstream = [link[0] for link in map(reference, stage.parents.values()) if link and link[0] in changed]
    if upstream and any(campaign.run.glob(f"{stage.name}-*/done.json")):
        return f"would run again, because {upstream[0]} would"
    return "would run"


def model_line(stage: Stage) -> str:
    config = stage.model
    size = "×".join(map(str, config.image_size))
    return (
        f"{config.family} {size} px, {config.classes} classes, {models.parameters_of(config):,} parameters, "
        f"{models.macs_of(config) / 1e9:.3f} GMACs an image"
    )


def training_lines(campaign: Campaign, stage: Stage) -> list[str]:
    cfg = stage.config
    a = batch_arithmetic(cfg, campaign.cluster.workers)
    lines = [
        f"  batch   {a.batch_size} = {a.world} workers × micro_batch {a.micro_batch} × accumulation {a.accumulation}"
        if a.batch_size == a.world * a.micro_batch * a.accumulation
        else f"  batch   {a.batch_size} over {a.world} workers unevenly, {a.accumulation} micro-batches each"
    ]
    sets = {name: (index_of(campaign, path), weight) for name, (path, weight) in cfg.data.sets().items()}
    found = [index for index, _ in sets.values() if index]
    whole = len(found) == len(sets)
    samples = sum(index.samples for index in found) if whole else cfg.data.samples
    sure = "" if whole else " (as the recipe says; the data is not there yet)"
    if samples is None and cfg.steps is None:
        return [*lines, f"  steps   {cfg.passes:g} passes; the data is not there yet (data.samples=… lets plan count)"]
    steps = steps_of(cfg, samples or 0)
    images = steps * cfg.batch_size
    passes = f"{images / samples:.2f} passes over {samples:,} samples{sure}" if samples else "data is not there yet"
    lines.append(f"  steps   {steps:,} ({amount(images)} images, {passes})")
    if cfg.data.mixture:
        shares = shares_of(cfg.batch_size, [weight for _, weight in sets.values()])
        for (name, (index, _)), share in zip(sets.items(), shares, strict=True):
            more = f", {steps * share / index.samples:.2f} passes over {index.samples:,} samples" if index else ""
            lines.append(f"  mixture {name}: {share} of every batch{more}")
    if whole and any(index.remote for index in found):
        index, order = training_order(cfg, found)
        lines.append(f"  cache   a worker needs {cache_line(index, order, a.slots(0), 0, cfg.data)}")
    lines.append(f"  compute {models.training_flops(stage.model, images) / 1e18:.4g} exaFLOPs (6 × MACs × images)")
    if campaign.cluster.gpus_per_worker:
        lines.append(f"  feed    {feed_line(campaign, stage, found)}")
    optim, schedule = cfg.optim, cfg.optim.schedule
    lines.append(
        f"  optim   {optim.name} lr {optim.lr:g}, {schedule.decay} after {schedule.warmup_steps:,} warm-up steps, "
        f"decay {optim.weight_decay:g}, clip {optim.clip:g}; ZeRO {cfg.zero}, {cfg.precision}"
        + (f", exact in {cfg.exact_parts} parts" if cfg.exact_parts else "")
    )
    states, activations = memory_estimate(cfg, stage.model, a.world)
    lines.append(
        f"  memory  about {states / 2**30:.1f} GiB of states + {activations / 2**30:.1f} GiB of activations a worker "
        f"(checkpoint_blocks={recomputed_blocks(cfg, stage.model)})"
    )
    return lines


def feed_line(campaign: Campaign, stage: Stage, sets: list[Index]) -> str:
    """Whether the decoding processes of a worker keep up with its GPU, and what to type where they do not."""
    cfg, cluster = stage.config, campaign.cluster
    local = next((index for index in sets if not index.remote), None)
    rate = images_per_cpu_s(local, max(stage.model.image_size), cfg.data.augment) if local else None
    needed = GPU_FLOPS / models.training_flops(stage.model, 1)
    cores = ceil(needed / (rate or CPU_RATE))
    source = "measured here on this set" if rate else "assumed; the set is not here to measure"
    line = (
        f"a GPU at {GPU_FLOPS / 1e12:.0f} TFLOP/s (an H100 at 40 %) takes {needed:,.0f} images/s, a core decodes "
        f"{rate or CPU_RATE:,.0f} ({source}): "
    )
    if cfg.data.decode == "gpu":
        return line + "data.decode=gpu, not judged"
    if min(cfg.data.processes, cluster.cpus_per_worker) >= cores:
        return line + f"data.processes={cfg.data.processes} keeps up, {cores} would"
    more = "" if cores < cluster.cpus_per_worker else f" cluster.cpus_per_worker={cores + 1}"
    return line + (
        f"data.processes={cfg.data.processes} on {cluster.cpus_per_worker} cores CANNOT FEED IT; "
        f"type {stage.name}.data.processes={cores}{more}, pack with --restarts, or {stage.name}.data.decode=gpu"
    )


def index_of(campaign: Campaign, path: str) -> Index | None:
    """A set's index, None where it has not been made yet."""
    try:
        return load_index(campaign.resolve(path) or "")
    except (DataError, PatchlineError):
        return None
