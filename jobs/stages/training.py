"""The pretrain and finetune stages: their checks, and the tasks sent to their workers.

1. `checks` checks a stage against the cluster and data, so that a stage that cannot finish does not start.
2. The supervisor runs attempts; `make_training_task` writes the task for each attempt's workers.
3. To stop, the driver sends a request to the agents. Rank 0 reads it after a step; all workers commit and exit.

An extra (`TrainingExtra`) can add recipe keys, checks, hooks in the training loop, and work before, during and after
training. The table of kinds in jobs/__main__.py lists the extras.
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
from data.reader import check_sizes
from jobs.cluster.supervisor import supervise
from jobs.cluster.worker import Task
from jobs.cluster_config import ClusterConfig, cores
from jobs.resolved_recipe import (
    Available,
    Campaign,
    CheckResult,
    Context,
    Reads,
    SharedClasses,
    Stage,
    StageKind,
)
from models import ModelConfig
from pipeline import artifacts, variables
from pipeline.architecture import check_model, check_shape, trained_model
from pipeline.config import require
from pipeline.engine.settings import engine_settings
from pipeline.hooks import HookOptions, compose, is_used, load_classes, plain_values
from pipeline.identity import code_version
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import ProbeConfig, TrainConfig
from pipeline.training_data import batch_arithmetic, check_end_of_decay, check_schedule, steps_of, training_order
from pipeline.values import counted


class Companion(Protocol):
    """A service that an extra runs in the driver during a stage's attempts, for example asynchronous evaluation."""

    def during_attempt(
        self, task: Task, attempt_folder: Path, cluster: ClusterConfig
    ) -> AbstractContextManager[object]:
        """Return a context manager that runs the service during an attempt."""

    def finish(self) -> None:
        """Finish the remaining work of the service after the stage's last attempt has succeeded."""


class TrainingExtra:
    """Base class for extras of training stages; its methods do nothing by default."""

    config: type[TrainConfig] | None = None  # subclass of TrainConfig with additional keys
    inputs: ClassVar[Mapping[str, Reads]] = {}  # additional inputs, as in StageKind
    hook = ""  # "module:Class" of a hook that the workers load if a key of `config` is used

    def hooks(self, cfg: TrainConfig, context: Context) -> HookOptions:
        """Return the training-loop hooks that the workers of the next attempt load, with the options of each hook."""
        if self.hook and self.config is not None and is_used(cfg, self.config):
            return {self.hook: {}}
        return {}

    def job_fields(self, cfg: TrainConfig, context: Context) -> Mapping[str, Any]:
        """Return additional fields for the workers' `Job`."""
        return {}

    def checks(self, stage: Stage, available: Available) -> Iterable[CheckResult]:
        """Check a stage before it runs: raise the first error, and yield warnings and other results."""
        return ()

    def ways_to_train_longer(self, stage: Stage, folder: Path, available: Available) -> Iterable[str]:
        """Return commands that train a stage for more steps, in the format of the method of StageKind."""
        return ()

    def before(self, cfg: TrainConfig, context: Context) -> None:
        """Do the extra's work before the first attempt, such as linking a checkpoint; the checks have passed."""

    def companion(self, cfg: TrainConfig, context: Context) -> Companion | None:
        """Return the service to run during the attempts, if any."""
        return None

    def after(self, cfg: TrainConfig, context: Context, outcome: dict[str, Any]) -> None:
        """Add results to the outcome (done.json) after training has finished."""

    def repeat_evaluation(
        self, campaign: Campaign, stage: Stage, changed: Collection[str]
    ) -> tuple[Collection[str], list[str]]:
        """Return evaluation settings, and commands to re-evaluate a finished stage if these settings have changed."""
        return (), []


