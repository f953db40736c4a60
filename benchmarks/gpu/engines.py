"""Time one step of our engine and of stock DeepSpeed at ZeRO 1 to 3, on all GPUs: speed, memory, host CPU, idle share.

Engines run one after the other, from the same weights. Ours and stock DeepSpeed use different worker groups: at ZeRO 3
stock DeepSpeed replaces torch.nn.functional.linear in its whole process, which would slow down later engines.
"""

import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import models
from benchmarks.gpu.kernels import price_of_determinism
from benchmarks.gpu.parts import Context, Row, append_row
from benchmarks.gpu.steps import share_of_peak
from jobs.cluster.worker_group import run_worker_group
from jobs.cluster_config import ClusterConfig
from pipeline.checkpoints.saver import host_memory
from pipeline.engine.deepspeed import import_deepspeed
from pipeline.engine.determinism import CUBLAS_VALUES, CUBLAS_VARIABLE
from pipeline.engine.engine import Engine
from pipeline.engine.settings import deepspeed_config
from pipeline.monitoring.telemetry import memory_gb
from pipeline.optimization import OptimConfig, build_optimizer
from pipeline.process_group import join_group

WARM_UP = 3  # warm-up steps, for caches, allocators and the trace of ZeRO 3
PROFILED = 3  # profiled steps
PRICED_ZERO = 2  # ZeRO stage at which the cost of deterministic kernels is measured
# (ZeRO stage, whether blocks are compiled). Stage 3 comes last, because DeepSpeed never frees some of its memory.
OURS = [(2, True), (2, False), (1, False), (3, False), (3, True)]
STOCK = [(2, False), (1, False), (3, False)]


@dataclass(frozen=True)
class TimedEngine:
    """An engine to be timed, ours or DeepSpeed's."""

    step: Callable[[torch.Tensor, torch.Tensor], None]  # trains on (images, labels)
    state_bytes: int  # bytes that a save copies; 0: unknown
    close: Callable[[], None]  # frees model and state, which DeepSpeed's hooks keep alive


def time_ours(context: Context, model: str) -> None:
    """Report a row for each setting of our engine."""
    time_engine(context, model, "ours", OURS)


def time_stock(context: Context, model: str) -> None:
    """Report a row for each ZeRO stage of stock DeepSpeed."""
    time_engine(context, model, "stock DeepSpeed", STOCK)


def time_engine(context: Context, model: str, code: str, settings: list[tuple[int, bool]]) -> None:
    """Run a worker group that times one engine's settings; its rank 0 reports the rows."""
    workers = torch.cuda.device_count() if context.gpus else 1
    cluster = ClusterConfig(
        workers=workers,
        backend="processes",
        gpus_per_worker=context.gpus,
        cpus_per_worker=8,
        start_timeout_s=100,
        environment={CUBLAS_VARIABLE: CUBLAS_VALUES[0]},  # must be set before CUDA starts, for deterministic kernels
    )
    task = {
        "model": model,
        "images": context.size.models[model],
        "code": code,
        "settings": settings,
        "steps": context.size.rounds,
        "rows": str(context.rows),
    }
    folder = Path(tempfile.mkdtemp(prefix="engines-", dir=context.work))
    run_worker_group(time_settings, task, cluster=cluster, name="group", directory=folder)


