"""The folders of a run's stages, `<stage>-<first eight characters of its key>`, and the names of files in them.

    stages_in(Path("runs/digits"))    →    [StageFolder("finetune-1a2b3c4d", finished 12:00), …], the newest first

Nothing here imports torch.
"""

import re
import time
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from pipeline.artifacts import DONE, recorded_s

STAGE_FOLDER = re.compile(r"(?P<name>.+)-(?P<key>[0-9a-f]{8})")
CHECKPOINTS = "checkpoints"
RECORD = "stage.json"
TABLE = "sweep.json"


@dataclass(frozen=True)
class StageFolder:
    """The folder of a stage in a run directory."""

    path: Path
    name: str
    is_finished: bool
    time: float  # when it finished or last started, from its records, because copying a run changes file times

    def __str__(self) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        if self.is_finished:
            return f"{self.path.name}, finished {clock}"
        return f"{self.path.name}, not finished, started {clock}"


def stage_at(folder: Path) -> StageFolder | None:
    """Return the stage in a folder, which is named NAME-KEY and has a stage.json; None for any other folder."""
    parts = STAGE_FOLDER.fullmatch(folder.name)
    if parts is None or not (folder / RECORD).exists():
        return None
    if (folder / DONE).exists():
        return StageFolder(folder, parts["name"], True, recorded_s(folder / DONE, "finished"))
    return StageFolder(folder, parts["name"], False, recorded_s(folder / RECORD, "resumed"))


def stages_in(run: Path) -> list[StageFolder]:
    """Return a run directory's stages, finished ones first, newer before older; [] for any other folder."""
    stages = filter(None, map(stage_at, run.glob("*/")))
    return sorted(stages, key=attrgetter("is_finished", "time"), reverse=True)
