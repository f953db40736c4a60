"""The one training loop: a worker of a trained stage, from its config to a committed checkpoint and weights.

1. `set_up` joins the group, builds data, model and engine, and loads a checkpoint or the weights to start from.
2. Every step: forward and backward over the micro-batches.
3. Once a step, in one reduction and one wait: the gradient's norm, with which the optimizer steps or does not, and what
   all workers agree on: mean loss, bad samples, whether to stop, whether a save is written.
4. What the step asks for: a report, the commit of a save, a new save, an evaluation (here, or by a worker beside
   training: `evaluate_on: spare`), the end.
5. At the end everything is committed, evaluated, and handed on as weights that know nothing of the world size: those of
   the last step or, with `keep_best`, of the step whose evaluation was the best.

A save that is due is committed before its step is evaluated: an evaluation that fails, or is killed, costs none of it.

In:  {"config": {"steps": 700000, "batch_size": 4096, …}, "job": {"directory": "/runs/x/20-pretrain", "attempt": 7, …}}
Out: {"step": 700000, "samples_seen": 2867200000, "ledger": "9f3c…", "metrics": {"accuracy": 0.84}, …}, and in the
     stage's folder checkpoints/step-0000700000/, weights.safetensors, model.json, log.txt, metrics.jsonl
"""

import json
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch
import torch.distributed as dist

import models
from data.errors import CheckpointError, DataError, Preempted
from data.files import whole_file
from data.loader import Batch
from data.order import Ids
from pipeline import artifacts, config
from pipeline.batches import OBJECTIVES, begin_forward, micro_batches, next_batch
from pipeline.checkpoints.manifest import FileRecord, Manifest
from pipeline.checkpoints.reader import export
from pipeline.engine.engine import on_device
from pipeline.engine.exact import ExactEngine
from pipeline.evaluate import (
    ends_early,
    evaluate_at_the_end,
    evaluate_between,
    evaluate_unfinished,
    request_async,
)
from pipeline.evaluation.protocols import preprocessing_of
from pipeline.extras import async_evaluation
from pipeline.extras.best import best_commit
from pipeline.extras.token_dropping import flops_of, phases
from pipeline.monitoring.telemetry import Window, account, log_line, memory_gb, peak_flops, read_metrics
from pipeline.optimization import learning_rate
from pipeline.start import Job, Progress, Worker, set_up
from pipeline.training_config import TrainConfig

BAD_GRACE = 10_000  # samples before max_bad_fraction is judged


class Kept(TypedDict):
    """Holds which step's weights a stage with `keep_best` hands on, and why."""

    metric: str
    value: float
    step: int
    samples_seen: int
    ledger: str


class StageResult(TypedDict):
    """Holds what a trained stage hands on to the driver."""

    step: int
    samples_seen: int
    ledger: str
    bad_samples: int
    metrics: dict[str, float]
    world: int
    files: dict[str, FileRecord]  # the weights and their model, as rank 0 read them back
    kept: NotRequired[Kept]  # of a stage that hands on the best weights instead of the last
    stopped: NotRequired[str]  # why it ended before its last step, as hopeless


