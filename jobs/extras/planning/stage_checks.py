"""Check a training stage using only the recipe and this machine: inputs, cores, decoding speed, memory."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import process_time
from typing import Literal, NamedTuple

import numpy as np

import models
from data.draws import Draws
from data.errors import DataError
from data.files import memory_text
from data.images.augment import AugmentConfig, augment
from data.images.decode import BadImage
from data.index.index import Index
from data.reader import ShardReader
from jobs import cluster_config
from jobs.extras.planning.memory_check import place_of
from jobs.resolved_recipe import Campaign, Stage, index_if_made, reference
from jobs.stages.training import allowed_worlds
from pipeline.extras.plan.cost import GPUS, MAX_SHARE, Assumptions
from pipeline.extras.plan.memory import GIB, describe_need, least_bytes, memory_need
from pipeline.extras.plan.memory_traces import TraceFailed, silent
from pipeline.process_group import memory_free
from pipeline.training_config import TrainConfig, has_whole_images
from pipeline.training_data import steps_of

GPU_FLOPS = MAX_SHARE * GPUS["h100"].peak  # FLOP/s of a GPU in the best case
CPU_RATE = 650.0  # ImageNet-1k images/s decoded by a busy core (e2babf2); 925 if idle, benchmarks/README.md
MEASURED = 128  # images decoded to measure the decoding speed
MAX_PROCESSES = 128  # maximum number of decoding processes to recommend per GPU: the cores per GPU of a large node


class CheckVerdict(NamedTuple):
    """The result of a check, with its reason and remedy."""

    level: Literal["OK", "WARN", "FAIL"]
    text: str
    remedy: str = ""  # not shown for OK


@dataclass
class TrainedFacts:
    """A training stage, its data sets and its allowed numbers of workers."""

    campaign: Campaign
    stage: Stage
    assumed: Assumptions = field(default_factory=Assumptions)
    device_bytes: int = 0  # memory that a worker needs, set by the memory check; 0: unknown
    limit: int = 0  # memory of the device in bytes; 0: unknown
    limit_source: str = ""
    log: Callable[[str], None] = silent  # receives what a check waits for

    def __post_init__(self) -> None:
        self.name = self.stage.name
        self.cfg: TrainConfig = self.stage.config
        self.model = self.stage.model
        self.is_gpu = self.campaign.cluster.gpus_per_worker > 0
        self.worlds = allowed_worlds(self.cfg, self.campaign.cluster)
        self.world = self.worlds[0]
        # With the fewest workers, each worker needs the most memory.
        self.fewest = self.worlds[-1]
        self.index_of: dict[str, Index | None] = {}  # name of a training set → index; None if it does not exist yet
        for name, path in self.cfg.data.sets().items():
            self.index_of[name] = index_if_made(self.campaign.path_of(path))
        self.indexes = [index for index in self.index_of.values() if index is not None]
        self.has_all_sets = len(self.indexes) == len(self.index_of)

    @property
    def samples(self) -> int | None:
        """Return the number of training samples: from the data sets if all exist, otherwise from the recipe."""
        if self.has_all_sets:
            return sum(index.samples for index in self.indexes)
        return self.cfg.data.samples

    @property
    def fits(self) -> bool:
        """Return whether the stage fits into a device's memory; True if the limit is unknown."""
        return not self.limit or self.device_bytes <= self.limit


