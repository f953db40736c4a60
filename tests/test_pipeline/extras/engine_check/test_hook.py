"""The hook checks once per run and settings, and ends a run with a wrong engine with a message that says what to do."""

from pathlib import Path
from typing import Any

import pytest

from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.artifacts import write_record
from tests.support import engine_checks


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hook")
    cluster = ClusterConfig(workers=1, backend="processes")
    return run_worker_group(
        engine_checks.begin_twice, {"run": str(folder)}, cluster=cluster, name="hook", directory=folder
    )


def test_same_settings_are_checked_only_once_in_a_run(outcome: dict[str, Any]):
    assert outcome["counts"] == [1, 1, 2, 3]


def test_wrong_engine_is_refused_with_exit_code_70(outcome: dict[str, Any]):
    assert outcome["passed"] == [True, True, False]
    assert outcome["code"] == 70


def test_message_names_the_versions_the_difference_and_the_remedy(outcome: dict[str, Any]):
    first, difference, *_ = outcome["error"].split("\n")
    assert first.startswith("the training engine computes wrong results on 1 of 1 workers (DeepSpeed ")
    assert "ZeRO 0, fp32, gloo); no step was trained" in first
    assert difference.startswith("  worker 0: the gradient")
    assert "the engine's is 1.5259e-05 times as large" in outcome["error"]
    assert "  expected: the results of plain torch" in outcome["error"]
    assert "constraints.txt" in outcome["error"]


def test_missing_or_damaged_record_means_that_nothing_has_passed(tmp_path: Path):
    from pipeline.extras.engine_check.hook import RECORD, read_passed

    assert read_passed(tmp_path / RECORD) == {}
    (tmp_path / RECORD).write_text("{")
    assert read_passed(tmp_path / RECORD) == {}
    write_record(tmp_path / RECORD, {"failed": {}})  # of another version
    assert read_passed(tmp_path / RECORD) == {}
