"""The kinds of stages that a recipe may have."""

from jobs.extras.studies import figure, speed, table
from jobs.resolved_recipe import StageKind
from jobs.stages import evaluate, fewshot, pack, resize, training

ALL = (
    pack.Pack(),
    training.Pretrain(),
    resize.Resize(),
    training.Finetune(),
    fewshot.FewShot(),
    evaluate.Evaluate(),
    table.Table(),
    figure.Figure(),
    speed.Speed(),
)
KINDS: dict[str, StageKind] = {kind.name: kind for kind in ALL}
