"""What pretrain and finetune share: what a worker group is told, and how it is asked to stop."""

import dataclasses
import json
import time
from typing import Any

import models
from data.errors import DataError
from data.files import write_whole
from data.shards.index import load_index, without
from data.shards.reader import check_sizes
from jobs.context import Context, code_version
from jobs.ownership import claim_attempt
from jobs.supervisor import run_watched, until_done
from pipeline import config
from pipeline.arithmetic import batch_arithmetic
from pipeline.start import Job
from pipeline.train import train
from pipeline.training_config import TrainConfig

INPUTS = ("data.train", "data.mixture.*.train", "data.evaluate", "init", "probe.train", "probe.test")


def run(cfg: TrainConfig, context: Context) -> dict[str, Any]:
    """Attempts until the stage is done. Raises Preempted, or StageFailed with the code the worker wanted."""
    batch_arithmetic(cfg, context.cluster.workers)
    indexed = [load_index(path) for path in training_sets(cfg, context)]
    sets = without(indexed, cfg.data.drop)
    others = map(context.resolve, (cfg.data.evaluate, cfg.probe.train, cfg.probe.test))
    judged = [load_index(path) for path in filter(None, others)]
    for index in (*sets, *judged):
        if not (index.samples and index.classes):
            raise DataError(
                f"{index.tables}: {index.samples} samples, {index.classes} classes: nothing to learn or to judge\n"
                "  `python -m jobs data check` says why; it may be that labels are missing, or that data.drop names all"
            )
    check_sizes(sets, cfg.data.drop, f"{context.name}.data.drop")
    check_sizes(judged)
    if cfg.data.drop:
        samples, left = (sum(index.samples for index in some) for some in (indexed, sets))
        context.say(f"data.drop: {len(cfg.data.drop)} shards, {samples - left:,} of {samples:,} samples, are not read")
    return until_done(context, lambda: attempt(cfg, context))


def training_sets(cfg: TrainConfig, context: Context) -> list[str]:
    """Where the sets that are trained on are, in the order of their names."""
    return [context.resolve(path) or "" for path, _ in cfg.data.sets().values()]


def attempt(cfg: TrainConfig, context: Context) -> dict[str, Any]:
    """One worker group, from claim to result."""
    job = Job(
        run=str(context.run),
        directory=str(context.directory),
        attempt=claim_attempt(context.run),
        key=context.key,
        code=code_version(),
        model=models.to_dict(context.model),
        train=training_sets(cfg, context),
        evaluate=context.resolve(cfg.data.evaluate),
        init=context.resolve(cfg.init),
        probe_train=context.resolve(cfg.probe.train),
        probe_test=context.resolve(cfg.probe.test),
        claimed=time.time(),
    )
    task = {"config": config.plain(cfg), "job": dataclasses.asdict(job)}
    write_whole(context.directory / "task.json", json.dumps(task, indent=1))  # `jobs replay` starts from it
    return run_watched(train, task, context, job.attempt, cfg.stall_s, job.stop_file.touch)
