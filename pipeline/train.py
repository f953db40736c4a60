"""The one training loop: a worker of a trained stage, from its config to a committed checkpoint and weights."""

import json
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import models
from data.errors import Preempted
from data.files import whole_file
from pipeline import checkpoint, config
from pipeline.accounting import account
from pipeline.schedule import learning_rate
from pipeline.start import Job, Trainer
from pipeline.telemetry import read_metrics
from pipeline.training_config import TrainConfig


def train(cfg: TrainConfig, job: Job) -> dict[str, Any]:
    """Run (or go on with) the stage on this worker; returns what the stage hands on. Collective.

    Raises Preempted after committing when asked to stop, Diverged, CheckpointError, data.DataError.
    """
    t = Trainer(cfg, job)
    asked: list[int] = []
    _catch_sigterm(asked)
    batches, accumulation = t.micro_batches(), t.arithmetic.accumulation
    first, t.saves.last = t.step + 1, t.step or -1
    t.window.clear()

    while t.step < t.steps:
        if (step := t.health.next_step(t.step)) != t.step:
            t.step = step
            batches = t.micro_batches()
            continue

        # 1. forward and backward over the accumulation; the optimizer steps with the last micro-batch
        rate = learning_rate(t.step, t.steps, cfg.optim.lr, cfg.optim.schedule)
        loss, bad, ids = torch.zeros((), device=t.device), 0, []
        planned = t.order.batch(t.step)
        shard = t.index.shards[planned[1][t.arithmetic.slots(t.rank).start]].name
        for _ in range(accumulation):
            t.phases.enter("data", t.step, shard)
            batch = next(batches)
            t.window.waits.append(batch.wait)
            assert batch.step == t.step, f"the loader is at step {batch.step}, the loop at {t.step}"
            bad += t.health.count_bad(batch)
            ids += batch.ids.tolist()
            loss = loss + t.forward_backward(batch)
            t.phases.enter("reduce", t.step)
            t.engine.end_micro_batch(rate)

        # 2. what all workers must agree on
        stop = bool(asked) or (t.rank == 0 and job.stop_file.exists())
        mean_loss, all_bad, stopping, written = t.agree(loss, bad, stop)
        norm = t.engine.gradient_norm()
        t.ledger = t.ledger.update(t.step, *planned)
        t.step, t.bad = t.step + 1, t.bad + all_bad
        t.window.losses.append(mean_loss)
        t.window.norms.append(norm)
        t.health.judge(t.step, mean_loss, norm, t.ledger.hex, ids)
        t.health.check_bad(t.bad, t.step * cfg.batch_size, job.train)

        # 3. what the step asks for
        last = t.step == t.steps
        if t.step % cfg.log_every == 0 or last or stopping or t.step == first:
            t.report(rate)
        if t.saves.saver.in_flight and written:
            t.finish_save()
        if cfg.evaluate_every and t.step % cfg.evaluate_every == 0 and not last:
            t.evaluate()
        calm = not t.health.skipped  # a commit amid a bad stretch would pass for progress
        if (t.step % cfg.save_every == 0 and calm) or last or stopping:
            t.begin_save()
        if stopping and not last:
            t.finish_save()
            how = "after committing it" if t.saves.last == t.step else "which could not be committed"
            raise Preempted(f"stopped at step {t.step} {how}; run the same command again to go on")

    if t.saves.saver.in_flight:
        t.finish_save()
    while t.saves.last != t.step:  # the stage hands on what is committed; so many failures in a row end it
        t.begin_save()
        t.finish_save()
    with t.engine.averaged() if cfg.polyak else nullcontext():
        t.evaluate(f"  of the weights averaged by {cfg.polyak}" if cfg.polyak else "")
    return finish(t)


def _catch_sigterm(asked: list[int]) -> None:
    """Remember SIGTERM until the end of the step; only a main thread may (under Ray the driver's stop file tells)."""
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    except ValueError:
        return


def finish(t: Trainer) -> dict[str, Any]:
    """The lead writes the stage's weights and their provenance from the committed checkpoint; all wait for it."""
    outcome: list[Any] = [None]
    with t.phases.led("finish", t.step, t.rank == 0):
        if t.rank == 0:
            outcome = [_hand_on(t)]
    dist.broadcast_object_list(outcome, src=0)
    t.telemetry.close()
    t.phases.close()
    t.engine.close()
    dist.destroy_process_group()
    return outcome[0]


def _hand_on(t: Trainer) -> dict[str, Any]:
    """The lead's part of the end: weights, and what the stage says of itself."""
    last = checkpoint.committed(t.saves.saver.folder)[0]
    manifest = checkpoint.read_manifest(last)
    models.save_weights(export(last, t.model_config), t.directory, t.model_config, writing=whole_file)
    spent = account(read_metrics(t.directory, None))
    t.telemetry.report("effective", {"step": t.step, "ratio": spent.ratio, **asdict(spent)}, spent.line())
    kind = "averaged weights" if t.cfg.polyak else "weights"
    t.telemetry.say(f"done at step {t.step}: {kind} in {t.directory / 'weights.safetensors'}")
    return {
        "step": t.step,
        "samples_seen": manifest.samples_seen,
        "ledger": manifest.ledger,
        "bad_samples": manifest.bad_samples,
        "metrics": t.last_metrics,
        "world": t.world,
    }


def export(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    """World-size-free fp32 weights of a committed checkpoint; the averaged ones where it holds them."""
    manifest = checkpoint.read_manifest(folder)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in models.from_config(model).named_parameters()}
    kind = "average" if manifest.config.get("polyak") else "master"
    return checkpoint.Reader(folder, manifest.files).weights(shapes, kind)


def worker(task: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker group runs: `task` holds the plain config and job."""
    cfg = config.build(TrainConfig, json.loads(json.dumps(task["config"])), "config")
    return train(cfg, Job(**task["job"]))
