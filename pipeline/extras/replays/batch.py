"""Read the records needed to replay a trained stage's steps, and rebuild the global batch of a step.

1. task.json contains the config and the data sets of the stage.
2. metrics.jsonl contains the results of each step, and the shards that each attempt excluded.
3. The sample order is a function of the data sets, the excluded shards and the seed, for any number of workers. One
   loader in a single process can therefore rebuild the global batch, without a model.

The stage's folder is not modified.
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
from pipeline.extras.branches import link_checkpoint
from pipeline.extras.recorded_config import recorded_config
from pipeline.monitoring.telemetry import Record, read_metrics
from pipeline.training_config import TrainConfig, phase_at
from pipeline.training_data import steps_of, training_loader, training_order
from pipeline.variables import restored

# B images of the global batch, S image side, L largest number of labels of a sample


class Rebuilt(NamedTuple):
    """The global batch of a step."""

    images: np.ndarray  # (B, S, S, 3) uint8
    labels: np.ndarray  # (B, L), padded with -1
    ids: np.ndarray  # (B, 3): epoch, shard, sample in the shard
    bad: list[BadSample]  # replaced samples
    source: Index  # combined index of all training sets, to which the shard numbers in `ids` refer


class RecordedStep(NamedTuple):
    """A step's record in metrics.jsonl, from the last attempt that ran the step and whose result was kept."""

    attempt: int
    world: int
    loss: float
    grad_norm: float
    trace: Sequence[Sequence[float]]  # losses and gradients of parts, states of workers; () unless in exact mode


