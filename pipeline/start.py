"""A worker of a trained stage: what it is told (Job), what it trains with (Worker), and how it is set up.

How training starts, first match wins:
1. a committed checkpoint of this stage: everything continues from its step, bit for bit at the same world size;
2. `init`: weights of another stage, step 0, a fresh optimizer;
3. random weights from `seed`.

In:  the stage's config and a Job; RANK, LOCAL_RANK, LOCAL_WORLD_SIZE and the address of rank 0 in the environment
Out: a Worker, whose parts stay the same while the stage trains, and Progress, which changes with every step

Everything here is collective: all workers of the group do it together, and in this order.
"""

import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import models
from data.errors import CheckpointError, DataError
from data.index.document import load_index
from data.index.index import Index
from data.order import Ledger, Mixture, Order
from data.storage import Storage, open_storage
from models import ModelConfig
from pipeline import artifacts, config
from pipeline.checkpoints import restore
from pipeline.checkpoints.manifest import Manifest, attempt_folder
from pipeline.checkpoints.saver import Saver, checkpoint_bytes
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.engine.determinism import Conditions, resume_line, use_deterministic_kernels
from pipeline.engine.engine import Engine
from pipeline.engine.exact import ExactEngine
from pipeline.engine.settings import engine_settings
from pipeline.extras import async_evaluation
from pipeline.extras.best import Foretold, steps_of_best
from pipeline.extras.replays.masking import Mask
from pipeline.health import Health
from pipeline.monitoring.telemetry import Telemetry, Window, counted, read_metrics
from pipeline.monitoring.watchdog import STOP_FILE, Phases, node_folder
from pipeline.process_group import check_start, device_name, join_group, log_network, processor
from pipeline.training_config import (
    BYTES_BF16,
    BYTES_FP32,
    Arithmetic,
    TrainConfig,
    batch_arithmetic,
    cache_line,
    check_model,
    steps_of,
    training_order,
)
from pipeline.versions import package_versions

MOST_COMPILED = 64  # forms of a block: one for each number of tokens, in training and in evaluation


@dataclass(frozen=True)
class Job:
    """Says where one attempt of a stage reads and writes; paths are absolute, workers live in other folders."""

    run: str  # the run directory, shared by all nodes unless there is a `remote`
    directory: str  # of this stage
    attempt: int
    key: str  # of the stage
    code: str  # version of the code
    model: dict[str, Any]  # the resolved architecture (models.to_dict)
    train: list[str]  # the sets that are trained on, in the order of their names
    evaluate: str | None = None
    init: str | None = None
    probe_train: str | None = None
    probe_test: str | None = None
    class_names: Sequence[str] = ()  # of the model's outputs, which are handed on with the weights; none: unknown
    claimed: float = 0.0  # when the driver began this attempt, seconds since 1970
    began: float = 0.0  # when its command began to work on the stage
    remote: str | None = None  # URL of the run in an object store, where the nodes share no folder
    device_bytes: int | None = None  # that a worker needs of its device; None: its step was never traced
    until: int | None = None  # the step that a replay ends with; None: the last of the stage
    masked: Sequence[Sequence[int]] = ()  # what a replay does without: (step, shard, first, stop) in the joined sets
    foretold: dict[str, Any] | None = None  # what a law says of its evaluations (best.Foretold)

    @property
    def storage(self) -> Storage:
        """Return where the run keeps its files."""
        return open_storage(Path(self.run), self.remote)

    @property
    def hopeless(self) -> str:
        """Return why the stage is to end early by what was foretold of it; "" while it is not. Rank 0 alone."""
        if self.foretold is None:
            return ""
        return Foretold(**self.foretold).hopeless(Path(self.directory))

    @property
    def attempt_folder(self) -> Path:
        """Return the folder of what this attempt's workers leave behind: their places, ends and logs."""
        return attempt_folder(Path(self.directory), self.attempt)

    @property
    def stop_file(self) -> Path:
        """Return the file by which this node's agent passes on that the worker group is to stop."""
        return node_folder(self.attempt_folder) / STOP_FILE


