"""`patchline replay|audit|bisect|without RUN`: repeat steps of a run in a separate folder."""

from typing import Annotated

import typer

from data.errors import UsageError
from jobs.answer import Answer, report_lines
from jobs.commands.arguments import Debug
from jobs.extras.replays.trained import find_trained

TrainedStage = Annotated[str, typer.Argument(help="RUN/STAGE, a stage's folder, or a run with one training stage.")]
Stage = Annotated[
    str, typer.Argument(metavar="RUN", help="RUN/STAGE, a stage's folder, or a run with one training stage.")
]
Output = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Output folder; default: RUN-COMMAND next to the run.")
]
Cluster = Annotated[
    list[str] | None,
    typer.Argument(metavar="cluster.KEY=VALUE", help="Cluster settings for the repetition; default: those of the run."),
]
First = Annotated[
    int | None,
    typer.Option("--from", metavar="STEP", help="Step of the commit to start from, or 0 for the initial weights."),
]
Last = Annotated[int | None, typer.Option("--to", metavar="STEP", help="Step of the commit to stop at.")]


def replay(
    run: TrainedStage,
    step: Annotated[str, typer.Argument(help="Step to repeat, step=N, numbered as in the log.")],
    to: Annotated[
        str | None, typer.Option(metavar="FILE.npz", help="Write images, labels and ids to this file.")
    ] = None,
    _debug: Debug = False,
) -> Answer:
    """Rebuild the global batch of one step exactly as the workers saw it."""
    from jobs.extras.replays.batch import replay

    return Answer(replay(run, step, to), report_lines)


def audit(
    run: Stage,
    overrides: Cluster = None,
    share: Annotated[
        float, typer.Option(help="Fraction of the run's steps to repeat, in stretches between commits.")
    ] = 0.01,
    first: First = None,
    last: Last = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed for the choice of stretches; default: random, stored in audit.json.")
    ] = None,
    output: Output = None,
    key: Annotated[str | None, typer.Option(metavar="FILE", help="SSH key that signs audit.json.")] = None,
    _debug: Debug = False,
) -> Answer:
    """Verify a training run: repeat parts of it, and compare every bit with the run's records."""
    run = str(find_trained(run))  # report a wrong name before importing torch
    from jobs.extras.replays.audit import audit

    report = audit(
        run, share=share, first=first, last=last, seed=seed, output=output, key=key, overrides=overrides or []
    )
    return Answer(report)


def bisect(
    run: Stage,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="step=N", help="Step of the spike; optionally also metric=grad_norm|loss and cluster.KEY=VALUE."
        ),
    ],
    output: Output = None,
    _debug: Debug = False,
) -> Answer:
    """Find the samples that caused a spike in the loss or gradient norm."""
    run = str(find_trained(run))
    from jobs.extras.replays.bisect import bisect

    return Answer(bisect(run, words, output=output))


def without(
    run: Stage,
    overrides: Cluster = None,
    samples: Annotated[
        str | None, typer.Option(metavar="FILE", help="File of samples to remove: one per line, or a leaks.json.")
    ] = None,
    shards: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Shard to remove; repeatable.")] = None,
    to: Annotated[
        int | None, typer.Option(metavar="STEP", help="Last step to repeat; default: the step of the last commit.")
    ] = None,
    output: Output = None,
    _debug: Debug = False,
) -> Answer:
    """Repeat a run without some samples, leaving everything else unchanged; print the cost first."""
    run = str(find_trained(run))
    if samples is None and not shards:
        raise UsageError("no samples to remove are given\n  add --samples FILE or --shards NAME")
    from jobs.extras.replays.without import without

    return Answer(without(run, samples=samples, shards=shards or [], to=to, output=output, overrides=overrides or []))
