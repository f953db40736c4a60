"""The stages pretrain and finetune: their checks, the tasks of their workers, and how they stop.

1. `checks` compares a stage with the cluster and its data: a stage that could not be evaluated or saved must not begin.
2. The supervisor runs attempts; for each of them `make_training_task` writes the task of its workers.
3. To stop, the driver sends a request to the agents; rank 0 reads it at the end of a step, and all workers commit and
   end.

An extra of training (`TrainingExtra`) adds recipe keys, checks, hooks of the loop, and work before, during and after.
The table of kinds names extras as text.
"""

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import models
from data.errors import ConfigError, DataError
from data.index.document import load_index
from data.index.index import Index, exclude
from data.shards.reader import check_sizes
from jobs.cluster.supervisor import supervise
from jobs.cluster.worker import Task
from jobs.cluster_config import ClusterConfig, cores
from jobs.resolved_recipe import (
    Available,
    CheckResult,
    Context,
    Reads,
    SharedClasses,
    SourceModel,
    Stage,
    StageKind,
)
from models import ModelConfig
from pipeline import artifacts
from pipeline.architecture import check_model, check_shape, trained_model
from pipeline.config import require
from pipeline.engine.settings import engine_settings
from pipeline.hooks import HookOptions, compose, is_used, load_classes, plain_values
from pipeline.identity import code_version
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import ProbeConfig, TrainConfig
from pipeline.training_data import batch_arithmetic, check_schedule, steps_of


class Companion(Protocol):
    """Works during the attempts of a stage."""

    def during_attempt(
        self, task: Task, attempt_folder: Path, cluster: ClusterConfig
    ) -> AbstractContextManager[object]:
        """Return what works during an attempt, and ends with it."""

    def finish(self) -> None:
        """Finish the work after the last attempt, which has succeeded."""


class TrainingExtra:
    """An extra of the stages that train; each method does nothing by default."""

    config: type[TrainConfig] | None = None  # adds keys to those of TrainConfig
    inputs: ClassVar[Mapping[str, Reads]] = {}  # as StageKind's
    hook = ""  # "module:Class" that the workers load if a key of `config` is used

    def hooks(self, cfg: TrainConfig, context: Context) -> HookOptions:
        """Return the hooks that the workers of the next attempt load, with their options."""
        if self.hook and self.config is not None and is_used(cfg, self.config):
            return {self.hook: {}}
        return {}

    def job_fields(self, cfg: TrainConfig, context: Context) -> Mapping[str, Any]:
        """Return fields of the workers' Job that this extra knows."""
        return {}

    def checks(self, stage: Stage, available: Available) -> Iterable[CheckResult]:
        """Check a stage before it runs: raise for errors, yield all other results."""
        return ()

    def before(self, cfg: TrainConfig, context: Context) -> None:
        """Prepare a stage, whose checks have passed."""

    def companion(self, cfg: TrainConfig, context: Context) -> Companion | None:
        """Return what works during the attempts; None if nothing does."""
        return None

    def after(self, cfg: TrainConfig, context: Context, outcome: dict[str, Any]) -> None:
        """Add to the outcome of a stage that has trained to its end."""


