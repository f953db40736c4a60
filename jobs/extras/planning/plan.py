"""Implements `patchline plan RECIPE`: estimate a recipe's memory, time and cost, and show which stages would run.

    fits    yes: pretrain needs the most, 23.1 GiB per worker of the 79.1 GiB of an H100
    time    4d03h for 1 training stage; with 2.0 failures 4d05h
    cost    808 worker-hours, 2,020 at 2.5 each

    pretrain (pretrain, key d91ff90d): would run
      batch   4096 = 8 workers × micro_batch 512 × accumulation 1
      steps   2,190 (9.0M images, 7.00 passes over 1,281,167 samples)

1. Describe each stage in a few lines (`Plan.add_stage`); for a training stage, `PlannedTraining` (plan_training.py)
   computes batch, data, compute, memory and time.
2. Sum up all stages in three lines (`Plan.sum_up`), and print these lines first.

Times come from trials on the cluster (`python -m jobs trial`); without trials, times are estimated and labelled as
estimates. Nothing is started or written. Missing data and weights are listed once, at the end, and lines that depend on
them are omitted. The command exits with 65, as `run` would, only if a missing path is probably misspelled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import models
from data.checks import few
from data.files import memory_text
from data.index.names import Names, preview
from jobs.extras.planning.plan_training import PlannedTraining, format_cost, format_duration_range
from jobs.extras.recipe_text import describe_value
from jobs.extras.studies import table
from jobs.extras.studies.law import compute_of
from jobs.recipe.records import unfinished_folder
from jobs.resolved_recipe import Available, Campaign, MissingInput, Stage
from jobs.stage_folders import stages_in
from pipeline.checkpoints.stage_checkpoints import StageCheckpoints
from pipeline.extras.plan.cost import HOUR_S, Assumptions
from pipeline.values import counted


def plan(
    campaign: Campaign, assumed: Assumptions, log: Callable[[str], None], missing: Sequence[MissingInput] = ()
) -> dict[str, Any]:
    """Return the plan: three summary lines, and the lines of every stage. `log` reports long waits."""
    cluster = campaign.cluster
    workers = str(cluster.most)
    if cluster.least < cluster.most:
        workers = f"{cluster.least} to {cluster.most}"
    plan = Plan(campaign, assumed, log, missing)
    plan.lines += [
        "",
        f"run directory  {campaign.storage.address()}",
        f"cluster        {workers} workers ({cluster.backend})",
    ]
    compute = compute_of(campaign)
    text = f"{compute.planned:.4g} exaFLOPs"
    if compute.uncounted:
        text += f"; NOT counted: {few(compute.uncounted)}"
    if compute.apart != compute.planned:
        text += f", {compute.planned / compute.apart:.0%} of the {compute.apart:.4g} of separate runs from step 0"
    if campaign.budget is not None:
        text += f", budget {campaign.budget:g}"
    plan.lines.append(f"compute        {text}")
    for stage in campaign.stages:
        plan.add_stage(stage)
    fits, time, cost = plan.sum_up()
    return {
        "run": campaign.storage.address(),
        "fits": fits,
        "time": time,
        "cost": cost,
        "exaflops": compute.planned,
        "stages": plan.stages,
        "report": [f"fits    {fits}", f"time    {time}", f"cost    {cost}", *plan.lines],
    }


@dataclass
class Plan:
    """The lines of all stages in execution order, and the totals."""

    campaign: Campaign
    assumed: Assumptions
    log: Callable[[str], None]  # receives messages about waits
    missing: Sequence[MissingInput]  # of all stages
    lines: list[str] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)  # name, kind, key, status and values of each stage
    would_run: set[str] = field(default_factory=set)  # names of unfinished stages
    resumed: list[str] = field(default_factory=list)  # names of stages that have a checkpoint
    to_train: list[PlannedTraining] = field(default_factory=list)

    def add(self, label: str, text: str) -> None:
        """Add a line to the current stage."""
        self.lines.append(f"  {label:7} {text}")

    def add_stage(self, stage: Stage) -> None:
        """Add the lines of a stage to the plan; its parents must have been added before."""
        campaign = self.campaign
        is_done = campaign.done(stage) is not None
        # 1. Determine whether the stage would be skipped, resumed or run, and why.
        if is_done:
            status = "finished, would be skipped"
        elif StageCheckpoints(campaign.storage, campaign.directory(stage).name).committed():
            status = "unfinished, would resume from its newest checkpoint"
            self.resumed.append(stage.name)
        # This happens only with --fresh (jobs/recipe/validate.py).
        elif unfinished_folder(campaign, stage) is not None:
            status = "unfinished with another config, would restart from step 0"
        else:
            status = "would run"
            # If there is a finished folder with another key, a parent may have changed.
            if any(folder.name == stage.name and folder.is_finished for folder in stages_in(campaign.run)):
                for parent, _ in stage.links.values():
                    if parent in self.would_run:
                        status = f"would run again, because {parent} would"
                        break
        self.lines += ["", f"{stage.name} ({stage.kind.name}, key {stage.key[:8]}): {status}"]
        self.stages.append({"name": stage.name, "kind": stage.kind.name, "key": stage.key, "status": status})
        if not is_done:
            self.would_run.add(stage.name)

        # 2. The inputs and the model.
        for part, value in stage.parents.items():
            # Omit the runs of a sweep's table, which are listed above it; values of other stages are listed below.
            if stage.kind.name != table.Table.name and part not in stage.references:
                self.add("reads", f"{part} = {value}")
        if stage.model is not None:
            model = stage.model
            size = "×".join(str(side) for side in model.image_size)
            self.add(
                "model",
                f"{model.family} {size} px, {model.classes} classes, {models.parameters_of(model):,} "
                f"parameters, {models.macs_of(model) / 1e9:.3f} GMACs per image",
            )
            self.stages[-1]["parameters"] = models.parameters_of(model)
        # A finished stage no longer needs its inputs.
        if not is_done:
            self.stages[-1]["missing"] = [entry.message for entry in self.missing if entry.stage == stage.name]

        # 3. Values chosen by sweeps; for the table of a sweep, its rows.
        for part in stage.references:
            self.add("chosen", f"{part}: {describe_value(campaign, stage, part)}")
        if stage.pending:
            self.add("chosen", "until then, the lines below assume the first candidate value")
        if stage.kind.name == table.Table.name:
            cfg: table.TableConfig = stage.config
            rows = {run.row for run in cfg.runs.values()}
            text = f"{len(cfg.runs)} runs in {len(rows)} rows"
            runs = map(campaign.stage, cfg.runs)
            if any(list(run.kind.metrics(run.config)) for run in runs):
                text += f" by {cfg.best}"
                if cfg.chooses:
                    text += f": chooses {table.TIES}"
            self.add("table", text)

        # 4. The class names; without names, the labels of data sets cannot be compared.
        names, nameless = known_names(stage, Available(campaign))
        if names:
            self.add("names", preview(names))
        if nameless:
            self.add("names", f"no class names in {', '.join(nameless)}, so labels cannot be compared")

        # 5. The training, unless it has finished.
        if stage.kind.trains and not is_done:
            trained = PlannedTraining(campaign, stage, self.assumed, self.add, self.log)
            trained.compute()
            self.stages[-1] |= {
                "device_bytes": trained.device_bytes,
                "fits": trained.fits,
                "least_s": trained.least_s,
                "most_s": trained.most_s,
            }
            self.to_train.append(trained)

    def sum_up(self) -> tuple[str, str, str]:
        """Return the three summary lines: memory, time and cost of all unfinished training stages."""
        stages = self.to_train
        if not stages:
            return "nothing left to train", "no training time", "no worker-hours of training"
        # 1. Add up the stages.
        largest = stages[0]  # the stage that needs the most memory
        too_large = []
        not_traced = []
        timed = []
        untimed = []
        least_s = most_s = least_hours = most_hours = failures = 0.0
        for stage in stages:
            if stage.device_bytes > largest.device_bytes:
                largest = stage
            if not stage.fits:
                too_large.append(stage.name)
            elif not stage.device_bytes:
                not_traced.append(stage.name)
            if not stage.most_s:
                untimed.append(stage.name)
                continue
            timed.append(stage)
            failures += stage.failures
            least_s += stage.least_s
            most_s += stage.most_s
            least_hours += stage.least_s * stage.world / HOUR_S
            most_hours += stage.most_s * stage.world / HOUR_S

        # 2. Memory: the largest stage decides.
        # A worker's main memory contains more than tensors; the stage's memory line says how much.
        tensors = "" if largest.is_gpu else " of tensors"
        fits = f"{largest.name} needs the most, {memory_text(largest.device_bytes)}{tensors} per worker"
        if too_large:
            fits = f"NO: too little memory per worker for {few(too_large)}"
        elif not largest.device_bytes:
            fits = "unknown"
        elif largest.limit:
            fits = f"yes: {fits} of {memory_text(largest.limit)} ({largest.limit_source})"
        elif largest.is_gpu:
            fits = f"unknown: {fits}; to set the memory of the GPU, set cluster.gpu_memory_gb=… or --gpu"
        else:
            fits = f"unknown: {fits}; the memory of the nodes is unknown"
        if not_traced:
            fits += f"; unknown for {few(not_traced)}"

        # 3. Time and cost, as a range if any stage is estimated.
        if not timed:
            return fits, f"unknown: {stages[0].no_time}", "unknown, because the time is unknown"
        time = f"{format_duration_range(least_s, most_s)} for {counted(len(timed), 'training stage')}"
        if least_s < most_s:
            time = f"ESTIMATE, not measured: {time}, without saves and failures"
        elif self.assumed.mtbf_hours is not None:
            time += f" with {failures:.1f} failures"
        resumed = [stage.name for stage in timed if stage.name in self.resumed]
        if resumed:
            time += f"; includes the finished steps of {few(resumed)}, whose remaining time is in `status`"
        if untimed:
            time += f"; UNKNOWN for {few(untimed)}"
        return fits, time, format_cost(least_hours, most_hours, self.assumed.price)


def known_names(stage: Stage, available: Available) -> tuple[Names, list[str]]:
    """Return a stage's class names, and its data sets without class names as "field (path)"."""
    paths: dict[str, str] = {}
    for shared in stage.kind.shared_classes(stage.config):
        paths |= shared.sets
    names: Names = ()
    nameless: list[str] = []
    for field_name, path in paths.items():
        for index in available.made([path]):
            if not index.names:
                nameless.append(f"{field_name} ({path})")
            names = names or index.names
    return names, nameless