@dataclass(frozen=True)
class Worker:
    """Holds what a worker trains with; nothing here is replaced while the stage trains."""

    cfg: TrainConfig
    job: Job
    rank: int
    world: int  # size: workers of the group
    device: torch.device
    phases: Phases
    telemetry: Telemetry
    window: Window  # the steps since the last record
    since_line: Window  # the steps that are recorded since the last log line
    sets: dict[str, Index]  # by path: every set that the stage reads
    index: Index  # of what is trained on, mixtures joined
    order: Order | Mixture
    steps: int  # of the whole stage, on which the learning rate depends
    last_step: int  # at which this attempt has done its work: that of the stage, or of a replay
    mask: Mask  # samples that weigh nothing: a replay's, and those behind spikes (`health.on_spike`)
    arithmetic: Arithmetic
    model_config: ModelConfig
    engine: Engine
    saver: Saver
    health: Health
    loop_price: async_evaluation.LoopPrice = field(default_factory=async_evaluation.LoopPrice)  # of evaluations
    sigterm: threading.Event = field(default_factory=threading.Event)  # set when this process is asked to end

    def wants_stop(self) -> bool:
        """Tell whether this worker is asked to stop: by a signal or, rank 0 only, by the driver's file."""
        return self.sigterm.is_set() or (self.rank == 0 and self.job.stop_file.exists())


@dataclass
class Progress:
    """Holds what changes with every step; it is plain data that prints, and goes into a checkpoint's manifest."""

    step: int  # steps that are whole
    bad_samples: int  # of all workers, since step 0
    ledger: Ledger
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation; rank 0 only


@dataclass(frozen=True)
class Joined:
    """Holds what a worker has once it belongs to the group, before it has anything to train."""

    phases: Phases
    device: torch.device
    rank: int
    world: int  # size: workers of the group
    telemetry: Telemetry
    checkpoints: StageCheckpoints


def set_up(cfg: TrainConfig, job: Job) -> tuple[Worker, Progress]:
    """Collective: join the group, build everything, load what there is to load, and say how training starts.

    Raises ConfigError, DataError, CheckpointError, and ClusterError where the workers do not fit together.
    """
    joined = join(cfg, job)
    checkpoints = joined.checkpoints
    log = joined.telemetry.log

    # 1. The checkpoint to go on from; None where none was ever committed. Rank 0 sweeps and looks for the newest while
    #    the others wait: the watchdog must blame rank 0 alone.
    with joined.phases.led("restore", 0, joined.rank == 0):
        chosen = restore.choose_together(checkpoints, job.attempt, log)
    if chosen is not None:
        # A checkpoint that somebody copied here from another stage would load without an error where the shapes agree.
        check_stage(cfg, job, chosen.manifest, checkpoints.address)

    # 2. Everything that trains. Weights that a checkpoint replaces are not read: they may have gone.
    worker = build(cfg, job, joined, init=job.init if chosen is None else None)

    # 3. The checkpoint is loaded, or an older one where its bytes are bad.
    progress = Progress(step=0, bad_samples=0, ledger=Ledger.start(worker.index.digest, cfg.seed))
    manifest = None
    if chosen is not None:
        joined.phases.enter("load", 0)
        manifest = restore.load_together(worker.engine.load, checkpoints, chosen, job.attempt, log).manifest
        check_stage(cfg, job, manifest, checkpoints.address)
        # A stage killed between its last commit and its end need not save that step a second time.
        worker.saver.last_committed = manifest.step
        worker.mask.add(manifest.masked)
        progress = Progress(manifest.step, manifest.bad_samples, Ledger(manifest.ledger))

    # 4. The lines that say how the attempt starts.
    report_start(worker, progress, manifest)
    if joined.rank == 0 and joined.device.type == "cuda" and dist.get_backend() == "gloo":
        log("workers share a GPU, which NCCL refuses: they talk over gloo, through the host's memory, and are slow")
    # A slow collective is most often one over the wrong interface.
    log_network(log)
    if isinstance(worker.engine, ExactEngine):
        # Measured in every attempt, because the nodes and the links between them may be others now.
        report_exact(worker.engine, cfg, joined.telemetry, progress.step)
    return worker, progress


