"""How a run ends: the closing table and the exit code."""

import pytest

from data.errors import exit_code
from jobs.cluster.failure import WorkerGroupError
from jobs.run.log import log_table

pytestmark = pytest.mark.quick


def test_closing_table_shows_images_results_and_time():
    rows = [
        {"stage": "shards", "skipped": True, "seconds": 2, "sets": {"a": {"shards": 3}}, "samples_seen": 300},
        {"stage": "finetune", "skipped": False, "seconds": 65, "metrics": {"accuracy": 0.961}, "samples_seen": 38_400},
    ]
    lines: list[str] = []
    log_table(rows, lines.append)
    assert "300" in lines[1]
    assert "1 set, 3 shards" in lines[1]
    assert "2s*" in lines[1]
    assert "38,400" in lines[2]
    assert "accuracy 96.1%" in lines[2]
    assert "1m05s" in lines[2]


def test_no_error_ends_a_command_with_success():
    assert exit_code(WorkerGroupError(0, "node", "killed by SIGKILL")) == 70, "a crash requests no exit code"
    assert [exit_code(e) for e in (WorkerGroupError(0, "n", "", exit_code=65), OSError(), ValueError())] == [65, 74, 70]
