"""A campaign as a Ray job: submit, list, logs, stop, by the name of the run.

Ray's job table is lost with the head; the truth about a run is its directory. A job is found by the `run` in
its metadata, and its id is the run's name and the number of the try.
"""

import asyncio
import json
import logging
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ray._private.runtime_env.packaging import _dir_travel, _get_excludes
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from data.errors import ClusterError, RunOwned, UsageError
from jobs.cluster.ray_access import EXCLUDES, ROOT, explain, require_reachable, use_token_if_any

Say = Callable[[str], None]

UPLOAD_LIMIT_BYTES = 100 * 2**20  # of the Jobs API, which answers 413 above it
STOP_GRACE_S = 120  # to finish the step and commit; Ray kills after 3 s by default
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)", re.IGNORECASE)

# Ray's own stop does nothing to a job whose supervisor has no place yet; this ends the supervisor.
KILL_PENDING = """
import ray
ray.init(address="auto", logging_level="error")
ray.kill(ray.get_actor("_ray_internal_job_actor_{id}", namespace="SUPERVISOR_ACTOR_RAY_NAMESPACE"))
"""


@dataclass(frozen=True)
class Job:
    id: str
    run: str
    status: str  # PENDING RUNNING STOPPED SUCCEEDED FAILED
    message: str
    started_s: float  # since 1970
    ended_s: float | None
    entrypoint: str
    exit_code: int | None

    @property
    def alive(self) -> bool:
        return self.status in ("PENDING", "RUNNING")


def submit(
    run: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    entrypoint_cpus: float = 0,
    root: Path = ROOT,
    say: Say = print,
) -> Job:
    """Ship the checkout and run `command` in it on the cluster, as the next try of `run`.

    Raises RunOwned when a job of this run is alive, UsageError for a secret in `environment` or a checkout
    too large to ship, ClusterError when there is no cluster.
    """
    _refuse_secrets(environment)
    size = sum(measure(root).values())
    client = _client()
    tries = _of_run(client, run)
    for job in tries:
        if job.alive:
            raise RunOwned(
                f"{run} is owned by job {job.id}, {job.status} since {_clock(job.started_s)}\n"
                f"a run has one owner\n"
                f"type `python -m jobs stop {run}` first, or follow it with `python -m jobs logs {run}`"
            )
    request: dict[str, Any] = {
        "submission_id": f"{_slug(run)}-{len(tries) + 1:03d}-{os.urandom(2).hex()}",
        "metadata": {"job_name": Path(run).name, "run": run},
        "runtime_env": {
            "working_dir": str(root),
            "excludes": EXCLUDES,
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE_S), "PYTHONUNBUFFERED": "1"} | dict(environment),
        },
    }
    say(f"shipping {root}: {size / 2**20:.1f} MiB before compression")
    say(f"the same by hand: {equivalent(client.get_address(), request, command)}")
    client.submit_job(entrypoint=shlex.join(command), entrypoint_num_cpus=entrypoint_cpus, **request)
    say(f"job {request['submission_id']} on {client.get_address()}/#/jobs/{request['submission_id']}")
    return status(run)


def list_jobs() -> list[Job]:
    """Every job submitted here, the latest first."""
    jobs = [_job(details) for details in _client().list_jobs() if details.submission_id]
    return sorted((job for job in jobs if job.run), key=lambda job: job.started_s, reverse=True)


def status(run: str) -> Job:
    """The latest job of the run; raises UsageError when there is none, naming those that exist."""
    return _latest(_client(), run)


def logs(run: str, *, follow: bool = True, write: Say = lambda text: print(text, end="", flush=True)) -> Job:
    """Write what the run's latest job printed; with `follow`, until it ends."""
    client = _client()
    job = _latest(client, run)
    if follow:
        asyncio.run(_tail(client, job.id, write))
    else:
        write(client.get_job_logs(job.id))
    return status(run)


def stop(run: str, *, wait_s: float = STOP_GRACE_S + 30, say: Say = print) -> Job:
    """Ask the run's latest job to commit and end, and wait for it; a pending one is ended where it waits."""
    client = _client()
    job = _latest(client, run)
    if not job.alive:
        say(f"job {job.id} has already ended: {job.status}")
        return job
    say(f"stopping job {job.id}: it finishes its step and commits, for up to {STOP_GRACE_S} s")
    client.stop_job(job.id)
    if job.status == "PENDING":
        _kill_pending(client, job.id)
    deadline = time.monotonic() + wait_s
    while (job := _latest(client, run)).alive and time.monotonic() < deadline:
        time.sleep(0.5)
    if job.alive:
        raise ClusterError(
            f"job {job.id} is still {job.status} after {wait_s:.0f} s\n"
            f"its node may be gone, or busy writing\n"
            f"type `python -m jobs stop {run}` again, or look at {client.get_address()}/#/jobs/{job.id}"
        )
    say(f"job {job.id}: {job.status}")
    return job


