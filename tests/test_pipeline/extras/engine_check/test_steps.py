"""The engine check accepts the installed DeepSpeed, and refuses each deliberately wrong one with the right name."""

from pathlib import Path
from typing import Any

import pytest

from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from tests.support import engine_checks

STAGES = [("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3)]
# Planted error → what the message names.
NAMED = {
    "lost_micro_batches": "the gradient of",
    "divided": "the gradient of",
    "not_averaged": "the gradient norm in step 1",
    "used_twice": "the gradient of twice.weight in step 1",
    "leaked": "in step 2",
    "phantom_step": "update 1 of",
    "unclipped": "the norm after clipping in step 2",
}
QUICK = ("lost_micro_batches", "used_twice", "phantom_step")  # a gradient of each kind, and an update


def outcomes_of(cases: list[dict[str, Any]], world: int, folder: Path) -> list[list[str]]:
    cluster = ClusterConfig(workers=world, backend="processes")
    return run_worker_group(
        engine_checks.check_all, {"cases": cases}, cluster=cluster, name=f"{world}", directory=folder
    )


@pytest.mark.parametrize("world", [1, 2])
def test_installed_deepspeed_passes_at_every_stage_and_precision(world: int, tmp_path: Path):
    cases: list[dict[str, Any]] = [{"zero": zero, "precision": precision} for precision, zero in STAGES]
    cases += [{"zero": zero, "exact_parts": 2} for zero in (0, 2)]
    cases += [{"zero": 2, "optimizer": "sgd"}, {"zero": 2, "checkpoint_blocks": 3}]
    assert outcomes_of(cases, world, tmp_path) == [[]] * len(cases)


def test_models_of_every_family_pass(tmp_path: Path):
    cases = [
        {"zero": 2, "model": "Ti/8", "fields": {"pool": "map", "positions": "sincos2d"}},
        {"zero": 2, "model": "mu/8", "fields": {"rope": "mixed", "norm": "rms", "layer_scale": 1e-5, "registers": 4}},
        {"zero": 2, "model": "Masked-mu/8"},
        {"zero": 2, "model": "Axial-mu/8"},
        {"zero": 2, "model": "BiT-R50x1"},
        {"zero": 2, "model": "R+mu/16"},
    ]
    for case in cases[2:]:
        case["image_size"] = 64
    assert outcomes_of(cases, 1, tmp_path) == [[]] * len(cases)


@pytest.mark.parametrize(
    "planted", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMED]
)
def test_wrong_deepspeed_is_refused_with_the_name_of_the_difference(planted: str, tmp_path: Path):
    cases: list[dict[str, Any]] = [
        {"zero": zero, "precision": precision, "planted": planted} for precision, zero in STAGES if zero < 3
    ]
    if planted != "phantom_step":  # ZeRO 3 is slow, and the optimizer is the same
        cases.append({"zero": 3, "planted": planted})
    for case, wrong in zip(cases, outcomes_of(cases, 2, tmp_path), strict=True):
        assert any(NAMED[planted] in text for text in wrong), (case, wrong)


def test_check_keeps_no_memory(tmp_path: Path):
    """The small model has 1.9 MB of weights, and as much again in each moment and copy."""
    cluster = ClusterConfig(workers=1, backend="processes")
    sizes = run_worker_group(engine_checks.bytes_after_checks, {}, cluster=cluster, name="memory", directory=tmp_path)
    assert max(sizes) < 100_000
