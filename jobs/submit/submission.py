"""A campaign as a Ray job: submit, list, logs, stop, by the name of the run.

How a run is submitted:
1. refuse secrets in the environment, a checkout too large to ship, and a run that has a job which is alive;
2. ship the checkout, without what EXCLUDES and .gitignore name, and start `command` in it on the head node;
3. name the job by the run and the number of the try: `/data/runs/digits` → `digits-002-4f1a`.

>>> submit("/data/runs/digits", ["python", "-m", "jobs", "run", "jobs/recipes/digits.yaml"])
RayJob(id="digits-002-4f1a", run="/data/runs/digits", status="PENDING", started_s=1763800000.0, exit_code=None, …)

A job is found again by the `run` in its metadata. Ray's table of jobs is lost with the head; the truth about a run is
its directory.
"""

import asyncio
import json
import logging
import os
import queue
import re
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from pathspec import PathSpec

from data.errors import ClusterError, ConfigError, RunOwned, UsageError
from jobs.cluster.embedded import use_token_if_any
from jobs.cluster.ray import EXCLUDES, ROOT, WAITING, explain, require_reachable
from jobs.cluster_config import check_environment
from jobs.terminal import echo

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

Value = TypeVar("Value")
MIB = 2**20
UPLOAD_LIMIT_BYTES = 100 * MIB  # of the Jobs API, which answers 413 above it
IGNORE_FILES = (".gitignore", ".rayignore")  # Ray reads both in every folder, for what lies below that folder
STOP_GRACE_S = 120  # to finish the step and commit; Ray kills after 3 s by default
STOP_WAIT_S = STOP_GRACE_S + 30  # the rest is for the status to follow
LISTED_FIRST = {"RUNNING": 0, "PENDING": 1}
POLL_S = 0.5
LOOK_EVERY_S = 5.0  # of silence in a job's log, after which the head is asked for the job
LOOK_TIMEOUT_S = 10.0
HEAD_PATIENCE_S = 60.0  # without an answer, after which a head is gone
AGENT_WAIT_S = 300.0  # after `ray start`; on a busy machine of two cores the agent took more than a minute
NO_AGENT = "No available agent to submit job"
RAY_LINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+\tINFO job_manager\.py:\d+ -- .*\n", re.MULTILINE)

# Ray's own stop does nothing to a job whose supervisor has no place yet. The supervisor is an actor, and its name ends
# with the job's id.
KILL_PENDING = """
import ray
from ray.util.state import list_actors
ray.init(address="auto", logging_level="error")
for actor in list_actors(filters=[("state", "!=", "DEAD")], limit=10_000):
    if (actor.name or "").endswith("{id}"):
        ray.kill(ray.get_actor(actor.name, namespace=actor.ray_namespace))
"""


@dataclass(frozen=True)
class RayJob:
    """A campaign as the cluster's table of jobs has it."""

    id: str
    run: str
    status: str  # PENDING RUNNING STOPPED SUCCEEDED FAILED; in `list_jobs` PENDING also while its driver waits
    started_s: float  # since 1970
    exit_code: int | None
    last_line: str = ""  # that its driver has printed; only `list_jobs` reads it, and only of a job that runs

    @property
    def alive(self) -> bool:
        return self.status in ("PENDING", "RUNNING")

    @property
    def started(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_s))


# ------------------------------------------------------------------------ the four commands


