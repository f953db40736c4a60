"""`patchline status RUN`: show the progress of a run from the files in its directory."""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.checks import few
from data.errors import CheckpointError, DataError, UsageError
from data.files import MANIFEST, error_text, write_atomically
from data.optional import load_optional
from data.storage import Folder, Storage
from jobs.answer import Answer, Document, Step
from jobs.commands.arguments import Debug, Run
from jobs.named_stages import find_stage, resume_command
from jobs.ownership import RAY_JOB
from jobs.run.reading import read_command, read_outcome, stage_folders
from jobs.stage_folders import RECORD, STAGE_FOLDER, last_metrics, recorded_s
from models.weights.folder import CONFIG
from pipeline import artifacts
from pipeline.artifacts import requested_steps
from pipeline.checkpoints import manifest
from pipeline.monitoring.telemetry import Account, Record, account, read_metrics
from pipeline.values import amount, duration

if TYPE_CHECKING:  # imports the object-store clients, which a local run does not need
    from data.bucket import Bucket

LOCAL_COPY = "jobs.extras.stored_runs:local_copy"


def status(run: Run, _debug: Debug = False) -> Answer:
    """Show each stage's step, loss, speed, ETA and last checkpoint."""
    if "://" not in run:
        return Answer(status_of(run_or_stage(run)), status_lines)
    # Reading an object store imports torch, which local runs do not need.
    from pipeline.checkpoints.stage_checkpoints import StageCheckpoints

    local_copy = load_optional(LOCAL_COPY, "the URL of a run")
    with local_copy(run) as (store, stage):
        for folder in store.local.iterdir():
            # Only the newest manifest is needed: it has the step from which the stage would resume.
            checkpoints = StageCheckpoints(store, folder.name)
            for name in checkpoints.committed()[:1]:
                (checkpoints.local / name).mkdir(parents=True)
                content = store.read(f"{checkpoints.folder}/{name}/{MANIFEST}")
                write_atomically(checkpoints.local / name / MANIFEST, content or b"")
        return Answer(status_of(store.local / stage, store), status_lines)


def run_or_stage(path: str) -> Path:
    """Return the folder of a run, or of a stage given as RUN/STAGE. Raises DataError if the stage does not exist."""
    return Path(path if Path(path).exists() else find_stage(path, RECORD)).resolve()


# ------------------------------------------------------------------------ the document


def status_of(path: Path, store: "Bucket | None" = None) -> Document:
    """Return the status of a run, or of one stage if `path` is its folder.

    For a run in an object store, `path` is a local copy of the run or of one stage. Raises UsageError if there is no
    run, or StorageError if the object store cannot be read.
    """
    run, folders = stage_folders(path)
    if not folders:
        raise no_run(run)
    return status_document(folders, store or Folder(run))


def status_document(folders: Sequence[Path], storage: Storage) -> Document:
    """Return the status of a run's last command and of the stages in these folders, in the order of the folders."""

    # 1. The running command, or how the last one ended.
    def report(text: str) -> None:
        print(f"status: {text}", file=sys.stderr, flush=True)

    last = read_command(storage.local, storage, report)
    steps: list[Step] = []
    is_rays = last.lease is not None and last.lease["job"].startswith(RAY_JOB)
    if last.state in ("stopped", "killed"):
        resume = resume_command(storage.local)
        # A submitted job reads its recipe from its own environment, so its command does not work elsewhere.
        if is_rays or " env:" in last.command:
            run = shlex.quote(storage.address())
            steps.append({"do": "read", "text": f"to resume, run python -m jobs submit RECIPE run={run}"})
        # After a refused command, only the user knows the right one.
        elif resume != last.command:
            steps.append({"do": "read", "text": f"to resume, run {resume}"})
        else:
            steps.append({"do": "instead", "command": resume, "text": f"to resume, run {resume}"})
    address = storage.address()
    command = asdict(last)
    del command["has_lease"]

    # 2. The stages. A command runs one at a time: the unfinished stage that was started last.
    current = running_stage(storage.local)
    stages = []
    for folder in folders:
        has_ended = last.has_ended or folder != current
        stages.append(stage_status(folder, f"{address}/{folder.name}", has_ended=has_ended))
    return {"run": address, "command": command, "stages": stages, "next": steps}


