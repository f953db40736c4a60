"""`patchline checkpoints list|verify|inspect|diff|export|prune RUN`."""

from pathlib import Path
from typing import Annotated

import typer

from data.errors import UsageError
from jobs.command_line.words import Debug, make_group

SavedRun = Annotated[
    str, typer.Argument(help="Run directory, a stage in it (RUN/STAGE), or one step-* folder; or s3://…")
]
Step = Annotated[int | None, typer.Option(help="Of this step; else the newest, or all.")]
OtherRun = Annotated[str | None, typer.Option("--with", metavar="RUN", help="The run or checkpoint to compare with.")]
OtherStep = Annotated[int | None, typer.Option("--with-step", help="The step to compare with.")]
Target = Annotated[str, typer.Option(metavar="FOLDER", help="Where to write weights.safetensors and model.json.")]
Keep = Annotated[int, typer.Option(help="The newest that stay, 2 at least.")]
KeepEvery = Annotated[int, typer.Option(help="Steps whose multiples stay; 0: none.")]

commands = make_group("List, verify, inspect, diff, export or prune what was saved.")


@commands.command("list")
def list_all(run: SavedRun, _debug: Debug = False) -> None:
    """List the checkpoints of every stage, what is not committed too."""
    from jobs.commands import checkpoints

    checkpoints.list_all(run)


@commands.command()
def verify(run: SavedRun, step: Step = None, _debug: Debug = False) -> None:
    """Read every byte and compare it with the manifest."""
    from jobs.commands import checkpoints

    checkpoints.verify_all(run, step)


@commands.command()
def inspect(run: SavedRun, step: Step = None, _debug: Debug = False) -> None:
    """Print the manifest, and every parameter with its size and norms."""
    from jobs.commands import checkpoints

    checkpoints.inspect(run, step)


@commands.command()
def diff(
    run: SavedRun,
    step: Step = None,
    other_run: OtherRun = None,
    other_step: OtherStep = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    _debug: Debug = False,
) -> None:
    """Compare two checkpoints: their manifests, then their states."""
    from jobs.commands import checkpoints

    if more:
        raise UsageError(
            f"diff takes one run, found {' '.join([run, *more])}\n"
            f"  what has changed from the first to the second: diff {more[0]} --with {run}"
        )
    # Without --with, another step of the same run.
    other_run = other_run or run
    if other_run == run and other_step == step:
        raise UsageError("diff needs something to compare with: --with RUN, or --with-step N of the same run")
    checkpoints.compare(run, step, other_run, other_step)


@commands.command()
def export(run: SavedRun, to: Target, step: Step = None, _debug: Debug = False) -> None:
    """Write a checkpoint's weights as its stage would hand them on."""
    from jobs.commands import checkpoints

    checkpoints.export_weights(run, step, Path(to))


@commands.command()
def prune(run: SavedRun, keep: Keep = 2, keep_every: KeepEvery = 0, _debug: Debug = False) -> None:
    """Delete all but the newest checkpoints of every stage."""
    from jobs.commands import checkpoints

    checkpoints.prune(run, keep, keep_every)