def submit(
    run: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    root: Path = ROOT,
) -> RayJob:
    """Ship the checkout and run `command` in it on the cluster, as the next try of `run`.

    Raises RunOwned when a job of this run is alive, UsageError for what `environment` may not hold or a checkout
    too large to ship, ClusterError when there is no cluster.
    """
    # Both are refused before there is a connection: Ray shows a job's environment in clear, and answers more than 100
    # MiB with HTTP 413.
    try:
        check_environment(environment)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    size = sum(measure(root).values())
    client = _connect()
    tries = _jobs_of_run(client, run)
    # Two drivers would fight for the run; its lock holds too, but only the second job's log would say so.
    for job in tries:
        if job.alive:
            raise RunOwned(
                f"{run} is owned by job {job.id}, {job.status} since {job.started}\n"
                f"a run has one owner\n"
                f"type `python -m jobs stop {run}` first, or follow it with `python -m jobs logs {run}`"
            )
    # Of the run's name only letters that an id may have. The random end keeps ids apart where Ray's table was lost, and
    # counting starts anew.
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(run).name) or "run"
    job_id = f"{name}-{len(tries) + 1:03d}-{os.urandom(2).hex()}"
    # Ray kills 3 s after SIGTERM unless told otherwise, too soon to commit. Unbuffered, so that `logs` shows a line
    # when it is printed.
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE_S), "PYTHONUNBUFFERED": "1", **environment}
    metadata = {"job_name": Path(run).name, "run": run}
    environment_of_job = {"excludes": EXCLUDES, "env_vars": variables}
    echo(f"shipping {root}: {size / MIB:.1f} MiB before compression")
    # The `ray job submit` that does the same, but for Ray's own quoting, which mangles braces in the command.
    words = ["ray", "job", "submit", "--address", client.get_address(), "--submission-id", job_id, "--working-dir", "."]
    words += ["--metadata-json", json.dumps(metadata)]
    words += ["--runtime-env-json", json.dumps(environment_of_job)]
    echo(f"the same by hand: {shlex.join([*words, '--', *command])}")
    # Ray runs the command in a shell: shlex keeps braces and blanks of an override together.
    submit_job = partial(
        client.submit_job,
        entrypoint=shlex.join(command),
        submission_id=job_id,
        metadata=metadata,
        runtime_env={"working_dir": str(root), **environment_of_job},
    )
    _submit_when_possible(submit_job)
    echo(f"job {job_id} on {client.get_address()}/#/jobs/{job_id}")
    return status(run)


def list_jobs() -> list[RayJob]:
    """Return every job that was submitted here: those that run, those that wait, then those that have ended.

    The latest of each kind stands first.
    """
    client = _connect()
    jobs = []
    for job in reversed(_submitted_jobs(client)):
        if not job.run:
            continue  # it was submitted without Patchline
        if job.status == "RUNNING":
            # The Jobs API gives a log whole; it has a line a report, so that of a long campaign has some megabytes.
            # There is none where the job's node is away.
            with suppress(RuntimeError):
                lines = RAY_LINE.sub("", client.get_job_logs(job.id)).split("\n")
                # What stands behind the last line break is half a line.
                if len(lines) > 1:
                    # A driver that has started may still wait for its workers' places.
                    is_waiting = lines[-2].startswith(WAITING)
                    job = replace(job, last_line=lines[-2], status="PENDING" if is_waiting else "RUNNING")
        jobs.append(job)
    return sorted(jobs, key=lambda job: LISTED_FIRST.get(job.status, 2))


def status(run: str) -> RayJob:
    """Return the latest job of the run. Raises UsageError when there is none, naming the runs that have one."""
    return _latest_job(_connect(), run)


def alive_job(run: str) -> RayJob | None:
    """Return the run's job that waits or runs; None where there is none."""
    alive = [job for job in _jobs_of_run(_connect(), run) if job.alive]
    return alive[-1] if alive else None


def logs(run: str, *, write: Callable[[str], None] | None = None) -> RayJob:
    """Write what the run's latest job prints, until it ends; to standard output, where no `write` is named.

    Raises ClusterError where the cluster's head has not answered for HEAD_PATIENCE_S, or has lost its table of jobs.
    """
    client = _connect()
    job = _latest_job(client, run)
    address = client.get_address()
    go_on = f"once a head is there, `python -m jobs submit` goes on; until then type `python -m jobs status {run}`"
    written = 0  # characters of the job's log
    texts = _tail(client, job.id)
    answered_s = time.monotonic()  # when the head was last heard of
    alive_s = time.monotonic()  # when the job was last known to be alive
    while True:
        # 1. What the job prints. None ends the connection: the job has ended, or the head is away.
        text: str | None = ""
        with suppress(queue.Empty):
            text = texts.get(timeout=LOOK_EVERY_S)
        if text:
            # Without Ray's own line, before the driver's first, that an environment is being set up.
            driver_text = RAY_LINE.sub("", text)
            if write is not None:
                write(driver_text)
            else:
                print(driver_text, end="", flush=True)
            written += len(text)
            answered_s = time.monotonic()
            continue

        # 2. In a silence, is the head there, and the job alive? Ray's connection has no heartbeat, and a head that
        #    loses its power closes none. Its client knows no deadline either.
        try:
            jobs = _within(LOOK_TIMEOUT_S, lambda: _jobs_of_run(client, job.id))
            answered_s = time.monotonic()
        except Exception as error:
            silent_s = time.monotonic() - answered_s
            if silent_s > HEAD_PATIENCE_S:
                raise ClusterError(
                    f"the cluster's head at {address} has not answered for {silent_s:.0f} s "
                    f"({type(error).__name__}); job {job.id} was {job.status}\n"
                    "with a head its jobs are gone; what the run has committed is in its directory\n"
                    f"{go_on}"
                ) from None
            jobs = [job]
            if text is None:
                time.sleep(LOOK_EVERY_S)
        if not jobs:
            raise ClusterError(
                f"the cluster's head at {address} knows no job {job.id} any more: it was started anew\n"
                f"what the run has committed is in its directory\n{go_on}"
            )
        if jobs[0].alive:
            alive_s = time.monotonic()
        # Its last lines may come behind its end; the connection ends behind them.
        elif text is None or time.monotonic() - alive_s > LOOK_TIMEOUT_S:
            return jobs[0]
        if text is None:
            texts = _tail(client, job.id, written)


