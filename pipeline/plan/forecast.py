"""How long a step of a stage will take, part by part, from a calibration: the model of a step.

In:  the stage's config and model, a world, a calibration
Out: StepForecast(step_s=0.412, compute_s=0.371, host_s=0.018, reduce_s=0.021, wait_s=0.0, …)

1. compute: the operators of a micro-batch (pipeline/plan/operations.py), each with its measured time, times the
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
from pipeline.checkpoints.disk_space import checkpoint_bytes
from pipeline.optimization.thinning import share_of_operations
from pipeline.plan.calibration import Calibration
from pipeline.plan.engine_cost import EngineKind, Overhead
from pipeline.plan.operations import Work, traced
from pipeline.training_config import TrainConfig


@dataclass(frozen=True)
class Passes:
    """Seconds of a micro-batch's passes on a worker that computes alone."""

    forward_s: float
    backward_s: float
    unmeasured: float  # share of them that stands on operators which the calibration has not seen
    share: float = 1.0  # of them that a step of training takes, the mean over the stage: less where it is thinned


@dataclass(frozen=True)
class Computing:
    """What the operators of a step take on a worker among others, and by what others slow it down."""

    seconds: float
    cpu_s: float  # processor seconds
    accumulation: int
    local: int  # workers on a node
    slowdown: float  # times as long as alone, where as many compute at once as a node has cores for
    turns: float  # that they take where there are more of them


@dataclass(frozen=True)
class Adding:
    """What the engine adds to the operators of a step."""

    host_s: float  # to one worker
    reduce_s: float  # to all of them, beyond that
    cpu_s: float  # processor seconds of a worker, both together


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
    computing = computing_of(cfg, world, passes, calibration)
    adding = adding_of(cfg, model, world, computing, calibration)
    snapshot_s = checkpoint_bytes(cfg, model) / world / calibration.copy_bytes_per_s
    return StepForecast(
        world=world,
        batch_size=cfg.batch_size,
        compute_s=computing.seconds,
        host_s=adding.host_s,
        reduce_s=adding.reduce_s,
        wait_s=wait_of(cfg, world, computing, adding, calibration, images_per_cpu_s),
        save_s=snapshot_s / cfg.save_every,
        evaluate_s=evaluate_of(cfg, world, passes, computing, judged_images),
        cpu_s=computing.cpu_s + adding.cpu_s,
        snapshot_s=snapshot_s,
        unmeasured=passes.unmeasured,
        is_measured_world=calibration.is_measured(world),
        knows_decoding=bool(images_per_cpu_s),
    )


def computing_of(cfg: TrainConfig, world: int, passes: Passes, calibration: Calibration) -> Computing:
    """Return what the operators of a step take, and how workers of a node hold each other up."""
    # The last micro-batch as all others: the largest share counts, as it does for the accumulation.
    accumulation = batch_arithmetic(cfg, world).accumulation
    local = workers_on_a_node(world, calibration)
    slowdown = calibration.slowdown(cfg.precision, local)
    turns = 1.0
    if not calibration.gpus:
        turns = max(1.0, local * calibration.threads / calibration.worker.cores)
    cpu_s = accumulation * (passes.forward_s + passes.backward_s) * passes.share * slowdown
    return Computing(cpu_s * turns, cpu_s, accumulation, local, slowdown, turns)


def adding_of(
    cfg: TrainConfig, model: ModelConfig, world: int, computing: Computing, calibration: Calibration
) -> Adding:
    """Return what the engine adds to a step, alone and together. Raises ConfigError where that was not measured."""

    def seconds(workers: int, *, cpu: bool) -> float:
        return seconds_of(engine_overhead(cfg, model, workers, calibration, cpu=cpu), computing.accumulation)

    together_s = seconds(world, cpu=False)
    alone_s = together_s
    if world > 1 and calibration.is_measured(1):
        alone_s = seconds(1, cpu=False) * computing.turns
    host_s = min(alone_s, together_s)
    reduce_s = together_s - host_s
    if calibration.gpus:
        # A host that works ahead is not waited for: only what exceeds the GPU's own time shows.
        host_s = max(host_s - computing.seconds, 0.0)
    return Adding(host_s, reduce_s, seconds(world, cpu=True))


def wait_of(
    cfg: TrainConfig,
    world: int,
    computing: Computing,
    adding: Adding,
    calibration: Calibration,
    images_per_cpu_s: float | None,
) -> float:
    """Return how long a step waits for images; 0 where it is not known how fast they are decoded."""
    if not images_per_cpu_s:
        return 0.0
    decode_s = math.ceil(cfg.batch_size / world) / images_per_cpu_s
    if not cfg.data.processes:
        # Each worker decodes itself, and takes turns with the others in that too.
        return decode_s * computing.turns
    busy_s = computing.seconds + adding.host_s + adding.reduce_s
    cpu_s = computing.local * (computing.cpu_s + adding.cpu_s)
    return wait_for_images(cfg.data.processes, decode_s, busy_s, cpu_s, computing.local, calibration)


def evaluate_of(cfg: TrainConfig, world: int, passes: Passes, computing: Computing, judged_images: int) -> float:
    """Return the loop's standstill for an evaluation, spread over the steps between two."""
    if not cfg.evaluate_every or cfg.evaluate_on != "training":
        return 0.0
    judged_here = math.ceil(judged_images / world)
    forward_s = passes.forward_s * computing.slowdown * computing.turns
    return judged_here / cfg.micro_batch * forward_s / cfg.evaluate_every


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
