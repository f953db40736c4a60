"""The search identifies the samples that cause a spike."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import live_audit as bench
from benchmarks.replay import STAGE, task_of
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.artifacts import EXCLUDED_STEPS, write_record
from pipeline.extras.replays.search import culprits, is_spike, limit_of, search

pytestmark = pytest.mark.quick


def test_a_spike_exceeds_twice_the_usual_value_and_its_limit_is_the_midpoint_on_a_log_scale() -> None:
    assert [is_spike(value, 0.4) for value in (0.5, 0.8, 0.81, math.inf)] == [False, False, True, True]
    assert limit_of(40.0, 0.4) == pytest.approx(4.0)  # ten times the usual value, a tenth of the spike
    assert limit_of(math.inf, 0.4) == pytest.approx(4.0), "ten times the usual value, as while training"


@pytest.mark.parametrize("value", [math.inf, 40.0])
def test_single_culprit_is_found_in_twelve_evaluations_at_any_position(value: float) -> None:
    for place in range(0, 1024, 31):
        taken = []

        def without(rows: Sequence[int], place: int = place, taken: list[int] = taken) -> float:
            taken.append(len(rows))
            return (0.0 if place in rows else value) + (1024 - len(rows)) / 1024

        found = culprits(without, 1024, 6.0, most=19, twins_of=lambda row: [row])
        assert (found.rows, found.is_found) == ([place], True)
        assert len(taken) <= 12


def test_copies_are_found_together_and_no_sample_is_named_if_all_cause_the_spike() -> None:
    copies = {17, 400, 1003}

    def without(rows: Sequence[int]) -> float:
        return 40.0 if copies - set(rows) else 1.0

    found = culprits(without, 1024, 6.0, most=19, twins_of=lambda row: sorted(copies))
    assert (set(found.rows), found.is_found, len(found.twins)) == (copies, True, 2)

    found = culprits(lambda rows: 40.0 * (1024 - len(rows)) / 1024, 1024, 6.0, most=19, twins_of=lambda row: [row])
    assert not found.is_found
    assert 871 <= len(found.rows) < 900  # without 870 of 1,024 it is 6.02


def searched(folder: Path, audit: float, usual: float, hooks: Sequence[str], excluded: list[list[int]]) -> Any:
    """Search step 4 of a small run with a worker, and return the outcome."""
    pack(digits(train=True, image_size=16), folder / "shards", name="train", shard_samples=1000)
    config = bench.config_of(folder / "shards", 20, audit, mode="plain")
    task = task_of(folder / "run", folder / "shards", config)
    stage = folder / "run" / STAGE
    stage.mkdir(parents=True, exist_ok=True)
    write_record(stage / EXCLUDED_STEPS, {"stretches": excluded})
    task["hooks"] = {name: {} for name in ("pipeline.extras.replays.spikes:SpikeSearch", *hooks)}
    task["search"] = {"step": 4, "metric": "grad_norm", "usual": usual}
    cluster = ClusterConfig(workers=1, backend="processes")
    return run_worker_group(search, task, cluster=cluster, name="w", directory=folder)


def test_a_step_that_a_rollback_has_excluded_is_searched(tmp_path: Path) -> None:
    """Steps 3 to 6 were excluded after step 4 was computed; step 2 was excluded before."""
    outcome = searched(tmp_path, 0.0, 1e6, [], [[1, 2], [2, 6]])
    assert (outcome["is_spike"], outcome["replays"]) == (False, 1)
    assert "step 4 without 0 of 16 samples: grad_norm" in (tmp_path / "run" / STAGE / "log.txt").read_text()


def test_repetitions_of_a_search_are_not_audited(tmp_path: Path) -> None:
    """The live audit of step 4 would find that its update has been undone."""
    outcome = searched(tmp_path, 1.0, 1e-3, ["pipeline.extras.live_audit:LiveAudit"], [])
    assert outcome["is_spike"]
    assert outcome["replays"] > 1