class Training(StageKind):
    """What the kinds of stages that train a model have in common."""

    inputs: Mapping[str, Reads] = {  # type: ignore[misc]  # extras add theirs
        "data.train": Reads.SET,
        "data.mixture.*.train": Reads.SET,
        "data.evaluate": Reads.SET,
        "init": Reads.WEIGHTS,
        "probe.train": Reads.SET,
        "probe.test": Reads.SET,
    }
    own_defaults: ClassVar[Mapping[str, Any]] = {}  # that differ from those of TrainConfig
    files = ("deepspeed",)
    makes_weights = True
    trains = True

    def __init__(self, extras: Sequence[TrainingExtra] = ()) -> None:
        self.extras = tuple(extras)
        self.config = compose(*(extra.config for extra in extras if extra.config is not None))
        if self.own_defaults:
            self.defaults = self.config(**self.own_defaults)
        for extra in extras:
            self.inputs = {**self.inputs, **extra.inputs}

    def run(self, cfg: TrainConfig, context: Context, *, until: int | None = None) -> dict[str, object]:
        """Train until the stage is done; its sets have been checked. A replay ends with the step `until`.

        Raises Preempted, or StageFailed with the exit code that the worker wanted.
        """
        # Imported here and not above, as in every stage: a recipe is checked without torch, which takes a second.
        from pipeline.artifacts import EXCLUDED_STEPS
        from pipeline.checkpoints.saver import check_disk_space
        from pipeline.train import train

        campaign = context.campaign
        # 1. What is excluded, and whether there is room for what is to come.
        if cfg.data.drop:
            whole_sets = [load_index(campaign.path_of(path)) for path in cfg.data.sets().values()]
            samples = sum(index.samples for index in whole_sets)
            dropped = samples - sum(index.samples for index in exclude(whole_sets, cfg.data.drop))
            context.log(
                f"data.drop: {len(cfg.data.drop)} shards, {dropped:,} of {samples:,} samples, are not read",
            )
        check_disk_space(cfg, context.model, context.checkpoints)
        for extra in self.extras:
            extra.before(cfg, context)
        companions = list(filter(None, (extra.companion(cfg, context) for extra in self.extras)))

        # 2. Attempts, until one has taken all steps.
        outcome = supervise(
            train,
            partial(make_training_task, cfg, context, time.time(), self.extras, until=until),
            context,
            worlds=allowed_worlds(cfg, campaign.cluster),
            stall_s=cfg.stall_s,
            carried_files=(EXCLUDED_STEPS,),
            accompany=partial(accompany, companions),
        )
        # 3. What was done during training is finished; the records are all here from then on.
        for companion in companions:
            companion.finish()
        for extra in self.extras:
            extra.after(cfg, context, outcome)
        # Rank 0 may have worked on another node: the weights that it has written are brought here.
        for name, record in outcome["files"].items():
            campaign.storage.ensure_local(f"{context.directory.name}/{name}", record["bytes"], record["sha256"])
        return outcome

    def model(self, cfg: TrainConfig, source_model: SourceModel) -> ModelConfig | None:
        """Return the architecture that training ends with; None where the weights that it starts from are missing."""
        if cfg.init is None:
            return trained_model(cfg)
        source = source_model(cfg.init)
        if source is None:
            return None
        return trained_model(cfg, source)

    def keeps_head(self, cfg: TrainConfig, source: ModelConfig | None, model: ModelConfig | None) -> bool:
        """Return whether training goes on with the head of its weights, so that its sets must be numbered as theirs."""
        # Of weights that are missing nothing is known; the stage is validated once more before it runs.
        if cfg.objective == "masked" or source is None or model is None:
            return False
        return models.keeps_head(source, model, cfg.new_head)

    def shared_classes(self, cfg: TrainConfig) -> list[SharedClasses]:
        """Return the sets whose labels the head must know, and those of the probe."""
        probed = classes_of_probe(cfg.probe)
        if cfg.objective == "masked":
            return [probed]
        sets = {}
        for name, path in cfg.data.sets().items():
            field = "data.train"
            if cfg.data.mixture:
                field = f"data.mixture.{name}.train"
            sets[field] = path
        trained = tuple(sets)
        if cfg.data.evaluate is not None:
            sets["data.evaluate"] = cfg.data.evaluate
        return [SharedClasses(sets, with_head=cfg.init is not None, trained=trained), probed]

    def metrics(self, cfg: TrainConfig) -> Iterator[str]:
        """Iterate the names of the metrics that a trained stage will have in the end."""
        if cfg.data.evaluate is not None:
            yield "accuracy"
        yield from metrics_of_probe(cfg.probe)

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Refuse a stage that does not fit the cluster, its data, or what an extra requires.

        Raises ConfigError and DataError; yields warnings.
        """
        yield from self.core_checks(stage, available)
        for extra in self.extras:
            yield from extra.checks(stage, available)

    def core_checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Refuse a stage that does not fit the cluster or its data: classes, image shapes, length of training.

        Data that an earlier stage makes may not be there yet: it is compared when the stage is about to start. Raises
        ConfigError and DataError.
        """
        cfg: TrainConfig = stage.config
        name = stage.name
        has_sets = bool(cfg.data.train or cfg.data.mixture)
        require(
            has_sets,
            f"{name}.data.train is missing: the images to train on\n"
            f"  type {name}.data.train=FOLDER of a set, or @STAGE/SET that a pack stage makes; or give data.mixture",
        )
        cluster = available.campaign.cluster
        require(
            cfg.data.decode == "cpu" or cluster.gpus_per_worker > 0,
            f"{name}.data.decode is gpu, and cluster.gpus_per_worker is 0\n"
            f"  type {name}.data.decode=cpu, or cluster.gpus_per_worker=1",
        )
        if cluster.backend == "processes" and cluster.least * cluster.cpus_per_worker > cores():
            yield CheckResult(
                "WARN",
                name,
                f"{name}: {cluster.least} workers of {cluster.cpus_per_worker} CPUs take turns on {cores()} cores, "
                "each with the whole model in memory; "
                f"cluster.workers={max(cores() // cluster.cpus_per_worker, 1)} is faster",
            )
        paths = list(cfg.data.sets().values())
        # The batch on every number of workers that the cluster allows; this also checks the user's DeepSpeed file.
        try:
            allowed_worlds(cfg, available.campaign.cluster)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

        # Classes and image shapes. The model is not known where the weights that it starts from do not exist.
        classes: dict[str, int] = {}
        for path in paths:
            index = available.index(path)
            if index is not None and index.samples == 0:
                raise DataError(f"{name}: {path} holds no samples\n  expected some: pack or index it again")
        if cfg.data.evaluate in paths:
            text = f"{name}: data.evaluate is a set that is trained on: its accuracy says nothing of other images"
            yield CheckResult("WARN", name, text)
        is_evaluated = cfg.data.evaluate is not None or cfg.probe.train is not None
        for path in [*paths, *([cfg.data.evaluate] if cfg.data.evaluate is not None else [])]:
            number = available.classes(path)
            if number is not None:
                classes[path] = number
            index = available.index(path)
            if index is not None:
                check_max_labels(cfg, index, path, name)
        if stage.model is not None:
            check_model(cfg, stage.model, classes, f"{name}.model")
        if stage.model is not None and is_evaluated:
            check_shape(cfg.data.preprocess, stage.model, f"{name}.data.preprocess")

        steps = planned_steps(cfg, available)
        if steps is not None:
            check_schedule(cfg, steps, name)

        if not available.checks_files:
            return
        # Which shard `data.drop` means is known when all of them are there.
        sets = available.made(paths)
        if len(sets) == len(paths):
            needs_labels = cfg.objective != "masked"
            check_usable(exclude(sets, cfg.data.drop), cfg.data.drop, f"{name}.data.drop", needs_labels=needs_labels)
        evaluated = {f"{name}.data": (cfg.data.evaluate, None), f"{name}.probe": (cfg.probe.test, cfg.probe.train)}
        check_evaluated(evaluated, available)


