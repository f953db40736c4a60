"""Suggest commands that re-evaluate a finished stage after the recipe's evaluation settings have changed."""

import shlex
from collections.abc import Collection

from jobs.resolved_recipe import Campaign, Stage
from jobs.stages.evaluate import EvaluateConfig
from jobs.stages.training import TrainingExtra
from jobs.terminal import COMMAND
from pipeline.artifacts import DIVERGED
from pipeline.evaluation.protocols import FewShotConfig
from pipeline.training_config import TrainConfig
from pipeline.values import shown

# Settings of a training stage that affect its accuracy and its few-shot accuracy.
ACCURACY_FIELDS = ("data.evaluate", "data.preprocess")
PROBE_FIELDS = ("probe.train", "probe.test", "probe.shots", "probe.seeds", "probe.l2", "data.preprocess")
EVALUATION_FIELDS = tuple(dict.fromkeys((*ACCURACY_FIELDS, *PROBE_FIELDS)))


class Reevaluation(TrainingExtra):
    """Reports how to re-evaluate a finished stage after its evaluation settings have changed."""

    def repeat_evaluation(
        self, campaign: Campaign, stage: Stage, changed: Collection[str]
    ) -> tuple[Collection[str], list[str]]:
        """Return the evaluation settings, and the commands that re-evaluate the stage with their current values."""
        commands = evaluation_commands(campaign, stage, changed)
        return (EVALUATION_FIELDS if commands else ()), commands


def evaluation_commands(campaign: Campaign, stage: Stage, changed: Collection[str]) -> list[str]:
    """Return the commands that re-evaluate a finished stage with the recipe's current settings.

    `changed` names the fields changed since the stage finished. `data.evaluate`, `data.preprocess` and `probe`
    are not part of a stage's key, so changing them does not repeat the training. The list is empty if none of these
    fields has changed, or if the stage has no weights.

        python -m jobs evaluate runs/digits/finetune-1a2b3c4d indexes/other
        python -m jobs evaluate runs/digits/finetune-1a2b3c4d indexes/test train=indexes/train --protocol fewshot
    """
    outcome = campaign.done(stage) or {}
    if DIVERGED in outcome:
        return []
    cfg: TrainConfig = stage.config
    evaluate = ["evaluate", str(campaign.directory(stage))]
    settings = []
    # By default, the command uses the preprocessing recorded with the weights.
    if "data.preprocess" in changed and (cfg.data.preprocess is not None or stage.model is not None):
        preprocess = cfg.data.preprocess
        if preprocess is None and stage.model is not None:
            preprocess = f"resize({stage.model.image_size})"
        settings.append(f"preprocess={preprocess}")
    defaults = EvaluateConfig()
    if cfg.data.max_labels > defaults.max_labels:
        settings.append(f"max_labels={cfg.data.max_labels}")
    for name, value in (("micro_batch", cfg.micro_batch), ("precision", cfg.precision)):
        if value != getattr(defaults, name):
            settings.append(f"{name}={value}")
    commands = []
    if cfg.data.evaluate is not None and set(changed) & set(ACCURACY_FIELDS):
        commands.append([*evaluate, campaign.path_of(cfg.data.evaluate), *settings])
    probe = cfg.probe
    if probe.test is not None and probe.train is not None and set(changed) & set(PROBE_FIELDS):
        few_shot = [f"train={campaign.path_of(probe.train)}"]
        for name in ("shots", "seeds", "l2"):
            value = getattr(probe, name)
            if value != getattr(FewShotConfig(), name):
                few_shot.append(f"fewshot.{name}={shown(value)}")
        test = campaign.path_of(probe.test)
        commands.append([*evaluate, test, *few_shot, *settings, "--protocol", "fewshot"])
    return [f"{COMMAND} {shlex.join(command)}" for command in commands]
