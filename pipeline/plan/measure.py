"""What one worker of `jobs calibrate` does: it trains nothing, and times what a step of training is made of.

1. As many workers of each node as it has cores for run small models' forward and backward passes, and take the time of
   every operator that torch calls; then one worker of a node alone runs the last again, to see what company costs.
2. All workers put four models under the engine: what it adds to their passes, at each ZeRO stage asked for.
3. The first 2, 4, 8 … workers sum, scatter and gather numbers.
4. The first worker of each node writes and reads a file.

In:  {"works": [Work.plain(), …], "engines": [{"zero": 2, "precision": "bf16", …}], "folder": "/runs/…", …}
Out: of rank 0, what all have found out, as JSON: the parts of a pipeline.plan.calibration.Calibration
"""

import dataclasses
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from data.files import write_durably
from models.vit import ViTConfig
from pipeline.engine.engine import Engine
from pipeline.engine.exact import ExactEngine
from pipeline.engine.settings import deepspeed_config
from pipeline.optimization.optimizer import OptimConfig
from pipeline.plan.operations import Work, built, cuda_clock, inputs, loss_of, timed
from pipeline.preflight.identity import device_name
from pipeline.preflight.machine import cores, processor
from pipeline.process_group import join_group

ROUNDS = 3  # that a work is timed
LONG_PASSES_S = 0.3  # of a work whose operators are timed once: they take so long that little disturbs them
# Width, blocks, rounds of the models that are put under the engine, one patch an image each. The first two have hardly
# any elements and differ in tensors: engine_cost.carried_over takes the two smallest for what a tensor costs. The
# third's elements lie in the processor's cache, at least in part; those of the last, 39 million, do not, and neither do
# those of a real model.
ENGINE_MODELS = ((64, 1, 4), (64, 12, 4), (384, 4, 3), (1024, 3, 3))
COLLECTIVE_ROUNDS = 5
COLLECTIVE_BYTES = (64, 2**16, 2**20, 2**24)
LONG_COLLECTIVE_S = 0.5  # longer ones are not repeated as often, and larger ones not tried
FILE_BYTES = 2**25
COPIED_BYTES = 2**26
PROBE = 512  # side of the product that tells how noisy the machine is
PROBE_WARM_UP = 10  # products, in a new process 15 % slower than later ones: no noise
PROBE_ROUNDS = 5  # that count


