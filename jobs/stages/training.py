"""The stages pretrain and finetune: their checks, the tasks of their workers, and how they stop.

1. `checks` compares a stage with the cluster, the data and the memory that there are: a stage that could not be
   evaluated or saved must not begin.
2. The supervisor runs attempts; for each of them `make_training_task` writes the task of its workers.
3. To stop, the driver sends a request to the agents; rank 0 reads it at the end of a step, and all workers commit and
   end.
"""

import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import models
from data.errors import ConfigError, DataError
from data.index.document import load_index
from data.index.index import Index, exclude
from data.shards.reader import check_sizes
from jobs.cluster.supervisor import supervise
from jobs.cluster.worker import Task
from jobs.cluster_config import cores
from jobs.extras.studies.law import branch_off, check_branch, check_law, foretell, planned_steps
from jobs.resolved_recipe import (
    MEMORY,
    Available,
    CheckResult,
    Context,
    Reads,
    SharedClasses,
    SourceModel,
    Stage,
    StageKind,
)
from jobs.worlds import allowed_worlds
from models import ModelConfig
from models.checks import did_you_mean
from pipeline import artifacts, config
from pipeline.artifacts import STOPPED
from pipeline.config import require
from pipeline.evaluation.protocols import ProbeConfig, check_shape
from pipeline.extras.best import Foretold
from pipeline.monitoring.telemetry import read_metrics
from pipeline.optimization import OptimConfig, ScheduleConfig
from pipeline.training_config import TrainConfig, check_model, check_schedule, trained_model
from pipeline.versions import code_version


