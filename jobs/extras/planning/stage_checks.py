"""The checks of a stage that trains, from its recipe and this machine alone: inputs, cores, feed, memory."""

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
from pipeline.phases import has_whole_images
from pipeline.process_group import memory_free
from pipeline.training_config import TrainConfig
from pipeline.training_data import steps_of

GPU_FLOPS = MOST_SHARE * GPUS["h100"].peak  # the most that is to be expected of one
CPU_RATE = 650.0  # ImageNet-1k photographs a core decodes in a second, busy (e2babf2); idle 925, benchmarks/README.md
MOST_PROCESSES = 128  # that are ever advised for a GPU: as many cores as a large node has for each


class CheckVerdict(NamedTuple):
    """The verdict of a check, with its reason and what to type."""

    level: Literal["OK", "WARN", "FAIL"]
    text: str
    remedy: str = ""  # not shown for OK


@dataclass
class TrainedFacts:
    """A stage that trains, its sets and its numbers of workers."""

    campaign: Campaign
    stage: Stage
    assumed: Assumptions = field(default_factory=Assumptions)
    device_bytes: int = 0  # that a worker needs, from the check of memory; 0: not known
    limit: int = 0  # bytes of the device; 0: not known
    limit_source: str = ""

    def __post_init__(self) -> None:
        self.name = self.stage.name
        self.cfg: TrainConfig = self.stage.config
        self.model = self.stage.model
        self.is_gpu = self.campaign.cluster.gpus_per_worker > 0
        self.worlds = allowed_worlds(self.cfg, self.campaign.cluster)
        self.world = self.worlds[0]
        # A worker needs the most if the workers are the fewest.
        self.fewest = self.worlds[-1]
        self.index_of: dict[str, Index | None] = {}  # by the name of a set that it trains on; None: not made yet
        for name, path in self.cfg.data.sets().items():
            self.index_of[name] = index_if_made(self.campaign.path_of(path))
        self.indexes = [index for index in self.index_of.values() if index is not None]
        self.all_there = len(self.indexes) == len(self.index_of)

    @property
    def samples(self) -> int | None:
        """Return how many samples it trains on: counted if all sets exist, else as the recipe says."""
        if self.all_there:
            return sum(index.samples for index in self.indexes)
        return self.cfg.data.samples

    @property
    def fits(self) -> bool:
        """Return whether a worker's device holds it, as far as is known."""
        return not self.limit or self.device_bytes <= self.limit


def inputs(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Yield a FAIL if a set or the model is missing, without which no step can be taken."""
    for name, index in facts.index_of.items():
        if index is None:
            path = facts.campaign.path_of(facts.cfg.data.sets()[name])
            yield CheckVerdict("FAIL", f"{path} is not there yet", "type python -m jobs run RECIPE --only pack")
            return
    if facts.model is None:
        yield CheckVerdict("FAIL", "the weights that it starts from are not there, and they say which model it is")


def cores(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Yield a WARN if workers share the cores of this machine."""
    here = cluster_config.cores()
    if facts.campaign.cluster.backend == "processes" and not facts.is_gpu and facts.world > here:
        yield CheckVerdict(
            "WARN",
            f"{facts.world} workers share the {here} cores of this machine, and a step takes "
            f"{facts.world / here:.1f} times as long as on cores of their own",
            f"type cluster.workers={here}",
        )


def feed(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Yield whether a worker's decoding processes keep up with its GPU."""
    cfg = facts.cfg
    if not facts.is_gpu or facts.model is None:
        return
    cores_per_worker = facts.campaign.cluster.cpus_per_worker
    # How fast a core decodes depends on the photographs: measured on the first local set.
    measured = None
    for index in facts.indexes:
        if not index.remote:
            measured = images_per_cpu_s(index, max(facts.model.image_size), cfg.data.augment)
            break
    rate = measured or CPU_RATE
    source = "measured here on this set" if measured else "assumed; the set is not here to measure"
    needed = GPU_FLOPS / models.training_flops(facts.model, 1)  # images a second that a GPU takes
    needed_cores = math.ceil(needed / rate)
    text = (
        f"a GPU at {GPU_FLOPS / 1e12:.0f} TFLOP/s (an H100 at {MOST_SHARE:.0%}, the most to expect) takes "
        f"{needed:,.0f} images/s, a core decodes {rate:,.0f} ({source}): "
    )
    processes = f"data.processes={cfg.data.processes}"
    # More decoding processes than cores decode no faster.
    if cfg.data.decode == "gpu":
        yield CheckVerdict("OK", f"{text}data.decode=gpu, not checked")
    elif needed_cores > MOST_PROCESSES:
        most = rate * max(1, min(cfg.data.processes, cores_per_worker))
        text += f"no number of processes feeds so small a model; {processes} on {cores_per_worker} cores decode "
        yield CheckVerdict("OK", f"{text}{most:,.0f} images/s, which is its rate")
    elif min(cfg.data.processes, cores_per_worker) >= needed_cores:
        yield CheckVerdict("OK", f"{text}{processes} keeps up, {needed_cores} would")
    else:
        overrides = f"{facts.name}.data.processes={needed_cores}"
        if needed_cores >= cores_per_worker:
            # The worker needs a core besides those that decode.
            overrides += f" cluster.cpus_per_worker={needed_cores + 1}"
        yield CheckVerdict(
            "WARN",
            f"{text}{processes} on {cores_per_worker} cores CANNOT FEED IT",
            f"type {overrides}, pack with --restarts, or {facts.name}.data.decode=gpu",
        )


def memory(facts: TrainedFacts) -> Iterator[CheckVerdict]:
    """Yield what a worker needs of its device and its node, and keep that; a new step is traced for it."""
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
        facts.limit_source = f"a worker's share of what is free here, of {facts.fewest}"
    try:
        need = memory_need(cfg, facts.model, facts.fewest, is_gpu=has_gpu)
    except TraceFailed as error:
        yield CheckVerdict("WARN", f"not known: {error}")
        return
    text = f"{describe_need(need, is_gpu=has_gpu)} (checkpoint_blocks={need.recomputed})"
    if not has_whole_images(cfg.phases(steps_of(cfg, facts.samples or 0), facts.model)):
        text += "; of whole images, which patch dropout leaves out to the end: a worker needs less"
    facts.device_bytes = need.device_bytes
    yield CheckVerdict("OK" if facts.fits else "WARN", text)
