"""How long a step of a stage will take, part by part, from a calibration: the model of a step.

In:  the stage's config and model, a world, a calibration
Out: StepForecast(step_s=0.412, compute_s=0.371, host_s=0.018, reduce_s=0.021, wait_s=0.0, …)

1. compute: the operators of a micro-batch (pipeline/planning/operations.py), each with its measured time, times the
   accumulation. Workers that compute at once on a node slow each other down; more of them than cores take turns.
2. host and reduce: what the engine adds, measured on small models and carried over by tensors and elements. Host is
   what it adds to a single worker, reduce what it adds to many beyond that.
3. wait: what is left of decoding the images beside all that.
4. save and evaluate: the loop's standstill for each, spread over the steps between two of them.
"""

import math
from dataclasses import dataclass

import models
from models import ModelConfig
from pipeline.arithmetic import batch_arithmetic
from pipeline.checkpoints.room import checkpoint_bytes
from pipeline.optimization.thinning import share_of_operations
from pipeline.planning.calibration import Calibration
from pipeline.planning.engine_cost import EngineKind, Overhead
from pipeline.planning.operations import Work, traced
from pipeline.training_config import TrainConfig


@dataclass(frozen=True)
class Passes:
    """Seconds of a micro-batch's passes on a worker that computes alone."""

    forward_s: float
    backward_s: float
    unmeasured: float  # share of them that stands on operators which the calibration has not seen
    share: float = 1.0  # of them that a step of training takes, the mean over the stage: less where it is thinned


@dataclass(frozen=True)
class StepForecast:
    """Seconds of one optimizer step on every worker, and what they are made of."""

    world: int
    batch_size: int
    compute_s: float
    host_s: float
    reduce_s: float
    wait_s: float  # for images that are not decoded yet
    save_s: float  # spread over the steps between two saves
    evaluate_s: float  # spread likewise
    cpu_s: float  # processor seconds of one worker's own process in a step
    snapshot_s: float  # that a save holds the loop up
    unmeasured: float  # share of `compute_s` that stands on operators which the calibration has not seen
    is_measured_world: bool  # a group of so many workers was measured; else its links are carried over from another
    knows_decoding: bool

    @property
    def training_s(self) -> float:
        """Return the seconds of a step without saves and evaluations: what images/s in the log stands on."""
        return self.compute_s + self.host_s + self.reduce_s + self.wait_s

    @property
    def step_s(self) -> float:
        """Return the seconds of a step with all that it has to carry."""
        return self.training_s + self.save_s + self.evaluate_s

    @property
    def images_per_s(self) -> float:
        """Return the images a second of all workers, saves and evaluations counted in."""
        return self.batch_size / self.step_s


def passes_of(cfg: TrainConfig, model: ModelConfig, calibration: Calibration) -> Passes:
    """Return what the passes of a stage's micro-batch take, the same on every world. Raises ConfigError."""
    device = "cuda" if calibration.gpus else "cpu"
    times = calibration.compute_s(traced(work_of(cfg, model, device)), cfg.precision)
    return Passes(*times, share=share_of_operations(cfg.thinning, model))


