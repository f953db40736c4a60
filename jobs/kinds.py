"""The kinds of stages that a recipe may have."""

from jobs.extras.studies import figure, speed, table
from jobs.resolved_recipe import StageKind
from jobs.stages import evaluate, fewshot, pack, resize, training

# Extras of the stages that train, as text: one whose folder is missing is not available.
TRAINING_EXTRAS = training.load_extras(
    "jobs.extras.studies.law:Branches",
    "jobs.extras.token_dropping:TokenDropping",
    "jobs.extras.async_evaluation.extra:AsyncEvaluation",
    "jobs.extras.best:Best",
    "jobs.extras.planning.memory_check:MemoryCheck",
)
ALL = (
    pack.Pack(),
    training.Pretrain(TRAINING_EXTRAS),
    resize.Resize(),
    training.Finetune(TRAINING_EXTRAS),
    fewshot.FewShot(),
    evaluate.Evaluate(),
    table.Table(),
    figure.Figure(),
    speed.Speed(),
)
KINDS: dict[str, StageKind] = {kind.name: kind for kind in ALL}
