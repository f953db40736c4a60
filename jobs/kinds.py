"""The kinds of stages that a recipe may have."""

from jobs.extras.studies import figure, speed, table
from jobs.resolved_recipe import StageKind
from jobs.stages import evaluate, fewshot, pack, resize, training

ALL = (
    pack.KIND,
    training.PRETRAIN,
    resize.KIND,
    training.FINETUNE,
    fewshot.KIND,
    evaluate.KIND,
    table.KIND,
    figure.KIND,
    speed.KIND,
)
KINDS: dict[str, StageKind] = {kind.name: kind for kind in ALL}