def inputs(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Yield a verdict of level FAIL if a training set or the model is missing."""
    for name, index in facts.index_of.items():
        if index is None:
            value = facts.cfg.data.sets()[name]
            remedy = "pack or index it: python -m jobs pack --help"
            link = reference(value)
            if link is not None:
                commands = [
                    f"python -m jobs run RECIPE --only {stage}" for stage in unfinished(facts.campaign, link[0])
                ]
                remedy = f"run {', then '.join(commands)}"
            yield CheckVerdict("FAIL", f"{facts.campaign.path_of(value)} does not exist yet", remedy)
            return
    if facts.model is None:
        yield CheckVerdict("FAIL", "the initial weights, which determine the model, do not exist")


def unfinished(campaign: Campaign, name: str) -> list[str]:
    """Return a stage and the stages that it needs, in execution order, without the finished ones."""
    needed = {name}
    for stage in reversed(campaign.stages):
        if stage.name in needed:
            needed.update(parent for parent, _ in stage.links.values())
    return [stage.name for stage in campaign.stages if stage.name in needed and campaign.done(stage) is None]


def cores(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Yield a verdict of level WARN if there are more workers than cores on this machine."""
    core_count = cluster_config.cores()
    if facts.campaign.cluster.backend == "processes" and not facts.is_gpu and facts.world > core_count:
        yield CheckVerdict(
            "WARN",
            f"{facts.world} workers share the {core_count} cores of this machine, so a step takes "
            f"{facts.world / core_count:.1f} × longer than with one core per worker",
            f"set cluster.workers={core_count}",
        )


def feed(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Check whether a worker's decoding processes are fast enough for its GPU."""
    cfg = facts.cfg
    if not facts.is_gpu or facts.model is None:
        return
    cores_per_worker = facts.campaign.cluster.cpus_per_worker
    # The decoding speed of a core depends on the images, so measure it on the first local data set.
    measured = None
    for index in facts.indexes:
        if not index.remote:
            measured = images_per_cpu_s(index, max(facts.model.image_size), cfg.data.augment)
            break
    rate = measured or CPU_RATE
    source = "measured on this data set" if measured else "assumed, because the data set is not on this machine"
    needed = GPU_FLOPS / models.training_flops(facts.model, 1)  # images/s
    needed_cores = math.ceil(needed / rate)
    text = (
        f"a GPU at {GPU_FLOPS / 1e12:.0f} TFLOP/s (an H100 at {MAX_SHARE:.0%}, the best case) trains on "
        f"{needed:,.0f} images/s; a core decodes {rate:,.0f} images/s ({source}); "
    )
    processes = f"data.processes={cfg.data.processes}"
    # Using more decoding processes than cores does not speed up decoding.
    if cfg.data.decode == "gpu":
        yield CheckVerdict("OK", f"{text}data.decode=gpu is not checked")
    elif needed_cores > MAX_PROCESSES:
        most = rate * max(1, min(cfg.data.processes, cores_per_worker))
        text += f"for such a small model, decoding is the limit: {processes} on {cores_per_worker} cores decode "
        yield CheckVerdict("OK", f"{text}{most:,.0f} images/s")
    elif min(cfg.data.processes, cores_per_worker) >= needed_cores:
        yield CheckVerdict("OK", f"{text}{processes} is enough, because {needed_cores} are needed")
    else:
        overrides = f"{facts.stage.source}.data.processes={needed_cores}"
        if needed_cores >= cores_per_worker:
            # The worker needs one core in addition to the decoding processes.
            overrides += f" cluster.cpus_per_worker={needed_cores + 1}"
        yield CheckVerdict(
            "WARN",
            f"{text}{processes} on {cores_per_worker} cores is TOO SLOW",
            f"set {overrides}, pack with --restarts, or {facts.stage.source}.data.decode=gpu",
        )


def memory(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Estimate a worker's memory, store it in `facts`, and check the limit. Tracing a new step takes seconds."""
    cfg = facts.cfg
    if facts.model is None or (facts.samples is None and cfg.steps is None):
        return
    cluster = facts.campaign.cluster
    has_gpu = facts.is_gpu or facts.assumed.gpu is not None
    if facts.is_gpu and cluster.gpu_memory_gb is not None:
        facts.limit = int(cluster.gpu_memory_gb * GIB)
        facts.limit_source = "cluster.gpu_memory_gb"
    elif facts.assumed.gpu is not None:
        gpu = GPUS[facts.assumed.gpu]
        facts.limit = int(gpu.memory_gib * GIB)
        facts.limit_source = f"an {gpu.name}"
    elif not facts.is_gpu and cluster.backend == "processes":
        facts.limit = memory_free() // facts.fewest
        facts.limit_source = f"this machine's free memory divided by {facts.fewest} workers"
    least = least_bytes(cfg, facts.model, facts.fewest)
    if facts.limit and least > facts.limit:
        facts.device_bytes = least
        yield CheckVerdict(
            "WARN",
            f"at least {memory_text(least)} per worker for weights, gradients and optimizer state alone; the rest is "
            "not estimated, because this is already too much",
        )
        return
    place = place_of(facts.stage, facts.campaign)
    try:
        need = memory_need(
            cfg, facts.model, facts.fewest, is_gpu=has_gpu, report=lambda text: facts.log(f"{place}: {text}")
        )
    except TraceFailed as error:
        yield CheckVerdict("WARN", f"unknown: {error}")
        return
    text = f"{describe_need(need, is_gpu=has_gpu)} (checkpoint_blocks={need.recomputed})"
    if not has_whole_images(cfg.phases(steps_of(cfg, facts.samples or 0), facts.model)):
        text += "; this is for whole images, so the actual need with patch dropout is lower"
    facts.device_bytes = need.device_bytes
    yield CheckVerdict("OK" if facts.fits else "WARN", text)


def images_per_cpu_s(index: Index, image_size: int, cfg: AugmentConfig) -> float | None:
    """Measure how many images per second one core decodes from the first non-empty shard; None if reading fails."""
    filled_shards = np.flatnonzero(index.shard_samples)
    if len(filled_shards) == 0:
        return None
    shard = int(filled_shards[0])
    images = min(MEASURED, index.shards[shard].samples)
    # Used by `plan`, which must not wait for a whole shard to be hashed.
    reader = ShardReader(index, verify=False)
    out = np.empty((image_size, image_size, 3), np.uint8)
    try:
        # Round 1 decodes the first image as a warm-up; the clock restarts for round 2.
        for images_of_round in (1, images):
            start = process_time()
            for sample in range(images_of_round):
                # Bad images cost time in training too, so they count.
                with suppress(BadImage):
                    _, encoded, _ = reader.read(shard, sample)
                    augment(encoded, image_size, Draws(sample), cfg, out)
    except (DataError, OSError):
        return None
    return images / max(process_time() - start, 1e-9)


def milliseconds(seconds: float) -> str:
    """Format a short duration in seconds as "0.31 ms", "412 ms" or "3.2 s"."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    if seconds >= 0.01:
        return f"{1000 * seconds:.0f} ms"
    return f"{1000 * seconds:.2f} ms"
