"""Finished stages that are asked to be judged on other sets than they were: their weights are, without training.

`data.evaluate`, `data.preprocess` and `probe` of a trained stage are not in its key: a finished stage stays finished
when they change. `with_new_evaluations` compares them with what the stage recorded, sets by their content and not by
their paths, and puts a stage of kind evaluate behind it, which is run, skipped and shown as any other.

    finetune, finished with data.evaluate=@shards/test, and now data.evaluate=@other/test
    →  finetune, skipped; finetune-evaluate, {init: "@finetune", sets: {evaluate: {test: "@other/test"}}}
"""

from dataclasses import replace
from typing import Any

from jobs.recipe import key
from jobs.recipe.records import changed_warnings
from jobs.recipe.validate import refuse, validate
from jobs.resolved_recipe import Available, Campaign, Stage
from jobs.stages import evaluate
from pipeline.artifacts import DIVERGED, STOPPED
from pipeline.evaluation.protocols import FewShotConfig
from pipeline.training_config import TrainConfig

# Of a trained stage, what its accuracy is of, and what its few-shot accuracy is of.
ACCURACY_FIELDS = ("data.evaluate", "data.preprocess")
PROBE_FIELDS = ("probe.train", "probe.test", "probe.shots", "probe.seeds", "probe.l2", "data.preprocess")


def with_new_evaluations(campaign: Campaign) -> Campaign:
    """Return the campaign with a stage behind each finished one that is asked to be judged otherwise than it was."""
    stages: list[Stage] = []
    new: list[Stage] = []
    for stage in campaign.stages:
        stages.append(stage)
        done = campaign.done(stage)
        if not stage.kind.trains or done is None or {DIVERGED, STOPPED} & done.keys():
            continue
        cfg: TrainConfig = stage.config
        changed = set(changed_warnings(campaign.directory(stage), stage))
        evaluations: list[Stage] = []
        if changed & set(ACCURACY_FIELDS) and cfg.data.evaluate is not None:
            sets = {"evaluate": evaluate.EvaluatedSet(cfg.data.evaluate)}
            evaluations.append(evaluation_of(campaign, stage, "evaluate", sets=sets, protocols=("top-1",)))
        if changed & set(PROBE_FIELDS) and cfg.probe.train is not None and cfg.probe.test is not None:
            sets = {"probe": evaluate.EvaluatedSet(cfg.probe.test, cfg.probe.train)}
            shots = FewShotConfig(cfg.probe.shots, cfg.probe.seeds, cfg.probe.l2)
            protocols = ("fewshot",)
            evaluations.append(evaluation_of(campaign, stage, "probe", sets=sets, protocols=protocols, fewshot=shots))
        stages += evaluations
        new += evaluations
    extended = replace(campaign, stages=tuple(stages))
    there = Available(extended, looks_at_files=False)
    for stage in new:
        refuse(validate(stage, there))
    return extended


def evaluation_of(campaign: Campaign, stage: Stage, suffix: str, **judged: Any) -> Stage:
    """Return a stage of kind evaluate that judges another's weights as training would have judged them."""
    names = {other.name: other for other in campaign.stages}
    name = f"{stage.name}-{suffix}"
    while name in names:
        name += "-again"
    cfg: TrainConfig = stage.config
    preprocess = cfg.data.preprocess
    # What the weights were judged with lies beside them, and is not what the recipe asks for now.
    if preprocess is None and stage.model is not None:
        preprocess = f"resize({stage.model.image_size})"
    judging = evaluate.Config(
        init=f"@{stage.name}",
        preprocess=preprocess,
        max_labels=cfg.data.max_labels,
        micro_batch=cfg.micro_batch,
        precision=cfg.precision,
        cache=cfg.data.cache,
        stall_s=cfg.stall_s,
        **judged,
    )
    return replace(key.resolve(Stage(name, evaluate.Evaluate(), judging, name), names, {}), judges=stage.name)
