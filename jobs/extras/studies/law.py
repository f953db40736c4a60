"""Add the recipe keys for scaling studies, which make a stage branch off another stage or forecast its result.

1. A branch (`begin`) continues from a checkpoint of its trunk, the stage named by `init`: weights, optimizer moments,
   data order and step count. Only its length and cool-down may differ. The result is bit-identical to a separate run
   with this length and cool-down, but costs only the steps after `begin`.
2. A law (`law`) is the fit of a figure to smaller runs. The forecast of the stage's result is logged before the first
   step, and compared with the result after the last step.
3. A recipe's `budget` limits the compute of all its training stages; it is checked before the first stage starts.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

import models
from data.errors import ConfigError, DataError
from jobs.extras.studies.axes import AT_A_STEP, axes_at
from jobs.resolved_recipe import Available, Campaign, CheckResult, Context, Reads, Stage, reference
from jobs.stage_folders import RECORD
from jobs.stages.training import TrainingExtra, planned_steps
from models.checks import did_you_mean
from pipeline import artifacts, config
from pipeline.checkpoints.manifest import step_of
from pipeline.checkpoints.stage_checkpoints import checkpoints_in
from pipeline.config import require
from pipeline.extras.branches import BranchConfig, link_checkpoint
from pipeline.extras.power_law import law_of
from pipeline.optimization import learning_rate
from pipeline.training_config import TrainConfig, has_one_shape
from pipeline.values import read_number

MANY_STEPS = 1_000_000  # steps: enough for every phase of token dropping to occur
# Fields that a branch may set differently from its trunk although they must not change on resume.
BRANCH_FIELDS = ("steps", "passes", "init", "begin", "law", "model", "new_head", "keep_best", "patience")


class Compute(NamedTuple):
    """The exaFLOPs of a recipe's training stages, counted as in `plan`."""

    planned: float  # compute of the recipe; a branch counts only its steps after `begin`
    apart: float  # compute if every branch were a separate run from step 0 and there were no trunks
    uncounted: list[str]  # stages whose steps or model are unknown


