"""The best evaluation of a trained stage, and when its patience has run out: functions of the stage's metrics.jsonl.

Nothing of this is stored a second time: a stage that was killed and goes on reads the same records, and comes to the
same best and the same end as a stage that nothing befell.

In:  records of evaluations: accuracy 0.91 at step 20, 0.93 at step 40, 0.92 at step 60
Out: {"accuracy": {"value": 0.93, "step": 40}}; with patience 1 the stage ends at step 60, and keep_best keeps step 40

What a law foretells of these evaluations (`Foretold`) is compared here too, by the same records.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from pipeline.monitoring.telemetry import Record, read_metrics, scores_of

MOST_BELOW = 2  # evaluations in a row too far below what was foretold: the stage is hopeless; one may be chance
# Too far is so many times as far below as the interval reaches. The interval takes each point of a law for a draw of
# its own, and the evaluations of one run share their luck: docs/scaling.md has how often a good run is stopped.
TOO_FAR = 3.0


class Best(TypedDict):
    """Holds the highest value of a metric, and the step of its evaluation; of equal ones the first."""

    value: float
    step: int


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


@dataclass(frozen=True)
class Foretold:
    """Holds what a law foretells of a stage's evaluations: the value at each of the steps, and its 90 % interval."""

    metric: str
    law: str  # its figure.json
    stops: bool  # it is a law of curves: a stage that stays below it is hopeless
    steps: Sequence[int]
    values: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]

    def hopeless(self, stage: Path) -> str:
        """Return why a stage is to end early, in a sentence; "" while there is hope."""
        below: list[int] = []
        evaluations = evaluations_of(read_metrics(stage, None))
        for step, foretold, low in zip(self.steps, self.values, self.lows, strict=True):
            value = evaluations.get(step, {}).get(self.metric)
            if value is None or not self.stops:
                continue
            bound = foretold - TOO_FAR * (foretold - low)
            if value >= bound:
                below.clear()
                continue
            below.append(step)
            if len(below) == MOST_BELOW:
                return (
                    f"hopeless: {self.metric} {value:.4f} at step {step}, foretold {foretold:.4f}, stopped below "
                    f"{bound:.4f}; it was too low at step {below[0]} too"
                )
        return ""

    def score(
        self, step: int, metrics: Mapping[str, float], log: Callable[[str], None]
    ) -> dict[str, float | bool | str]:
        """Return, and log, whether the last evaluation, of the step with which the stage ended, lies as foretold."""
        number = self.steps.index(step)
        was = metrics[self.metric]
        value, low, high = self.values[number], self.lows[number], self.highs[number]
        is_inside = low <= was <= high
        verdict = "OUTSIDE"
        if is_inside:
            verdict = "inside"
        log(f"foretold {self.metric} {value:.4f} [{low:.4f}, {high:.4f}] at step {step}, was {was:.4f}: {verdict}")
        score: dict[str, float | bool | str] = {"metric": self.metric, "value": value, "low": low}
        return {**score, "high": high, "was": was, "is_inside": is_inside}
