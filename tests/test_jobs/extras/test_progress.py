"""The progress lines of long commands."""

import pytest

from jobs.extras.progress import ProgressMeter

pytestmark = pytest.mark.quick


def test_progress_is_logged_periodically_with_speed_and_time_left():
    said: list[str] = []
    now = iter([0.0, 1.0, 10.0, 11.0, 20.0])
    progress = ProgressMeter("samples", 4000, log=said.append, clock=lambda: next(now))
    for done in (100, 1000, 1100, 2000):
        progress(done, "3 shards")
    assert said == [
        "1.0k of 4.0k samples  3 shards  100/s  eta 30s",
        "2.0k of 4.0k samples  3 shards  100/s  eta 20s",
    ]