@contextmanager
def accompany(
    companions: Sequence[Companion], task: Task, attempt_folder: Path, cluster: ClusterConfig
) -> Iterator[None]:
    """Have all companions work during an attempt."""
    with ExitStack() as stack:
        for companion in companions:
            stack.enter_context(companion.during_attempt(task, attempt_folder, cluster))
        yield


def make_training_task(
    cfg: TrainConfig,
    context: Context,
    began: float,
    extras: Sequence[TrainingExtra],
    attempt: int,
    *,
    until: int | None = None,
) -> Task:
    """Return the task of an attempt's workers, and leave it in task.json, from which `jobs replay` starts.

    `began` is the time at which this command has begun to work on the stage. Raises DataError if the weights that the
    attempt starts from have changed.
    """
    from pipeline.worker import Job

    campaign = context.campaign
    init = campaign.path_of(cfg.init)
    # An attempt that resumes from a checkpoint does not read them. Every one that does is preceded by a check.
    if init is not None and not context.checkpoints.committed():
        artifacts.check_weights(Path(init), context.log)
    # Workers live in other folders than the driver, to which a path in a recipe is relative.
    cfg = dataclasses.replace(cfg, deepspeed=campaign.path_of(cfg.deepspeed))
    hooks: dict[str, Mapping[str, Any]] = {}
    job_fields: dict[str, Any] = {}
    for extra in extras:
        hooks |= extra.hooks(cfg, context)
        job_fields |= extra.job_fields(cfg, context)
    job = Job(
        run=str(campaign.run),
        directory=str(context.directory),
        attempt=attempt,
        key=context.stage.key,
        code=code_version(),
        model=models.to_dict(context.model),
        # In the order of the sets' names.
        train=list(map(campaign.path_of, cfg.data.sets().values())),
        evaluate=campaign.path_of(cfg.data.evaluate),
        init=init,
        probe_train=campaign.path_of(cfg.probe.train),
        probe_test=campaign.path_of(cfg.probe.test),
        class_names=context.class_names,
        claimed=time.time(),
        began=began,
        remote=campaign.remote,
        until=until,
        **job_fields,
    )
    # Workers know the keys of the hooks that they load, and no others.
    values = plain_values(cfg, [hook.Config for hook in load_classes(hooks)])
    task = {"config": values, "job": dataclasses.asdict(job), "hooks": hooks}
    artifacts.write_record(context.directory / artifacts.TASK, task)
    return task


