"""`patchline submit|logs|stop|list`: run campaigns as jobs on a Ray cluster."""

import shlex
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data.checks import check_name
from data.errors import ClusterError, ExitCode, StorageError, UsageError
from jobs.answer import Answer, Document
from jobs.commands.arguments import Debug, Fresh, Overrides, Recipe, Run
from jobs.commands.campaigns import kinds_of, recipe_path
from jobs.terminal import echo

if TYPE_CHECKING:  # imports Ray
    from jobs.extras.submit.submission import RayJob

ONE_MACHINE = (
    "cluster.backend=processes: all workers will run on one machine of the cluster, the one that runs the job\n"
    "  to use all machines, add cluster.backend=ray cluster.workers=N and, with GPUs, cluster.gpus_per_worker=1"
)
Variables = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="Set an environment variable for the driver and all workers."),
]

Wait = Annotated[
    bool,
    typer.Option(
        "--wait", help="Follow the output of the job, even if the job is already running, and exit with its exit code."
    ),
]

SUBMIT_PERIODS = 1.5  # lease renewal periods to watch a lease before submitting; the job itself watches longer
SIGNALLED = 128  # a shell reports 128 + the signal as the exit code of a killed child
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


def submit(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    fresh: Fresh = False,
    env: Variables = None,
    wait: Wait = False,
    debug: Debug = False,
) -> Answer:
    """Submit a recipe as a job to the Ray cluster at RAY_ADDRESS.

    With --debug, also print the equivalent `ray job submit`.
    """
    from jobs.extras.submit.portable import VARIABLE, portable
    from jobs.ownership import holder_state, owned_error
    from jobs.recipe.campaign import resolve
    from pipeline.identity import COMMIT_VARIABLE, git_commit
    from pipeline.recipe import read_recipe

    variables = {COMMIT_VARIABLE: git_commit()}  # the job's copy of the checkout has no .git folder
    for item in env or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"--env {item!r} has no value\n  expected NAME=VALUE, for example --env NCCL_DEBUG=INFO")
        variables[name] = value
    document = read_recipe(recipe_path(recipe), overrides or [])
    kinds = kinds_of(context)
    campaign = resolve(document, kinds)  # report errors in the recipe here, not on the cluster
    storage = campaign.storage
    run = storage.address()
    if campaign.cluster.backend == "processes":
        echo(ONE_MACHINE)
    from jobs.extras.submit import submission  # imports Ray

    check_name(Path(run).name, "a run", "use another folder: run=runs/NAME")
    # Ray copies the checkout to the cluster. The recipe may be outside the checkout, so it is sent as text.
    text, changed = portable(document, run, Path.cwd(), kinds)
    if changed:
        echo(f"relative paths in the recipe are resolved against {Path.cwd()}: {', '.join(changed)}")
    variables[VARIABLE] = text
    command = ["python", "-m", "jobs", "run", f"env:{VARIABLE}", f"run={run}"]
    if fresh:
        command.append("--fresh")
    job = submission.alive_job(run) if wait else None
    if job is not None:
        echo(f"job {job.id} is already running this recipe ({job.status}, started {job.started}); following its output")
    else:
        # A driver outside Ray may own the run. If this machine cannot read the storage, the job itself checks that.
        with suppress(StorageError):
            state, seen = holder_state(storage, echo, SUBMIT_PERIODS)
            if seen is not None and state == "held":
                raise owned_error(storage, seen)
        job = submission.submit(run, command, environment=variables, shows_command=debug)
    return follow(run) if wait else Answer({"job": job_record(job), "next": []})


def logs(run: Run, _debug: Debug = False) -> Answer:
    """Follow the output of a submitted run, and exit with the run's exit code."""
    from data.storage import Folder
    from jobs.ownership import RAY_JOB, newest_lease

    name = job_name(run)
    if "://" not in name:
        seen = newest_lease(Folder(Path(name)))
        if seen is not None and seen.record is not None and not seen.record["job"].startswith(RAY_JOB):
            raise UsageError(
                f"{name} was not submitted to a Ray cluster\n"
                f"  to follow its output, run tail -f {shlex.quote(name)}/log.txt"
            )
    return follow(name)


