"""Checks of a training stage that need only its recipe and this machine: inputs, cores, feed, memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import models
from data.decoder import images_per_cpu_s
from data.index.index import Index
from jobs import cluster_config
from jobs.resolved_recipe import Campaign, Stage, index_if_made
from jobs.stages.training import allowed_worlds
from pipeline.extras.plan.cost import GPUS, MOST_SHARE, Assumptions
from pipeline.extras.plan.memory import GIB, describe_need, memory_need
from pipeline.extras.plan.memory_traces import TraceFailed
from pipeline.process_group import memory_free
from pipeline.training_config import TrainConfig, has_whole_images
from pipeline.training_data import steps_of

GPU_FLOPS = MOST_SHARE * GPUS["h100"].peak  # best case for a GPU
CPU_RATE = 650.0  # ImageNet-1k photos/s decoded by a busy core (e2babf2); idle 925, benchmarks/README.md
MOST_PROCESSES = 128  # maximum recommended per GPU: the number of cores per GPU of a large node


class CheckVerdict(NamedTuple):
    """The outcome of a check, with its reason and what to type."""

    level: Literal["OK", "WARN", "FAIL"]
    text: str
    remedy: str = ""  # not shown for OK


@dataclass
class TrainedFacts:
    """A training stage, its data sets and its allowed numbers of workers."""

    campaign: Campaign
    stage: Stage
    assumed: Assumptions = field(default_factory=Assumptions)
    device_bytes: int = 0  # needed by a worker, set by the check of memory; 0: unknown
    limit: int = 0  # bytes of the device; 0: unknown
    limit_source: str = ""

    def __post_init__(self) -> None:
        self.name = self.stage.name
        self.cfg: TrainConfig = self.stage.config
        self.model = self.stage.model
        self.is_gpu = self.campaign.cluster.gpus_per_worker > 0
        self.worlds = allowed_worlds(self.cfg, self.campaign.cluster)
        self.world = self.worlds[0]
        # A worker needs the most memory if there are the fewest workers.
        self.fewest = self.worlds[-1]
        self.index_of: dict[str, Index | None] = {}  # by name of a training set; None if it does not exist yet
        for name, path in self.cfg.data.sets().items():
            self.index_of[name] = index_if_made(self.campaign.path_of(path))
        self.indexes = [index for index in self.index_of.values() if index is not None]
        self.all_there = len(self.indexes) == len(self.index_of)

    @property
    def samples(self) -> int | None:
        """Return the number of training samples: counted if all sets exist, otherwise from the recipe."""
        if self.all_there:
            return sum(index.samples for index in self.indexes)
        return self.cfg.data.samples

    @property
    def fits(self) -> bool:
        """Return whether a worker's device has enough memory, or the need or the limit is unknown."""
        return not self.limit or self.device_bytes <= self.limit


def inputs(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Yield a FAIL if a training set or the model is missing."""
    for name, index in facts.index_of.items():
        if index is None:
            path = facts.campaign.path_of(facts.cfg.data.sets()[name])
            yield CheckVerdict("FAIL", f"{path} does not exist yet", "type python -m jobs run RECIPE --only pack")
            return
    if facts.model is None:
        yield CheckVerdict("FAIL", "the initial weights do not exist, and they determine the model")


def cores(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Yield a WARN if there are more workers than cores on this machine."""
    core_count = cluster_config.cores()
    if facts.campaign.cluster.backend == "processes" and not facts.is_gpu and facts.world > core_count:
        yield CheckVerdict(
            "WARN",
            f"{facts.world} workers share the {core_count} cores of this machine, so a step takes "
            f"{facts.world / core_count:.1f} times as long as with one core per worker",
            f"type cluster.workers={core_count}",
        )


def feed(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Check whether a worker's decoding processes can feed its GPU."""
    cfg = facts.cfg
    if not facts.is_gpu or facts.model is None:
        return
    cores_per_worker = facts.campaign.cluster.cpus_per_worker
    # The decoding speed of a core depends on the images: measure it on the first local set.
    measured = None
    for index in facts.indexes:
        if not index.remote:
            measured = images_per_cpu_s(index, max(facts.model.image_size), cfg.data.augment)
            break
    rate = measured or CPU_RATE
    source = "measured on this set" if measured else "assumed, because the set is not on this machine"
    needed = GPU_FLOPS / models.training_flops(facts.model, 1)  # images/s
    needed_cores = math.ceil(needed / rate)
    text = (
        f"a GPU at {GPU_FLOPS / 1e12:.0f} TFLOP/s (an H100 at {MOST_SHARE:.0%}, the best case) trains on "
        f"{needed:,.0f} images/s, a core decodes {rate:,.0f} images/s ({source}): "
    )
    processes = f"data.processes={cfg.data.processes}"
    # Using more decoding processes than cores does not speed up decoding.
    if cfg.data.decode == "gpu":
        yield CheckVerdict("OK", f"{text}data.decode=gpu, not checked")
    elif needed_cores > MOST_PROCESSES:
        most = rate * max(1, min(cfg.data.processes, cores_per_worker))
        text += f"decoding limits so small a model; {processes} on {cores_per_worker} cores decode "
        yield CheckVerdict("OK", f"{text}{most:,.0f} images/s")
    elif min(cfg.data.processes, cores_per_worker) >= needed_cores:
        yield CheckVerdict("OK", f"{text}{processes} is enough, {needed_cores} needed")
    else:
        overrides = f"{facts.name}.data.processes={needed_cores}"
        if needed_cores >= cores_per_worker:
            # The worker needs one core in addition to those that decode.
            overrides += f" cluster.cpus_per_worker={needed_cores + 1}"
        yield CheckVerdict(
            "WARN",
            f"{text}{processes} on {cores_per_worker} cores is TOO SLOW",
            f"type {overrides}, pack with --restarts, or {facts.name}.data.decode=gpu",
        )


def memory(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Estimate a worker's memory, store it in `facts`, and check the limit; tracing a new step takes seconds."""
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
        facts.limit_source = f"a worker's share of the free memory of this machine, {facts.fewest} workers"
    try:
        need = memory_need(cfg, facts.model, facts.fewest, is_gpu=has_gpu)
    except TraceFailed as error:
        yield CheckVerdict("WARN", f"unknown: {error}")
        return
    text = f"{describe_need(need, is_gpu=has_gpu)} (checkpoint_blocks={need.recomputed})"
    if not has_whole_images(cfg.phases(steps_of(cfg, facts.samples or 0), facts.model)):
        text += "; for whole images, which patch dropout never uses here: the actual need is lower"
    facts.device_bytes = need.device_bytes
    yield CheckVerdict("OK" if facts.fits else "WARN", text)
