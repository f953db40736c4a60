"""`patchline status RUN`: show the progress of a run from the files in its directory."""

import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from data.checks import few
from data.errors import CheckpointError, DataError, UsageError
from data.files import MANIFEST, write_atomically
from data.storage import Folder, Storage
from jobs.commands.arguments import Debug, Run
from jobs.named_stages import RECORD, find_stage
from jobs.ownership import RAY_JOB
from jobs.run.reading import LastCommand, read_command, read_outcome, stage_folders
from jobs.terminal import echo
from pipeline import artifacts
from pipeline.checkpoints import manifest
from pipeline.checkpoints.needed import requested_steps
from pipeline.monitoring.telemetry import account, last_metrics, read_metrics
from pipeline.values import amount, duration

if TYPE_CHECKING:  # imports the object-store clients, which a local run does not need
    from data.bucket import Bucket


def status(run: Run, _debug: Debug = False) -> None:
    """Show each stage's step, loss, speed, ETA and last checkpoint."""
    if "://" not in run:
        print_status(run_or_stage(run))
        return
    # Reading an object store imports torch, which local runs do not need.
    from jobs.commands.stored_runs import local_copy
    from pipeline.checkpoints.stage_checkpoints import StageCheckpoints

    with local_copy(run) as (store, stage):
        for folder in store.local.iterdir():
            # Only the newest manifest is needed: it has the step from which the stage would resume.
            checkpoints = StageCheckpoints(store, folder.name)
            for name in checkpoints.committed()[:1]:
                (checkpoints.local / name).mkdir(parents=True)
                content = store.read(f"{checkpoints.folder}/{name}/{MANIFEST}")
                write_atomically(checkpoints.local / name / MANIFEST, content or b"")
        print_status(store.local / stage, store)


def run_or_stage(path: str) -> Path:
    """Return the folder of a run, or of a stage given as RUN/STAGE. Raises DataError."""
    return Path(path if Path(path).exists() else find_stage(path, RECORD)).resolve()


def print_status(run: Path, store: "Bucket | None" = None) -> None:
    """Print one line per stage, in the order of the stages' first start, or only the line of one stage.

    For a run in an object store, `run` is a local copy of the run or of one stage; the output shows the URL. Raises
    UsageError if there is no run, and StorageError if the object store cannot be read.
    """
    # 1. The stages. Each stage folder has a stage.json from the start.
    run, folders = stage_folders(run)
    if not folders:
        raise no_run(run)

    # 2. The running command, or how the last one ended.
    def report(text: str) -> None:
        print(f"status: {text}", file=sys.stderr, flush=True)

    storage = store or Folder(run)
    last = read_command(run, storage, report)
    label = "now" if last.state == "running" else "end"

    # 3. A line per stage, with the values that a sweep has chosen for it.
    lines = [f"run  {run}", f"{label}  {describe(last, run, storage)}"]
    width = max(24, *(len(folder.name) for folder in folders))
    for folder in folders:
        line = f"{folder.name:{width}} {stage_line(folder, has_ended=last.has_ended)}"
        with suppress(DataError):  # `stage_line` reports a damaged record
            chosen = artifacts.read_record(folder / "stage.json").get("chosen", {})
            if chosen:
                line += f"  ({', '.join(f'{field}={value}' for field, value in chosen.items())})"
        lines.append(line)
    for line in lines:
        if store is not None:
            line = line.replace(str(run), store.url)
        echo(line)


def describe(last: LastCommand, run: Path, storage: Storage) -> str:
    """Describe the state of a run's last command in one line."""
    if last.problem == "missing":
        return "unknown: no command has ended yet"
    if last.problem == "altered":
        return f"unknown: {run / 'status.json'} is damaged; the next command on this run rewrites it"
    if last.exit_code is not None:
        return f"{last.message} (exit {last.exit_code}, {last.time})"
    holder = last.lease
    if holder is None and last.state == "running":
        return f"running, started {last.time}: {last.command}"
    if holder is None:
        return (
            f"ended unexpectedly after its start at {last.time}, and its lease cannot be read; "
            f"to resume, run {last.command}"
        )
    process = f"process {holder['pid']}"
    job = f", {holder['job']}" if holder["job"] else ""
    if last.state == "running":
        return f"running, started {last.time} on {holder['host']} ({process}{job}): {last.command}"
    # A submitted job reads its recipe from its own environment, so its command does not work elsewhere.
    resume_command = last.command
    if holder["job"].startswith(RAY_JOB):
        resume_command = f"python -m jobs submit RECIPE run={storage.address()}"
    return (
        f"ended unexpectedly: {process} on {holder['host']}{job}, started {last.time}, last reported at "
        f"{holder['renewed']} (that machine's clock); to resume, run {resume_command}"
    )


def stage_line(folder: Path, *, has_ended: bool) -> str:
    """Return a line with a stage's result or progress; `has_ended` means that no command is running the campaign."""
    try:
        outcome = read_outcome(folder)
    except DataError as error:
        return f"UNREADABLE: {str(error).splitlines()[0]}"
    # 1. A finished stage.
    if outcome is not None:
        took = duration(outcome.seconds)
        if outcome.diverged:
            return f"DIVERGED after {took}: {outcome.diverged}"
        line = f"done in {took}"
        if outcome.summary:
            line += f"  {outcome.summary}"
        for name, value in outcome.metrics.items():
            line += f"  {name} {value:.4f}"
        return line

    # 2. An unfinished stage: its newest report has the progress.
    damage: list[str] = []
    spent = account(read_metrics(folder, None, damage))
    problems = "".join(f"\n  {message}" for message in damage)
    last = last_metrics(folder)
    if last is None:
        return ("ended before its first report" if has_ended else "started, no step yet") + problems
    # Steps that asynchronous evaluation (`evaluate_on: spare`) has not evaluated yet.
    steps = requested_steps(folder)
    to_evaluate = f"to be evaluated: steps {', '.join(map(str, steps))}  " if steps else ""
    # Rank 0's clock may be ahead of this machine's.
    age_s = max(time.time() - last["time"], 0)
    time_left = f"eta {duration(last['eta_s'])}"
    if has_ended:
        time_left = f"not running, {duration(last['eta_s'])} left"
    # The stage would resume from its newest checkpoint, whose manifest has the step.
    saved = "no checkpoint yet"
    checkpoints = manifest.committed(folder / "checkpoints")
    if checkpoints:
        try:
            saved = f"last checkpoint step {manifest.read_manifest(checkpoints[0]).step}"
        except CheckpointError as error:
            saved = f"last checkpoint unreadable: {error}"
    return (
        f"step {last['step']}/{last['steps']}  loss {last['loss']:.4f}  img/s {amount(last['images_per_s'])}  "
        f"{time_left}  {duration(age_s)} ago  {saved}  "
        f"{to_evaluate}{spent.line()}{problems}"
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
    return UsageError(f"{text}; there are no runs nearby\n  to start one, run python -m jobs run RECIPE")
