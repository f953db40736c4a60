"""The one training loop: a worker of a trained stage, from its task to a committed checkpoint and weights.

1. `set_up` joins the group, builds data, model and engine, and loads a checkpoint or the weights to start from.
2. Every step: forward and backward over the micro-batches.
3. Once a step, in one reduction and one wait: the gradient's norm, which decides whether the optimizer steps, and what
   all workers agree on: mean loss, bad samples, whether to stop, whether a save is written.
4. What the step requires: a report, the commit of a save, a new save, an evaluation, the end.
5. At the end everything is committed, evaluated, and exported as weights that are independent of the world size: those
   of the last step, unless a hook chooses another.

A save that is due is committed before its step is evaluated: an evaluation that fails, or is killed, costs none of it.
Extras take part through hooks alone (pipeline/hooks.py).

In:  {"config": {"steps": 700000, "batch_size": 4096, …}, "job": {"directory": "/runs/x/20-pretrain", "attempt": 7, …}}
Out: {"step": 700000, "samples_seen": 2867200000, "ledger": "9f3c…", "metrics": {"accuracy": 0.84}, …}, and in the
     stage's folder checkpoints/step-0000700000/, weights.safetensors, model.json, log.txt, metrics.jsonl
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch
import torch.distributed as dist

import models
from data.errors import DataError, Preempted
from data.files import whole_file
from data.loader import Batch
from data.order import Ids
from pipeline import artifacts, config
from pipeline.architecture import preprocessing_of
from pipeline.batches import OBJECTIVES, begin_forward, micro_batches, next_batch, planned_ids, samples_in_mean
from pipeline.checkpoints.manifest import FileRecord, Manifest
from pipeline.checkpoints.reader import export
from pipeline.engine.engine import on_device
from pipeline.monitoring.telemetry import Window, account, log_line, memory_gb, peak_flops, read_metrics
from pipeline.optimization import learning_rate
from pipeline.phases import flops_of
from pipeline.start import Worker, read_task, set_up
from pipeline.worker import Progress, handle_sigterm

BAD_GRACE = 10_000  # samples before max_bad_fraction is enforced


class ChosenWeights(TypedDict):
    """Holds which step's weights a stage exports instead of the last, and why."""

    metric: str
    value: float
    step: int
    samples_seen: int
    ledger: str


class StageResult(TypedDict):
    """Holds what a trained stage returns to the driver."""

    step: int
    samples_seen: int
    ledger: str
    bad_samples: int
    metrics: dict[str, float]
    world: int
    files: dict[str, FileRecord]  # the weights and their model, as rank 0 read them back
    kept: NotRequired[ChosenWeights]  # if a hook has chosen other weights than the last


def train(task: Mapping[str, Any]) -> StageResult:
    """Run or resume the stage on this worker of the group; return its result. Collective.

    `task` holds the plain "config", the fields of "job", and "hooks". Raises Preempted after committing if asked to
    stop, RolledBack, Diverged, CheckpointError, DataError.
    """
    # 1. Everything that the loop works with, and the step that it starts from.
    worker, progress = set_up(read_task(task))
    handle_sigterm(worker.stop.signal)
    first_step = progress.step + 1
    # The loader computes its position from the step alone: a resume at step 600,000 starts as fast as one at step 0.
    batches = micro_batches(worker, progress.step)
    if not worker.evaluator.resume(worker, progress):
        raise Preempted(f"stopped at step {progress.step}, which was committed; run the same command again to go on")
    # An attempt may have been killed between its last evaluation and its end.
    was_over = is_over = ends_early(worker, progress)

    while progress.step < worker.data.last_step and not is_over:
        if worker.health.next_step(progress.step) != progress.step:
            skip_excluded(worker, progress, first_step)
            batches = micro_batches(worker, progress.step)
            continue

        # 2 and 3. The step itself.
        taken = take_step(worker, progress.step, batches)
        count_step(worker, progress, taken)

        # 4. What the step requires, in this order: a report, the commit of a save, a new save, an evaluation, the end.
        step = progress.step
        is_last = step == worker.data.last_step
        is_evaluated = worker.evaluator.is_due(step)
        is_finite = worker.health.skipped_in_a_row == 0
        is_due = worker.saver.is_due(step, is_evaluated=is_evaluated, is_finite=is_finite)
        is_saved = is_due or is_last or taken.stopping
        has_line = step % worker.cfg.log_every == 0 or step == first_step or is_last or taken.stopping
        # A commit implies its metrics: the record of its steps is written before the save begins.
        if has_line or is_saved:
            report_training(worker, progress, has_line=has_line)
        if taken.all_written or is_saved:  # on slow storage a new save waits for the previous one
            worker.saver.finish(step)
        if is_saved:
            begin_save(worker, progress)
        is_asynchronous = is_evaluated and is_saved and worker.evaluator.request(worker, step)
        stopping = taken.stopping
        if is_evaluated and not is_asynchronous and not stopping:
            worker.saver.finish(step)  # an evaluation may fail
            stopping = not worker.evaluator.evaluate_during_training(worker, progress)
            is_over = not stopping and ends_early(worker, progress)
        if stopping and not is_last:
            stop(worker, progress)
    del batches  # the loader may have read ahead

    # 5. The stage exports what is committed; a last save that fails is retried until too many have failed.
    worker.saver.finish(progress.step)
    worker.saver.ensure_committed(progress.step, partial(save, worker, progress), retries=True)
    worker.saver.end(progress.step)
    # If a hook has just ended the stage, the step has its value.
    if progress.step == worker.data.last_step or was_over:
        worker.evaluator.evaluate_at_end(worker, progress)
    return end(worker, progress)


