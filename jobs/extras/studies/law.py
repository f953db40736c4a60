"""What makes a trained stage a part of a scaling study: it is a branch of another, and a law foretells it.

1. A branch (`begin`) continues from a checkpoint of its trunk, the stage that `init` names: weights, moments, data
   order and count of steps. Only its length and its cool-down are its own, so that its bits are those of a run that had
   this length and this cool-down from step 0 on, and it costs the steps after `begin` alone.
2. A law (`law`) is the fit of a figure over smaller runs. What it foretells of a stage is logged before its first step
   and scored after its last.
3. A budget is compared with what all trained stages of a recipe take, before any of them starts.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

import models
from data.errors import ConfigError, DataError
from jobs.extras.studies.axes import AT_A_STEP, axes_at
from jobs.resolved_recipe import Available, Campaign, CheckResult, Context, Reads, Stage, reference
from jobs.stages.training import TrainingExtra, planned_steps
from models.checks import did_you_mean
from pipeline import artifacts, config
from pipeline.checkpoints.manifest import step_of
from pipeline.checkpoints.stage_checkpoints import checkpoints_in
from pipeline.config import require
from pipeline.extras.branches import BranchConfig
from pipeline.extras.power_law import law_of
from pipeline.optimization import learning_rate
from pipeline.phases import has_one_shape
from pipeline.training_config import TrainConfig

# What a branch may have of its own, of the fields that make a stage another one.
MANY = 1_000_000  # steps: enough that each phase has some
OWN = ("steps", "passes", "init", "begin", "law", "model", "new_head", "keep_best", "patience")


class Compute(NamedTuple):
    """Holds the exaFLOPs that the trained stages of a recipe take, counted as `plan` counts them."""

    planned: float  # of a branch the steps behind its begin
    apart: float  # were each branch a run of its own from step 0, and its trunk not there
    uncounted: list[str]  # stages whose steps or model are not known yet


class Branches(TrainingExtra):
    """Adds `begin` and `law`."""

    config = BranchConfig
    inputs: ClassVar = {"law": Reads.FILE}

    def hooks(self, cfg: BranchConfig, context: Context) -> dict[str, dict[str, Any]]:  # type: ignore[override]
        """Return the hook of a branch; workers know nothing of a law."""
        return {} if cfg.first_step == 0 else {"pipeline.extras.branches:Branch": {}}

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Refuse a branch or a law that does not fit the stage."""
        if stage.config.begin is not None:
            check_branch(stage, available)
        if stage.config.law is not None:
            check_law(stage, available)
        yield from ()

    def before(self, cfg: BranchConfig, context: Context) -> None:  # type: ignore[override]
        """Link the checkpoint that a branch begins with, and log what the law foretells."""
        if cfg.first_step and not context.checkpoints.committed():
            branch_off(cfg, cfg.first_step, context)
        if getattr(cfg, "law", None) is not None:
            forecast = foretell(cfg, context)
            name = Path(context.campaign.path_of(cfg.law or "")).parent.name
            context.log(
                f"{context.stage.name}: {name} foretells {forecast.metric} {forecast.value:.4f} "
                f"[{forecast.low:.4f}, {forecast.high:.4f}] at step {forecast.step}"
            )

    def after(self, cfg: BranchConfig, context: Context, outcome: dict[str, Any]) -> None:  # type: ignore[override]
        """Score the last evaluation."""
        if getattr(cfg, "law", None) is not None:
            forecast = foretell(cfg, context, outcome["step"])
            outcome["foretold"] = forecast.score(outcome["metrics"][forecast.metric], context.log)


# ------------------------------------------------------------------------------------------------ branches


