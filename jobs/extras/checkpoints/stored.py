"""`patchline checkpoints list|prune RUN`: list or delete the checkpoints of a run.

RUN is a run directory or URL, a stage in it (RUN/STAGE), or a checkpoint (RUN/STAGE/step-50). These commands read only
JSON files; commands that read tensors are in contents.py.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from data.errors import CheckpointError, UsageError
from jobs.answer import Answer, Document
from jobs.commands.arguments import Debug
from jobs.extras.stored_runs import OpenedRun, opened
from jobs.terminal import echo
from pipeline import artifacts
from pipeline.checkpoints.stage_checkpoints import MIN_KEPT, StageCheckpoints
from pipeline.extras.needed import needed_steps, scores_of
from pipeline.monitoring.telemetry import read_metrics

SavedRun = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run directory, a stage (RUN/STAGE), or one checkpoint (RUN/STAGE/step-50); or s3://…"
    ),
]
RunOrStage = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a stage (RUN/STAGE); or s3://…")]
Keep = Annotated[int, typer.Option(help="Number of newest checkpoints to keep in each stage, at least 2.")]
KeepEvery = Annotated[
    int, typer.Option(help="Also keep the checkpoints of steps divisible by this number; 0: no others.")
]


def list_all(path: SavedRun, _debug: Debug = False) -> Answer:
    """List the checkpoints of each stage, including uncommitted and damaged checkpoints."""
    with opened(path) as run:
        stages = [stage_checkpoints(run, checkpoints) for checkpoints in run.stages]
        return Answer({"run": run.storage.address(), "stages": stages}, checkpoint_lines)


def stage_checkpoints(run: OpenedRun, checkpoints: StageCheckpoints) -> dict[str, Any]:
    """Return a stage's checkpoints, newest first, with metrics, and the names of damaged or unfinished checkpoints."""
    # Scores come from metrics.jsonl; the manifest has none, because a step is evaluated after its commit.
    damage: list[str] = []
    records = read_metrics(run.storage.local / checkpoints.stage, "evaluate", damage)
    evaluations = {record["step"]: record for record in records}
    committed: list[dict[str, Any]] = []
    for name in checkpoints.committed():
        try:
            manifest = checkpoints.manifest(name)
        except (CheckpointError, OSError) as error:
            committed.append({"name": name, "problem": run.in_words(str(error))})
            continue
        entry = {
            "name": name,
            "step": manifest.step,
            "bytes": manifest.total_bytes,
            "files": len(manifest.files),
            "world": manifest.world,
            "zero": manifest.zero,
            "attempt": manifest.attempt,
            "ledger": manifest.ledger,
        }
        if manifest.step in evaluations:
            entry["metrics"] = scores_of(evaluations[manifest.step])
        committed.append(entry)
    return {
        "stage": checkpoints.stage,
        "checkpoints": committed,
        "unpublished": run.storage.unpublished(checkpoints.folder),
        "damage": list(map(run.in_words, damage)),
    }


def checkpoint_lines(document: Document) -> Iterator[str]:
    """Yield the lines of `checkpoints list`."""
    for stage in document["stages"]:
        yield f"{stage['stage']}:"
        for message in stage["damage"]:
            yield f"  {message}"
        for entry in stage["checkpoints"]:
            if "problem" in entry:
                yield f"  {entry['name']}  BAD: {entry['problem']}"
                continue
            line = (
                f"  {entry['name']}  {entry['bytes'] / 1e6:9.1f} MB in {entry['files']} files  "
                f"world {entry['world']}  ZeRO {entry['zero']}  attempt {entry['attempt']}  "
                f"ledger {entry['ledger'][:12]}"
            )
            for score, value in entry.get("metrics", {}).items():
                line += f"  {score} {value:.4f}"
            yield line
        for name in stage["unpublished"]:
            if name.startswith("bad-"):
                yield f"  {name}  failed verification when the stage started; kept for inspection, safe to delete"
            elif name.startswith(".tmp-old-"):
                yield f"  {name}  old checkpoint, partially deleted; the next start deletes the rest"
            else:
                yield f"  {name}  uncommitted save, in progress or interrupted; the next start deletes it"


def prune(path: RunOrStage, keep: Keep = 2, keep_every: KeepEvery = 0, _debug: Debug = False) -> Answer:
    """Delete all but the newest checkpoints of each stage.

    The newest checkpoints are verified first; if any is damaged, nothing is deleted. Checkpoints waiting for an
    evaluation, and the best checkpoint if the recipe keeps it, are not deleted either.
    """
    if keep < MIN_KEPT:
        raise UsageError(f"--keep is {keep}, expected {MIN_KEPT} or more, in case one checkpoint is damaged")
    with opened(path) as run:
        if run.only:
            raise UsageError(
                f"{path} is one checkpoint, but prune deletes all except the newest ones of a stage; nothing was "
                "deleted\n  expected a run or a stage: RUN or RUN/STAGE"
            )
        # Verify all stages before deleting anything, so that no good checkpoint is deleted in favour of a damaged one.
        for checkpoints in run.stages:
            for name in checkpoints.committed()[:keep]:
                checkpoints.verify(name)
        deleted: dict[str, list[str]] = {}
        for checkpoints in run.stages:
            folder = run.storage.local / checkpoints.stage
            metric = None
            if (folder / artifacts.TASK).exists():
                metric = artifacts.read_record(folder / artifacts.TASK)["config"].get("keep_best")
            needed = needed_steps(folder, metric, checkpoints.committed_steps)
            deleted[checkpoints.stage] = checkpoints.prune(keep, keep_every, needed)
            # Now, because the next stage may fail: what is gone must have been reported.
            for name in deleted[checkpoints.stage]:
                echo(f"{checkpoints.stage}: {name} deleted")
        return Answer({"run": run.storage.address(), "deleted": deleted})