def ends_early(worker: Worker, progress: Progress) -> bool:
    """Collective: return whether a hook ends the stage at this step, which has been evaluated, and log why."""
    if progress.step >= worker.data.steps or not worker.hooks:
        return False
    is_over = [False]
    if worker.group.rank == 0:
        reasons = [hook.is_over(progress) for hook in worker.hooks]
        for reason in filter(None, reasons):
            is_over = [True]
            worker.group.telemetry.log(f"{reason}: the stage ends at step {progress.step} of {worker.data.steps}")
    dist.broadcast_object_list(is_over, src=0)
    return is_over[0]


def skip_excluded(worker: Worker, progress: Progress, first_step: int) -> None:
    """Collective: jump over a stretch of steps that an earlier attempt gave up; the loader starts anew after it.

    After a fall-back to an older checkpoint this attempt has taken steps before the stretch: they are committed, so
    that a stop can end the wait for the next batch at once, without a commit.
    """
    if progress.step >= first_step:
        worker.saver.ensure_committed(progress.step, partial(save, worker, progress))
    progress.step = worker.health.next_step(progress.step)


def stop(worker: Worker, progress: Progress) -> None:
    """Collective: commit the step, then raise Preempted."""
    step = progress.step
    is_committed = worker.saver.ensure_committed(step, partial(save, worker, progress))
    worker.saver.end(step)
    how = "after committing it" if is_committed else "which could not be committed"
    raise Preempted(f"stopped at step {step} {how}; run the same command again to go on")


# ------------------------------------------------------------------------------------------------ a step


class StepOutcome(NamedTuple):
    """Holds the outcome of a step, on this worker and on all."""

    mean_loss: float
    bad_samples: int  # of all workers
    stopping: bool  # anyone wants to stop
    all_written: bool  # everyone has written its file of the save in flight
    planned: Ids  # of all workers, as the ledger counts them
    ids: list[list[int]]  # of this worker's samples: epoch, shard, sample


def take_step(worker: Worker, step: int, batches: Iterator[Batch]) -> StepOutcome:
    """Collective: take a step, counted from 0, with this worker's micro-batches of it."""
    engine = worker.engine
    watched = worker.group.phases  # what this worker does, as the watchdog reads it
    accumulation = worker.data.arithmetic.accumulation
    rate = learning_rate(step, worker.data.steps, worker.cfg.optim.lr, worker.cfg.optim.schedule)
    worker.log.rate = rate
    planned = planned_ids(worker, step)
    samples = samples_in_mean(planned)
    # The engine divides a loss by accumulation × world. With this weight the sum over all micro-batches is the mean
    # over the batch, even if workers own different numbers of samples.
    weight = worker.group.world * accumulation / samples
    loss_sum = torch.zeros((), device=worker.group.device)  # of this worker, as are the next two
    bad_samples = 0
    ids: list[list[int]] = []

    # 1. Forward and backward over the accumulation.
    for number in range(accumulation):
        batch = next_batch(worker, batches, step, planned)
        bad_samples += worker.health.count_bad(batch)
        ids += batch.ids.tolist()
        images = begin_forward(worker, step, batch)
        micro_batch_loss = OBJECTIVES[worker.cfg.objective](worker, step, images, batch)
        watched.enter("backward", step)
        engine.backward(micro_batch_loss * weight)
        loss_sum = loss_sum + micro_batch_loss.detach()
        # Their memory is free before the optimizer steps, which needs some of its own.
        del batch, images, micro_batch_loss
        watched.enter("reduce", step)
        if number + 1 < accumulation:
            engine.end_micro_batch(rate)

    # 2. The optimizer's step, and with it what all workers must agree on: no worker may stop, commit or give up alone.
    # Nothing else in a step has the host wait for the device.
    mean_loss, bad_of_all, stopping, all_written = finish_step(worker, rate, loss_sum, bad_samples, samples)
    return StepOutcome(mean_loss, bad_of_all, stopping, all_written, planned, ids)


