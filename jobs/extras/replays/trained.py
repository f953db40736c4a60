"""Which trained stage a path means to the commands that repeat steps."""

from pathlib import Path

from data.errors import UsageError
from jobs.named_stages import find_stage, no_run
from pipeline.artifacts import TASK


def find_trained(run: str) -> Path:
    """Return the folder of the trained stage that a path means: RUN/STAGE, its folder, or a run with one such stage.

    Raises UsageError where there is none, and for a run in a store.
    """
    if "://" in run:
        raise UsageError(
            f"steps are taken again of a run in a folder, found {run}\n"
            "  status and checkpoints read a run in a store; for the others copy it to a disk first,\n"
            f"  with the store's own tools, for example: aws s3 sync {run} runs/NAME"
        )
    folder = Path(find_stage(run, TASK, one_name=True))
    if not folder.is_dir():
        raise no_run(folder)
    if not (folder / TASK).exists():
        raise UsageError(
            f"there is no trained stage in {run}\n  expected a run directory with one, or a stage's folder: RUN/STAGE"
        )
    return folder
