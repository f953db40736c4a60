"""The work of `patchline plan RECIPE`: what would run, how the batch falls on the workers, and what it costs.

    pretrain (pretrain, key d91ff90d): would run
      batch   4096 = 8 workers × micro_batch 512 × accumulation 1
      steps   2,190 (9.0M images, 7.00 passes over 1,281,167 samples)

Nothing is started or written. What is not there yet (data, weights) is named, and the lines that need it are left out;
then the command ends as `run` would, with exit code 65, or with 0 where `--without-data` asks for that.
"""

from dataclasses import dataclass
from math import ceil

import models
from data.decoder import images_per_cpu_s
from data.index.index import Index
from data.mixture import shares as shares_of
from jobs.cluster_config import ClusterConfig
from jobs.context import reference
from jobs.planning.outlook import Outlook, time_lines
from jobs.recipe import class_names
from jobs.recipe.changes import changes_since_half_done
from jobs.recipe.choices import choice_text, settled
from jobs.resolved_recipe import Campaign, Stage
from jobs.stages import sweep
from jobs.worlds import allowed_worlds, in_words
from pipeline.arithmetic import Arithmetic, batch_arithmetic, steps_of
from pipeline.engine.buckets import reduction_line
from pipeline.monitoring.telemetry import PEAK, amount
from pipeline.optimization.thinning import describe, flops_of, phases
from pipeline.plan import memory
from pipeline.plan.memory_traces import TraceFailed
from pipeline.start import engine_settings
from pipeline.training_config import TrainConfig, cache_line, training_order

GPU_FLOPS = 0.4 * PEAK["H100"]  # in bf16, at 40 % of its peak
CPU_RATE = 650.0  # ImageNet-1k photographs a core decodes in a second, busy (e2babf2); idle 925, benchmarks/README.md


@dataclass(frozen=True)
class TrainingSet:
    """One of the sets that a stage trains on."""

    name: str
    index: Index | None  # None: not made yet
    weight: float  # its share of every batch, before all are scaled to sum to one


def plan(campaign: Campaign, outlook: Outlook) -> list[str]:
    """Describe every stage in lines: whether it would run, its arithmetic, parameters, FLOPs, time and money."""
    campaign = settled(campaign)
    cluster = campaign.cluster
    lines = [
        f"run directory  {campaign.place}",
        f"cluster        {workers_text(cluster)} workers ({cluster.backend})",
    ]
    # Stages come parents first: when one is judged, it is known whether those that it reads would run.
    would_run: set[str] = set()
    for stage in campaign.stages:
        if campaign.done(stage) is None:
            would_run.add(stage.name)
        lines += ["", f"{stage.name} ({stage.kind}, key {stage.key[:8]}): {why(campaign, stage, would_run)}"]
        lines += stage_lines(campaign, stage)
        if isinstance(stage.config, TrainConfig):
            lines += training_lines(campaign, stage, stage.config, outlook)
    return lines


def stage_lines(campaign: Campaign, stage: Stage) -> list[str]:
    """Describe what a stage reads and lacks, its model, what was chosen for it, and what its classes are called."""
    lines = []
    for field, value in stage.parents.items():
        # The runs of a sweep's table stand above it, and what a sweep chooses has a line of its own.
        if stage.kind != "sweep" and field not in stage.chosen:
            lines.append(f"  reads   {field} = {value}")
    if stage.model is not None:
        lines.append(f"  model   {model_line(stage)}")
    # What a finished stage was made from is needed no more.
    if campaign.done(stage) is None:
        for message in stage.missing:
            lines.append(f"  MISSING {message}")
    for field in stage.chosen:
        lines.append(f"  chosen  {field}: {choice_text(campaign, stage, field)}")
    if len(stage.known) < len(stage.chosen):
        lines.append("  chosen  until then the lines below have the first of these values")
    if isinstance(stage.config, sweep.Config):
        lines.append(f"  table   {table_line(stage.config)}")
    for line in class_names.lines(campaign, stage):
        lines.append(f"  {line}")
    return lines


def workers_text(cluster: ClusterConfig) -> str:
    if cluster.least == cluster.most:
        return str(cluster.most)
    return f"{cluster.least} to {cluster.most}"


