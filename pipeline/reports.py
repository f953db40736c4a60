"""What a training stage reports: the steps since the last record, the log line, and evaluations.

All go through `Telemetry`, which writes log.txt, metrics.jsonl and TensorBoard on rank 0. Evaluations are collective:
every rank judges its part of the set.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.checks import one_line
from data.evaluation import EvaluationBatch, EvaluationSet
from data.index.index import Index
from models import ModelConfig
from pipeline.evaluation import async_evaluation
from pipeline.evaluation.evaluate import (
    EvaluationFailed,
    EvaluationStopped,
    accuracy,
    agreed,
    watched,
)
from pipeline.evaluation.features import FeatureStore, collect
from pipeline.evaluation.protocols import few_shot_metrics
from pipeline.evaluation.rank_zero import at_rank_0_alone
from pipeline.monitoring.telemetry import Window, log_line, memory_gb, peak_flops
from pipeline.token_dropping import flops_of, phases
from pipeline.training_config import TrainConfig
from pipeline.worker import Progress, Worker


def report_training(worker: Worker, progress: Progress, rate: float, *, has_line: bool) -> None:
    """Write a record of the steps since the last one, and where asked the log line of those since the last line.

    A save writes records between two lines. A record that the disk refuses is written again with the next steps.
    """
    report_answers(worker)
    window = worker.window
    since_line = worker.since_line
    if not window.losses:  # all steps are in the last record
        return
    window.stalled_s += worker.saver.stalled_s
    worker.saver.stalled_s = 0.0
    values = training_values(worker, progress, rate, window)
    line = ""
    if has_line:
        since_line.extend(window)
        line = log_line(training_values(worker, progress, rate, since_line))
        since_line.clear()
    is_written = worker.telemetry.report("train", values, line)
    if is_written:
        if not has_line:
            since_line.extend(window)
        window.clear()


def training_values(worker: Worker, progress: Progress, rate: float, window: Window) -> dict[str, Any]:
    """Return what is recorded of a window that ends with the step of now."""
    cfg = worker.cfg
    samples = cfg.batch_size * len(window.losses)
    # The FLOPs of the algorithm, as published: blocks that are computed again in the backward pass do not count twice.
    in_order = phases(cfg.thinning, worker.steps, worker.model_config)
    steps = range(progress.step - len(window.losses), progress.step)
    flops = flops_of(in_order, worker.model_config, steps, cfg.batch_size) / worker.world
    return {
        "step": progress.step,
        "steps": worker.steps,
        "lr": rate,
        **window.values(samples, flops, peak_flops(worker.device), worker.steps - progress.step),
        "memory_gb": memory_gb(),
        "world": worker.world,
        "samples_seen": worker.health.samples_seen(progress.step),
        "bad_samples": progress.bad_samples,
        "ledger": progress.ledger.hex,
    }


def evaluate(worker: Worker, progress: Progress, remark: str = "") -> None:
    """Collective: measure test accuracy and few-shot accuracy, as far as the recipe names sets for them.

    Raises EvaluationFailed and EvaluationStopped, on all workers alike.
    """
    job = worker.job
    began = time.monotonic()
    values: dict[str, float | int] = {}
    try:
        if job.evaluate:
            values |= measure_accuracy(worker, progress.step, job.evaluate)
        if job.probe_train and job.probe_test:
            values |= measure_few_shot(worker, progress.step, job.probe_train, job.probe_test)
    finally:
        seconds = time.monotonic() - began
        worker.window.evaluated_s += seconds
        worker.loop_price.evaluated_s += seconds
    if values and worker.rank == 0:
        progress.last_metrics = async_evaluation.metrics_of(values)
        line = async_evaluation.evaluation_line(progress.step, progress.last_metrics, remark)
        where = {"where": "training", "seconds": round(seconds, 3)}
        worker.telemetry.report("evaluate", {"step": progress.step, **values, **where}, line)


def evaluate_between(worker: Worker, progress: Progress) -> bool:
    """Collective: evaluate amid the steps; return False where the run was asked to stop meanwhile.

    An evaluation that fails is said and recorded, and the steps go on: what they learn does not depend on it.
    """
    price = worker.loop_price
    seconds_before = price.evaluated_s
    try:
        evaluate(worker, progress)
    except EvaluationStopped:
        if worker.rank == 0:
            is_asked = asks_later(worker, progress.step)
            consequence = "it is done later" if is_asked else "it is left out"
            worker.telemetry.say(f"evaluate step {progress.step}: stopped, {consequence}")
        return False
    except EvaluationFailed as error:
        report_failure(worker, progress, error, "training goes on without it")
    # Once an attempt, by its first evaluation behind a step: whoever finds it dear can have it done elsewhere.
    has_trained = progress.step > price.first_step
    if worker.rank == 0 and has_trained and not price.is_reported and price.evaluated_s > seconds_before:
        price.is_reported = True
        seconds = price.evaluated_s - seconds_before
        looks_for_spare = worker.cfg.evaluate_on == "spare"
        line = price.line(progress.step, seconds, worker.cfg.evaluate_every, looks_for_spare=looks_for_spare)
        worker.telemetry.say(line)
    return True


def asks_beside(worker: Worker, step: int) -> bool:
    """Collective: ask for the evaluation of a step beside training, where somebody is spare; tell whether it was asked.

    The save of this step has begun: who judges it waits for its commit.
    """
    if worker.cfg.evaluate_on == "training" or worker.job.remote is not None:
        return False
    is_asked = [False]
    if worker.rank == 0:
        is_spare = (worker.job.attempt_folder / async_evaluation.SPARE_FILE).exists()
        stage = Path(worker.job.directory)
        # A disk that refuses the question costs the loop an evaluation of its own, not the run.
        with suppress(OSError):
            # Where the workers judge it themselves and are killed meanwhile, the next attempt knows that it is due.
            async_evaluation.request(stage, step, async_evaluation.REQUESTED if is_spare else async_evaluation.IN_LOOP)
            is_asked = [is_spare]
            # An attempt before may have asked for the other, and lost the step.
            async_evaluation.withdraw(stage, step, async_evaluation.IN_LOOP if is_spare else async_evaluation.REQUESTED)
    dist.broadcast_object_list(is_asked, src=0)
    return is_asked[0]


def end_in_loop(worker: Worker, step: int) -> None:
    """Say that an evaluation in the loop has come to its end; rank 0 only."""
    if worker.rank == 0:
        for suffix in (async_evaluation.IN_LOOP, async_evaluation.REQUESTED):
            with suppress(OSError):
                async_evaluation.withdraw(Path(worker.job.directory), step, suffix)


def asks_later(worker: Worker, step: int) -> bool:
    """Leave word that a step is still to be evaluated; tell whether it is there. Rank 0 only."""
    # In an object store there is nothing that the next attempt would look at.
    if worker.job.remote is not None:
        return False
    try:
        async_evaluation.request(Path(worker.job.directory), step, async_evaluation.IN_LOOP)
    except OSError:
        return False
    return True


def make_up_for_evaluation(worker: Worker, progress: Progress) -> bool:
    """Collective: do what a stop has cut short, at the step that the attempt starts from; False where stopped again.

    Nothing where somebody beside training does it. Where nobody does, what else was left is skipped, and said.
    """
    cfg = worker.cfg
    if worker.job.remote is not None or (cfg.evaluate_on == "spare" and cfg.evaluate_every):
        return True
    is_missing = [False]
    if worker.rank == 0:
        stage = Path(worker.job.directory)
        is_before_the_end = cfg.evaluate_every > 0 and progress.step < worker.steps
        with suppress(OSError):
            is_missing = [is_before_the_end and progress.step in async_evaluation.due(stage)]
            skip_what_was_left(stage, progress.step, is_missing[0])
        report_answers(worker)
    dist.broadcast_object_list(is_missing, src=0)
    if is_missing[0]:
        if not evaluate_between(worker, progress):
            return False
        end_in_loop(worker, progress.step)
    return True


def skip_what_was_left(stage: Path, step: int, is_missing: bool) -> None:
    """Answer all that is open that it is not judged, but for `step` where that is missing. Raises OSError."""
    for open_step in sorted(async_evaluation.due(stage)):
        if open_step == step and is_missing:
            continue
        # What lies ahead is taken, and evaluated, again.
        if open_step <= step:
            async_evaluation.skip(stage, open_step, "nothing is judged beside training any more")
        for suffix in (async_evaluation.IN_LOOP, async_evaluation.REQUESTED):
            async_evaluation.withdraw(stage, open_step, suffix)


def report_answers(worker: Worker) -> None:
    """Report what the worker beside training has judged since the last call, each under its step; rank 0 only."""
    # Also where evaluate_on is training now: an attempt before may have left some.
    if worker.rank == 0:
        async_evaluation.report_records(Path(worker.job.directory), worker.telemetry.report)


def evaluate_at_the_end(worker: Worker, progress: Progress, remark: str = "") -> None:
    """Collective: evaluate what the stage hands on, which is committed.

    Raises EvaluationFailed, whose exit code ends the stage, and EvaluationStopped. After either, the same command
    begins with this evaluation.
    """
    try:
        evaluate(worker, progress, remark)
    except EvaluationStopped:
        raise EvaluationStopped(
            f"stopped in the evaluation of step {progress.step}, which is committed; run the same command again: "
            "it goes on with the evaluation"
        ) from None
    except EvaluationFailed as error:
        report_failure(worker, progress, error, "the stage ends, its last step is committed")
        raise EvaluationFailed(
            f"the evaluation of step {progress.step} failed: {error}\n"
            f"  all {progress.step} steps are committed in {worker.saver.folder}; no training is lost\n"
            "  repair the set, then run the same command again: it goes on with the evaluation",
            error.exit_code,
        ) from error


def report_failure(worker: Worker, progress: Progress, error: EvaluationFailed, consequence: str) -> None:
    """Record an evaluation that failed, and say in one line why and what becomes of the stage."""
    values = {"step": progress.step, "error": str(error), "exit_code": error.exit_code}
    line = f"evaluate step {progress.step} FAILED ({one_line(str(error))}); {consequence}"
    worker.telemetry.report("evaluate_failed", values, line)


def measure_accuracy(worker: Worker, step: int, path: str) -> dict[str, float | int]:
    """Collective: return {"accuracy": top-1, "judged": samples that could be read}.

    Rank 0 reports how many could not be read.
    """
    samples = samples_of(worker, batches_of(worker, step, path), path)
    share_right, judged = accuracy(worker.engine.model, samples, worker.engine.dtype, worker.device)
    unreadable = worker.sets[path].samples - judged
    if unreadable and worker.rank == 0:
        worker.telemetry.say(async_evaluation.unreadable_line(unreadable, path))
    return {"accuracy": share_right, "judged": judged}


def measure_few_shot(worker: Worker, step: int, train: str, test: str) -> dict[str, float]:
    """Collective: every rank computes features of its part; rank 0 fits the probe, the others return {}."""
    train_features = collected(worker, step, train)
    test_features = collected(worker, step, test)
    try:
        metrics = at_rank_0_alone(
            lambda beat: few_shot_metrics(train_features, test_features, worker.cfg.probe, beat),
            "probe",
            phases=worker.phases,
            wants_stop=worker.wants_stop,
            device=worker.device,
            log=worker.phases.log,
            step=step,
        )
    except EvaluationFailed as error:
        raise EvaluationFailed(f"the probe of {train} and {test}: {error}", error.exit_code) from error
    train_features.close()
    test_features.close()
    return metrics or {}


def collected(worker: Worker, step: int, path: str) -> FeatureStore:
    """Collective: return the features of a set, which rank 0 keeps in a file that goes when nobody reads it any more.

    Raises EvaluationFailed, which names the set, and EvaluationStopped.
    """
    store = FeatureStore(worker.sets[path], worker.job.attempt_folder)
    batches = store.watching(batches_of(worker, step, path))
    samples = samples_of(worker, batches, path)
    collect(worker.engine.model, samples, store, worker.engine.dtype, worker.device)
    return store


def samples_of(worker: Worker, batches: Iterator[EvaluationBatch], path: str) -> Iterator[EvaluationBatch]:
    """Collective: iterate this rank's batches of a set, each once all have theirs.

    Raises EvaluationFailed, which names the set, and EvaluationStopped.
    """
    try:
        yield from agreed(batches, worker.wants_stop, worker.device, worker.phases.log)
    except EvaluationFailed as error:
        raise EvaluationFailed(f"{path}: {error}", error.exit_code) from error


def batches_of(worker: Worker, step: int, path: str) -> Iterator[EvaluationBatch]:
    """Iterate this rank's batches of a set; also the opening of the set waits for the first batch."""
    part = part_of_set(worker.sets[path], worker.cfg, worker.model_config, worker.rank, worker.world)
    yield from watched(part, worker.phases, step)


def part_of_set(index: Index, cfg: TrainConfig, model_config: ModelConfig, rank: int, world: int) -> EvaluationSet:
    """Return a worker's part of a set as training judges on it, and as who judges beside training has to read it."""
    return EvaluationSet(
        index,
        # big_vision's few-shot evaluation squashes an image to a square (SPEC 2.5); a recipe names other ops.
        cfg.data.preprocess or f"resize({model_config.image_size})",
        # Training fitted this many images in memory, so evaluation, which keeps no activations, does too.
        batch_size=cfg.micro_batch,
        rank=rank,
        world=world,
        max_labels=cfg.data.max_labels,
        cache=cfg.data.cache,
    )