def join(cfg: TrainConfig, job: Job) -> Joined:
    """Collective: make this process one of the group, and check that all workers fit together.

    Raises ClusterError where they do not: in code, storage, clocks or device. Raises ConfigError if exact mode cannot
    have deterministic kernels here.
    """
    # The phases come first: from here on the driver sees where this worker is, and ends it where it hangs.
    phases = Phases(job.attempt_folder, int(os.environ["RANK"]), cfg.stall_s)
    phases.enter("join", 0)
    if cfg.exact_parts and torch.cuda.is_available():
        use_deterministic_kernels()
    device = join_group(cfg.timeout_s)
    rank = dist.get_rank()
    directory = Path(job.directory)
    storage = job.storage
    # On another node than the driver's, metrics.jsonl holds a part of the stage; the driver gathers the lines. In a
    # folder that is the driver's too, the driver has left this very task.
    is_drivers_folder = storage.is_shared
    if not storage.is_shared:
        with suppress(OSError, DataError):
            left = artifacts.read_record(directory / artifacts.TASK)["job"]
            is_drivers_folder = (left["attempt"], left["claimed"]) == (job.attempt, job.claimed)
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
        # A run in an object store leaves nothing on storage that nodes share.
        is_shared=storage.is_shared,
        device_bytes=job.device_bytes,
        log=telemetry.log,
    )
    return Joined(phases, device, rank, dist.get_world_size(), telemetry, checkpoints)


def build(cfg: TrainConfig, job: Job, joined: Joined, init: str | None) -> Worker:
    """Collective: build what this worker trains with; `init` are the weights that it starts from, if any.

    Raises ConfigError, DataError, StorageError.
    """
    joined.phases.enter("build", 0)
    optional = (job.evaluate, job.probe_train, job.probe_test)
    paths = {*job.train, *(path for path in optional if path is not None)}
    sets = {path: load_index(path) for path in paths}
    training_sets = [sets[path] for path in job.train]
    index, order = training_order(cfg, training_sets)
    # The batch does not depend on the world; how it is shared does, and the world may be another one in every attempt.
    arithmetic = batch_arithmetic(cfg, joined.world)
    model_config: ModelConfig = models.from_dict(job.model)
    labelled = [path for path in (*job.train, job.evaluate) if path is not None]
    check_model(cfg, model_config, {path: sets[path].classes for path in labelled})
    if init is not None:
        fetch_init(job.storage, init)
    model = build_model(cfg, init, model_config, joined.telemetry).to(joined.device)

    joined.phases.enter("engine", 0)
    engine = build_engine(cfg, model, arithmetic.accumulation)
    needed: Callable[[], Collection[int]] = tuple
    if cfg.evaluate_on == "spare":
        needed = partial(async_evaluation.requested, Path(job.directory))
    elif cfg.keep_best is not None:
        needed = partial(steps_of_best, Path(job.directory), cfg.keep_best, joined.checkpoints.committed_steps)
    saver = Saver(
        joined.checkpoints,
        joined.telemetry,
        joined.phases,
        keep=cfg.keep,
        keep_every=cfg.keep_every,
        max_failed_saves=cfg.max_failed_saves,
        expected_bytes=checkpoint_bytes(cfg, model_config),
        needed=needed,
    )
    # Samples of dropped shards count too: a run that does without a shard keeps its number of steps.
    steps = steps_of(cfg, sum(training_set.samples for training_set in training_sets))
    return Worker(
        cfg=cfg,
        job=job,
        rank=joined.rank,
        world=joined.world,
        device=joined.device,
        phases=joined.phases,
        telemetry=joined.telemetry,
        window=Window(),
        since_line=Window(),
        sets=sets,
        index=index,
        order=order,
        steps=steps,
        last_step=steps if job.until is None else job.until,
        mask=Mask(job.masked),
        arithmetic=arithmetic,
        model_config=model_config,
        engine=engine,
        saver=saver,
        health=Health(cfg, Path(job.directory), joined.checkpoints, joined.telemetry),
    )


def fetch_init(storage: Storage, init: str) -> None:
    """Collective: one worker of each node makes sure that it has the weights that another stage of this run handed on.

    Raises DataError where they are not what that stage wrote, StorageError.
    """
    # A path outside the run is on every node, or this node says that it is missing.
    if os.environ["LOCAL_RANK"] == "0" and Path(init).is_relative_to(storage.local):
        artifacts.fetch_weights(storage, Path(init).relative_to(storage.local).as_posix())
    dist.barrier()


