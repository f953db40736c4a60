"""Evaluates a trained stage on the workers that train it: between training steps and at the end of the stage.

All of these methods evaluate the weights at a step in the same way (`evaluate_weights`):
1. `LoopEvaluator.resume`: at the start of an attempt, if a stop or a kill interrupted the evaluation of its step;
2. `LoopEvaluator.evaluate_during_training`: between two steps; training continues even if the evaluation fails;
3. `LoopEvaluator.evaluate_at_end`: the stage's final weights; a failure ends the stage.

A stage without evaluation sets uses StageEvaluator (pipeline/hooks.py) and does not import this module. A hook may
provide an evaluator that runs on other workers (`request`).
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.checks import one_line
from data.index.index import Index
from models import ModelConfig
from pipeline import artifacts
from pipeline.evaluation import document
from pipeline.evaluation.evaluator import EvaluationFailed, EvaluationGroup, EvaluationStopped, Evaluator, Request
from pipeline.evaluation.protocols import Protocol, probe_protocol
from pipeline.hooks import StageEvaluator
from pipeline.monitoring.telemetry import read_metrics
from pipeline.training_config import TrainConfig
from pipeline.variables import recorded
from pipeline.worker import Job, Progress, Setup

EXAMPLES = 32  # samples of an evaluation to store with their predictions
WORTH_SPARING = 0.05  # if evaluation takes a larger share of the time, a log line suggests a spare worker
TRIES = 3  # skip an evaluation after this many attempts died or hung in it
STOPPED = "evaluate_stopped"  # kind of the record of a stopped evaluation, which is no outcome

# ------------------------------------------------------------------------------------------------ one evaluation


def evaluate_weights(
    cfg: TrainConfig,
    job: Job,
    model_config: ModelConfig,
    group: EvaluationGroup,
    model: torch.nn.Module,
    folder: Path,
    *,
    ranks: Sequence[int],
    world: int,
    indexes: Mapping[str, Index],
) -> tuple[dict[str, Any], list[str]]:
    """Collective: evaluate a model as configured in its stage's recipe, with accuracy and the few-shot probe.

    Returns, on rank 0, the values for metrics.jsonl, and warnings about unreadable samples; "accuracy" is accompanied
    by "judged", the number of readable samples, and by the loss in "held_out". The other arguments are passed to
    Evaluator.
    """
    requests = []
    if job.evaluate:
        requests.append(Request(job.evaluate, None, Protocol("top-1", {}), examples=EXAMPLES))
    if job.probe_train and job.probe_test:
        requests.append(Request(job.probe_test, job.probe_train, probe_protocol(cfg.probe), first_label=True))
    evaluator = Evaluator(
        group=group,
        model=model,
        dtype=torch.bfloat16 if cfg.precision == "bf16" else torch.float32,
        folder=folder,
        # big_vision's few-shot evaluation squashes images to a square (SPEC 2.5); a recipe may name other ops.
        preprocess=cfg.data.preprocess or f"resize({model_config.image_size})",
        # Training fitted this many images in memory; evaluation keeps no activations, so it fits too.
        micro_batch=cfg.micro_batch,
        max_labels=cfg.data.max_labels,
        loss=cfg.loss,
        cache=cfg.data.cache,
        ranks=ranks,
        world=world,
        indexes=indexes,
    )
    results = evaluator.evaluate(requests)

    values: dict[str, Any] = {}
    warnings: list[str] = []
    for request, result in zip(requests, results, strict=bool(results)):
        if request.protocol.name != "top-1":
            values |= document.metrics_with_seeds(result)
            notes = document.notes_of(result)
            if notes:
                warnings.append(f"probe: {'; '.join(notes)}")
            continue
        # Examples for the run's report; if they cannot be written, the report only lacks a few pictures.
        with suppress(OSError):
            examples = {"step": group.step, "set": request.test, "samples": result["examples"]}
            examples["classes"] = result["class_counts"]
            examples["confusions"] = result["confusions"]
            artifacts.write_record(Path(job.directory) / artifacts.EXAMPLES, recorded(examples))
        readable = result["set"]["judged"]
        values |= {"accuracy": result["values"]["top-1"]["value"], "judged": readable}
        # Nested, because every number in the record itself is a score: the higher, the better.
        values["held_out"] = {"loss": result["loss"]}
        unreadable = result["set"]["samples"] - readable
        # Without this warning, a damaged set could look like a better or worse model.
        if unreadable:
            warnings.append(
                f"evaluate: {unreadable} bad samples of {request.test} were excluded; list them with `jobs data check`"
            )
    return values, warnings


# ------------------------------------------------------------------------------------------------ in the loop


class LoopEvaluator(StageEvaluator):
    """Evaluates a stage on its own training workers, which pause training in the meantime."""

    def __init__(self, cfg: TrainConfig, job: Job, last_step: int) -> None:
        super().__init__(cfg, job, last_step)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start measuring the cost of evaluations, after the model has been built and the checkpoint restored."""
        self.first_step = step  # steps completed before this attempt
        self.began = time.monotonic()
        self.evaluated_s = 0.0  # total time of all evaluations since then
        self.is_price_reported = False

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after this step; the last step is evaluated at the end instead."""
        every = self.cfg.evaluate_every
        return every > 0 and step % every == 0 and step != self.last_step

    def resume(self, worker: Setup, progress: Progress) -> bool:
        """Collective: evaluate the step that an attempt resumes from, if due; return False if a stop was requested.

        If TRIES attempts ended before the step had a result, and not by a stop, report its evaluation as skipped.
        """
        is_due = [False]
        if worker.group.rank == 0:
            stage = Path(self.job.directory)
            step = progress.step
            # If the disk fails here, the step is not evaluated; training is more important.
            with suppress(OSError):
                is_due = [self.was_due(worker, step) and step not in self.recorded(stage)]
                starts = [record for record in read_metrics(stage, "start", []) if record["step"] == step]
                stops = [record for record in read_metrics(stage, STOPPED, []) if record["step"] == step]
                # The evaluation itself may kill the attempts; without a limit training would never continue.
                if is_due[0] and len(starts) - len(stops) >= TRIES:
                    is_due = [False]
                    worker.group.telemetry.report(
                        **document.skipped_record(step, f"{TRIES} attempts ended without a result")
                    )
        dist.broadcast_object_list(is_due, src=0)
        return not is_due[0] or self.evaluate_during_training(worker, progress)

    def was_due(self, worker: Setup, step: int) -> bool:
        """Return whether a completed step should have been evaluated during training."""
        has_sets = bool(self.job.evaluate or self.job.probe_train)
        # The first step of a branch belongs to its trunk, and the last step is evaluated at the end.
        is_between = self.cfg.first_step < step < worker.data.steps
        return has_sets and is_between and self.cfg.evaluate_every > 0 and step % self.cfg.evaluate_every == 0

    def recorded(self, stage: Path) -> set[int]:
        """Return the steps whose evaluation has an outcome: values, an error, or the reason why it was skipped."""
        # The driver reports damaged lines; an evaluation whose record is damaged is repeated.
        return document.recorded_steps(read_metrics(stage, None, []))

    def evaluate_during_training(self, worker: Setup, progress: Progress) -> bool:
        """Collective: evaluate between two steps; return False if a stop was requested in the meantime.

        A failed evaluation is reported and training continues, because the weights do not depend on evaluations.
        """
        seconds_before = self.evaluated_s
        try:
            self.evaluate(worker, progress)
        except EvaluationStopped:
            line = f"evaluation of step {progress.step} stopped; it will be repeated later"
            worker.group.telemetry.report(STOPPED, {"step": progress.step}, line)
            return False
        except EvaluationFailed as error:
            report_failure(worker, progress, error, "training continues without it")
        seconds = self.evaluated_s - seconds_before
        if worker.group.rank == 0 and seconds > 0:
            self.report_cost(worker, progress.step, seconds)
        return True

    def report_cost(self, worker: Setup, step: int, seconds: float) -> None:
        """Log the fraction of time spent on evaluations, once per attempt, after the first evaluation."""
        if self.is_price_reported or step <= self.first_step:
            return
        self.is_price_reported = True
        every = self.cfg.evaluate_every
        busy_s = time.monotonic() - self.began - self.evaluated_s
        step_s = busy_s / max(step - self.first_step, 1)
        share = seconds / (seconds + every * step_s)
        worker.group.telemetry.log(
            f"evaluation during training: {seconds:.2f}s every {every} steps, {share:.1%} of the time"
            f"{self.advice(share)}"
        )

    def advice(self, share: float) -> str:
        """Return a suggestion to evaluate on other workers, for the log line; "" if that would save little time."""
        # If evaluated steps are saved for their values, training must wait for the values anyway.
        if self.cfg.saves_evaluated or share < WORTH_SPARING:
            return ""
        return "; with evaluate_on=spare a spare worker evaluates checkpoints during training, if the cluster has room"

    def evaluate_at_end(self, worker: Setup, progress: Progress) -> None:
        """Collective: evaluate the stage's final, committed weights, or their average if the stage has one.

        Raises EvaluationFailed, whose exit code becomes the exit code of the stage, or EvaluationStopped. In both
        cases, running the same command again resumes with this evaluation.
        """
        polyak = self.cfg.polyak
        try:
            if polyak:
                with worker.engine.averaged():
                    self.evaluate(worker, progress, f"  of the weights averaged with decay {polyak}")
            else:
                self.evaluate(worker, progress)
        except EvaluationStopped:
            raise EvaluationStopped(
                f"stopped during the evaluation of step {progress.step}, which is committed; "
                "run the same command again to repeat the evaluation"
            ) from None
        except EvaluationFailed as error:
            report_failure(worker, progress, error, "the stage ends; its last step is committed")
            # If a protocol failed, rather than a set, its message already contains a remedy.
            remedy = "correct the cause"
            if error.path is not None:
                remedy = "repair the set"
            raise EvaluationFailed(
                f"the evaluation of step {progress.step} failed: {error}\n"
                f"  all {progress.step} steps are committed in {worker.saver.checkpoints.address}; no training is "
                "lost\n"
                f"  {remedy}, then run the same command again to repeat the evaluation",
                error.exit_code,
            ) from error

    def evaluate(self, worker: Setup, progress: Progress, remark: str = "") -> None:
        """Collective: evaluate the engine's weights on the recipe's evaluation sets, and report the values.

        On all workers, raises EvaluationFailed if the evaluation fails, or EvaluationStopped if a stop was requested.
        """
        group = worker.group
        began = time.monotonic()
        try:
            values, warnings = evaluate_weights(
                self.cfg,
                self.job,
                worker.model_config,
                EvaluationGroup(group.phases, group.device, worker.stop.is_requested, progress.step),
                worker.engine.model,
                self.job.attempt_folder,
                ranks=(group.rank,),
                world=group.world,
                indexes=worker.data.sets,
            )
        finally:
            seconds = time.monotonic() - began
            worker.log.window.evaluated_s += seconds
            self.evaluated_s += seconds
        for warning in warnings:
            group.telemetry.log(warning)
        if values:
            progress.last_metrics = {name: value for name, value in values.items() if isinstance(value, float)}
            where: dict[str, float | str] = {"where": "training", "seconds": round(seconds, 3)}
            group.telemetry.report(**document.evaluation_record(progress.step, values, where, remark))


def report_failure(worker: Setup, progress: Progress, error: EvaluationFailed, consequence: str) -> None:
    """Record a failed evaluation, and log its reason and its consequence for the stage in one line."""
    values = {"step": progress.step, "error": str(error), "exit_code": error.exit_code}
    line = f"evaluate step {progress.step} FAILED ({one_line(str(error))}); {consequence}"
    worker.group.telemetry.report("evaluate_failed", values, line)
