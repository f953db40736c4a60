"""Time and cost estimates agree with calculations by hand, published runs, and simulated failures."""

import dataclasses
import math
import random

import pytest

from pipeline.extras.plan.cost import (
    GPUS,
    NOTICE_S,
    best_save_seconds,
    estimated_rates,
    rate_on,
    seconds_with_failures,
)
from pipeline.extras.plan.trial import Trial

TRIAL = Trial(
    stage="pretrain",
    key="0" * 64,
    world=2,
    backend="processes",
    gpus_per_worker=0,
    cpus_per_worker=1,
    hardware="Abacus",
    commit="",
    date="2030-01-01",
    steps=25,
    images_per_s=200.0,
    step_s=0.5,
    compute_s=0.4,
    storage_s=0.05,
    decode_s=0.03,
    transfer_s=0.02,
    memory_gib=1.0,
    save_stall_s=4.0,
    save_s=20.0,
    until_steady_s=30.0,
)


def test_rate_is_measured_interpolated_or_assumed_constant_per_worker():
    """By hand: 100 images a worker on 2 workers and 60 on 32; 8 lie two of four doublings between, so 80."""
    large = dataclasses.replace(TRIAL, world=32, images_per_s=1920.0)
    assert rate_on(2, [TRIAL, large]).images_per_s == 200.0
    assert rate_on(2, [TRIAL, large]).source == "measured 2030-01-01"
    between = rate_on(8, [TRIAL, large])
    assert between.images_per_s == pytest.approx(640.0)
    assert between.source == "interpolated between trials on 2 and 32 workers"
    beyond = rate_on(64, [TRIAL, large])
    assert beyond.images_per_s == pytest.approx(3840.0)
    assert beyond.source == "assuming the same images/s per worker as on 32 workers"
    assert beyond.trial is large
    assert rate_on(8, [TRIAL]).images_per_s == pytest.approx(800.0)
    one = dataclasses.replace(TRIAL, world=1, images_per_s=110.0)
    assert rate_on(4, [one]).source == "assuming the same images/s per worker as on 1 worker"


# NVIDIA's CLIP g/14 with 8 GPUs of a DGX node, images a second (docs.nvidia.com/nemo-framework, CLIP, performance).
PUBLISHED = {"a100": (559, 0.39), "h100": (935, 0.21)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs_are_within_the_estimated_range(name):
    """Its products, by hand: 40 blocks of 1408 and 6144 on 257 tokens, and 24 of 1024 and 4096 on 77."""

    def block(width: int, hidden: int, tokens: int) -> int:
        return tokens * (4 * width * width + 2 * width * hidden) + 2 * tokens * tokens * width

    macs = 40 * block(1408, 6144, 257) + 256 * 3 * 14 * 14 * 1408 + 24 * block(1024, 4096, 77)
    assert 2 * macs == pytest.approx(581e9, rel=0.02), "what OpenCLIP's profile says of ViT-g-14"
    published, share = PUBLISHED[name]
    flops = 6 * macs
    assert published * flops / (8 * GPUS[name].peak) == pytest.approx(share, abs=0.01)
    least, most = estimated_rates(flops, GPUS[name], 8)
    assert least <= published <= most


def test_without_failures_only_saves_are_added():
    """By hand: 1,000 s of work with a save every 100 s that holds up 4 s."""
    assert seconds_with_failures(1000.0, 100.0, TRIAL, None) == (pytest.approx(1040.0), 0.0)


def test_immediate_saves_give_dalys_equation_20():
    """mtbf · exp(R / mtbf) · (exp((τ + δ) / mtbf) − 1) · work / τ, with δ = 4, R = 60, τ = 600 and mtbf = 3,600."""
    at_once = dataclasses.replace(TRIAL, save_s=4.0)
    restart_s = NOTICE_S + TRIAL.until_steady_s
    daly = 3600 * math.exp(restart_s / 3600) * (math.exp(604 / 3600) - 1) * 36_000 / 600
    seconds, failures = seconds_with_failures(36_000.0, 600.0, at_once, 3600.0)
    assert seconds == pytest.approx(daly)
    assert failures == pytest.approx(daly / 3600)


def simulated(work_s: float, between_s: float, mtbf_s: float, draws: random.Random) -> float:
    """Simulate one training run with random failures as an event loop, without any of the formulas.

    Training continues while a save is written. After a failure it resumes from the last complete save.
    """
    clock = 0.0
    kept = 0.0  # work in the newest complete save
    failure_at = draws.expovariate(1 / mtbf_s)
    while True:
        done = kept
        writing: tuple[float, float] | None = None  # (when it is kept, the work in it)
        has_failed = False
        while done < work_s:
            # Train until the next save begins, or to the end.
            stretch = min(between_s - done % between_s if done % between_s else between_s, work_s - done)
            until = clock + stretch
            if writing is not None and writing[0] <= min(until, failure_at):
                kept = writing[1]
                writing = None
            if failure_at < until:
                has_failed = True
                break
            clock = until
            done += stretch
            stall_until = clock + TRIAL.save_stall_s
            writing = (clock + TRIAL.save_s, done)
            if failure_at < stall_until:
                has_failed = True
                break
            clock = stall_until
        if not has_failed:
            return clock
        clock = failure_at
        # A restart may also fail, and is then repeated.
        while True:
            failure_at = clock + draws.expovariate(1 / mtbf_s)
            if failure_at > clock + NOTICE_S + TRIAL.until_steady_s:
                clock += NOTICE_S + TRIAL.until_steady_s
                break
            clock = failure_at


@pytest.mark.parametrize(("between_s", "mtbf_s"), [(100.0, 2000.0), (300.0, 2000.0), (300.0, 600.0), (1000.0, 2000.0)])
def test_cost_of_failures_agrees_with_a_simulation(between_s, mtbf_s):
    draws = random.Random(0)
    work_s = 60_000.0
    mean = sum(simulated(work_s, between_s, mtbf_s, draws) for _ in range(400)) / 400
    seconds, _ = seconds_with_failures(work_s, between_s, TRIAL, mtbf_s)
    assert seconds == pytest.approx(mean, rel=0.02)


def test_youngs_save_interval_is_nearly_optimal():
    mtbf_s = 5000.0
    best_s = best_save_seconds(TRIAL, mtbf_s)
    assert best_s == pytest.approx(200.0), "by hand: √(2 · 4 · 5,000)"
    least = min(seconds_with_failures(1e6, 20.0 * step, TRIAL, mtbf_s)[0] for step in range(1, 100))
    assert seconds_with_failures(1e6, best_s, TRIAL, mtbf_s)[0] == pytest.approx(least, rel=0.002)
    slow = dataclasses.replace(TRIAL, save_s=900.0)
    assert best_save_seconds(slow, mtbf_s) == 900.0, "a save begins when the one before is kept"


def test_stage_never_ends_if_failures_are_more_frequent_than_saves():
    assert seconds_with_failures(1e6, 1e6, TRIAL, 3600.0) == (math.inf, math.inf)
