"""What pretrain and finetune share: the sets are checked, the workers are told what to do, and how to be stopped.

1. Every set is loaded and looked at, and the disk: a stage that could not be judged or saved must not begin.
2. The supervisor runs attempts; for each one `make_training_task` writes down what its workers are told.
3. To stop, the driver touches a file; rank 0 sees it at the end of a step, and all workers commit and end.
"""

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Any

import models
from data.errors import DataError
from data.shards.index import Index, load_index, without
from data.shards.reader import check_sizes
from jobs.cluster.worker_group import Task
from jobs.context import Context, code_version
from jobs.supervisor import supervise
from pipeline import config, handover
from pipeline.arithmetic import batch_arithmetic
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.room import check_room
from pipeline.start import STOP_FILE, Job
from pipeline.train import train
from pipeline.training_config import TrainConfig

INPUTS = ("data.train", "data.mixture.*.train", "data.evaluate", "init", "probe.train", "probe.test")


def run(cfg: TrainConfig, context: Context) -> dict[str, Any]:
    """Train until the stage is done. Raises Preempted, or StageFailed with the exit code that the worker wanted."""
    # Called for its error alone, which names batch sizes that would work.
    batch_arithmetic(cfg, context.cluster.workers)
    check_sets(cfg, context)
    check_room(cfg, context.model, context.directory / "checkpoints")
    make_task = partial(make_training_task, cfg, context)
    return supervise(train, make_task, context, stall_s=cfg.stall_s, ask_to_stop=touch_stop_file)


def check_sets(cfg: TrainConfig, context: Context) -> None:
    """Raise DataError where a set is empty, has no labels, or has shards of another size than its index says."""
    whole_sets = [load_index(path) for path in training_sets(cfg, context)]
    sets = without(whole_sets, cfg.data.drop)
    evaluation_sets = []
    for value in (cfg.data.evaluate, cfg.probe.train, cfg.probe.test):
        path = context.resolve(value)
        if path is not None:
            evaluation_sets.append(load_index(path))

    for index in (*sets, *evaluation_sets):
        check_not_empty(index)
    # A shard that is missing or cut short stops the stage here; its content is checked when it is first read.
    check_sizes(sets, cfg.data.drop, f"{context.name}.data.drop")
    check_sizes(evaluation_sets)

    if cfg.data.drop:
        samples = sum(index.samples for index in whole_sets)
        samples_left = sum(index.samples for index in sets)
        dropped = f"{samples - samples_left:,} of {samples:,} samples"
        context.say(f"data.drop: {len(cfg.data.drop)} shards, {dropped}, are not read")


def check_not_empty(index: Index) -> None:
    """Raise DataError where a set has nothing to learn from or to judge."""
    if not (index.samples and index.classes):
        raise DataError(
            f"{index.tables}: {index.samples} samples, {index.classes} classes: nothing to learn or to judge\n"
            "  `python -m jobs data check` says why; it may be that labels are missing, or that data.drop names all"
        )


def training_sets(cfg: TrainConfig, context: Context) -> list[str]:
    """Return the paths of the sets that are trained on, in the order of the sets' names."""
    paths = []
    for value, _weight in cfg.data.sets().values():
        path = context.resolve(value)
        assert path is not None, "sets() names no set without a path"
        paths.append(path)
    return paths


def make_training_task(cfg: TrainConfig, context: Context, attempt: int) -> Task:
    """Return what the workers of an attempt are told, and leave it in task.json, from which `jobs replay` starts.

    Raises DataError where the weights that the attempt starts from have changed.
    """
    init = context.resolve(cfg.init)
    # An attempt that resumes from a checkpoint does not read them. Every one that does is preceded by a check.
    if init is not None and not checkpoint.committed(context.directory / "checkpoints"):
        handover.check_weights(Path(init), context.say)
    job = Job(
        run=str(context.run),
        directory=str(context.directory),
        attempt=attempt,
        key=context.key,
        code=code_version(),
        model=models.to_dict(context.model),
        train=training_sets(cfg, context),
        evaluate=context.resolve(cfg.data.evaluate),
        init=init,
        probe_train=context.resolve(cfg.probe.train),
        probe_test=context.resolve(cfg.probe.test),
        claimed=time.time(),
    )
    # Workers live in other folders than the driver, to which a path in a recipe is relative.
    cfg = dataclasses.replace(cfg, deepspeed=context.resolve(cfg.deepspeed))
    task = {"config": config.plain(cfg), "job": dataclasses.asdict(job)}
    handover.write_record(context.directory / "task.json", task)
    return task


def touch_stop_file(attempt_folder: Path) -> None:
    """Ask the workers of an attempt to commit and end; rank 0 looks for this file."""
    # A file reaches the workers of every node, because all nodes share the run directory.
    (attempt_folder / STOP_FILE).touch()
