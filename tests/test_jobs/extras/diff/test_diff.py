"""`jobs diff` lists differences in meaning between two recipes, and no differences in notation."""

import json
import re
import shlex
from pathlib import Path

import pytest

from jobs.__main__ import main
from tests.support.recipe_diffs import lines_of, read_shipped_recipes_once, subjects, write_variant
from tests.support.recipes import TINY

ROOT = Path(__file__).parents[4]
I1K = "table3/vit_i1k"
I21K = "table3/vit_i21k"
JFT = "table3/vit_jft300m"
BEYER = "vit_s16_i1k"
TRANSFER = "transfer/cifar10"
L16 = "vit_l16_i21k"
B16 = "vit_b16_i1k"

# Frequent deviations from the paper, taken from docs/design/SPEC.md (section in the comment) and not from the code:
# recipe, deviation, subject of the difference, and a text in its lines.
PLANTED = [
    (I21K, "pretrain.optim.schedule.end=0", "learning-rate schedule and its end", "1e-5 and not at 0"),  # 2.1, 2.3
    (JFT, "pretrain.optim.schedule.decay=cosine", "learning-rate schedule and its end", "table 3"),  # 2.1
    (JFT, "pretrain.optim.schedule.warmup_steps=500", "warm-up", "10,000 steps"),  # 2.1
    (I1K, "pretrain.optim.weight_decay=9e-4", "weight decay", "big_vision's convention"),  # 2.2: 0.3 · lr 3e-3
    (I21K, "pretrain.optim.head_weight_decay=3", "weight decay", "3 on the head"),  # 2.6
    (I1K, "pretrain.optim.lr=3e-4", "peak learning rate", "3e-3"),  # 2.1
    (I1K, "pretrain.data.augment={min_area: 0.08}", "training crop", "RandomResizedCrop keeps 8 %"),  # 2.5
    (I1K, "pretrain.data.augment.flip=false", "flip", "bd20fee"),  # 2.4
    (I1K, "pretrain.data.preprocess=null", "preprocessing at evaluation", "resize_small(256)"),  # 2.5
    (I21K, "pretrain.loss=softmax", "loss", "issue 34"),  # 1.5
    (I21K, "pretrain.model.head_bias=0", "head and its initialization", "-10"),  # 1.5
    (I1K, "pretrain.model.representation=null", "head and its initialization", "tanh"),  # 1.5
    (I1K, "pretrain.label_smoothing=0.1", "label smoothing", "issue 89"),  # 2.1
    (I1K, "pretrain.passes=90", "images seen", "384,348,160"),  # 2.1
    (JFT, "pretrain.optim.clip=1", "gradient clipping", "only on ImageNet"),  # 2.1
    (JFT, "pretrain.data.max_labels=1", "labels per image", "several labels"),  # 2.1
    (JFT, "pretrain.model.dropout=0.1", "dropout", "84.53"),  # 1.3, 2.4
    (I1K, "pretrain.optim.beta2=0.95", "optimizer betas, eps and momentum", "0.999"),  # 2.1
    (TRANSFER, "resize.image_size=224", "resolution", "81.2 %"),  # 2.4
    (TRANSFER, "finetune.optim.name=adam", "optimizer", "table 7"),  # 2.7, D.1
    (TRANSFER, "finetune.steps=1000", "images seen", "CIFAR 10,000"),  # 2.4
    (TRANSFER, "finetune.new_head=false", "head and its initialization", "zero-init"),  # 1.5
    (L16, "finetune-imagenet.polyak=0", "exported weights", "0.9999"),  # 2.4
    (BEYER, "pretrain.mixup=0", "RandAugment and mixup", "73.6"),  # 2.6
    (BEYER, "pretrain.model={pool: token, class_slot: false}", "pooling", "76.9"),  # 2.6
    (BEYER, "pretrain.model.positions=learned", "position embeddings", "75.0"),  # 2.6
    (I1K, "pretrain.model.activation=gelu", "activation and norms", "2e-4"),  # 1.1
    (I1K, "pretrain.model.patch=32", "model", "80.73"),  # 1.7
    (I21K, "pretrain.model.classes=19167", "training data", "21,843"),  # winter21 has fewer, docs/data-sets.md
    (B16, "real.preprocess=resize(384)", "preprocessing at evaluation", "configs/transfer.py"),  # 2.5
    (B16, "fewshot.probe.l2=1", "evaluation protocol", "l2 1024"),  # 4
    (I1K, "pretrain.precision=fp32", "precision", "float32"),
    (I1K, "pretrain.seed=1", "seed", "seed"),
    (TRANSFER, "finetune.sweep.seeds=[0]", "number of runs", "three"),  # 2.4
    (TRANSFER, "finetune.sweep.grid.optim.lr=[0.1,0.3]", "peak learning rate", "0.001, 0.003, 0.01, 0.03"),  # 2.4
]