def build_model(cfg: TrainConfig, init: str | None, model_config: ModelConfig, telemetry: Telemetry) -> nn.Module:
    """Return the network with random weights from the seed or those of `init`, recomputed and compiled as asked."""
    # Every worker draws the same weights from the same seed; with a generator of its own the draw does not depend on
    # what was drawn before.
    model = models.from_config(model_config, torch.Generator().manual_seed(cfg.seed))
    if init is not None:
        stored_weights, stored_config = models.load_weights(init)
        weights, report = models.transfer(stored_weights, stored_config, model_config, new_head=cfg.new_head)
        model.load_state_dict(weights, strict=False)  # transfer has accounted for every parameter
        telemetry.report(
            "transfer",
            {"step": 0, "report": str(report)},
            f"parameters of init: {len(report.kept)} kept, {len(report.resized)} resized, {len(report.new)} new, "
            f"{len(report.dropped)} dropped",
        )
    # Neither changes a shape or a name: checkpoints and weights are the same with and without them.
    # The driver has put a number of blocks in the place of `activation_gb` (jobs/stages/training.py).
    model.recomputed_blocks = cfg.checkpoint_blocks
    if cfg.thinning.image_sizes:
        model.smaller_sizes = tuple((size, size) for size in cfg.thinning.image_sizes)
    if cfg.compile and cfg.thinning.is_on:
        # Compiled anew for every number of tokens. Left to itself torch would compile the second for any number, and
        # after a resume, which sees only that one, for that one: other kernels, and other bits.
        models.compile_blocks(model, dynamic=False)
        # Behind torch's limit of 8 a block would run uncompiled, with other bits than after a resume.
        torch._dynamo.config.recompile_limit = MOST_COMPILED
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    elif cfg.compile:
        models.compile_blocks(model)
    return model


def build_engine(cfg: TrainConfig, model: nn.Module, accumulation: int) -> Engine:
    """Put the model under DeepSpeed; in exact mode its sums have a fixed order."""
    settings = engine_settings(cfg, accumulation)
    decayed = models.decayed(model)
    if cfg.exact_parts:
        return ExactEngine(model, decayed, cfg.optim, settings, cfg.polyak, parts=cfg.exact_parts)
    return Engine(model, decayed, cfg.optim, settings, cfg.polyak)


def check_stage(cfg: TrainConfig, job: Job, manifest: Manifest, folder: str) -> None:
    """Raise CheckpointError with the differences where a checkpoint belongs to another stage."""
    if manifest.key == job.key:
        return
    # The key covers the stage's inputs too, so it can differ where no key of the config does.
    changed = "; ".join(config.differences(manifest.config, config.tagged(cfg, "forbid"))) or "its inputs"
    raise CheckpointError(
        f"the newest checkpoint in {folder} is of stage key {manifest.key[:8]}, not "
        f"{job.key[:8]}: {changed}\n  move it to where it came from"
    )