class Training(StageKind):
    """Base class of the stage kinds that train a model."""

    inputs: Mapping[str, Reads] = {  # type: ignore[misc]  # extras add inputs per instance
        "data.train": Reads.SET,
        "data.mixture.*.train": Reads.SET,
        "data.evaluate": Reads.SET,
        "init": Reads.WEIGHTS,
        "probe.train": Reads.SET,
        "probe.test": Reads.SET,
    }
    own_defaults: ClassVar[Mapping[str, Any]] = {}  # defaults that differ from those of TrainConfig
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
        """Train to the last step, or to the step `until` (for replays).

        Raises Preempted if the stage was stopped, or StageFailed, with the worker's exit code, if it cannot continue.
        """
        # Imported here, as in every stage, because checking a recipe does not need torch (1 s to import).
        from pipeline.artifacts import EXCLUDED_STEPS
        from pipeline.checkpoints.saver import check_disk_space
        from pipeline.train import train

        campaign = context.campaign
        # 1. Log the excluded shards, check the disk space, and prepare the extras.
        if cfg.data.drop:
            indexes = [load_index(campaign.path_of(path)) for path in cfg.data.sets().values()]
            samples = sum(index.samples for index in indexes)
            dropped = samples - sum(index.samples for index in exclude(indexes, cfg.data.drop))
            context.log(
                f"data.drop: excluding {counted(len(cfg.data.drop), 'shard')} with {dropped:,} of {samples:,} samples",
            )
        check_disk_space(cfg, context.model, context.checkpoints)
        for extra in self.extras:
            extra.before(cfg, context)
        companions = list(filter(None, (extra.companion(cfg, context) for extra in self.extras)))

        # 2. Run attempts until one reaches the last step.
        outcome = supervise(
            train,
            partial(make_training_task, cfg, context, time.time(), self.extras, until=until),
            context,
            worlds=allowed_worlds(cfg, campaign.cluster),
            stall_s=cfg.stall_s,
            carried_files=(EXCLUDED_STEPS,),
            accompany=partial(accompany, companions),
        )
        # 3. Finish the extras' work; afterwards, all records are on this machine.
        for companion in companions:
            companion.finish()
        for extra in self.extras:
            extra.after(cfg, context, outcome)
        # Copy the weights to this machine, because rank 0 may have written them on another node.
        for name, record in outcome["files"].items():
            campaign.storage.ensure_local(f"{context.directory.name}/{name}", record["bytes"], record["sha256"])
        return outcome

    def repeat_evaluation(
        self, campaign: Campaign, stage: Stage, changed: Collection[str]
    ) -> tuple[Collection[str], list[str]]:
        """Return the evaluation settings, and the re-evaluation commands, reported by the extras."""
        fields: list[str] = []
        commands: list[str] = []
        for extra in self.extras:
            more_fields, more_commands = extra.repeat_evaluation(campaign, stage, changed)
            fields += more_fields
            commands += more_commands
        return fields, commands

    def ways_to_train_longer(self, stage: Stage, folder: Path, available: Available) -> Iterator[str]:
        """Yield the commands that the extras suggest to train a stage for more steps."""
        for extra in self.extras:
            yield from extra.ways_to_train_longer(stage, folder, available)

    def model(self, cfg: TrainConfig, source: ModelConfig | None) -> ModelConfig | None:
        """Return the architecture of the trained model; None if the initial weights are missing."""
        if cfg.init is None:
            return trained_model(cfg)
        if source is None:
            return None
        return trained_model(cfg, source)

    def keeps_head(self, cfg: TrainConfig, source: ModelConfig | None, model: ModelConfig | None) -> bool:
        """Return whether training keeps the head of its initial weights, in which case their class ids must match."""
        # If the weights are missing, their head is unknown, but the stage is validated again before it runs.
        if cfg.objective == "masked" or source is None or model is None:
            return False
        return models.keeps_head(source, model, cfg.new_head)

    def shared_classes(self, cfg: TrainConfig) -> list[SharedClasses]:
        """Return groups of data sets that must agree on class ids: the training and test sets, and the probe's sets."""
        probe_sets = classes_of_probe(cfg.probe)
        if cfg.objective == "masked":
            return [probe_sets]
        sets = {}
        for name, path in cfg.data.sets().items():
            field = "data.train"
            if cfg.data.mixture:
                field = f"data.mixture.{name}.train"
            sets[field] = path
        trained = tuple(sets)
        if cfg.data.evaluate is not None:
            sets["data.evaluate"] = cfg.data.evaluate
        return [SharedClasses(sets, with_head=cfg.init is not None, trained=trained), probe_sets]

    def metrics(self, cfg: TrainConfig) -> Iterator[str]:
        """Yield the names of the metrics that the finished stage reports."""
        if cfg.data.evaluate is not None:
            yield "accuracy"
        yield from metrics_of_probe(cfg.probe)

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Check a stage against the cluster, the data and the requirements of extras; yield warnings.

        Raises ConfigError or DataError if the stage cannot run.
        """
        yield from self.core_checks(stage, available)
        for extra in self.extras:
            yield from extra.checks(stage, available)

    def core_checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Check a stage against the cluster and its data: classes, image shapes, length of training.

        Data from an earlier stage may not exist yet; it is checked right before the stage starts. Raises ConfigError or
        DataError if the stage cannot run.
        """
        cfg: TrainConfig = stage.config
        name = stage.name
        has_sets = bool(cfg.data.train or cfg.data.mixture)
        require(
            has_sets,
            f"{name}.data.train is missing, so there are no images to train on\n"
            f"  set {name}.data.train=FOLDER (packed data set) or @STAGE/SET (from a pack stage), or use data.mixture",
        )
        cluster = available.campaign.cluster
        require(
            cfg.data.decode == "cpu" or cluster.gpus_per_worker > 0,
            f"{name}.data.decode is gpu, but cluster.gpus_per_worker is 0\n"
            f"  set {name}.data.decode=cpu, or cluster.gpus_per_worker=1",
        )
        if cluster.backend == "processes" and cluster.least * cluster.cpus_per_worker > cores():
            yield CheckResult(
                "WARN",
                name,
                f"{name}: {cluster.least} workers with {cluster.cpus_per_worker} CPUs each share {cores()} cores; "
                f"cluster.workers={max(cores() // cluster.cpus_per_worker, 1)} is faster and takes less memory",
            )
        paths = list(cfg.data.sets().values())
        # Check the batch size and the user's DeepSpeed file for all allowed numbers of workers.
        try:
            allowed_worlds(cfg, available.campaign.cluster)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

        # Check classes and image shapes. The model is unknown if the initial weights do not exist yet.
        classes: dict[str, int] = {}
        for path in paths:
            index = available.index(path)
            if index is not None and index.samples == 0:
                raise DataError(f"{name}: {path} has no samples\n  pack or index it again")
        if cfg.data.evaluate in paths:
            text = f"{name}: data.evaluate is also a training set, so the accuracy does not measure generalization"
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

        check_end_of_decay(cfg, name)
        steps = planned_steps(cfg, available)
        if steps is not None:
            check_schedule(cfg, steps, name)
            if steps == cfg.optim.schedule.warmup_steps:
                yield CheckResult(
                    "WARN",
                    name,
                    f"{name}: the warm-up is as long as the stage ({counted(steps, 'step')}), so the learning rate "
                    f"only reaches {(steps - 1) / steps:.0%} of optim.lr\n"
                    f"  set {name}.optim.schedule.warmup_steps={steps // 10}, or increase the number of steps",
                )

        if not available.checks_files:
            return
        # `data.drop` can be checked only if all training sets exist.
        sets = available.made(paths)
        if len(sets) == len(paths):
            needs_labels = cfg.objective != "masked"
            check_usable(exclude(sets, cfg.data.drop), cfg.data.drop, f"{name}.data.drop", needs_labels=needs_labels)
            try:
                training_order(cfg, sets)
            except ValueError as error:
                remedy = f"set {name}.data.tail=carry, or a smaller {name}.batch_size"
                raise ConfigError(
                    f"{name}: {error}\n  expected at least one batch from each data set\n  {remedy}"
                ) from None
        evaluated = {f"{name}.data": (cfg.data.evaluate, None), f"{name}.probe": (cfg.probe.test, cfg.probe.train)}
        check_evaluated(evaluated, available)


