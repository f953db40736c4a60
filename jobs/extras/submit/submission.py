"""Run campaigns as Ray jobs: submit and list jobs, follow their logs, and stop them.

Steps of a submission:
1. Refuse secrets in the environment, an oversized checkout or one with links to files outside it, and a run whose
   last job has not ended.
2. Ship the checkout, without secrets and ignored files (jobs/cluster/shipping.py), and start `command` in it on the
   head node.
3. Name the job after the run and the number of its submission: `/data/runs/digits` → `digits-002-4f1a`.

>>> submit("/data/runs/digits", ["python", "-m", "jobs", "run", "jobs/recipes/digits.yaml"])
RayJob(id="digits-002-4f1a", run="/data/runs/digits", status="PENDING", started_s=1763800000.0, exit_code=None, …)

Jobs are found by the `run` in their metadata. Ray loses its table of jobs if the head restarts, but the state of a run
is in its directory.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from data.errors import ClusterError, ConfigError, RunOwned, UsageError
from data.storage import Storage
from jobs.cluster.embedded import use_token_if_any
from jobs.cluster.ray import ROOT, WAITING, explain, require_reachable
from jobs.cluster.shipping import EXCLUDES, Checkout, inspect_checkout, secrets_line
from jobs.cluster_config import check_environment
from jobs.ownership import SLURM_JOB, STOP, UNIT, SeenLease, holder_state
from jobs.terminal import echo

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

Value = TypeVar("Value")
MIB = 2**20
UPLOAD_LIMIT_BYTES = 100 * MIB  # limit of the Jobs API; larger uploads fail with HTTP status 413
STOP_GRACE_S = 120  # time to finish the step and commit; Ray's default is 3 s
STOP_WAIT_S = STOP_GRACE_S + 30  # 30 s more for the job's status to change
# A command that Slurm or systemd would restart must be stopped there: prefix of `job` → command to type.
STOP_COMMANDS = {SLURM_JOB: "scancel --batch --signal=TERM", UNIT: "systemctl stop"}
LISTED_FIRST = {"RUNNING": 0, "PENDING": 1}
POLL_S = 0.5
STATUS_EVERY_S = 5.0  # request the job's status after this long without output
STATUS_TIMEOUT_S = 10.0
HEAD_PATIENCE_S = 60.0  # the head is considered lost after this long without a response
AGENT_WAIT_S = 300.0  # maximum wait for the head's agent; on a busy machine with two cores it took over a minute
NO_AGENT = "No available agent to submit job"
RAY_LINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+\tINFO job_manager\.py:\d+ -- .*\n", re.MULTILINE)

# Ray's own stop has no effect on a job whose supervisor has not been placed yet. This script kills the supervisor, an
# actor whose name ends with the job's id.
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
    """A submitted campaign, as listed in the cluster's table of jobs."""

    id: str
    run: str
    # PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED; `list_jobs` also sets PENDING while the driver waits for slots
    status: str
    started_s: float  # seconds since 1970
    exit_code: int | None
    last_line: str = ""  # last line of a running job's output; only set by `list_jobs`
    message: str = ""  # Ray's reason for the status

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
    shows_command: bool = False,
) -> RayJob:
    """Ship the checkout to the cluster and run `command` in it, as the next job of `run`.

    `shows_command` prints the equivalent `ray job submit`, which contains the whole recipe.

    Raises RunOwned if the run has a pending or running job, UsageError for secrets in `environment`, an oversized
    checkout or a link that leads out of the checkout, or ClusterError if there is no cluster.
    """
    # Check these before connecting: Ray shows a job's environment to everybody, and rejects more than 100 MiB with HTTP
    # status 413.
    try:
        check_environment(environment)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    checkout = inspect_checkout(root)
    size = check_upload_size(checkout, root)
    client = _connect()
    tries = _jobs_of_run(client, run)
    # The run's lease also excludes a second driver, but only the second job's log would show this.
    for job in tries:
        if job.alive:
            raise RunOwned(
                f"{run} is owned by job {job.id}, {job.status} since {job.started}\n"
                f"  a run has only one owner at a time\n"
                f"  to follow it, run python -m jobs logs {shlex.quote(run)}; "
                f"to stop it, run python -m jobs stop {shlex.quote(run)}"
            )
    # Keep only characters allowed in an id. The random suffix keeps ids unique if Ray has lost its table and the count
    # restarts at 1.
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(run).name) or "run"
    job_id = f"{name}-{len(tries) + 1:03d}-{os.urandom(2).hex()}"
    # By default, Ray kills a job 3 s after SIGTERM, which is too soon for a commit. Output is unbuffered, so that
    # `logs` shows each line at once.
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE_S), "PYTHONUNBUFFERED": "1", **environment}
    metadata = {"job_name": Path(run).name, "run": run}
    environment_of_job = {"excludes": EXCLUDES, "env_vars": variables}
    echo(f"shipping {root}: {size / MIB:.1f} MiB before compression")
    line = secrets_line(checkout)
    if line:
        echo(line)
    # Ray's own quoting would break braces in the command.
    words = ["ray", "job", "submit", "--address", client.get_address(), "--submission-id", job_id, "--working-dir", "."]
    words += ["--metadata-json", json.dumps(metadata)]
    words += ["--runtime-env-json", json.dumps(environment_of_job)]
    if shows_command:
        echo(f"equivalent command: {shlex.join([*words, '--', *command])}")
    # Ray runs the command in a shell, so quote braces and spaces in overrides.
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
    """Return all jobs submitted by Patchline: running, then pending, then ended jobs, each group latest first."""
    client = _connect()
    jobs = []
    for job in reversed(_submitted_jobs(client)):
        if not job.run:
            continue  # not submitted by Patchline
        if job.status == "RUNNING":
            # The Jobs API only returns complete logs, a few megabytes for a long campaign. There is no log if the job's
            # node is unreachable.
            with suppress(RuntimeError):
                lines = RAY_LINE.sub("", client.get_job_logs(job.id)).split("\n")
                # The text after the last line break is an incomplete line.
                if len(lines) > 1:
                    # A running driver may still wait for slots for its workers.
                    is_waiting = lines[-2].startswith(WAITING)
                    job = replace(job, last_line=lines[-2], status="PENDING" if is_waiting else "RUNNING")
        jobs.append(job)
    return sorted(jobs, key=lambda job: LISTED_FIRST.get(job.status, 2))