def train(task: Mapping[str, Any]) -> StageResult:
    """Run (or go on with) the stage on this worker of the group; returns what the stage hands on. Collective.

    `task` holds the plain "config" and the fields of "job". Raises Preempted after committing when asked to stop,
    WentBack, Diverged, CheckpointError, DataError.
    """
    plain_config = json.loads(json.dumps(task["config"]))  # tuples become lists, as they are in a recipe
    cfg = config.build(TrainConfig, plain_config, "config")
    job = Job(**task["job"])

    # 1. Everything that the loop works with, and the step that it starts from.
    worker, progress = set_up(cfg, job)
    notice_sigterm(worker.sigterm)
    # Building and restoring are not training: without this the first report's images per second would hold them.
    worker.window.clear()
    worker.since_line.clear()
    worker.loop_price.begin(progress.step)
    health = worker.health
    saver = worker.saver
    rate = 0.0  # of learning, in the last step
    # The loader computes its place from the step alone: a resume at step 600,000 starts as fast as one at step 0.
    batches = micro_batches(worker, progress.step)
    first_step = progress.step + 1
    if not evaluate_unfinished(worker, progress):
        raise Preempted(f"stopped at step {progress.step}, which was committed; run the same command again to go on")

    # An attempt may have been killed between its last evaluation and its end.
    was_over = ends_early(worker, progress)
    is_over = was_over
    while progress.step < worker.last_step and not is_over:
        # A stretch of steps that an earlier attempt gave up is jumped over; the loader starts anew behind it.
        next_step = health.next_step(progress.step)
        if next_step != progress.step:
            # After a fall-back to an older checkpoint steps were taken here. A stop ends the wait for the batch behind
            # the stretch on the spot, without a commit.
            if progress.step >= first_step:
                if saver.in_flight:
                    saver.finish(progress.step)
                if saver.last_committed != progress.step:
                    report_training(worker, progress, rate, has_line=False)
                    begin_save(worker, progress)
                    saver.finish(progress.step)
            progress.step = next_step
            batches = micro_batches(worker, next_step)
            continue

        # 2 and 3. The step itself; the ledger is over the planned ids, whatever bad samples were replaced by.
        taken = take_step(worker, progress.step, batches)
        rate = taken.rate
        progress.ledger = progress.ledger.update(progress.step, *worker.mask.in_ledger(progress.step, taken.planned))
        progress.step += 1
        progress.bad_samples += taken.bad_samples
        stopping = taken.stopping
        count_step(worker, progress, taken.mean_loss, taken.ids)

        # 4. What the step asks for, in this order: a report, the commit of a save, a new save, an evaluation, the end.
        step = progress.step
        is_last = step == worker.last_step
        has_line = step % cfg.log_every == 0 or step == first_step or is_last or stopping
        is_evaluated = cfg.evaluate_every > 0 and step % cfg.evaluate_every == 0 and not is_last
        # An evaluation beside training reads the checkpoint; those of the best, and of a hopeless end, are handed on.
        needs_commit = cfg.evaluate_on == "spare" or cfg.keep_best is not None or worker.job.foretold is not None
        is_planned = step % cfg.save_every == 0 or (is_evaluated and needs_commit)
        # A commit amid non-finite steps would pass for progress since the last time that the run went back.
        is_saved = (is_planned and health.skipped_in_a_row == 0) or is_last or stopping
        # A commit implies its metrics: the record of its steps is written before the save begins.
        if has_line or is_saved:
            report_training(worker, progress, rate, has_line=has_line)
        if saver.in_flight and (taken.all_written or is_saved):  # on slow storage a new save waits for the one before
            saver.finish(step)
        if is_saved:
            begin_save(worker, progress)
        # An evaluation beside training waits for the commit; the steps do not.
        is_async = is_evaluated and is_saved and request_async(worker, step)
        if is_evaluated and not is_async and not stopping:
            # What is due is committed first, because an evaluation may fail.
            if saver.in_flight:
                saver.finish(step)
            if not evaluate_between(worker, progress):
                # Asked to stop meanwhile: the step is saved, where it is not committed.
                stopping = True
                if saver.last_committed != step:
                    report_training(worker, progress, rate, has_line=False)
                    begin_save(worker, progress)
            else:
                is_over = ends_early(worker, progress)
        if stopping and not is_last:
            # A save of this step has begun above: it is committed before the workers end.
            if saver.in_flight:
                saver.finish(step)
            saver.end(step)
            how = "after committing it" if saver.last_committed == step else "which could not be committed"
            raise Preempted(f"stopped at step {step} {how}; run the same command again to go on")

    # Where the stage ends early, nothing of what the loader has read ahead is wanted.
    del batches

    # 5. The stage hands on what is committed; a last save that fails is tried again until too many have failed.
    if saver.in_flight:
        saver.finish(progress.step)
    while saver.last_committed != progress.step:
        begin_save(worker, progress)
        saver.finish(progress.step)
    saver.end(progress.step)
    # Where patience has run out just now, the step has its value.
    if progress.step == worker.last_step or was_over:
        evaluate_at_the_end(worker, progress)
    return end(worker, progress)


class TakenStep(NamedTuple):
    """Holds what a step has come to, on this worker and on all."""

    mean_loss: float
    bad_samples: int  # of all workers
    stopping: bool  # anyone wants to stop
    all_written: bool  # everyone has written its file of the save in flight
    rate: float  # of learning
    planned: Ids  # of all workers
    ids: list[list[int]]  # of this worker's samples: epoch, shard, sample