def check_branch(stage: Stage, available: Available) -> None:
    """Raise ConfigError where a branch would not be what its trunk would have been with another end."""
    cfg: BranchConfig = stage.config
    begin = cfg.begin
    link = reference(cfg.init or "")
    require(available.campaign.remote is None, f"{stage.name}.begin links a commit, and a run in a store has no links")
    # The phases of a stage depend on its length, which a branch changes.
    is_alike = stage.model is None or has_one_shape(cfg.phases(MANY, stage.model), stage.model)
    require(is_alike, f"{stage.name}.begin: thinning changes with the steps of the whole stage")
    assert begin is not None, "of branches alone"
    if link is None:
        raise ConfigError(
            f"{stage.name}.begin: init is {cfg.init}, and a branch has the values of a stage of this recipe\n"
            "  put the section of the trunk here, with the `run` that holds it: a stage that has finished is skipped"
        )
    trunk = available.campaign.stage(link[0])
    require(trunk.kind.trains, f"{stage.name}.begin: {trunk.name} is of kind {trunk.kind.name}, which takes no steps")
    own: TrainConfig = trunk.config
    before = config.tagged(own, "forbid")
    after = config.tagged(cfg, "forbid")
    for values, model in ((before, trunk.model), (after, stage.model)):
        for name in list(values):
            if name.split(".")[0] in OWN or name == "optim.schedule.cooldown_steps":
                del values[name]
        # Of the model what it comes to is compared: what a branch does not write is that of its trunk's weights.
        if model is not None:
            for name, value in models.to_dict(model).items():
                values[f"model.{name}"] = value
    changes = config.differences(before, after)
    require(
        not changes,
        f"{stage.name}: a branch of {trunk.name} has its values, and here they differ: {'; '.join(changes)}\n"
        "  leave them out; its own are steps and optim.schedule.cooldown_steps",
    )
    ends = []
    for part in (own, cfg):
        steps = planned_steps(part, available)
        if steps is None:
            return
        ends.append(steps)
    trunk_end, end = ends
    is_kept = begin == trunk_end or (own.keep_every > 0 and begin % own.keep_every == begin % own.save_every == 0)
    require(
        begin <= trunk_end and is_kept,
        f"{stage.name}.begin is {begin}, and {trunk.name} takes {trunk_end} steps and keeps those that keep_every "
        f"{own.keep_every} and save_every {own.save_every} divide\n"
        f"  type {trunk.source}.keep_every={begin} {trunk.source}.save_every={begin}, or another begin",
    )
    require(begin < end, f"{stage.name} begins at step {begin} and ends at step {end}: it has no steps")
    rates = []
    for part, steps in ((own, trunk_end), (cfg, end)):
        rates.append(learning_rate(begin - 1, steps, part.optim.lr, part.optim.schedule))
    require(
        rates[0] == rates[1],
        f"{stage.name}: the learning rate of step {begin} is {rates[0]:.3g} in {trunk.name}, and {rates[1]:.3g} of "
        f"{end} steps from the start\n"
        "  expected optim.schedule.decay constant or rsqrt, and cool-downs that begin at or behind `begin`",
    )


def branch_off(cfg: TrainConfig, begin: int, context: Context) -> None:
    """Make the commit with which a branch begins the first of its own: from there it is resumed like any stage.

    Raises DataError where its trunk has no such commit, CheckpointError.
    """
    trunk = Path(context.campaign.path_of(cfg.init or ""))
    commits = checkpoints_in(trunk / "checkpoints")
    names = {}
    for name in reversed(commits.committed()):
        names[step_of(Path(name))] = name
    if begin not in names:
        raise DataError(
            f"{context.stage.name}.begin is {begin}, of which {trunk} has no commit\n"
            f"  expected one of {', '.join(map(str, sorted(names))) or 'none'}: keep_every and save_every of a trunk "
            "have to divide it"
        )
    # Steps that the trunk has given up are none that the branch has seen.
    if (trunk / artifacts.EXCLUDED_STEPS).exists():
        pairs = artifacts.read_record(trunk / artifacts.EXCLUDED_STEPS)["stretches"]
        earlier = []
        for pair in pairs:
            if pair[0] < begin:
                earlier.append(pair)
        artifacts.write_record(context.directory / artifacts.EXCLUDED_STEPS, {"stretches": earlier})
    context.checkpoints.adopt(commits.local / names[begin], context.stage.key)


# ------------------------------------------------------------------------------------------------ laws


