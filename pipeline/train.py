"""The training loop of one worker: runs a trained stage's task, commits checkpoints and exports the weights.

1. `set_up` joins the process group, builds data, model and engine, and loads a checkpoint or initial weights.
2. Each step runs the forward and backward passes of its micro-batches.
3. Once per step, a single reduction and a single wait for the device return the gradient norm, which decides whether
   the optimizer steps, and the values that all workers must agree on: the mean loss, the number of bad samples, whether
   to stop, and whether all files of the save in flight are written.
4. After the step, the loop does whatever is due: report, commit the save in flight, begin a save, evaluate, stop.
5. At the end, the last step is committed and evaluated, and its weights are exported in a format that is independent of
   the world size. A hook may choose the weights of another step.

A step is committed before it is evaluated, so a failed or killed evaluation loses no training progress.
Extras attach only through hooks (pipeline/hooks.py).

In:  {"config": {"steps": 700000, "batch_size": 4096, …}, "job": {"directory": "/runs/x/20-pretrain", "attempt": 7, …}}
Out: {"step": 700000, "samples_seen": 2867200000, "ledger": "9f3c…", "metrics": {"accuracy": 0.84}, …}, and in the
     stage's folder checkpoints/step-0000700000/, weights.safetensors, model.json, log.txt, metrics.jsonl
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch
import torch.distributed as dist

import models
from data.errors import DataError, Preempted
from data.files import atomic_file
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
from pipeline.start import Worker, read_task, set_up
from pipeline.training_config import flops_of
from pipeline.variables import recorded
from pipeline.worker import Progress, handle_sigterm

BAD_GRACE = 10_000  # until this many samples were seen, max_bad_fraction is relative to this number


class ChosenWeights(TypedDict):
    """The step whose weights a stage exports instead of the last step's, and the metric value that determined it."""

    metric: str
    value: float
    step: int
    samples_seen: int
    ledger: str


class StageResult(TypedDict):
    """The result of a trained stage, which the driver receives."""

    step: int
    samples_seen: int
    ledger: str
    bad_samples: int
    metrics: dict[str, float]
    world: int
    files: dict[str, FileRecord]  # digests of weights.safetensors and model.json, computed by rank 0 after writing
    kept: NotRequired[ChosenWeights]  # present only if a hook chose weights other than the last step's


def train(task: Mapping[str, Any]) -> StageResult:
    """Collective: train a stage on this worker, from its start or from its last checkpoint; return the result.

    `task` holds plain values: "config", the fields of "job", and "hooks". After a stop request, raises Preempted once
    the current step has been committed. Raises the errors of `set_up` if training cannot start, or those of
    `count_step` if it cannot continue.
    """
    # 1. Build everything that the loop uses, and find the step to start from.
    worker, progress = set_up(read_task(task))
    handle_sigterm(worker.stop.signal)
    first_step = progress.step + 1
    # The loader computes its position from the step number: resuming at step 600,000 is as fast as starting at step 0.
    batches = micro_batches(worker, progress.step)
    if not worker.evaluator.resume(worker, progress):
        raise Preempted(f"stopped at step {progress.step}, already committed; run the same command again to resume")
    # The previous attempt may have been killed after the evaluation that ended the stage.
    was_over = is_over = ends_early(worker, progress)

    while progress.step < worker.data.last_step and not is_over:
        if worker.health.next_step(progress.step) != progress.step:
            skip_excluded(worker, progress, first_step)
            batches = micro_batches(worker, progress.step)
            continue

        # 2. and 3. Take the step.
        outcome = take_step(worker, progress.step, batches)
        count_step(worker, progress, outcome)

        # 4. Report, commit the save in flight, begin a new save, evaluate, stop: in this order, each only if it is due.
        step = progress.step
        is_last = step == worker.data.last_step
        is_evaluated = worker.evaluator.is_due(step)
        is_finite = worker.health.skipped_in_a_row == 0
        is_due = worker.saver.is_due(step, is_evaluated=is_evaluated, is_finite=is_finite)
        is_saved = is_due or is_last or outcome.stopping
        has_line = step % worker.cfg.log_every == 0 or step == first_step or is_last or outcome.stopping
        # Write metrics before a save begins, so that metrics.jsonl contains every committed step.
        if has_line or is_saved:
            report_training(worker, progress, has_line=has_line)
        if outcome.all_written or is_saved:  # on slow storage a new save waits for the previous one
            worker.saver.finish(step)
        if is_saved:
            begin_save(worker, progress)
        is_asynchronous = is_evaluated and is_saved and worker.evaluator.request(worker, step)
        stopping = outcome.stopping
        if is_evaluated and not is_asynchronous and not stopping:
            worker.saver.finish(step)  # first, because the evaluation may fail
            stopping = not worker.evaluator.evaluate_during_training(worker, progress)
            is_over = not stopping and ends_early(worker, progress)
        if stopping and not is_last:
            stop(worker, progress)
    del batches  # stops the loader's prefetching

    # 5. Commit the last step (a failed save is retried, up to `max_failed_saves`), evaluate it, export its weights.
    worker.saver.finish(progress.step)
    worker.saver.ensure_committed(progress.step, partial(save, worker, progress), retries=True)
    worker.saver.end(progress.step)
    # If a hook ended the stage during this attempt, its last step has already been evaluated.
    if progress.step == worker.data.last_step or was_over:
        worker.evaluator.evaluate_at_end(worker, progress)
    return end(worker, progress)