def _tail(client: "JobSubmissionClient", job_id: str, skip: int = 0) -> "queue.Queue[str | None]":
    """Return a queue into which a thread puts what a job prints behind the first `skip` characters, and None last."""
    texts: queue.Queue[str | None] = queue.Queue()

    async def follow() -> None:
        to_skip = skip
        async for text in client.tail_job_logs(job_id):
            if len(text) > to_skip:
                texts.put(text[to_skip:])
            to_skip = max(0, to_skip - len(text))

    def work() -> None:
        # How a connection breaks says nothing that the caller does not find out by asking.
        with suppress(Exception):
            asyncio.run(follow())
        texts.put(None)

    threading.Thread(target=work, name="tail", daemon=True).start()
    return texts


def _within(seconds: float, work: Callable[[], Value]) -> Value:
    """Return what `work` returns or raises, or raise TimeoutError; a daemon thread may wait for it for ever."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="head", daemon=True).start()
    return future.result(seconds)


def stop(run: str) -> RayJob:
    """Ask the run's latest job to commit and end, and wait for it; a pending one is ended where it waits.

    Raises ClusterError when the job is still alive after STOP_WAIT_S.
    """
    client = _connect()
    job = _latest_job(client, run)
    if not job.alive:
        echo(f"job {job.id} has already ended: {job.status}")
        return job
    echo(f"stopping job {job.id}: it finishes its step and commits, for up to {STOP_GRACE_S} s")
    client.stop_job(job.id)
    # Ray's stop does nothing to a job without a place: it stayed PENDING until Ray gave it up after 900 s (measured).
    # A second job kills its supervisor: the Jobs API has no call for that, and may be all that we can reach.
    if job.status == "PENDING":
        command = shlex.join(["python", "-c", KILL_PENDING.format(id=job.id)])
        helper = _submit_when_possible(partial(client.submit_job, entrypoint=command))
        while client.get_job_status(helper) in ("PENDING", "RUNNING"):
            time.sleep(POLL_S)
        # Otherwise the helper would stay in the cluster's list of jobs.
        client.delete_job(helper)

    deadline = time.monotonic() + STOP_WAIT_S
    job = _latest_job(client, run)
    while job.alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
        job = _latest_job(client, run)
    if job.alive:
        raise ClusterError(
            f"job {job.id} is still {job.status} after {STOP_WAIT_S} s\n"
            f"its node may be gone, or busy writing\n"
            f"type `python -m jobs stop {run}` again, or look at {client.get_address()}/#/jobs/{job.id}"
        )
    echo(f"job {job.id}: {job.status}")
    return job


# ------------------------------------------------------------------------ what a job takes along


def measure(root: Path) -> dict[str, int]:
    """Return the bytes of all that Ray would ship from `root`, before compression, by entry of its first two levels.

    Raises UsageError, naming the largest, when that is more than the Jobs API takes.
    """
    sizes: Counter[str] = Counter()

    def walk(folder: Path, excludes: list[tuple[Path, PathSpec]]) -> None:
        for name in IGNORE_FILES:
            if (folder / name).is_file():
                patterns = PathSpec.from_lines("gitignore", (folder / name).read_text().splitlines())
                excludes = [*excludes, (folder, patterns)]
        for path in folder.iterdir():
            # As Ray does: a pattern that ends with a slash matches what lies in a folder, and never the folder itself.
            if any(patterns.match_file(path.relative_to(base)) for base, patterns in excludes):
                continue
            if path.is_dir():
                walk(path, excludes)
            elif path.is_file():
                entry = "/".join(path.relative_to(root).parts[:2])
                sizes[entry] += path.stat().st_size

    walk(root, [(root, PathSpec.from_lines("gitignore", EXCLUDES))])
    if sizes.total() > UPLOAD_LIMIT_BYTES:
        largest = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in sizes.most_common(5))
        raise UsageError(
            f"the checkout is {sizes.total() / MIB:.0f} MiB, Ray takes {UPLOAD_LIMIT_BYTES / MIB:.0f}\n"
            f"largest: {largest}\n"
            f"move them out of {root}, or name them in .rayignore"
        )
    return dict(sizes)


# ------------------------------------------------------------------------ the Jobs API


def _connect() -> "JobSubmissionClient":
    """Return a client of the cluster that the environment names, or of a cluster of this machine."""
    address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")
    # Ray reads the variable that this sets when it is imported.
    use_token_if_any()
    from ray.job_submission import JobSubmissionClient

    # Ray would print a line about every file that it leaves out of the package, every upload and the end of every log,
    # and warn at every upload that `.venv` is left out, which EXCLUDES names. Some of its loggers have set a level of
    # their own when they were imported; those that come later take that of "ray".
    for name in ("ray", *logging.root.manager.loggerDict):
        if name.partition(".")[0] == "ray":
            logging.getLogger(name).setLevel(logging.ERROR)
    # Tried first, because Ray's client takes a minute to fail, and its message says less.
    if address not in ("", "auto"):
        require_reachable(address)
    try:
        return JobSubmissionClient()
    except Exception as error:
        if address:
            raise explain(error, address) from None
        raise ClusterError(
            "RAY_ADDRESS is not set and no cluster runs on this machine\n"
            "a job needs a cluster that outlives this command\n"
            "type `RAY_AUTH_MODE=token ray start --head`, or set RAY_ADDRESS=http://host:8265"
        ) from None


def _submit_when_possible(submit_job: Callable[[], str]) -> str:
    """Submit a job and return its id; a head that has just started cannot take jobs yet, and is asked again.

    Raises ClusterError where it takes none for AGENT_WAIT_S.
    """
    deadline = time.monotonic() + AGENT_WAIT_S
    is_reported = False
    while True:
        try:
            return submit_job()
        except RuntimeError as error:
            # The head answers this when its agent, which runs jobs and starts last, is not there after 10 s.
            if NO_AGENT not in str(error):
                raise
            if not is_reported:
                echo(f"waiting for the agent of the cluster's head, which runs jobs; for up to {AGENT_WAIT_S:.0f} s")
                is_reported = True
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the cluster's head takes no jobs: its agent has not started within {AGENT_WAIT_S:.0f} s\n"
                "the head may be overloaded, or another Ray of that machine has its port, 52365\n"
                "look at the head's /tmp/ray/session_latest/logs/dashboard_agent.log; for a port of its own type\n"
                "`ray start --head --dashboard-agent-listen-port PORT`"
            )
        time.sleep(POLL_S)


def _submitted_jobs(client: "JobSubmissionClient") -> list[RayJob]:
    """Return the jobs of the cluster, oldest first."""
    jobs = []
    for details in client.list_jobs():
        # A driver that merely joined the cluster has no submission id.
        if details.submission_id:
            job = RayJob(
                id=details.submission_id,
                run=(details.metadata or {}).get("run", ""),
                status=str(details.status),
                started_s=(details.start_time or 0) / 1000,  # Ray has milliseconds
                exit_code=details.driver_exit_code,
            )
            jobs.append(job)
    return sorted(jobs, key=attrgetter("started_s"))


def _jobs_of_run(client: "JobSubmissionClient", run: str) -> list[RayJob]:
    """Return the jobs of a run, which may be named by a job's id as well, oldest first."""
    return [job for job in _submitted_jobs(client) if run in (job.run, job.id)]


def _latest_job(client: "JobSubmissionClient", run: str) -> RayJob:
    jobs = _jobs_of_run(client, run)
    if jobs:
        return jobs[-1]
    runs = sorted({job.run for job in _submitted_jobs(client)} - {""})
    raise UsageError(
        f"no job of {run} at {client.get_address()}\n"
        f"runs with jobs there: {', '.join(runs) or 'none'}; a restart of the head forgets them\n"
        f"type `python -m jobs list`, or `python -m jobs status` with the run's directory"
    )
