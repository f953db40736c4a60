"""The best evaluation of a trained stage, and when its patience has run out: functions of the stage's metrics.jsonl.

Nothing of this is stored a second time: a stage that was killed and resumed reads the same records, and has the same
best and the same end as an undisturbed one.

In:  records of evaluations: accuracy 0.91 at step 20, 0.93 at step 40, 0.92 at step 60
Out: {"accuracy": {"value": 0.93, "step": 40}}; with patience 1 the stage ends at step 60, and keep_best keeps step 40
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from data.checks import at_least
from data.errors import CheckpointError
from pipeline.checkpoints.needed import BestStep, best_commit, best_of, evaluations_of, steps_of_best
from pipeline.config import Tags, require, tags
from pipeline.hooks import ExportChoice, Hook
from pipeline.monitoring.telemetry import read_metrics
from pipeline.training_config import TrainConfig
from pipeline.values import counted

if TYPE_CHECKING:
    from pipeline.worker import Progress, Setup


def evaluations_since_best(stage: Path, metric: str) -> tuple[int, BestStep] | None:
    """Return how many evaluations came after the best without a better one, and the best; None before the first."""
    evaluations = evaluations_of(read_metrics(stage, None))
    best = best_of(evaluations).get(metric)
    if best is None:
        return None
    later = [step for step in evaluations if step > best["step"]]
    return len(later), best


# ------------------------------------------------------------------------------------------------ the hook


@dataclass(frozen=True)
class BestConfig(TrainConfig):
    """Adds `keep_best` and `patience` to a trained stage."""

    # metric, such as accuracy or 5shot: the weights of the evaluation with the highest are handed on, instead of the
    # last ones; for it every evaluated step is a checkpoint, and the best stays whatever keep says; null: the last
    keep_best: str | None = None
    patience: int = 0  # evaluations in a row without a better keep_best, after which the stage ends; 0: never

    RESUME: ClassVar[Tags] = tags(forbid="keep_best patience")
    LATER: ClassVar[tuple[str, ...]] = ("keep_best", "patience")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "patience")
        require(
            self.patience == 0 or self.keep_best is not None,
            f"patience is {self.patience} and keep_best names no metric that it waits for\n"
            "  add keep_best=accuracy, or patience=0",
        )
        if self.keep_best is None:
            return
        require(
            self.evaluate_every > 0,
            f"keep_best is {self.keep_best} and evaluate_every 0: there is one evaluation alone, at the end\n"
            "  set evaluate_every, or keep_best=null",
        )
        # A key of asynchronous evaluation, which may be missing here.
        evaluate_on = getattr(self, "evaluate_on", "training")
        require(
            evaluate_on == "training",
            f"keep_best is {self.keep_best} and evaluate_on {evaluate_on}: the stage would hand weights on "
            "before their evaluations are there\n  set evaluate_on=training, or keep_best=null",
        )
        require(
            self.polyak == 0,
            f"keep_best is {self.keep_best} and polyak {self.polyak}: evaluations amid the steps are of weights "
            "that are not averaged, and others would be handed on\n  set polyak=0, or keep_best=null",
        )

    @property
    def saves_evaluated(self) -> bool:
        """Return whether each evaluated step becomes a checkpoint."""
        return self.keep_best is not None or super().saves_evaluated

    @property
    def exempt_checkpoints(self) -> int:
        """Return how many checkpoints may stay besides the usual ones: the best may be older than all of them."""
        return super().exempt_checkpoints + (self.keep_best is not None)


class KeepBest(Hook):
    """Exports the weights of the best evaluation, and ends the stage if the next ones are not better."""

    Config = BestConfig

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Keep the checkpoint of the best evaluation."""
        self.stage = Path(self.job.directory)
        self.committed_steps = worker.saver.checkpoints.committed_steps
        worker.saver.needed.append(partial(steps_of_best, self.stage, self.cfg.keep_best, self.committed_steps))

    def is_over(self, progress: "Progress") -> str:
        """Return why the stage ends here, if its patience has run out; the records alone decide."""
        metric = self.cfg.keep_best
        patience = self.cfg.patience
        since = None
        if patience and metric is not None:
            since = evaluations_since_best(self.stage, metric)
        if since is None or since[0] < patience:
            return ""
        count, best = since
        return (
            f"{counted(count, 'evaluation')} without a better {metric} than {best['value']:.4f} at step "
            f"{best['step']}, patience is {patience}"
        )

    def choose(self) -> ExportChoice | None:
        """Return the step of the best evaluation. Raises CheckpointError if none is on record."""
        metric = self.cfg.keep_best
        if metric is None:
            return None
        best = best_commit(self.stage, metric, self.committed_steps())
        # The last step is committed and has been evaluated, but a full disk may have refused all records of it.
        if best is None:
            raise CheckpointError(
                f"no evaluation is on record in {self.stage / 'metrics.jsonl'}, of which keep_best={metric} could take "
                "the best\n  make room on its disk, then run the same command again: it goes on with the evaluation"
            )
        return {"metric": metric, **best}