def status(run: str) -> RayJob:
    """Return a run's latest job. Raises UsageError, which lists the runs with jobs, if there is none."""
    return _latest_job(_connect(), run)


def alive_job(run: str) -> RayJob | None:
    """Return the pending or running job of a run, or None."""
    alive = [job for job in _jobs_of_run(_connect(), run) if job.alive]
    return alive[-1] if alive else None


def logs(run: str, *, write: Callable[[str], None] | None = None) -> RayJob:
    """Write the output of a run's latest job, by default to stdout, until the job ends; return the job.

    Raises ClusterError if the cluster's head has not responded for HEAD_PATIENCE_S, or has lost its table of jobs.
    """

    def show(text: str) -> None:
        # Remove Ray's line about setting up the environment, which precedes the driver's output.
        driver_text = RAY_LINE.sub("", text)
        if write is not None:
            write(driver_text)
        else:
            print(driver_text, end="", flush=True)

    client = _connect()
    job = _latest_job(client, run)
    if not job.alive:
        # Ray's connection for following a log takes five seconds to end, a request for the log none. If it fails, the
        # connection below explains why.
        whole: str | None = None
        with suppress(Exception):
            whole = _within(STATUS_TIMEOUT_S, lambda: client.get_job_logs(job.id))
        if whole is not None:
            show(whole)
            return job
    address = client.get_address()
    advice = (
        f"  for the run's progress, run python -m jobs status {shlex.quote(run)}\n"
        "  to resume the run on a restarted cluster, submit it again"
    )
    written = 0  # characters of the job's log
    texts = _tail(client, job.id)
    responded_s = time.monotonic()  # when the head last responded
    alive_s = time.monotonic()  # when the job was last known to be alive
    while True:
        # 1. Read the job's output. None means that the connection was closed: the job has ended, or the head is
        #    unreachable.
        text: str | None = ""
        with suppress(queue.Empty):
            text = texts.get(timeout=STATUS_EVERY_S)
        if text:
            show(text)
            written += len(text)
            responded_s = time.monotonic()
            continue

        # 2. After STATUS_EVERY_S without output, check whether the head responds and the job is alive. Ray's connection
        #    has no heartbeat, a head that loses power does not close it, and Ray's client has no timeout.
        try:
            jobs = _within(STATUS_TIMEOUT_S, lambda: _jobs_of_run(client, job.id))
            responded_s = time.monotonic()
        except Exception as error:
            silent_s = time.monotonic() - responded_s
            if silent_s > HEAD_PATIENCE_S:
                raise ClusterError(
                    f"the cluster's head at {address} has not responded for {silent_s:.0f} s "
                    f"({type(error).__name__}); job {job.id} was {job.status}\n"
                    "  if the head has failed, its jobs have ended; the run's checkpoints are in its directory\n"
                    f"{advice}"
                ) from None
            jobs = [job]
            if text is None:
                time.sleep(STATUS_EVERY_S)
        if not jobs:
            raise ClusterError(
                f"the cluster's head at {address} was restarted and no longer knows job {job.id}\n"
                f"  the run's checkpoints are in its directory\n{advice}"
            )
        if jobs[0].alive:
            alive_s = time.monotonic()
        # The job's last lines may arrive after its end; the connection is closed after them.
        elif text is None or time.monotonic() - alive_s > STATUS_TIMEOUT_S:
            return jobs[0]
        if text is None:
            texts = _tail(client, job.id, written)