def report_start(worker: Worker, progress: Progress, manifest: Manifest | None) -> None:
    """Log in one line how training starts and what is therefore ignored, and what the cache needs; rank 0 only."""
    if worker.rank != 0:
        return
    cfg = worker.cfg
    job = worker.job
    arithmetic = worker.arithmetic
    # The order is that of the list at the top of this file. What loses is named, so that its effect is not looked for.
    if manifest is not None:
        ignored = ""
        if job.init:
            ignored = f", init {job.init} ignored"
        text = (
            f"resumed from step {manifest.step} (attempt {manifest.attempt}, {manifest.world} workers, "
            f"ZeRO {manifest.zero}, ledger {manifest.ledger[:12]}){ignored}"
        )
        if manifest.step == cfg.begin:
            text = f"a branch: goes on from step {manifest.step} of {job.init} with its optimizer and order of samples"
        if manifest.masked:
            text += f", {counted(sum(stop - first for *_, first, stop in manifest.masked), 'sample')} masked"
    elif job.init:
        text = f"weights from {job.init}, optimizer fresh, step 0"
    else:
        text = f"random weights from seed {cfg.seed}, step 0"
    precision: str = cfg.precision
    if precision == "bf16":
        precision = "bf16, gradients summed in fp32"
        # The user's own DeepSpeed file may ask for it.
        if worker.engine.sums_in == "bf16":
            precision += " over micro-batches, in bf16 over workers"
    worker.telemetry.log(
        f"attempt {job.attempt}: {text}; "
        f"{worker.world} workers on {device_name(worker.device)} "
        f"× micro_batch {arithmetic.micro_batch} × accumulation {arithmetic.accumulation} = "
        f"batch {arithmetic.batch_size}, {worker.steps} steps, ZeRO {cfg.zero} {precision}; "
        f"{bits_line(worker, manifest)}"
    )
    record = {
        "step": progress.step,
        "text": text,
        "world": worker.world,
        # For `trial`, whose driver may run on another machine.
        "hardware": device_name(worker.device) if worker.device.type == "cuda" else processor(),
        # For `report`, which names what two runs, or two attempts, do not have in common.
        "code": job.code,
        "versions": package_versions(),
        "threads": torch.get_num_threads(),
        # For `accounting`: an attempt's start-up counts from the driver's claim, not from its first record.
        "claimed": job.claimed,
        "began": job.began,
        # For `jobs replay`, which rebuilds a step with the shards that its attempt had.
        "drop": cfg.data.drop,
    }
    worker.telemetry.report("start", record)
    if worker.index.remote:
        # A node's workers have neighbouring ranks, so their slots are one range; rank 0's node is the example.
        last_local_rank = int(os.environ["LOCAL_WORLD_SIZE"]) - 1
        slots = range(arithmetic.slots(last_local_rank).stop)
        needed = cache_line(worker.index, worker.order, slots, progress.step, cfg.data)
        worker.telemetry.log(f"this node needs {needed}")


def bits_line(worker: Worker, manifest: Manifest | None) -> str:
    """Return whether a resume of this attempt repeats its bits, and why not if it does not."""
    cfg = worker.cfg
    model_config = worker.model_config
    now = Conditions(
        is_gpu=worker.device.type == "cuda",
        world=worker.world,
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


def report_exact(engine: ExactEngine, cfg: TrainConfig, telemetry: Telemetry, step: int) -> None:
    """Collective: measure and report the price of the exact sum.

    Reports too what has changed since the attempt before, of the conditions that the bits depend on.
    """
    tree_s, plain_s = engine.price()
    if dist.get_rank() != 0:
        return
    world = dist.get_world_size()
    # Of every parameter a worker holds at most a micro-batch's gradient in the precision of computing and, in fp32, its
    # part's sum, one sum for each level of the worker's subtree, and the optimizer's share.
    levels = (cfg.exact_parts // world).bit_length() - 1
    of_a_parameter = BYTES_FP32 * (1 + levels + 1 / world)
    of_a_parameter += BYTES_BF16 if cfg.precision == "bf16" else BYTES_FP32
    mb = sum(engine.sizes.values()) * of_a_parameter / 1e6
    line = (
        f"exact in {cfg.exact_parts} parts: every step waits {tree_s:.3f}s for the sum over {world} workers "
        f"(one all-reduce: {plain_s:.3f}s); up to {mb:,.1f} MB of gradients a worker"
    )
    # What the last bits of a gradient depend on beside the config: with 2 threads instead of 1, 20,218,211 of the
    # 21,669,514 gradient elements of S/16 differed (docs/exact.md).
    computes_on = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        computes_on = torch.cuda.get_device_name()
    now = {"threads": torch.get_num_threads(), "torch": torch.__version__, "processor": computes_on}
    # Read before this attempt's own record is written.
    earlier = read_metrics(telemetry.directory, "exact")
    telemetry.report("exact", {"step": step, "sum_s": tree_s, "all_reduce_s": plain_s, **now}, line)
    if not earlier:
        return
    before = {key: earlier[-1][key] for key in now}
    changed = config.differences(before, now)
    if changed:
        telemetry.log(f"the bits may differ from here on: {'; '.join(changed)}")
