"""The steps of a stage whose checkpoints must stay, however old they are.

1. A step whose evaluation is requested and not done: it is evaluated from its checkpoint (`evaluate_on: spare`).
       <stage>/evaluations/step-0000001200.requested
2. The step of the best evaluation so far (`keep_best`), from the stage's metrics.jsonl.

Commands read them here without torch; during training the extras of these keys tell the saver (`Saver.needed`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from pipeline.monitoring.telemetry import Record, read_metrics, scores_of

EVALUATIONS = "evaluations"  # a folder of a stage
REQUESTED = ".requested"


def needed_steps(stage: Path, metric: str | None, committed: Callable[[], Collection[int]]) -> list[int]:
    """Return the steps of a stage whose checkpoints must stay.

    `metric` is the stage's `keep_best`; `committed` returns the steps that have a checkpoint.
    """
    return requested_steps(stage) + steps_of_best(stage, metric, committed)


# ------------------------------------------------------------------------ requested evaluations


def file_of(stage: Path, step: int, suffix: str) -> Path:
    """Return the file of a step's evaluation with this suffix."""
    return stage / EVALUATIONS / f"step-{step:010d}{suffix}"


def requested_steps(stage: Path) -> list[int]:
    """Return the steps whose evaluation is requested and not done, the oldest first."""
    steps = []
    for path in (stage / EVALUATIONS).glob(f"step-*{REQUESTED}"):
        steps.append(int(path.stem.removeprefix("step-")))
    return sorted(steps)


# ------------------------------------------------------------------------ the best evaluation


class BestStep(TypedDict):
    """The highest value of a metric, and the step of its evaluation; the first of equal ones."""

    value: float
    step: int


def evaluations_of(records: Iterable[Record]) -> dict[int, dict[str, float]]:
    """Return the metrics of each evaluated step that the stage has kept, by step in ascending order."""
    evaluations: dict[int, dict[str, float]] = {}
    for record in records:
        if record["kind"] == "evaluate":
            evaluations[record["step"]] = scores_of(record)
        elif record["kind"] == "start":
            # Steps after the one that an attempt starts from are taken, and evaluated, again.
            for step in list(evaluations):
                if step > record["step"]:
                    del evaluations[step]
    return dict(sorted(evaluations.items()))


def best_of(evaluations: Mapping[int, Mapping[str, float]]) -> dict[str, BestStep]:
    """Return the best of each metric; the steps are in ascending order."""
    best: dict[str, BestStep] = {}
    for step, scores in evaluations.items():
        for name, value in scores.items():
            if name not in best or value > best[name]["value"]:
                best[name] = {"value": value, "step": step}
    return best


def best_commit(stage: Path, metric: str, committed: Collection[int]) -> BestStep | None:
    """Return the best evaluation of a step whose checkpoint is there; None before the first."""
    evaluations = evaluations_of(read_metrics(stage, None))
    of_commits = {step: scores for step, scores in evaluations.items() if step in committed}
    return best_of(of_commits).get(metric)


def steps_of_best(stage: Path, metric: str | None, committed: Callable[[], Collection[int]]) -> list[int]:
    """Return the step of the best evaluation so far; none without a metric, or before the first evaluation."""
    best = None
    if metric is not None:
        best = best_commit(stage, metric, committed())
    return [] if best is None else [best["step"]]