def _tail(client: "JobSubmissionClient", job_id: str, skip: int = 0) -> "queue.Queue[str | None]":
    """Return a queue that a thread fills with a job's output after the first `skip` characters; None marks the end."""
    texts: queue.Queue[str | None] = queue.Queue()

    async def follow() -> None:
        to_skip = skip
        async for text in client.tail_job_logs(job_id):
            if len(text) > to_skip:
                texts.put(text[to_skip:])
            to_skip = max(0, to_skip - len(text))

    def work() -> None:
        # Ignore the error: the caller learns the reason when it requests the job's status.
        with suppress(Exception):
            asyncio.run(follow())
        texts.put(None)

    threading.Thread(target=work, name="tail", daemon=True).start()
    return texts


def _within(seconds: float, work: Callable[[], Value]) -> Value:
    """Return the result of `work`, or raise TimeoutError after `seconds`; `work` then keeps running in its thread."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="head", daemon=True).start()
    return future.result(seconds)


def stop(run: str) -> RayJob:
    """Tell a run's latest job to commit and stop, and wait until it has ended; cancel the job if it is pending.

    Raises ClusterError if the job is still alive after STOP_WAIT_S.
    """
    client = _connect()
    job = _latest_job(client, run)
    if not job.alive:
        echo(f"job {job.id} has already ended: {job.status}")
        return job
    echo(f"stopping job {job.id}: waiting up to {STOP_GRACE_S} s for it to finish its step and commit")
    client.stop_job(job.id)
    # Ray's stop has no effect on a job whose supervisor is not placed yet: the job stayed PENDING until Ray gave up
    # after 900 s (measured). The Jobs API, maybe our only access to the cluster, cannot kill the supervisor, so a
    # second job does.
    if job.status == "PENDING":
        command = shlex.join(["python", "-c", KILL_PENDING.format(id=job.id)])
        helper = _submit_when_possible(partial(client.submit_job, entrypoint=command))
        while client.get_job_status(helper) in ("PENDING", "RUNNING"):
            time.sleep(POLL_S)
        # Remove the helper from the cluster's list of jobs.
        client.delete_job(helper)

    deadline = time.monotonic() + STOP_WAIT_S
    job = _latest_job(client, run)
    while job.alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
        job = _latest_job(client, run)
    if job.alive:
        raise ClusterError(
            f"job {job.id} is still {job.status} after {STOP_WAIT_S} s\n"
            f"  its node may be lost, or busy writing a checkpoint\n"
            f"  run python -m jobs stop {shlex.quote(run)} again, or see {client.get_address()}/#/jobs/{job.id}"
        )
    echo(f"job {job.id}: {job.status}")
    return job


# ------------------------------------------------------------------------ the size of a shipped checkout


def check_upload_size(checkout: Checkout, root: Path) -> int:
    """Return the uncompressed size in bytes of the files that Ray would ship.

    If the size exceeds the limit of the Jobs API, raises UsageError, which lists the largest entries.
    """
    sizes = Counter(checkout.sizes)
    if sizes.total() > UPLOAD_LIMIT_BYTES:
        largest = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in sizes.most_common(5))
        raise UsageError(
            f"the checkout has {sizes.total() / MIB:.0f} MiB, but Ray accepts at most "
            f"{UPLOAD_LIMIT_BYTES / MIB:.0f} MiB\n"
            f"  largest entries: {largest}\n"
            f"  move them out of {root}, or list them in .rayignore"
        )
    return sizes.total()


# ------------------------------------------------------------------------ the Jobs API


def _connect() -> "JobSubmissionClient":
    """Return a client for the cluster named by environment variables or, if none is set, for a local cluster."""
    address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")
    # Call this before importing Ray, because it sets a variable that Ray reads at import.
    use_token_if_any()
    from ray.job_submission import JobSubmissionClient

    # Ray would log every excluded file, every upload and the end of every log, and warn at every upload that `.venv` is
    # excluded. Existing loggers may have their own level; later ones inherit the level of "ray".
    for name in ("ray", *logging.root.manager.loggerDict):
        if name.partition(".")[0] == "ray":
            logging.getLogger(name).setLevel(logging.ERROR)
    # Check the address first: Ray's client takes a minute to fail, with a less helpful message.
    if address not in ("", "auto"):
        require_reachable(address)
    try:
        with _without_native_lines():
            return JobSubmissionClient()
    except Exception as error:
        # Without an address, Ray looks for a cluster on this machine, and raises ConnectionError if there is none.
        if address or not isinstance(error, ConnectionError):
            raise explain(error, address or "127.0.0.1") from None
        raise ClusterError(
            "RAY_ADDRESS is not set, and no Ray cluster is running on this machine\n"
            "  a job needs a cluster that keeps running after this command\n"
            "  run RAY_AUTH_MODE=token ray start --head, or set RAY_ADDRESS=http://HOST:8265"
        ) from None


@contextmanager
def _without_native_lines() -> Iterator[None]:
    """Discard what is written to the file descriptor of stderr: Ray's C++ code logs there, and has no option for it."""
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def _submit_when_possible(submit_job: Callable[[], str]) -> str:
    """Submit a job and return its id; retry if the head has just started and does not accept jobs yet.

    Raises ClusterError if the head does not accept jobs within AGENT_WAIT_S.
    """
    deadline = time.monotonic() + AGENT_WAIT_S
    is_reported = False
    while True:
        try:
            return submit_job()
        except RuntimeError as error:
            # The head returns this error after 10 s if its agent, which runs jobs, has not started yet.
            if NO_AGENT not in str(error):
                raise
            if not is_reported:
                echo(f"waiting up to {AGENT_WAIT_S:.0f} s for the head's agent, which runs jobs, to start")
                is_reported = True
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the cluster's head does not accept jobs: its agent has not started within {AGENT_WAIT_S:.0f} s\n"
                "  the head may be overloaded, or another Ray cluster on its machine may use the agent's port, 52365\n"
                "  see /tmp/ray/session_latest/logs/dashboard_agent.log on the head\n"
                "  to use another port, run ray start --head --dashboard-agent-listen-port PORT"
            )
        time.sleep(POLL_S)