@contextmanager
def accompany(
    companions: Sequence[Companion], task: Task, attempt_folder: Path, cluster: ClusterConfig
) -> Iterator[None]:
    """Run the extras' services, such as asynchronous evaluation on a spare worker, during an attempt."""
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
    """Return the task for an attempt's workers, and write it to task.json for `jobs replay`.

    `began` is the time at which this command started the stage. Raises DataError if the initial weights have changed.
    """
    from pipeline.worker import Job

    campaign = context.campaign
    init = campaign.path_of(cfg.init)
    # Verify the initial weights, unless the attempt resumes from a checkpoint.
    if init is not None and not context.checkpoints.committed():
        artifacts.check_weights(Path(init), context.log)
    # Paths in a recipe are relative to the driver's working directory, but workers may have another one.
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
        # sorted like the names of the data sets
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
    # Send only the recipe keys of hooks that the workers load; they do not know others.
    values = plain_values(cfg, [hook.Config for hook in load_classes(hooks)])
    fields = dataclasses.asdict(job)
    # Do not replace environment variables in the paths of the run's folders, which contain this record.
    inputs = {name: value for name, value in fields.items() if name not in ("run", "directory", "remote")}
    record = {"config": variables.recorded(values), "job": fields | variables.recorded(inputs), "hooks": hooks}
    artifacts.write_record(context.directory / artifacts.TASK, record)
    return {"config": values, "job": fields, "hooks": hooks, "variables": variables.noted()}


# ------------------------------------------------------------------------ checks


