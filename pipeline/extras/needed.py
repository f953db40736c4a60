"""Finds the steps of a stage whose checkpoints must be kept, however old they are.

1. Steps with a pending evaluation request: they are evaluated from their checkpoints (`evaluate_on: spare`).
       <stage>/evaluations/step-0000001200.requested
2. The step of the best evaluation so far (`keep_best`), from the stage's metrics.jsonl.

Commands use this module without torch. During training, the hooks of these recipe keys pass the steps to the saver
(`Saver.needed`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from pipeline.artifacts import EVALUATIONS, requested_steps
from pipeline.monitoring.telemetry import Record, read_metrics, without_single_seeds

NOT_SCORES = ("time", "seconds")  # numbers in an evaluation's record other than metrics


def needed_steps(stage: Path, metric: str | None, committed: Callable[[], Collection[int]]) -> list[int]:
    """Return the steps of a stage whose checkpoints must be kept.

    `metric` is the stage's `keep_best` metric; `committed` returns the steps that have a checkpoint.
    """
    return requested_steps(stage) + steps_of_best(stage, metric, committed)


# ------------------------------------------------------------------------ requested evaluations


def file_of(stage: Path, step: int, suffix: str) -> Path:
    """Return the path of a step's evaluation file with this suffix."""
    return stage / EVALUATIONS / f"step-{step:010d}{suffix}"


# ------------------------------------------------------------------------ the best evaluation


class BestStep(TypedDict):
    """The highest value of a metric, and the first step that reached it."""

    value: float
    step: int


def scores_of(record: Record) -> dict[str, float]:
    """Return the metrics in an evaluation record; few-shot metrics are means over the seeds."""
    scores = {}
    for name, value in record.items():
        if isinstance(value, float) and name not in NOT_SCORES:
            scores[name] = value
    return without_single_seeds(scores)


def evaluations_of(records: Iterable[Record]) -> dict[int, dict[str, float]]:
    """Return {step: metrics} for all evaluated steps, in ascending order; repeated steps count once."""
    evaluations: dict[int, dict[str, float]] = {}
    for record in records:
        if record["kind"] == "evaluate":
            evaluations[record["step"]] = scores_of(record)
        elif record["kind"] == "start":
            # An attempt repeats the steps after the one that it starts from, and their evaluations.
            for step in list(evaluations):
                if step > record["step"]:
                    del evaluations[step]
    return dict(sorted(evaluations.items()))


def best_of(evaluations: Mapping[int, Mapping[str, float]]) -> dict[str, BestStep]:
    """Return the best value of each metric; `evaluations` must be sorted by step."""
    best: dict[str, BestStep] = {}
    for step, scores in evaluations.items():
        for name, value in scores.items():
            if name not in best or value > best[name]["value"]:
                best[name] = {"value": value, "step": step}
    return best


def best_commit(stage: Path, metric: str, committed: Collection[int]) -> BestStep | None:
    """Return the best evaluation among the steps with a checkpoint; None if none of these steps has been evaluated."""
    evaluations = evaluations_of(read_metrics(stage, None))
    with_checkpoint = {step: scores for step, scores in evaluations.items() if step in committed}
    return best_of(with_checkpoint).get(metric)


def steps_of_best(stage: Path, metric: str | None, committed: Callable[[], Collection[int]]) -> list[int]:
    """Return a list with one step: the best-evaluated step among the steps with a checkpoint.

    The list is empty if no metric is set, or if none of these steps has been evaluated.
    """
    best = None
    if metric is not None:
        best = best_commit(stage, metric, committed())
    return [] if best is None else [best["step"]]