# ------------------------------------------------------------------------ what is known before it runs


def allowed_worlds(cfg: TrainConfig, cluster: ClusterConfig) -> tuple[int, ...]:
    """Return the worlds on which a stage may train, the largest first; there is one at least.

        batch_size 16, micro_batch 4, cluster.workers {least: 1, most: 8}  →  (4, 2, 1)

    The supervisor takes one of them at each attempt, and the batch is the same for all. Raises ConfigError if the
    stage's batch or its DeepSpeed file allows none, with the nearest that it allows.
    """
    worlds = [world for world in cluster.worlds if batch_fits(cfg, world)]
    # Of a range without any the nearest below and above are named. Of a single number the batch's message says more.
    if not worlds and cluster.least < cluster.most:
        remedies = []
        for world in range(cluster.least - 1, 0, -1):
            if batch_fits(cfg, world):
                remedies.append(f"cluster.workers.least={world}")
                break
        largest = cfg.batch_size if cfg.uneven else cfg.batch_size // cfg.micro_batch
        for world in range(cluster.most + 1, largest + 1):
            if batch_fits(cfg, world):
                remedies.append(f"cluster.workers.most={world}")
                break
        parts = f" and exact_parts of {cfg.exact_parts}" if cfg.exact_parts else ""
        raise ConfigError(
            f"no number of workers from {cluster.least} to {cluster.most} can share batch_size {cfg.batch_size} "
            f"in micro-batches of {cfg.micro_batch}{parts}\n"
            f"  type {' or '.join(remedies) or 'another batch_size or micro_batch'}"
        )

    # The stage's DeepSpeed file may refuse some of them. Its settings depend on the accumulation alone.
    refusals: dict[int, ConfigError | None] = {}  # by accumulation
    allowed = []
    for world in worlds or [cluster.most]:
        accumulation = batch_arithmetic(cfg, world).accumulation
        if accumulation not in refusals:
            refusals[accumulation] = None
            try:
                engine_settings(cfg, accumulation)
            except ConfigError as error:
                refusals[accumulation] = error
        if refusals[accumulation] is None:
            allowed.append(world)
    for refusal in refusals.values():
        if not allowed and refusal is not None:
            raise refusal
    return tuple(allowed)


def batch_fits(cfg: TrainConfig, world: int) -> bool:
    """Tell whether the batch can be shared by so many workers."""
    try:
        batch_arithmetic(cfg, world)
    except ConfigError:
        return False
    return True


def classes_of_probe(probe: ProbeConfig) -> SharedClasses:
    """Return the two sets of a probe, which share their classes with nothing else."""
    sets: dict[str, str] = {}
    if probe.train is not None and probe.test is not None:  # ProbeConfig takes both or neither
        sets = {"probe.train": probe.train, "probe.test": probe.test}
    return SharedClasses(sets)


