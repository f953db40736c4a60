"""`patchline submit|logs|stop|list`: campaigns as jobs of a Ray cluster."""

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
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable for the driver and every worker.")
]

Wait = Annotated[bool, typer.Option("--wait", help="Follow the run, also one that was submitted before; end as it.")]

SUBMIT_PERIODS = 1.5  # for which a lease is watched; the job itself waits for longer
SIGNALLED = 128  # and the signal: what a shell makes of a child that was killed
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
    """Run a campaign as a Ray job on the cluster at RAY_ADDRESS."""
    from jobs.ownership import holder_state, owned_error
    from jobs.recipe.campaign import resolve
    from jobs.recipe.portable import VARIABLE, portable
    from pipeline.identity import COMMIT_VARIABLE, git_commit
    from pipeline.recipe import read_recipe

    variables = {COMMIT_VARIABLE: git_commit()}  # a job's copy of the checkout has no git
    for item in env or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"--env {item!r} has no value\n  expected NAME=VALUE, for example --env NCCL_DEBUG=INFO")
        variables[name] = value
    document = read_recipe(recipe_path(recipe), overrides or [])
    kinds = kinds_of(context)
    storage = resolve(document, kinds).storage  # a wrong recipe stops here, not on the cluster
    run = storage.address()
    from jobs.submit import submission  # it imports Ray

    check_name(Path(run).name, "a run", "give it another folder: run=runs/NAME")
    # A job takes the checkout along. The recipe, which may lie anywhere, travels as text.
    text, changed = portable(document, run, Path.cwd(), kinds)
    if changed:
        print(f"relative paths are taken from {Path.cwd()}: {', '.join(changed)}")
    variables[VARIABLE] = text
    command = ["python", "-m", "jobs", "run", f"env:{VARIABLE}", f"run={run}"]
    if fresh:
        command.append("--fresh")
    job = submission.alive_job(run) if wait else None
    if job is not None:
        echo(f"job {job.id} of this run is {job.status} since {job.started}: it is followed")
    else:
        # A driver outside of Ray's jobs. This machine may not see the storage: then the job itself looks.
        with suppress(StorageError):
            state, seen = holder_state(storage, echo, SUBMIT_PERIODS)
            if seen is not None and state == "held":
                raise owned_error(storage, seen)
        submission.submit(run, command, environment=variables)
    return follow(run) if wait else ExitCode.DONE


def logs(run: Run, _debug: Debug = False) -> int:
    """Follow what a submitted run prints, and end as it ends."""
    from data.storage import Folder
    from jobs.ownership import RAY_JOB, newest_lease

    name = job_name(run)
    if "://" not in name:
        seen = newest_lease(Folder(Path(name)))
        if seen is not None and seen.record is not None and not seen.record["job"].startswith(RAY_JOB):
            raise UsageError(f"{name} is no job of a cluster\n  what it prints is in its log: tail -f {name}/log.txt")
    return follow(name)


def follow(run: str) -> int:
    """Print what the job of a run prints, until it ends; return the run's exit code. Raises ClusterError."""
    from jobs.submit import submission

    job = submission.logs(run)
    if job.status == "SUCCEEDED":
        return ExitCode.DONE
    # Ray keeps no exit code of a job that was asked to stop, which a driver answers with a commit.
    if job.status == "STOPPED":
        return ExitCode.PREEMPTED
    # A driver that was killed has said nothing, nor has one that never ran; its node may be gone. To start it again is
    # right, as it is where the cluster does not answer.
    if job.exit_code is None or job.exit_code < 0 or job.exit_code - SIGNALLED in KILLS:
        raise ClusterError(
            f"job {job.id} ended without a word: {job.status}, exit code {job.exit_code}\n"
            "  expected: one of Patchline's own; its driver was killed, or its node is gone\n"
            f"  see where the run stands: python -m jobs status {run}; submit it again to go on"
        )
    return job.exit_code


def stop(run: Run, _debug: Debug = False) -> None:
    """Ask a run to commit and end, wherever its driver is."""
    from data.storage import Folder, open_storage
    from jobs.ownership import RAY_JOB, holder_state, stop_holder
    from jobs.submit import submission

    name = job_name(run)
    storage = open_storage(Path("/"), name) if "://" in name else Folder(Path(name))
    state, seen = holder_state(storage, echo)
    # Ray tells a driver of its own by a signal, and knows of those that wait for a place, which hold no lease yet.
    is_rays = seen is None or seen.record is None or seen.record["job"].startswith(RAY_JOB)
    if seen is None or is_rays:
        submission.stop(name)
    elif state == "held":
        stop_holder(storage, seen, echo, submission.STOP_WAIT_S)
    else:
        echo(f"nothing to stop: {seen.holder} has ended; see how: python -m jobs status {name}")


def list_jobs(_debug: Debug = False) -> None:
    """List the jobs on the cluster: who runs, who waits in the queue and for what, who has ended."""
    from jobs.cluster.ray import WAITING
    from jobs.submit import submission

    jobs = submission.list_jobs()
    if not jobs:
        echo("no jobs: none was submitted since the cluster's head started; type `python -m jobs submit RECIPE`")
    for job in jobs:
        # The start to the minute; below it how far the job is, or what it waits for.
        note = "  its driver has not started" if job.status == "PENDING" and not job.last_line else ""
        echo(f"{job.status:10} {job.started[:-3]}  {job.run}{note}  ({job.id})")
        if job.last_line:
            echo(f"{'':10} {job.last_line.removeprefix(WAITING)}")


def job_name(run: str) -> str:
    """The name under which a job is found: a run's absolute path or URL, or a job's id as it is."""
    if "://" in run:
        from data.bucket import check_store_url  # imports numpy, for which --help does not wait

        return check_store_url(run)
    if "/" in run or Path(run).exists():
        return str(Path(run).resolve())
    return run
