"""The names of the classes of a stage's sets and weights: the same id must mean the same class in all of them.

1. `check` compares the sets that share their classes (`StageKind.shared_classes`), and the
   weights whose head the stage goes on with. Where an id has two names the stage is refused.
2. `of_stage` returns the names of a stage's model's outputs, which are handed on with its weights (classes.json).

    pretrain: data.train is called airplane, bird, cat; data.evaluate is called bird, cat      refused: class 0 has two
"""

from pathlib import Path

import models
from data.errors import DataError
from data.index.names import Names, agreed_names
from jobs.recipe.key import model_at
from jobs.resolved_recipe import Available, Stage, reference
from models.weights.folder import CLASSES, CONFIG
from pipeline.evaluation import any_weights


def check(stage: Stage, available: Available) -> None:
    """Raise DataError where two sets of a stage, or a set and the weights whose head it keeps, call an id differently.

    Sets that have not been made yet, and those without names, are taken as they are.
    """
    for shared in stage.kind.shared_classes(stage.config):
        named: list[tuple[str, Names]] = []
        if shared.with_head and keeps_head_of_weights(stage, available):
            named.append((f"the weights {stage.config.init}", of_weights(stage.config.init, available)))
        for field, path in shared.sets.items():
            for index in available.made([path]):
                named.append((f"{field} ({path})", index.names))
        agreed_names(named, stage.name)


def of_stage(stage: Stage, available: Available) -> Names:
    """Return what the outputs of a stage's model are called, as far as its sets or its weights tell; or nothing."""
    trained: list[tuple[str, Names]] = []
    for shared in stage.kind.shared_classes(stage.config):
        for field in shared.trained:
            for index in available.made([shared.sets[field]]):
                trained.append((shared.sets[field], index.names))
    names = agreed_names(trained, stage.name)
    if not names and keeps_head_of_weights(stage, available):
        names = of_weights(stage.config.init, available)
    return names


def of_weights(init: str, available: Available) -> Names:
    """Return what the outputs of weights are called: those of a folder, or those that a stage will write."""
    folder = Path(available.campaign.path_of(init))
    if (folder / CONFIG).is_file() or any_weights.is_foreign(str(folder)):
        try:
            return models.load_class_names(folder)
        except ValueError as error:
            raise DataError(f"{folder / CLASSES} is torn or altered: {error}\n  bring it back from a copy") from None
    link = reference(init)
    if link is None:
        return ()
    parent, _ = link
    return of_stage(available.campaign.stage(parent), available)


def keeps_head_of_weights(stage: Stage, available: Available) -> bool:
    """Tell whether a stage goes on with the head of its weights, so that its sets must be numbered as theirs."""
    init = getattr(stage.config, "init", None)
    if init is None:
        return False
    link = reference(init)
    if link is not None:
        parent, _ = link
        source = available.campaign.stage(parent).model
    else:
        source = model_at(init)
    return stage.kind.keeps_head(stage.config, source, stage.model)
