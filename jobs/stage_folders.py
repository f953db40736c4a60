"""The folders of a run's stages, `<stage>-<first eight characters of its key>`, their times and newest reports.

    stages_in(Path("runs/digits"))    →    [StageFolder("finetune-1a2b3c4d", finished 12:00), …], the newest first

Nothing here imports torch.
"""

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from data.errors import DataError
from pipeline.artifacts import DONE, read_record
from pipeline.monitoring.telemetry import TAIL_BYTES, Record, records_in

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


def started_s(folder: Path) -> float:
    """Return the Unix time, in seconds, at which a stage first started."""
    return recorded_s(folder / RECORD, "started")


def recorded_s(path: Path, entry: str) -> float:
    """Return the Unix time that a record stores under `entry`, or the file's mtime if the entry is missing.

    The mtime is also returned if the record is truncated or altered.
    """
    # The stage's status line reports altered records.
    with suppress(DataError):
        moment = read_record(path).get(entry)
        if moment is not None:
            return moment
    return path.stat().st_mtime


def last_metrics(directory: Path) -> Record | None:
    """Return the newest training record, reading only the end of metrics.jsonl; None if there is none."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()  # the first may be incomplete
    for record in records_in(reversed(lines), path):
        if record["kind"] == "train":
            return record
    return None
