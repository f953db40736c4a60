"""`patchline checkpoints list|prune RUN`: list or delete the checkpoints of a run.

RUN is a run directory or URL, a stage's folder in it, or a checkpoint's folder. These commands read only JSON
files; commands that read tensors are in jobs/extras/checkpoints.py.
"""

from typing import Annotated

import typer

from data.errors import CheckpointError, UsageError
from jobs.commands.arguments import Debug
from jobs.commands.stored_runs import opened
from jobs.terminal import echo
from pipeline import artifacts
from pipeline.checkpoints.needed import needed_steps
from pipeline.checkpoints.stage_checkpoints import MIN_KEPT
from pipeline.monitoring.telemetry import read_metrics, scores_of

SavedRun = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run directory, a stage (RUN/STAGE), or one checkpoint's step-* folder; or s3://…"
    ),
]
Keep = Annotated[int, typer.Option(help="Number of newest checkpoints to keep in each stage, at least 2.")]
KeepEvery = Annotated[
    int, typer.Option(help="Also keep the checkpoints of steps divisible by this number; 0: no others.")
]


def list_all(path: SavedRun, _debug: Debug = False) -> None:
    """List the checkpoints of each stage, including uncommitted and damaged checkpoints."""
    with opened(path) as run:
        for checkpoints in run.stages:
            echo(f"{checkpoints.stage}:")
            # Scores come from metrics.jsonl; the manifest has none, because a step is evaluated after its commit.
            damage: list[str] = []
            records = read_metrics(run.storage.local / checkpoints.stage, "evaluate", damage)
            for message in damage:
                echo(f"  {run.in_words(message)}")
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
                    echo(f"  {name}  failed verification when the stage started; kept for inspection, safe to delete")
                elif name.startswith(".tmp-old-"):
                    echo(f"  {name}  old checkpoint, partially deleted; the next start deletes the rest")
                else:
                    echo(f"  {name}  uncommitted save, in progress or interrupted; the next start deletes it")


def prune(path: SavedRun, keep: Keep = 2, keep_every: KeepEvery = 0, _debug: Debug = False) -> None:
    """Delete all but the newest checkpoints of each stage.

    The newest checkpoints are verified first; if any is damaged, nothing is deleted. Checkpoints waiting for an
    evaluation, and the best checkpoint if the recipe keeps it, are not deleted either.
    """
    if keep < MIN_KEPT:
        raise UsageError(f"--keep is {keep}, expected {MIN_KEPT} or more, in case one checkpoint is damaged")
    with opened(path) as run:
        # Verify all stages before deleting anything, so that no good checkpoint is deleted in favour of a damaged one.
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
