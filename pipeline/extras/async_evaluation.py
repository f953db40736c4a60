"""Asynchronous evaluation (`evaluate_on: spare`): how rank 0 requests it, and how its outcome reaches metrics.jsonl.

An evaluation has an outcome (`recorded`), or it is due at the start of the next attempt.

The driver and rank 0 leave each other files, because neither may wait for the other:

    <attempt>/spare                                  the driver: a worker beside training can evaluate a commit
    <stage>/evaluations/step-0000001200.requested    rank 0, before the commit: evaluate this step beside training
    <stage>/evaluations/step-0000001200.json         the driver: the record that rank 0 puts into metrics.jsonl

As long as a step is requested its checkpoint stays, also after a kill.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from data.files import write_atomically
from pipeline.checkpoints.needed import EVALUATIONS, REQUESTED, file_of
from pipeline.config import Tags, tags
from pipeline.evaluation.document import EvaluationRecord, recorded_steps, skipped_record
from pipeline.monitoring.telemetry import read_metrics
from pipeline.training_config import TrainConfig

SPARE_FILE = "spare"


@dataclass(frozen=True)
class AsyncConfig(TrainConfig):
    """Adds `evaluate_on` to a trained stage."""

    # in between: the workers that train, who stop for it; or a spare one beside them (docs/design/cluster.md); for it
    # every such step is a checkpoint, and counts for keep
    evaluate_on: Literal["training", "spare"] = "training"

    RESUME: ClassVar[Tags] = tags(free="evaluate_on")

    @property
    def saves_evaluated(self) -> bool:
        """Return whether each evaluated step becomes a checkpoint."""
        is_asynchronous = self.evaluate_on == "spare" and self.evaluate_every > 0
        return is_asynchronous or super().saves_evaluated


# ------------------------------------------------------------------------------------------------ files


def request(stage: Path, step: int) -> None:
    """Request the evaluation of a step beside training. Raises OSError."""
    path = file_of(stage, step, REQUESTED)
    path.parent.mkdir(exist_ok=True)
    path.touch()


def withdraw(stage: Path, step: int) -> None:
    """Take back the request for a step. Raises OSError."""
    file_of(stage, step, REQUESTED).unlink(missing_ok=True)


def recorded(stage: Path) -> set[int]:
    """Return the steps whose evaluation has an outcome: a value, an error, or a reason why there is none."""
    steps = recorded_steps(read_metrics(stage, None))
    for path in records(stage):
        steps.add(int(path.stem.removeprefix("step-")))
    return steps


def put_record(stage: Path, step: int, record: EvaluationRecord) -> None:
    """Leave the outcome of an evaluation for rank 0, and take back its request. Raises OSError."""
    path = file_of(stage, step, ".json")
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(record))
    file_of(stage, step, REQUESTED).unlink(missing_ok=True)


def skip(stage: Path, step: int, reason: str) -> None:
    """Record that a step is not evaluated. Raises OSError."""
    put_record(stage, step, skipped_record(step, reason))


def records(stage: Path) -> list[Path]:
    """Return the files of the records that are not in metrics.jsonl yet, the oldest step first."""
    return sorted((stage / EVALUATIONS).glob("step-*.json"))


def report_records(stage: Path, report: Callable[[str, Mapping[str, object], str], bool]) -> None:
    """Report each record by its kind, values and line; a record that the disk refuses stays for the next call."""
    for path in records(stage):
        # Where a shared folder fails for a moment, the next call reports the record.
        with suppress(OSError):
            record: EvaluationRecord = json.loads(path.read_text())
            if report(record["kind"], record["values"], record["line"]):
                path.unlink()
