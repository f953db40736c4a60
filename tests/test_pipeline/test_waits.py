"""The host waits for the device once per step, to read the gradient norm, and at ZeRO 3 once more."""

from pathlib import Path
from typing import Any

import pytest

from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from tests.support import reference_runs as runs
from tests.support import waits
from tests.support.reference_loop import Plan

# In the first steps of ZeRO 3 DeepSpeed records the order of gathering, and the workers compare it.
STEPS = 4
THE_NORM = "tolist in engine.py:end_micro_batch"
# After the optimizer's step DeepSpeed gathers the parameters it never partitions.
THE_GATHERING = "device.synchronize in partition_parameters.py:_allgather_params_coalesced"
EXPECTED = {0: [THE_NORM], 1: [THE_NORM], 2: [THE_NORM], 3: [THE_NORM, THE_GATHERING]}


def task_of(folder: Path, zero: int, accumulation: int, exact_parts: int = 0) -> dict[str, Any]:
    """Return a task with steps of 16 samples, each of which is reported."""
    plan = Plan(**{**runs.ADAM, "steps": STEPS + 1})
    case = runs.Case(plan, 2, zero, 16, 8 // accumulation, keeps_weights=False)
    task = runs.task_of(case, f"{zero}-{accumulation}-{exact_parts}", folder / "sets", folder / "none", folder)
    task["config"] |= {"log_every": 1, "exact_parts": exact_parts}
    return task


def waits_of(folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Return the waits of one step for every case, by name."""
    task = {"cases": cases, "steps": STEPS}
    cluster = ClusterConfig(workers=2, backend="processes")
    return run_worker_group(waits.count, task, cluster=cluster, name="waits", directory=folder)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the waits of a step of four micro-batches, by ZeRO stage and in exact mode."""
    folder = tmp_path_factory.mktemp("waits")
    runs.make_sets(folder / "sets")
    cases = {str(zero): task_of(folder, zero, 4) for zero in EXPECTED}
    cases["exact"] = task_of(folder, 2, 4, exact_parts=4)
    return waits_of(folder, cases)


@pytest.mark.parametrize("zero", EXPECTED)
def test_host_waits_at_most_twice_per_step_of_four_micro_batches(zero, counted):
    assert counted[str(zero)] == EXPECTED[zero]


def test_exact_mode_reads_norm_loss_and_agreed_numbers_at_once(counted):
    assert counted["exact"] == ["tolist in exact.py:_step"]


@pytest.mark.slow
def test_step_of_one_micro_batch_has_the_same_waits(tmp_path):
    runs.make_sets(tmp_path / "sets")
    counted = waits_of(tmp_path, {str(zero): task_of(tmp_path, zero, 1) for zero in EXPECTED})
    assert counted == {str(zero): expected for zero, expected in EXPECTED.items()}
