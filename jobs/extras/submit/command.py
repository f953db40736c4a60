"""`patchline submit|logs|stop|list`: run campaigns as jobs on a Ray cluster."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from data.checks import check_name
from data.errors import ClusterError, ExitCode, StorageError, UsageError
from jobs.commands.arguments import Debug, Fresh, Overrides, Recipe, Run
from jobs.commands.campaigns import kinds_of, recipe_path
from jobs.terminal import echo

Variables = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="Set an environment variable for the driver and all workers."),
]

Wait = Annotated[
    bool,
    typer.Option("--wait", help="Follow the job's output, even if it is already running, and exit with its exit code."),
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
    _debug: Debug = False,
) -> int:
    """Submit a recipe as a job to the Ray cluster at RAY_ADDRESS."""
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
    storage = resolve(document, kinds).storage  # report errors in the recipe here, not on the cluster
    run = storage.address()
    from jobs.extras.submit import submission  # imports Ray

    check_name(Path(run).name, "a run", "use another folder: run=runs/NAME")
    # Ray copies the checkout to the cluster. The recipe may be outside the checkout, so it is sent as text.
    text, changed = portable(document, run, Path.cwd(), kinds)
    if changed:
        print(f"relative paths in the recipe are resolved against {Path.cwd()}: {', '.join(changed)}")
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
        submission.submit(run, command, environment=variables)
    return follow(run) if wait else ExitCode.DONE


def logs(run: Run, _debug: Debug = False) -> int:
    """Follow the output of a submitted run, and exit with the run's exit code."""
    from data.storage import Folder
    from jobs.ownership import RAY_JOB, newest_lease

    name = job_name(run)
    if "://" not in name:
        seen = newest_lease(Folder(Path(name)))
        if seen is not None and seen.record is not None and not seen.record["job"].startswith(RAY_JOB):
            raise UsageError(
                f"{name} was not submitted to a Ray cluster\n  to follow its output, run tail -f {name}/log.txt"
            )
    return follow(name)


def follow(run: str) -> int:
    """Print a job's output until the job ends; return the exit code of its run. Raises ClusterError."""
    from jobs.extras.submit import submission

    job = submission.logs(run)
    if job.status == "SUCCEEDED":
        return ExitCode.DONE
    # Ray records no exit code for a stopped job. Its driver has committed a checkpoint, as after exit code 75.
    if job.status == "STOPPED":
        return ExitCode.PREEMPTED
    # The driver was killed or never started, or its node is gone: report "unavailable", because a retry is safe.
    if job.exit_code is None or job.exit_code < 0 or job.exit_code - SIGNALLED in KILLS:
        raise ClusterError(
            f"job {job.id} ended without an exit code from Patchline: {job.status}, exit code {job.exit_code}\n"
            "  its driver was killed, or its node is gone\n"
            f"  for the run's progress, run python -m jobs status {run}; to resume it, submit it again"
        )
    return job.exit_code


def stop(run: Run, _debug: Debug = False) -> None:
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
        submission.stop(name)
    elif state == "held":
        submission.stop_holder(storage, seen, echo, submission.STOP_WAIT_S)
    else:
        echo(f"nothing to stop: {seen.holder} has ended; for its result, run python -m jobs status {name}")


def list_jobs(_debug: Debug = False) -> None:
    """List the jobs of the cluster: running, queued (with the reason) and finished."""
    from jobs.cluster.ray import WAITING
    from jobs.extras.submit import submission

    jobs = submission.list_jobs()
    if not jobs:
        echo("no jobs since the cluster's head node started; to submit one, run python -m jobs submit RECIPE")
    for job in jobs:
        # First line: status, start time without seconds, run. Second line: progress, or why the job is queued.
        note = "  its driver has not started" if job.status == "PENDING" and not job.last_line else ""
        echo(f"{job.status:10} {job.started[:-3]}  {job.run}{note}  ({job.id})")
        if job.last_line:
            echo(f"{'':10} {job.last_line.removeprefix(WAITING)}")


def job_name(run: str) -> str:
    """Return a run's name in the table of jobs: its absolute path or URL; return a job id unchanged."""
    if "://" in run:
        from data.bucket import check_store_url  # imports numpy, which would slow down --help

        return check_store_url(run)
    if "/" in run or Path(run).exists():
        return str(Path(run).resolve())
    return run