def take_step(worker: Worker, step: int, batches: Iterator[Batch]) -> TakenStep:
    """Collective: take a step, counted from 0, with this worker's micro-batches of it."""
    engine = worker.engine
    watched = worker.phases  # what this worker does, as the watchdog is told
    accumulation = worker.arithmetic.accumulation
    rate = learning_rate(step, worker.steps, worker.cfg.optim.lr, worker.cfg.optim.schedule)
    planned = worker.order.batch(step)
    samples = worker.mask.left(step, planned)
    # The engine divides a loss by accumulation × world. With this weight the sum over all micro-batches is the mean
    # over the batch, also where workers own different numbers of samples.
    weight = worker.world * accumulation / samples
    loss_sum = torch.zeros((), device=worker.device)  # of this worker, as are the next two
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
    return TakenStep(mean_loss, bad_of_all, stopping, all_written, rate, planned, ids)


def count_step(worker: Worker, progress: Progress, mean_loss: float, ids: list[list[int]]) -> None:
    """Collective: count the step that has just become whole, and end a run that it shows to be hopeless.

    `ids` are this worker's samples. Raises WentBack and Diverged after too many steps that are not finite, DataError
    after too many bad samples, CheckpointError where the save in flight is the last that may fail.
    """
    health = worker.health
    saver = worker.saver
    norm = worker.engine.gradient_norm
    worker.window.losses.append(mean_loss)
    worker.window.norms.append(norm)
    if isinstance(worker.engine, ExactEngine):
        worker.window.traces.append(worker.engine.trace)
    health.count_step(progress.step, mean_loss, norm, progress.ledger.hex, ids)
    samples_seen = health.samples_seen(progress.step)
    # Early on, a handful of bad samples is a large share: the limit is never below that of BAD_GRACE samples.
    allowed = worker.cfg.data.max_bad_fraction
    are_too_many_bad = progress.bad_samples > allowed * max(samples_seen, BAD_GRACE)
    bad_share = (
        f"{progress.bad_samples} bad samples among {samples_seen} seen, more than max_bad_fraction {allowed} allows"
    )
    if are_too_many_bad and saver.in_flight and worker.rank == 0:
        # Where that save fails, its error takes the place of the one below, and the bad samples would stay unsaid.
        worker.telemetry.log(f"step {progress.step}: {bad_share}")
    has_given_up = health.skipped_in_a_row >= worker.cfg.max_skipped
    if has_given_up or are_too_many_bad:
        # After steps that are not finite: the save in flight began before them. Not committed, it and the good steps up
        # to it would be excluded with them.
        # After bad samples: the run ends, and a save without a worker that waits for it would stay behind half written.
        if saver.in_flight:
            saver.finish(progress.step)
        saver.end(progress.step)
    if has_given_up:
        health.go_back_or_end(progress.step)
    if are_too_many_bad:
        raise DataError(
            f"{bad_share}\n"
            f"  see log.txt for names; python -m jobs data check {' or '.join(worker.job.train)} counts them by reason"
        )


def notice_sigterm(asked: threading.Event) -> None:
    """Have SIGTERM set the event; the loop looks at it after every step, and an evaluation after every batch."""

    def remember(number: int, frame: object) -> None:
        asked.set()

    # Only a main thread may catch signals. A worker trains in its main thread; in another one, as of a notebook, the
    # stop file alone tells it to stop.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, remember)


def finish_step(
    worker: Worker, rate: float, loss_sum: torch.Tensor, bad_samples: int, samples: int
) -> tuple[float, int, bool, bool]:
    """Collective, once a step: have the optimizer step, add up what the workers have seen, and hear what they want.

    `samples` are those that the mean loss is over. Returns (mean loss, bad samples, anyone wants to stop, everyone has
    written its file).
    """
    # They travel with the gradient's norm, which decides whether the optimizer steps at all and is waited for anyway:
    # a reduction of their own would be another wait in every step, behind the optimizer and the gathering of weights.
    of_host = on_device([bad_samples, worker.wants_stop(), worker.saver.written], worker.device)
    numbers = torch.cat([loss_sum.double().reshape(1), of_host])
    loss_of_all, bad_of_all, stops, written = worker.engine.end_micro_batch(rate, numbers)
    mean_loss = loss_of_all / samples
    if isinstance(worker.engine, ExactEngine):
        # It is summed in the fixed order, as the gradient is; the reduction above adds up in an order of its own.
        mean_loss = worker.engine.loss
    return mean_loss, int(bad_of_all), stops > 0, written == worker.world


