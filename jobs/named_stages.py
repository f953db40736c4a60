"""Find the folder of a run, stage or packed data set by name, so that users need not type stage keys.

    runs/digits/finetune             the newest finished stage `finetune` of the run
    runs/digits                      the newest finished stage with the files needed by the command
    runs/digits/finetune-1a2b3c4d    exactly this folder, like any other existing path
    runs/photos/parts/held-out       the data set `held-out` of the newest finished stage `parts` that packed it

The selected folder is reported on stderr. Nothing here imports torch.
"""

import json
import shlex
import sys
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from data.checks import few, printable_lines
from data.errors import DataError, ExitCode, UsageError
from jobs.stage_folders import CHECKPOINTS, RECORD, TABLE, StageFolder, last_metrics, stage_at, stages_in
from jobs.terminal import for_stream
from models.checks import did_you_mean
from models.weights.folder import CONFIG
from pipeline.artifacts import TASK
from pipeline.checkpoints.manifest import committed, step_of

# Files that a command may need from a stage → their names in messages. Data sets are named by their own names.
READS = {
    CONFIG: "weights",
    TASK: "a training task",
    CHECKPOINTS: "checkpoints",
    TABLE: "a sweep's table",
    RECORD: "a record",
}
USE_EXPORTED = "FOLDER, then use FOLDER as the weights"
OF_UNFINISHED = (TASK, CHECKPOINTS, RECORD)  # files that exist before a stage has finished


def find_stage(path: str, needs: str = CONFIG, *, one_name: bool = False, typed: str = "") -> str:
    """Return the folder of the newest stage at RUN or RUN/STAGE with the file `needs`; return other paths unchanged.

    Weights and data sets come only from finished stages. `typed` is the user's argument, if it differs from `path`.
    Raises DataError if no stage has the file, or UsageError if `one_name` is set and stages with different names have
    the file; both messages list the stages.
    """
    folder = Path(path)
    if "://" in path or (folder / needs).exists():
        return path
    # 1. Candidate stages: the stage in the folder, all stages of the run, or the run's stages of one name.
    name = ""
    stage = stage_at(folder)
    stages = stages_in(folder) if stage is None else [stage]
    if not stages:
        name = folder.name
        stages = stages_in(folder.parent)
    # An existing folder, for example a folder of images, is not a misspelled stage name.
    if folder.exists() and name and name not in map(attrgetter("name"), stages):
        return path
    if not stages:
        return path  # not a run: the caller reports the error

    # 2. Keep the stages with the required file.
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
        text = f"{run / name} has no {READS.get(needs, f'data set {needs!r}')}"
        if not of_name:
            text = f"{run} has no stage {name!r}{did_you_mean(name, set(map(attrgetter('name'), stages)))}"
        text += "\n  stages of this run:"
        for stage in stages:
            sets = sorted(index.parent.name for index in stage.path.glob("*/*.index.json"))
            text += f"\n  {run / stage.name}  {stage}"
            if sets:
                text += f"; data sets: {', '.join(sets)}"
        raise DataError(text)
    addresses = sorted(str(run / name) for name in fitting)
    if one_name and len(addresses) > 1:
        listed = "\n  ".join(addresses)
        raise UsageError(f"{path} has {len(addresses)} stages with {READS[needs]}\n  use one of them:\n  {listed}")

    # 3. Report the selected stage.
    newest = next(iter(fitting.values()))
    addresses.remove(str(run / newest.name))
    line = f"{typed or path}: using {newest}"
    older = [stage for stage in of_name if stage.name == newest.name and stage.is_finished and stage != newest]
    if older and newest.is_finished:
        line += f", the newest of {len(older) + 1} with different settings (older: {few([o.path.name for o in older])})"
    if addresses:
        line += f"; to select another stage, use {' or '.join(addresses)}"
    print(for_stream(printable_lines(line), sys.stderr), file=sys.stderr, flush=True)
    return str(newest.path)


def resume_command(run: Path) -> str:
    """Return the command that resumes a run: the run's last command, or a general one if that cannot be repeated."""
    command = "python -m jobs run ITS_RECIPE"
    with suppress(OSError, ValueError, KeyError):
        status = json.loads((run / "status.json").read_text())
        # Do not suggest a refused command, or the command of a submitted job, whose recipe is only in its environment.
        if status["exit_code"] not in (ExitCode.USAGE, ExitCode.CONFIG) and " env:" not in status["command"]:
            command = status["command"]
    return command


def not_finished(stage: StageFolder) -> DataError:
    """Return the error for an unfinished stage; the message reports its progress and how to get its weights."""
    run = stage.path.parent
    last = last_metrics(stage.path)
    place = "has not reported a step yet"
    if last is not None:
        place = f"is at step {last['step']} of {last['steps']}"
    text = f"{run / stage.name} has not finished: {stage.path.name} {place}\n  to resume it, run {resume_command(run)}"
    for checkpoint in committed(stage.path / CHECKPOINTS)[:1]:
        text += (
            "\n  instead, to use the weights of its newest checkpoint, run\n"
            f"  python -m jobs export {shlex.quote(f'{run / stage.name}/step-{step_of(checkpoint)}')} {USE_EXPORTED}"
        )
    return DataError(text)


def find_set(path: str) -> str:
    """Resolve RUN/STAGE/SET to the folder of the data set; return other paths unchanged.

    Raises DataError if no finished stage has packed the data set.
    """
    folder = Path(path)
    stage = folder.parent
    if "://" in path or folder.exists() or not (stages_in(stage) or stages_in(stage.parent)):
        return path
    return str(Path(find_stage(str(stage), folder.name, typed=path)) / folder.name)