def measure(task: Mapping[str, Any]) -> dict[str, Any]:
    """Collective: measure what the task asks for; rank 0 returns what all have found out."""
    device = join_group(task["timeout_s"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world = dist.get_world_size()
    clock = clock_of(device)
    report: dict[str, Any] = {
        "node": socket.gethostname(),
        "hardware": list(hardware(device)),
        "local_world": int(os.environ["LOCAL_WORLD_SIZE"]),
        "threads": torch.get_num_threads(),
    }
    probes = probe(clock, device)
    works = [Work.of_plain(plain) for plain in task["works"]]
    at_once = min(report["local_world"], max(cores() // torch.get_num_threads(), 1))
    if device.type == "cuda":
        at_once = report["local_world"]  # each has a GPU of its own
    dist.barrier()
    if local_rank < at_once:
        report["compute"] = compute_times(works, device, clock)
    dist.barrier()
    probes += probe(clock, device)
    report["alone"] = {}
    if at_once > 1 and local_rank == 0:
        report["alone"] = compute_times(probe_works(works), device, clock)
    dist.barrier()
    report["at_once"] = at_once
    report["copy_bytes_per_s"] = copy_rate()
    dist.barrier()
    report["engines"] = all_engine_times(task["engines"], task["engines_s"], device)
    report["collectives"] = collective_times(device) if task["collectives"] else {}
    probes += probe(clock, device)
    dist.barrier()
    if local_rank == 0 and task["folder"]:
        report["storage"] = storage_rates(Path(task["folder"]))
    report["probes"] = probes
    reports: list[Any] = [None] * world
    dist.all_gather_object(reports, report)
    dist.destroy_process_group()
    return {"workers": reports, "world": world}


# ------------------------------------------------------------------------ the machine


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock that operators are timed with.

    A worker that computes with one thread is timed by that thread's processor time, so that a neighbour who takes the
    core away does not count.
    """
    if device.type == "cuda":
        return cuda_clock
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def hardware(device: torch.device) -> tuple[str, int, str]:
    """Return (processor, cores that this process may use, "cpu" or the GPU's name)."""
    return processor(), cores(), device_name(device)


def probe(clock: Callable[[], float], device: torch.device) -> list[float]:
    """Time one product a few times; how far its times lie apart tells how quiet the machine is."""
    side = torch.randn(PROBE, PROBE, device=device)
    product = torch.empty_like(side)  # made once: new pages for each product would be malloc's time
    times = []
    for _ in range(PROBE_WARM_UP + PROBE_ROUNDS):
        began = clock()
        torch.mm(side, side, out=product)
        times.append(clock() - began)
    return times[PROBE_WARM_UP:]


def copy_rate() -> float:
    """Return the bytes a second of a copy in memory, as a save makes one."""
    source = torch.zeros(COPIED_BYTES // 4)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        source.clone()
        seconds.append(time.perf_counter() - began)
    return COPIED_BYTES / statistics.median(seconds)


# ------------------------------------------------------------------------ operators


def compute_times(works: Sequence[Work], device: torch.device, clock: Callable[[], float]) -> dict[str, Any]:
    """Return, by precision, the median seconds of every operator, what a call costs beside, and the passes' seconds."""
    by_precision: dict[str, dict[str, Any]] = {}
    # The smallest tells best what a call costs beside its operator, the last what company costs.
    smallest = {precision: min(group, key=flops_of) for precision, group in works_by_precision(works).items()}
    last = set(probe_works(works))
    for work in works:
        part = by_precision.setdefault(work.precision, {"operations": {}})
        is_smallest = work == smallest[work.precision]
        timing = timed(work, device, ROUNDS, clock, plainly=is_smallest or work in last, long_s=LONG_PASSES_S)
        inside_s = 0.0
        for operation, seconds in timing.seconds.items():
            part["operations"].setdefault(operation, []).extend(seconds)
            inside_s += statistics.median(seconds) * len(seconds) / timing.rounds
        if is_smallest:
            part["call_s"] = (statistics.median(timing.without_onlooker_s) - inside_s) / timing.calls
        if work in last:
            part["passes_s"] = statistics.median(timing.without_onlooker_s)
    report: dict[str, Any] = {}
    for precision, part in by_precision.items():
        rows = []
        for operation, seconds in part["operations"].items():
            rows.append([*operation, statistics.median(seconds)])
        report[precision] = {"operations": rows, "call_s": part["call_s"], "passes_s": part["passes_s"]}
    return report


def works_by_precision(works: Sequence[Work]) -> dict[str, list[Work]]:
    """Return the works of each precision, in their order."""
    groups: dict[str, list[Work]] = {}
    for work in works:
        groups.setdefault(work.precision, []).append(work)
    return groups


def flops_of(work: Work) -> int:
    """Return the operations of a work's passes."""
    return models.training_flops(work.model, work.micro_batch)


def probe_works(works: Sequence[Work]) -> list[Work]:
    """Return the last work of each precision."""
    return [group[-1] for group in works_by_precision(works).values()]


# ------------------------------------------------------------------------ the engine


def all_engine_times(
    engines: Sequence[Mapping[str, Any]], most_s: float | None, device: torch.device
) -> list[dict[str, Any]]:
    """Collective: return the EngineTimes of these engines, in their order, as JSON.

    After `most_s` no other is begun, but the first is always measured.
    """
    began = time.monotonic()
    passes: dict[str, list[tuple[float, float]]] = {}
    times: list[dict[str, Any]] = []
    for asked in engines:
        # Rank 0's clock decides for all.
        elapsed_s = torch.tensor(time.monotonic() - began, device=device)
        dist.broadcast(elapsed_s, 0)
        if times and most_s is not None and float(elapsed_s) > most_s:
            break
        precision = asked["precision"]
        if precision not in passes:
            passes[precision] = passes_without_engine(precision, device)
        times += engine_times(asked, passes[precision], device)
    return times


def engine_model(width: int, depth: int) -> ViTConfig:
    """Return a model of one patch an image, whose own passes take little beside what the engine adds."""
    config = models.config_of("S/16", 16, 10, width=width, heads=width // 64, mlp=4 * width, depth=depth)
    assert isinstance(config, ViTConfig)
    return config


def passes_without_engine(precision: str, device: torch.device) -> list[tuple[float, float]]:
    """Collective: return what the passes of each model take by themselves: they are the model's, not the engine's."""
    times = []
    for width, depth, rounds in ENGINE_MODELS:
        work = Work(engine_model(width, depth), 1, precision)
        times.append(measured_plainly(built(work, device), work, rounds, device))
    return times


def engine_times(
    asked: Mapping[str, Any], passes: Sequence[tuple[float, float]], device: torch.device
) -> list[dict[str, Any]]:
    """Collective: return an EngineTime of each model, as JSON; from the times of the slowest workers."""
    times = []
    for (width, depth, rounds), plain in zip(ENGINE_MODELS, passes, strict=True):
        config = engine_model(width, depth)
        work = Work(config, 1, asked["precision"])
        # A step of one micro-batch takes more than the last micro-batch of two, which finds the gradients' memory made.
        of_one_batch = step_times(asked, work, 1, rounds, device)
        of_two_batches = step_times(asked, work, 2, rounds, device)
        # The slowest worker's of each before they are subtracted: a step's end is one for all, and whatever a fast
        # worker waits there is not the engine's.
        times_s = torch.tensor([of_one_batch, of_two_batches, plain], dtype=torch.float64, device=device)
        dist.all_reduce(times_s, dist.ReduceOp.MAX)
        one_s, two_s, plain_s = times_s
        step_s, step_cpu_s = (one_s - plain_s).clamp(min=0).tolist()
        micro_s, micro_cpu_s = (two_s - one_s - plain_s).clamp(min=0).tolist()
        size = models.size_of(config)
        times.append(
            {
                "world": dist.get_world_size(),
                "zero": asked["zero"],
                "precision": asked["precision"],
                "optimizer": asked["optimizer"],
                "exact": asked["exact"],
                "tensors": size.tensors,
                "elements": size.elements,
                "micro_s": micro_s,
                "step_s": step_s,
                "micro_cpu_s": micro_cpu_s,
                "step_cpu_s": step_cpu_s,
            }
        )
    return times


def step_times(
    asked: Mapping[str, Any], work: Work, accumulation: int, rounds: int, device: torch.device
) -> tuple[float, float]:
    """Collective: return the median (seconds, processor seconds) of an optimizer step of so many micro-batches."""
    torch.manual_seed(0)
    model = built(dataclasses.replace(work, precision="fp32"), device)
    engine = engine_of(asked, model, accumulation)
    images, labels = inputs(work, device)

    def run() -> None:
        for _ in range(accumulation):
            engine.backward(loss_of(work, engine.forward, images, labels))
            engine.end_micro_batch(1e-4)

    times = [clocked(run, device) for _ in range(rounds)]
    # Where a gradient is not finite the optimizer takes no step, which is most of what an engine costs.
    updates = engine.updates
    engine.close()
    if updates != rounds:
        raise RuntimeError(
            f"{rounds} steps of ZeRO {asked['zero']} in {asked['precision']} were timed, and only {updates} were "
            "taken; the gradient of the others was not finite, and what they take says nothing"
        )
    return medians(times)


def engine_of(asked: Mapping[str, Any], model: nn.Module, accumulation: int) -> Engine:
    """Put a model under the engine as a stage does."""
    settings = deepspeed_config(
        zero=asked["zero"],
        precision=asked["precision"],
        micro_batch=1,
        accumulation=accumulation,
        clip=1.0,
        user_file=None,
    )
    optim = OptimConfig(name=asked["optimizer"])
    decayed = models.decayed(model)
    if asked["exact"]:
        return ExactEngine(model, decayed, optim, settings, parts=accumulation * dist.get_world_size())
    return Engine(model, decayed, optim, settings)


def measured_plainly(model: nn.Module, work: Work, rounds: int, device: torch.device) -> tuple[float, float]:
    """Collective: return the median (seconds, processor seconds) of a forward and backward pass without an engine."""
    images, labels = inputs(work, device)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        loss_of(work, model, images, labels).backward()  # type: ignore[no-untyped-call]

    return medians([clocked(run, device) for _ in range(rounds)])


def clocked(run: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Collective: return (seconds, processor seconds of this process) of a call, from when all have come to it."""
    dist.barrier()
    began = time.perf_counter()
    cpu_began = time.process_time()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, time.process_time() - cpu_began


def medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the medians of both clocks; the first of the times made what is kept, and does not count."""
    counted = times[1:]
    return statistics.median(wall for wall, _ in counted), statistics.median(cpu for _, cpu in counted)


# ------------------------------------------------------------------------ links and storage


def collective_times(device: torch.device) -> dict[str, dict[str, list[list[float]]]]:
    """Collective: return, by number of workers and name, the median (bytes, seconds) of the first 2, 4, 8 … workers."""
    world = dist.get_world_size()
    rank = dist.get_rank()
    sizes = []
    members = 2
    while members < world:
        sizes.append(members)
        members *= 2
    if world > 1:
        sizes.append(world)
    report: dict[str, dict[str, list[list[float]]]] = {}
    for members in sizes:
        group = dist.new_group(list(range(members)))
        dist.barrier()
        if rank < members:
            report[str(members)] = {name: timed_collective(name, members, group, device) for name in COLLECTIVES}
        dist.barrier()
    return report


def all_reduce(flat: Tensor, members: int, group: Any) -> None:
    """Sum over the workers, on all of them."""
    dist.all_reduce(flat, group=group)


def reduce_scatter(flat: Tensor, members: int, group: Any) -> None:
    """Sum over the workers, each keeping its part."""
    dist.reduce_scatter_tensor(torch.empty(len(flat) // members, device=flat.device), flat, group=group)


def all_gather(flat: Tensor, members: int, group: Any) -> None:
    """Give every worker the parts of all."""
    dist.all_gather_into_tensor(flat, torch.empty(len(flat) // members, device=flat.device), group=group)


COLLECTIVES = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}


def timed_collective(name: str, members: int, group: Any, device: torch.device) -> list[list[float]]:
    """Collective in the group: return the median seconds of each size, [] of what the backend cannot do."""
    points: list[list[float]] = []
    for size in COLLECTIVE_BYTES:
        flat = torch.zeros(max(size // 4 // members, 1) * members, device=device)
        seconds: list[float] = []
        for _ in range(COLLECTIVE_ROUNDS + 1):
            dist.barrier(group=group)
            began = time.perf_counter()
            try:
                COLLECTIVES[name](flat, members, group)
            except (RuntimeError, NotImplementedError):
                return []
            float(flat[0])  # a GPU works on after the call has returned
            seconds.append(time.perf_counter() - began)
        points.append([float(4 * len(flat)), statistics.median(seconds[1:])])
        slowest = torch.tensor(points[-1][1], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        if float(slowest) > LONG_COLLECTIVE_S:
            break
    return points


def storage_rates(folder: Path) -> list[float]:
    """Return the bytes a second that a file is written with, fsync included, and read with; the file goes again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".calibrate-{socket.gethostname()}-{os.getpid()}"
    content = os.urandom(FILE_BYTES)
    write_s = []
    read_s = []
    try:
        for _ in range(3):
            began = time.perf_counter()
            write_durably(path, content)
            write_s.append(time.perf_counter() - began)
            forget(path)
            began = time.perf_counter()
            path.read_bytes()
            read_s.append(time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)
    return [FILE_BYTES / statistics.median(write_s), FILE_BYTES / statistics.median(read_s)]


def forget(path: Path) -> None:
    """Ask the kernel to read the file from the disk next time."""
    if hasattr(os, "posix_fadvise"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
