"""Asynchronous evaluation in the workers (`evaluate_on: spare`): a hook and its evaluator, and the spare worker's work.

1. Rank 0 requests the evaluation of a step that is about to be committed, if a spare worker can do it
   (`AsyncEvaluator.request`); otherwise the loop evaluates it.
2. The driver runs `evaluate_commit` there, and leaves the outcome in the stage's folder (async_evaluation.py).
3. Rank 0 reports the outcome with its next record of training.
"""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist

import models
from pipeline.checkpoints.manifest import committed, read_manifest, step_of
from pipeline.checkpoints.needed import requested_steps
from pipeline.checkpoints.reader import Reader
from pipeline.evaluation.evaluator import EvaluationGroup
from pipeline.evaluation.in_training import LoopEvaluator, evaluate_weights
from pipeline.extras import async_evaluation
from pipeline.extras.async_evaluation import AsyncConfig
from pipeline.hooks import Hook
from pipeline.monitoring.watchdog import Phases
from pipeline.start import read_task

if TYPE_CHECKING:
    from pipeline.worker import Progress, Setup


class AsyncEvaluator(LoopEvaluator):
    """Has commits evaluated by a spare worker during training; evaluates itself if there is none."""

    cfg: AsyncConfig

    @property
    def is_spare(self) -> bool:
        """Return whether evaluations may be requested at all."""
        return self.cfg.evaluate_on == "spare" and self.job.storage.is_shared

    def advice(self, share: float) -> str:
        """Return what to do about evaluations that take this share of the time, for the end of a log line."""
        if self.cfg.evaluate_on == "spare":
            return "; evaluate_on=spare, but nothing was spare"
        return super().advice(share)

    def recorded(self, stage: Path) -> set[int]:
        """Return the steps whose evaluation has an outcome, reported or not."""
        return async_evaluation.recorded(stage)

    def request(self, worker: "Setup", step: int) -> bool:
        """Collective: request the evaluation of a step during training; return False if nothing is spare for it."""
        if not self.is_spare:
            return False
        is_requested = [False]
        if worker.group.rank == 0:
            stage = Path(self.job.directory)
            # A disk that refuses the request costs the loop an evaluation of its own, not the run.
            with suppress(OSError):
                if (self.job.attempt_folder / async_evaluation.SPARE_FILE).exists():
                    async_evaluation.request(stage, step)
                    is_requested = [True]
                else:
                    # An earlier attempt may have requested it, and lost the step.
                    async_evaluation.withdraw(stage, step)
        dist.broadcast_object_list(is_requested, src=0)
        return is_requested[0]

    def resume(self, worker: "Setup", progress: "Progress") -> bool:
        """Collective: at the start of an attempt, request all commits without an outcome, or evaluate its step.

        Requests that nobody will serve are withdrawn, and the skipped ones reported.
        """
        evaluates_elsewhere = self.is_spare and self.cfg.evaluate_every > 0
        if worker.group.rank == 0:
            stage = Path(self.job.directory)
            with suppress(OSError):
                # Requests are read first: an outcome is written before its request goes.
                requested = requested_steps(stage)
                recorded = self.recorded(stage)
                if evaluates_elsewhere:
                    commits = {progress.step, *map(step_of, committed(stage / "checkpoints"))}
                    for step in commits - recorded - set(requested):
                        if step <= progress.step and self.was_due(worker, step):
                            async_evaluation.request(stage, step)
                else:
                    self.withdraw(worker, progress.step, requested, recorded)
            async_evaluation.report_records(stage, worker.group.telemetry.report)
        return evaluates_elsewhere or super().resume(worker, progress)

    def withdraw(self, worker: "Setup", start: int, requested: list[int], recorded: set[int]) -> None:
        """Withdraw all requests; those of steps before `start`, which will not be taken again, are skipped."""
        stage = Path(self.job.directory)
        for step in requested:
            is_evaluated_now = step == start and self.was_due(worker, step)
            if step <= start and step not in recorded and not is_evaluated_now:
                async_evaluation.skip(stage, step, "nothing is evaluated beside training any more")
            async_evaluation.withdraw(stage, step)


class AsyncEvaluation(Hook):
    """Evaluates commits during training, and reports their outcomes."""

    Config = AsyncConfig
    evaluator = AsyncEvaluator

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Keep the checkpoints of requested steps."""
        self.worker = worker
        if self.cfg.evaluate_on == "spare":
            worker.saver.needed.append(partial(requested_steps, Path(self.job.directory)))

    def before_record(self, kind: str, values: dict[str, Any]) -> str:
        """Report the outcomes that the driver has left, before the training steps that follow them."""
        if kind == "train" and self.worker.group.rank == 0:
            async_evaluation.report_records(Path(self.job.directory), self.worker.group.telemetry.report)
        return ""


class AsyncOutcome(TypedDict):
    """Holds the outcome of one evaluation beside training."""

    values: dict[str, float | int]  # as the loop records them
    node: str
    seconds: float  # from the reading of the weights on
    remarks: list[str]  # lines for people


def evaluate_commit(task: Mapping[str, Any]) -> AsyncOutcome:
    """Evaluate one committed checkpoint on the sets of its stage, in a process without a group.

    In:  {"config": …, "job": …, "checkpoint": "/runs/x/20-pretrain/checkpoints/step-0000001200", "folder": "…"}
    Out: {"values": {"accuracy": 0.81, "judged": 50000}, "node": "n7", "seconds": 74.1, "remarks": []}

    Every byte of the checkpoint is verified. Raises CheckpointError if it is not what was committed, and whatever
    reading a set raises.
    """
    began = time.monotonic()
    cfg, job, _ = read_task(task)
    folder = Path(task["checkpoint"])
    step = step_of(folder)
    phases = Phases(Path(task["folder"]), 0, cfg.stall_s)
    phases.enter("load", step)
    manifest = read_manifest(folder)  # the weights are compared with its digests when they are read
    model_config = models.from_dict(job.model)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # The weights that the loop computes with after the checkpoint's step. Between steps these are the masters, even if
    # the stage will end with averaged weights.
    model = models.from_config(model_config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict(Reader(folder, manifest.files).weights(shapes), strict=False)
    # As `start.build_model` prepares it: compiled blocks may round differently. Nothing is recomputed in evaluation.
    if cfg.compile:
        models.compile_blocks(model)
    model.eval().to(device, torch.bfloat16 if cfg.precision == "bf16" else torch.float32)
    values, warnings = evaluate_weights(
        cfg,
        job,
        model_config,
        EvaluationGroup(phases, device, wants_stop=lambda: False, step=step),
        model,
        Path(task["folder"]),
        # The parts of all the workers that saved it, one after the other: a product's last bits depend on the rows
        # beside it, so that only the same batches give the same features.
        ranks=range(manifest.world),
        world=manifest.world,
        indexes={},
    )
    phases.close()
    seconds = round(time.monotonic() - began, 3)
    return {"values": values, "node": socket.gethostname(), "seconds": seconds, "remarks": warnings}