def running_stage(run: Path) -> Path | None:
    """Return the unfinished stage that was started last; others were abandoned with --fresh or a changed recipe."""
    _, folders = stage_folders(run)
    unfinished = [folder for folder in folders if os.path.exists(folder / RECORD)]
    unfinished = [folder for folder in unfinished if not os.path.exists(folder / artifacts.DONE)]
    return max(unfinished, key=lambda folder: recorded_s(folder / RECORD, "resumed"), default=None)


def stage_status(folder: Path, address: str, *, has_ended: bool) -> dict[str, Any]:
    """Return a stage's result or progress; `has_ended` means that no command is running the stage."""
    parts = STAGE_FOLDER.fullmatch(folder.name)
    stage: dict[str, Any] = {
        "name": folder.name if parts is None else parts["name"],
        "folder": address,
        "state": "unfinished" if has_ended else "running",
    }
    with suppress(DataError, PermissionError):  # `read_outcome` reports both
        # The values that a sweep has chosen for the stage.
        chosen = artifacts.read_record(folder / "stage.json").get("chosen", {})
        if chosen:
            stage["chosen"] = chosen
    try:
        outcome = read_outcome(folder)
    except DataError as error:
        return stage | {"state": "unreadable", "problem": str(error).splitlines()[0]}
    except PermissionError as error:
        return stage | {"state": "unreadable", "problem": error_text(error)}
    # 1. A finished stage.
    if outcome is not None:
        stage |= {"state": "done", "seconds": outcome.seconds, "summary": outcome.summary, "metrics": outcome.metrics}
        if (folder / CONFIG).exists() and (artifacts.read_done(folder) or {}).get("files", {}).get(artifacts.WEIGHTS):
            stage["weights"] = address
        if outcome.sets:
            stage["sets"] = {name: f"{address}/{name}" for name in outcome.sets}
        if outcome.diverged:
            stage |= {"state": "diverged", "problem": outcome.diverged}
        return stage

    # 2. An unfinished stage: its newest report has the progress.
    damage: list[str] = []
    records = read_metrics(folder, None, damage)
    stage |= {"time_s": asdict(account(records)), "damage": damage, "notices": current_notices(records)}
    last = last_metrics(folder)
    if last is None:
        return stage
    stage |= {field: last[field] for field in ("step", "steps", "loss", "images_per_s", "eta_s")}
    # Rank 0's clock may be ahead of this machine's.
    stage["age_s"] = max(time.time() - last["time"], 0)
    # Steps that asynchronous evaluation (`evaluate_on: spare`) has not evaluated yet.
    stage["to_evaluate"] = requested_steps(folder)
    # The stage would resume from its newest checkpoint, whose manifest has the step.
    stage["checkpoint_step"] = None
    checkpoints = manifest.committed(folder / "checkpoints")
    if checkpoints:
        try:
            stage["checkpoint_step"] = manifest.read_manifest(checkpoints[0]).step
        except CheckpointError as error:
            stage["problem"] = f"last checkpoint unreadable: {error}"
    return stage


def current_notices(records: Sequence[Record]) -> list[str]:
    """Return the last attempt's notices: the text of each record that has one, unless a later record ends it."""
    current: dict[tuple[str, str], str] = {}  # kind of the record, and what the notice is about
    for record in records:
        if record["kind"] == "start":
            current.clear()
        elif "notice" in record:
            current[record["kind"], record["about"]] = "" if record["is_over"] else record["notice"]
    return list(filter(None, current.values()))


# ------------------------------------------------------------------------ the lines


def status_lines(document: Document) -> Iterator[str]:
    """Yield the run, its last command, and a line per stage."""
    run = document["run"]
    command = document["command"]
    yield f"run  {run}"
    yield f"{'now' if command['state'] == 'running' else 'end'}  {command_line(document)}"
    names = [stage["folder"].rpartition("/")[2] for stage in document["stages"]]
    width = max([24, *map(len, names)])
    for name, stage in zip(names, document["stages"], strict=True):
        line = f"{name:{width}} {stage_line(stage)}"
        if "chosen" in stage:
            line += f"  ({', '.join(f'{field}={value}' for field, value in stage['chosen'].items())})"
        yield line


