"""Names of runs as jobs of a cluster, and exit codes of ended jobs."""

import pytest

from data.errors import ClusterError
from jobs.__main__ import main
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


def test_submitting_a_recipe_for_one_machine_says_how_to_use_all_machines(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.yaml").write_text(f"run: {tmp_path}/a\nfigure: {{tables: {{t: /t}}, x: row, y: accuracy}}\n")
    monkeypatch.setattr(
        "jobs.extras.submit.submission.submit", lambda *_, **__: RayJob("j1", "a", "PENDING", 1.8e9, None)
    )
    for backend in ("processes", "ray"):
        assert main(["submit", str(tmp_path / "a.yaml"), f"cluster.backend={backend}"]) == 0
        assert ("add cluster.backend=ray" in capsys.readouterr().out) == (backend == "processes")
