"""The traces of steps of training, each made once: in a process of its own, then kept in the user's cache folder.

In:  StepToTrace(model={…}, config={…}, world=8, accumulation=2, recomputed=0, is_gpu=True)
Out: MemoryTrace, from which follows what lives at the fullest moment with any micro-batch

A kept trace is found by the digest of everything that it depends on: the step, which is all that the process is told,
the versions of torch and DeepSpeed, and the sources of `models/`, `pipeline/` and the tracer itself. It is an entry of
a cache with its own digest (data/seal.py): one that has changed is traced anew.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import models
from data.errors import PatchlineError, StorageError
from data.files import import_path, locked, state_folder
from data.seal import read_entry, write_entry
from models import ModelConfig
from pipeline.config import digest
from pipeline.training_config import TrainConfig

ROOT = Path(__file__).parents[3]
SOURCES = ("models", "pipeline")  # whose code says what a step allocates
LIBRARIES = ("torch", "deepspeed")
TRACER = "pipeline.extras.plan.tracer"
MOST_MICRO_BATCHES = 2  # that are traced: a third adds its gradients to the same sums as the second
# Fields of which it matters whether they are 0, and nothing else: runs of a sweep over their values share a trace.
SWITCHES = ("label_smoothing", "mixup", "polyak")
SWITCHES_OF_MODEL = ("dropout", "drop_path")
FIRST_VALUES = ("head_bias", "position_std")  # fields of a model that say what its weights begin with
ON = 0.5  # stands for every value of a switch that is not 0
MOST_KEPT = 1000  # traces, of about 1 kB; every change of the sources makes the older ones useless
LONGEST_REASON = 300  # characters of what a tracer that failed has said


class Kind(enum.IntEnum):
    """Says what memory is for."""

    STATES = 0  # weights, masters, moments, average: all that lives from the engine's start to its end
    ACTIVATIONS = 1  # what the forward pass made, or a block's second forward pass in the backward pass
    GRADIENTS = 2  # gradients, their buckets and sums, and what the optimizer computes on the way
    GATHERED = 3  # weights that ZeRO 3 has gathered from the other workers
    IMAGES = 4  # the micro-batch


class TraceFailed(PatchlineError):
    """A step could not be traced: what it needs is not known."""


@dataclass(frozen=True)
class StepToTrace:
    """Describes a step of training by all that its memory depends on, the size of the micro-batch excepted."""

    model: dict[str, Any]
    config: dict[str, Any]  # fields of a TrainConfig; the others have no say in memory
    world: int
    accumulation: int
    recomputed: int  # blocks
    is_gpu: bool
    file: str = ""  # digest of the user's DeepSpeed file


@dataclass(frozen=True)
class Moment:
    """Says what lives at one moment of a step: bytes of every `Kind`, fixed and for each image of a micro-batch."""

    phase: str
    fixed: tuple[float, ...]
    per_image: tuple[float, ...]

    def parts(self, micro_batch: int) -> list[int]:
        """Return the bytes by kind."""
        return [round(a + micro_batch * b) for a, b in zip(self.fixed, self.per_image, strict=True)]


@dataclass(frozen=True)
class MemoryTrace:
    """Holds the moments at which most lives: all kinds together, or activations alone; and the most at the start."""

    start: int  # bytes, from the engine's start to the end of a first step with 2 images
    moments: tuple[Moment, ...]
    activations: tuple[Moment, ...]

    def fullest(self, micro_batch: int) -> Moment:
        """Return the moment at which most lives."""
        return max(self.moments, key=lambda moment: sum(moment.parts(micro_batch)))

    def most_activations(self, micro_batch: int) -> int:
        """Return the most bytes of activations that live at once."""
        return max(moment.parts(micro_batch)[Kind.ACTIVATIONS] for moment in self.activations)


def step_to_trace(
    cfg: TrainConfig, model: ModelConfig, world: int, accumulation: int, recomputed: int, *, is_gpu: bool
) -> StepToTrace:
    """Describe the step of a stage. Raises TraceFailed for one that is compiled."""
    if cfg.compile:
        raise TraceFailed(
            "the step is not traced with compile: true, whose kernels keep other activations; compile=false says what "
            "a step that is not compiled needs"
        )
    micro_batches = min(accumulation, MOST_MICRO_BATCHES)
    if cfg.exact_parts:
        # The sums of all of a worker's parts live side by side; within a part, a third micro-batch adds nothing.
        parts_here = cfg.exact_parts // world
        micro_batches = parts_here * min(accumulation // parts_here, MOST_MICRO_BATCHES)
    file = ""
    if cfg.deepspeed is not None:
        file = hashlib.sha256(Path(cfg.deepspeed).read_bytes()).hexdigest()
    decay = cfg.optim.weight_decay
    optim = {"name": cfg.optim.name, "clip": ON * (cfg.optim.clip > 0), "weight_decay": ON * (decay > 0)}
    of_head = cfg.optim.head_weight_decay
    # Parameters are grouped by their decay: a head with another one is a group of its own.
    if of_head is not None and of_head != decay:
        optim["head_weight_decay"] = ON / 2 * (of_head > 0)
    values: dict[str, Any] = {
        "data": {"train": "unread", "max_labels": cfg.data.max_labels},
        "optim": optim,
        "steps": 1,
        # Nothing depends on them but DeepSpeed's check that they fit together.
        "micro_batch": 1,
        "batch_size": world * micro_batches,
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


def trace_of(step: StepToTrace) -> MemoryTrace:
    """Return the trace of a step; one that is not kept yet is made. Raises TraceFailed."""
    trace = cached_trace(step)
    if trace is not None:
        return trace
    with ExitStack() as around:
        # The workers of a node may ask at the same moment: the others wait for the first and find what it has kept.
        # Where the home is read-only or has no locks, each traces for itself.
        with suppress(OSError, StorageError):
            traces_folder().mkdir(parents=True, exist_ok=True)
            around.enter_context(locked(traces_folder() / "lock"))
        trace = cached_trace(step)
        if trace is not None:
            return trace
        answer = run_tracer(step)
        trace = trace_in(answer)
        if trace is None:
            raise TraceFailed(f"the step could not be traced: the tracer has said {answer[:LONGEST_REASON]}")

        # It is kept, and of the others those that were not used for longest go.
        try:
            write_entry(path_of(step), answer.encode())
            by_use = sorted(traces_folder().glob("*.trace"), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in by_use[MOST_KEPT:]:
                path.unlink(missing_ok=True)
        except (OSError, StorageError) as error:
            message = "%s: traced steps cannot be kept, each plan traces anew: %s"
            logging.getLogger(__name__).warning(message, traces_folder(), error)
    return trace


def run_tracer(step: StepToTrace) -> str:
    """Have another process trace a step; return what it writes down. Raises TraceFailed."""
    environment = {
        **os.environ,
        # What a GPU would keep is known without one, and fake tensors live on no GPU.
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": import_path(),
    }
    values = dataclasses.asdict(step)
    del values["file"]  # it is read where it lies
    question = json.dumps(values)
    done = subprocess.run(
        [sys.executable, "-m", TRACER], input=question, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    if done.returncode != 0 or not done.stdout:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise TraceFailed(f"the step could not be traced: {said[-1][:LONGEST_REASON]}")
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------ kept traces


def cached_trace(step: StepToTrace) -> MemoryTrace | None:
    """Return the kept trace of a step, which counts as used now; None where there is none, or it has changed."""
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
    """Return the trace that the tracer has written down; None where it is none."""
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
    """Return where traces are kept."""
    return state_folder() / "memory"


def path_of(step: StepToTrace) -> Path:
    """Return the file in which the trace of a step is kept; its name is of everything that a trace depends on."""
    versions = {name: version(name) for name in LIBRARIES}
    key = digest({"step": dataclasses.asdict(step), "versions": versions, "sources": digest_of_sources()})
    return traces_folder() / f"{key}.trace"


@functools.cache
def digest_of_sources() -> str:
    """Return the digest of all code that says what a step allocates."""
    summed = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            summed.update(f"{path.relative_to(ROOT)}\0".encode())
            summed.update(hashlib.sha256(path.read_bytes()).digest())
    return summed.hexdigest()
