"""What a trained stage has left of its steps, as far as they can be taken again; and the global batch of one of them.

1. The stage's task.json says with which config and which sets it was trained.
2. metrics.jsonl says what came out of every step, and which shards the attempt that took it had left out.
3. The order of samples is a function of these and the seed, whatever the number of workers was: one loader makes the
   whole batch, in one process and without a model.

Nothing is written into the stage's folder.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import models
from data.decoder import BadSample
from data.errors import UsageError
from data.index.document import load_index
from data.index.index import Index
from data.order import Mixture, Order
from pipeline import artifacts
from pipeline.checkpoints.manifest import committed, read_manifest, step_of
from pipeline.checkpoints.stage_checkpoints import checkpoints_in
from pipeline.extras.recorded_config import recorded_config
from pipeline.monitoring.telemetry import Record, read_metrics, steps_in
from pipeline.phases import phase_at
from pipeline.training_config import TrainConfig
from pipeline.training_data import steps_of, training_loader, training_order

# B images of the global batch, S image side, L labels of a sample at most


class Rebuilt(NamedTuple):
    """The global batch of a step."""

    images: np.ndarray  # (B, S, S, 3) uint8
    labels: np.ndarray  # (B, L), -1 where a sample has fewer
    ids: np.ndarray  # (B, 3): epoch, shard, sample in the shard
    bad: list[BadSample]  # those that were replaced
    source: Index  # of all sets that are trained on, where the ids are numbers of shards and samples


class RecordedStep(NamedTuple):
    """What metrics.jsonl has of a step, by the last attempt that took it: its weights went on."""

    attempt: int
    world: int
    loss: float
    grad_norm: float
    trace: Sequence[Sequence[float]]  # losses and gradients of parts, states of workers; () without exact mode


class TrainedStage:
    """The folder of a trained stage, finished or not; each record in it is read when it is first asked for.

    Steps are counted from 1, as the log counts them. Raises DataError where a record was altered.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    @cached_property
    def task(self) -> Mapping[str, Any]:
        """Return what the workers of the newest attempt were told: the config and the job."""
        return artifacts.read_record(self.folder / artifacts.TASK)

    @property
    def job(self) -> Mapping[str, Any]:
        """Return the job of the newest attempt, in which all paths are absolute."""
        return self.task["job"]

    @cached_property
    def cfg(self) -> TrainConfig:
        """Return the config of the newest attempt, with the sets that its workers read.

        A recipe's "@shards/train" leads nowhere in another run directory.
        """
        cfg = recorded_config(self.task)
        paths = dict(zip(cfg.data.sets(), self.job["train"], strict=True))
        mixture = {name: replace(part, train=paths[name]) for name, part in cfg.data.mixture.items()}
        data = replace(cfg.data, train=paths.get("train"), mixture=mixture, evaluate=self.job["evaluate"])
        probe = replace(cfg.probe, train=self.job["probe_train"], test=self.job["probe_test"])
        return replace(cfg, data=data, probe=probe, init=self.job["init"])

    @cached_property
    def sets(self) -> Sequence[Index]:
        """Return the sets that are trained on."""
        return [load_index(path) for path in self.job["train"]]

    @cached_property
    def steps(self) -> int:
        """Return the number of steps of the whole stage."""
        return steps_of(self.cfg, sum(training_set.samples for training_set in self.sets))

    @cached_property
    def commits(self) -> Mapping[int, Path]:
        """Return the checkpoints by step, in ascending order; of one step the newest."""
        commits = {}
        for checkpoint in reversed(committed(self.folder / "checkpoints")):
            commits[step_of(checkpoint)] = checkpoint
        return commits

    @property
    def outcome(self) -> Mapping[str, Any]:
        """Return what the stage has handed on. Raises UsageError where it has not finished."""
        outcome = artifacts.read_done(self.folder)
        if outcome is None:
            raise UsageError(f"{self.folder} has not finished\n  expected a stage that has")
        return outcome

    def commit_before(self, step: int) -> int:
        """Return the newest commit from which a step can be taken again; 0 for the weights of the stage's begin."""
        return max((commit for commit in self.commits if commit < step), default=0)

    @cached_property
    def records(self) -> Sequence[Record]:
        """Return metrics.jsonl, records of all kinds."""
        return read_metrics(self.folder, None)

    @cached_property
    def step_records(self) -> Mapping[int, RecordedStep]:
        """Return what is on record of every step: a disk may have refused some, others were given up."""
        taken = {}
        for record in self.records:
            if record["kind"] != "train":
                continue
            steps = steps_in(record)
            traces = record.get("traces", [()] * len(steps))
            for step, loss, norm, trace in zip(steps, record["losses"], record["grad_norms"], traces, strict=True):
                taken[step] = RecordedStep(record["attempt"], record["world"], loss, norm, trace)
        return taken

    @cached_property
    def starts(self) -> Sequence[Record]:
        """Return how each attempt started, in the order of attempts."""
        return [record for record in self.records if record["kind"] == "start"]

    def start_of(self, step: int) -> Record:
        """Return how the attempt started that took a step last, or may have; an empty record where none is known."""
        last: Record = {}
        for start in self.starts:
            # A step on no record may have ended any of those attempts that started before it.
            if start["step"] < step and (
                step not in self.step_records or start["attempt"] == self.step_records[step].attempt
            ):
                last = start
        return last

    def config_at(self, first: int, last: int) -> TrainConfig:
        """Return the config with which the steps `first` … `last` were taken.

        `data.drop` may change from attempt to attempt, and task.json has only that of the newest. Raises UsageError
        where shards were dropped, or came back, amid these steps.
        """
        drops = set()
        asked = set()  # attempts, which are few; the steps of each have one answer
        for step in range(first, last + 1):
            if step in self.step_records:
                attempt = self.step_records[step].attempt
                if attempt in asked:
                    continue
                asked.add(attempt)
            drops.add(tuple(self.start_of(step).get("drop", self.cfg.data.drop)))
        if len(drops) > 1:
            raise UsageError(
                f"data.drop has changed between the steps {first} and {last} of {self.folder.name}\n"
                "  expected steps that were taken with the same shards: name fewer"
            )
        return replace(self.cfg, data=replace(self.cfg.data, drop=drops.pop()))

    def masked(self, step: int) -> Sequence[Sequence[int]]:
        """Return what weighed nothing up to a step, each range with the step from which on, as `Job.masked` has it.

        A range holds from a commit on, and the commits behind that have it too. Raises CheckpointError.
        """
        behind = [commit for commit in self.commits if commit >= step]
        commit = min(behind, default=max(self.commits, default=None))
        if commit is None:
            return ()
        return read_manifest(self.commits[commit]).masked

    def link_start(self, start: int, target: Path) -> None:
        """Give another folder of this stage the commit of step `start` (0: none), and which steps the run gave up.

        Nothing is done that was done. Raises OSError.
        """
        target.mkdir(parents=True, exist_ok=True)
        checkpoints = checkpoints_in(target / "checkpoints")
        if start and not checkpoints.committed():
            checkpoints.adopt(self.commits[start])
        if (self.folder / artifacts.EXCLUDED_STEPS).exists():
            shutil.copy(self.folder / artifacts.EXCLUDED_STEPS, target / artifacts.EXCLUDED_STEPS)

    def batch(self, step: int, most: int | None = None) -> Rebuilt:
        """Make the global batch of a step, or the first `most` samples of it, as every worker saw it.

        Raises UsageError where the stage has no such step.
        """
        if step > self.steps:
            raise UsageError(
                f"step {step} is beyond the last of {self.folder.name}, {self.steps}\n"
                f"  expected step=1 … step={self.steps}"
            )
        cfg = self.config_at(step, step)
        index, order = training_order(cfg, self.sets)
        # The log counts steps from 1, the order from 0.
        phase = phase_at(step - 1, cfg.phases(self.steps, models.from_dict(self.job["model"])))
        return rebuild(cfg, index, order, phase.image_size, step - 1, most)


def rebuild(
    cfg: TrainConfig, index: Index, order: Order | Mixture, image_size: int, step: int, most: int | None = None
) -> Rebuilt:
    """Make the batch of a step, counted from 0, with one loader that takes the slots of all workers, or the first."""
    samples = min(cfg.batch_size, most or cfg.batch_size)
    # One micro-batch may stand for those of all workers: augmentation is seeded by sample, so every worker makes the
    # same pixels of it.
    loader = training_loader(
        cfg, index, order, image_size=image_size, slots=range(samples), start_step=step, micro_batch=samples
    )
    batch = next(iter(loader))
    images = batch.images.permute(0, 2, 3, 1).cpu().numpy()  # (B, 3, S, S) → (B, S, S, 3)
    return Rebuilt(images, batch.labels.numpy(), batch.ids.numpy(), list(batch.bad), index)
