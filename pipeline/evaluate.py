"""Evaluations of a trained stage: amid the steps, at its end, and of a committed step beside training.

All evaluate the weights at a step in the same way (`evaluate_weights`):
1. `evaluate_between`: the training workers evaluate, and go on with the steps whatever becomes of it;
2. `request_async`: rank 0 requests the evaluation of a step that is about to be committed, where a worker is spare;
   the driver runs `evaluate_commit` there, and rank 0 reports the outcome (pipeline/extras/async_evaluation.py);
3. `evaluate_unfinished`: at the start of an attempt, the commits whose evaluation a stop or a kill cut short;
4. `evaluate_at_the_end`: of the weights that the stage ends with; a failure ends the stage.

Whether the stage ends early, for lack of a better evaluation (`patience`) or below what a law foretold of it, is
decided here too: `ends_early`.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist

import models
from data.checks import one_line
from data.index.index import Index
from models import ModelConfig
from pipeline import artifacts, config
from pipeline.checkpoints.manifest import committed, read_manifest, step_of
from pipeline.checkpoints.reader import Reader
from pipeline.evaluation import document
from pipeline.evaluation.protocols import Protocol
from pipeline.evaluation.worker import EvaluationFailed, EvaluationGroup, EvaluationStopped, Evaluator, Request
from pipeline.extras import async_evaluation
from pipeline.extras.best import evaluations_since_best
from pipeline.monitoring.telemetry import read_metrics
from pipeline.monitoring.watchdog import Phases
from pipeline.start import Job, Progress, Worker
from pipeline.training_config import TrainConfig
from pipeline.values import counted

EXAMPLES = 32  # samples of an evaluation that are kept with their predictions
WORTH_SPARING = 0.05  # of the time: what evaluations take, from which on it is said that others may do them
TRIES = 3  # of one evaluation whose workers die or hang

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
) -> tuple[dict[str, float | int], list[str]]:
    """Collective: evaluate a model as the recipe of its stage says: accuracy, and the few-shot probe.

    Returns, at rank 0, the values as metrics.jsonl has them, and warnings about samples that cannot be read; "accuracy"
    comes with "judged", the samples that could be read. The other arguments are those of Evaluator.
    """
    requests = []
    if job.evaluate:
        requests.append(Request(job.evaluate, None, Protocol("top-1", {}), examples=EXAMPLES))
    if job.probe_train and job.probe_test:
        requests.append(Request(job.probe_test, job.probe_train, cfg.probe.protocol(), first_label=True))
    evaluator = Evaluator(
        group=group,
        model=model,
        dtype=torch.bfloat16 if cfg.precision == "bf16" else torch.float32,
        folder=folder,
        # big_vision's few-shot evaluation squashes an image to a square (SPEC 2.5); a recipe names other ops.
        preprocess=cfg.data.preprocess or f"resize({model_config.image_size})",
        # Training fitted this many images in memory, so evaluation, which keeps no activations, does too.
        micro_batch=cfg.micro_batch,
        max_labels=cfg.data.max_labels,
        cache=cfg.data.cache,
        ranks=ranks,
        world=world,
        indexes=indexes,
    )
    results = evaluator.evaluate(requests)

    values: dict[str, float | int] = {}
    warnings: list[str] = []
    for request, result in zip(requests, results, strict=bool(results)):
        if request.protocol.name != "top-1":
            values |= document.metrics_with_seeds(result)
            continue
        # For the run's page; a disk that refuses them costs the page a few pictures.
        with suppress(OSError):
            examples = {"step": group.step, "set": request.test, "samples": result["examples"]}
            examples["classes"] = result["class_counts"]
            artifacts.write_record(Path(job.directory) / artifacts.EXAMPLES, examples)
        judged = result["set"]["judged"]
        values |= {"accuracy": result["values"]["top-1"]["value"], "judged": judged}
        unreadable = result["set"]["samples"] - judged
        # A damaged set must not pass for a worse or better model.
        if unreadable:
            warnings.append(
                f"evaluate: {unreadable} bad samples of {request.test} count neither way; see `jobs data check`"
            )
    return values, warnings


# ------------------------------------------------------------------------------------------------ in the loop


def evaluate(worker: Worker, progress: Progress, remark: str = "") -> None:
    """Collective: evaluate the engine's weights on the sets that the recipe names, and report the values.

    Raises EvaluationFailed and EvaluationStopped, on all workers alike.
    """
    began = time.monotonic()
    try:
        values, warnings = evaluate_weights(
            worker.cfg,
            worker.job,
            worker.model_config,
            EvaluationGroup(worker.phases, worker.device, worker.wants_stop, progress.step),
            worker.engine.model,
            worker.job.attempt_folder,
            ranks=(worker.rank,),
            world=worker.world,
            indexes=worker.sets,
        )
    finally:
        seconds = time.monotonic() - began
        worker.window.evaluated_s += seconds
        worker.loop_price.evaluated_s += seconds
    for warning in warnings:
        worker.telemetry.log(warning)
    if values:
        progress.last_metrics = {name: value for name, value in values.items() if isinstance(value, float)}
        where: dict[str, float | str] = {"where": "training", "seconds": round(seconds, 3)}
        record = async_evaluation.evaluation_record(progress.step, values, where, remark)
        worker.telemetry.report(**record)


def evaluate_between(worker: Worker, progress: Progress) -> bool:
    """Collective: evaluate amid the steps; return False where the run was asked to stop meanwhile.

    An evaluation that fails is reported, and the steps go on: what they learn does not depend on it.
    """
    price = worker.loop_price
    seconds_before = price.evaluated_s
    try:
        evaluate(worker, progress)
    except EvaluationStopped:
        if worker.rank == 0:
            worker.telemetry.log(f"evaluate step {progress.step}: stopped, it is done later")
        return False
    except EvaluationFailed as error:
        report_failure(worker, progress, error, "training goes on without it")
    # Once an attempt, by its first evaluation behind a step: an expensive one may be done elsewhere.
    has_trained = progress.step > price.first_step
    if worker.rank == 0 and has_trained and not price.is_reported and price.evaluated_s > seconds_before:
        price.is_reported = True
        seconds = price.evaluated_s - seconds_before
        every = worker.cfg.evaluate_every
        # The price of an evaluation after every so many steps, as a share of the time.
        busy_s = time.monotonic() - price.began - price.evaluated_s
        step_s = busy_s / max(progress.step - price.first_step, 1)
        share = seconds / (seconds + every * step_s)
        remark = "; evaluate_on=spare evaluates commits beside training, where the cluster has room"
        if worker.cfg.evaluate_on == "spare":
            remark = "; evaluate_on=spare, but nothing was spare"
        elif worker.cfg.keep_best is not None or share < WORTH_SPARING:
            remark = ""  # where the best is kept, the steps wait for it: it must be known when the stage ends
        worker.telemetry.log(
            f"evaluated in the loop: {seconds:.2f}s every {every} steps, {share:.1%} of the time{remark}"
        )
    return True


def ends_early(worker: Worker, progress: Progress) -> bool:
    """Collective: tell whether the stage ends here: `patience` evaluations have not been better than the best, or two
    are worse than what was foretold.

    It is told by the records alone, also at the start of an attempt.
    """
    cfg = worker.cfg
    job = worker.job
    if progress.step >= worker.steps or (not cfg.patience and job.foretold is None):
        return False
    is_over = [False]
    if worker.rank == 0:
        reason = job.hopeless
        since = None
        if cfg.patience and cfg.keep_best is not None:
            since = evaluations_since_best(Path(job.directory), cfg.keep_best)
        if not reason and since is not None and since[0] >= cfg.patience:
            count, best = since
            reason = (
                f"{counted(count, 'evaluation')} without a better {cfg.keep_best} than {best['value']:.4f} at step "
                f"{best['step']}, patience is {cfg.patience}"
            )
        if reason:
            is_over = [True]
            worker.telemetry.log(f"{reason}: the stage ends at step {progress.step} of {worker.steps}")
    dist.broadcast_object_list(is_over, src=0)
    return is_over[0]


def evaluate_at_the_end(worker: Worker, progress: Progress) -> None:
    """Collective: evaluate what the stage hands on, which is committed: the averaged weights, where there are such.

    Raises EvaluationFailed, whose exit code ends the stage, and EvaluationStopped. After either, the same command
    begins with this evaluation.
    """
    polyak = worker.cfg.polyak
    try:
        if polyak:
            with worker.engine.averaged():
                evaluate(worker, progress, f"  of the weights averaged by {polyak}")
        else:
            evaluate(worker, progress)
    except EvaluationStopped:
        raise EvaluationStopped(
            f"stopped in the evaluation of step {progress.step}, which is committed; run the same command again: "
            "it goes on with the evaluation"
        ) from None
    except EvaluationFailed as error:
        report_failure(worker, progress, error, "the stage ends, its last step is committed")
        raise EvaluationFailed(
            f"the evaluation of step {progress.step} failed: {error}\n"
            f"  all {progress.step} steps are committed in {worker.saver.checkpoints.address}; no training is lost\n"
            "  repair the set, then run the same command again: it goes on with the evaluation",
            error.exit_code,
        ) from error


def report_failure(worker: Worker, progress: Progress, error: EvaluationFailed, consequence: str) -> None:
    """Record an evaluation that failed, and say in one line why and what becomes of the stage."""
    values = {"step": progress.step, "error": str(error), "exit_code": error.exit_code}
    line = f"evaluate step {progress.step} FAILED ({one_line(str(error))}); {consequence}"
    worker.telemetry.report("evaluate_failed", values, line)


# ------------------------------------------------------------------------------------------------ requests


def request_async(worker: Worker, step: int) -> bool:
    """Collective: request the evaluation of a step beside training; return False where nothing is spare for it.

    The save of this step has begun: the evaluation waits for its commit.
    """
    if worker.cfg.evaluate_on == "training" or not worker.job.storage.is_shared:
        return False
    is_requested = [False]
    if worker.rank == 0:
        stage = Path(worker.job.directory)
        # A disk that refuses the request costs the loop an evaluation of its own, not the run.
        with suppress(OSError):
            if (worker.job.attempt_folder / async_evaluation.SPARE_FILE).exists():
                async_evaluation.request(stage, step)
                is_requested = [True]
            else:
                # An earlier attempt may have requested it, and lost the step.
                async_evaluation.withdraw(stage, step)
    dist.broadcast_object_list(is_requested, src=0)
    return is_requested[0]


def evaluate_unfinished(worker: Worker, progress: Progress) -> bool:
    """Collective: at the start of an attempt, evaluate what is due; return False where stopped in that.

    Due are commits without a recorded outcome. Where a spare worker evaluates, all of them are requested. Otherwise the
    workers evaluate the one that they start from, at most TRIES times; older requests are skipped. What is skipped is
    reported.
    """
    cfg = worker.cfg
    job = worker.job
    has_sets = bool(job.evaluate or job.probe_train)
    is_spare = cfg.evaluate_on == "spare" and cfg.evaluate_every > 0 and job.storage.is_shared
    is_due = [False]
    if worker.rank == 0:
        stage = Path(job.directory)
        with suppress(OSError):
            commits = {progress.step}
            if is_spare:
                commits.update(map(step_of, committed(stage / "checkpoints")))
            # Requests are read first: an outcome is written before its request goes.
            requested = async_evaluation.requested(stage)
            recorded = async_evaluation.recorded(stage)
            due = set()
            for step in commits - recorded:
                # The last step is evaluated at the end, in any case.
                # That with which a branch begins is its trunk's.
                is_amid = (cfg.begin or 0) < step <= progress.step and step < worker.steps
                if has_sets and is_amid and cfg.evaluate_every and step % cfg.evaluate_every == 0:
                    due.add(step)
            if is_spare:
                for step in due.difference(requested):
                    async_evaluation.request(stage, step)
            else:
                is_due = [progress.step in due]
                for step in requested:
                    # Steps that lie ahead are taken, and evaluated, again.
                    if step <= progress.step and step not in recorded and step not in due:
                        async_evaluation.skip(stage, step, "nothing is evaluated beside training any more")
                    async_evaluation.withdraw(stage, step)
                starts = [record for record in read_metrics(stage, "start") if record["step"] == progress.step]
                # It may be what ends the attempts: then training would never go on.
                if is_due[0] and len(starts) >= TRIES:
                    is_due = [False]
                    reason = f"{TRIES} attempts have ended before it had a value"
                    async_evaluation.skip(stage, progress.step, reason)
        async_evaluation.report_records(stage, worker.telemetry.report)
    dist.broadcast_object_list(is_due, src=0)
    return not is_due[0] or evaluate_between(worker, progress)


# ------------------------------------------------------------------------------------------------ beside training


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

    Every byte of the checkpoint is verified. Raises CheckpointError where it is not what was committed, and whatever
    the reading of a set raises.
    """
    began = time.monotonic()
    cfg = config.build(TrainConfig, task["config"], "config")
    job = Job(**task["job"])
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
    # The weights that the loop computes with after the checkpoint's step. Amid the steps these are the masters, also
    # where the stage will end with averaged weights.
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
