"""Provide memory traces of training steps: run the tracer in a separate process, and cache its results.

In:  StepToTrace(model={…}, config={…}, world=8, accumulation=2, recomputed=0, is_gpu=True)
Out: MemoryTrace, which gives the peak device memory for any micro-batch size

The cache key is a digest of everything that affects a trace: the step (the only input of the tracer), the versions of
torch and DeepSpeed, and the sources in `models/` and `pipeline/`, which include the tracer. A cached trace ends with a
digest (data/seal.py); if a cached trace is damaged, the step is traced again.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import models
from data.errors import PatchlineError, StorageError
from data.files import import_path, open_regular, state_folder, take_lock
from data.seal import read_entry, write_entry
from models import ModelConfig
from pipeline.config import digest
from pipeline.training_config import TrainConfig
from pipeline.values import counted

ROOT = Path(__file__).parents[3]
SOURCES = ("models", "pipeline")  # folders with the code that determines the allocations of a step
LIBRARIES = ("torch", "deepspeed")
TRACER = "pipeline.extras.plan.tracer"
MAX_MICRO_BATCHES = 2  # traced per step: a third one accumulates into the same gradients as the second
# For these fields, only zero or nonzero affects memory: the runs of a sweep over their values share a trace.
SWITCHES = ("label_smoothing", "mixup", "polyak")
SWITCHES_OF_MODEL = ("dropout", "drop_path")
FIRST_VALUES = ("head_bias", "position_std")  # model fields that only affect the initial values of weights
ON = 0.5  # replaces every nonzero value of a switch
MAX_KEPT = 1000  # cached traces of about 1 kB each; any change of the sources invalidates the older ones
MAX_HOLDER_CHARACTERS = 300  # read from the lock file
LONGEST_REASON = 300  # characters quoted from the output of a failed tracer


class Kind(enum.IntEnum):
    """The purpose of a memory allocation."""

    STATES = 0  # weights, master weights, moments, averages: everything that exists as long as the engine
    ACTIVATIONS = 1  # results of the forward pass, or of a recomputed block in the backward pass
    GRADIENTS = 2  # gradients, their buckets and sums, and temporary tensors of the optimizer
    GATHERED = 3  # weights that ZeRO 3 has gathered from other workers
    IMAGES = 4  # number of images in the micro-batch


class TraceFailed(PatchlineError):
    """A step cannot be traced, so its memory need is unknown."""


@dataclass(frozen=True)
class StepToTrace:
    """Everything that affects the memory of a training step, except for the micro-batch size."""

    model: dict[str, Any]
    config: dict[str, Any]  # the fields of a TrainConfig that affect memory
    world: int
    accumulation: int
    recomputed: int  # number of blocks with activation checkpointing
    is_gpu: bool
    file: str = ""  # digest of the user's DeepSpeed config file

    def described(self) -> str:
        """Describe the step in messages: "a step of vit at 384 px, bf16, ZeRO 2, 12 recomputed blocks"."""
        size = "×".join(map(str, dict.fromkeys(self.model["image_size"])))
        text = f"a step of {self.model['family']} at {size} px, {self.config['precision']}, ZeRO {self.config['zero']}"
        if self.recomputed:
            text += f", {counted(self.recomputed, 'recomputed block')}"
        return text


@dataclass(frozen=True)
class Moment:
    """Allocated bytes of each `Kind` at one moment of a step: a fixed part, and a part per image in the micro-batch."""

    phase: str
    fixed: tuple[float, ...]
    per_image: tuple[float, ...]

    def parts(self, micro_batch: int) -> list[int]:
        """Return the allocated bytes of each kind for a micro-batch size."""
        return [round(a + micro_batch * b) for a, b in zip(self.fixed, self.per_image, strict=True)]


@dataclass(frozen=True)
class MemoryTrace:
    """Memory peaks of a step for all micro-batch sizes: of all kinds of memory in total, and of activations only."""

    start: int  # peak in bytes, from the engine's start to the end of a first step with 2 images
    moments: tuple[Moment, ...]
    activations: tuple[Moment, ...]

    def peak(self, micro_batch: int) -> Moment:
        """Return the moment at which total memory, summed over all kinds of memory, peaks for a micro-batch size."""
        return max(self.moments, key=lambda moment: sum(moment.parts(micro_batch)))

    def peak_activations(self, micro_batch: int) -> int:
        """Return the peak activation memory in bytes for a micro-batch size."""
        return max(moment.parts(micro_batch)[Kind.ACTIVATIONS] for moment in self.activations)


def step_to_trace(
    cfg: TrainConfig, model: ModelConfig, world: int, accumulation: int, recomputed: int, *, is_gpu: bool
) -> StepToTrace:
    """Describe the training step of a stage for the tracer. Raises TraceFailed for a compiled step."""
    if cfg.compile:
        raise TraceFailed(
            "steps with compile: true cannot be traced, because compiled kernels save different activations; to "
            "estimate "
            "the memory of the step without compilation, set compile=false"
        )
    micro_batches = min(accumulation, MAX_MICRO_BATCHES)
    if cfg.exact_parts:
        # The gradient sums of all parts of a worker exist at the same time. Within a part, a third micro-batch needs no
        # additional memory.
        parts_here = cfg.exact_parts // world
        micro_batches = parts_here * min(accumulation // parts_here, MAX_MICRO_BATCHES)
    file = ""
    if cfg.deepspeed is not None:
        file = hashlib.sha256(Path(cfg.deepspeed).read_bytes()).hexdigest()
    decay = cfg.optim.weight_decay
    optim = {"name": cfg.optim.name, "clip": ON * (cfg.optim.clip > 0), "weight_decay": ON * (decay > 0)}
    of_head = cfg.optim.head_weight_decay
    # Parameters are grouped by weight decay: a head with a different decay is a separate group.
    if of_head is not None and of_head != decay:
        optim["head_weight_decay"] = ON / 2 * (of_head > 0)
    values: dict[str, Any] = {
        "data": {"train": "unread", "max_labels": cfg.data.max_labels},
        "optim": optim,
        "steps": 1,
        # These values only need to pass the checks of the config and of DeepSpeed; mixup needs pairs of images.
        "micro_batch": 2,
        "batch_size": 2 * world * micro_batches,
    }
    for name in ("objective", "loss", "exact_parts", "precision", "zero"):
        values[name] = getattr(cfg, name)
    for name in SWITCHES:
        values[name] = ON * (getattr(cfg, name) > 0)
    model_values = models.to_dict(model)
    for name in SWITCHES_OF_MODEL:
        if model_values.get(name):
            model_values[name] = ON
    for name in FIRST_VALUES:
        model_values.pop(name, None)
    if cfg.deepspeed is not None:
        values["deepspeed"] = str(Path(cfg.deepspeed).absolute())
    return StepToTrace(model_values, values, world, micro_batches, recomputed, is_gpu, file)


def silent(text: str) -> None:
    """Report nothing."""


def trace_of(step: StepToTrace, report: Callable[[str], None] = silent) -> MemoryTrace:
    """Return the trace of a step, from the cache or from the tracer. Raises TraceFailed if the tracer fails.

    `report` receives what the caller waits for: the tracer, or another process that traces a step.
    """
    trace = cached_trace(step)
    if trace is not None:
        return trace
    with ExitStack() as around:
        # The workers of a node may request the same trace at the same time: one runs the tracer, and the others wait
        # and use its result. If the cache folder is read-only or does not support locks, each worker runs the tracer.
        with suppress(OSError, StorageError):
            traces_folder().mkdir(parents=True, exist_ok=True)
            around.enter_context(only_tracer(traces_folder() / "lock", step, report))
        trace = cached_trace(step)
        if trace is not None:
            return trace
        report(f"estimating the memory of {step.described()} (once per config) …")
        answer = run_tracer(step)
        trace = trace_in(answer)
        if trace is None:
            raise TraceFailed(
                f"could not trace the step, because the tracer printed unexpected output: {answer[:LONGEST_REASON]}"
            )

        # Cache the trace, and delete the least recently used ones.
        try:
            write_entry(path_of(step), answer.encode())
            by_use = sorted(traces_folder().glob("*.trace"), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in by_use[MAX_KEPT:]:
                path.unlink(missing_ok=True)
        except (OSError, StorageError) as error:
            message = "%s: cannot cache memory traces, so each plan has to trace its steps again: %s"
            logging.getLogger(__name__).warning(message, traces_folder(), error)
    return trace


@contextmanager
def only_tracer(path: Path, step: StepToTrace, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of the process that traces a step; while another process holds it, report what it traces."""
    with open(path, "a+", opener=open_regular) as file:
        if not take_lock(file.fileno(), path, wait=False):
            file.seek(0)
            # The file is empty for a moment after the other process has taken the lock.
            holder = file.read(MAX_HOLDER_CHARACTERS) or "another process, which estimates the memory of a step"
            report(f"waiting for {holder} …")
            take_lock(file.fileno(), path, wait=True)
        file.truncate(0)
        file.write(f"process {os.getpid()}, which estimates the memory of {step.described()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def run_tracer(step: StepToTrace) -> str:
    """Trace a step in a separate process, and return its output. Raises TraceFailed if the process fails."""
    values = dataclasses.asdict(step)
    del values["file"]  # used only in the cache key, because the tracer reads the file itself
    question = json.dumps(values)
    answer = TRACERS[0].answer(question) if TRACERS else ""
    if not answer:
        # Start a process for this step, and keep it for the next ones: importing torch and DeepSpeed takes seconds.
        for ended in TRACERS:
            ended.close()
        TRACERS[:] = [Tracer()]
        answer = TRACERS[0].answer(question)
    if not answer.strip():
        # The last error: the last line of a traceback that is not indented, and the lines of its message.
        reason = re.split(r"\n(?=\S)", TRACERS[0].errors().strip())[-1] or "no error output"
        raise TraceFailed(f"could not trace the step: {' '.join(reason.split())[:LONGEST_REASON]}")
    return answer.strip()


class Tracer:
    """A process that traces one step after the other; it ends with this process, or if it is idle."""

    COMMAND = (sys.executable, "-m", TRACER)

    def __init__(self) -> None:
        """Start the process."""
        environment = {
            **os.environ,
            # The tracer simulates a GPU with fake tensors and does not need one.
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": import_path(),
        }
        self.output = TemporaryFile("w+")  # noqa: SIM115, read after the process has failed
        self.process = subprocess.Popen(
            self.COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.output,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def answer(self, question: str) -> str:
        """Return the line that answers a question; "\\n" if the step cannot be traced, "" if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{question}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self.process.stdout.readline()

    def errors(self) -> str:
        """Return what the process has written to stderr."""
        self.output.seek(0)
        return self.output.read()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()
        self.output.close()


TRACERS: list[Tracer] = []  # the running process, if one was started


# ------------------------------------------------------------------------------------------------ cached traces


def cached_trace(step: StepToTrace) -> MemoryTrace | None:
    """Return the cached trace of a step and update its last-use time; None if the trace is missing or damaged."""
    path = path_of(step)
    try:
        answer = read_entry(path)
    except OSError:
        return None
    if answer is None:
        return None
    with suppress(OSError):
        os.utime(path)
    return trace_in(answer.decode())


def trace_in(answer: str) -> MemoryTrace | None:
    """Parse the output of the tracer; return None if it is invalid."""
    try:
        values = json.loads(answer)
        by_name = {}
        for name in ("moments", "activations"):
            moments = []
            for value in values[name]:
                moments.append(Moment(value["phase"], tuple(value["fixed"]), tuple(value["per_image"])))
            by_name[name] = tuple(moments)
        return MemoryTrace(values["start"], **by_name)
    except (ValueError, KeyError, TypeError):
        return None


def traces_folder() -> Path:
    """Return the folder in which traces are cached."""
    return state_folder() / "memory"


def path_of(step: StepToTrace) -> Path:
    """Return the cache file of a step's trace; its name is a digest of everything that affects the trace."""
    versions = {name: version(name) for name in LIBRARIES}
    key = digest({"step": dataclasses.asdict(step), "versions": versions, "sources": digest_of_sources()})
    return traces_folder() / f"{key}.trace"


@functools.cache
def digest_of_sources() -> str:
    """Return the digest of all code that determines the allocations of a step."""
    summed = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            summed.update(f"{path.relative_to(ROOT)}\0".encode())
            summed.update(hashlib.sha256(path.read_bytes()).digest())
    return summed.hexdigest()
