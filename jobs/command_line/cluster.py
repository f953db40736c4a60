"""`patchline submit|logs|stop|list`: campaigns as jobs of a Ray cluster."""

import time
from pathlib import Path
from typing import Annotated

import typer

from data.checks import check_name
from data.errors import ExitCode, UsageError
from jobs.command_line.campaigns import load_campaign, recipe_path
from jobs.command_line.words import Debug, Fresh, Overrides, Recipe, Run, make_group

ROOT = Path(__file__).parents[2]

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
    from jobs.cluster import submission
    from jobs.context import COMMIT_VARIABLE, git_commit

    variables = {COMMIT_VARIABLE: git_commit()}  # a job's copy of the checkout has no git
    for item in env or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"--env {item!r} has no value\n  expected NAME=VALUE, for example --env NCCL_DEBUG=INFO")
        variables[name] = value
    run = load_campaign(recipe, overrides).run  # a wrong recipe stops here, not on the cluster
    check_name(run.name, "a run", "give it another folder: run=runs/NAME")
    # A job takes this checkout along and nothing else, so the recipe must lie in it.
    path = recipe_path(recipe).resolve()
    if not path.is_relative_to(ROOT):
        raise UsageError(f"{recipe} lies outside {ROOT}, all that a job takes along\n  copy it into jobs/recipes")
    # The run directory goes along as the absolute path that it is here, not relative to the job's own folder.
    other_overrides = [item for item in overrides or [] if not item.startswith("run=")]
    command = ["python", "-m", "jobs", "run", str(path.relative_to(ROOT)), *other_overrides, f"run={run}"]
    if fresh:
        command.append("--fresh")
    submission.submit(str(run), command, environment=variables)


@commands.command()
def logs(run: Run, _debug: Debug = False) -> int:
    """Follow what a submitted run prints, and end as it ends."""
    from jobs.cluster import submission

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
    from jobs.cluster import submission

    submission.stop(job_name(run))


@commands.command("list")
def list_jobs(_debug: Debug = False) -> None:
    """List the jobs on the cluster."""
    from jobs.cluster import submission

    jobs = submission.list_jobs()
    if not jobs:
        print("no jobs: none was submitted since the cluster's head started; type `python -m jobs submit RECIPE`")
    for job in jobs:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started_s))
        print(f"{job.status:10} {started}  {job.run}  ({job.id})")


def job_name(run: str) -> str:
    """The name under which a job is found: the absolute path of a run's directory, or a job's id as it is."""
    if "/" in run or Path(run).exists():
        return str(Path(run).resolve())
    return run
