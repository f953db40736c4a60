"""Starts a worker of a trained stage: builds a Worker, with everything that the training loop uses, from a task.

Training starts from the first of these that exists:
1. a committed checkpoint of this stage: everything resumes from its step, bit for bit at the same world size;
2. `init`: the weights of another stage, at step 0 with a fresh optimizer;
3. random weights drawn from `seed`.

In:  the stage's task (config, Job and hooks); RANK, LOCAL_RANK, LOCAL_WORLD_SIZE and the address of rank 0 in the
     environment
Out: a Worker, whose parts stay the same during training, and Progress, which changes with every step

All functions here are collective: all workers of the group call them together, in this order.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import models
from data.errors import CheckpointError, DataError
from data.index.document import load_index
from data.order import Ledger
from models import ModelConfig
from pipeline import artifacts, config
from pipeline.architecture import check_model
from pipeline.checkpoints import restore
from pipeline.checkpoints.manifest import Manifest
from pipeline.checkpoints.saver import Saver, checkpoint_bytes
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.engine.determinism import Conditions, resume_line, use_deterministic_kernels
from pipeline.engine.engine import Engine
from pipeline.engine.settings import engine_settings
from pipeline.health import Health
from pipeline.hooks import Hook, HookOptions, StageEvaluator, build_config, load_classes, masked_by
from pipeline.identity import package_versions
from pipeline.monitoring.telemetry import Telemetry, read_metrics
from pipeline.monitoring.watchdog import Phases
from pipeline.process_group import (
    arithmetic_conditions,
    check_start,
    device_name,
    fetch_init,
    join_group,
    log_network,
    processor,
)
from pipeline.training_config import Phase, TrainConfig, has_one_shape, smaller_sizes
from pipeline.training_data import batch_arithmetic, cache_line, steps_of, training_order
from pipeline.values import counted
from pipeline.variables import note_values, recorded
from pipeline.worker import Group, Job, Progress, Setup, StageData, StopRequest, TrainingLog

MAX_COMPILED = 64  # maximum number of compiled versions of a block; each number of tokens needs one


class WorkerTask(NamedTuple):
    """The task received by all workers of an attempt."""

    cfg: TrainConfig
    job: Job
    hooks: HookOptions


@dataclass(frozen=True)
class Worker(Setup):
    """All objects that a worker trains with; they are not replaced during training."""

    health: Health
    evaluator: StageEvaluator
    hooks: tuple[Hook, ...]


def read_task(task: Mapping[str, Any]) -> WorkerTask:
    """Convert a task from plain values, {"config": {…}, "job": {…}, "hooks": {…}}, to typed objects.

    Raises ConfigError if a value is invalid or a hook is unknown.
    """
    note_values(task.get("variables", {}))
    plain_config = json.loads(json.dumps(task["config"]))  # tuples become lists, as in a recipe
    hooks = task.get("hooks", {})
    return WorkerTask(build_config(plain_config, hooks), Job(**task["job"]), hooks)


def set_up(task: WorkerTask) -> tuple[Worker, Progress]:
    """Collective: join the process group, build a Worker, and load the checkpoint to resume from, if there is one.

    Raises ClusterError if the workers must not train together, ConfigError or DataError if the config or the data are
    invalid, CheckpointError if no checkpoint can be loaded, or StorageError if the storage fails. An error that every
    worker can detect is raised on all workers at the same time.
    """
    cfg = task.cfg
    job = task.job
    group = join(cfg, job)
    checkpoints = group.checkpoints
    log = group.telemetry.log

    # 1. Find the checkpoint to resume from; None if nothing was ever committed. Rank 0 deletes leftovers and searches
    #    while the others wait; if it hangs, the watchdog must blame only rank 0.
    with group.phases.rank_0_phase("restore", 0, group.rank == 0):
        chosen = restore.choose_together(checkpoints, job.attempt, log)
    if chosen is not None:
        # A checkpoint copied here from another stage would load without an error if its shapes match.
        check_stage(cfg, job, chosen.manifest, checkpoints.address)

    # 2. Build everything. When resuming, do not read the weights of `init`: they may have been deleted.
    worker = build(task, group, init=job.init if chosen is None else None)

    # 3. Load the checkpoint, or an older one if its files are damaged.
    progress = Progress(step=0, bad_samples=0, ledger=Ledger.start(worker.data.index.digest, cfg.seed))
    manifest = None
    if chosen is not None:
        group.phases.enter("load", 0)
        manifest = restore.load_together(worker.engine.load, checkpoints, chosen, job.attempt, log).manifest
        check_stage(cfg, job, manifest, checkpoints.address)
        # If the stage was killed between its last commit and its end, its last step needs no second save.
        worker.saver.last_committed = manifest.step
        masked = [tuple(samples) for samples in manifest.masked]
        progress = Progress(manifest.step, manifest.bad_samples, Ledger(manifest.ledger), masked=masked)

    # 4. Log how the attempt starts.
    report_start(worker, progress, manifest)
    if group.rank == 0 and group.device.type == "cuda" and dist.get_backend() == "gloo":
        log("workers share a GPU, which NCCL does not support: using gloo through host memory, which is slow")
    # A slow collective is most often caused by the wrong network interface.
    log_network(log)
    # Repeated in every attempt, because nodes and network links may have changed.
    worker.engine.report_start(cfg, group.telemetry, progress.step)

    # 5. Start the hooks, which may change how training continues.
    for hook in worker.hooks:
        hook.begin(worker, progress)
    check_masked(worker, progress)
    worker.log.begin()
    worker.evaluator.begin(progress.step)
    return worker, progress


def join(cfg: TrainConfig, job: Job) -> Group:
    """Collective: join the process group, and check that all workers are compatible.

    Raises ClusterError if the workers differ in code, storage or device, or ConfigError if exact mode is not
    deterministic in this environment.
    """
    # Report phases first: from here on the driver sees what this worker is doing, and ends it if it hangs.
    phases = Phases(job.attempt_folder, int(os.environ["RANK"]), cfg.stall_s)
    phases.enter("join", 0)
    if cfg.exact_parts and torch.cuda.is_available():
        use_deterministic_kernels()
    device = join_group(cfg.timeout_s)
    rank = dist.get_rank()
    directory = Path(job.directory)
    storage = job.storage
    # Only on the driver's node does metrics.jsonl cover the whole stage; the driver collects the lines of other nodes.
    # If this folder has this attempt's task file, which the driver wrote, it is the driver's.
    is_drivers_folder = storage.is_shared
    if not storage.is_shared:
        with suppress(OSError, DataError):
            latest_job = artifacts.read_record(directory / artifacts.TASK)["job"]
            is_drivers_folder = (latest_job["attempt"], latest_job["claimed"]) == (job.attempt, job.claimed)
    stage = directory.relative_to(job.run).as_posix()
    checkpoints = StageCheckpoints(storage, stage, sends_metrics=is_drivers_folder)
    telemetry = Telemetry(directory, rank, job.attempt)
    check_start(
        run=Path(job.run),
        attempt=job.attempt,
        attempt_folder=job.attempt_folder,
        code=job.code,
        claimed=job.claimed,
        device=device,
        # For runs in an object store, the nodes share no folder.
        is_shared=storage.is_shared,
        device_bytes=job.device_bytes,
        log=telemetry.log,
    )
    return Group(phases, device, rank, dist.get_world_size(), telemetry, checkpoints)


def build(task: WorkerTask, group: Group, init: str | None) -> Worker:
    """Collective: build this worker's model, engine, data and hooks; `init` is the path of initial weights, if any.

    Raises ConfigError or DataError if the config, the data or the initial weights are invalid, or StorageError if the
    storage fails.
    """
    cfg = task.cfg
    job = task.job
    group.phases.enter("build", 0)
    model_config: ModelConfig = models.from_dict(job.model)
    data = read_data(cfg, job, model_config, group.world)
    labelled = [path for path in (*job.train, job.evaluate) if path is not None]
    check_model(cfg, model_config, {path: data.sets[path].classes for path in labelled})
    if init is not None:
        fetch_init(job.storage, init)
    model = build_model(cfg, init, model_config, data.phases, group.telemetry).to(group.device)

    group.phases.enter("engine", 0)
    engine = build_engine(cfg, model, data.arithmetic.accumulation)
    saver = Saver(
        group.checkpoints,
        group.telemetry,
        group.phases,
        cfg,
        saves_evaluated=cfg.saves_evaluated,
        expected_bytes=checkpoint_bytes(cfg, model_config),
    )
    hooks: list[Hook] = []
    evaluator_class = StageEvaluator
    if job.evaluate or job.probe_train:
        from pipeline.evaluation.in_training import LoopEvaluator  # not needed by stages without evaluation

        evaluator_class = LoopEvaluator
    for hook_class, options in zip(load_classes(task.hooks), task.hooks.values(), strict=True):
        hooks.append(hook_class(cfg, job, **options))
        evaluator_class = hook_class.evaluator or evaluator_class
    return Worker(
        cfg=cfg,
        job=job,
        group=group,
        data=data,
        model_config=model_config,
        engine=engine,
        saver=saver,
        health=Health(cfg, Path(job.directory), group.checkpoints, group.telemetry, hooks),
        evaluator=evaluator_class(cfg, job, data.last_step),
        log=TrainingLog(),
        hooks=tuple(hooks),
        stop=StopRequest(job.stop_file, reads_file=group.rank == 0),
    )


def read_data(cfg: TrainConfig, job: Job, model_config: ModelConfig, world: int) -> StageData:
    """Read the stage's data set indexes; derive the sample order, batch arithmetic and length.

    Raises DataError if an index is missing or invalid.
    """
    optional = (job.evaluate, job.probe_train, job.probe_test)
    paths = {*job.train, *(path for path in optional if path is not None)}
    sets = {path: load_index(path) for path in paths}
    training_sets = [sets[path] for path in job.train]
    index, order = training_order(cfg, training_sets)
    # Count samples of dropped shards too, so that dropping a shard does not change the number of steps.
    steps = steps_of(cfg, sum(training_set.samples for training_set in training_sets))
    return StageData(
        sets=sets,
        index=index,
        order=order,
        # Only the distribution of a batch depends on the world size, which may differ between attempts.
        arithmetic=batch_arithmetic(cfg, world),
        steps=steps,
        last_step=steps if job.until is None else job.until,
        phases=cfg.phases(steps, model_config),
    )


def build_model(
    cfg: TrainConfig, init: str | None, model_config: ModelConfig, phases: Sequence[Phase], telemetry: Telemetry
) -> nn.Module:
    """Build the model with random weights or the weights of `init`; set up recomputation and compilation of blocks."""
    # Every worker draws the same weights from the seed; a separate generator makes this independent of earlier draws.
    model = models.from_config(model_config, torch.Generator().manual_seed(cfg.seed))
    if init is not None:
        stored_weights, stored_config = artifacts.load_weights(Path(init))
        generator = torch.Generator().manual_seed(cfg.seed)
        weights, report = models.transfer(stored_weights, stored_config, model_config, cfg.new_head, generator)
        model.load_state_dict(weights, strict=False)  # transfer() has accounted for every parameter
        telemetry.report(
            "transfer",
            {"step": 0, "report": str(report)},
            f"parameters of init: {len(report.kept)} kept, {len(report.resized)} resized, {len(report.new)} new, "
            f"{len(report.dropped)} dropped",
        )
    # Recomputation and compilation change no shapes or names, so checkpoints and weights do not depend on them.
    model.recomputed_blocks = cfg.checkpoint_blocks
    sizes = smaller_sizes(phases, model_config)
    if sizes:
        model.smaller_sizes = sizes
    if not cfg.compile:
        return model
    if has_one_shape(phases, model_config):
        models.compile_blocks(model)
        return model
    # Compile separately for each number of tokens. By default torch compiles for any length once it sees a second
    # number, but a resumed run that only sees the second number would specialise on it: other kernels, other bits.
    models.compile_blocks(model, dynamic=False)
    # Above torch's default limit of 8 versions, a block would run uncompiled, with other bits than after a resume.
    torch._dynamo.config.recompile_limit = MAX_COMPILED
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return model


def build_engine(cfg: TrainConfig, model: nn.Module, accumulation: int) -> Engine:
    """Wrap the model in the DeepSpeed engine or, in exact mode, in the engine that sums gradients in a fixed order."""
    settings = engine_settings(cfg, accumulation)
    decayed = models.decayed_parameters(model)
    if cfg.exact_parts:
        from pipeline.engine.exact import ExactEngine  # needed only in exact mode

        return ExactEngine(model, decayed, cfg.optim, settings, cfg.polyak, parts=cfg.exact_parts)
    return Engine(model, decayed, cfg.optim, settings, cfg.polyak)


def check_stage(cfg: TrainConfig, job: Job, manifest: Manifest, folder: str) -> None:
    """Raise CheckpointError with the differences if a checkpoint belongs to another stage."""
    if manifest.key == job.key:
        return
    # The key also covers the stage's inputs, so it can differ although all config fields are equal.
    changes = config.differences(recorded(manifest.config), recorded(config.tagged(cfg, "forbid")))
    changed = "; ".join(changes.values()) or "its inputs"
    raise CheckpointError(
        f"the newest checkpoint in {folder} has the stage key {manifest.key[:8]}, expected {job.key[:8]}; "
        f"changed: {changed}\n  move the checkpoint back to the folder of its stage"
    )


def report_start(worker: Worker, progress: Progress, manifest: Manifest | None) -> None:
    """Log how training starts, which inputs are ignored, and how many shards will be cached; rank 0 only."""
    if worker.group.rank != 0:
        return
    cfg = worker.cfg
    job = worker.job
    group = worker.group
    arithmetic = worker.data.arithmetic
    # Cases in the order of the module's docstring. Name ignored inputs, so that nobody expects them to have an effect.
    if manifest is not None:
        ignored = ""
        if job.init:
            ignored = f", init {job.init} ignored"
        text = (
            f"resumed from step {manifest.step} (attempt {manifest.attempt}, {manifest.world} workers, "
            f"ZeRO {manifest.zero}, ledger {manifest.ledger[:12]}){ignored}"
        )
        if 0 < manifest.step == cfg.first_step:
            text = f"branch: resumed from step {manifest.step} of {job.init} with its optimizer and sample order"
        if manifest.masked:
            text += f", {counted(sum(stop - first for *_, first, stop in manifest.masked), 'sample')} masked"
    elif job.init:
        text = f"weights from {job.init}, new optimizer state, step 0"
    else:
        text = f"random weights from seed {cfg.seed}, step 0"
    precision: str = cfg.precision
    if precision == "bf16":
        precision = "bf16, gradients summed in fp32"
        # Users can request this in their DeepSpeed file.
        if worker.engine.sums_in == "bf16":
            precision += " over micro-batches, in bf16 over workers"
    group.telemetry.log(
        f"attempt {job.attempt}: {text}; "
        f"{group.world} workers on {device_name(group.device)} "
        f"× micro_batch {arithmetic.micro_batch} × accumulation {arithmetic.accumulation} = "
        f"batch {arithmetic.batch_size}, {worker.data.steps} steps, ZeRO {cfg.zero} {precision}; "
        f"{bits_line(worker, manifest)}"
    )
    record = {
        "step": progress.step,
        "text": text,
        "world": group.world,
        # Used by `trial`, whose driver may run on another machine.
        "hardware": device_name(group.device) if group.device.type == "cuda" else processor(),
        # Used by `report`, which lists the differences between two runs or two attempts.
        "code": job.code,
        "versions": package_versions(),
        "threads": torch.get_num_threads(),
        # Used by `audit`, which compares bits only under the same conditions.
        "arithmetic": arithmetic_conditions(),
        # Used by `account`: an attempt's start-up begins with the driver's claim, before its first record.
        "claimed": job.claimed,
        "began": job.began,
        # Used by `jobs replay`, which repeats a step with the shards that its attempt read.
        "drop": cfg.data.drop,
    }
    earlier = read_metrics(group.telemetry.directory, "start", []) if group.rank == 0 else []
    group.telemetry.report("start", record)
    if earlier and progress.step > 0:
        before = {name: earlier[-1].get(name, record[name]) for name in ("threads", "versions", "arithmetic")}
        changed = config.differences(flat_values(before), flat_values({name: record[name] for name in before}))
        if changed:
            group.telemetry.log(
                f"conditions have changed since the previous attempt: {'; '.join(changed.values())}\n"
                "  the last bits may differ from here on"
            )
    if worker.data.index.remote:
        # The workers of a node have consecutive ranks, so their slots form a single range; log that of rank 0's node.
        last_local_rank = int(os.environ["LOCAL_WORLD_SIZE"]) - 1
        slots = range(arithmetic.slots(last_local_rank).stop)
        needed = cache_line(worker.data.index, worker.data.order, slots, progress.step, cfg.data)
        group.telemetry.log(f"cache of this node: {needed}")


def flat_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested mappings into one whose keys are the innermost names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= value if isinstance(value, Mapping) else {name: value}
    return flat


def bits_line(worker: Worker, manifest: Manifest | None) -> str:
    """Describe whether resuming this attempt would reproduce it bit for bit and, if not, the reasons."""
    cfg = worker.cfg
    model_config = worker.model_config
    now = Conditions(
        is_gpu=worker.group.device.type == "cuda",
        world=worker.group.world,
        zero=cfg.zero,
        exact_parts=cfg.exact_parts,
        is_compiled=cfg.compile,
        decodes_on_gpu=cfg.data.decode == "gpu",
        pools=model_config.family == "bit" or getattr(model_config, "stem", None) is not None,
        backend=dist.get_backend(),
    )
    before = None
    if manifest is not None:
        before = replace(now, world=manifest.world, zero=manifest.zero)
    return resume_line(now, before)


def check_masked(worker: Worker, progress: Progress) -> None:
    """Raise CheckpointError if the checkpoint masks samples but no hook in the task does: training would differ."""
    if not progress.masked:
        return
    step, shard, first, _ = progress.masked[0]
    if masked_by(worker.hooks, step, np.array([shard]), np.array([first])) is None:
        raise CheckpointError(
            f"the run has masked samples before step {progress.step}, but this checkout has no hook that masks "
            "samples\n"
            "  use the checkout that started the run, with jobs/extras/async_evaluation and pipeline/extras/replays"
        )
