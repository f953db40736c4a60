"""The best evaluation of a trained stage, and when its patience has run out: functions of the stage's metrics.jsonl.

Nothing of this is stored a second time: a stage that was killed and goes on reads the same records, and comes to the
same best and the same end as a stage that nothing befell.

In:  records of evaluations: accuracy 0.91 at step 20, 0.93 at step 40, 0.92 at step 60
Out: {"accuracy": {"value": 0.93, "step": 40}}; with patience 1 the stage ends at step 60, and keep_best keeps step 40
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from pipeline.evaluation.async_evaluation import OF_ONE_SEED
from pipeline.monitoring.telemetry import Record, read_metrics

NOT_SCORES = ("time", "seconds")  # of a record, the numbers that say when and how long


class Best(TypedDict):
    """Holds the highest value of a metric, and the step of its evaluation; of equal ones the first."""

    value: float
    step: int


def scores_of(record: Record) -> dict[str, float]:
    """Return the metrics of a record of an evaluation; a few-shot probe's are means over its seeds."""
    scores = {}
    for name, value in record.items():
        if isinstance(value, float) and name not in NOT_SCORES and not OF_ONE_SEED.search(name):
            scores[name] = value
    return scores


def evaluations_of(records: Iterable[Record]) -> dict[int, dict[str, float]]:
    """Return the metrics of each evaluated step that the stage has kept, by step in ascending order."""
    evaluations: dict[int, dict[str, float]] = {}
    for record in records:
        if record["kind"] == "evaluate":
            evaluations[record["step"]] = scores_of(record)
        elif record["kind"] == "start":
            # Steps behind the one that an attempt starts from are taken, and evaluated, again.
            for step in list(evaluations):
                if step > record["step"]:
                    del evaluations[step]
    return dict(sorted(evaluations.items()))


def best_of(evaluations: Mapping[int, Mapping[str, float]]) -> dict[str, Best]:
    """Return the best of each metric; the steps are in ascending order."""
    best: dict[str, Best] = {}
    for step, scores in evaluations.items():
        for name, value in scores.items():
            if name not in best or value > best[name]["value"]:
                best[name] = {"value": value, "step": step}
    return best


def best_commit(stage: Path, metric: str, committed: Collection[int]) -> Best | None:
    """Return the best evaluation of a step whose checkpoint is there; None before the first."""
    evaluations = evaluations_of(read_metrics(stage, None))
    of_commits = {step: scores for step, scores in evaluations.items() if step in committed}
    return best_of(of_commits).get(metric)


def steps_of_best(stage: Path, metric: str | None, committed: Callable[[], Collection[int]]) -> list[int]:
    """Return the step whose checkpoint stays as the best so far; none without a metric and before the first."""
    best = None
    if metric is not None:
        best = best_commit(stage, metric, committed())
    return [] if best is None else [best["step"]]


def evaluations_since_best(stage: Path, metric: str) -> tuple[int, Best] | None:
    """Return how many evaluations came after the best without a better one, and the best; None before the first."""
    evaluations = evaluations_of(read_metrics(stage, None))
    best = best_of(evaluations).get(metric)
    if best is None:
        return None
    later = [step for step in evaluations if step > best["step"]]
    return len(later), best
