"""What the classes of a stage's sets and weights are called: the same id must mean the same class in all of them.

1. `check` compares, for each stage, the sets that it trains on with the one that it evaluates on, and with the weights
   whose head it keeps; and the two sets of a probe with each other. Where an id has two names the stage is refused.
   So is an evaluation whose sets are called otherwise than the head that it judges, or than the sets it learns from.
2. `of_stage` says what the outputs of a stage's model are called, which is handed on with its weights (classes.json).
3. `lines` says for `plan` which names there are, and whose labels are taken on trust because nobody knows any.

    pretrain: data.train is called airplane, bird, cat; data.evaluate is called bird, cat      refused: class 0 has two
"""

import json
from pathlib import Path

import models
from data.errors import DataError
from data.index.index import Index
from data.index.names import Names, agreed, some
from jobs.context import index_if_made, reference
from jobs.resolved_recipe import Campaign, Stage
from jobs.stages import any_weights, evaluate, fewshot
from models.weights.files import CLASSES, CONFIG
from pipeline.evaluation.protocols import ProbeConfig
from pipeline.training_config import TrainConfig


def check(campaign: Campaign, stage: Stage) -> None:
    """Raise DataError where two sets of a stage, or a set and the weights whose head it keeps, call an id differently.

    Sets that have not been made yet, and those without names, are taken as they are.
    """
    cfg = stage.config
    if isinstance(cfg, TrainConfig) and cfg.objective != "masked":
        named: list[tuple[str, Names]] = []
        if cfg.init is not None and keeps_head(campaign, stage):
            named.append((f"the weights {cfg.init}", of_weights(campaign, cfg.init)))
        for label, index in labelled_sets(campaign, cfg):
            named.append((label, index.names))
        agreed(named, stage.name)
    if isinstance(cfg, TrainConfig | fewshot.Config):
        probed = probed_sets(campaign, cfg.probe)
        agreed([(label, index.names) for label, index in probed], stage.name)
    if isinstance(cfg, evaluate.Config):
        check_judged(campaign, stage, cfg)


def check_judged(campaign: Campaign, stage: Stage, cfg: evaluate.Config) -> None:
    """Raise DataError where a set is called otherwise than the weights' head, or than the set to learn from."""
    head: list[tuple[str, Names]] = []
    if cfg.uses_head():
        head.append((f"the weights {cfg.init}", of_weights(campaign, cfg.init)))
    for name, judged in cfg.sets.items():
        test = judged_sets(campaign, {f"sets.{name}.test": judged.test})
        agreed([*head, *test], stage.name)
        # What it learns from needs no head: these may be other classes than the weights'.
        if judged.train is not None:
            agreed([*test, *judged_sets(campaign, {f"sets.{name}.train": judged.train})], stage.name)


def of_stage(campaign: Campaign, stage: Stage) -> Names:
    """Return what the outputs of a stage's model are called, as far as its sets or its weights tell; or nothing."""
    cfg = stage.config
    if stage.kind in ("resize", "evaluate"):
        return of_weights(campaign, cfg.init)
    if not isinstance(cfg, TrainConfig) or cfg.objective == "masked":
        return ()
    trained_on = []
    for path, _weight in cfg.data.sets().values():
        index = set_at(campaign, path)
        if index is not None:
            trained_on.append((path, index.names))
    names = agreed(trained_on, stage.name)
    if not names and cfg.init is not None and keeps_head(campaign, stage):
        names = of_weights(campaign, cfg.init)
    return names


def of_weights(campaign: Campaign, init: str) -> Names:
    """Return what the outputs of weights are called: those of a folder, or those that a stage will write."""
    folder = Path(campaign.resolve(init) or "")
    if (folder / CONFIG).is_file() or any_weights.is_foreign(str(folder)):
        try:
            return models.load_class_names(folder)
        except ValueError as error:
            raise DataError(f"{folder / CLASSES} is torn or altered: {error}\n  bring it back from a copy") from None
    link = reference(init)
    if link is None:
        return ()
    parent, _ = link
    return of_stage(campaign, campaign.stage(parent))


def keeps_head(campaign: Campaign, stage: Stage) -> bool:
    """Tell whether a stage goes on with the head of its weights, so that its sets must be numbered as theirs."""
    # Of weights that are missing nothing is known; the stage will be looked at again before it runs.
    if stage.model is None:
        return False
    link = reference(stage.config.init)
    if link is not None:
        parent, _ = link
        source = campaign.stage(parent).model
    else:
        path = Path(stage.config.init, CONFIG)
        source = models.from_dict(json.loads(path.read_text())) if path.is_file() else None
    return source is not None and models.keeps_head(source, stage.model, stage.config.new_head)


def lines(campaign: Campaign, stage: Stage) -> list[str]:
    """Return what `plan` says of the classes' names: which there are, and which sets have none."""
    cfg = stage.config
    sets: list[tuple[str, Index]] = []
    if isinstance(cfg, TrainConfig) and cfg.objective != "masked":
        sets += labelled_sets(campaign, cfg)
    if isinstance(cfg, TrainConfig | fewshot.Config):
        sets += probed_sets(campaign, cfg.probe)
    if isinstance(cfg, evaluate.Config):
        sets += those_made(campaign, cfg.paths())
    nameless: list[str] = []
    said: list[str] = []
    for label, index in sets:
        if not index.names:
            nameless.append(label)
        elif not said:
            said.append(f"names   {some(index.names)}")
    if nameless:
        said.append(f"names   none in {', '.join(nameless)}: labels are taken on trust")
    return said


# ------------------------------------------------------------------------------------------------ sets


def labelled_sets(campaign: Campaign, cfg: TrainConfig) -> list[tuple[str, Index]]:
    """Return the sets whose labels the head must know, as far as they are there, each with what the recipe calls it."""
    paths = {}
    for name, (path, _weight) in cfg.data.sets().items():
        field = f"data.mixture.{name}.train" if cfg.data.mixture else "data.train"
        paths[f"{field} ({path})"] = path
    if cfg.data.evaluate is not None:
        paths[f"data.evaluate ({cfg.data.evaluate})"] = cfg.data.evaluate
    return those_made(campaign, paths)


def probed_sets(campaign: Campaign, probe: ProbeConfig) -> list[tuple[str, Index]]:
    """Return the two sets of a probe, as far as they are there."""
    paths = {}
    for field, path in (("probe.train", probe.train), ("probe.test", probe.test)):
        if path is not None:
            paths[f"{field} ({path})"] = path
    return those_made(campaign, paths)


def judged_sets(campaign: Campaign, paths: dict[str, str]) -> list[tuple[str, Names]]:
    """Return what sets of an evaluation are called, by field and path, as far as they are there."""
    made = those_made(campaign, {f"{field} ({path})": path for field, path in paths.items()})
    return [(label, index.names) for label, index in made]


def those_made(campaign: Campaign, paths: dict[str, str]) -> list[tuple[str, Index]]:
    """Return the indexes of those sets that are there, each with its label; `paths` are by label."""
    sets = []
    for label, path in paths.items():
        index = set_at(campaign, path)
        if index is not None:
            sets.append((label, index))
    return sets


def set_at(campaign: Campaign, path: str) -> Index | None:
    """Return the index of a set that a recipe names; None where it has not been made yet."""
    return index_if_made(campaign.resolve(path) or "")