def forecast_step(
    cfg: TrainConfig,
    model: ModelConfig,
    world: int,
    passes: Passes,
    calibration: Calibration,
    *,
    judged_images: int = 0,
    images_per_cpu_s: float | None = None,
) -> StepForecast:
    """Forecast a step on `world` workers; `judged_images` are those of one evaluation.

    Raises ConfigError where the calibration lacks what it takes: precision, ZeRO stage, links.
    """
    arithmetic = batch_arithmetic(cfg, world)
    images_here = math.ceil(cfg.batch_size / world)
    local = workers_on_a_node(world, calibration)
    has_gpus = calibration.gpus > 0

    # 1. Compute, of the last micro-batch as of all others: the largest share counts, as it does for the accumulation.
    slowdown = calibration.slowdown(cfg.precision, local)
    compute_cpu_s = arithmetic.accumulation * (passes.forward_s + passes.backward_s) * passes.share * slowdown
    turns = 1.0
    if not has_gpus:
        turns = max(1.0, local * calibration.threads / calibration.worker.cores)
    compute_s = compute_cpu_s * turns

    # 2. What the engine adds, alone and together.
    together = engine_overhead(cfg, model, world, calibration, cpu=False)
    together_s = seconds_of(together, arithmetic.accumulation)
    cpu_s = compute_cpu_s + seconds_of(
        engine_overhead(cfg, model, world, calibration, cpu=True), arithmetic.accumulation
    )
    alone_s = together_s
    if world > 1 and calibration.is_measured(1):
        alone_s = seconds_of(engine_overhead(cfg, model, 1, calibration, cpu=False), arithmetic.accumulation) * turns
    host_s = min(alone_s, together_s)
    reduce_s = together_s - host_s
    if has_gpus:
        # A host that works ahead is not waited for: only what exceeds the GPU's own time shows.
        host_s = max(host_s - compute_s, 0.0)
    busy_s = compute_s + host_s + reduce_s

    # 3. Decoding: on CPUs it takes cores from those who compute, on GPUs it has cores of its own.
    wait_s = 0.0
    if images_per_cpu_s:
        decode_s = images_here / images_per_cpu_s
        # Without decoding processes each worker decodes itself, and takes turns with the others in that too.
        wait_s = decode_s * turns
        if cfg.data.processes:
            wait_s = wait_for_images(cfg.data.processes, decode_s, busy_s, local * cpu_s, local, calibration)

    # 4. What the loop stands still for.
    snapshot_s = checkpoint_bytes(cfg, model) / world / calibration.copy_bytes_per_s
    evaluate_s = 0.0
    if cfg.evaluate_every and cfg.evaluate_on == "training":
        judged_here = math.ceil(judged_images / world)
        evaluate_s = judged_here / cfg.micro_batch * passes.forward_s * slowdown * turns / cfg.evaluate_every
    return StepForecast(
        world=world,
        batch_size=cfg.batch_size,
        compute_s=compute_s,
        host_s=host_s,
        reduce_s=reduce_s,
        wait_s=wait_s,
        save_s=snapshot_s / cfg.save_every,
        evaluate_s=evaluate_s,
        cpu_s=cpu_s,
        snapshot_s=snapshot_s,
        unmeasured=passes.unmeasured,
        is_measured_world=calibration.is_measured(world),
        knows_decoding=bool(images_per_cpu_s),
    )


def work_of(cfg: TrainConfig, model: ModelConfig, device: str = "cpu") -> Work:
    """Return what a worker computes of a micro-batch of a stage."""
    return Work(
        model=model,
        micro_batch=cfg.micro_batch,
        precision=cfg.precision,
        recomputed=cfg.checkpoint_blocks,
        loss=cfg.loss,
        label_smoothing=cfg.label_smoothing,
        mixup=cfg.mixup,
        device=device,
    )


def workers_on_a_node(world: int, calibration: Calibration) -> int:
    """Return how many of so many workers share a node, as the calibration found it.

    Plain processes all do. Under Ray a node has as many as were measured there.
    """
    if calibration.backend == "processes":
        return world
    return min(world, calibration.workers_on_a_node)


def engine_overhead(
    cfg: TrainConfig, model: ModelConfig, world: int, calibration: Calibration, *, cpu: bool
) -> Overhead:
    """Return what the engine adds to a stage's micro-batches and steps. Raises ConfigError."""
    kind = EngineKind(cfg.zero, cfg.precision, cfg.optim.name, bool(cfg.exact_parts))
    return calibration.engine_s(world, kind, models.size_of(model), cpu=cpu)


def seconds_of(overhead: Overhead, accumulation: int) -> float:
    """Return what the engine adds to a step of so many micro-batches."""
    return (accumulation - 1) * overhead.micro_s + overhead.step_s


def wait_for_images(
    processes: int, decode_s: float, busy_s: float, cpu_s: float, local: int, calibration: Calibration
) -> float:
    """Return how long a step waits for images, whose decoding takes `decode_s` processor seconds a worker.

    `busy_s` is the rest of the step, `cpu_s` what the workers of a node take of its cores for it.
    """
    longest_s = decode_s / processes
    if not calibration.gpus:
        # Computing and decoding share the node's cores.
        longest_s = max(longest_s, (cpu_s + local * decode_s) / calibration.worker.cores)
    return max(longest_s - busy_s, 0.0)
