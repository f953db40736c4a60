"""Check that a class id means the same class in all data sets and weights of a stage.

1. `check` compares the class names of data sets that share their classes (`StageKind.shared_classes`) and, if the stage
   keeps the head of its initial weights, the class names of these weights. It raises DataError if an id has two names.
2. `of_stage` returns the class names of the model's outputs, which are saved with its weights (classes.json).

    pretrain: data.train has airplane, bird, cat; data.evaluate has bird, cat      error: class 0 has two names
"""

from pathlib import Path

import models
from data.errors import DataError
from data.index.names import Names, agreed_names
from jobs.resolved_recipe import Available, Stage, reference
from models.weights.folder import CLASSES, CONFIG
from pipeline.evaluation import any_weights


def check(stage: Stage, available: Available) -> None:
    """Raise DataError if a class id has different names in the data sets or initial weights of a stage.

    Weights are compared only if the stage keeps their head. Data sets that do not exist yet or have no class names are
    not compared.
    """
    for shared in stage.kind.shared_classes(stage.config):
        named: list[tuple[str, Names]] = []
        if shared.with_head and stage.keeps_head:
            named.append((f"the weights {stage.config.init}", of_weights(stage.config.init, available)))
        for field, path in shared.sets.items():
            for index in available.made([path]):
                named.append((f"{field} ({path})", index.names))
        agreed_names(named, stage.name)


def of_stage(stage: Stage, available: Available) -> Names:
    """Return the class names of the model's outputs, from the stage's data sets or initial weights; () if unknown."""
    trained: list[tuple[str, Names]] = []
    for shared in stage.kind.shared_classes(stage.config):
        for field in shared.trained:
            for index in available.made([shared.sets[field]]):
                trained.append((shared.sets[field], index.names))
    names = agreed_names(trained, stage.name)
    if not names and stage.keeps_head:
        names = of_weights(stage.config.init, available)
    return names


def of_weights(init: str, available: Available) -> Names:
    """Return the class names of the weights in a folder or from an earlier stage; () if they are unknown."""
    folder = Path(available.campaign.path_of(init))
    if (folder / CONFIG).is_file() or any_weights.is_foreign(str(folder)):
        try:
            return models.load_class_names(folder)
        except ValueError as error:
            raise DataError(f"{folder / CLASSES} is damaged: {error}\n  restore it from a copy") from None
    link = reference(init)
    if link is None:
        return ()
    parent, _ = link
    return of_stage(available.campaign.stage(parent), available)