def check_law(stage: Stage, available: Available) -> None:
    """Raise ConfigError where a law is not of what the stage will have, or of what nothing tells before it runs."""
    law = stage.config.law
    link = reference(law)
    path = Path(available.campaign.path_of(law))
    y = ""
    fitted: Collection[str] = ()
    if link is not None and link[1] == "figure.json":
        figure = available.campaign.stage(link[0]).config
        y = getattr(figure, "y", "")
        fitted = getattr(figure, "fit", ())
    elif link is None and not path.exists():
        return  # all inputs that are missing are named together
    elif link is None:
        record = artifacts.read_record(path)
        y = record.get("y", "")
        fitted = record.get("fit", {}).get("axes", ())
    require(bool(fitted), f"{stage.name}.law: {law} has no fit\n  expected @FIGURE/figure.json, of a figure with `fit`")
    metrics = list(stage.kind.metrics(stage.config))
    require(
        y in metrics,
        f"{stage.name}.law: {law} is a law of {y}, which its evaluations will not have{did_you_mean(y, metrics)}\n"
        f"  expected one of {', '.join(metrics) or 'none'}: data.evaluate gives accuracy, probe gives 5shot and so on",
    )
    for axis in fitted:
        require(
            axis in AT_A_STEP,
            f"{stage.name}.law: {law} is a law of {axis}, which nothing tells before the stage runs"
            f"{did_you_mean(axis, AT_A_STEP)}\n  expected a fit over some of {', '.join(AT_A_STEP)}",
        )


@dataclass(frozen=True)
class Forecast:
    """Holds what a law foretells of an evaluation: the value, and its 90 % interval."""

    metric: str
    step: int
    value: float
    low: float
    high: float

    def score(self, was: float, log: Callable[[str], None]) -> dict[str, float | bool | str]:
        """Return, and log, whether the evaluation lies inside the interval."""
        is_inside = self.low <= was <= self.high
        verdict = "inside" if is_inside else "OUTSIDE"
        log(
            f"foretold {self.metric} {self.value:.4f} [{self.low:.4f}, {self.high:.4f}] at step {self.step}, "
            f"was {was:.4f}: {verdict}"
        )
        score: dict[str, float | bool | str] = {"metric": self.metric, "value": self.value, "low": self.low}
        return {**score, "high": self.high, "was": was, "is_inside": is_inside}


def foretell(cfg: BranchConfig, context: Context, step: int | None = None) -> Forecast:
    """Return what the law that `cfg.law` names foretells of the evaluation of a step, by default of the last."""
    figure = artifacts.read_record(Path(context.campaign.path_of(cfg.law or "")))
    law = law_of(figure["fit"]["law"])
    steps = planned_steps(cfg, Available(context.campaign))
    assert steps is not None, "a stage starts when its sets are there"
    at = step or steps
    axes = axes_at(cfg, context.model, at, steps)
    x = np.array([[axes[axis] for axis in figure["fit"]["axes"]]])
    # The law is of the error, 1 − metric; the same law foretells the same of the same stage.
    (low,), (high,) = law.interval_at(x, np.random.default_rng(0))
    (error,) = law.at(x)
    return Forecast(figure["y"], at, value=float(1 - error), low=float(1 - high), high=float(1 - low))


# ------------------------------------------------------------------------------------------------ budgets


def compute_of(campaign: Campaign) -> Compute:
    """Return what the trained stages of a campaign take, finished ones too."""
    available = Available(campaign, checks_files=False)
    trunks = set()
    trained = []
    for stage in campaign.stages:
        if not stage.kind.trains:
            continue
        trained.append(stage)
        link = reference(stage.config.init or "")
        if stage.config.first_step and link is not None:
            trunks.add(link[0])
    planned = 0.0
    apart = 0.0
    uncounted = []
    for stage in trained:
        cfg: TrainConfig = stage.config
        steps = planned_steps(cfg, available)
        if stage.model is None or steps is None:
            uncounted.append(stage.name)
            continue
        whole = axes_at(cfg, stage.model, steps, steps)["exaflops"]
        planned += whole
        if cfg.first_step:
            planned -= axes_at(cfg, stage.model, cfg.first_step, steps)["exaflops"]
        if stage.name not in trunks:
            apart += whole
    return Compute(planned, apart, uncounted)


def check_budget(campaign: Campaign) -> None:
    """Raise ConfigError where the trained stages take more than `budget`, or where that is not known."""
    if campaign.budget is None:
        return
    compute = compute_of(campaign)
    require(
        not compute.uncounted,
        f"budget is {campaign.budget:g} exaFLOPs, and what {', '.join(compute.uncounted)} takes is not known\n"
        "  data.samples=… lets it be counted while the data is not there",
    )
    require(
        compute.planned <= campaign.budget,
        f"budget is {campaign.budget:g} exaFLOPs, and the recipe takes {compute.planned:.4g}\n"
        f"  type budget={compute.planned:.4g}, or take runs out of it; `python -m jobs plan` has what each takes",
    )
