"""Keep the best checkpoint and stop early (`keep_best`, `patience`), based on the records in metrics.jsonl.

There is no other state: a resumed stage reads the same records, and therefore has the same best step and the same last
step as an uninterrupted stage.

In:  records of evaluations: accuracy 0.91 at step 20, 0.93 at step 40, 0.92 at step 60
Out: {"accuracy": {"value": 0.93, "step": 40}}; with patience 1 the stage ends at step 60, and keep_best keeps step 40
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from data.checks import at_least
from data.errors import CheckpointError
from pipeline.config import Tags, require, tags
from pipeline.extras.needed import BestStep, best_commit, best_of, evaluations_of, steps_of_best
from pipeline.hooks import ExportChoice, Hook
from pipeline.monitoring.telemetry import read_metrics
from pipeline.training_config import TrainConfig
from pipeline.values import counted

if TYPE_CHECKING:
    from pipeline.worker import Progress, Setup


def evaluations_since_best(stage: Path, metric: str) -> tuple[int, BestStep] | None:
    """Return the number of evaluations since the best, and the best step; None before the first evaluation."""
    evaluations = evaluations_of(read_metrics(stage, None))
    best = best_of(evaluations).get(metric)
    if best is None:
        return None
    later = [step for step in evaluations if step > best["step"]]
    return len(later), best


# ------------------------------------------------------------------------------------------------ the hook


@dataclass(frozen=True)
class BestConfig(TrainConfig):
    """Adds the config fields `keep_best` and `patience` to trained stages."""

    # metric, such as accuracy or 5shot: export the weights with its highest value instead of the last weights; every
    # evaluated step is then saved as a checkpoint, and the best one is kept regardless of keep; null: export the last
    keep_best: str | None = None
    patience: int = 0  # end the stage after this many evaluations without a better keep_best; 0: never

    RESUME: ClassVar[Tags] = tags(forbid="keep_best patience")
    LATER: ClassVar[tuple[str, ...]] = ("keep_best", "patience")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "patience")
        require(
            self.patience == 0 or self.keep_best is not None,
            f"patience is {self.patience}, but keep_best does not name a metric\n"
            "  add keep_best=accuracy, or set patience=0",
        )
        if self.keep_best is None:
            return
        require(
            self.evaluate_every > 0,
            f"keep_best is {self.keep_best}, but evaluate_every is 0, so the stage is evaluated only at the end\n"
            "  set evaluate_every to a number of steps, or keep_best=null",
        )
        # `evaluate_on` is a key of the asynchronous evaluation extra, which may not be part of this config.
        evaluate_on = getattr(self, "evaluate_on", "training")
        require(
            evaluate_on == "training",
            f"keep_best is {self.keep_best} and evaluate_on is {evaluate_on}: the stage would export weights "
            "before their evaluations have finished\n  set evaluate_on=training, or keep_best=null",
        )
        require(
            self.polyak == 0,
            f"keep_best is {self.keep_best} and polyak is {self.polyak}: evaluations during training use the "
            "weights before averaging, but the stage exports averaged weights\n  set polyak=0, or keep_best=null",
        )

    @property
    def saves_evaluated(self) -> bool:
        """Return whether each evaluated step is saved as a checkpoint."""
        return self.keep_best is not None or super().saves_evaluated

    @property
    def exempt_checkpoints(self) -> int:
        """Return the number of checkpoints kept in addition to `keep`, because the best checkpoint may be older."""
        return super().exempt_checkpoints + (self.keep_best is not None)


class KeepBest(Hook):
    """Hook that exports the weights of the best evaluation, and ends the stage when its patience runs out."""

    Config = BestConfig

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Protect the checkpoint of the best evaluation from being deleted. Raises DataError if a record is damaged."""
        self.stage = Path(self.job.directory)
        # Refuse damaged records now: at the end, the whole training would have been in vain.
        if self.cfg.keep_best is not None:
            read_metrics(self.stage, None)
        self.committed_steps = worker.saver.checkpoints.committed_steps
        worker.saver.needed.append(partial(steps_of_best, self.stage, self.cfg.keep_best, self.committed_steps))

    def is_over(self, progress: "Progress") -> str:
        """Return the reason if the stage ends at this step because its patience has run out, otherwise ""."""
        metric = self.cfg.keep_best
        patience = self.cfg.patience
        since = None
        if patience and metric is not None:
            since = evaluations_since_best(self.stage, metric)
        if since is None or since[0] < patience:
            return ""
        count, best = since
        return (
            f"{metric} has not improved in {counted(count, 'evaluation')} (patience {patience}): "
            f"the best is {best['value']:.4f} at step {best['step']}"
        )

    def choose(self) -> ExportChoice | None:
        """Return the best step to export; None if `keep_best` is not set.

        Raises CheckpointError if no evaluation of a committed step is recorded.
        """
        metric = self.cfg.keep_best
        if metric is None:
            return None
        best = best_commit(self.stage, metric, self.committed_steps())
        # The last step has been committed and evaluated, but on a full disk the records may be missing.
        if best is None:
            raise CheckpointError(
                f"{self.stage / 'metrics.jsonl'} contains no evaluation with the metric keep_best={metric}\n"
                "  a full disk may have lost the records: free some space, then run the same command again to repeat "
                "the evaluation"
            )
        return {"metric": metric, **best}
