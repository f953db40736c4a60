"""Which folder a person means by a run, a stage or a set in it: names in the place of keys, in every command.

    runs/digits/finetune             the newest finished stage `finetune` of that run
    runs/digits                      the newest finished stage of any name that has what the command reads
    runs/digits/finetune-1a2b3c4d    that folder, as any other path that is there
    runs/photos/parts/held-out       the set `held-out` of the newest finished stage `parts` that has made one

What was taken is said in one line on stderr. Nothing here imports torch.
"""

import difflib
import json
import re
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from data.checks import few, printable_lines
from data.errors import DataError, ExitCode, UsageError
from jobs.terminal import for_stream
from models.checks import did_you_mean
from models.weights.folder import CONFIG
from pipeline.artifacts import DONE, TASK, recorded_s
from pipeline.checkpoints.manifest import committed, step_of
from pipeline.monitoring.telemetry import last_metrics

STAGE_FOLDER = re.compile(r"(?P<name>.+)-(?P<key>[0-9a-f]{8})")
CHECKPOINTS = "checkpoints"
RECORD = "stage.json"
TABLE = "sweep.json"
# What a command may need of a stage, in words; a set goes by its name.
READS = {CONFIG: "weights", TASK: "training", CHECKPOINTS: "checkpoints", TABLE: "a sweep's table", RECORD: "a record"}
MOST_RUNS = 8  # that a message lists
OF_UNFINISHED = (TASK, CHECKPOINTS, RECORD)  # that an unfinished stage has too


@dataclass(frozen=True)
class StageFolder:
    """The folder of a stage in a run directory."""

    path: Path
    name: str
    is_finished: bool
    time: float  # when it finished, or was last started, as it has recorded: a copy of a run has other file times

    def __str__(self) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        if self.is_finished:
            return f"{self.path.name}, finished {clock}"
        return f"{self.path.name}, not finished, started {clock}"


def stage_at(folder: Path) -> StageFolder | None:
    """Return the stage of a folder that is called as those of stages are, and holds the record of one."""
    parts = STAGE_FOLDER.fullmatch(folder.name)
    if parts is None or not (folder / RECORD).exists():
        return None
    if (folder / DONE).exists():
        return StageFolder(folder, parts["name"], True, recorded_s(folder / DONE, "finished"))
    return StageFolder(folder, parts["name"], False, recorded_s(folder / RECORD, "resumed"))


def stages_in(run: Path) -> list[StageFolder]:
    """Return the stages of a run directory, the newest first, finished ones before others; none of another folder."""
    stages = filter(None, map(stage_at, run.glob("*/")))
    return sorted(stages, key=attrgetter("is_finished", "time"), reverse=True)


def find_stage(path: str, needs: str = CONFIG, *, one_name: bool = False, typed: str = "") -> str:
    """Return the folder that a path means: the path itself, or that of the newest stage with the file `needs`.

    Weights and sets are those of finished stages. Raises UsageError where a run has stages of several names and
    `one_name` asks for one, DataError where it has none that fits; both list what is there. `typed` is what a person
    has typed, where that is not the path.
    """
    folder = Path(path)
    if "://" in path or (folder / needs).exists():
        return path
    # 1. The stages that the path may mean: that of the folder, all of a run, or those of a name in a run.
    name = ""
    stage = stage_at(folder)
    stages = stages_in(folder) if stage is None else [stage]
    if not stages:
        name = folder.name
        stages = stages_in(folder.parent)
    # A folder of another kind, as one with pictures, is no misspelt name of a stage.
    if folder.exists() and name and name not in map(attrgetter("name"), stages):
        return path
    if not stages:
        return path  # no run: whoever reads it says what is wrong

    # 2. Those of them that have what the command reads.
    run = stages[0].path.parent
    of_name = []
    fitting: dict[str, StageFolder] = {}  # by name, the newest of each
    for stage in stages:
        if name in ("", stage.name):
            of_name.append(stage)
            if (stage.path / needs).exists() and (stage.is_finished or needs in OF_UNFINISHED):
                fitting.setdefault(stage.name, stage)
    if not fitting:
        for stage in of_name:
            if needs == CONFIG and not stage.is_finished and (stage.path / TASK).exists():
                raise not_finished(stage)
        text = f"{run / name} has no {READS.get(needs, f'set {needs!r}')}"
        if not of_name:
            text = f"{run} has no stage {name!r}{did_you_mean(name, set(map(attrgetter('name'), stages)))}"
        text += "\n  the stages of this run:"
        for stage in stages:
            sets = sorted(index.parent.name for index in stage.path.glob("*/*.index.json"))
            text += f"\n  {run / stage.name}  {stage}"
            if sets:
                text += f": sets {', '.join(sets)}"
        raise DataError(text)
    addresses = sorted(str(run / name) for name in fitting)
    if one_name and len(addresses) > 1:
        listed = "\n  ".join(addresses)
        raise UsageError(f"{path} has {len(addresses)} stages with {READS[needs]}\n  name one:\n  {listed}")

    # 3. What was taken is said.
    taken = next(iter(fitting.values()))
    addresses.remove(str(run / taken.name))
    line = f"{typed or path}: {taken}"
    if addresses:
        line += f"; for another type {' or '.join(addresses)}"
    print(for_stream(printable_lines(line), sys.stderr), file=sys.stderr, flush=True)
    return str(taken.path)


