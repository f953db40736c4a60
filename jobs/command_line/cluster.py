"""`patchline submit|logs|stop|list`: campaigns as jobs of a Ray cluster."""

from pathlib import Path
from typing import Annotated

import typer

from data.checks import check_name
from data.errors import ExitCode, UsageError
from jobs.command_line.campaigns import recipe_path
from jobs.command_line.words import Debug, Fresh, Overrides, Recipe, Run, make_group
from jobs.terminal import echo

Variables = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable for the driver and every worker.")
]

commands = make_group()


@commands.command()
def submit(
    recipe: Recipe,
    overrides: Overrides = None,
    fresh: Fresh = False,
    env: Variables = None,
    _debug: Debug = False,
) -> None:
    """Run a campaign as a Ray job on the cluster at RAY_ADDRESS."""
    from jobs.recipe.campaign import resolve
    from jobs.recipe.render import VARIABLE, portable
    from pipeline.config import read_recipe
    from pipeline.versions import COMMIT_VARIABLE, git_commit

    variables = {COMMIT_VARIABLE: git_commit()}  # a job's copy of the checkout has no git
    for item in env or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"--env {item!r} has no value\n  expected NAME=VALUE, for example --env NCCL_DEBUG=INFO")
        variables[name] = value
    document = read_recipe(recipe_path(recipe), overrides or [])
    run = resolve(document).storage.address()  # a wrong recipe stops here, not on the cluster
    from jobs.submit import submission  # it imports Ray

    check_name(Path(run).name, "a run", "give it another folder: run=runs/NAME")
    # A job takes the checkout along. The recipe, which may lie anywhere, travels as text.
    text, changed = portable(document, run, Path.cwd())
    if changed:
        print(f"relative paths are taken from {Path.cwd()}: {', '.join(changed)}")
    variables[VARIABLE] = text
    command = ["python", "-m", "jobs", "run", f"env:{VARIABLE}", f"run={run}"]
    if fresh:
        command.append("--fresh")
    submission.submit(run, command, environment=variables)


@commands.command()
def logs(run: Run, _debug: Debug = False) -> int:
    """Follow what a submitted run prints, and end as it ends."""
    from jobs.submit import submission

    job = submission.logs(job_name(run))
    if job.status in ("SUCCEEDED", "RUNNING", "PENDING"):
        return ExitCode.DONE
    # Ray keeps no exit code of a job that was asked to stop, which a driver answers with a commit.
    if job.status == "STOPPED":
        return ExitCode.PREEMPTED
    # A job whose driver never ran has no exit code.
    return job.exit_code or ExitCode.INTERNAL


@commands.command()
def stop(run: Run, _debug: Debug = False) -> None:
    """Ask a submitted run to commit and end."""
    from jobs.submit import submission

    submission.stop(job_name(run))


@commands.command("list")
def list_jobs(_debug: Debug = False) -> None:
    """List the jobs on the cluster: who runs, who waits in the queue and for what, who has ended."""
    from jobs.cluster.ray import WAITING
    from jobs.submit import submission

    jobs = submission.list_jobs()
    if not jobs:
        print("no jobs: none was submitted since the cluster's head started; type `python -m jobs submit RECIPE`")
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
