"""The name of a checkpoint at the end of a path or URL: RUN/STAGE/step-50."""

import re

CHECKPOINT_NAME = re.compile(r"step-\d+(-\d+)?")  # short, "step-50", or of a folder, "step-0000000050-000002"


def names_checkpoint(path: str) -> bool:
    """Return whether the last part of a path or URL is the name of a checkpoint, such as "step-50"."""
    return CHECKPOINT_NAME.fullmatch(path.rstrip("/").rpartition("/")[2]) is not None
