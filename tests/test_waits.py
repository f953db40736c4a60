"""The host waits for the device once a step, where it reads the gradient's norm, and at ZeRO 3 once more."""

from pathlib import Path
from typing import Any

import pytest

from jobs.cluster.backends import ClusterConfig, run_worker_group
from tests import reference_runs as runs
from tests import waits
from tests.reference_loop import Plan

CASES = [(zero, accumulation) for zero in (0, 1, 2, 3) for accumulation in (1, 4)]
# DeepSpeed learns in the first steps of ZeRO 3 in which order weights are gathered, and has the workers compare it.
STEPS = 4
THE_NORM = "tolist in norm.py:norm_and_sums"
# Of DeepSpeed: behind the optimizer's step the parameters that are never partitioned are gathered.
THE_GATHERING = "device.synchronize in partition_parameters.py:_allgather_params_coalesced"


def task_of(zero: int, accumulation: int, folder: Path) -> dict[str, Any]:
    """Steps of 16 samples, every one of which is reported."""
    plan = Plan(**{**runs.ADAM, "steps": STEPS + 1})
    case = runs.Case(plan, 2, zero, 16, 8 // accumulation, keeps_weights=False)
    task = runs.task_of(case, f"{zero}-{accumulation}", folder / "sets", folder / "none", folder)
    task["config"]["log_every"] = 1
    return task


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The waits of one step, by ZeRO stage and accumulation."""
    folder = tmp_path_factory.mktemp("waits")
    runs.make_sets(folder / "sets")
    cases = {f"{zero}-{accumulation}": task_of(zero, accumulation, folder) for zero, accumulation in CASES}
    task = {"cases": cases, "steps": STEPS}
    cluster = ClusterConfig(workers=2, backend="processes")
    return run_worker_group(waits.count, task, cluster=cluster, name="waits", directory=folder)


@pytest.mark.parametrize(("zero", "accumulation"), CASES)
def test_the_host_waits_at_most_twice_a_step_whatever_the_accumulation(zero, accumulation, counted):
    expected = [THE_NORM, THE_GATHERING] if zero == 3 else [THE_NORM]
    assert counted[f"{zero}-{accumulation}"] == expected
