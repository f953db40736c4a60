"""Estimate the time and cost of a stage, from trials on the cluster or, without a trial, from its FLOPs.

In:  700,000 steps of 4096 images; a trial on 64 workers at 10,000 images/s; a failure every 100 hours
Out: 79.6 h without failures, 83.1 h with 0.8 failures; 5,319 worker-hours; cost 13,298 at 2.5 per worker-hour

1. `rate_on` returns the images per second for a number of workers: measured, interpolated between two trials, or
   scaled from one trial.
2. `estimated_rates` returns a range if there is no trial: 20 to 40 % of the GPU's peak.
3. `seconds_with_failures` adds the cost of failures, and `best_save_seconds` returns the optimal interval between
   saves.

Failures occur at random and at a constant rate, as assumed by Young (1974, "A first order approximation to the optimum
checkpoint interval", CACM 17) and Daly (2006, "A higher order estimate of the optimum checkpoint interval for restart
dumps", FGCS 22).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from data.errors import ConfigError
from models.checks import did_you_mean
from pipeline.extras.plan.trial import Trial
from pipeline.monitoring.telemetry import PEAK
from pipeline.values import counted

HOUR_S = 3600.0
TRY = "python -m jobs trial RECIPE"
# Time to detect a lost host: 22 and 27 s in tests that dropped its network packets (docs/design/cluster.md).
NOTICE_S = 30.0

# Published: NVIDIA's CLIP g/14 in NeMo trains at 559 images/s on 8 A100s and 935 on 8 H100s, which is 39 and 21 % of
# their peaks (docs.nvidia.com/nemo-framework, CLIP, performance).
MIN_SHARE = 0.20
MAX_SHARE = 0.40


@dataclass(frozen=True)
class Gpu:
    """Peak performance and memory of a GPU model."""

    name: str
    peak: float  # FLOP/s of dense bf16 matrix products
    memory_gib: float  # memory as reported by torch


GPUS = {
    "h100": Gpu("H100", PEAK["H100"], 79.1),
    "h200": Gpu("H200", PEAK["H200"], 139.8),
    "a100": Gpu("A100", PEAK["A100"], 79.1),  # the 80 GB model
}


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a plan that are not part of a recipe."""

    gpu: str | None = None  # a key of GPUS, for the estimates of time and memory
    price: float | None = None  # price per worker-hour
    mtbf_hours: float | None = None  # mean time between failures of the run; None: no failures

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu not in GPUS:
            raise ConfigError(
                f"--gpu is {self.gpu}{did_you_mean(self.gpu, GPUS)}\n  expected one of {', '.join(GPUS)}; for another "
                f"GPU, run a trial: {TRY}\n  to set only the memory of a GPU, set cluster.gpu_memory_gb=24"
            )
        for option, value in (("--price", self.price), ("--mtbf", self.mtbf_hours)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{option} is {value:g}, expected a finite number above 0, for example {option} 2.5")


@dataclass(frozen=True)
class Rate:
    """Training speed for a number of workers, and its source."""

    images_per_s: float  # total speed of all workers
    source: str
    trial: Trial  # the trial with the nearest number of workers, for the times of saves and restarts


def rate_on(world: int, trials: Sequence[Trial]) -> Rate:
    """Return the training speed on `world` workers, from trials of the stage with different worker counts.

    Between two trials, the images per second per worker are interpolated linearly over the logarithm of the worker
    count. Outside the range of the trials, they are assumed to equal those of the nearest trial.
    """
    nearest = min(trials, key=lambda trial: abs(math.log(trial.world / world)))
    if nearest.world == world:
        return Rate(nearest.images_per_s, f"measured {nearest.date}", nearest)
    smaller = [trial for trial in trials if trial.world < world]
    larger = [trial for trial in trials if trial.world > world]
    if not smaller or not larger:
        measured = counted(nearest.world, "worker")
        return Rate(nearest.per_worker * world, f"assuming the same images/s per worker as on {measured}", nearest)
    below = max(smaller, key=lambda trial: trial.world)
    above = min(larger, key=lambda trial: trial.world)
    share = math.log(world / below.world) / math.log(above.world / below.world)
    per_worker = below.per_worker + share * (above.per_worker - below.per_worker)
    source = f"interpolated between trials on {below.world} and {above.world} workers"
    return Rate(per_worker * world, source, nearest)


def estimated_rates(flops_of_an_image: float, gpu: Gpu, world: int) -> tuple[float, float]:
    """Return the lowest and highest expected images per second on `world` GPUs, estimated without a trial.

    `flops_of_an_image` includes the forward and the backward pass.
    """
    of_all = gpu.peak * world / flops_of_an_image
    return MIN_SHARE * of_all, MAX_SHARE * of_all


def seconds_with_failures(
    work_s: float, between_saves_s: float, trial: Trial, mtbf_s: float | None
) -> tuple[float, float]:
    """Return the duration of `work_s` seconds of work with saves and failures, and the expected number of failures.

    A save starts after every `between_saves_s` of work and stalls the loop for the trial's `save_stall_s`; it is
    complete `save_s` after its start. A failure costs the work since the last complete save, and a restart. The result
    is infinite if failures are so frequent that the stage never ends.
    """
    saves = work_s / between_saves_s
    cycle_s = between_saves_s + trial.save_stall_s
    if mtbf_s is None:
        return saves * cycle_s, 0.0
    # A cycle from one complete save to the next succeeds with the probability exp(−cycle / mtbf). After a failure, the
    # work since the save is repeated until a restart and everything up to the next complete save succeed without
    # another failure, which takes mtbf · (exp(again / mtbf) − 1). With save_s = save_stall_s, this is Daly's
    # equation 20.
    again_s = NOTICE_S + trial.until_steady_s + between_saves_s + max(trial.save_s, trial.save_stall_s)
    if again_s / mtbf_s > 50:
        return math.inf, math.inf
    seconds = saves * mtbf_s * -math.expm1(-cycle_s / mtbf_s) * math.exp(again_s / mtbf_s)
    return seconds, seconds / mtbf_s


def best_save_seconds(trial: Trial, mtbf_s: float) -> float:
    """Return the optimal time between two saves, in seconds of work: Young's √(2 · stall per save · mtbf).

    A save starts only after the previous one is complete, so the interval is at least `save_s`.
    """
    return max(math.sqrt(2 * trial.save_stall_s * mtbf_s), trial.save_s)