class Training(StageKind):
    """What the kinds of stages that train a model have in common."""

    config = TrainConfig
    inputs: ClassVar = {
        "data.train": Reads.SET,
        "data.mixture.*.train": Reads.SET,
        "data.evaluate": Reads.SET,
        "init": Reads.WEIGHTS,
        "law": Reads.FILE,
        "probe.train": Reads.SET,
        "probe.test": Reads.SET,
    }
    files = ("deepspeed",)
    makes_weights = True
    trains = True

    def run(
        self, cfg: TrainConfig, context: Context, *, until: int | None = None, masked: Sequence[Sequence[int]] = ()
    ) -> dict[str, object]:
        """Train until the stage is done; its sets have been checked.

        A replay (jobs/extras/replays) ends with the step `until`, and does without `masked` samples, as `start.Job` has
        them. Raises Preempted, or StageFailed with the exit code that the worker wanted.
        """
        # Imported here and not above, as in every stage: a recipe is checked without torch, which takes a second.
        from jobs.extras.async_evaluation.spare_worker import SpareWorker
        from pipeline.checkpoints.saver import check_disk_space
        from pipeline.extras.best import best_of, evaluations_of
        from pipeline.health import EXCLUDED_STEPS
        from pipeline.train import train

        campaign = context.campaign
        # 1. What is left out, and whether there is room for what is to come.
        if cfg.data.drop:
            whole_sets = [load_index(campaign.path_of(path)) for path in cfg.data.sets().values()]
            samples = sum(index.samples for index in whole_sets)
            dropped = samples - sum(index.samples for index in exclude(whole_sets, cfg.data.drop))
            context.log(
                f"data.drop: {len(cfg.data.drop)} shards, {dropped:,} of {samples:,} samples, are not read",
            )
        check_disk_space(cfg, context.model, context.checkpoints)
        if cfg.begin is not None and not context.checkpoints.committed():
            branch_off(cfg, cfg.begin, context)
        foretold: Foretold | None = None
        if cfg.law is not None:
            foretold = foretell(cfg, context)

        # 2. Evaluate checkpoints and search spikes during training if the recipe says so and checkpoints can be read.
        spare: SpareWorker | None = None
        is_evaluated_beside = (
            cfg.evaluate_on == "spare" and cfg.evaluate_every and (cfg.data.evaluate or cfg.probe.train)
        )
        if is_evaluated_beside or cfg.health.on_spike == "bisect":
            if campaign.storage.is_shared:
                spare = SpareWorker(cfg, context)
            else:
                context.log(
                    f"{context.stage.name}: evaluate_on=spare and health.on_spike=bisect read checkpoints in a shared "
                    "folder; here they are in a store"
                )

        # 3. Attempts, until one has taken all steps.
        outcome = supervise(
            train,
            partial(make_training_task, cfg, context, time.time(), until=until, masked=masked, foretold=foretold),
            context,
            worlds=allowed_worlds(cfg, campaign.cluster),
            stall_s=cfg.stall_s,
            handed_on=(EXCLUDED_STEPS,),
            accompany=None if spare is None else spare.beside,
        )
        if spare is not None:
            spare.finish()
        # The records are all here now, also those of evaluations beside training.
        outcome["best"] = best_of(evaluations_of(read_metrics(context.directory, None)))
        if foretold is not None and STOPPED not in outcome:
            outcome["foretold"] = foretold.score(outcome["step"], outcome["metrics"], context.log)
        # Rank 0 may have worked on another node: what it has handed on is brought here.
        for name, record in outcome["files"].items():
            campaign.storage.bring(f"{context.directory.name}/{name}", record["bytes"], record["sha256"])
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

    def checks(self, stage: Stage, there: Available) -> Iterator[CheckResult]:
        """Refuse a stage that does not fit the cluster or its data: classes, image shapes, length of training.

        Data that an earlier stage makes may not be there yet: it is compared when the stage is about to start. Raises
        ConfigError and DataError; yields a warning where its need of memory is not known.
        """
        cfg: TrainConfig = stage.config
        name = stage.name
        has_sets = bool(cfg.data.train or cfg.data.mixture)
        require(
            has_sets,
            f"{name}.data.train is missing: the images to train on\n"
            f"  type {name}.data.train=FOLDER of a set, or @STAGE/SET that a pack stage makes; or give data.mixture",
        )
        cluster = there.campaign.cluster
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
            worlds = allowed_worlds(cfg, there.campaign.cluster)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

        if cfg.keep_best is not None:
            metrics = list(self.metrics(cfg))
            require(
                cfg.keep_best in metrics,
                f"{name}.keep_best is {cfg.keep_best}, which its evaluations will not have"
                f"{did_you_mean(cfg.keep_best, metrics)}\n  expected one of {', '.join(metrics) or 'none'}\n"
                "  data.evaluate gives accuracy, probe gives 1shot, 5shot and so on",
            )
            require(
                there.campaign.remote is None,
                f"{name}.keep_best reads the records of all attempts, and {there.campaign.remote} is no shared folder\n"
                f"  leave it out: {name}.keep_best=null",
            )

        # Classes and image shapes. The model is not known where the weights that it starts from do not exist.
        classes: dict[str, int] = {}
        for path in paths:
            index = there.index(path)
            if index is not None and index.samples == 0:
                raise DataError(f"{name}: {path} holds no samples\n  expected some: pack or index it again")
        if cfg.data.evaluate in paths:
            text = f"{name}: data.evaluate is a set that is trained on: its accuracy says nothing of other images"
            yield CheckResult("WARN", name, text)
        is_evaluated = cfg.data.evaluate is not None or cfg.probe.train is not None
        for path in [*paths, *([cfg.data.evaluate] if cfg.data.evaluate is not None else [])]:
            number = there.classes(path)
            if number is not None:
                classes[path] = number
            index = there.index(path)
            if index is not None:
                check_max_labels(cfg, index, path, name)
        if stage.model is not None:
            check_model(cfg, stage.model, classes, f"{name}.model")
        if stage.model is not None and is_evaluated:
            check_shape(cfg.data.preprocess, stage.model, f"{name}.data.preprocess")

        steps = planned_steps(cfg, there)
        if steps is not None:
            check_schedule(cfg, steps, name)
        if cfg.begin is not None:
            check_branch(stage, there)
        if cfg.law is not None:
            check_law(stage, there)

        if not there.looks_at_files:
            return
        # Which shard `data.drop` means is known when all of them are there.
        sets = there.made(paths)
        if len(sets) == len(paths):
            needs_labels = cfg.objective != "masked"
            check_usable(exclude(sets, cfg.data.drop), cfg.data.drop, f"{name}.data.drop", needs_labels=needs_labels)
        evaluated = {f"{name}.data": (cfg.data.evaluate, None), f"{name}.probe": (cfg.probe.test, cfg.probe.train)}
        check_evaluated(evaluated, there)
        if stage.model is not None:
            # What a worker needs is the most where the workers are the fewest.
            try:
                yield from check_memory(stage, there, worlds[-1])
            except ConfigError as error:
                yield CheckResult.of(error, MEMORY)