def count_step(worker: Worker, progress: Progress, taken: StepOutcome) -> None:
    """Collective: count the step that has just become complete, and end a run that can no longer succeed.

    Raises RolledBack and Diverged after too many steps that are not finite, DataError after too many bad samples,
    CheckpointError if the save in flight is the last that may fail.
    """
    health = worker.health
    saver = worker.saver
    norm = worker.engine.gradient_norm
    # The ledger is over the planned ids, whatever bad samples were replaced by.
    progress.ledger = progress.ledger.update(progress.step, *taken.planned)
    progress.step += 1
    progress.bad_samples += taken.bad_samples
    worker.log.window.losses.append(taken.mean_loss)
    worker.log.window.norms.append(norm)
    if worker.engine.trace is not None:
        worker.log.window.traces.append(worker.engine.trace)
    health.count_step(progress.step, taken.mean_loss, norm, progress.ledger.hex, taken.ids)
    samples_seen = health.samples_seen(progress.step)
    # Early on, a handful of bad samples is a large share: the limit is never below that of BAD_GRACE samples.
    allowed = worker.cfg.data.max_bad_fraction
    are_too_many_bad = progress.bad_samples > allowed * max(samples_seen, BAD_GRACE)
    bad_share = (
        f"{progress.bad_samples} bad samples among {samples_seen} seen, more than max_bad_fraction {allowed} allows"
    )
    if are_too_many_bad and saver.in_flight and worker.group.rank == 0:
        # If that save fails, its error takes the place of the one below, and nothing would report the bad samples.
        worker.group.telemetry.log(f"step {progress.step}: {bad_share}")
    has_given_up = health.skipped_in_a_row >= worker.cfg.max_skipped
    if has_given_up or are_too_many_bad:
        # After steps that are not finite: the save in flight began before them. Not committed, it and the good steps up
        # to it would be excluded with them.
        # After bad samples: the run ends, and a save without a worker that waits for it would stay half written.
        saver.finish(progress.step)
        saver.end(progress.step)
    if has_given_up:
        health.roll_back_or_fail(progress.step)
    if are_too_many_bad:
        raise DataError(
            f"{bad_share}\n"
            f"  see log.txt for names; python -m jobs data check {' or '.join(worker.job.train)} counts them by reason"
        )


def finish_step(
    worker: Worker, rate: float, loss_sum: torch.Tensor, bad_samples: int, samples: int
) -> tuple[float, int, bool, bool]:
    """Collective, once a step: have the optimizer step, and add up what the workers have seen and want.

    `samples` are those that the mean loss is over. Returns (mean loss, bad samples, anyone wants to stop, everyone has
    written its file).
    """
    # They travel with the gradient's norm, which decides whether the optimizer steps at all and is waited for anyway:
    # a reduction of their own would be another wait in every step, after the optimizer and the gathering of weights.
    of_host = on_device([bad_samples, worker.stop.is_requested(), worker.saver.written], worker.group.device)
    numbers = torch.cat([loss_sum.double().reshape(1), of_host])
    loss_of_all, bad_of_all, stops, written = worker.engine.end_micro_batch(rate, numbers)
    mean_loss = worker.engine.mean_loss(loss_of_all, samples)
    return mean_loss, int(bad_of_all), stops > 0, written == worker.group.world


# ------------------------------------------------------------------------------------------------ reports and saves


def report_training(worker: Worker, progress: Progress, *, has_line: bool) -> None:
    """Write a record of the steps since the last one and, with `has_line`, a log line of those since the last line.

    A save writes records between two lines. A record that the disk refuses is written again with the next steps.
    """
    window = worker.log.window
    since_line = worker.log.since_line
    if not window.losses:  # all steps are in the last record
        return
    window.stalled_s += worker.saver.stalled_s
    worker.saver.stalled_s = 0.0
    values = training_values(worker, progress, window)
    line = ""
    if has_line:
        since_line.extend(window)
        line = log_line(training_values(worker, progress, since_line))
        since_line.clear()
    for hook in worker.hooks:
        hook.before_record("train", values)
    is_written = worker.group.telemetry.report("train", values, line)
    if is_written:
        if not has_line:
            since_line.extend(window)
        window.clear()