class Branches(TrainingExtra):
    """Adds the recipe keys `begin` and `law`."""

    config = BranchConfig
    inputs: ClassVar = {"law": Reads.FILE}

    def hooks(self, cfg: BranchConfig, context: Context) -> dict[str, dict[str, Any]]:  # type: ignore[override]
        """Return the training hook for a branch; a law needs no hook, because the workers do not use it."""
        return {} if cfg.first_step == 0 else {"pipeline.extras.branches:Branch": {}}

    def checks(self, stage: Stage, available: Available) -> Iterator[CheckResult]:
        """Raise ConfigError if a branch or a law does not fit the stage."""
        if stage.config.begin is not None:
            check_branch(stage, available)
        if stage.config.law is not None:
            check_law(stage, available)
        yield from ()

    def ways_to_train_longer(self, stage: Stage, folder: Path, available: Available) -> Iterator[str]:
        """Yield the command that continues a stage as a branch, or the reason why its schedule does not allow this.

        The command first trains the stage to its earlier length. The cool-down of the branch lasts a tenth of the total
        number of steps.
        """
        cfg = stage.config
        before = artifacts.read_record(folder / RECORD)["forbid"]
        earlier = replace(cfg, steps=before.get("steps"), passes=before.get("passes"))
        begin = planned_steps(earlier, available)
        steps = planned_steps(cfg, available)
        if begin is None or steps is None or steps <= begin or stage.source != stage.name or cfg.begin is not None:
            return
        is_alike = stage.model is None or has_one_shape(cfg.phases(MANY_STEPS, stage.model), stage.model)
        if available.campaign.remote is not None or not is_alike:
            return  # branches do not support this (check_branch)
        schedule = cfg.optim.schedule
        cooldown = int(before.get("optim.schedule.cooldown_steps") or 0)
        if schedule.decay not in ("constant", "rsqrt") or cooldown:
            cause = f"a cool-down of {cooldown} steps" if cooldown else f"decay {schedule.decay}"
            yield (
                f"{stage.name} cannot be extended exactly: with {cause} its learning rate already falls for step "
                f"{begin}\n      a stage with {stage.source}.optim.schedule.decay=constant and no cool-down can be"
            )
            return
        name = f"{stage.name}-longer"
        settings = [f"{stage.source}.steps={begin}"]
        if before.get("passes") is not None:
            settings = [f"{stage.source}.steps=null", f"{stage.source}.passes={before['passes']}"]
        if schedule.cooldown_steps:
            settings.append(f"{stage.source}.optim.schedule.cooldown_steps=0")
        for field, value in {
            "kind": stage.kind.name,
            "init": f"@{stage.name}",
            "begin": begin,
            "steps": steps,
            "optim.schedule.cooldown_steps": min(max(steps // 10, 1), steps - begin),
        }.items():
            settings.append(f"{name}.{field}={value}")
        yield (
            f"extend it with a new cool-down: python -m jobs run RECIPE {' '.join(settings)}\n      "
            f"{stage.name} ends at step {begin}; {name} continues it to step {steps} with the same optimizer state and "
            "sample order, like one run of this length"
        )

    def before(self, cfg: BranchConfig, context: Context) -> None:  # type: ignore[override]
        """Link the trunk's checkpoint as the first checkpoint of a branch, and log the forecast of a law."""
        if cfg.first_step and not context.checkpoints.committed():
            branch_off(cfg, cfg.first_step, context)
        if getattr(cfg, "law", None) is not None:
            forecast = forecast_of(cfg, context)
            name = Path(context.campaign.path_of(cfg.law or "")).parent.name
            context.log(
                f"{context.stage.name}: {name} predicts {forecast.metric} {forecast.value:.4f} "
                f"[{forecast.low:.4f}, {forecast.high:.4f}] at step {forecast.step}"
            )

    def after(self, cfg: BranchConfig, context: Context, outcome: dict[str, Any]) -> None:  # type: ignore[override]
        """Compare the forecast with the result of the last evaluation."""
        if getattr(cfg, "law", None) is not None:
            forecast = forecast_of(cfg, context, outcome["step"])
            outcome["foretold"] = forecast.score(outcome["metrics"][forecast.metric], context.log)


# ------------------------------------------------------------------------------------------------ branches


def check_branch(stage: Stage, available: Available) -> None:
    """Raise ConfigError if a branch would differ from its trunk trained for the same number of steps."""
    cfg: BranchConfig = stage.config
    begin = cfg.begin
    link = reference(cfg.init or "")
    require(
        available.campaign.remote is None,
        f"{stage.name}.begin is not supported for runs in an object store; set run to a folder",
    )
    # A branch changes the number of steps, and with it the phases of token dropping.
    is_alike = stage.model is None or has_one_shape(cfg.phases(MANY_STEPS, stage.model), stage.model)
    require(
        is_alike,
        f"{stage.name}.begin: a branch cannot use token dropping (thinning), whose phases depend on the number of "
        "steps; remove thinning",
    )
    assert begin is not None, "called only for branches"
    if link is None:
        raise ConfigError(
            f"{stage.name}.begin: init is {cfg.init}, expected a stage of this recipe\n"
            "  add the trunk's section to this recipe, and set `run` to its run directory; a finished stage is skipped"
        )
    trunk = available.campaign.stage(link[0])
    require(
        trunk.kind.trains,
        f"{stage.name}.begin: {trunk.name} is of kind {trunk.kind.name}, which does not train; set init to a training "
        "stage",
    )
    own: TrainConfig = trunk.config
    before = config.tagged(own, "forbid")
    after = config.tagged(cfg, "forbid")
    for values, model in ((before, trunk.model), (after, stage.model)):
        for name in list(values):
            if name.split(".")[0] in BRANCH_FIELDS or name == "optim.schedule.cooldown_steps":
                del values[name]
        # Compare the resolved models, because a branch takes its model from the weights of its trunk.
        if model is not None:
            for name, value in models.to_dict(model).items():
                values[f"model.{name}"] = value
    changes = config.differences(before, after)
    require(
        not changes,
        f"{stage.name} is a branch of {trunk.name}, but these values differ: "
        f"{'; '.join(changes.values())}\n  remove them; only steps and optim.schedule.cooldown_steps may differ",
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
        f"{stage.name}.begin is {begin}, but {trunk.name} keeps no checkpoint of this step: it trains {trunk_end} "
        f"steps with keep_every={own.keep_every} and save_every={own.save_every}\n"
        f"  set {trunk.source}.keep_every={begin} {trunk.source}.save_every={begin}, or choose another begin",
    )
    require(
        begin < end,
        f"{stage.name} begins at step {begin} and ends at step {end}, so no steps are left to train; increase its "
        "number of steps",
    )
    rates = []
    for part, steps in ((own, trunk_end), (cfg, end)):
        rates.append(learning_rate(begin - 1, steps, part.optim.lr, part.optim.schedule))
    require(
        rates[0] == rates[1],
        f"{stage.name}: the learning rate of step {begin} is {rates[0]:.3g} in {trunk.name}, but {rates[1]:.3g} in a "
        f"run of {end} steps\n"
        "  expected optim.schedule.decay constant or rsqrt, and no cool-down before `begin`",
    )


def branch_off(cfg: TrainConfig, begin: int, context: Context) -> None:
    """Link the trunk's commit at step `begin` as the branch's first commit, from which the branch then resumes.

    Raises DataError if the trunk has no such commit, CheckpointError if the commit is damaged, or OSError if its files
    cannot be linked or copied.
    """
    trunk = Path(context.campaign.path_of(cfg.init or ""))
    commits = checkpoints_in(trunk / "checkpoints")
    names = {}
    for name in reversed(commits.committed()):
        names[step_of(Path(name))] = name
    if begin not in names:
        raise DataError(
            f"{context.stage.name}.begin is {begin}, but {trunk} has no commit of this step\n"
            f"  expected one of {', '.join(map(str, sorted(names))) or 'none'}: "
            "a multiple of the trunk's keep_every and save_every"
        )
    # Copy the trunk's excluded steps before `begin`.
    if (trunk / artifacts.EXCLUDED_STEPS).exists():
        pairs = artifacts.read_record(trunk / artifacts.EXCLUDED_STEPS)["stretches"]
        earlier = []
        for pair in pairs:
            if pair[0] < begin:
                earlier.append(pair)
        artifacts.write_record(context.directory / artifacts.EXCLUDED_STEPS, {"stretches": earlier})
    link_checkpoint(commits.local / names[begin], context.checkpoints, context.stage.key)


# ------------------------------------------------------------------------------------------------ laws


def check_law(stage: Stage, available: Available) -> None:
    """Raise ConfigError if a law predicts a metric that the stage lacks, or needs a value unknown before the run."""
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
        return  # missing inputs are reported elsewhere, all together
    elif link is None:
        record = artifacts.read_record(path)
        y = record.get("y", "")
        fitted = record.get("fit", {}).get("axes", ())
    require(bool(fitted), f"{stage.name}.law: {law} has no fit\n  expected @FIGURE/figure.json of a figure with `fit`")
    metrics = list(stage.kind.metrics(stage.config))
    require(
        y in metrics,
        f"{stage.name}.law: {law} predicts {y}, which the stage does not report{did_you_mean(y, metrics)}\n"
        f"  expected one of {', '.join(metrics) or 'none'}: data.evaluate adds accuracy, probe adds 5shot and so on",
    )
    for axis in fitted:
        require(
            axis in AT_A_STEP,
            f"{stage.name}.law: {law} needs {axis}, which is unknown until the stage has run"
            f"{did_you_mean(axis, AT_A_STEP)}\n  expected a fit over some of {', '.join(AT_A_STEP)}",
        )


@dataclass(frozen=True)
class Forecast:
    """A law's prediction of an evaluation, with its 90 % interval."""

    metric: str
    step: int
    value: float
    low: float
    high: float

    def score(self, was: float, log: Callable[[str], None]) -> dict[str, float | bool | str]:
        """Check whether the measured result `was` is inside the interval; log and return the verdict."""
        is_inside = self.low <= was <= self.high
        verdict = "inside" if is_inside else "OUTSIDE"
        log(
            f"predicted {self.metric} {self.value:.4f} [{self.low:.4f}, {self.high:.4f}] at step {self.step}, "
            f"measured {was:.4f}: {verdict}"
        )
        score: dict[str, float | bool | str] = {"metric": self.metric, "value": self.value, "low": self.low}
        return {**score, "high": self.high, "was": was, "is_inside": is_inside}


def forecast_of(cfg: BranchConfig, context: Context, step: int | None = None) -> Forecast:
    """Return the forecast by `cfg.law` for the evaluation at a step, by default the last step."""
    figure = artifacts.read_record(Path(context.campaign.path_of(cfg.law or "")))
    law = law_of(figure["fit"]["law"])
    steps = planned_steps(cfg, Available(context.campaign))
    assert steps is not None, "a stage starts only when its sets exist"
    at = step or steps
    axes = axes_at(cfg, context.model, at, steps)
    x = np.array([[axes[axis] for axis in figure["fit"]["axes"]]])
    # The law describes the error, 1 − metric.
    (low,), (high,) = law.interval_at(x)
    (error,) = law.at(x)
    return Forecast(figure["y"], at, value=float(1 - error), low=float(1 - high), high=float(1 - low))


# ------------------------------------------------------------------------------------------------ budgets


def compute_of(campaign: Campaign) -> Compute:
    """Return the compute of all training stages of a campaign, including finished ones."""
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


def read_budget(value: Any) -> float:
    """Return a recipe's `budget` in exaFLOPs. Raises ConfigError unless it is a number greater than 0."""
    budget = None
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        budget = read_number(value, "budget", whole=False)
    if budget is None or budget <= 0:
        raise ConfigError(f"budget is {value}, expected a number of exaFLOPs greater than 0")
    return budget


def check_budget(campaign: Campaign) -> None:
    """Raise ConfigError if the training stages exceed `budget`, or if their compute is unknown."""
    assert campaign.budget is not None, "called only for a recipe with a budget"
    compute = compute_of(campaign)
    require(
        not compute.uncounted,
        f"budget is {campaign.budget:g} exaFLOPs, but the compute of {', '.join(compute.uncounted)} is unknown\n"
        "  if the data does not exist yet, set data.samples=…",
    )
    require(
        compute.planned <= campaign.budget,
        f"budget is {campaign.budget:g} exaFLOPs, but the recipe needs {compute.planned:.4g}\n"
        f"  set budget={compute.planned:.4g}, or remove runs; python -m jobs plan lists the compute of each stage",
    )