def why(campaign: Campaign, stage: Stage, would_run: set[str]) -> str:
    """Say whether a stage would be skipped, resumed or run, and the reason."""
    if campaign.done(stage) is not None:
        return "finished, would be skipped"
    if any((campaign.directory(stage) / "checkpoints").glob("step-*")):
        return "half done, would be resumed from its newest checkpoint"
    # Without --fresh the command has ended before this (jobs.run.readiness.check_unfinished).
    if changes_since_half_done(campaign, stage):
        return "half done with another config, would start over"
    # It ran once with other inputs: what changed is a stage before it.
    ran_before = any(campaign.run.glob(f"{stage.name}-*/done.json"))
    for value in stage.parents.values():
        link = reference(value)
        if ran_before and link is not None and link[0] in would_run:
            return f"would run again, because {link[0]} would"
    return "would run"


def table_line(cfg: sweep.Config) -> str:
    """Say what the table of a sweep will be made of, and what it is for."""
    rows = list(dict.fromkeys(run.row for run in cfg.runs.values()))
    line = f"{len(cfg.runs)} runs in {len(rows)} rows by {cfg.best}"
    if cfg.chooses:
        line += f": chooses {sweep.TIES}"
    return line


def model_line(stage: Stage) -> str:
    config = stage.model
    size = "×".join(str(side) for side in config.image_size)
    return (
        f"{config.family} {size} px, {config.classes} classes, {models.parameters_of(config):,} parameters, "
        f"{models.macs_of(config) / 1e9:.3f} GMACs an image"
    )


# ------------------------------------------------------------------------------------------------ a trained stage


def training_lines(campaign: Campaign, stage: Stage, cfg: TrainConfig, outlook: Outlook) -> list[str]:
    """Describe batch, steps, data, compute, memory and time of a trained stage, as far as its data is there."""
    worlds = allowed_worlds(cfg, campaign.cluster)
    arithmetic = batch_arithmetic(cfg, worlds[0])
    # What a worker needs is the most where the workers are the fewest.
    fewest = batch_arithmetic(cfg, worlds[-1])
    lines = [f"  batch   {batch_line(arithmetic)}"]
    if len(worlds) > 1:
        lines.append(f"  workers {in_words(worlds)}, as there is room; lines about a worker are for {worlds[-1]}")

    sets = training_sets(campaign, cfg)
    samples = samples_to_train_on(cfg, sets)
    if samples is None and cfg.steps is None:
        lines.append(f"  steps   {cfg.passes:g} passes; the data is not there yet (data.samples=… lets plan count)")
        return lines
    steps = steps_of(cfg, samples or 0)
    lines += data_lines(cfg, sets, samples, steps, fewest)
    if stage.model is None:
        lines.append("  model   not known: the weights that it starts from are missing")
        return lines
    lines += compute_lines(cfg, stage, steps)
    if campaign.cluster.gpus_per_worker:
        lines.append(f"  feed    {feed_line(campaign, stage, indexes_of(sets))}")
    lines.append(f"  optim   {optimizer_line(cfg)}")
    return lines + worker_lines(campaign, stage, cfg, steps, arithmetic, fewest, outlook)


def data_lines(
    cfg: TrainConfig, sets: list[TrainingSet], samples: int | None, steps: int, fewest: Arithmetic
) -> list[str]:
    """Say how long a stage trains, when it is judged, and where its samples come from.

    `samples` are those of all sets, None: unknown; `fewest` is the arithmetic of the smallest worker group.
    """
    images = steps * cfg.batch_size
    indexes = indexes_of(sets)
    all_there = len(indexes) == len(sets)
    lines = [f"  steps   {steps:,} ({amount(images)} images, {passes_text(images, samples, all_there)})"]
    if cfg.evaluate_every:
        lines.append(f"  judge   {judge_line(cfg)}")
    if cfg.data.mixture:
        lines += mixture_lines(cfg.batch_size, sets, steps)
    if all_there and any(index.remote for index in indexes):
        index, order = training_order(cfg, indexes)
        lines.append(f"  cache   a worker needs {cache_line(index, order, fewest.slots(0), 0, cfg.data)}")
    return lines


