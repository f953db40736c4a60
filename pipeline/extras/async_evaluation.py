"""The files that the driver and rank 0 exchange for asynchronous evaluation (`evaluate_on: spare`).

Every evaluation ends with a record (`recorded`); an evaluation without a record is requested again at the start of the
next attempt.

The driver and rank 0 communicate through files, because neither must wait for the other:

    <attempt>/spare                                  from the driver: a spare worker can evaluate a commit
    <stage>/evaluations/step-0000001200.requested    from rank 0, before the commit: evaluate this step asynchronously
    <stage>/evaluations/step-0000001200.json         from the driver: the record that rank 0 writes to metrics.jsonl

While an evaluation is requested, the checkpoint of its step is kept, even if the run is killed.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from data.errors import DataError
from pipeline.artifacts import EVALUATIONS, REQUESTED, read_record, write_record
from pipeline.config import Tags, tags
from pipeline.evaluation.document import EvaluationRecord, recorded_steps, skipped_record
from pipeline.extras.needed import file_of
from pipeline.monitoring.telemetry import read_metrics
from pipeline.training_config import TrainConfig

SPARE_FILE = "spare"


@dataclass(frozen=True)
class AsyncConfig(TrainConfig):
    """Adds the config field `evaluate_on` to trained stages."""

    # evaluations during training run on the training workers, which pause for them, or on a spare worker in parallel
    # (docs/design/cluster.md); with spare, every evaluated step is saved as a checkpoint and counts for keep
    evaluate_on: Literal["training", "spare"] = "training"

    RESUME: ClassVar[Tags] = tags(free="evaluate_on")

    @property
    def saves_evaluated(self) -> bool:
        """Return whether each evaluated step is saved as a checkpoint."""
        is_asynchronous = self.evaluate_on == "spare" and self.evaluate_every > 0
        return is_asynchronous or super().saves_evaluated


# ------------------------------------------------------------------------------------------------ files


def request(stage: Path, step: int) -> None:
    """Request the asynchronous evaluation of a step. Raises OSError if the request cannot be written."""
    path = file_of(stage, step, REQUESTED)
    path.parent.mkdir(exist_ok=True)
    path.touch()


def withdraw(stage: Path, step: int) -> None:
    """Withdraw the evaluation request for a step. Raises OSError if the request's file cannot be deleted."""
    file_of(stage, step, REQUESTED).unlink(missing_ok=True)


def recorded(stage: Path) -> set[int]:
    """Return the steps with an evaluation record: values, an error, or the reason why the evaluation was skipped."""
    # The driver reports damaged lines; an evaluation whose record is damaged is repeated.
    steps = recorded_steps(read_metrics(stage, None, []))
    for path in records(stage):
        steps.add(int(path.stem.removeprefix("step-")))
    return steps


def put_record(stage: Path, step: int, record: EvaluationRecord) -> None:
    """Write an evaluation's record for rank 0, and withdraw its request. Raises OSError if the storage fails."""
    path = file_of(stage, step, ".json")
    path.parent.mkdir(exist_ok=True)
    write_record(path, record)
    file_of(stage, step, REQUESTED).unlink(missing_ok=True)


def skip(stage: Path, step: int, reason: str) -> None:
    """Record that the evaluation of a step was skipped. Raises OSError if the record cannot be written."""
    put_record(stage, step, skipped_record(step, reason))


def records(stage: Path) -> list[Path]:
    """Return the files with records to be added to metrics.jsonl, oldest step first."""
    return sorted((stage / EVALUATIONS).glob("step-*.json"))


def report_records(stage: Path, report: Callable[[str, Mapping[str, object], str], bool]) -> None:
    """Pass the kind, values and log line of each record to `report`; delete the record's file if this succeeds.

    If a record is damaged, its file is deleted too, and the evaluation is requested again.
    """
    for path in records(stage):
        # After a temporary failure of the shared folder, the next call reports the record.
        with suppress(OSError):
            try:
                record = read_record(path)
            except DataError:
                request(stage, int(path.stem.removeprefix("step-")))
                path.unlink()
                continue
            if report(record["kind"], record["values"], record["line"]):
                path.unlink()