class TrainedStage:
    """The folder of a trained stage, finished or unfinished; records are read on first access.

    Steps are counted from 1, as in the log. Raises DataError if a record was modified.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    @cached_property
    def task(self) -> Mapping[str, Any]:
        """Return the task of the newest attempt's workers: the config and the job."""
        path = self.folder / artifacts.TASK
        return restored(artifacts.read_record(path), path)

    @property
    def job(self) -> Mapping[str, Any]:
        """Return the job of the newest attempt, with absolute paths."""
        return self.task["job"]

    @cached_property
    def cfg(self) -> TrainConfig:
        """Return the config of the newest attempt, with absolute paths to its data sets.

        References from the recipe, such as "@shards/train", would be invalid in another run directory.
        """
        cfg = recorded_config(self.task)
        paths = dict(zip(cfg.data.sets(), self.job["train"], strict=True))
        mixture = {name: replace(part, train=paths[name]) for name, part in cfg.data.mixture.items()}
        data = replace(cfg.data, train=paths.get("train"), mixture=mixture, evaluate=self.job["evaluate"])
        probe = replace(cfg.probe, train=self.job["probe_train"], test=self.job["probe_test"])
        return replace(cfg, data=data, probe=probe, init=self.job["init"])

    @cached_property
    def sets(self) -> Sequence[Index]:
        """Return the training sets."""
        return [load_index(path) for path in self.job["train"]]

    @cached_property
    def steps(self) -> int:
        """Return the stage's total number of steps."""
        return steps_of(self.cfg, sum(training_set.samples for training_set in self.sets))

    @cached_property
    def commits(self) -> Mapping[int, Path]:
        """Return {step: checkpoint} in ascending order, with the newest checkpoint of each step."""
        commits = {}
        for checkpoint in reversed(committed(self.folder / "checkpoints")):
            commits[step_of(checkpoint)] = checkpoint
        return commits

    @property
    def bounds(self) -> Sequence[int]:
        """Return the steps between which steps can be repeated: the stage's first step, and its own commits.

        A branch begins at a commit that its trunk has trained.
        """
        first = self.cfg.first_step
        return [first, *(step for step in self.commits if step > first)]

    @property
    def outcome(self) -> Mapping[str, Any]:
        """Return the stage's results from done.json. Raises UsageError if the stage has not finished."""
        outcome = artifacts.read_done(self.folder)
        if outcome is None:
            raise UsageError(f"{self.folder} has not finished\n  expected a finished stage")
        return outcome

    def commit_before(self, step: int) -> int:
        """Return the step of the newest commit before a step; 0 for the initial weights of the stage."""
        return max((commit for commit in self.commits if commit < step), default=0)

    @cached_property
    def records(self) -> Sequence[Record]:
        """Return all records in metrics.jsonl."""
        return read_metrics(self.folder, None)

    @cached_property
    def step_records(self) -> Mapping[int, RecordedStep]:
        """Return {step: record}; records may be missing because of disk errors or excluded steps."""
        recorded = {}
        for record in self.records:
            if record["kind"] != "train":
                continue
            steps = steps_in(record)
            traces = record.get("traces", [()] * len(steps))
            for step, loss, norm, trace in zip(steps, record["losses"], record["grad_norms"], traces, strict=True):
                recorded[step] = RecordedStep(record["attempt"], record["world"], loss, norm, trace)
        return recorded

    @cached_property
    def starts(self) -> Sequence[Record]:
        """Return the start records of all attempts, in order."""
        return [record for record in self.records if record["kind"] == "start"]

    def start_of(self, step: int) -> Record:
        """Return the start record of the last attempt that ran, or may have run, a step; {} if there is none."""
        last: Record = {}
        for start in self.starts:
            # A step without a record may belong to any attempt that started before it.
            if start["step"] < step and (
                step not in self.step_records or start["attempt"] == self.step_records[step].attempt
            ):
                last = start
        return last

    def config_at(self, first: int, last: int) -> TrainConfig:
        """Return the config used for the steps `first` … `last`.

        `data.drop` may differ between attempts, but task.json contains only the newest attempt's value. Raises
        UsageError if it changed between these steps.
        """
        drops = set()
        seen_attempts = set()  # all steps of an attempt have the same `data.drop`
        for step in range(first, last + 1):
            if step in self.step_records:
                attempt = self.step_records[step].attempt
                if attempt in seen_attempts:
                    continue
                seen_attempts.add(attempt)
            drops.add(tuple(self.start_of(step).get("drop", self.cfg.data.drop)))
        if len(drops) > 1:
            raise UsageError(
                f"data.drop changed between steps {first} and {last} of {self.folder.name}\n"
                "  expected steps with the same shards: choose a shorter range"
            )
        return replace(self.cfg, data=replace(self.cfg.data, drop=drops.pop()))

    def masked(self, step: int) -> Sequence[Sequence[int]]:
        """Return the sample ranges masked up to a step, each with its first step, in the format of `Job.masked`.

        A range takes effect at a commit, and is stored in that commit and all later ones. Raises CheckpointError if
        the manifest of a commit is damaged.
        """
        later_commits = [commit for commit in self.commits if commit >= step]
        commit = min(later_commits, default=max(self.commits, default=None))
        if commit is None:
            return ()
        return read_manifest(self.commits[commit]).masked

    def link_start(self, start: int, target: Path) -> None:
        """Link the checkpoint of step `start` (0: none) into the folder `target`, and copy the list of excluded steps.

        A branch that has deleted its first checkpoint takes it from its trunk when it starts. Repeated calls have no
        further effect. Raises OSError if a file cannot be linked or copied.
        """
        target.mkdir(parents=True, exist_ok=True)
        checkpoints = checkpoints_in(target / "checkpoints")
        if start in self.commits and not checkpoints.committed():
            link_checkpoint(self.commits[start], checkpoints)
        if (self.folder / artifacts.EXCLUDED_STEPS).exists():
            shutil.copy(self.folder / artifacts.EXCLUDED_STEPS, target / artifacts.EXCLUDED_STEPS)

    def batch(self, step: int, most: int | None = None) -> Rebuilt:
        """Rebuild the global batch of a step, or its first `most` samples.

        Raises UsageError if the stage has no such step.
        """
        if step > self.steps:
            raise UsageError(
                f"step {step} is after the last step {self.steps} of {self.folder.name}\n"
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
    """Rebuild the batch of a step, counted from 0, with one loader for all workers' slots, or for the first `most`."""
    samples = min(cfg.batch_size, most or cfg.batch_size)
    # A single micro-batch can replace those of all workers, because augmentation is seeded per sample.
    loader = training_loader(
        cfg, index, order, image_size=image_size, slots=range(samples), start_step=step, micro_batch=samples
    )
    batch = next(iter(loader))
    images = batch.images.permute(0, 2, 3, 1).cpu().numpy()  # (B, 3, S, S) → (B, S, S, 3)
    return Rebuilt(images, batch.labels.numpy(), batch.ids.numpy(), list(batch.bad), index)


def steps_in(report: Record) -> range:
    """Return the steps, counted from 1, whose losses a training record contains."""
    return range(report["step"] - len(report["losses"]) + 1, report["step"] + 1)