def worker_lines(
    campaign: Campaign,
    stage: Stage,
    cfg: TrainConfig,
    steps: int,
    arithmetic: Arithmetic,
    fewest: Arithmetic,
    outlook: Outlook,
) -> list[str]:
    """Say what a worker needs of its memory, how gradients are summed over all of them, and the time that takes.

    `arithmetic` is that of the largest worker group, `fewest` that of the smallest.
    """
    lines = []
    # Without a number of blocks for `activation_gb` nobody knows what they cost.
    no_number = ""
    try:
        cfg = memory.with_blocks(cfg, stage.model, is_gpu=campaign.cluster.gpus_per_worker > 0)
        lines.append(f"  memory  {memory_line(campaign, stage, cfg, fewest.world)}")
    except TraceFailed as error:
        lines.append(f"  memory  not known: {error}")
        if cfg.activation_gb is not None:
            no_number = "how many blocks activation_gb recomputes is not known"
    except memory.BudgetTooSmall as error:
        # After all lines the command ends as `run` would, with what to type (check_memory).
        lines.append(f"  memory  does not fit {error}")
        no_number = "no number of recomputed blocks fits activation_gb"
    # With the tuning of the user's own DeepSpeed file in it.
    tuned = engine_settings(cfg, arithmetic.accumulation)["zero_optimization"]
    summed = reduction_line(tuned, models.parameters_of(stage.model), arithmetic.world, cfg.exact_parts)
    if summed:
        lines.append(f"  sums    {summed}")
    if no_number:
        lines.append(f"  time    not forecast: {no_number}")
    else:
        lines += time_lines(campaign, stage, cfg, steps, judged_images(campaign, cfg), outlook)
    return lines


def compute_lines(cfg: TrainConfig, stage: Stage, steps: int) -> list[str]:
    """Say how many operations the stage takes; where it leaves something out, what in which steps."""
    whole = models.training_flops(stage.model, steps * cfg.batch_size)
    if not cfg.thinning.is_on:
        return [f"  compute {whole / 1e18:.4g} exaFLOPs (6 × MACs × images)"]
    in_order = phases(cfg.thinning, steps, stage.model)
    flops = flops_of(in_order, stage.model, range(steps), cfg.batch_size)
    lines = [
        f"  compute {flops / 1e18:.4g} exaFLOPs (6 × MACs × images), {flops / whole:.2f} × the "
        f"{whole / 1e18:.4g} of whole images"
    ]
    for phase in in_order:
        lines.append(f"  thinned {describe(phase)}")
    return lines


def judged_images(campaign: Campaign, cfg: TrainConfig) -> int:
    """Return the images of one evaluation; 0 where the sets are not there yet."""
    total = 0
    for path in (cfg.data.evaluate, cfg.probe.train, cfg.probe.test):
        index = class_names.set_at(campaign, path) if path else None
        if index is not None:
            total += index.samples
    return total


def training_sets(campaign: Campaign, cfg: TrainConfig) -> list[TrainingSet]:
    sets = []
    for name, (path, weight) in cfg.data.sets().items():
        sets.append(TrainingSet(name, class_names.set_at(campaign, path), weight))
    return sets


def indexes_of(sets: list[TrainingSet]) -> list[Index]:
    """Return the indexes of those sets that are there."""
    return [part.index for part in sets if part.index is not None]


def samples_to_train_on(cfg: TrainConfig, sets: list[TrainingSet]) -> int | None:
    """Return how many samples the sets hold: counted where all are there, as the recipe says where not."""
    indexes = indexes_of(sets)
    if len(indexes) < len(sets):
        return cfg.data.samples
    return sum(index.samples for index in indexes)


def batch_line(arithmetic: Arithmetic) -> str:
    size = arithmetic.batch_size
    world = arithmetic.world
    micro_batch = arithmetic.micro_batch
    accumulation = arithmetic.accumulation
    if size == world * micro_batch * accumulation:
        return f"{size} = {world} workers × micro_batch {micro_batch} × accumulation {accumulation}"
    return f"{size} over {world} workers unevenly, {accumulation} micro-batches each"


