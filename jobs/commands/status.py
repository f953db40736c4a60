"""The work of `patchline status RUN`: where a run stands, from its directory alone."""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, cast

from data.errors import CheckpointError, DataError
from data.storage import Folder, Storage
from jobs.named_stages import no_run
from jobs.ownership import RAY_JOB, judge
from jobs.terminal import echo
from pipeline import artifacts
from pipeline.checkpoints import manifest
from pipeline.extras import async_evaluation
from pipeline.monitoring.telemetry import account, last_metrics, read_metrics, without_single_seeds
from pipeline.values import amount, duration

if TYPE_CHECKING:  # with it come the stores' clients, which a run in a folder does not need
    from data.bucket import Bucket


class DoneRecord(TypedDict):
    """What is read here of a finished stage's done.json."""

    seconds: float
    metrics: NotRequired[dict[str, float]]
    summary: NotRequired[str]  # of a sweep's table
    diverged: NotRequired[str]  # of a run of a sweep: how it ended
    stopped: NotRequired[str]  # of a hopeless stage, why it ended early


def status(run: Path, store: "Bucket | None" = None) -> None:
    """Print one line a stage folder, in the order they were first started; of a stage's folder, that stage alone.

    Where the run is in an object store, `run` is a local copy, or a stage's folder in it, and what is printed names the
    URL. Raises UsageError where there is no run, StorageError.
    """
    # 1. The stages. A stage's folder has a stage.json from its very start.
    folders = sorted((record.parent for record in run.glob("*/stage.json")), key=artifacts.started_s)
    if (run / "stage.json").exists():
        folders = [run]
        run = run.parent
    if not folders:
        raise no_run(run)

    # 2. How the last command ended, or which one is running.
    path = run / "status.json"
    has_ended = False
    try:
        last = json.loads(path.read_text())
        if last["exit_code"] is not None:
            end = f"{last['message']} (exit {last['exit_code']}, {last['time']})"
            has_ended = True
        else:
            end, has_ended = owner(store or Folder(run), last["time"], last["command"])
    except OSError:
        end = "unknown: no command has ended yet"
    except (ValueError, KeyError, TypeError):  # empty, torn or altered
        end = f"unknown: {path} is torn or altered; the next command writes it anew"

    # 3. A line a stage, with what a sweep has chosen for it.
    label = "end"
    if end.startswith("running"):
        label = "now"
    lines = [f"run  {run}", f"{label}  {end}"]
    width = max(24, *(len(folder.name) for folder in folders))
    for folder in folders:
        line = f"{folder.name:{width}} {stage_line(folder, has_ended=has_ended)}"
        with suppress(DataError):  # named in the line already
            chosen = artifacts.read_record(folder / "stage.json").get("chosen", {})
            if chosen:
                line += f"  ({', '.join(f'{field}={value}' for field, value in chosen.items())})"
        lines.append(line)
    for line in lines:
        if store is not None:
            line = line.replace(str(run), store.url)
        echo(line)


def owner(storage: Storage, started: str, command: str) -> tuple[str, bool]:
    """Return how the command stands that has not said how it ended, in words; and whether it has ended.

    A command that was killed, or lost its machine, could not say so: its lease tells (jobs/ownership.py).
    """

    def report(text: str) -> None:
        print(f"status: {text}", file=sys.stderr, flush=True)

    state, seen = judge(storage, report)
    record = seen.record if seen is not None else None
    if state == "held" and record is not None:
        job = f", {record['job']}" if record["job"] else ""
        return f"running, started {started} on {record['host']} (process {record['pid']}{job}): {command}", False
    if state == "held":
        return f"running, started {started}: {command}", False
    if record is None:
        return (
            f"stopped without a word, started {started}, and its lease cannot be read; to go on type: {command}",
            True,
        )
    # The command of a submitted job reads a recipe that only that job has.
    again = command
    if record["job"].startswith(RAY_JOB):
        again = f"python -m jobs submit RECIPE run={storage.address()}"
    job = f", {record['job']}" if record["job"] else ""
    return (
        f"stopped without a word: process {record['pid']} on {record['host']}{job}, started {started}, was last seen "
        f"{record['renewed']} by that machine's clock; to go on type: {again}",
        True,
    )


def stage_line(folder: Path, *, has_ended: bool) -> str:
    """Return what a stage came to, or how far it is; `has_ended` where no command is running any more."""
    try:
        outcome = cast(DoneRecord | None, artifacts.read_done(folder))
    except DataError as error:
        return f"CANNOT TELL: {str(error).splitlines()[0]}"
    # 1. A finished stage: what it came to.
    if outcome is not None:
        took = duration(outcome["seconds"])
        if "diverged" in outcome:
            return f"DIVERGED after {took}: {outcome['diverged']}"
        line = f"done in {took}"
        if "stopped" in outcome:
            line = f"STOPPED after {took}: {outcome['stopped']}"
        if "summary" in outcome:
            line += f"  {outcome['summary']}"
        for name, value in without_single_seeds(outcome.get("metrics", {})).items():
            line += f"  {name} {value:.4f}"
        return line

    # 2. Otherwise the newest report says how far it is.
    last = last_metrics(folder)
    if last is None:
        return "ended before its first report" if has_ended else "started, no step yet"
    # Of evaluations beside training (`evaluate_on: spare`) these are still to come.
    steps = async_evaluation.requested(folder)
    to_judge = f"to be judged: {', '.join(map(str, steps))}  " if steps else ""
    # The time is that of rank 0's clock, which may be ahead of this one.
    age_s = max(time.time() - last["time"], 0)
    to_go = f"eta {duration(last['eta_s'])}"
    if has_ended:
        to_go = f"not running, {duration(last['eta_s'])} to go"
    # A resume would start from the newest checkpoint, whose manifest alone is read.
    saved = "no checkpoint yet"
    checkpoints = manifest.committed(folder / "checkpoints")
    if checkpoints:
        try:
            saved = f"last checkpoint step {manifest.read_manifest(checkpoints[0]).step}"
        except CheckpointError as error:
            saved = f"last checkpoint unreadable: {error}"
    return (
        f"step {last['step']}/{last['steps']}  loss {last['loss']:.4f}  img/s {amount(last['images_per_s'])}  "
        f"{to_go}  {duration(age_s)} ago  {saved}  "
        f"{to_judge}{account(read_metrics(folder, None)).line()}"
    )
