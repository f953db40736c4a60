"""Asynchronous evaluation in the workers (`evaluate_on: spare`): the hook, its evaluator, and the spare worker's task.

1. Before a step is committed, rank 0 requests the step's evaluation if a spare worker is available
   (`AsyncEvaluator.request`); otherwise the training loop evaluates it.
2. The driver runs `evaluate_commit` on the spare worker, and writes the record to the stage's folder
   (async_evaluation.py).
3. Rank 0 reports this record together with its next training record.
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
from pipeline.artifacts import requested_steps
from pipeline.checkpoints.manifest import committed, read_manifest, step_of
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
    """Evaluator that uses a spare worker during training, or the training workers if none is available."""

    cfg: AsyncConfig

    @property
    def is_spare(self) -> bool:
        """Return whether the config and the storage allow asynchronous evaluation."""
        return self.cfg.evaluate_on == "spare" and self.job.storage.is_shared

    def advice(self, share: float) -> str:
        """Return advice for the log line about evaluations that take this fraction of the training time."""
        if self.cfg.evaluate_on == "spare":
            return "; evaluate_on=spare is set, but no spare worker was available"
        return super().advice(share)

    def recorded(self, stage: Path) -> set[int]:
        """Return the steps with an evaluation record, even if rank 0 has not yet added it to metrics.jsonl."""
        return async_evaluation.recorded(stage)

    def request(self, worker: "Setup", step: int) -> bool:
        """Collective: request a step's evaluation on a spare worker; return False if no spare worker is available."""
        if not self.is_spare:
            return False
        is_requested = [False]
        if worker.group.rank == 0:
            stage = Path(self.job.directory)
            # If the request cannot be written, the loop evaluates the step itself instead of failing the run.
            with suppress(OSError):
                if (self.job.attempt_folder / async_evaluation.SPARE_FILE).exists():
                    async_evaluation.request(stage, step)
                    is_requested = [True]
                else:
                    # An earlier attempt may have requested this step before it failed.
                    async_evaluation.withdraw(stage, step)
        dist.broadcast_object_list(is_requested, src=0)
        return is_requested[0]

    def resume(self, worker: "Setup", progress: "Progress") -> bool:
        """Collective: request or run, at the start of an attempt, all evaluations without a record.

        With asynchronous evaluation, request the evaluation of each commit without a record. Otherwise withdraw all
        requests, report them as skipped, and evaluate the checkpoint's step if its evaluation is due.
        """
        evaluates_elsewhere = self.is_spare and self.cfg.evaluate_every > 0
        if worker.group.rank == 0:
            stage = Path(self.job.directory)
            with suppress(OSError):
                # Read the requests before the records: a record is written before its request is deleted.
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
        """Withdraw all requests; record steps up to `start` as skipped, because the run does not repeat these steps."""
        stage = Path(self.job.directory)
        for step in requested:
            is_evaluated_now = step == start and self.was_due(worker, step)
            if step <= start and step not in recorded and not is_evaluated_now:
                async_evaluation.skip(stage, step, "asynchronous evaluation has been turned off")
            async_evaluation.withdraw(stage, step)


class AsyncEvaluation(Hook):
    """Hook that requests asynchronous evaluations of committed steps, and reports the results."""

    Config = AsyncConfig
    evaluator = AsyncEvaluator

    def begin(self, worker: "Setup", progress: "Progress") -> None:
        """Protect the checkpoints of requested steps from being deleted."""
        self.worker = worker
        if self.cfg.evaluate_on == "spare":
            worker.saver.needed.append(partial(requested_steps, Path(self.job.directory)))

    def before_record(self, kind: str, values: dict[str, Any]) -> str:
        """Report the driver's new evaluation records before the next training record."""
        if kind == "train" and self.worker.group.rank == 0:
            async_evaluation.report_records(Path(self.job.directory), self.worker.group.telemetry.report)
        return ""


class AsyncOutcome(TypedDict):
    """Result of one asynchronous evaluation."""

    values: dict[str, Any]  # the same keys as in the loop's records
    node: str
    seconds: float  # including the time to read the weights
    remarks: list[str]  # warnings for the log


def evaluate_commit(task: Mapping[str, Any]) -> AsyncOutcome:
    """Evaluate one committed checkpoint on its stage's evaluation sets, in one process without a process group.

    In:  {"config": …, "job": …, "checkpoint": "/runs/x/20-pretrain/checkpoints/step-0000001200", "folder": "…"}
    Out: {"values": {"accuracy": 0.81, "judged": 50000}, "node": "n7", "seconds": 74.1, "remarks": []}

    All weights are verified by digest. Raises CheckpointError if the checkpoint has changed since its commit, or any
    error from reading an evaluation set.
    """
    began = time.monotonic()
    cfg, job, _ = read_task(task)
    folder = Path(task["checkpoint"])
    step = step_of(folder)
    phases = Phases(Path(task["folder"]), 0, cfg.stall_s)
    phases.enter("load", step)
    manifest = read_manifest(folder)  # has the digests that verify the weights
    model_config = models.from_dict(job.model)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Load the weights that evaluation in the training loop would use after this step: the master weights, even if the
    # stage ends with averaged weights.
    model = models.from_config(model_config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict(Reader(folder, manifest.files).weights(shapes), strict=False)
    # Compile the blocks as in `start.build_model`, because compiled blocks may round differently.
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
        # Process the parts of all training workers one after another. The last bits of a matrix product depend on the
        # batch, so only the same batches reproduce the same features.
        ranks=range(manifest.world),
        world=manifest.world,
        indexes={},
    )
    phases.close()
    seconds = round(time.monotonic() - began, 3)
    return {"values": values, "node": socket.gethostname(), "seconds": seconds, "remarks": warnings}
