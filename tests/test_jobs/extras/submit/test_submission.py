"""Runs as Ray jobs on a real cluster with its dashboard: submitted, found by name, followed and stopped."""

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import ray
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT, DEFAULT_DASHBOARD_PORT
from ray.job_submission import JobSubmissionClient

from data.errors import ClusterError, ConfigError, RunOwned, UsageError
from data.storage import Folder
from jobs import ownership
from jobs.__main__ import main
from jobs.cluster.embedded import LOOPBACK
from jobs.cluster.ray import ROOT, connect, disconnect
from jobs.cluster.shipping import inspect_checkout
from jobs.cluster_config import ClusterConfig
from jobs.commands.campaigns import load_campaign
from jobs.extras.submit import submission
from jobs.extras.submit.portable import VARIABLE, portable
from jobs.ownership import Lease
from pipeline.config import section_kind
from pipeline.identity import COMMIT_VARIABLE
from pipeline.recipe import read_recipe
from tests.support import leases
from tests.support.campaigns import KINDS
from tests.support.documents import document_of

JOB = submission.RayJob("digits-001-4f1a", "runs/digits", "PENDING", 1.0, None)
TRAIN = """
import signal, sys, time
def stop(number, frame):
    time.sleep(4)  # longer than Ray's own grace of 3 s
    print("committed", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("step 0", flush=True)
print("step 1 {braces}", flush=True)
print("half a li", end="", flush=True)
time.sleep(300)
"""


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Set RAY_ADDRESS to the dashboard of an embedded cluster, and return that address.

    It starts and takes jobs although the ports that Ray gives to every cluster's dashboard and agent are taken, as by
    another cluster.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for port in (DEFAULT_DASHBOARD_PORT, DEFAULT_DASHBOARD_AGENT_LISTEN_PORT):
            # If this fails, another cluster on this machine uses the port already.
            with suppress(OSError):
                stack.enter_context(socket.create_server((LOOPBACK, port)))
        patch.delenv("RAY_ADDRESS", raising=False)
        info = connect(ClusterConfig())
        patch.setenv("RAY_ADDRESS", info.dashboard)
        yield info.dashboard
        disconnect()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def test_list_without_jobs_reports_that_there_are_none(dashboard, capsys) -> None:
    client = JobSubmissionClient()
    for job in client.list_jobs():  # from earlier tests, which run in any order
        if job.submission_id:
            client.delete_job(job.submission_id)
    assert main(["list"]) == 0
    assert capsys.readouterr().out.startswith("no jobs since the cluster's head node started; to submit one, run ")


