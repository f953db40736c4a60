"""The work of `patchline trial RECIPE`: real steps of each trained stage, measured, for `plan` to tell time and money.

    pretrain   30 steps of 1024 images on 8 workers, 5 of them to warm up …
    pretrain   800 ms a step: compute 752 ms, waiting for storage 0.31 ms, decoding 41 ms, transfer 6.20 ms
    pretrain   1,280 images/s; at most 31.2 GiB a worker; a save holds up 0.21 s and is kept after 3.4 s
    pretrain   14.2 s from a start until steps are steady
    pretrain   kept in runs/x/trials/d91ff90d-8.json; `python -m jobs plan RECIPE` goes by it

1. Every stage that trains, and whose data is there, runs as `run` would have it: the same workers, loop and saves. Only
   its length is another, it is not evaluated, and its folder goes at the end.
2. Its records say what a step took, part by part (pipeline/extras/plan/trial.py).
3. They are kept in the run's place, under a digest of all that a step's time depends on and the number of workers.
"""

import time
from dataclasses import replace
from pathlib import Path

import models
from data.errors import ConfigError, DataError
from jobs.cluster.ray import connect, disconnect
from jobs.extras.planning.checks import STAGE, results
from jobs.extras.planning.run_folders import temporary_run
from jobs.extras.planning.stage_checks import TrainedFacts
from jobs.recipe import class_names
from jobs.recipe.references import with_field
from jobs.resolved_recipe import Available, Campaign, Context, Stage
from jobs.terminal import echo
from pipeline import artifacts
from pipeline.config import digest, plain, with_defaults
from pipeline.extras.plan.trial import LOG_EVERY, SAVE_AT, STEPS, WARM_UP, Trial, measured, write_trial
from pipeline.identity import git_commit
from pipeline.monitoring.telemetry import read_metrics
from pipeline.optimization import ScheduleConfig
from pipeline.training_config import ProbeConfig, TrainConfig
from pipeline.values import amount, counted, milliseconds


def trial(campaign: Campaign, only: str | None) -> None:
    """Try each stage that trains, or the one that is named, and keep what was measured.

    Raises ConfigError where no stage takes steps, DataError where none can be tried; else as a run's stage does.
    """
    # 1. Of stages whose steps are alike, as those of a sweep's runs may be, one is tried for all.
    stages: dict[str, Stage] = {}
    for stage in campaign.stages:
        if stage.kind.trains and only is None:
            stages.setdefault(trial_key(campaign, stage) or stage.name, stage)
    if only is not None:
        stage = campaign.stage(only)
        if not stage.kind.trains:
            raise ConfigError(
                f"{only} is a stage of kind {stage.kind.name}, which takes no steps: name one that trains"
            )
        stages[only] = stage
    if not stages:
        raise ConfigError("the recipe trains nothing: there are no steps to try")

    # 2. What lacks its data is named, and the rest is tried all the same.
    to_try = []
    problems = []
    for stage in stages.values():
        problem = ""
        for result in results("trial", TrainedFacts(campaign, stage), STAGE):
            text = "; ".join(filter(None, (result.text, result.remedy)))
            if result.level == "FAIL":
                problem = text
            else:
                echo(f"{stage.name}   {result.subject}: {text}")
        if not problem:
            to_try.append(stage)
            continue
        problems.append(f"{stage.name}: {problem}")
        echo(f"{stage.name}   not tried: {problem}")
    if not to_try:
        raise DataError("no stage can be tried: " + "\n  ".join(problems))

    # 3. The steps, on one cluster for all.
    if campaign.cluster.backend == "ray":
        connect(campaign.cluster)
    try:
        for stage in to_try:
            try_stage(campaign, stage)
    finally:
        disconnect()


# Keys of extras without a say in a step's time.
OF_A_RUN = "begin law keep_best patience evaluate_on"


def trial_key(campaign: Campaign, stage: Stage) -> str:
    """Return the digest of all that the time of a stage's steps depends on; "" where its model is not known."""
    if stage.model is None:
        return ""
    cfg: TrainConfig = stage.config
    # What is set to one value here has no say in a step's time.
    alike = replace(
        with_defaults(cfg, OF_A_RUN),
        data=replace(cfg.data, train="sets", mixture={}, drop=(), evaluate=None, preprocess="", samples=None),
        model={},
        init=None,
        new_head=False,
        optim=replace(cfg.optim, lr=1.0, weight_decay=1.0, schedule=ScheduleConfig()),
        steps=1,
        passes=None,
        seed=0,
        evaluate_every=0,
        probe=ProbeConfig(),
        log_every=1,
        save_every=1,
        keep=2,
        keep_every=0,
        max_skipped=1,
        max_failed_saves=1,
        timeout_s=1.0,
        stall_s=1.0,
    )
    model = models.to_dict(stage.model)
    sets = list(map(campaign.path_of, cfg.data.sets().values()))
    return digest({"config": plain(alike), "model": model, "sets": sets, "weights": cfg.data.weights()})


