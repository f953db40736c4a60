"""Asynchronous evaluation (`evaluate_on: spare`): how rank 0 requests it, and how its outcome reaches metrics.jsonl.

An evaluation has an outcome, or it is due: at the start of an attempt, of each commit that has none recorded
(`recorded`), by whichever workers.

The driver and rank 0 leave each other files, because neither may wait for the other:

    <attempt>/spare                                  the driver: a worker beside training can evaluate a commit
    <stage>/evaluations/step-0000001200.requested    rank 0, before the commit: evaluate this step beside training
    <stage>/evaluations/step-0000001200.json         the driver: the record that rank 0 puts into metrics.jsonl

As long as a step is requested its checkpoint stays, also after a kill.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from data.files import write_whole
from pipeline.monitoring.telemetry import read_metrics, without_single_seeds

SPARE_FILE = "spare"
FOLDER = "evaluations"  # of a stage
REQUESTED = ".requested"
OUTCOMES = ("evaluate", "evaluate_failed", "evaluate_skipped")  # kinds of records


class EvaluationRecord(TypedDict):
    """Holds the outcome of an evaluation: the kind, values and line of its record in metrics.jsonl."""

    kind: str  # of OUTCOMES
    values: dict[str, float | int | str]
    line: str


# ------------------------------------------------------------------------------------------------ files


def file_of(stage: Path, step: int, suffix: str) -> Path:
    """Return the file of a step's evaluation with this suffix."""
    return stage / FOLDER / f"step-{step:010d}{suffix}"


def request(stage: Path, step: int) -> None:
    """Request the evaluation of a step beside training. Raises OSError."""
    path = file_of(stage, step, REQUESTED)
    path.parent.mkdir(exist_ok=True)
    path.touch()


def withdraw(stage: Path, step: int) -> None:
    """Take back the request for a step. Raises OSError."""
    file_of(stage, step, REQUESTED).unlink(missing_ok=True)


def requested(stage: Path) -> list[int]:
    """Return the steps that are requested, the oldest first: their checkpoints must stay."""
    steps = []
    for path in (stage / FOLDER).glob(f"step-*{REQUESTED}"):
        steps.append(int(path.stem.removeprefix("step-")))
    return sorted(steps)


def recorded(stage: Path) -> set[int]:
    """Return the steps whose evaluation has an outcome: a value, an error, or a reason why there is none."""
    steps: set[int] = set()
    for record in read_metrics(stage, None):
        if record["kind"] == "start":
            # Steps behind the one that an attempt starts from are taken, and evaluated, again.
            steps = {step for step in steps if step <= record["step"]}
        elif record["kind"] in OUTCOMES:
            steps.add(record["step"])
    for path in records(stage):
        steps.add(int(path.stem.removeprefix("step-")))
    return steps


def put_record(stage: Path, step: int, record: EvaluationRecord) -> None:
    """Leave the outcome of an evaluation for rank 0, and take back its request. Raises OSError."""
    path = file_of(stage, step, ".json")
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(record))
    file_of(stage, step, REQUESTED).unlink(missing_ok=True)


def skip(stage: Path, step: int, reason: str) -> None:
    """Record that a step is not evaluated. Raises OSError."""
    line = f"evaluate step {step} SKIPPED: {reason}"
    put_record(stage, step, {"kind": "evaluate_skipped", "values": {"step": step, "reason": reason}, "line": line})


def records(stage: Path) -> list[Path]:
    """Return the files of the records that are not in metrics.jsonl yet, the oldest step first."""
    return sorted((stage / FOLDER).glob("step-*.json"))


def report_records(stage: Path, report: Callable[[str, Mapping[str, object], str], bool]) -> None:
    """Report each record by its kind, values and line; a record that the disk refuses stays for the next call."""
    for path in records(stage):
        # Where a shared folder fails for a moment, the next call reports the record.
        with suppress(OSError):
            record: EvaluationRecord = json.loads(path.read_text())
            if report(record["kind"], record["values"], record["line"]):
                path.unlink()


# ------------------------------------------------------------------------------------------------ values and lines


def evaluation_record(
    step: int, values: Mapping[str, float | int], where: Mapping[str, float | str], remark: str = ""
) -> EvaluationRecord:
    """Return the record of an evaluation; it has every seed of the few-shot probe, the line their mean."""
    scores = {name: value for name, value in values.items() if isinstance(value, float)}
    shown = [f"{name} {value:.4f}" for name, value in without_single_seeds(scores).items()]
    line = f"evaluate step {step}  {'  '.join(shown)}{remark}"
    return {"kind": "evaluate", "values": {"step": step, **values, **where}, "line": line}


@dataclass
class LoopPrice:
    """Measures how much of the loop's time its evaluations take; reported once an attempt."""

    first_step: int = 0  # whole steps when the attempt began to train
    began: float = field(default_factory=time.monotonic)
    evaluated_s: float = 0.0  # of all evaluations since
    is_reported: bool = False

    def begin(self, step: int) -> None:
        """Count from here: building and restoring are not training."""
        self.first_step = step
        self.began = time.monotonic()