def report_training(worker: Worker, progress: Progress, rate: float, *, has_line: bool) -> None:
    """Write a record of the steps since the last one, and where asked the log line of those since the last line.

    A save writes records between two lines. A record that the disk refuses is written again with the next steps.
    """
    # Also where evaluate_on is training now: an earlier attempt may have left records.
    if worker.rank == 0:
        async_evaluation.report_records(Path(worker.job.directory), worker.telemetry.report)
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
    # Of a run in exact mode: where a step that is taken again begins to differ, `jobs audit` learns from them.
    traces = {"traces": window.traces} if window.traces else {}
    return {
        "step": progress.step,
        "steps": worker.steps,
        "lr": rate,
        **window.values(samples, flops, peak_flops(worker.device), worker.steps - progress.step),
        **traces,
        "memory_gb": memory_gb(),
        "world": worker.world,
        "samples_seen": worker.health.samples_seen(progress.step),
        "bad_samples": progress.bad_samples,
        "ledger": progress.ledger.hex,
    }


def begin_save(worker: Worker, progress: Progress) -> None:
    """Collective: begin to save this moment; the caller has finished the save before."""
    if worker.cfg.health.on_spike == "bisect":
        worker.health.mask_found(worker.mask, progress.step)
    manifest = Manifest(
        step=progress.step,
        samples_seen=worker.health.samples_seen(progress.step),
        updates=worker.engine.updates,
        ledger=progress.ledger.hex,
        attempt=worker.job.attempt,
        world=worker.world,
        zero=worker.cfg.zero,
        # Only what a resume may not change, so that a refused resume can show the difference key by key.
        config=config.tagged(worker.cfg, "forbid"),
        key=worker.job.key,
        code=worker.job.code,
        bad_samples=progress.bad_samples,
        masked=worker.mask.ranges,
    )
    worker.saver.begin(worker.engine.fragments(), manifest)


def end(worker: Worker, progress: Progress) -> StageResult:
    """Collective: rank 0 hands the stage on and all wait for it; then everything is closed."""
    outcome: list[StageResult | None] = [None]
    with worker.phases.led("finish", progress.step, worker.rank == 0):
        if worker.rank == 0:
            outcome = [hand_on(worker, progress)]
    dist.broadcast_object_list(outcome, src=0)
    worker.telemetry.close()
    worker.phases.close()
    worker.engine.close()
    # Without it 2 of 12 short jobs at ZeRO 3 aborted while their processes ended.
    dist.destroy_process_group()
    assert outcome[0] is not None
    return outcome[0]


def hand_on(worker: Worker, progress: Progress) -> StageResult:
    """Write the stage's weights from the committed checkpoint, and say what the run's time went into; rank 0 only."""
    directory = Path(worker.job.directory)
    # Read back from disk, not gathered from the workers: what the next stage gets is what was committed and digested,
    # and rank 0 alone can read it whole, at any ZeRO stage. The last evaluation lies between, which may take hours, so
    # what is read is compared with its digests once more.
    handed_on = worker.saver.of_step(progress.step)
    last = handed_on.manifest
    kept: Kept | None = None
    metric = worker.cfg.keep_best
    if metric is not None:
        best = best_commit(directory, metric, worker.saver.checkpoints.committed_steps())
        # The last step is committed and has been evaluated, but a full disk may have refused all records of it.
        if best is None:
            raise CheckpointError(
                f"no evaluation is on record in {directory / 'metrics.jsonl'}, of which keep_best={metric} could take "
                "the best\n  make room on its disk, then run the same command again: it goes on with the evaluation"
            )
        handed_on = worker.saver.of_step(best["step"])
        manifest = handed_on.manifest
        kept = {"metric": metric, **best, "samples_seen": manifest.samples_seen, "ledger": manifest.ledger}
    weights = export(handed_on.folder, worker.model_config)
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
        worker.telemetry.report("effective", values, spent.line())
    kind = "averaged weights" if worker.cfg.polyak else "weights"
    if kept is not None:
        kind = f"weights of step {kept['step']}, the best {metric} {kept['value']:.4f},"
    worker.telemetry.log(f"done at step {progress.step}: {kind} in {directory / 'weights.safetensors'}")
    for name in artifacts.WEIGHT_FILES:
        checkpoints.storage.send(f"{checkpoints.stage}/{name}")
    result: StageResult = {
        "step": progress.step,
        "samples_seen": last.samples_seen,
        "ledger": last.ledger,
        "bad_samples": last.bad_samples,
        "metrics": progress.last_metrics,
        "world": worker.world,
        "files": artifacts.digests(directory, artifacts.WEIGHT_FILES),
    }
    if kept is not None:
        result["kept"] = kept
    if progress.step < worker.steps and worker.job.hopeless:
        result["stopped"] = worker.job.hopeless
    return result
