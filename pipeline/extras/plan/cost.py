"""What a stage takes in days and money: from trials on the cluster, or from its FLOPs where there was none.

In:  700,000 steps of 4096 images; a trial on 64 workers at 10,000 images/s; a failure every 100 hours
Out: 79.6 h without failures, 83.1 h with 0.8 of them; 5,319 worker-hours; 13,298 at 2.5 each

1. `rate_on` gives the images a second of a world: measured, between two trials, or as one trial has it per worker.
2. `estimated_rates` gives a range where there is no trial: 20 to 40 % of the peak of a GPU.
3. `seconds_with_failures` adds what failures cost, and `best_save_seconds` says how often a save costs least.

Failures come at random and at a constant rate, as Young (1974, "A first order approximation to the optimum checkpoint
interval", CACM 17) and Daly (2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 22) take them.
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
# Until a host that is gone is missed: 22 and 27 s where its frames were dropped (docs/design/cluster.md).
NOTICE_S = 30.0

# Published: NVIDIA's CLIP g/14 in NeMo takes 559 images/s on 8 A100s and 935 on 8 H100s, which is 39 and 21 % of their
# peaks (docs.nvidia.com/nemo-framework, CLIP, performance).
LEAST_SHARE = 0.20
MOST_SHARE = 0.40


@dataclass(frozen=True)
class Gpu:
    """Says what a GPU has."""

    name: str
    peak: float  # FLOP/s of dense bf16 products
    memory_gib: float  # as torch sees it


GPUS = {
    "h100": Gpu("H100", PEAK["H100"], 79.1),
    "h200": Gpu("H200", PEAK["H200"], 139.8),
    "a100": Gpu("A100", PEAK["A100"], 79.1),  # of 80 GB
}


@dataclass(frozen=True)
class Assumptions:
    """Holds the assumptions of a plan that no recipe has."""

    gpu: str | None = None  # a key of GPUS, for an estimate and for whether it fits
    price: float | None = None  # of a worker and an hour
    mtbf_hours: float | None = None  # mean time between two failures of the run; None: nothing fails

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu not in GPUS:
            raise ConfigError(
                f"--gpu is {self.gpu}{did_you_mean(self.gpu, GPUS)}\n  expected one of {', '.join(GPUS)}; of another "
                f"GPU measure it: {TRY}"
            )
        for option, value in (("--price", self.price), ("--mtbf", self.mtbf_hours)):
            if value is not None and not value > 0:
                raise ConfigError(f"{option} is {value:g}, expected more than 0")


@dataclass(frozen=True)
class Rate:
    """Says how many images a second a world takes, and how that is known."""

    images_per_s: float  # of all workers together
    source: str
    trial: Trial  # whose save and start are gone by: that of the nearest world


def rate_on(world: int, trials: Sequence[Trial]) -> Rate:
    """Return the rate of a world from one trial or more of the stage, each of another world.

    Between two trials the images a second and worker lie on a straight line over the logarithm of the world; beyond
    them they stay as they are on the nearest.
    """
    nearest = min(trials, key=lambda trial: abs(math.log(trial.world / world)))
    if nearest.world == world:
        return Rate(nearest.images_per_s, f"measured {nearest.date}", nearest)
    smaller = [trial for trial in trials if trial.world < world]
    larger = [trial for trial in trials if trial.world > world]
    if not smaller or not larger:
        measured = counted(nearest.world, "worker")
        return Rate(nearest.per_worker * world, f"assumes images/s per worker stay as on {measured}", nearest)
    below = max(smaller, key=lambda trial: trial.world)
    above = min(larger, key=lambda trial: trial.world)
    share = math.log(world / below.world) / math.log(above.world / below.world)
    per_worker = below.per_worker + share * (above.per_worker - below.per_worker)
    return Rate(per_worker * world, f"between trials on {below.world} and {above.world} workers", nearest)


def estimated_rates(flops_of_an_image: float, gpu: Gpu, world: int) -> tuple[float, float]:
    """Return the least and the most images a second that are to be expected of `world` GPUs, which nobody measured.

    `flops_of_an_image` are those of training, forward and backward.
    """
    of_all = gpu.peak * world / flops_of_an_image
    return LEAST_SHARE * of_all, MOST_SHARE * of_all


def seconds_with_failures(
    work_s: float, between_saves_s: float, trial: Trial, mtbf_s: float | None
) -> tuple[float, float]:
    """Return the seconds that `work_s` seconds of steps take with saves and failures, and the failures to expect.

    A save begins after every `between_saves_s` of work and holds the loop up for the trial's `save_stall_s`; the state
    counts as kept `save_s` after it began. A failure costs the work since the last save that is kept, and a restart.
    The result is infinite where failures come so fast that the stage never ends.
    """
    saves = work_s / between_saves_s
    cycle_s = between_saves_s + trial.save_stall_s
    if mtbf_s is None:
        return saves * cycle_s, 0.0
    # From one kept save to the next passes a cycle, with the chance exp(−cycle / mtbf). Else all is done again from the
    # save on, until a restart and everything up to the next kept save have come through without a failure, which takes
    # mtbf · (exp(again / mtbf) − 1). With save_s = save_stall_s this is Daly's equation 20.
    again_s = NOTICE_S + trial.until_steady_s + between_saves_s + max(trial.save_s, trial.save_stall_s)
    if again_s / mtbf_s > 50:
        return math.inf, math.inf
    seconds = saves * mtbf_s * -math.expm1(-cycle_s / mtbf_s) * math.exp(again_s / mtbf_s)
    return seconds, seconds / mtbf_s


def best_save_seconds(trial: Trial, mtbf_s: float) -> float:
    """Return the seconds of work between two saves that cost least: Young's √(2 · stall of a save · mtbf).

    A save begins only when the one before is kept, so that more often than that is not possible.
    """
    return max(math.sqrt(2 * trial.save_stall_s * mtbf_s), trial.save_s)
