"""The use of a worker's machine is recorded in a bounded file."""

import json
import time

import psutil
import pytest

from pipeline.extras.usage import MAX_POINTS, UsageRecorder

pytestmark = pytest.mark.quick


def test_a_file_has_the_cpu_time_that_the_process_used(tmp_path):
    before = sum(psutil.Process().cpu_times()[:2])
    recorder = UsageRecorder(tmp_path, 3)
    began = recorder.measured_at
    while time.monotonic() - began < 0.3:
        pass
    recorder.measure()
    recorder.write()
    record = json.loads((tmp_path / "rank-00003.usage.json").read_text())
    assert (record["rank"], record["interval_s"]) == (3, 1.0)
    (cores,) = record["cores"]
    seconds = cores * (recorder.measured_at - began)
    # The process alone may have used less than one core, because other processes share the machine.
    assert 0 < seconds <= sum(psutil.Process().cpu_times()[:2]) - before + 0.05
    assert record["memory_gb"][0] > 0.01
    assert "gpu" not in record


def test_neighbours_are_averaged_when_a_file_is_full(tmp_path):
    recorder = UsageRecorder(tmp_path, 0)
    recorder.series["cores"] = [float(number) for number in range(MAX_POINTS - 1)]
    recorder.series["memory_gb"] = [1.0] * (MAX_POINTS - 1)
    recorder.measure()
    assert recorder.values["interval_s"] == 2.0
    assert recorder.series["cores"][:3] == [0.5, 2.5, 4.5]
    assert len(recorder.series["cores"]) == len(recorder.series["memory_gb"]) == MAX_POINTS // 2
