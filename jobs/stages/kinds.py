"""The kinds of stages that a recipe may have."""

from jobs.resolved_recipe import StageKind
from jobs.stages import evaluate, fewshot, figure, pack, resize, speed, sweep, training

ALL = (
    pack.KIND,
    training.PRETRAIN,
    resize.KIND,
    training.FINETUNE,
    fewshot.KIND,
    evaluate.KIND,
    sweep.KIND,
    figure.KIND,
    speed.KIND,
)
KINDS: dict[str, StageKind] = {kind.name: kind for kind in ALL}