def no_run(path: Path) -> UsageError:
    """Return the error of a path at which there is no run, with those below it, in runs/ here, and beside it."""
    runs: dict[Path, None] = {}
    for folder, pattern in ((path, "*"), (path, "runs/*"), (Path.cwd(), "runs/*"), (path.parent, "*")):
        for record in sorted(folder.glob(f"{pattern}/*/{RECORD}")):
            runs.setdefault(record.parents[1].resolve())
    listed = []
    for run in runs:
        # As short as it can be typed here.
        if run.is_relative_to(Path.cwd()):
            run = run.relative_to(Path.cwd())
        listed.append(shlex.quote(str(run)))
    remark = ""
    if path.suffix in (".yaml", ".yml") and path.is_file():
        remark = ", which is a recipe"
    text = f"no run at {path}{remark}\n  expected the folder that `run` says, or a stage's folder in it"
    if listed:
        return UsageError(f"{text}; runs here: {few(listed, MOST_RUNS, ', and {} more')}")
    return UsageError(f"{text}; there is none here, below or beside\n  python -m jobs run RECIPE makes one")


def near_path(path: str) -> str:
    """Return "; did you mean 'photos/cat'?" where the folder of a missing path has a name like it, or else nothing."""
    missing = Path(path)
    rest: list[str] = []
    while not missing.parent.exists():
        rest.insert(0, missing.name)
        missing = missing.parent
    names = {}
    with suppress(OSError):
        for entry in missing.parent.glob("*"):
            names[entry.name.lower()] = entry
    close = difflib.get_close_matches(missing.name.lower(), names, n=1)
    if not close:
        return ""
    near = names[close[0]]
    # With the rest of what was typed, where that is there too.
    if near.joinpath(*rest).exists():
        near = near.joinpath(*rest)
    return f"; did you mean {str(near)!r}?"


def not_finished(stage: StageFolder) -> DataError:
    """Return the error of a stage whose weights are still being trained: how far it is, and what makes them."""
    run = stage.path.parent
    last = last_metrics(stage.path)
    place = "has no report yet"
    if last is not None:
        place = f"stands at step {last['step']} of {last['steps']}"
    command = "python -m jobs run RECIPE"
    with suppress(OSError, ValueError, KeyError):
        status = json.loads((run / "status.json").read_text())
        # A command that was refused is none to repeat; the recipe of a submitted job is in its environment alone.
        if status["exit_code"] not in (ExitCode.USAGE, ExitCode.CONFIG) and " env:" not in status["command"]:
            command = status["command"]
    text = f"{run / stage.name} has not finished: {stage.path.name} {place}\n  to go on with it type {command}"
    for checkpoint in committed(stage.path / CHECKPOINTS)[:1]:
        text += (
            f"\n  the weights of step {step_of(checkpoint)}, its newest checkpoint: type\n"
            f"  python -m jobs checkpoints export {run / stage.name} --to FOLDER, then name FOLDER"
        )
    return DataError(text)


def find_set(path: str) -> str:
    """Return the folder of the set that a path means: the path itself, or RUN/STAGE/SET. Raises DataError."""
    folder = Path(path)
    stage = folder.parent
    if "://" in path or folder.exists() or not (stages_in(stage) or stages_in(stage.parent)):
        return path
    return str(Path(find_stage(str(stage), folder.name, typed=path)) / folder.name)
