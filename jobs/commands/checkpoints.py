"""`patchline checkpoints list|prune RUN`: what a run has saved.

A run is named by its directory or URL, by a stage's folder in it, or by one checkpoint's folder. Nothing here opens
anything but JSON. jobs/extras/checkpoints.py reads the tensors.
"""

from typing import Annotated

import typer

from data.errors import CheckpointError, UsageError
from jobs.commands.arguments import Debug
from jobs.commands.stored_runs import opened
from jobs.terminal import echo
from pipeline import artifacts
from pipeline.checkpoints.needed import needed_steps
from pipeline.checkpoints.stage_checkpoints import LEAST_KEPT
from pipeline.monitoring.telemetry import read_metrics, scores_of

SavedRun = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Run directory, a stage in it (RUN/STAGE), or one step-* folder; or s3://…"),
]
Keep = Annotated[int, typer.Option(help="How many of the newest to keep, at least 2.")]
KeepEvery = Annotated[int, typer.Option(help="Keep steps that are multiples of this; 0: none.")]


def list_all(path: SavedRun, _debug: Debug = False) -> None:
    """List the checkpoints of every stage, including uncommitted ones."""
    with opened(path) as run:
        for checkpoints in run.stages:
            echo(f"{checkpoints.stage}:")
            # A step is evaluated after its commit, so its scores are not in its manifest.
            records = read_metrics(run.storage.local / checkpoints.stage, "evaluate")
            evaluations = {record["step"]: record for record in records}
            for name in checkpoints.committed():
                try:
                    manifest = checkpoints.manifest(name)
                except (CheckpointError, OSError) as error:
                    echo(f"  {name}  BAD: {run.in_words(str(error))}")
                    continue
                line = (
                    f"  {name}  {manifest.total_bytes / 1e6:9.1f} MB in {len(manifest.files)} files  "
                    f"world {manifest.world}  ZeRO {manifest.zero}  attempt {manifest.attempt}  "
                    f"ledger {manifest.ledger[:12]}"
                )
                if manifest.step in evaluations:
                    for score, value in scores_of(evaluations[manifest.step]).items():
                        line += f"  {score} {value:.4f}"
                echo(line)
            for name in run.storage.unpublished(checkpoints.folder):
                if name.startswith("bad-"):
                    echo(f"  {name}  refused by a start, kept for you to look at; delete it when you have")
                elif name.startswith(".tmp-old-"):
                    echo(f"  {name}  an old checkpoint on its way out; the next start sweeps what is left of it")
                else:
                    echo(f"  {name}  a save in flight, or one that died; the next start sweeps it")


def prune(path: SavedRun, keep: Keep = 2, keep_every: KeepEvery = 0, _debug: Debug = False) -> None:
    """Delete all but the newest checkpoints of every stage, and those that still have to be evaluated or kept.

    Nothing is deleted if one of the newest is bad.
    """
    if keep < LEAST_KEPT:
        raise UsageError(f"--keep is {keep}, expected {LEAST_KEPT} or more: one checkpoint alone can be bad")
    with opened(path) as run:
        # Never delete in favour of a bad one; and of no stage, before all are known to be good.
        for checkpoints in run.stages:
            for name in checkpoints.committed()[:keep]:
                checkpoints.verify(name)
        for checkpoints in run.stages:
            folder = run.storage.local / checkpoints.stage
            metric = None
            if (folder / artifacts.TASK).exists():
                metric = artifacts.read_record(folder / artifacts.TASK)["config"].get("keep_best")
            needed = needed_steps(folder, metric, checkpoints.committed_steps)
            for name in checkpoints.prune(keep, keep_every, needed):
                echo(f"{checkpoints.stage}: {name} deleted")
