"""Implements `patchline trial RECIPE`: measure steps of each training stage, so that `plan` can predict times.

    pretrain   30 steps of 1024 images on 8 workers, the first 5 as warm-up …
    pretrain   800 ms per step: compute 752 ms, waiting for storage 0.31 ms, decoding 41 ms, transfer 6.20 ms
    pretrain   1,280 images/s; at most 31.2 GiB per worker; a save pauses training for 0.21 s and commits after 3.4 s
    pretrain   after a start, steps are steady after 14.2 s
    pretrain   saved in runs/x/trials/d91ff90d-8.json, which python -m jobs plan RECIPE uses

1. Run every training stage whose data exists, with the same workers, loop and saves as in `run`, but with fewer steps
   and without evaluations. The stage's folder is deleted at the end.
2. Compute the time of each part of a step from the stage's records (pipeline/extras/plan/trial.py).
3. Save the result with the run; the file is named after a digest of everything that affects step time, and the number
   of workers.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import models
from data.errors import ConfigError, DataError
from jobs.cluster.ray import connect, disconnect
from jobs.extras.planning.checks import STAGE, results
from jobs.extras.planning.run_folders import temporary_run
from jobs.extras.planning.stage_checks import TrainedFacts, milliseconds
from jobs.recipe import class_names
from jobs.recipe.references import with_field
from jobs.resolved_recipe import Available, Campaign, Context, Stage
from jobs.terminal import activity, echo
from pipeline import artifacts
from pipeline.config import digest, plain
from pipeline.extras.plan.trial import LOG_EVERY, SAVE_AT, STEPS, WARM_UP, Trial, measured, write_trial
from pipeline.extras.recorded_config import with_defaults
from pipeline.identity import git_commit
from pipeline.monitoring.telemetry import read_metrics
from pipeline.optimization import ScheduleConfig
from pipeline.training_config import ProbeConfig, TrainConfig
from pipeline.values import amount, counted


def trial(campaign: Campaign, only: str | None) -> list[dict[str, Any]]:
    """Measure all training stages, or only the stage named by `only`; print, save and return the results.

    Raises ConfigError if no stage trains, DataError if no stage can be measured, or any error raised by a stage.
    """
    # 1. Select stages. Stages with identical steps, for example runs of a sweep, are measured only once.
    stages: dict[str, Stage] = {}
    for stage in campaign.stages:
        if stage.kind.trains and only is None:
            stages.setdefault(trial_key(campaign, stage) or stage.name, stage)
    if only is not None:
        stage = campaign.stage(only)
        if not stage.kind.trains:
            raise ConfigError(
                f"{only} is a stage of kind {stage.kind.name}, which does not train\n  use the name of a training stage"
            )
        stages[only] = stage
    if not stages:
        raise ConfigError(
            "the recipe has no training stage, so there are no steps to measure\n  add a pretrain or finetune stage"
        )

    # 2. Report the stages whose data is missing; measure the others.
    to_try = []
    problems = []
    for stage in stages.values():
        problem = ""
        for result in results("trial", TrainedFacts(campaign, stage, log=activity.now), STAGE):
            text = "; ".join(filter(None, (result.text, result.remedy)))
            if result.level == "FAIL":
                problem = text
            else:
                echo(f"{stage.name}   {result.subject}: {text}")
        if not problem:
            to_try.append(stage)
            continue
        problems.append(f"{stage.name}: {problem}")
        echo(f"{stage.name}   not measured: {problem}")
    if not to_try:
        raise DataError("none of the stages can be measured: " + "\n  ".join(problems))

    # 3. Run the steps of all stages on one cluster.
    if campaign.cluster.backend == "ray":
        connect(campaign.cluster)
    try:
        return [measure_stage(campaign, stage) for stage in to_try]
    finally:
        disconnect()


# Keys of extras that do not affect step time.
OF_A_RUN = "begin law keep_best patience evaluate_on"


def trial_key(campaign: Campaign, stage: Stage) -> str:
    """Return a digest of everything that affects a stage's step time; "" if its model is unknown."""
    if stage.model is None:
        return ""
    cfg: TrainConfig = stage.config
    # Set the fields that do not affect step time to constants.
    relevant = replace(
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
    return digest({"config": plain(relevant), "model": model, "sets": sets, "weights": cfg.data.weights()})


def measure_stage(campaign: Campaign, stage: Stage) -> dict[str, Any]:
    """Run the steps of a stage in a temporary folder and measure them; print, save and return the result."""
    # 1. Change the length, saves and evaluations in the stage's config.
    cfg: TrainConfig = stage.config
    init = campaign.path_of(cfg.init)
    # Step time does not depend on the weights, so use random ones if the initial weights do not exist yet.
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
    # Replace references such as "@stage" with the campaign's paths, because they do not resolve in the temporary run.
    for field, (value, _reads) in stage.kind.inputs_of(cfg).items():
        cfg = with_field(cfg, field.split("."), campaign.path_of(value))

    # 2. Run the steps as `run` would.
    workers = counted(campaign.cluster.most, "worker")
    echo(f"{stage.name}   {STEPS} steps of {cfg.batch_size} images on {workers}, the first {WARM_UP} as warm-up …")
    with temporary_run(campaign.run) as folder:
        remote = None
        if campaign.remote is not None:
            # Save to the same bucket as the run, in a separate folder.
            remote = f"{campaign.remote}/{folder.name}"
        temporary = replace(campaign, run=folder, remote=remote)
        context = Context(
            campaign=temporary,
            stage=stage,
            log=echo,
            poll=StepPrinter(stage.name, temporary.directory(stage)).poll,
            stop_requested=lambda: False,
            class_names=class_names.of_stage(stage, Available(campaign)),
        )
        context.directory.mkdir()
        try:
            stage.kind.run(cfg, context)
            records = read_metrics(context.directory, kind=None)
        finally:
            # Delete the files in the bucket too.
            temporary.storage.delete(temporary.storage.list())

    # 3. Print and save the measurements.
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
        f"{stage.name}   {milliseconds(result.step_s)} per step on {counted(result.world, 'worker')}: "
        f"compute {milliseconds(result.compute_s)}, waiting for storage {milliseconds(result.storage_s)}, "
        f"decoding {milliseconds(result.decode_s)}, transfer {milliseconds(result.transfer_s)}"
    )
    echo(
        f"{stage.name}   {amount(result.images_per_s)} images/s; at most {result.memory_gib:.1f} GiB per worker; "
        f"a save pauses training for {milliseconds(result.save_stall_s)} and commits after "
        f"{milliseconds(result.save_s)}"
    )
    echo(f"{stage.name}   step times are steady from {milliseconds(result.until_steady_s)} after the start")
    echo(f"{stage.name}   saved in {path}, which python -m jobs plan RECIPE uses")
    return {**asdict(result), "saved": str(path)}


class StepPrinter:
    """Prints the step of each new report while the workers train."""

    def __init__(self, stage: str, directory: Path) -> None:
        self.stage = stage
        self.directory = directory
        self.last_step = 0

    def poll(self, _attempt: int, _step: int) -> None:
        """Print the step of the newest report, unless it was already printed."""
        reports = read_metrics(self.directory)
        if reports and reports[-1]["step"] > self.last_step:
            self.last_step = reports[-1]["step"]
            echo(f"{self.stage}   step {self.last_step} of {STEPS}, {amount(reports[-1]['images_per_s'])} images/s")
