"""What pretrain and finetune share: the sets are checked, the workers are told what to do, and how to be stopped.

1. Every set is loaded and looked at, and the disk: a stage that could not be judged or saved must not begin.
2. The supervisor runs attempts; for each one `make_training_task` writes down what its workers are told.
3. To stop, the driver asks the agents; rank 0 hears it at the end of a step, and all workers commit and end.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import models
from data.errors import DataError
from data.index.document import load_index
from data.index.index import Index
from data.index.left_out import without
from data.shards.reader import check_sizes
from jobs.cluster.supervisor import alone, supervise
from jobs.cluster.worker import Task
from jobs.context import Context
from jobs.planning.outlook import keep_forecast
from jobs.stages.async_evaluation import AsyncEvaluation
from jobs.worlds import allowed_worlds
from pipeline import artifacts, config
from pipeline.checkpoints.disk_space import check_disk_space
from pipeline.checkpoints.stored import StoredCheckpoints, committed_steps
from pipeline.plan.kept_forecast import beside_measured
from pipeline.plan.memory import need_if_traced, with_blocks
from pipeline.train import train
from pipeline.training_config import TrainConfig
from pipeline.versions import code_version
from pipeline.worker import Job

Resolve = Callable[[str | None], str | None]  # as Context.resolve
LoadIndex = Callable[[str], Index | None]

INPUTS = ("data.train", "data.mixture.*.train", "data.evaluate", "init", "probe.train", "probe.test")
FILES = ("deepspeed",)


def run(cfg: TrainConfig, context: Context) -> dict[str, Any]:
    """Train until the stage is done. Raises Preempted, or StageFailed with the exit code that the worker wanted."""
    check_sets(cfg, context.name, context.resolve)
    say_what_is_dropped(cfg, context)
    checkpoints = context.directory / "checkpoints"
    check_disk_space(cfg, context.model, checkpoints, is_scratch=context.remote is not None)
    make_task = partial(make_training_task, cfg, context)
    worlds = allowed_worlds(cfg, context.cluster)
    evaluations = evaluations_beside(cfg, context)
    keeping = keep_forecast(cfg, context)
    outcome = supervise(
        train,
        make_task,
        context,
        worlds=worlds,
        stall_s=cfg.stall_s,
        accompany=alone if evaluations is None else evaluations.accompany,
    )
    if evaluations is not None:
        evaluations.finish()
    if keeping is not None:
        keeping.join()
    compared = beside_measured(context.directory)
    if compared:
        context.say(f"{context.name}: {compared}")
    if context.remote is not None:
        # Rank 0 may have worked on another node: what it has handed on is brought here.
        StoredCheckpoints(context.remote, context.directory).bring_exactly(outcome["files"])
    return outcome


def evaluations_beside(cfg: TrainConfig, context: Context) -> AsyncEvaluation | None:
    """Return what has commits judged beside training; None where the recipe wants none, or they cannot be."""
    is_judged = bool(cfg.data.evaluate or cfg.probe.train)
    if cfg.evaluate_on != "spare" or not cfg.evaluate_every or not is_judged:
        return None
    if context.remote is not None:
        context.say(f"{context.name}: evaluate_on=spare reads checkpoints in a shared folder; here they are in a store")
        return None
    return AsyncEvaluation(cfg, context)


def check_sets(cfg: TrainConfig, name: str, resolve: Resolve, load: LoadIndex = load_index) -> None:
    """Raise DataError where a set is empty, has no labels, or has shards of another size than its index says.

    `name` is the stage's. With a `load` that returns None for a set that is not made yet, the others are checked.
    """
    whole_sets = loaded_sets(training_sets(cfg, resolve), load)
    # Without all of them nobody knows which shard `data.drop` means.
    if len(whole_sets) == len(cfg.data.sets()):
        sets = without(whole_sets, cfg.data.drop)
        check_usable(sets, cfg.data.drop, f"{name}.data.drop")
    evaluation_paths = [resolve(value) for value in (cfg.data.evaluate, cfg.probe.train, cfg.probe.test)]
    check_usable(loaded_sets(evaluation_paths, load))


def loaded_sets(paths: Sequence[str | None], load: LoadIndex) -> list[Index]:
    """Return the indexes of those sets that are named and that are there."""
    indexes = []
    for path in paths:
        index = load(path) if path is not None else None
        if index is not None:
            indexes.append(index)
    return indexes


def check_usable(sets: Sequence[Index], dropped: Sequence[str] = (), option: str = "") -> None:
    """Raise DataError where a set is empty or lacks a shard; `dropped` and `option` are those of `check_sizes`."""
    for index in sets:
        check_not_empty(index)
    # A shard that is missing or cut short stops the stage here; its content is checked when it is first read.
    check_sizes(sets, dropped, option)


def say_what_is_dropped(cfg: TrainConfig, context: Context) -> None:
    """Say how many samples `data.drop` leaves out, where it names shards."""
    if not cfg.data.drop:
        return
    whole_sets = [load_index(path) for path in training_sets(cfg, context.resolve)]
    samples = sum(index.samples for index in whole_sets)
    samples_left = sum(index.samples for index in without(whole_sets, cfg.data.drop))
    dropped = f"{samples - samples_left:,} of {samples:,} samples"
    context.say(f"data.drop: {len(cfg.data.drop)} shards, {dropped}, are not read")


def check_not_empty(index: Index) -> None:
    """Raise DataError where a set has nothing to learn from or to judge."""
    if not (index.samples and index.classes):
        raise DataError(
            f"{index.tables}: {index.samples} samples, {index.classes} classes: nothing to learn or to judge\n"
            "  `python -m jobs data check` says why; it may be that labels are missing, or that data.drop names all"
        )


def training_sets(cfg: TrainConfig, resolve: Resolve) -> list[str]:
    """Return the paths of the sets that are trained on, in the order of the sets' names."""
    paths = []
    for value, _weight in cfg.data.sets().values():
        path = resolve(value)
        assert path is not None, "sets() names no set without a path"
        paths.append(path)
    return paths