# ------------------------------------------------------------------------ what is shipped


def measure(root: Path) -> dict[str, int]:
    """Bytes before compression of all that Ray would ship from `root`, by entry of its first two levels.

    Raises UsageError, naming the largest, when that is more than the Jobs API takes.
    """
    sizes: Counter[str] = Counter()

    def count(path: Path) -> None:
        if path.is_file():
            sizes["/".join(path.relative_to(root).parts[:2])] += path.stat().st_size

    _dir_travel(root, [_get_excludes(root, EXCLUDES)], count, include_gitignore=True)
    if sizes.total() > UPLOAD_LIMIT_BYTES:
        largest = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.most_common(5))
        raise UsageError(
            f"the checkout is {sizes.total() / 2**20:.0f} MiB, Ray takes {UPLOAD_LIMIT_BYTES / 2**20:.0f}\n"
            f"largest: {largest}\n"
            f"move them out of {root}, or name them in .rayignore"
        )
    return dict(sizes)


def equivalent(address: str, request: Mapping[str, Any], command: Sequence[str]) -> str:
    """The `ray job submit` that does the same (its own quoting mangles braces in the command)."""
    runtime_env = {k: v for k, v in request["runtime_env"].items() if k != "working_dir"}
    options = {
        "--address": address,
        "--submission-id": request["submission_id"],
        "--working-dir": ".",
        "--metadata-json": json.dumps(request["metadata"]),
        "--runtime-env-json": json.dumps(runtime_env),
    }
    words = [word for option in options.items() for word in option]
    return shlex.join(["ray", "job", "submit", *words, "--", *command])


def _refuse_secrets(environment: Mapping[str, str]) -> None:
    secrets = [name for name in environment if SECRET.search(name)]
    if secrets:
        raise UsageError(
            f"{', '.join(secrets)} would be shown in clear to whoever lists the jobs\n"
            f"secrets belong to the nodes: their environment, instance role or mounted files\n"
            f"leave it out of the job's environment"
        )


# ------------------------------------------------------------------------ the client


def _client() -> JobSubmissionClient:
    address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")
    use_token_if_any()
    logging.getLogger("ray").setLevel(logging.WARNING)  # it tells every file that it leaves out
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


def _job(details: JobDetails) -> Job:
    return Job(
        id=details.submission_id or "",
        run=(details.metadata or {}).get("run", ""),
        status=str(details.status),
        message=details.message or "",
        started_s=(details.start_time or 0) / 1000,
        ended_s=details.end_time / 1000 if details.end_time else None,
        entrypoint=details.entrypoint,
        exit_code=details.driver_exit_code,
    )


def _of_run(client: JobSubmissionClient, run: str) -> list[Job]:
    """The jobs of a run, oldest first."""
    jobs = [_job(details) for details in client.list_jobs() if details.submission_id]
    return sorted((job for job in jobs if run in (job.run, job.id)), key=lambda job: job.started_s)


def _latest(client: JobSubmissionClient, run: str) -> Job:
    jobs = _of_run(client, run)
    if not jobs:
        known = sorted({(details.metadata or {}).get("run", "") for details in client.list_jobs()} - {""})
        raise UsageError(
            f"no job of {run} at {client.get_address()}\n"
            f"runs with jobs there: {', '.join(known) or 'none'}; a restart of the head forgets them\n"
            f"type `python -m jobs list`, or `python -m jobs status` with the run's directory"
        )
    return jobs[-1]


async def _tail(client: JobSubmissionClient, job_id: str, write: Say) -> None:
    async for text in client.tail_job_logs(job_id):
        write(text)


def _kill_pending(client: JobSubmissionClient, job_id: str) -> None:
    """Run a job beside it that kills its supervisor: the Jobs API cannot, and may be all that we reach."""
    helper = client.submit_job(entrypoint=shlex.join(["python", "-c", KILL_PENDING.format(id=job_id)]))
    while client.get_job_status(helper) in (JobStatus.PENDING, JobStatus.RUNNING):
        time.sleep(0.5)
    client.delete_job(helper)


def _slug(run: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(run).name) or "run"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
