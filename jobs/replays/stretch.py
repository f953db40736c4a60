"""The one primitive of replays: take the steps of a trained stage again, from one of its commits to a later step.

1. `recorded_stage` reads what the stage has left: its task, its records, its commits. Nothing is written there.
2. `Stretch.cluster` says on what the steps are taken again: in exact mode any workers that fit, otherwise as many as
   took them the first time, because another number has other bits.
3. `take_again` links the commit into a run directory of its own, and runs the stage there as any run is run: agents,
   attempts, verdicts, exit codes. The loop is that of training, with another last step and perhaps a mask.

In:  runs/digits/pretrain, steps 100 to 150, samples to mask, and the folder runs/digits-audit/steps-100-150
Out: in that folder a run whose stage has the commit of step 150 and the records of its steps
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import models
from data.errors import UsageError
from data.index.document import load_index
from data.index.index import Index
from data.storage import Folder
from jobs.cluster_config import ClusterConfig
from jobs.named_stages import find_stage
from jobs.resolved_recipe import Campaign, Context, Stage, no_checks
from jobs.run.session import run_campaign
from jobs.stages.kinds import KINDS
from pipeline import artifacts, config
from pipeline.checkpoints.manifest import Manifest, committed, read_manifest, step_of
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.evaluation.protocols import ProbeConfig
from pipeline.monitoring.telemetry import Record, read_metrics, steps_in
from pipeline.replay import reports_of, with_recorded_drop
from pipeline.training_config import TrainConfig, steps_of
from pipeline.versions import code_version

NEVER = 1 << 62  # steps between saves of a replay that keeps its last one alone

Work = Callable[[TrainConfig, Context], Mapping[str, Any]]  # what a stage does


class StepValues(NamedTuple):
    """Holds what metrics.jsonl has of a step."""

    loss: float
    grad_norm: float
    trace: Sequence[Sequence[float]]  # losses and gradients of parts, states of workers; () without exact mode
    world: int


@dataclass(frozen=True)
class RecordedStage:
    """What a trained stage of a run has left, as far as its steps are to be taken again; paths are absolute."""

    folder: Path
    cfg: TrainConfig  # of its newest attempt
    job: Mapping[str, Any]  # the task of that attempt
    record: Mapping[str, Any]  # stage.json
    records: Sequence[Record]  # metrics.jsonl, of all kinds
    commits: Mapping[int, Path]  # by step, in rising order; of one step the newest
    sets: Sequence[Index]  # that are trained on
    steps: int  # of the whole stage

    @cached_property
    def values(self) -> Mapping[int, StepValues]:
        """Return what is on record of every step: months of them are read once."""
        return values_of(self.records)

    def manifest(self, step: int) -> Manifest:
        """Return what the commit of a step says of itself."""
        return read_manifest(self.commits[step])

    def config_at(self, first: int, last: int) -> TrainConfig:
        """Return the config with which the steps `first` … `last` were taken, counted from 1.

        Raises UsageError where shards were dropped, or came back, amid them.
        """
        cfg = with_recorded_drop(self.cfg, self.records, first)
        # Which shards are left out changes with an attempt alone.
        changing = [last]
        for record in self.records:
            if record["kind"] == "start" and first <= record["step"] < last:
                changing.append(record["step"] + 1)
        drops = [with_recorded_drop(self.cfg, self.records, step).data.drop for step in changing]
        if any(drop != cfg.data.drop for drop in drops):
            raise UsageError(
                f"data.drop has changed between the steps {first} and {last} of {self.folder.name}\n"
                "  expected steps that were taken with the same shards: name fewer"
            )
        return cfg

    def start_of(self, step: int) -> Record:
        """Return the record of the start of the attempt whose step went on; an empty one where none is known."""
        reports = reports_of(self.records, step)
        starts = [record for record in self.records if record["kind"] == "start"]
        for start in reversed(starts):
            if not reports or start["attempt"] == reports[-1]["attempt"]:
                return start
        return {}

    def cluster(self, last: int, overrides: Sequence[str]) -> ClusterConfig:
        """Return what the steps up to `last` are taken again on: what is typed, and else what took them.

        Raises ConfigError, and UsageError where another number of workers would give other bits.
        """
        start = self.start_of(last)
        world = start.get("world", 1)
        for override in overrides:
            if not override.startswith("cluster."):
                raise UsageError(f"{override} is no key of the cluster\n  expected for example cluster.workers={world}")
        defaults = {"backend": "processes", "workers": world, "cpus_per_worker": start.get("threads", 1)}
        values = config.with_overrides({"cluster": defaults}, overrides)["cluster"]
        cluster = config.build(ClusterConfig, values, "cluster")
        if not self.cfg.exact_parts and (cluster.least, cluster.most) != (world, world):
            raise UsageError(
                f"step {last} of {self.folder.name} was taken by {world} workers, and cluster.workers is "
                f"{cluster.workers}: without exact_parts other numbers have other bits\n  type cluster.workers={world}"
            )
        return cluster

    def two_commits(self, first: int | None, last: int | None) -> tuple[int, int]:
        """Return two steps between which there is a stretch. Raises UsageError."""
        if first is None or last is None or first not in (0, *self.commits) or last not in self.commits:
            raise UsageError(f"--from {first} --to {last}: expected two commits of {self.listed_commits}")
        if first >= last:
            raise UsageError(f"--from {first} --to {last}: expected a later step behind --to")
        return first, last

    @property
    def listed_commits(self) -> str:
        """Return the steps of the newest commits, as messages have them."""
        return f"{self.folder.name}: {', '.join(map(str, [0, *self.commits][-12:]))}"

    def commit_before(self, step: int) -> int:
        """Return the newest commit from which a step, counted from 1, can be taken again; 0 for the first weights."""
        return max([commit for commit in self.commits if commit < step], default=0)


def recorded_stage(run: str) -> RecordedStage:
    """Return the trained stage that a path means: RUN/STAGE, its folder, or a run with one such stage.

    Raises UsageError where there is none, DataError where a record of it was altered.
    """
    if "://" in run:
        raise UsageError(
            f"replays take a folder, found {run}\n  copy the run to a disk first, with the store's own tools"
        )
    folder = Path(find_stage(str(Path(run).resolve()), artifacts.TASK, one_name=True)).resolve()
    if not (folder / artifacts.TASK).exists():
        raise UsageError(
            f"there is no trained stage in {run}\n  expected a run directory with one, or a stage's folder: RUN/STAGE"
        )
    task = artifacts.read_record(folder / artifacts.TASK)
    job = task["job"]
    cfg = config.build(TrainConfig, task["config"], "config")
    # "@shards/train" leads nowhere in the folder of a replay: the sets are those that the workers were told.
    sets = dict(zip(cfg.data.sets(), job["train"], strict=True))
    mixture = {name: dataclasses.replace(part, train=sets[name]) for name, part in cfg.data.mixture.items()}
    data = dataclasses.replace(cfg.data, train=sets.get("train"), mixture=mixture, evaluate=job["evaluate"])
    probe = dataclasses.replace(cfg.probe, train=job["probe_train"], test=job["probe_test"])
    cfg = dataclasses.replace(
        cfg,
        data=data,
        probe=probe,
        init=job["init"],
        evaluate_on="training",
        evaluate_every=0,
        keep_best=None,
        patience=0,
    )
    checkpoints = StageCheckpoints(Folder(folder.parent), folder.name)
    commits: dict[int, Path] = {}
    for name in reversed(checkpoints.committed()):
        commits[step_of(Path(name))] = checkpoints.local / name
    training_sets = [load_index(path) for path in job["train"]]
    return RecordedStage(
        folder=folder,
        cfg=cfg,
        job=job,
        record=artifacts.read_record(folder / "stage.json"),
        records=read_metrics(folder, None),
        commits=commits,
        sets=training_sets,
        steps=steps_of(cfg, sum(training_set.samples for training_set in training_sets)),
    )


def values_of(records: Sequence[Record]) -> dict[int, StepValues]:
    """Return what is on record of every step, of the attempt whose step went on."""
    values = {}
    for record in records:
        if record["kind"] != "train":
            continue
        for number, step in enumerate(steps_in(record)):
            trace = record["traces"][number] if "traces" in record else ()
            values[step] = StepValues(record["losses"][number], record["grad_norms"][number], trace, record["world"])
    return values


def commit_of(folder: Path, step: int) -> Path:
    """Return the newest commit of a step in the folder of a stage that has taken it again."""
    commits = [commit for commit in committed(folder / "checkpoints") if step_of(commit) == step]
    return commits[0]


def without_evaluation(cfg: TrainConfig) -> TrainConfig:
    """Return the config of a replay that saves its last step and nothing else."""
    return dataclasses.replace(
        cfg, save_every=NEVER, data=dataclasses.replace(cfg.data, evaluate=None), probe=ProbeConfig()
    )


def output_folder(stage: RecordedStage, command: str, named: str | None) -> Path:
    """Return where a command on a run writes: beside the run, and never into it. Raises UsageError."""
    run = stage.folder.parent
    folder = Path(named).resolve() if named else run.with_name(f"{run.name}-{command}")
    if folder.is_relative_to(run):
        raise UsageError(f"--output {folder} lies in the run that is looked at\n  expected another, as {run}-{command}")
    return folder


def take_again(
    stage: RecordedStage,
    cfg: TrainConfig,
    folder: Path,
    start: int,
    cluster: ClusterConfig,
    work: Work,
    *,
    quiet: bool,
) -> Path:
    """Run the stage from its commit of step `start` (0: from its first weights) in a run directory of its own.

    `work` is what its workers do: `training.run`, with the step to end with. What the folder holds already is gone on
    with. Returns the stage's folder in there; raises as a run does.
    """
    target = folder / stage.folder.name
    checkpoints = target / "checkpoints"
    if start and not checkpoints.exists():
        # Made under another name: a checkpoint is there whole, or not at all. Nobody writes into its files.
        source = stage.commits[start]
        staged = checkpoints / f".tmp-{source.name}-linked"
        try:
            shutil.copytree(source, staged, copy_function=os.link)
        except OSError:  # another disk, or one that knows no second names
            shutil.rmtree(staged, ignore_errors=True)
            shutil.copytree(source, staged)
        staged.rename(checkpoints / source.name)
    if (stage.folder / artifacts.EXCLUDED_STEPS).exists():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(stage.folder / artifacts.EXCLUDED_STEPS, target / artifacts.EXCLUDED_STEPS)

    def run(cfg: TrainConfig, context: Context) -> Mapping[str, Any]:
        return work(cfg, dataclasses.replace(context, class_names=tuple(stage.job["class_names"])))

    # The stage as it was: of the same name and key, and without the recipe in which its inputs had names.
    kind = dataclasses.replace(
        KINDS[stage.record["kind"]], run=run, inputs={}, checks=no_checks, shared_classes=lambda cfg: []
    )
    again = Stage(
        name=stage.record["name"],
        kind=kind,
        config=cfg,
        source=stage.record["name"],
        model=models.from_dict(stage.record["model"]),
        key=stage.record["key"],
    )
    run_campaign(Campaign(folder, cluster, (again,)), quiet=quiet)
    return target


def made_by(stage: RecordedStage) -> dict[str, Any]:
    """Return what a report of a replay says of the run that it looked at and of the code that looked."""
    return {
        "run": str(stage.folder.parent),
        "stage": stage.record["name"],
        "key": stage.record["key"],
        "code_of_run": stage.job["code"],
        "code": code_version(),
    }