def make_training_task(
    cfg: TrainConfig,
    context: Context,
    began: float,
    attempt: int,
    *,
    until: int | None = None,
    masked: Sequence[Sequence[int]] = (),
    foretold: Foretold | None = None,
) -> Task:
    """Return the task of an attempt's workers, and leave it in task.json, from which `jobs replay` starts.

    `began` is the time at which this command has begun to work on the stage.

    Raises DataError where the weights that the attempt starts from have changed.
    """
    from pipeline.extras.plan.memory import need_if_traced, with_blocks
    from pipeline.start import Job

    campaign = context.campaign
    is_gpu = campaign.cluster.gpus_per_worker > 0
    init = campaign.path_of(cfg.init)
    # An attempt that resumes from a checkpoint does not read them. Every one that does is preceded by a check.
    if init is not None and not context.checkpoints.committed():
        artifacts.check_weights(Path(init), context.log)
    # Workers live in other folders than the driver, to which a path in a recipe is relative.
    cfg = dataclasses.replace(cfg, deepspeed=campaign.path_of(cfg.deepspeed))
    # A budget for activations becomes a number of blocks here, once: workers of other nodes need not trace a step.
    cfg = with_blocks(cfg, context.model, is_gpu=is_gpu)

    # What a worker needs of its device's memory, where a plan has traced such a step: a run does not wait for a trace.
    # Where the recipe leaves the number of workers open, this is the need of the most that it allows: each then needs
    # the least, and no start is refused for a world that it does not have. What is traced is of whole images: a stage
    # that never sees them needs less.
    device_bytes: int | None = None
    if cfg.thinning.has_whole_images:
        most_workers = allowed_worlds(cfg, campaign.cluster)[0]
        need = need_if_traced(cfg, context.model, most_workers, is_gpu=is_gpu)
        if need is not None:
            device_bytes = need.device_bytes
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
        device_bytes=device_bytes,
        until=until,
        masked=masked,
        foretold=None if foretold is None else dataclasses.asdict(foretold),
    )
    task = {"config": config.plain(cfg), "job": dataclasses.asdict(job)}
    artifacts.write_record(context.directory / artifacts.TASK, task)
    return task


# ------------------------------------------------------------------------ what is known before it runs


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


def check_evaluated(sets: Mapping[str, tuple[str | None, str | None]], there: Available) -> None:
    """Raise DataError where a set to evaluate on cannot be used, or is the very set that a protocol learns from.

    `sets` are (test, train) by the key of both in the recipe; None where there is no such set.
    """
    for key, (test, learned) in sets.items():
        indexes = there.made([value for value in (test, learned) if value is not None])
        check_usable(indexes)
        if len(indexes) == 2 and indexes[0].digest == indexes[1].digest:
            raise DataError(
                f"{key}: test {test} and train {learned} are the same set, digest {indexes[0].digest[:12]}\n"
                "  expected a training set that shares no sample with the test set\n"
                f"  give another {key}.train; `python -m jobs subset` holds out a part of a set"
            )