def command_line(document: Document) -> str:
    """Describe the state of a run's last command in one line."""
    last = document["command"]
    resume = "".join(step["text"] for step in document["next"])
    if last["problem"] == "missing":
        return "unknown: no command has ended yet"
    if last["problem"] == "altered":
        return f"unknown: {document['run']}/status.json is damaged; the next command on this run rewrites it"
    if last["exit_code"] is not None:
        return f"{last['message']} (exit {last['exit_code']}, {last['time']})"
    holder = last["lease"]
    if holder is None and last["state"] == "running":
        return f"running, started {last['time']}: {last['command']}"
    if holder is None:
        return f"ended unexpectedly after its start at {last['time']}, and its lease cannot be read; {resume}"
    process = f"process {holder['pid']}"
    job = f", {holder['job']}" if holder["job"] else ""
    if last["state"] == "running":
        return f"running, started {last['time']} on {holder['host']} ({process}{job}): {last['command']}"
    return (
        f"ended unexpectedly: {process} on {holder['host']}{job}, started {last['time']}, last reported at "
        f"{holder['renewed']} (that machine's clock); {resume}"
    )


def stage_line(stage: Document) -> str:
    """Describe in one line a stage's result or progress."""
    if stage["state"] == "unreadable":
        return f"UNREADABLE: {stage['problem']}"
    if stage["state"] == "diverged":
        return f"DIVERGED after {duration(stage['seconds'])}: {stage['problem']}"
    if stage["state"] == "done":
        line = f"done in {duration(stage['seconds'])}"
        if stage["summary"]:
            line += f"  {stage['summary']}"
        for name, value in stage["metrics"].items():
            line += f"  {name} {value:.4f}"
        return line
    has_ended = stage["state"] == "unfinished"
    problems = "".join(f"\n  {message}" for message in stage["damage"] + stage["notices"])
    if "step" not in stage:
        return ("ended before its first report" if has_ended else "started, no step yet") + problems
    steps = stage["to_evaluate"]
    to_evaluate = f"to be evaluated: steps {', '.join(map(str, steps))}  " if steps else ""
    time_left = f"not running, {duration(stage['eta_s'])} left" if has_ended else f"eta {duration(stage['eta_s'])}"
    saved = "no checkpoint yet"
    if stage["checkpoint_step"] is not None:
        saved = f"last checkpoint step {stage['checkpoint_step']}"
    elif "problem" in stage:
        saved = stage["problem"]
    return (
        f"step {stage['step']}/{stage['steps']}  loss {stage['loss']:.4f}  img/s {amount(stage['images_per_s'])}  "
        f"{time_left}  {duration(stage['age_s'])} ago  {saved}  "
        f"{to_evaluate}{Account(**stage['time_s']).line()}{problems}"
    )


def no_run(path: Path) -> UsageError:
    """Return the error for a path without a run; the message lists runs inside it, next to it, and in ./runs."""
    runs: dict[Path, None] = {}
    for folder, pattern in ((path, "*"), (path, "runs/*"), (Path.cwd(), "runs/*"), (path.parent, "*")):
        for record in sorted(folder.glob(f"{pattern}/*/{RECORD}")):
            runs.setdefault(record.parents[1].resolve())
    listed = []
    for run in runs:
        # Show relative paths if possible: they are shorter to type.
        if run.is_relative_to(Path.cwd()):
            run = run.relative_to(Path.cwd())
        listed.append(shlex.quote(str(run)))
    remark = ""
    if path.suffix in (".yaml", ".yml") and path.is_file():
        remark = ", which is a recipe"
    text = f"no run at {path}{remark}\n  expected a run directory or a stage's folder in it"
    if listed:
        return UsageError(f"{text}; runs nearby: {few(listed, 8, ', and {} more')}")
    # The recipe with the run's name, any recipe here, or a built-in one.
    _, recipe = min(((file.stem != path.name, file.name) for file in Path.cwd().glob("*.yaml")), default=(1, "digits"))
    return UsageError(f"{text}; there are no runs nearby\n  to start one, run python -m jobs run {shlex.quote(recipe)}")
