"""Which folder a person means by a run or by a stage in it: names in the place of keys, in every command.

    runs/digits/finetune             the newest finished stage `finetune` of that run
    runs/digits                      the newest finished stage of any name that has what the command reads
    runs/digits/finetune-1a2b3c4d    that folder, as any other path that is there

What was taken is said in one line on stderr. Nothing here imports torch.
"""

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from data.checks import printable_lines
from data.errors import DataError, UsageError
from models.checks import did_you_mean
from models.weights.folder import CONFIG
from pipeline.artifacts import DONE, TASK

STAGE_FOLDER = re.compile(r"(?P<name>.+)-(?P<key>[0-9a-f]{8})")
CHECKPOINTS = "checkpoints"
READS = {
    CONFIG: "weights",
    TASK: "training",
    CHECKPOINTS: "checkpoints",
    "sweep.json": "a sweep's table",
}  # what a command may need → in words


@dataclass(frozen=True)
class StageFolder:
    """The folder of a stage in a run directory."""

    path: Path
    name: str
    key: str
    is_finished: bool
    time: float  # when it was finished, or was last started


def stages_in(run: Path) -> list[StageFolder]:
    """Return the stages of a run directory, the newest first, finished ones before others; none of another folder."""
    stages = []
    for record in run.glob("*/stage.json"):
        parts = STAGE_FOLDER.fullmatch(record.parent.name)
        if parts is None:
            continue
        done = record.with_name(DONE)
        is_finished = done.exists()
        changed = (done if is_finished else record).stat().st_mtime
        stages.append(StageFolder(record.parent, parts["name"], parts["key"], is_finished, changed))
    return sorted(stages, key=lambda stage: (stage.is_finished, stage.time), reverse=True)


def find_stage(path: str, needs: str = CONFIG, *, one_name: bool = False) -> str:
    """Return the folder that a path means: the path itself, or that of the newest stage with the file `needs`.

    Weights are those of finished stages. Raises UsageError where a run has stages of several names and `one_name` asks
    for one, DataError where it has none that fits; both list what is there.
    """
    folder = Path(path)
    if "://" in path or (folder / needs).exists():
        return path
    name = ""
    stages = stages_in(folder)
    if not stages and not folder.exists():
        name = folder.name
        stages = stages_in(folder.parent)
    if not stages:
        return path  # no run: whoever reads it says what is wrong

    fitting = []
    for stage in stages:
        has_it = (stage.path / needs).exists() and (stage.is_finished or needs != CONFIG)
        if has_it and name in ("", stage.name):
            fitting.append(stage)
    run = stages[0].path.parent
    there = []
    for stage in stages:
        state = "finished" if stage.is_finished else "not finished"
        there.append(f"  {stage.path}  {state} {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(stage.time))}")
    if not fitting:
        of_name = f" of the name {name!r}{did_you_mean(name, {stage.name for stage in stages})}" if name else ""
        state = "no finished stage" if needs == CONFIG else "no stage"
        raise DataError("\n".join([f"{run} has {state} with {READS[needs]}{of_name}\n  its stages:", *there]))
    names = sorted({stage.name for stage in fitting})
    if one_name and len(names) > 1:
        listed = "\n".join(f"  {run / name}" for name in names)
        raise UsageError(f"{path} has {len(names)} stages with {READS[needs]}\n  name one:\n{listed}")

    taken = fitting[0]
    state = "finished" if taken.is_finished else "not finished, started"
    line = f"{path}: {taken.path.name}, {state} {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(taken.time))}"
    others = [name for name in names if name != taken.name]
    if others:
        line += f"; for another type {' or '.join(str(run / name) for name in others)}"
    print(printable_lines(line), file=sys.stderr, flush=True)
    return str(taken.path)
