"""Finds the trained stage that a path names, for commands that repeat steps."""

from pathlib import Path

from data.errors import UsageError
from jobs.named_stages import find_stage, no_run
from pipeline.artifacts import TASK


def find_trained(run: str) -> Path:
    """Return the folder of the trained stage that a path names: RUN/STAGE, its folder, or a run with one such stage.

    Raises UsageError if there is none, or if the run is in an object store.
    """
    if "://" in run:
        raise UsageError(
            f"steps can only be repeated for a run in a folder, but {run} is in an object store\n"
            "  copy the run to a disk first, with the tools of the store,\n"
            f"  for example: aws s3 sync {run} runs/NAME"
        )
    folder = Path(find_stage(run, TASK, one_name=True))
    if not folder.is_dir():
        raise no_run(folder)
    if not (folder / TASK).exists():
        raise UsageError(f"{run} has no trained stage\n  expected a run directory with one trained stage, or RUN/STAGE")
    return folder
