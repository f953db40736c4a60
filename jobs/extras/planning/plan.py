"""The work of `patchline plan RECIPE`: whether it fits, how long it takes and what it costs, and what would run.

    fits    yes: pretrain needs the most, 23.1 GiB a worker of the 79.1 GiB of an H100
    time    4d03h for 1 trained stage; with 2.0 failures 4d05h
    cost    808 worker-hours, 2,020 at 2.5 each

    pretrain (pretrain, key d91ff90d): would run
      batch   4096 = 8 workers × micro_batch 512 × accumulation 1
      steps   2,190 (9.0M images, 7.00 passes over 1,281,167 samples)

1. Each stage gets its lines (`Plan.add_stage`); for a trained one, `PlannedTraining` (plan_training.py) works out
   batch, data, compute, memory and time.
2. Their sums make the first three lines (`Plan.sum_up`), and then all lines are printed.

Time is that of trials on the cluster (`python -m jobs trial`), or an estimate, which is labelled as one. Nothing is
started or written. What is not there yet (data, weights) is named, and the lines that need it are left out; then the
command ends as `run` would, with exit code 65, or with 0 where `--without-data` asks for that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import models
from data.checks import few
from data.files import memory_text
from data.index.names import Names, preview
from jobs.extras.planning.plan_training import PlannedTraining, bill, span
from jobs.extras.recipe_text import in_words
from jobs.extras.studies import table
from jobs.extras.studies.law import compute_of
from jobs.recipe.records import half_done_folder
from jobs.resolved_recipe import Available, Campaign, Stage, reference
from jobs.terminal import echo
from pipeline.extras.plan.cost import HOUR_S, Assumptions
from pipeline.values import counted


def plan(campaign: Campaign, assumed: Assumptions, log: Callable[[str], None]) -> None:
    """Print the first three lines, and those of every stage; `log` hears of waits longer than a few seconds."""
    cluster = campaign.cluster
    workers = str(cluster.most)
    if cluster.least < cluster.most:
        workers = f"{cluster.least} to {cluster.most}"
    made = Plan(campaign, assumed, log)
    made.lines += [
        "",
        f"run directory  {campaign.storage.address()}",
        f"cluster        {workers} workers ({cluster.backend})",
    ]
    compute = compute_of(campaign)
    text = f"{compute.planned:.4g} exaFLOPs"
    if compute.uncounted:
        text += f"; NOT counted: {few(compute.uncounted)}"
    if compute.apart != compute.planned:
        text += f", {compute.planned / compute.apart:.0%} of the {compute.apart:.4g} of as many runs from step 0"
    if campaign.budget is not None:
        text += f", of a budget of {campaign.budget:g}"
    made.lines.append(f"compute        {text}")
    for stage in campaign.stages:
        made.add_stage(stage)
    fits, time, cost = made.sum_up()
    for line in (f"fits    {fits}", f"time    {time}", f"cost    {cost}", *made.lines):
        echo(line)


@dataclass
class Plan:
    """Collects the lines of all stages, parents first, and the sums of them."""

    campaign: Campaign
    assumed: Assumptions
    log: Callable[[str], None]  # hears of waits
    lines: list[str] = field(default_factory=list)
    would_run: set[str] = field(default_factory=set)  # names of stages that have not finished
    to_train: list[PlannedTraining] = field(default_factory=list)

    def add(self, label: str, text: str) -> None:
        """Add a line to the stage that is described."""
        self.lines.append(f"  {label:7} {text}")

    def add_stage(self, stage: Stage) -> None:
        """Add the lines of a stage; those that it reads have been described before."""
        campaign = self.campaign
        is_done = campaign.done(stage) is not None
        # 1. Whether it would be skipped, resumed or run, and the reason.
        if is_done:
            status = "finished, would be skipped"
        elif any((campaign.directory(stage) / "checkpoints").glob("step-*")):
            status = "half done, would be resumed from its newest checkpoint"
        # Without --fresh the command has ended before this (jobs/recipe/validate.py).
        elif half_done_folder(campaign, stage) is not None:
            status = "half done with another config, would start over"
        else:
            status = "would run"
            # It ran once with other inputs: a stage before it has changed.
            if any(campaign.run.glob(f"{stage.name}-*/done.json")):
                for value in stage.parents.values():
                    link = reference(value)
                    if link is not None and link[0] in self.would_run:
                        status = f"would run again, because {link[0]} would"
                        break
        self.lines += ["", f"{stage.name} ({stage.kind.name}, key {stage.key[:8]}): {status}"]
        if not is_done:
            self.would_run.add(stage.name)

        # 2. What it reads and lacks, and its model.
        for part, value in stage.parents.items():
            # The runs of a sweep's table are listed above it, and values of other stages have a line of their own.
            if stage.kind.name != table.Table.name and part not in stage.references:
                self.add("reads", f"{part} = {value}")
        if stage.model is not None:
            model = stage.model
            size = "×".join(str(side) for side in model.image_size)
            self.add(
                "model",
                f"{model.family} {size} px, {model.classes} classes, {models.parameters_of(model):,} "
                f"parameters, {models.macs_of(model) / 1e9:.3f} GMACs an image",
            )
        # What a finished stage was made from is needed no more.
        if not is_done:
            for message in stage.missing:
                self.add("MISSING", message)

        # 3. What sweeps have chosen for it, or, of the table of a sweep, what it will be made of.
        for part in stage.references:
            self.add("chosen", f"{part}: {in_words(campaign, stage, part)}")
        if stage.pending:
            self.add("chosen", "until then the lines below have the first of these values")
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

        # 4. Which names its classes have, and whose labels are taken on trust.
        names, nameless = known_names(stage, Available(campaign))
        if names:
            self.add("names", preview(names))
        if nameless:
            self.add("names", f"none in {', '.join(nameless)}: labels are taken on trust")

        # 5. What its training takes, where it is still to come.
        if stage.kind.trains and not is_done:
            trained = PlannedTraining(campaign, stage, self.assumed, self.add, self.log)
            trained.work_out()
            self.to_train.append(trained)

    def sum_up(self) -> tuple[str, str, str]:
        """Return whether all that is still to be trained fits, how long it takes, and how much it costs."""
        stages = self.to_train
        if not stages:
            return "nothing is left to train", "no time of training", "no worker-hours of training"
        # 1. What the stages come to together.
        largest = stages[0]  # that needs the most
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

        # 2. Whether they fit: the largest decides.
        fits = f"{largest.name} needs the most, {memory_text(largest.device_bytes)} a worker"
        if too_large:
            fits = f"NO: of {few(too_large)} a worker needs more than there is"
        elif not largest.device_bytes:
            fits = "not known"
        elif largest.limit:
            fits = f"yes: {fits} of {memory_text(largest.limit)} ({largest.limit_source})"
        elif largest.is_gpu:
            fits = f"not known: {fits}; cluster.gpu_memory_gb=…, or --gpu, says what there is"
        else:
            fits = f"not known: {fits} of its node's"
        if not_traced:
            fits += f"; of {few(not_traced)} it is not known"

        # 3. How long and how much: a range where one of them is estimated.
        if not timed:
            return fits, f"not known: {stages[0].no_time}", "not known without the time"
        time = f"{span(least_s, most_s)} for {counted(len(timed), 'trained stage')}"
        if least_s < most_s:
            time = f"ESTIMATE, not measured: {time}, without saves and failures"
        elif self.assumed.mtbf_hours is not None:
            time += f" with {failures:.1f} failures"
        if untimed:
            time += f"; NOT known of {few(untimed)}"
        return fits, time, bill(least_hours, most_hours, self.assumed.price)


def known_names(stage: Stage, available: Available) -> tuple[Names, list[str]]:
    """Return the class names of the first set of a stage that has any, and the sets that have none: field and path."""
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