def ends_early(worker: Worker, progress: Progress) -> bool:
    """Collective: return whether a hook ends the stage after this (evaluated) step; log the reason."""
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
    """Collective: skip a range of steps that an earlier attempt excluded; the caller restarts the loader.

    If this attempt resumed from an older checkpoint, it has trained the steps before the range. These are committed
    here, so that a stop request can interrupt the wait for the next batch without losing uncommitted steps.
    """
    if progress.step >= first_step:
        worker.saver.ensure_committed(progress.step, partial(save, worker, progress))
    progress.step = worker.health.next_step(progress.step)


def stop(worker: Worker, progress: Progress) -> None:
    """Collective: commit the current step, then raise Preempted."""
    step = progress.step
    is_committed = worker.saver.ensure_committed(step, partial(save, worker, progress))
    worker.saver.end(step)
    how = "after committing it" if is_committed else "which could not be committed"
    raise Preempted(f"stopped at step {step} {how}; run the same command again to resume")


# ------------------------------------------------------------------------------------------------ a step


class StepOutcome(NamedTuple):
    """The outcome of a step, on this worker and on all workers."""

    mean_loss: float
    bad_samples: int  # number of bad samples on all workers
    stopping: bool  # whether any worker was requested to stop
    all_written: bool  # whether every worker has written its file of the save in flight
    planned: Ids  # samples of the global batch, as counted in the ledger
    ids: list[list[int]]  # this worker's samples: (epoch, shard, sample)


def take_step(worker: Worker, step: int, batches: Iterator[Batch]) -> StepOutcome:
    """Collective: train the step with index `step`, from 0, on this worker's micro-batches of the global batch."""
    engine = worker.engine
    phases = worker.group.phases  # read by the watchdog
    accumulation = worker.data.arithmetic.accumulation
    rate = learning_rate(step, worker.data.steps, worker.cfg.optim.lr, worker.cfg.optim.schedule)
    worker.log.rate = rate
    planned = planned_ids(worker, step)
    samples = samples_in_mean(planned)
    # The engine divides each loss by accumulation × world. This weight turns the sum over all micro-batches into the
    # mean over the global batch, even if workers have different numbers of samples.
    weight = worker.group.world * accumulation / samples
    loss_sum = torch.zeros((), device=worker.group.device)  # this worker's sum, like the next two variables
    bad_samples = 0
    ids: list[list[int]] = []

    # 1. Forward and backward over the micro-batches.
    for number in range(accumulation):
        batch = next_batch(worker, batches, step, planned)
        bad_samples += worker.health.count_bad(batch)
        ids += batch.ids.tolist()
        images = begin_forward(worker, step, batch)
        micro_batch_loss = OBJECTIVES[worker.cfg.objective](worker, step, images, batch)
        phases.enter("backward", step)
        engine.backward(micro_batch_loss * weight)
        loss_sum = loss_sum + micro_batch_loss.detach()
        # Free their memory before the optimizer step, which allocates some.
        del batch, images, micro_batch_loss
        phases.enter("reduce", step)
        if number + 1 < accumulation:
            engine.end_micro_batch(rate)

    # 2. The optimizer step, combined with everything that all workers must agree on, because no worker may stop, commit
    # or give up independently. This is the only point in a step where the host waits for the device.
    mean_loss, bad_of_all, stopping, all_written = finish_step(worker, rate, loss_sum, bad_samples, samples)
    return StepOutcome(mean_loss, bad_of_all, stopping, all_written, planned, ids)