# The same stage, expressed differently.
EQUAL = [
    (I1K, ["pretrain.passes=null", "pretrain.steps=93835"]),  # SPEC 2.1
    (I1K, ["pretrain.micro_batch=16", "cluster.workers=4", "pretrain.zero=3", "pretrain.checkpoint_blocks=12"]),
    (BEYER, ["pretrain.model.name=mu/16", "pretrain.model={width: 384, depth: 12, mlp: 1536, heads: 6}"]),
    (I1K, ["pretrain.model.name=ViT-B/16", "pretrain.model={heads: 12, pool: token, position_std: 0.02}"]),
    (I1K, ["pretrain.optim={head_weight_decay: 0.3, beta1: 0.9, momentum: 0.5}"]),
    (TRANSFER, ["finetune.optim={beta2: 0.5, eps: 1.0, head_weight_decay: 0}"]),
    (I1K, ["pretrain.data.preprocess=decode|resize_small(256)|central_crop(224)"]),
    (I1K, ["pretrain.data.augment={randaug_magnitude: 5, max_aspect: 1.33}", "pretrain.data.lanes=64"]),
    (I1K, ["pretrain.data={train: null, mixture: {all: {train: elsewhere/train, weight: 3}}}", "run=elsewhere"]),
    (I1K, ["pretrain.thinning.patch_dropout_until=0.5", "pretrain.optim.schedule.timescale=7", "pretrain.keep=9"]),
    (JFT, ["pretrain={log_every: 7, save_every: 9, stall_s: 60, compile: true, evaluate_every: 100}"]),
    (B16, ["real={micro_batch: 8, knn: {k: [3]}}", "fewshot.preprocess=resize(224)"]),
    (L16, ["finetune-imagenet.model.dropout=0.1", "pretrain.optim.schedule.drops=[]"]),
]


@pytest.fixture(autouse=True)
def shipped_recipes_are_read_once(monkeypatch):
    read_shipped_recipes_once(monkeypatch)


@pytest.mark.parametrize(("recipe", "deviation", "subject", "evidence"), PLANTED)
def test_only_the_deviation_is_listed_and_its_overrides_remove_it(
    tmp_path, capsys, recipe, deviation, subject, evidence
):
    mine = write_variant(tmp_path, recipe, deviation)
    lines = lines_of(capsys, mine, recipe)
    assert subjects(lines) == [subject]
    # Join the lines: a sentence can continue on the next line.
    assert evidence in re.sub(r"\s+", " ", " ".join(lines))
    typed = shlex.split(re.search(r"^ +set +(.*?)^ +(?:note|paper) ", "\n".join(lines), re.M | re.S)[1])
    mended = write_variant(tmp_path, recipe, deviation, *typed, name="mended.yaml")
    assert subjects(lines_of(capsys, mended, recipe)) == []


@pytest.mark.parametrize(("recipe", "words"), EQUAL)
def test_a_different_notation_is_not_a_difference(tmp_path, capsys, recipe, words):
    lines = lines_of(capsys, write_variant(tmp_path, recipe, *words), recipe)
    assert lines[0].startswith("no differences")
    assert subjects(lines) == []


def test_default_scale_of_positions_with_map_pooling_is_big_visions(tmp_path, capsys):
    """big_vision models/vit.py, get_posemb: 1 / √768 for ViT-B."""
    mine = write_variant(tmp_path, I1K, "pretrain.model.pool=map")
    for std, expected in ((0.03608439182435161, []), (0.02, ["position embeddings"])):
        overrides = ["pretrain.model.pool=map", f"pretrain.model.position_std={std}"]
        assert subjects(lines_of(capsys, mine, write_variant(tmp_path, I1K, *overrides, name="o.yaml"))) == expected


def test_differences_are_sorted_by_consequence_and_slight_ones_come_last(tmp_path, capsys):
    changes = ["pretrain.seed=3", "pretrain.passes=299", "pretrain.loss=softmax", "pretrain.batch_size=1024"]
    lines = lines_of(capsys, write_variant(tmp_path, I1K, *changes, "pretrain.model.name=B/32"), I1K)
    assert subjects(lines) == ["model", "batch size", "loss", "seed", "images seen"]
    assert any("linear scaling" in line and "0.00075" in line for line in lines)  # 3e-3 · 1024 / 4096
    assert lines[-1].startswith("not compared")
    assert "content.data.train" in lines[-1]
    # Overrides apply to the other recipe: another row of table 3.
    mine = write_variant(tmp_path, I1K, "pretrain.model.name=B/32")
    assert subjects(lines_of(capsys, mine, I1K, "pretrain.model.name=B/32")) == []


def test_a_resolved_recipe_equals_its_recipe_and_a_run_can_be_compared(tmp_path, capsys, shards):
    for name in (I1K, BEYER, JFT):
        assert subjects(lines_of(capsys, str(ROOT / "tests/recipes" / f"{name}.yaml"), name)) == []
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY.format(run=tmp_path / "run", shards=shards))
    assert main(["run", str(recipe), "pretrain.steps=6", "pretrain.seed=4"]) == 0
    capsys.readouterr()
    lines = lines_of(capsys, str(tmp_path / "run"), str(recipe))
    assert subjects(lines) == ["images seen", "seed"]
    assert "96; other: 384" in lines[1]
    assert subjects(lines_of(capsys, str(tmp_path / "run"), str(tmp_path / "run" / "pretrain"))) == []


def test_for_another_model_family_the_name_of_the_model_is_the_override(capsys):
    text = "\n".join(lines_of(capsys, "table3/bit_jft300m", JFT))
    assert "family bit; other: vit\n    set    pretrain.model=B/16\n" in text
    assert "model.family=" not in text


def test_recipes_that_cannot_be_compared_are_refused(tmp_path, capsys):
    mine = write_variant(tmp_path, I1K)
    assert main(["diff", mine, "table3/vit_i2k"]) == 78
    assert "did you mean" in capsys.readouterr().err
    only_shards = tmp_path / "pack.yaml"
    only_shards.write_text(json.dumps({"shards": {"kind": "pack", "sets": {"train": {"source": "digits"}}}}))
    assert main(["diff", mine, str(only_shards)]) == 64
    assert "no stage that trains or evaluates" in capsys.readouterr().err
    assert main(["diff", mine, TRANSFER]) == 64
    assert "of kind finetune" in capsys.readouterr().err