def _submitted_jobs(client: "JobSubmissionClient") -> list[RayJob]:
    """Return all jobs on the cluster, oldest first."""
    jobs = []
    for details in client.list_jobs():
        # Drivers that joined the cluster without `submit` have no submission id.
        if details.submission_id:
            job = RayJob(
                id=details.submission_id,
                run=(details.metadata or {}).get("run", ""),
                status=str(details.status),
                started_s=(details.start_time or 0) / 1000,  # Ray uses milliseconds
                exit_code=details.driver_exit_code,
                message=details.message or "",
            )
            jobs.append(job)
    return sorted(jobs, key=attrgetter("started_s"))


def _jobs_of_run(client: "JobSubmissionClient", run: str) -> list[RayJob]:
    """Return the jobs of a run, oldest first; `run` may also be the id of a job."""
    return [job for job in _submitted_jobs(client) if run in (job.run, job.id)]


def _latest_job(client: "JobSubmissionClient", run: str) -> RayJob:
    jobs = _jobs_of_run(client, run)
    if jobs:
        return jobs[-1]
    runs = sorted({job.run for job in _submitted_jobs(client)} - {""})
    raise UsageError(
        f"no job for {run} on the cluster at {client.get_address()}\n"
        f"  runs with jobs: {', '.join(runs) or 'none'} (Ray loses this list if the head restarts)\n"
        f"  run python -m jobs list, or python -m jobs status with the run directory"
    )


def stop_holder(storage: Storage, seen: SeenLease, log: Callable[[str], None], patience_s: float) -> None:
    """Tell the command that owns a run, on any machine, to commit and stop; return once it has ended.

    The command sees the request when it next renews its lease. Raises ClusterError if the command does not end in time,
    UsageError if Slurm or systemd would restart it, or StorageError if the storage fails.
    """
    address = shlex.quote(storage.address())
    for kind, words in STOP_COMMANDS.items():
        if seen.record is not None and seen.record["job"].startswith(kind):
            name = seen.record["job"].removeprefix(kind).strip()
            raise UsageError(
                f"{seen.holder} would be restarted after a stop\n"
                f"  to stop it for good, run on {seen.record['host']}: {words} {name}"
            )
    storage.put(STOP.format(seen.number), b"")
    log(f"asked {seen.holder} to commit and stop; waiting up to {patience_s:.0f} s")
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        state, now = holder_state(storage, log)
        if state == "lost":
            log(f"the command died without a commit; for its last step, run python -m jobs status {address}")
            return
        if state == "free" or now is None or now.number > seen.number:
            log(f"the command has ended; for its result, run python -m jobs status {address}")
            return
        time.sleep(POLL_S)
    raise ClusterError(
        f"{seen.holder} has not stopped within {patience_s:.0f} s and still owns {storage.address()}\n"
        "  the storage of the run may be slow\n"
        f"  run python -m jobs stop {address} again, or kill the process on its machine"
    )