def allowed_worlds(cfg: TrainConfig, cluster: ClusterConfig) -> tuple[int, ...]:
    """Return the numbers of workers with which a stage can train, largest first.

        batch_size 16, micro_batch 4, cluster.workers {least: 1, most: 8}  →  (4, 2, 1)

    Each attempt uses one of them; the global batch size is always the same. Raises ConfigError if the batch size or the
    DeepSpeed file allows no world size in the cluster's range; the message suggests the nearest possible ones.
    """
    worlds = [world for world in cluster.worlds if batch_fits(cfg, world)]
    # For a range, suggest the nearest possible sizes; for a single size, `batch_arithmetic` raises a better error.
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
            f"batch_size {cfg.batch_size} cannot be divided into micro-batches of {cfg.micro_batch}{parts} for any "
            f"number of workers from {cluster.least} to {cluster.most}\n"
            f"  set {' or '.join(remedies) or 'another batch_size or micro_batch'}"
        )

    # The DeepSpeed file may rule out some world sizes. Its settings depend only on the gradient accumulation.
    refusals: dict[int, ConfigError | None] = {}  # number of accumulated micro-batches → error
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
    """Return whether the batch can be divided among `world` workers."""
    try:
        batch_arithmetic(cfg, world)
    except ConfigError:
        return False
    return True


def classes_of_probe(probe: ProbeConfig) -> SharedClasses:
    """Return the training and test sets of a probe, which must agree on class ids."""
    sets: dict[str, str] = {}
    if probe.train is not None and probe.test is not None:  # ProbeConfig requires both or none
        sets = {"probe.train": probe.train, "probe.test": probe.test}
    return SharedClasses(sets)


def metrics_of_probe(probe: ProbeConfig) -> Iterator[str]:
    """Yield the names of a probe's metrics, such as "5shot"; yield nothing if the probe has no data sets."""
    if probe.train is not None:
        for shots in probe.shots:
            yield f"{shots}shot"


def check_max_labels(cfg: TrainConfig, index: Index, path: str, name: str) -> None:
    """Raise ConfigError if the mean number of labels per sample exceeds `data.max_labels`."""
    labels = sum(index.class_counts)
    if cfg.objective == "masked" or labels <= cfg.data.max_labels * index.samples:
        return
    # A list of k class ids takes 2k − 1 bytes or more.
    longest = max(int(index.table(number)["label_size"].max(initial=0)) for number in range(len(index.shards)))
    enough = min((longest + 1) // 2, index.classes)
    raise ConfigError(
        f"{name}: {path} has {labels:,} labels for {index.samples:,} samples, but data.max_labels is "
        f"{cfg.data.max_labels}\n  expected at least the largest number of labels that any sample has\n"
        f"  set {name}.data.max_labels={enough}"
    )


def check_usable(
    sets: Sequence[Index], dropped: Collection[str] = (), option: str = "", *, needs_labels: bool = True
) -> None:
    """Raise DataError if a data set is empty or unlabelled, or if its shards are missing or have the wrong size.

    `needs_labels` is False for objectives without labels. See `check_sizes` for `dropped` and `option`.
    """
    for index in sets:
        if index.samples == 0 or (needs_labels and index.classes == 0):
            raise DataError(
                f"{index.tables} is unusable: it has {index.samples} samples and {index.classes} classes\n"
                "  data.drop may exclude all shards, or labels may be missing: run python -m jobs data check FOLDER\n"
                "  to train on images without labels, use objective: masked; python -m jobs new FOLDER writes a recipe"
            )
    # This reports missing and truncated shards; the content of a shard is verified when it is first read.
    check_sizes(sets, tuple(dropped), option)


def check_evaluated(sets: Mapping[str, tuple[str | None, str | None]], available: Available) -> None:
    """Raise DataError if a test set is unusable, or is identical to its training set.

    `sets` maps a key of the recipe to (test set, training set); each may be None.
    """
    for key, (test, train) in sets.items():
        indexes = available.made([value for value in (test, train) if value is not None])
        check_usable(indexes)
        if len(indexes) == 2 and indexes[0].digest == indexes[1].digest:
            raise DataError(
                f"{key}: test {test} and train {train} are the same data set (digest {indexes[0].digest[:12]})\n"
                "  expected a training set without samples of the test set\n"
                f"  use another {key}.train; to hold out a part of a data set, see python -m jobs subset --help"
            )


def planned_steps(cfg: TrainConfig, available: Available) -> int | None:
    """Return a stage's number of steps; None if its length is given in passes over data of unknown size."""
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
    """Fine-tuning on another data set with a new head (paper, B.1.1 and table 4)."""

    name = "finetune"
    own_defaults: ClassVar = {
        "new_head": True,  # remove all layers of the pretraining head (paper, 3.1 and B.1.1)
        "optim": OptimConfig(
            name="sgd",
            lr=0.03,  # from the grid 0.003, 0.01, 0.03, 0.06 (paper, table 4)
            weight_decay=0.0,
            schedule=ScheduleConfig(decay="cosine", warmup_steps=500),  # vit_jax configs/common.py
        ),
        "loss": "softmax",
        "steps": 20_000,  # ImageNet (paper, table 4)
        "batch_size": 512,
    }
