"""The traces of steps of training, each made once: in a process of its own, then kept in the user's cache folder.

In:  StepToTrace(model={…}, config={…}, world=8, accumulation=2, recomputed=0, is_gpu=True)
Out: Trace, from which follows what lives at the fullest moment with any micro-batch

A kept trace is found by the digest of everything that it depends on: the step, which is all that the process is told,
the versions of torch and DeepSpeed, and the sources of `models/`, `pipeline/` and the tracer itself.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import models
from data.errors import PatchlineError, StorageError
from data.files import locked, state_folder, write_whole
from models import ModelConfig
from pipeline.config import digest
from pipeline.plan.live_bytes import Kind
from pipeline.training_config import TrainConfig

ROOT = Path(__file__).parents[2]
SOURCES = ("models", "pipeline")  # whose code says what a step allocates
LIBRARIES = ("torch", "deepspeed")
TRACER = "pipeline.plan.memory_trace"
MOST_MICRO_BATCHES = 2  # that are traced: a third adds its gradients to the same sums as the second
MOST_KEPT = 1000  # traces, of about 1 kB; every change of the sources makes the older ones useless
LONGEST_REASON = 300  # characters of what a tracer that failed has said


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
class Trace:
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
    """Describe the step of a stage."""
    micro_batches = min(accumulation, MOST_MICRO_BATCHES)
    if cfg.exact_parts:
        # The sums of all of a worker's parts live side by side; within a part, a third micro-batch adds nothing.
        parts_here = cfg.exact_parts // world
        micro_batches = parts_here * min(accumulation // parts_here, MOST_MICRO_BATCHES)
    file = ""
    if cfg.deepspeed is not None:
        file = hashlib.sha256(Path(cfg.deepspeed).read_bytes()).hexdigest()
    optim = {"name": cfg.optim.name, "clip": min(cfg.optim.clip, 1.0), "weight_decay": cfg.optim.weight_decay}
    if cfg.optim.head_weight_decay is not None:
        optim["head_weight_decay"] = cfg.optim.head_weight_decay
    values: dict[str, Any] = {
        "data": {"train": "none", "max_labels": cfg.data.max_labels},
        "optim": optim,
        "steps": 1,
        # Nothing depends on them but DeepSpeed's check that they fit together.
        "micro_batch": 1,
        "batch_size": world * micro_batches,
    }
    for name in ("objective", "loss", "label_smoothing", "mixup", "polyak", "exact_parts", "precision", "zero"):
        values[name] = getattr(cfg, name)
    if cfg.deepspeed is not None:
        values["deepspeed"] = str(Path(cfg.deepspeed).absolute())
    return StepToTrace(models.to_dict(model), values, world, micro_batches, recomputed, is_gpu, file)


def traces_of(steps: Sequence[StepToTrace]) -> list[Trace]:
    """Return the traces of these steps; those that are not kept yet are made, by one process for all of them.

    Raises TraceFailed.
    """
    folder = traces_folder()
    step_of_path = {path_of(step): step for step in steps}
    known = kept_of(step_of_path)
    if len(known) < len(step_of_path):
        # The workers of a node may ask at the same moment: the others wait for the first and find what it has kept.
        with alone_if_possible(folder):
            known = kept_of(step_of_path)
            missing = [path for path in step_of_path if path not in known]
            answers = run_tracer([step_of_path[path] for path in missing])
            for path, answer in zip(missing, answers, strict=True):
                trace = trace_in(answer)
                if trace is None:
                    raise TraceFailed(f"the step could not be traced: the tracer has said {answer[:LONGEST_REASON]}")
                known[path] = trace
            keep(dict(zip(missing, answers, strict=True)), folder)
    return [known[path_of(step)] for step in steps]


@contextmanager
def alone_if_possible(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which a home that is read-only or has no locks does not give; nothing ends for that."""
    with ExitStack() as around:
        with suppress(OSError, StorageError):
            folder.mkdir(parents=True, exist_ok=True)
            around.enter_context(locked(folder / "lock"))
        yield


def keep(answers: Mapping[Path, str], folder: Path) -> None:
    """Write down what the tracer has said, and forget traces long unused; where there is no room, that is said."""
    try:
        for path, answer in answers.items():
            write_whole(path, answer)
        forget_unused(folder)
    except (OSError, StorageError) as error:
        logging.getLogger(__name__).warning("%s: traced steps cannot be kept, each plan traces anew: %s", folder, error)


def forget_unused(folder: Path) -> None:
    """Delete the traces that were not used for longest, but for the MOST_KEPT others. Raises OSError."""
    newest_first = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first[MOST_KEPT:]:
        path.unlink(missing_ok=True)


def mark_used(path: Path) -> None:
    """Have a trace count as new, where its folder can be written."""
    with suppress(OSError):
        os.utime(path)


def traces_folder() -> Path:
    """Return where traces are kept."""
    return state_folder() / "memory"


def path_of(step: StepToTrace) -> Path:
    """Return the file in which the trace of a step is kept."""
    return traces_folder() / f"{key_of(step)}.json"


def is_kept(step: StepToTrace) -> bool:
    """Return whether the step has been traced before."""
    return kept(path_of(step)) is not None


def kept_of(paths: Iterable[Path]) -> dict[Path, Trace]:
    """Return those of these traces that are kept."""
    known: dict[Path, Trace] = {}
    for path in paths:
        trace = kept(path)
        if trace is not None:
            known[path] = trace
    return known


def kept(path: Path) -> Trace | None:
    """Return a kept trace; None where there is none, or where it is no trace."""
    try:
        trace = trace_in(path.read_text())
    except (OSError, ValueError):
        return None
    mark_used(path)
    return trace


def trace_in(answer: str) -> Trace | None:
    """Return the trace that the tracer has written down; None where it is none."""
    try:
        values = json.loads(answer)
        return Trace(values["start"], moments_of(values["moments"]), moments_of(values["activations"]))
    except (ValueError, KeyError, TypeError):
        return None


def moments_of(values: list[dict[str, Any]]) -> tuple[Moment, ...]:
    """Build moments from JSON."""
    moments = []
    for value in values:
        moments.append(Moment(value["phase"], tuple(value["fixed"]), tuple(value["per_image"])))
    return tuple(moments)


def key_of(step: StepToTrace) -> str:
    """Return the digest of everything that a trace depends on."""
    versions = {name: version(name) for name in LIBRARIES}
    return digest({"step": dataclasses.asdict(step), "versions": versions, "sources": digest_of_sources()})


@functools.cache
def digest_of_sources() -> str:
    """Return the digest of all code that says what a step allocates."""
    summed = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            summed.update(f"{path.relative_to(ROOT)}\0".encode())
            summed.update(hashlib.sha256(path.read_bytes()).digest())
    return summed.hexdigest()


def run_tracer(steps: Sequence[StepToTrace]) -> list[str]:
    """Have another process trace the steps; return what it writes down for each. Raises TraceFailed."""
    if not steps:
        return []
    environment = {
        **os.environ,
        # What a GPU would keep is known without one, and fake tensors live on no GPU.
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    asked = []
    for step in steps:
        values = dataclasses.asdict(step)
        del values["file"]  # it is read where it lies
        asked.append(values)
    question = json.dumps(asked)
    done = subprocess.run(
        [sys.executable, "-m", TRACER], input=question, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    answers = done.stdout.splitlines()
    if done.returncode != 0 or len(answers) != len(steps):
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise TraceFailed(f"the step could not be traced: {said[-1][:LONGEST_REASON]}")
    return answers