def time_settings(task: dict[str, Any]) -> None:
    """Run on every worker: build an engine for each setting, time its steps, and release its memory."""
    device = join_group(600.0)
    world = torch.distributed.get_world_size()
    config = models.config_of(task["model"])
    source = models.from_config(config, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    images = torch.randn(task["images"], 3, *config.image_size, generator=generator).to(device, torch.bfloat16)
    labels = torch.randint(config.classes, (task["images"],), generator=generator).to(device)
    before = allocated_bytes(device)
    for zero, is_compiled in task["settings"]:
        row: Row = {
            "model": task["model"],
            "images": world * task["images"],
            "workers": world,
            "code": task["code"],
            "zero": zero,
            "compiled": is_compiled,
            "left_over_gib": (allocated_bytes(device) - before) / 2**30,  # memory not released by earlier settings
        }
        try:
            time_setting(row, task, copy.deepcopy(source).to(device), images, labels)
        except Exception as error:  # for example out of memory: measure the other settings anyway
            row["note"] = f"{type(error).__name__}: {error}"[:300]
        if torch.distributed.get_rank() == 0:
            append_row(Path(task["rows"]), row)
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()


def time_setting(
    row: Row, task: dict[str, Any], model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> None:
    """Fill a row: seconds per step, host CPU seconds, memory, share of the peak and, on a GPU, the idle share."""
    device = images.device
    if row["compiled"]:
        models.compile_blocks(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    build = {"ours": our_engine, "stock DeepSpeed": stock_engine}[task["code"]]
    began = time.perf_counter()
    engine = build(model, task["images"], row["zero"])
    row["build_s"] = time.perf_counter() - began
    try:
        time_steps(row, engine, task["steps"], images, labels)
    finally:
        engine.close()


def time_steps(row: Row, engine: TimedEngine, steps: int, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Time the steps of an engine."""
    device = images.device
    seconds = []
    cpu_seconds = []
    for _ in range(WARM_UP + steps):
        synchronize(device)
        began = time.perf_counter()
        cpu_began = time.process_time()
        engine.step(images, labels)
        cpu_seconds.append(time.process_time() - cpu_began)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    row["first_step_s"] = seconds[0]
    row["step_s"] = statistics.median(seconds[WARM_UP:])
    row["host_cpu_s"] = statistics.median(cpu_seconds[WARM_UP:])
    row["memory_gib"] = memory_gb() - row["left_over_gib"]
    flops = models.training_flops(models.config_of(row["model"]), len(images))
    row["of_peak"] = share_of_peak(flops, row["step_s"], device.type)

    if engine.state_bytes:
        # Allocate it like a save; torch keeps the memory, so the process allocates the pages only once.
        began = time.perf_counter()
        snapshot = host_memory(engine.state_bytes)
        row["snapshot_s"] = time.perf_counter() - began
        row["snapshot_gib"] = engine.state_bytes / 2**30
        row["is_pinned"] = snapshot.is_pinned()
    if device.type == "cuda":
        row |= idle_share(lambda: engine.step(images, labels))
    if row["code"] == "ours" and row["zero"] == PRICED_ZERO and not row["compiled"]:
        default_s, deterministic_s = price_of_determinism(lambda: engine.step(images, labels), rounds=steps)
        row["deterministic"] = deterministic_s / default_s


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def our_engine(model: torch.nn.Module, images: int, zero: int) -> TimedEngine:
    """Build our engine with the settings of training."""
    settings = deepspeed_config(
        zero=zero, precision="bf16", micro_batch=images, accumulation=1, clip=1.0, user_file=None
    )
    engine = Engine(model, models.decayed_parameters(model), OptimConfig(), settings)
    state_bytes = 0
    for fragment in engine.fragments():
        for view in fragment.tensors.values():
            state_bytes += view.nbytes

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        engine.backward(F.cross_entropy(engine.forward(images).float(), labels))
        engine.end_micro_batch(1e-4)

    return TimedEngine(step, state_bytes, engine.close)


def stock_engine(model: torch.nn.Module, images: int, zero: int) -> TimedEngine:
    """Build DeepSpeed's engine as in its documentation, with our optimizer, gradient clipping and precision."""
    settings = {
        "train_micro_batch_size_per_gpu": images,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    optimizer = build_optimizer(model, models.decayed_parameters(model), OptimConfig())
    engine, *_ = import_deepspeed().initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        engine.backward(F.cross_entropy(engine(images).float(), labels))
        engine.step()

    return TimedEngine(step, 0, engine.destroy)


def idle_share(step: Callable[[], None]) -> Row:
    """Profile some steps; return the share of time without a running kernel, kernels per step, and slowest kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    spans = []
    microseconds_of: dict[str, float] = {}
    for event in profiler.events():
        # Annotations, such as that of the optimizer's step, cover the gaps between kernels.
        is_kernel = not getattr(event, "is_user_annotation", False)
        if event.device_type == torch.autograd.DeviceType.CUDA and is_kernel:
            spans.append((event.time_range.start, event.time_range.end))
            name = event.name[:60]
            microseconds_of[name] = microseconds_of.get(name, 0.0) + event.time_range.elapsed_us()
    longest = sorted(microseconds_of.items(), key=lambda item: -item[1])[:12]
    return {"idle": gaps(spans), "kernels": len(spans) // PROFILED, "longest_kernels_us": longest}


def gaps(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end that no span covers."""
    if not spans:
        return 1.0
    spans = sorted(spans)
    first = spans[0][0]
    reached = first
    busy = 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - first)
