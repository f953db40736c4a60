"""A worker of a stage that judges weights and trains nothing (fewshot, evaluate): how it starts, and how it ends.

1. The process group is joined, and the start is checked as that of training is.
2. Every worker loads the whole model: nothing is shared between them but the samples.
3. Batches of a set are iterated so that all workers hear, between two, of a stop and of one that cannot read on.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

import models
from data.checks import printable_lines
from data.errors import Preempted
from data.evaluation import EvaluationBatch, EvaluationSet
from data.index.document import load_index
from data.index.index import Index
from data.remote.cache import CacheConfig
from jobs.cluster.worker import Task
from jobs.context import Context
from pipeline.checkpoints.manifest import attempt_folder
from pipeline.evaluation import evaluate
from pipeline.evaluation.features import FeatureStore, collect
from pipeline.evaluation.probe import Beat
from pipeline.evaluation.rank_zero import at_rank_0_alone
from pipeline.monitoring.telemetry import append_whole, duration
from pipeline.monitoring.watchdog import Phases
from pipeline.versions import code_version

Result = TypeVar("Result")

PROGRESS_S = 20.0  # between two lines that say how far a pass over a set is
COLLECTIVE_TIMEOUT_S = 1800.0  # as TrainConfig.timeout_s; `stall_s` ends a hang long before


class FrozenConfig(Protocol):
    """Of a stage's config, what is read here."""

    @property
    def micro_batch(self) -> int: ...

    @property
    def precision(self) -> str: ...

    @property
    def stall_s(self) -> float: ...

    @property
    def cache(self) -> CacheConfig: ...


def task_of(context: Context, attempt: int) -> Task:
    """Return what the workers of an attempt are told by every such stage."""
    return {
        "run": str(context.run),
        "attempt": attempt,
        "claimed": time.time(),
        "code": code_version(),
        "folder": str(attempt_folder(context.directory, attempt)),
        "remote": context.remote,
    }


@dataclass
class Judge:
    """One worker with its model."""

    cfg: FrozenConfig
    folder: Path  # of the attempt
    rank: int
    device: torch.device
    dtype: torch.dtype
    phases: Phases
    wants_stop: Callable[[], bool]
    model: models.Model

    def collected(self, path: str, ops: str, max_labels: int = 1, **wanted: Any) -> FeatureStore:
        """Collective: pass a set through the model; rank 0's store has what was `wanted` (see `collect`).

        Raises EvaluationFailed, which names the set, and Preempted, on all workers alike.
        """
        with stop_is_preemption(f"{path}: "):
            index = self.opened(path)
            store = FeatureStore(index, self.folder)
            batches = store.watching(self.batches(index, ops, max_labels))
            # All workers hear of a stop, and of one that cannot read on, between two batches.
            agreed = evaluate.agreed(batches, self.wants_stop, self.device, self.phases.log)
            collect(self.model, self.with_progress(agreed, index, path), store, self.dtype, self.device, **wanted)
        return store

    def opened(self, path: str) -> Index:
        """Collective: return the index of a set; where a worker cannot read it, all hear of it."""
        index = None
        failure = None
        try:
            index = load_index(path)
        except Exception as error:
            failure = error
        evaluate.go_on_together(failure, self.wants_stop, self.device, self.phases.log)
        assert index is not None, "a failure has been raised"
        return index

    def batches(self, index: Index, ops: str, max_labels: int) -> Iterator[EvaluationBatch]:
        """Iterate this worker's batches of a set; what the opening of the set raises is raised at the first."""
        samples = EvaluationSet(
            index,
            ops,
            batch_size=self.cfg.micro_batch,
            rank=self.rank,
            world=dist.get_world_size(),
            max_labels=max_labels,
            cache=self.cfg.cache,
        )
        yield from evaluate.watched(samples, self.phases)

    def with_progress(self, batches: Iterator[EvaluationBatch], index: Index, path: str) -> Iterator[EvaluationBatch]:
        """Iterate batches; rank 0 says now and then how far it is, which the others are too."""
        began = time.monotonic()
        last_said = began
        passed = 0
        for batch in batches:
            yield batch
            # All workers have passed as many batches as this one, but for the last.
            passed = min(passed + self.cfg.micro_batch * dist.get_world_size(), index.samples)
            if time.monotonic() - last_said > PROGRESS_S:
                last_said = time.monotonic()
                self.say(f"{path}: {passed:,} of {index.samples:,} images")
        self.say(f"{path}: {index.samples:,} images in {duration(time.monotonic() - began)}")

    def say(self, text: str) -> None:
        """Write a line into the stage's log, which the driver shows; rank 0 alone."""
        if self.rank == 0:
            append_whole(self.folder.parents[1] / "log.txt", f"{printable_lines(text)}\n".encode())

    def alone(self, phase: str, work: Callable[[Beat], Result]) -> Result | None:
        """Collective: return what `work(beat)` gives at rank 0, None elsewhere; a stop is heard at a beat.

        Raises EvaluationFailed and Preempted, on all workers alike.
        """
        with stop_is_preemption(""):
            return at_rank_0_alone(
                work, phase, phases=self.phases, wants_stop=self.wants_stop, device=self.device, log=self.phases.log
            )

    def close(self) -> None:
        """Collective: leave the group."""
        dist.barrier()
        self.phases.close()
        dist.destroy_process_group()


@contextmanager
def stop_is_preemption(place: str) -> Iterator[None]:
    """Name the set at which an evaluation failed, and say of a stop what to type."""
    try:
        yield
    except evaluate.EvaluationFailed as error:
        remedy = "\n  repair the set, then run the same command again" if place else ""
        raise evaluate.EvaluationFailed(f"{place}{error}{remedy}", error.exit_code) from error
    except evaluate.EvaluationStopped:
        raise Preempted("stopped between two batches; run the same command again to begin anew") from None


def judge_of(task: Mapping[str, Any], cfg: FrozenConfig, load: Callable[[], models.Model]) -> Judge:
    """Collective: make one worker ready; `load` gives the model, once the weights are on this node."""
    from pipeline.preflight.start import check_start
    from pipeline.process_group import join_group
    from pipeline.start import fetch_init
    from pipeline.train import notice_sigterm

    asked_to_stop = threading.Event()
    notice_sigterm(asked_to_stop)
    phases = Phases(Path(task["folder"]), int(os.environ["RANK"]), cfg.stall_s)
    # Entered before the group is joined, where a worker waits for a lost peer: the watchdog sees nothing but phases.
    phases.enter("join", 0)
    device = join_group(COLLECTIVE_TIMEOUT_S)
    check_start(
        run=Path(task["run"]),
        attempt=task["attempt"],
        attempt_folder=Path(task["folder"]),
        code=task["code"],
        claimed=task["claimed"],
        device=device,
        is_shared=task.get("remote") is None,
        say=partial(print, file=phases.log, flush=True),
    )
    phases.enter("build", 0)
    if task.get("remote") is not None:
        fetch_init(task["remote"], task["run"], task["init"])
    dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32
    return Judge(
        cfg=cfg,
        folder=Path(task["folder"]),
        rank=dist.get_rank(),
        device=device,
        dtype=dtype,
        phases=phases,
        wants_stop=asked_to_stop.is_set,
        model=load().to(device, dtype),
    )