def count_step(worker: Worker, progress: Progress, outcome: StepOutcome) -> None:
    """Collective: add a completed step to the progress and the records; raise an error if the run cannot continue.

    Raises RolledBack or Diverged after too many consecutive steps with a non-finite gradient, DataError after too many
    bad samples, or CheckpointError after too many consecutive failed saves.
    """
    health = worker.health
    saver = worker.saver
    norm = worker.engine.gradient_norm
    # The ledger covers the planned samples, not the replacements of bad ones.
    progress.ledger = progress.ledger.update(progress.step, *outcome.planned)
    progress.step += 1
    progress.bad_samples += outcome.bad_samples
    worker.log.window.losses.append(outcome.mean_loss)
    worker.log.window.norms.append(norm)
    if worker.engine.trace is not None:
        worker.log.window.traces.append(worker.engine.trace)
    health.count_step(progress.step, outcome.mean_loss, norm, progress.ledger.hex, outcome.ids)
    samples_seen = health.samples_seen(progress.step)
    # Early in a run a few bad samples are a large fraction, so apply the limit to at least BAD_GRACE samples.
    allowed = worker.cfg.data.max_bad_fraction
    are_too_many_bad = progress.bad_samples > allowed * max(samples_seen, BAD_GRACE)
    bad_share = (
        f"{progress.bad_samples} of {samples_seen} samples were bad, more than data.max_bad_fraction={allowed} allows"
    )
    if are_too_many_bad and saver.in_flight and worker.group.rank == 0:
        # Log it now: if the save in flight fails, its error replaces the one raised below.
        worker.group.telemetry.log(f"step {progress.step}: {bad_share}")
    has_given_up = health.skipped_in_a_row >= worker.cfg.max_skipped
    if has_given_up or are_too_many_bad:
        # Commit the save in flight first.
        # - Non-finite steps: the save began before them. Without a commit the run would roll back further and exclude
        #   good steps too.
        # - Bad samples: the run ends here, and an unfinished save would be lost.
        saver.finish(progress.step)
        saver.end(progress.step)
    if has_given_up:
        health.roll_back_or_fail(progress.step)
    if are_too_many_bad:
        commands = "\n".join(f"  python -m jobs data check {shlex.quote(path)}" for path in worker.job.train)
        raise DataError(
            f"{bad_share}\n"
            f"  the limit applies to at least {BAD_GRACE:,} samples, and an image counts again in each pass\n"
            "  log.txt lists examples; to count all of them by reason, run\n"
            f"{commands}\n"
            f"  to accept them, set data.max_bad_fraction={min(2 * progress.bad_samples / samples_seen, 1):.1g} of "
            "this stage, and run the same command again"
        )


def finish_step(
    worker: Worker, rate: float, loss_sum: torch.Tensor, bad_samples: int, samples: int
) -> tuple[float, int, bool, bool]:
    """Collective, once per step: run the optimizer step, and sum the counts and stop requests of all workers.

    `samples` is the number of samples over which the loss is averaged. Returns (mean loss, number of bad samples,
    whether any worker received a stop request, whether every worker has written its checkpoint file).
    """
    # Reduce these numbers together with the gradient norm, for which the host must wait anyway because it decides
    # whether the optimizer steps. A separate reduction would add a second wait to every step.
    host_numbers = on_device([bad_samples, worker.stop.is_requested(), worker.saver.written], worker.group.device)
    numbers = torch.cat([loss_sum.double().reshape(1), host_numbers])
    loss_of_all, bad_of_all, stops, written = worker.engine.end_micro_batch(rate, numbers)
    mean_loss = worker.engine.mean_loss(loss_of_all, samples)
    return mean_loss, int(bad_of_all), stops > 0, written == worker.group.world


# ------------------------------------------------------------------------------------------------ reports and saves


