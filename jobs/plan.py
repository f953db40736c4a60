"""`python -m jobs plan recipe.yaml`: what would run, how the batch falls on the workers, and what it costs."""

import data
import models
from jobs.campaign import Campaign, Stage
from jobs.stage import reference
from pipeline.errors import PatchlineError
from pipeline.stage import TrainConfig, batch_arithmetic, memory_estimate, recomputed_blocks, steps_of
from pipeline.telemetry import amount


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
    sets = {name: (samples_of(campaign, path), weight) for name, (path, weight) in cfg.data.sets().items()}
    counts = [count for count, _ in sets.values()]
    found = sum(filter(None, counts)) if all(counts) else None
    samples, sure = found or cfg.data.samples, "" if found else " (as the recipe says; the data is not there yet)"
    if samples is None and cfg.steps is None:
        return [*lines, f"  steps   {cfg.passes:g} passes; the data is not there yet (data.samples=… lets plan count)"]
    steps = steps_of(cfg, samples or 0)
    images = steps * cfg.batch_size
    passes = f"{images / samples:.2f} passes over {samples:,} samples{sure}" if samples else "data is not there yet"
    lines.append(f"  steps   {steps:,} ({amount(images)} images, {passes})")
    if cfg.data.mixture:
        shares = data.shares(cfg.batch_size, [weight for _, weight in sets.values()])
        for (name, (count, _)), share in zip(sets.items(), shares, strict=True):
            more = f", {steps * share / count:.2f} passes over {count:,} samples" if count else ""
            lines.append(f"  mixture {name}: {share} of every batch{more}")
    lines.append(f"  compute {models.training_flops(stage.model, images) / 1e18:.4g} exaFLOPs (6 × MACs × images)")
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


def samples_of(campaign: Campaign, path: str) -> int | None:
    """Samples of a set, None where it has not been made yet."""
    try:
        return data.load_index(campaign.resolve(path) or "").samples
    except (data.DataError, PatchlineError):
        return None
