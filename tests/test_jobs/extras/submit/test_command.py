"""Names of runs as jobs of a cluster, and exit codes of ended jobs."""

import pytest

from data.errors import ClusterError
from jobs.extras.submit.command import follow, job_name
from jobs.extras.submit.submission import RayJob

pytestmark = pytest.mark.quick


def test_a_run_has_the_same_name_from_every_folder(tmp_path, monkeypatch):
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert job_name("digits") == str(tmp_path / "digits")
    assert job_name("./digits/") == str(tmp_path / "digits")
    assert job_name(str(tmp_path / "gone")) == str(tmp_path / "gone")


def test_job_ids_and_urls_are_unchanged():
    assert job_name("raysubmit_abc") == "raysubmit_abc"
    assert job_name("s3://bucket/runs/a/") == "s3://bucket/runs/a"


@pytest.mark.parametrize(
    ("status", "exit_code", "expected"),
    [("SUCCEEDED", 0, 0), ("STOPPED", None, 75), ("FAILED", 65, 65), ("FAILED", 78, 78)],
)
def test_following_a_job_returns_the_exit_code_of_the_run(status, exit_code, expected, monkeypatch):
    job = RayJob("j1", "/runs/a", status, 1.8e9, exit_code)
    monkeypatch.setattr("jobs.extras.submit.submission.logs", lambda run: job)
    answer = follow("/runs/a")
    assert answer.code == expected
    assert bool(answer.content()["next"]) == bool(expected), "a script learns what to do"


@pytest.mark.parametrize("exit_code", [None, -9, 128 + 9, 128 + 15])
def test_a_killed_driver_is_reported_as_unavailable(exit_code, monkeypatch):
    job = RayJob("j1", "/runs/a", "FAILED", 1.8e9, exit_code)
    monkeypatch.setattr("jobs.extras.submit.submission.logs", lambda run: job)
    with pytest.raises(ClusterError, match="job j1 ended without an exit code from Patchline: FAILED"):
        follow("/runs/a")
