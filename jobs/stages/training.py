"""What pretrain and finetune share: what a worker group is told, and how it is asked to stop."""

import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import models
from data.errors import DataError
from data.files import write_whole
from data.shards.index import load_index, without
from data.shards.reader import check_sizes
from jobs.cluster.worker_group import Task
from jobs.context import Context, code_version
from jobs.supervisor import supervise
from pipeline import config
from pipeline.arithmetic import batch_arithmetic
from pipeline.start import Job
from pipeline.train import worker
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
    make_task = partial(make_training_task, cfg, context)
    return supervise(worker, make_task, context, stall_s=cfg.stall_s, ask_to_stop=touch_stop_file)


def training_sets(cfg: TrainConfig, context: Context) -> list[str]:
    """Where the sets that are trained on are, in the order of their names."""
    return [context.resolve(path) or "" for path, _ in cfg.data.sets().values()]


def make_training_task(cfg: TrainConfig, context: Context, attempt: int) -> Task:
    """Return what the workers of an attempt are told, and leave it in task.json, from which `jobs replay` starts."""
    job = Job(
        run=str(context.run),
        directory=str(context.directory),
        attempt=attempt,
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
    write_whole(context.directory / "task.json", json.dumps(task, indent=1))
    return task


def touch_stop_file(attempt_folder: Path) -> None:
    """Ask the workers of an attempt to commit and end; rank 0 looks for this file (pipeline.start.Job.stop_file)."""
    (attempt_folder / "stop").touch()