def follow(run: str) -> Answer:
    """Print a job's output until the job ends; return an answer with the exit code of its run.

    Raises ClusterError if the driver was killed, or if the cluster does not respond.
    """
    from jobs.extras.submit import submission

    job = submission.logs(run)
    if job.status == "SUCCEEDED":
        return Answer({"job": job_record(job), "next": []})
    command = f"python -m jobs status {shlex.quote(run)}"
    document = {
        "what": f"job {job.id} ended: {job.status}, exit code {job.exit_code}",
        "job": job_record(job),
        "next": [
            {"do": "run", "command": command, "text": f"for the run's progress and how to resume it, run {command}"}
        ],
    }
    # Ray records no exit code for a stopped job. Its driver has committed a checkpoint, as after exit code 75.
    if job.status == "STOPPED":
        return Answer(document, code=ExitCode.PREEMPTED)
    # The driver was killed or never started, or its node is gone: report "unavailable", because a retry is safe.
    if job.exit_code is None or job.exit_code < 0 or job.exit_code - SIGNALLED in KILLS:
        raise ClusterError(
            f"job {job.id} ended without an exit code from Patchline: {job.status}, exit code {job.exit_code}\n"
            f"  its driver was killed, or its node is gone; Ray reports: {' '.join(job.message.split()) or 'nothing'}\n"
            f"  for the run's progress, run {command}; to resume it, submit it again"
        )
    return Answer(document, code=job.exit_code)


def stop(run: Run, _debug: Debug = False) -> Answer:
    """Stop a run on any machine: its workers commit a checkpoint and exit."""
    from data.storage import Folder, open_storage
    from jobs.extras.submit import submission
    from jobs.ownership import RAY_JOB, holder_state

    name = job_name(run)
    storage = open_storage(Path("/"), name) if "://" in name else Folder(Path(name))
    state, seen = holder_state(storage, echo)
    # Ray signals the drivers of its jobs, including queued jobs, which do not hold a lease yet.
    is_rays = seen is None or seen.record is None or seen.record["job"].startswith(RAY_JOB)
    if seen is None or is_rays:
        return Answer({"run": name, "job": job_record(submission.stop(name))})
    if state == "held":
        submission.stop_holder(storage, seen, echo, submission.STOP_WAIT_S)
        return Answer({"run": name, "owner": seen.holder, "was_running": True})
    return Answer({"run": name, "owner": seen.holder, "was_running": False}, not_running_lines)


def not_running_lines(document: Document) -> list[str]:
    run = shlex.quote(document["run"])
    return [f"nothing to stop: {document['owner']} has ended; for its result, run python -m jobs status {run}"]


def list_jobs(_debug: Debug = False) -> Answer:
    """List the jobs of the cluster: running, queued (with the reason) and finished."""
    from jobs.extras.submit import submission

    return Answer({"jobs": [job_record(job) for job in submission.list_jobs()]}, job_lines)


def job_record(job: "RayJob") -> dict[str, Any]:
    """Convert a job to plain values for a document."""
    return {**asdict(job), "started": job.started}


def job_lines(document: Document) -> Iterator[str]:
    """Yield two lines per job: its status, start time and run; then its progress, or the reason why it is queued."""
    from jobs.cluster.ray import WAITING

    if not document["jobs"]:
        yield "no jobs since the cluster's head node started; to submit one, run python -m jobs submit RECIPE"
    for job in document["jobs"]:
        note = "  its driver has not started" if job["status"] == "PENDING" and not job["last_line"] else ""
        yield f"{job['status']:10} {job['started'][:-3]}  {job['run']}{note}  ({job['id']})"
        if job["last_line"]:
            yield f"{'':10} {job['last_line'].removeprefix(WAITING)}"


def job_name(run: str) -> str:
    """Return a run's name in the table of jobs: its absolute path or URL; return a job id unchanged."""
    if "://" in run:
        from data.bucket import check_store_url  # imports numpy, which would slow down --help

        return check_store_url(run)
    if "/" in run or Path(run).exists():
        return str(Path(run).resolve())
    return run