def passes_text(images: int, samples: int | None, all_there: bool) -> str:
    if not samples:
        return "data is not there yet"
    text = f"{images / samples:.2f} passes over {samples:,} samples"
    if all_there:
        return text
    return f"{text} (as the recipe says; the data is not there yet)"


def judge_line(cfg: TrainConfig) -> str:
    """Say when the stage is evaluated, and by whom."""
    line = f"every {cfg.evaluate_every:,} steps, "
    if cfg.evaluate_on == "spare":
        line += "each committed first, "
        return line + "on a worker beside training where one is spare, else by the workers; the last by the workers"
    return line + "by the workers, who stop for it (evaluate_on=spare: beside them)"


def mixture_lines(batch_size: int, sets: list[TrainingSet], steps: int) -> list[str]:
    """Say how many samples of every batch each set gives, and how often that goes through the set."""
    shares = shares_of(batch_size, [part.weight for part in sets])
    lines = []
    for part, share in zip(sets, shares, strict=True):
        line = f"  mixture {part.name}: {share} of every batch"
        if part.index is not None:
            passes = steps * share / part.index.samples
            line += f", {passes:.2f} passes over {part.index.samples:,} samples"
        lines.append(line)
    return lines


def feed_line(campaign: Campaign, stage: Stage, indexes: list[Index]) -> str:
    """Say whether a worker's decoding processes keep up with its GPU, and what to type where they do not."""
    cfg: TrainConfig = stage.config
    cores_per_worker = campaign.cluster.cpus_per_worker
    # How fast a core decodes depends on the photographs: measured where a set lies on this machine.
    measured = None
    for index in indexes:
        if not index.remote:
            measured = images_per_cpu_s(index, max(stage.model.image_size), cfg.data.augment)
            break
    rate = measured or CPU_RATE
    source = "measured here on this set" if measured else "assumed; the set is not here to measure"
    needed = GPU_FLOPS / models.training_flops(stage.model, 1)  # images a second that a GPU takes
    cores = ceil(needed / rate)

    line = (
        f"a GPU at {GPU_FLOPS / 1e12:.0f} TFLOP/s (an H100 at 40 %) takes {needed:,.0f} images/s, a core decodes "
        f"{rate:,.0f} ({source}): "
    )
    if cfg.data.decode == "gpu":
        return line + "data.decode=gpu, not judged"
    # More decoding processes than cores decode no faster.
    if min(cfg.data.processes, cores_per_worker) >= cores:
        return line + f"data.processes={cfg.data.processes} keeps up, {cores} would"
    overrides = f"{stage.name}.data.processes={cores}"
    if cores >= cores_per_worker:
        overrides += f" cluster.cpus_per_worker={cores + 1}"  # the worker itself needs a core beside those that decode
    return line + (
        f"data.processes={cfg.data.processes} on {cores_per_worker} cores CANNOT FEED IT; "
        f"type {overrides}, pack with --restarts, or {stage.name}.data.decode=gpu"
    )


def optimizer_line(cfg: TrainConfig) -> str:
    optim = cfg.optim
    schedule = optim.schedule
    line = (
        f"{optim.name} lr {optim.lr:g}, {schedule.decay} after {schedule.warmup_steps:,} warm-up steps, "
        f"decay {optim.weight_decay:g}, clip {optim.clip:g}; ZeRO {cfg.zero}, {cfg.precision}"
    )
    if cfg.exact_parts:
        line += f", exact in {cfg.exact_parts} parts"
    return line


def memory_line(campaign: Campaign, stage: Stage, cfg: TrainConfig, world: int) -> str:
    """Say what a worker needs of its device's memory and of its node's; the step is traced where that is not known.

    Raises TraceFailed.
    """
    is_gpu = campaign.cluster.gpus_per_worker > 0
    need = memory.memory_need(cfg, stage.model, world, is_gpu=is_gpu)
    line = f"{memory.in_words(need, is_gpu=is_gpu)} (checkpoint_blocks={need.recomputed})"
    if not cfg.thinning.has_whole_images:
        line += "; of whole images, which patch dropout leaves out to the end: a worker needs less"
    return line