def test_job_is_found_by_its_run_followed_and_stopped_with_time_to_commit(dashboard, checkout, capsys) -> None:
    command = [sys.executable, "-c", TRAIN]
    job = submission.submit("/runs/digits", command, root=checkout)
    assert job.alive
    assert job.id.startswith("digits-001-")
    assert job.run == "/runs/digits"
    assert f"{dashboard}/#/jobs/{job.id}" in capsys.readouterr().out
    with pytest.raises(RunOwned, match=f"owned by job {job.id}"):
        submission.submit("/runs/digits", command, root=checkout)

    printed: list[str] = []
    follower = threading.Thread(target=submission.logs, args=("/runs/digits",), kwargs={"write": printed.append})
    follower.start()
    deadline = time.monotonic() + 60
    while "step 1 {braces}" not in "".join(printed):  # braces and quotes of a command are preserved
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # The list shows the last complete line of the driver's output.
    assert main(["list"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("RUNNING ")
    assert first.endswith(f"  /runs/digits  ({job.id})")
    assert second.strip() == "step 1 {braces}"
    listed = document_of(["list"])["jobs"][0]
    assert (listed["id"], listed["status"], listed["last_line"]) == (job.id, "RUNNING", "step 1 {braces}")
    assert document_of(["stop", "/runs/digits"])["job"]["status"] == "STOPPED"
    follower.join(30)
    assert "committed" in "".join(printed)
    assert "INFO" not in "".join(printed)
    capsys.readouterr()
    assert main(["logs", "/runs/digits"]) == 75
    shown = capsys.readouterr().out
    assert shown.endswith("step 0\nstep 1 {braces}\nhalf a licommitted\n"), "the whole output of an ended job"
    assert "INFO" not in shown
    assert document_of(["logs", "/runs/digits"])["job"]["id"] == job.id

    again = submission.submit("/runs/digits", [sys.executable, "-c", "1/0"], root=checkout)
    assert again.id.startswith("digits-002-")
    assert [job.id for job in submission.list_jobs() if job.run == "/runs/digits"] == [again.id, job.id]
    ended = submission.logs("/runs/digits", write=printed.append)
    assert (ended.status, ended.exit_code) == ("FAILED", 1)
    assert "ZeroDivisionError" in "".join(printed)


def test_submit_with_wait_prints_a_document_with_the_code_of_the_run(dashboard, recipe, tmp_path, capfd) -> None:
    words = [
        "submit",
        str(recipe),
        f"run={tmp_path / 'run'}",
        "pretrain.data.train=/not/a/set",
        "cluster.backend=processes",
    ]
    document = document_of(words)
    assert (document["schema"], document["job"]["exit_code"]) == ("submit.1", None)
    followed = document_of([*words, "--wait"])
    # Ray fails a job without an exit code if its own head does not respond in time on a busy machine. The advice then
    # is to submit it again.
    if followed["code"] == 69:
        assert "Ray reports: " in followed["why"]
        followed = document_of([*words, "--wait"])
    assert (followed["code"], followed["job"]["status"]) == (65, "FAILED"), followed
    assert "/not/a/set" in capfd.readouterr().err, "the job's output"


def test_pending_job_can_be_stopped(dashboard) -> None:
    # With more CPUs than exist, the job stays pending, as on a cluster whose head is full.
    place = {"entrypoint_num_cpus": 10_000, "metadata": {"run": "pending"}}
    submission._submit_when_possible(lambda: JobSubmissionClient().submit_job(entrypoint="true", **place))
    assert submission.status("pending").status == "PENDING"
    assert not submission.stop("pending").alive
    assert "" not in {job.run for job in submission.list_jobs()}, "the job that stopped it has no run"


def test_unknown_run_is_answered_with_the_existing_runs(dashboard) -> None:
    with pytest.raises(UsageError, match="no job for nothing"):
        submission.status("nothing")


@pytest.mark.parametrize("of", ["dashboard", "head"])
def test_a_wrong_token_is_refused_and_explained_without_lines_of_ray(of, dashboard) -> None:
    address = dashboard if of == "dashboard" else ray.get_runtime_context().gcs_address
    environment = os.environ | {"RAY_AUTH_TOKEN": "0" * 64, "RAY_ADDRESS": address}
    command = [sys.executable, "-m", "jobs", "list"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 69
    error, *advice = done.stderr.removeprefix("list: starting …\n").splitlines()
    assert error.startswith(f"error: the cluster at {address} refuses the connection: ")
    assert "RAY_AUTH_TOKEN_PATH to a copy of the head's" in advice[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_submitted_campaigns_share_a_cluster_and_are_both_listed(dashboard, recipe, tmp_path, capsys) -> None:
    """Their recipe is outside the checkout, and the cluster has room for only one of them."""
    workers = os.cpu_count() or 1
    words = [
        "cluster.backend=ray",
        f"cluster.workers={workers}",
        f"pretrain.batch_size={4 * workers}",
        f"finetune.batch_size={8 * workers}",
    ]
    low = tmp_path / "low"
    high = tmp_path / "high"
    said = ""

    def until(text: str, command: list[str]) -> None:
        nonlocal said
        deadline = time.monotonic() + 240
        said = ""
        while text not in said:
            assert time.monotonic() < deadline, said
            time.sleep(0.5)
            main(command)
            said = capsys.readouterr().out

    long = ["pretrain.steps=100000", "pretrain.log_every=1", "pretrain.save_every=100000"]
    assert main(["submit", str(recipe), f"run={low}", *words, *long]) == 0
    # On a busy machine the command first prints its activity.
    assert capsys.readouterr().err.removeprefix("submit: starting …\n") == "", "Ray prints nothing"
    # The loss is shown after the first step.
    until("  loss ", ["status", str(low)])
    assert main(["submit", str(recipe), f"run={high}", *words]) == 0
    capsys.readouterr()
    until(f"held: {workers} CPUs by {low}", ["list"])
    lines = said.splitlines()
    assert lines[0].startswith("RUNNING ")
    assert f"  {low}" in lines[0]
    assert "step " in lines[1]
    assert lines[2].startswith("PENDING ")
    assert f"  {high}" in lines[2]
    assert f"room for 0 of {workers} workers with 1 CPUs each; held: {workers} CPUs by {low}" in lines[3]
    # The holder of the places commits and ends; the waiting campaign gets them.
    assert submission.stop(str(low)).status == "STOPPED"
    assert submission.logs(str(high), write=lambda text: None).status == "SUCCEEDED"
    assert len(list(high.glob("*/done.json"))) == 4
    provenance = json.loads(next(high.glob("finetune-*/provenance.json")).read_text())
    assert provenance["command"].endswith(f"-m jobs run env:{VARIABLE} run={high}")


# ------------------------------------------------------------------------ without a cluster


def test_list_shows_running_then_pending_then_ended_jobs(monkeypatch, capsys) -> None:
    started = time.mktime((2026, 11, 22, 8, 30, 0, 0, 0, 0))
    waiting = "waiting for the cluster: room for 0 of"
    jobs = [
        # id, run, status, seconds, output of the driver
        ("old-001", "/runs/old", "FAILED", -60, "waiting for the cluster: true no more\n"),
        ("c-001", "/runs/c", "RUNNING", 0, f"[pretrain] step 9/9\n{waiting} 1\n"),
        ("b-001", "/runs/b", "RUNNING", 60, f"{waiting} 2 workers\n"),
        ("new-001", "/runs/new", "PENDING", 120, None),
        ("packs-001", "/runs/packs", "RUNNING", -1, ""),
        ("away-001", "/runs/away", "RUNNING", -2, None),
        ("a-001", "/runs/a", "RUNNING", 60, f"{waiting} 1\n[pretrain] step 40/700\nhalf a li"),
        ("other", "", "RUNNING", 0, None),
        (None, "/runs/joined", "RUNNING", 0, None),
    ]

    class Client:
        def list_jobs(self) -> list[SimpleNamespace]:
            details = []
            for job_id, run, status, seconds, _ in jobs:
                milliseconds = int((started + seconds) * 1000)
                job = SimpleNamespace(submission_id=job_id, status=status, start_time=milliseconds)
                job.metadata = {"run": run} if run else None
                job.driver_exit_code = None
                job.message = None
                details.append(job)
            return details

        def get_job_logs(self, job_id: str) -> str:
            texts = {job[0]: job[4] for job in jobs}
            if texts[job_id] is None:
                raise RuntimeError("its node is away")
            return texts[job_id]

    monkeypatch.setattr(submission, "_connect", Client)
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "RUNNING    2026-11-22 08:31  /runs/a  (a-001)",
        "           [pretrain] step 40/700",
        "RUNNING    2026-11-22 08:29  /runs/packs  (packs-001)",
        "RUNNING    2026-11-22 08:29  /runs/away  (away-001)",
        "PENDING    2026-11-22 08:32  /runs/new  its driver has not started  (new-001)",
        "PENDING    2026-11-22 08:31  /runs/b  (b-001)",
        "           room for 0 of 2 workers",
        "PENDING    2026-11-22 08:30  /runs/c  (c-001)",
        "           room for 0 of 1",
        "FAILED     2026-11-22 08:29  /runs/old  (old-001)",
    ]


def test_submission_is_retried_until_a_new_head_accepts_jobs(monkeypatch, capsys) -> None:
    answer = "Request failed with status code 500: No available agent to submit job, please try again later.."
    asked = []

    def submit_job() -> str:
        asked.append(1)
        if len(asked) < 3:
            raise RuntimeError(answer)
        return "digits-001"

    assert submission._submit_when_possible(submit_job) == "digits-001"
    assert len(asked) == 3
    said = capsys.readouterr().out
    assert said == "waiting up to 300 s for the head's agent, which runs jobs, to start\n"
    asked.clear()
    monkeypatch.setattr(submission, "AGENT_WAIT_S", 0.0)
    with pytest.raises(
        ClusterError, match="the cluster's head does not accept jobs: its agent has not started within 0 s"
    ):
        submission._submit_when_possible(submit_job)


class Head:
    """A fake head with one job: its log connection breaks once, then it stops acting_as_driver or forgets the job."""

    def __init__(self, end: str) -> None:
        self.end = end
        self.tails = 0
        self.is_gone = False

    def get_address(self) -> str:
        return "http://head:8265"

    def list_jobs(self) -> list[SimpleNamespace]:
        if self.is_gone and self.end == "silent":
            time.sleep(60)  # as after a power failure: no answer, and the connection is not closed
        if self.is_gone and self.end == "forgets":
            return []
        status, code = "RUNNING", None
        if self.is_gone:
            status, code = "FAILED", {"killed": -9, "shell": 137, "place": None, "data": 65}[self.end]
        job = SimpleNamespace(submission_id="x-001", status=status, start_time=1, metadata={"run": "/runs/x"})
        job.driver_exit_code = code
        job.message = "Job supervisor actor died"
        return [job]

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        self.tails += 1
        yield "step 1\nst"
        if self.tails == 1:
            raise ConnectionError("the connection broke")
        yield "ep 2\n"
        self.is_gone = True
        if self.end in ("silent", "forgets"):
            await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("silent", 69, "the cluster's head at http://head:8265 has not responded for "),
        ("forgets", 69, "was restarted and no longer knows job x-001"),
        ("killed", 69, "job x-001 ended without an exit code from Patchline: FAILED, exit code -9"),
        ("shell", 69, "job x-001 ended without an exit code from Patchline: FAILED, exit code 137"),
        ("place", 69, "job x-001 ended without an exit code from Patchline: FAILED, exit code None"),
        ("data", 65, ""),
    ],
)
def test_logs_end_with_the_runs_exit_code_or_69_if_head_or_driver_is_lost(end, code, text, monkeypatch, capsys) -> None:
    head = Head(end)
    monkeypatch.setattr(submission, "_connect", lambda: head)
    for name in ("STATUS_EVERY_S", "STATUS_TIMEOUT_S", "HEAD_PATIENCE_S"):
        monkeypatch.setattr(submission, name, 0.1)
    assert main(["logs", "/runs/x"]) == code
    printed = capsys.readouterr()
    assert printed.out == "step 1\nstep 2\n", "each line once, although the connection broke"
    assert text in printed.err


def test_submit_wait_follows_a_live_job_and_ends_with_its_exit_code(tmp_path, monkeypatch, capsys) -> None:
    head = Head("data")
    run = tmp_path / "x"
    head.list_jobs = lambda: [job for job in Head.list_jobs(head) if job.metadata.update(run=str(run)) is None]
    monkeypatch.setattr(submission, "_connect", lambda: head)
    monkeypatch.setattr(submission, "STATUS_EVERY_S", 0.1)
    assert main(["submit", "digits", f"run={run}", "--wait"]) == 65
    printed = capsys.readouterr().out
    assert "job x-001 is already running this recipe (RUNNING, started " in printed
    assert printed.endswith("step 1\nstep 2\n")


def test_submit_refuses_a_run_whose_driver_is_not_a_job(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(submission, "submit", lambda *_, **__: pytest.fail("it was submitted"))
    with Lease(Folder(tmp_path / "x"), print):
        assert main(["submit", "digits", f"run={tmp_path / 'x'}"]) == 73
    assert f"x is owned by process {os.getpid()} on" in capsys.readouterr().err


def test_a_checkout_too_large_to_ship_is_refused_with_its_largest_entries(checkout) -> None:
    (checkout / ".gitignore").write_text("/cache/\n")
    for name, size in {"images/a.tar": 90, "images/b.tar": 20, "runs/x.bin": 500, "cache/y": 500}.items():
        (checkout / name).parent.mkdir(exist_ok=True)
        with (checkout / name).open("wb") as file:
            file.truncate(size * 2**20)
    with pytest.raises(UsageError) as caught:
        submission.check_upload_size(inspect_checkout(checkout), checkout)
    assert "the checkout has 110 MiB" in str(caught.value)
    assert "largest entries: images/a.tar 90 MiB, images/b.tar 20 MiB," in str(caught.value)
    (checkout / ".rayignore").write_text("images/a.tar\n")
    assert submission.check_upload_size(inspect_checkout(checkout), checkout) < 21 * 2**20


def test_secret_in_the_environment_is_refused() -> None:
    with pytest.raises(UsageError, match=r"AWS_SECRET_ACCESS_KEY looks like a secret \(by its name\), and everybody"):
        submission.submit("x", ["true"], environment={"AWS_SECRET_ACCESS_KEY": "abc"})


def test_submit_passes_variables_on_and_refuses_one_without_a_value(monkeypatch, capsys) -> None:
    asked: list[dict[str, str]] = []

    def submit(run: str, command: list[str], environment: dict[str, str], shows_command: bool) -> submission.RayJob:
        asked.append(environment)
        return JOB

    monkeypatch.setattr(submission, "submit", submit)
    words = ["submit", "digits", "--env", "NCCL_DEBUG=INFO", "--env", "A=b=c"]
    assert main(words) == 0
    del asked[0][VARIABLE]
    del asked[0][COMMIT_VARIABLE]
    assert asked == [{"NCCL_DEBUG": "INFO", "A": "b=c"}]
    assert main(["submit", "digits", "--env", "NCCL_DEBUG"]) == 64
    assert "expected NAME=VALUE, for example --env NCCL_DEBUG=INFO" in capsys.readouterr().err


def test_submitted_recipe_from_any_folder_is_the_same_campaign(recipe, shards, tmp_path, monkeypatch, capsys) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine.yaml").write_text(
        recipe.read_text().replace(f"{shards}/train", "data/train").replace("finetune:", "finetune:\n  kind: finetune")
    )
    (home / "data").symlink_to(shards)
    (home / "tuning.json").write_text("{}")
    (home / "photos.csv").touch()
    sets = ["photos.kind=pack", "photos.sets.a={source: table, path: photos.csv, root: /}"]
    words = ["finetune.data.cache.directory=~/cache", "pretrain.optim.lr=${oc.env:LR}"]
    words += ["fewshot.probe.test=@photos/a", "finetune.deepspeed=tuning.json", "run=runs/mine", *sets]
    monkeypatch.chdir(home)
    monkeypatch.setenv("LR", "3e-3")
    asked: list[tuple[str, list[str], dict[str, str]]] = []

    def submit(run: str, command: list[str], environment: dict[str, str], shows_command: bool) -> submission.RayJob:
        asked.append((run, command, environment))
        return JOB

    monkeypatch.setattr(submission, "submit", submit)
    assert main(["submit", "mine.yaml", *words]) == 0
    here = load_campaign("mine.yaml", words, KINDS)
    changed = "pretrain.data.train, finetune.data.train, finetune.deepspeed, fewshot.probe.train, photos.sets.a.path"
    *on_one_machine, paths = capsys.readouterr().out.splitlines()
    assert paths == f"relative paths in the recipe are resolved against {home}: {changed}"
    assert on_one_machine[0].startswith("cluster.backend=processes: all workers will run on one machine")

    # On the cluster's head: another folder, another environment, and only the shipped files.
    run, command, environment = asked[0]
    assert run == str(home / "runs" / "mine")
    monkeypatch.chdir("/")
    monkeypatch.delenv("LR")
    monkeypatch.setenv(VARIABLE, environment[VARIABLE])
    assert command[:4] == ["python", "-m", "jobs", "run"]
    there = load_campaign(command[4], command[5:], KINDS)
    assert there.run == here.run
    assert there.stage("pretrain").config.optim.lr == 0.003
    assert there.stage("finetune").config.data.cache.directory == "~/cache", "relative to each node's home"
    assert there.stage("finetune").config.deepspeed == str(home / "tuning.json")
    assert there.stage("photos").config.sets["a"].path == str(home / "photos.csv")
    for stage in here.stages:
        assert not there.stage(stage.name).missing
        # The key of a pack stage contains the path of its input, other keys contain digests.
        if stage.name in ("pretrain", "resize", "finetune"):
            assert there.stage(stage.name).key == stage.key
    secret = ["pretrain.optim.lr=1", "finetune.data.cache.directory=https://me:hunter2@host/train", "run=/runs/x"]
    with pytest.raises(ConfigError, match=r"mine\.yaml seems to contain a secret: "):
        portable(read_recipe(home / "mine.yaml", secret), str(here.run), home, KINDS)
    assert main(["plan", "env:NOTHING"]) == 78
    assert (
        "expected a recipe in the environment variable NOTHING, but the variable is not set" in capsys.readouterr().err
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_path_that_a_kind_of_stage_names_is_a_field_of_its_config(kind) -> None:
    stage_kind = KINDS[kind]
    for pattern in (*stage_kind.inputs, *stage_kind.files):
        section: type = stage_kind.config
        for part in pattern.split("."):
            if part == "*":
                continue
            hint = get_type_hints(section)[part]
            section = section_kind(hint) or section
        assert str in (hint, *get_args(hint)), pattern


def test_equivalent_command_submits_the_same_job(checkout, monkeypatch, capsys) -> None:
    requests: list[dict[str, Any]] = []
    client = SimpleNamespace(
        get_address=lambda: "http://h:8265", list_jobs=list, submit_job=lambda **request: requests.append(request)
    )
    monkeypatch.setattr(submission, "_connect", lambda: client)
    monkeypatch.setattr(submission, "status", lambda run: None)
    submission.submit("/runs/x", ["python", "-m", "jobs", "a={b}"], environment={"A": "b c"}, root=checkout)
    assert "equivalent command" not in capsys.readouterr().out
    requests.clear()
    words = ["python", "-m", "jobs", "a={b}"]
    submission.submit("/runs/x", words, environment={"A": "b c"}, root=checkout, shows_command=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("equivalent command: ")]
    words = shlex.split(line.removeprefix("equivalent command: "))
    assert words[:3] == ["ray", "job", "submit"]
    assert words[-4:] == ["python", "-m", "jobs", "a={b}"]
    options = dict(zip(words[3:-5:2], words[4:-5:2], strict=True))
    (request,) = requests
    del request["runtime_env"]["working_dir"]
    assert json.loads(options["--runtime-env-json"]) == request["runtime_env"]
    assert request["runtime_env"]["env_vars"]["A"] == "b c"
    assert options["--submission-id"] == request["submission_id"]
    assert request["submission_id"].startswith("x-001-")
    assert json.loads(options["--metadata-json"]) == request["metadata"] == {"job_name": "x", "run": "/runs/x"}


def test_logs_of_a_run_without_a_job_names_its_log_file(tmp_path, capsys):
    with Lease(Folder(tmp_path), print):
        assert main(["logs", str(tmp_path)]) == 64
    assert (
        f"{tmp_path} was not submitted to a Ray cluster\n  to follow its output, run tail -f "
        in capsys.readouterr().err
    )


@pytest.mark.quick
def test_list_reports_an_address_without_a_server_at_once(monkeypatch) -> None:
    disconnect()
    with socket.socket() as server:
        server.bind((LOOPBACK, 0))  # bound, so that no other process uses the port, but not listening
        address = f"{LOOPBACK}:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ClusterError, match=f"no response at RAY_ADDRESS={address}"):
            submission.list_jobs()


def test_holder_of_a_run_can_be_stopped_through_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "PERIOD_S", leases.PERIOD_S)
    storage = Folder(tmp_path / "run")
    said: list[str] = []
    with leases.holders(tmp_path) as start:
        process = start("another")
        seen = ownership.newest_lease(storage)
        assert seen is not None
        submission.stop_holder(storage, seen, said.append, 30.0)
        process.join(60)
        assert process.exitcode == 0
    assert "has ended; for its result, run" in said[-1]
    assert sorted(storage.list("leases")) == ["leases/000001.json"]