def check_memory(stage: Stage, there: Available, fewest: int) -> Iterator[CheckResult]:
    """Raise ConfigError, with what to change, where a stage does not fit `activation_gb` or `cluster.gpu_memory_gb` on
    `fewest` workers, or where how many blocks the first comes to cannot be told.

    Without these fields nothing is traced, which takes some seconds for a step that never was. What the second needs
    and cannot be traced is said, and goes on unchecked.
    """
    cfg: TrainConfig = stage.config
    model = stage.model
    assert model is not None, "of stages whose model is known"
    is_gpu = there.campaign.cluster.gpus_per_worker > 0
    limit = there.campaign.cluster.gpu_memory_gb if is_gpu else None
    if cfg.activation_gb is None and limit is None:
        return
    from pipeline.extras.plan.memory import (
        GIB,
        BudgetTooSmall,
        blocks_of,
        check_fits,
        smaller_micro_batches,
        with_blocks,
    )
    from pipeline.extras.plan.memory_traces import TraceFailed

    # What is traced is of whole images: of fewer patches nobody knows the need.
    has_whole_images = cfg.thinning.has_whole_images
    number_in_its_place = (
        f"type the number in its place: {stage.name}.activation_gb=null {stage.name}.checkpoint_blocks=N, from 0 to "
        f"{blocks_of(model)}, with which a worker needs the least memory"
    )
    if cfg.activation_gb is not None:
        if not has_whole_images:
            text = (
                f"{stage.name}: activation_gb is counted on whole images, of which patch dropout leaves out a part: "
                f"fewer blocks may be enough; {number_in_its_place}"
            )
            yield CheckResult("WARN", MEMORY, text)
        try:
            with_blocks(cfg, model, is_gpu=is_gpu)
        except BudgetTooSmall as error:
            way_out = f"type a larger {stage.name}.activation_gb"
            for micro_batch in smaller_micro_batches(cfg, fewest):
                if micro_batch <= error.largest:
                    way_out = f"type {stage.name}.micro_batch={micro_batch}, or a larger {stage.name}.activation_gb"
                    break
            raise ConfigError(f"{stage.name}.{error}\n  {way_out}") from None
        except TraceFailed as error:
            # To guess would end the run out of memory hours later, or take a third more time without a word.
            raise ConfigError(
                f"{stage.name}.activation_gb={cfg.activation_gb:g}: how many blocks to recompute is not known: "
                f"{error}\n  {number_in_its_place}"
            ) from None
    if limit is None:
        return
    unknown = f"{stage.name}: whether it fits cluster.gpu_memory_gb={limit:g} is not known"
    if not has_whole_images:
        yield CheckResult("WARN", MEMORY, f"{unknown} with patch dropout")
        return
    try:
        check_fits(cfg, model, fewest, int(limit * GIB), is_gpu=True, name=stage.name)
    except TraceFailed as error:
        yield CheckResult("WARN", MEMORY, f"{unknown}: {error}")


class Pretrain(Training):
    """Training from random weights (paper, section 4.1)."""

    name = "pretrain"
    defaults = TrainConfig(passes=7)  # over JFT-300M (paper, table 3)


class Finetune(Training):
    """Training on another set, with a new head (paper, B.1.1 and table 4)."""

    name = "finetune"
    defaults = TrainConfig(
        new_head=True,  # all layers of the pretraining head go (paper, 3.1 and B.1.1)
        optim=OptimConfig(
            name="sgd",
            lr=0.03,  # of the grid 0.003, 0.01, 0.03, 0.06 (paper, table 4)
            weight_decay=0.0,
            schedule=ScheduleConfig(decay="cosine", warmup_steps=500),  # vit_jax configs/common.py
        ),
        loss="softmax",
        steps=20_000,  # ImageNet (paper, table 4)
        batch_size=512,
    )