def try_stage(campaign: Campaign, stage: Stage) -> None:
    """Take the steps of one stage in a folder that goes at the end; say and keep what they took."""
    # 1. The stage's own config, but for its length, its saves and its evaluations.
    cfg: TrainConfig = stage.config
    init = campaign.path_of(cfg.init)
    # Steps take the same time from any weights.
    has_weights = init is not None and (Path(init) / artifacts.WEIGHTS).exists()
    cfg = replace(
        with_defaults(cfg, OF_A_RUN),
        steps=STEPS,
        passes=None,
        log_every=LOG_EVERY,
        save_every=SAVE_AT,
        keep=2,
        keep_every=0,
        evaluate_every=0,
        data=replace(cfg.data, evaluate=None),
        probe=ProbeConfig(),
        init=cfg.init if has_weights else None,
    )
    # In the temporary folder "@stage" leads nowhere: the inputs are those of the campaign.
    for field, (value, _reads) in stage.kind.inputs_of(cfg).items():
        cfg = with_field(cfg, field.split("."), campaign.path_of(value))

    # 2. The steps, as `run` would have the workers take them.
    workers = counted(campaign.cluster.most, "worker")
    echo(f"{stage.name}   {STEPS} steps of {cfg.batch_size} images on {workers}, {WARM_UP} of them to warm up …")
    with temporary_run(campaign.run) as folder:
        remote = None
        if campaign.remote is not None:
            # Its saves go where the run's go, into a folder of their own.
            remote = f"{campaign.remote}/{folder.name}"
        temporary = replace(campaign, run=folder, remote=remote)
        context = Context(
            campaign=temporary,
            stage=stage,
            log=echo,
            poll=StepsShown(stage.name, temporary.directory(stage)).poll,
            stop_requested=lambda: False,
            class_names=class_names.of_stage(stage, Available(campaign)),
        )
        context.directory.mkdir()
        try:
            stage.kind.run(cfg, context)
            records = read_metrics(context.directory, kind=None)
        finally:
            # Nothing stays in a bucket either.
            temporary.storage.delete(temporary.storage.list())

    # 3. What they took.
    result = Trial(
        stage=stage.name,
        key=trial_key(campaign, stage),
        backend=campaign.cluster.backend,
        gpus_per_worker=campaign.cluster.gpus_per_worker,
        cpus_per_worker=campaign.cluster.cpus_per_worker,
        commit=git_commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        **measured(records, stage.name, cfg.batch_size),
    )
    path = write_trial(campaign.run, result)
    campaign.storage.upload(str(path.relative_to(campaign.run)))
    echo(
        f"{stage.name}   {milliseconds(result.step_s)} a step on {counted(result.world, 'worker')}: "
        f"compute {milliseconds(result.compute_s)}, waiting for storage {milliseconds(result.storage_s)}, "
        f"decoding {milliseconds(result.decode_s)}, transfer {milliseconds(result.transfer_s)}"
    )
    echo(
        f"{stage.name}   {amount(result.images_per_s)} images/s; at most {result.memory_gib:.1f} GiB a worker; a save "
        f"holds up {milliseconds(result.save_stall_s)} and is kept after {milliseconds(result.save_s)}"
    )
    echo(f"{stage.name}   {milliseconds(result.until_steady_s)} from a start until steps are steady")
    echo(f"{stage.name}   kept in {path}; `python -m jobs plan RECIPE` goes by it")


class StepsShown:
    """Prints each report's step once, while the workers work."""

    def __init__(self, stage: str, directory: Path) -> None:
        self.stage = stage
        self.directory = directory
        self.last_step = 0

    def poll(self, _attempt: int, _step: int) -> None:
        """Print the step of the newest report, where it is a new one."""
        reports = read_metrics(self.directory)
        if reports and reports[-1]["step"] > self.last_step:
            self.last_step = reports[-1]["step"]
            echo(f"{self.stage}   step {self.last_step} of {STEPS}, {amount(reports[-1]['images_per_s'])} images/s")