def report_training(worker: Worker, progress: Progress, *, has_line: bool) -> None:
    """Record the steps since the last record and, if `has_line`, log the steps since the last log line.

    Each save also writes a record, so there can be several records between two log lines. If a record cannot be
    written to disk, its steps are included in the next one.
    """
    window = worker.log.window
    since_line = worker.log.since_line
    if not window.losses:  # every step has been recorded
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
    """Return the values of a training record: loss, learning rate, speed, waits and counts of a window of steps."""
    cfg = worker.cfg
    data = worker.data
    samples = cfg.batch_size * len(window.losses)
    # Model FLOPs, as in publications: recomputation of blocks in the backward pass does not count.
    steps = range(progress.step - len(window.losses), progress.step)
    flops = flops_of(data.phases, worker.model_config, steps, cfg.batch_size) / worker.group.world
    # In exact mode only: traces show the step at which a repeated run starts to differ (`jobs audit`).
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
    """Collective: record the steps since the last report and begin to save this step; the caller finishes the save."""
    report_training(worker, progress, has_line=False)
    begin_save(worker, progress)


def begin_save(worker: Worker, progress: Progress) -> None:
    """Collective: begin to save this step; the caller must have finished the previous save."""
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
        # Only fields that must not change on resume; if the resume is refused, the error lists the differing keys.
        config=recorded(config.tagged(worker.cfg, "forbid")),
        key=worker.job.key,
        code=worker.job.code,
        bad_samples=progress.bad_samples,
        masked=progress.masked,
    )
    worker.saver.begin(worker.engine.fragments(), manifest)


# ------------------------------------------------------------------------------------------------ the end


def end(worker: Worker, progress: Progress) -> StageResult:
    """Collective: export the weights on rank 0 while the others wait, close all resources, and return the result."""
    outcome: list[StageResult | None] = [None]
    group = worker.group
    with group.phases.rank_0_phase("finish", progress.step, group.rank == 0):
        if group.rank == 0:
            outcome = [export_weights(worker, progress)]
    dist.broadcast_object_list(outcome, src=0)
    group.telemetry.close()
    group.phases.close()
    worker.engine.close()
    # Without this, 2 of 12 short runs at ZeRO 3 aborted while their processes exited.
    dist.destroy_process_group()
    assert outcome[0] is not None
    return outcome[0]


def export_weights(worker: Worker, progress: Progress) -> StageResult:
    """Export the stage's weights from the committed checkpoint, and log how the time was spent; rank 0 only."""
    directory = Path(worker.job.directory)
    # Read the weights back from disk instead of gathering them from the workers: the next stage gets exactly what was
    # committed, and rank 0 needs no help from the others at any ZeRO stage. Verify the digests again, because the last
    # evaluation may have taken hours since the commit.
    exported = worker.saver.checkpoint_of(progress.step)
    last = exported.manifest
    chosen: ChosenWeights | None = None
    for hook in worker.hooks:
        choice = hook.choose()
        if choice is not None:
            exported = worker.saver.checkpoint_of(choice["step"])
            manifest = exported.manifest
            chosen = {**choice, "samples_seen": manifest.samples_seen, "ledger": manifest.ledger}
    weights = export(exported.folder, worker.model_config)
    models.save_weights(
        weights,
        directory,
        worker.model_config,
        writing=atomic_file,
        class_names=worker.job.class_names,
        preprocessing=preprocessing_of(worker.cfg.data.preprocess, worker.model_config),
    )
    checkpoints = worker.saver.checkpoints
    # Only on the driver's node does metrics.jsonl cover the whole stage; elsewhere the shares of time would be wrong.
    if checkpoints.sends_metrics:
        damage: list[str] = []
        spent = account(read_metrics(directory, None, damage))
        for message in damage:
            worker.group.telemetry.log(f"the shares of time in the summary are incomplete: {message}")
        values = {"step": progress.step, "ratio": spent.ratio, **asdict(spent)}
        worker.group.telemetry.report("effective", values, spent.line())
    kind = "averaged weights" if worker.cfg.polyak else "weights"
    if chosen is not None:
        kind = f"weights of step {chosen['step']} with the best {chosen['metric']}, {chosen['value']:.4f},"
    worker.group.telemetry.log(f"done at step {progress.step}: {kind} in {directory / 'weights.safetensors'}")
    for name in artifacts.WEIGHT_FILES:
        checkpoints.storage.upload(f"{checkpoints.stage}/{name}")
    result: StageResult = {
        "step": progress.step,
        "samples_seen": last.samples_seen,
        "ledger": last.ledger,
        "bad_samples": last.bad_samples,
        "metrics": progress.last_metrics,
        "world": worker.group.world,
        "files": artifacts.digests(directory, artifacts.WEIGHT_FILES),
    }
    if chosen is not None:
        result["kept"] = chosen
    return result