def make_training_task(cfg: TrainConfig, context: Context, attempt: int) -> Task:
    """Return what the workers of an attempt are told, and leave it in task.json, from which `jobs replay` starts.

    Raises DataError where the weights that the attempt starts from have changed.
    """
    init = context.resolve(cfg.init)
    # An attempt that resumes from a checkpoint does not read them. Every one that does is preceded by a check.
    if init is not None and not committed_steps(context.directory, context.remote):
        artifacts.check_weights(Path(init), context.say)
    # Workers live in other folders than the driver, to which a path in a recipe is relative.
    cfg = dataclasses.replace(cfg, deepspeed=context.resolve(cfg.deepspeed))
    # A budget for activations becomes a number of blocks here, once: workers of other nodes need not trace a step.
    cfg = with_blocks(cfg, context.model, is_gpu=context.cluster.gpus_per_worker > 0)
    job = Job(
        run=str(context.run),
        directory=str(context.directory),
        attempt=attempt,
        key=context.key,
        code=code_version(),
        model=models.to_dict(context.model),
        train=training_sets(cfg, context.resolve),
        evaluate=context.resolve(cfg.data.evaluate),
        init=init,
        probe_train=context.resolve(cfg.probe.train),
        probe_test=context.resolve(cfg.probe.test),
        class_names=context.class_names,
        claimed=time.time(),
        remote=context.remote,
        device_bytes=bytes_if_traced(cfg, context),
    )
    task = {"config": config.plain(cfg), "job": dataclasses.asdict(job)}
    artifacts.write_record(context.directory / artifacts.TASK, task)
    return task


def bytes_if_traced(cfg: TrainConfig, context: Context) -> int | None:
    """Return what a worker needs of its device's memory; None where no plan has traced one like it."""
    # A run does not wait for a trace. Where the recipe leaves the number of workers open, this is the need of the most
    # that it allows: each then needs the least, and no start is refused for a world that it does not have.
    # What is traced is of whole images: a stage that never sees them needs less.
    if not cfg.thinning.has_whole_images:
        return None
    is_gpu = context.cluster.gpus_per_worker > 0
    most_workers = allowed_worlds(cfg, context.cluster)[0]
    need = need_if_traced(cfg, context.model, most_workers, is_gpu=is_gpu)
    return None if need is None else need.device_bytes