def metrics_of_probe(probe: ProbeConfig) -> Iterator[str]:
    """Iterate the names of the metrics that a probe gives; none without its sets."""
    if probe.train is not None:
        for shots in probe.shots:
            yield f"{shots}shot"


def check_max_labels(cfg: TrainConfig, index: Index, path: str, name: str) -> None:
    """Raise ConfigError where samples of a set have more labels in the mean than the recipe says at most."""
    labels = sum(index.class_counts)
    if cfg.objective == "masked" or labels <= cfg.data.max_labels * index.samples:
        return
    # A list of k class ids takes 2k − 1 bytes or more.
    longest = max(int(index.table(number)["label_size"].max(initial=0)) for number in range(len(index.shards)))
    enough = min((longest + 1) // 2, index.classes)
    raise ConfigError(
        f"{name}: {path} has {labels:,} labels on {index.samples:,} samples, data.max_labels is {cfg.data.max_labels}\n"
        f"  expected as many as the sample with the most has\n  type {name}.data.max_labels={enough}, which is enough"
    )


def check_usable(
    sets: Sequence[Index], dropped: Collection[str] = (), option: str = "", *, needs_labels: bool = True
) -> None:
    """Raise DataError where a set is empty, lacks labels, or has shards of another size than its index says.

    Whether it `needs_labels` is the stage's. `dropped` and `option` are those of `check_sizes`.
    """
    for index in sets:
        if index.samples == 0 or (needs_labels and index.classes == 0):
            raise DataError(
                f"{index.tables}: {index.samples} samples, {index.classes} classes: nothing to learn or to judge\n"
                "  `python -m jobs data check` says why; labels may be missing, or data.drop may name all shards\n"
                "  images without labels train with objective: masked; `python -m jobs new FOLDER` writes such a recipe"
            )
    # A shard that is missing or cut short stops the stage here; its content is checked when it is first read.
    check_sizes(sets, tuple(dropped), option)


def check_evaluated(sets: Mapping[str, tuple[str | None, str | None]], available: Available) -> None:
    """Raise DataError where a set to evaluate on cannot be used, or is the very set that a protocol learns from.

    `sets` are (test, train) by the key of both in the recipe; None where there is no such set.
    """
    for key, (test, learned) in sets.items():
        indexes = available.made([value for value in (test, learned) if value is not None])
        check_usable(indexes)
        if len(indexes) == 2 and indexes[0].digest == indexes[1].digest:
            raise DataError(
                f"{key}: test {test} and train {learned} are the same set, digest {indexes[0].digest[:12]}\n"
                "  expected a training set that shares no sample with the test set\n"
                f"  give another {key}.train; `python -m jobs subset` holds out a part of a set"
            )


def planned_steps(cfg: TrainConfig, available: Available) -> int | None:
    """Return the steps of a stage; None if it makes passes over sets that are not there and of unknown size."""
    samples = cfg.data.samples
    sets = available.made(cfg.data.sets().values())
    if len(sets) == len(cfg.data.sets()):
        samples = sum(index.samples for index in sets)
    if cfg.steps is None and samples is None:
        return None
    return steps_of(cfg, samples or 0)


class Pretrain(Training):
    """Training from random weights (paper, section 4.1)."""

    name = "pretrain"
    own_defaults: ClassVar = {"passes": 7}  # over JFT-300M (paper, table 3)


class Finetune(Training):
    """Training on another set, with a new head (paper, B.1.1 and table 4)."""

    name = "finetune"
    own_defaults: ClassVar = {
        "new_head": True,  # all layers of the pretraining head go (paper, 3.1 and B.1.1)
        "optim": OptimConfig(
            name="sgd",
            lr=0.03,  # of the grid 0.003, 0.01, 0.03, 0.06 (paper, table 4)
            weight_decay=0.0,
            schedule=ScheduleConfig(decay="cosine", warmup_steps=500),  # vit_jax configs/common.py
        ),
        "loss": "softmax",
        "steps": 20_000,  # ImageNet (paper, table 4)
        "batch_size": 512,
    }
