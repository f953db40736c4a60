"""Find the training stage named by a command's argument, for commands that repeat steps."""

from pathlib import Path

from data.errors import UsageError
from jobs.commands.status import no_run
from jobs.named_stages import find_stage
from pipeline.artifacts import TASK


def find_trained(run: str) -> Path:
    """Return the folder of a trained stage, given as RUN/STAGE, its folder, or a run with a single trained stage.

    Raises UsageError if there is no such stage, or if the run is in an object store.
    """
    if "://" in run:
        raise UsageError(
            f"{run} is in an object store, but only runs in a folder can be repeated\n"
            "  first copy the run to a disk with the store's tools,\n"
            f"  for example: aws s3 sync {run} runs/NAME"
        )
    folder = Path(find_stage(run, TASK, one_name=True))
    if not folder.is_dir():
        raise no_run(folder)
    if not (folder / TASK).exists():
        raise UsageError(f"{run} has no trained stage\n  expected a run directory with one trained stage, or RUN/STAGE")
    return folder