def training_values(worker: Worker, progress: Progress, window: Window) -> dict[str, Any]:
    """Return what is recorded of a window that ends with the current step."""
    cfg = worker.cfg
    data = worker.data
    samples = cfg.batch_size * len(window.losses)
    # The FLOPs of the algorithm, as published: blocks that are recomputed in the backward pass do not count twice.
    steps = range(progress.step - len(window.losses), progress.step)
    flops = flops_of(data.phases, worker.model_config, steps, cfg.batch_size) / worker.group.world
    # In exact mode: they show where a repeated step begins to differ (`jobs audit`).
    traces = {"traces": window.traces} if window.traces else {}
    return {
        "step": progress.step,
        "steps": data.steps,
        "lr": worker.log.rate,
        **window.values(samples, flops, peak_flops(worker.group.device), data.steps - progress.step),
        **traces,
        "memory_gb": memory_gb(),
        "world": worker.group.world,
        "samples_seen": worker.health.samples_seen(progress.step),
        "bad_samples": progress.bad_samples,
        "ledger": progress.ledger.hex,
    }


def save(worker: Worker, progress: Progress) -> None:
    """Collective: record the steps since the last report, then begin to save this one; the caller finishes it."""
    report_training(worker, progress, has_line=False)
    begin_save(worker, progress)


def begin_save(worker: Worker, progress: Progress) -> None:
    """Collective: begin to save this step; the caller has finished the previous save."""
    for hook in worker.hooks:
        hook.before_save(progress)
    manifest = Manifest(
        step=progress.step,
        samples_seen=worker.health.samples_seen(progress.step),
        updates=worker.engine.updates,
        ledger=progress.ledger.hex,
        attempt=worker.job.attempt,
        world=worker.group.world,
        zero=worker.cfg.zero,
        # Only what a resume may not change, so that a refused resume can show the difference key by key.
        config=config.tagged(worker.cfg, "forbid"),
        key=worker.job.key,
        code=worker.job.code,
        bad_samples=progress.bad_samples,
        masked=progress.masked,
    )
    worker.saver.begin(worker.engine.fragments(), manifest)


# ------------------------------------------------------------------------------------------------ the end


def end(worker: Worker, progress: Progress) -> StageResult:
    """Collective: rank 0 exports the weights and all wait for it; then everything is closed."""
    outcome: list[StageResult | None] = [None]
    group = worker.group
    with group.phases.rank_0_phase("finish", progress.step, group.rank == 0):
        if group.rank == 0:
            outcome = [export_weights(worker, progress)]
    dist.broadcast_object_list(outcome, src=0)
    group.telemetry.close()
    group.phases.close()
    worker.engine.close()
    # Without it 2 of 12 short jobs at ZeRO 3 aborted while their processes ended.
    dist.destroy_process_group()
    assert outcome[0] is not None
    return outcome[0]


def export_weights(worker: Worker, progress: Progress) -> StageResult:
    """Write the stage's weights from the committed checkpoint, and log where the run's time went; rank 0 only."""
    directory = Path(worker.job.directory)
    # Read back from disk, not gathered from the workers: the next stage gets what was committed and digested, and rank
    # 0 alone can read it whole, at any ZeRO stage. The last evaluation lies between, which may take hours, so that what
    # is read is compared with its digests once more.
    exported = worker.saver.checkpoint_of(progress.step)
    last = exported.manifest
    kept: ChosenWeights | None = None
    for hook in worker.hooks:
        choice = hook.choose()
        if choice is not None:
            exported = worker.saver.checkpoint_of(choice["step"])
            manifest = exported.manifest
            kept = {**choice, "samples_seen": manifest.samples_seen, "ledger": manifest.ledger}
    weights = export(exported.folder, worker.model_config)
    models.save_weights(
        weights,
        directory,
        worker.model_config,
        writing=whole_file,
        class_names=worker.job.class_names,
        preprocessing=preprocessing_of(worker.cfg.data.preprocess, worker.model_config),
    )
    checkpoints = worker.saver.checkpoints
    # On another node than the driver's, metrics.jsonl holds a part of the stage, whose ratio would not be the stage's.
    if checkpoints.sends_metrics:
        spent = account(read_metrics(directory, None))
        values = {"step": progress.step, "ratio": spent.ratio, **asdict(spent)}
        worker.group.telemetry.report("effective", values, spent.line())
    kind = "averaged weights" if worker.cfg.polyak else "weights"
    if kept is not None:
        kind = f"weights of step {kept['step']}, the best {kept['metric']} {kept['value']:.4f},"
    worker.group.telemetry.log(f"done at step {progress.step}: {kind} in {directory / 'weights.safetensors'}")
    for name in artifacts.WEIGHT_FILES:
        checkpoints.storage.send(f"{checkpoints.stage}/{name}")
    result: StageResult = {
        "step": progress.step,
        "samples_seen": last.samples_seen,
        "ledger": last.ledger,
        "bad_samples": last.bad_samples,
        "metrics": progress.last_metrics,
        "world": worker.group.world,
        "files": artifacts.digests(directory, artifacts.WEIGHT_FILES),
    }
    if kept is not None:
        result["kept"] = kept
    return result
