"""`patchline replay|audit|bisect|without RUN`: repeat steps of a run, never in the run's own folder."""

from typing import Annotated

import typer

from data.errors import UsageError
from jobs.commands.arguments import Debug
from jobs.extras.replays.trained import find_trained

TrainedStage = Annotated[str, typer.Argument(help="RUN/STAGE, a stage's folder, or a run with one trained stage.")]
Stage = Annotated[str, typer.Argument(metavar="RUN", help="RUN/STAGE, a stage's folder, or a run with one such stage.")]
Output = Annotated[str | None, typer.Option(metavar="FOLDER", help="Where it writes; else RUN-COMMAND beside the run.")]
Cluster = Annotated[
    list[str] | None, typer.Argument(metavar="cluster.KEY=VALUE", help="On what; else as the steps were taken.")
]
First = Annotated[int | None, typer.Option("--from", metavar="STEP", help="A commit's step, or 0.")]
Last = Annotated[int | None, typer.Option("--to", metavar="STEP", help="A later commit's step.")]


def replay(
    run: TrainedStage,
    step: Annotated[str, typer.Argument(help="step=N, as the log counts them.")],
    to: Annotated[str | None, typer.Option(metavar="FILE.npz", help="Write images, labels and ids there.")] = None,
    _debug: Debug = False,
) -> None:
    """Rebuild the global batch of one step, as every worker saw it."""
    from jobs.extras.replays.batch import replay

    replay(run, step, to)


def audit(
    run: Stage,
    overrides: Cluster = None,
    share: Annotated[float, typer.Option(help="Of the run's steps, drawn as whole stretches between commits.")] = 0.01,
    first: First = None,
    last: Last = None,
    seed: Annotated[int | None, typer.Option(help="Of the draw; else a random one, which audit.json holds.")] = None,
    output: Output = None,
    key: Annotated[str | None, typer.Option(metavar="FILE", help="SSH key that signs audit.json.")] = None,
    _debug: Debug = False,
) -> None:
    """Prove a training: take stretches of it again, and compare every bit with what the run has kept."""
    run = str(find_trained(run))  # a wrong name does not wait for torch
    from jobs.extras.replays.audit import audit

    audit(run, share=share, first=first, last=last, seed=seed, output=output, key=key, overrides=overrides or [])


def bisect(
    run: Stage,
    words: Annotated[
        list[str],
        typer.Argument(metavar="step=N", help="Optionally metric=grad_norm|loss and cluster.KEY=VALUE."),
    ],
    output: Output = None,
    _debug: Debug = False,
) -> None:
    """Find the samples that caused a spike in loss or gradient norm."""
    run = str(find_trained(run))
    from jobs.extras.replays.bisect import bisect

    bisect(run, words, output=output)


def without(
    run: Stage,
    overrides: Cluster = None,
    samples: Annotated[str | None, typer.Option(metavar="FILE", help="Of one sample a line, or a leaks.json.")] = None,
    shards: Annotated[list[str] | None, typer.Option(metavar="NAME", help="May be given several times.")] = None,
    to: Annotated[int | None, typer.Option(metavar="STEP", help="The last step; else the last commit's.")] = None,
    output: Output = None,
    _debug: Debug = False,
) -> None:
    """Take the steps of a run again as if samples had never been seen, all else equal; say the cost first."""
    run = str(find_trained(run))
    if samples is None and not shards:
        raise UsageError("nothing is named that the run is to be without\n  expected --samples FILE or --shards NAME")
    from jobs.extras.replays.without import without

    without(run, samples=samples, shards=shards or [], to=to, output=output, overrides=overrides or [])
