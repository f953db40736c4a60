"""The recipes of the paper's tables: their settings, stated costs and published results."""

import re
from functools import cache
from pathlib import Path

import pytest

import models
from jobs.commands.campaigns import RECIPES
from jobs.resolved_recipe import Campaign
from tests.support import campaigns as support

SPEC = Path(__file__).parents[4] / "shared" / "reference" / "SPEC.md"
# Table 3 of the paper: models, passes, peak learning rate, decay, weight decay, dropout.
JFT = ("linear", 0.1, 0.0)
I21K = (1e-3, "linear", 0.03, 0.1)
TABLE_3 = {
    "vit_jft300m": [
        ("B/32", 7, 8e-4, *JFT),
        ("B/16", 7, 8e-4, *JFT),
        ("L/32", 7, 6e-4, *JFT),
        ("L/16", 7, 4e-4, *JFT),
        ("L/16", 14, 4e-4, *JFT),
        ("H/14", 14, 3e-4, *JFT),
    ],
    "bit_jft300m": [
        ("BiT-R50x1", 7, 1e-3, *JFT),
        ("BiT-R50x2", 7, 1e-3, *JFT),
        ("BiT-R101x1", 7, 8e-4, *JFT),
        ("BiT-R152x1", 7, 6e-4, *JFT),
        ("BiT-R152x2", 7, 6e-4, *JFT),
        ("BiT-R152x2", 14, 6e-4, *JFT),
        ("BiT-R200x3", 14, 6e-4, *JFT),
    ],
    "hybrid_jft300m": [
        ("R50+B/32", 7, 8e-4, *JFT),
        ("R50+B/16", 7, 8e-4, *JFT),
        ("R50+L/32", 7, 2e-4, *JFT),
        ("R50+L/16", 7, 4e-4, *JFT),
        ("R50+L/16", 14, 4e-4, *JFT),
    ],
    "vit_i21k": [
        ("B/32", 90, *I21K),
        ("B/16", 90, *I21K),
        ("L/32", 30, *I21K),
        ("L/32", 90, *I21K),
        ("L/16", 30, *I21K),
        ("L/16", 90, *I21K),
    ],
    "vit_i1k": [(name, 300, 3e-3, "cosine", 0.3, 0.1) for name in ("B/32", "B/16", "L/32", "L/16")],
}
LINE = re.compile(r"# (\S+) +(\d+) +((?:[\d.]+ +|- +){6})([\d.]+)(.*)")  # model, passes, top-1, exaFLOPs, overrides
# Table 4: steps, learning rates, and the held-out share of the training set.
TABLE_4 = {
    "imagenet": (20_000, [0.003, 0.01, 0.03, 0.06], "99%", 1000),
    "cifar10": (10_000, [0.001, 0.003, 0.01, 0.03], "98%", 10),
    "cifar100": (10_000, [0.001, 0.003, 0.01, 0.03], "98%", 100),
    "pets": (500, [0.001, 0.003, 0.01, 0.03], "90%", 37),
    "flowers102": (500, [0.001, 0.003, 0.01, 0.03], "90%", 102),
}
WIDTHS = {"B": 768, "L": 1024, "H": 1280}


def lines_of(name: str) -> list[re.Match[str]]:
    """Return the lines of table 3 in the head of a recipe."""
    text = (RECIPES / "table3" / f"{name}.yaml").read_text()
    matches = [LINE.fullmatch(line) for line in text.splitlines()]
    return [match for match in matches if match is not None]


@cache
def flops_an_image(model: str, image_size: int) -> float:
    """Return the exaFLOPs of a training; the number of classes affects them by less than 0.1 %."""
    return models.training_flops(models.config_of(model, image_size, 1000), 1)


def load(name: str, overrides: list[str]) -> Campaign:
    return support.load(RECIPES / f"{name}.yaml", overrides)


@pytest.mark.parametrize("name", TABLE_3)
def test_the_overrides_in_the_recipes_give_every_line_of_table_3(name):
    lines = lines_of(name)
    assert len(lines) == len(TABLE_3[name])
    for line, (model, passes, lr, decay, weight_decay, dropout) in zip(lines, TABLE_3[name], strict=True):
        loaded = load(f"table3/{name}", line[5].split())
        stage = loaded.stage("pretrain")
        cfg = stage.config
        assert (line[1], int(line[2])) == (model, passes) == (cfg.model["name"], cfg.passes)
        assert (cfg.optim.lr, cfg.optim.schedule.decay, cfg.optim.weight_decay) == (lr, decay, weight_decay)
        assert cfg.optim.name == "adam"
        assert cfg.batch_size == 4096
        assert cfg.optim.schedule.warmup_steps == 10_000
        # All heads start with the same bias; in table 3, gradients are clipped only for ImageNet (SPEC 2.1).
        assert stage.model.head_bias == -10
        assert cfg.loss == "sigmoid"
        assert cfg.optim.clip == (1 if name == "vit_i1k" else 0)
        if not model.startswith("BiT"):
            width = WIDTHS[model.removeprefix("R50+")[0]]
            assert stage.model.dropout == dropout
            assert stage.model.representation == stage.model.width == width
        # The stated cost; the paper's ResNets and one hybrid differ from the paper's formula (SPEC 2.8).
        images = round(cfg.passes * cfg.data.samples)
        assert flops_an_image(model, 224) * images / 1e18 == pytest.approx(float(line[4]), rel=0.055)


@pytest.mark.skipif(not SPEC.exists(), reason="the paper's tables are not here")
def test_expected_results_in_recipes_are_those_of_the_paper():
    """Compare the numbers in the heads of recipes with tables 5, 6 and 9 in SPEC.md."""
    spec = SPEC.read_text()
    rows = re.findall(r"^\| (\S+) \| (\d+) \| ((?:[\d.]+ \| ){6})(\d+) \|", spec, re.M)
    table_6 = {}
    for model, passes, accuracies, flops in rows:
        table_6[model.removeprefix("ViT-"), passes] = (accuracies.replace("|", "").split(), flops)
    for name in ("vit_jft300m", "bit_jft300m", "hybrid_jft300m"):
        for line in lines_of(name):
            # The paper's columns are in the same order: ImageNet, ReaL, CIFAR-10, CIFAR-100, Pets, Flowers.
            assert table_6[line[1].removeprefix("BiT-"), line[2]] == (line[3].split(), line[4])

    columns = ("cifar10", "cifar100", "imagenet", "real", "flowers102", "pets")
    heads = {"ImageNet": "pretrained on ImageNet", "i21k": "on ImageNet-21k", "JFT": "on JFT-300M"}
    table_5 = spec.partition("**Table 5**")[2].partition("**Table 6**")[0]
    for pretraining, head in heads.items():
        cells = re.search(rf"^\| {pretraining} \| (.*) \|$", table_5, re.M)
        assert cells is not None
        for column, cell in zip(columns, cells[1].split(" | "), strict=True):
            recipe = "imagenet" if column == "real" else column
            text = (RECIPES / "transfer" / f"{recipe}.yaml").read_text()
            if column == "real":
                text = text.partition("# ReaL")[2]
            expected = re.search(rf"^#   {head} +(.*)$", text, re.M)
            assert expected is not None, (column, head)
            assert expected[1].split() == cell.replace("–", "-").split(), (column, head)

    text = (RECIPES / "transfer" / "vtab.yaml").read_text()
    told = re.findall(r"^      \w+:  # ([\d.]+)  ([\d.]+)  ([\d.]+)$", text, re.M)
    table_9 = spec.partition("**Table 9**")[2]
    for column, weights in enumerate(("H/14 JFT", "L/16 JFT", "L/16 i21k")):
        cells = re.search(rf"{weights} ([\d. |]+)", table_9)
        assert cells is not None
        *accuracies, mean = cells[1].replace("|", "").rstrip(" .").split()
        assert [row[column] for row in told] == accuracies
        assert mean in text


def test_recipes_clip_gradients_as_the_paper_does():
    """Pretraining by table 3, on ImageNet alone (SPEC 2.1, 2.6 of vit_s16); fine-tuning by table 4, always."""
    clips = {"vit_h14_jft300m": 0, "vit_l16_i21k": 0, "vit_b16_masked": 0, "vit_b16_i1k": 1, "vit_s16_i1k": 1}
    for name, clip in clips.items():
        trained = [stage for stage in load(name, []).stages if stage.kind.trains]
        assert [stage.config.optim.clip for stage in trained] == [
            clip if stage.kind.name == "pretrain" else 1 for stage in trained
        ], name


@pytest.mark.parametrize("name", TABLE_4)
def test_table_4_recipes_have_a_grid_on_held_out_data_and_three_runs(name):
    steps, rates, share, classes = TABLE_4[name]
    loaded = load(f"transfer/{name}", [])
    parts = loaded.stage("parts").config.sets
    assert (parts["most"].part, parts["held-out"].part) == (f":{share}", f"{share}:")
    grid = [loaded.stage(f"finetune.lr-{rate}").config for rate in rates]
    assert [cfg.optim.lr for cfg in grid] == rates
    for cfg in grid:
        assert (cfg.data.train, cfg.data.evaluate) == ("@parts/most", "@parts/held-out")
    final = [loaded.stage(f"finetune.seed-{seed}") for seed in (0, 1, 2)]
    for stage in final:
        assert stage.config.data.train == parts["most"].path == parts["held-out"].path
        assert not stage.config.data.evaluate.startswith("@")
        assert stage.references == {"optim.lr": "@finetune.grid/optim.lr"}
    for cfg in (*grid, *(stage.config for stage in final)):
        optim = cfg.optim
        assert (cfg.steps, cfg.batch_size, cfg.loss, cfg.model["classes"]) == (steps, 512, "softmax", classes)
        assert (optim.name, optim.momentum, optim.weight_decay, optim.clip) == ("sgd", 0.9, 0, 1)
        assert optim.schedule.decay == "cosine"
    assert loaded.stage("resize").config.image_size == 384


@pytest.mark.parametrize("name", [*TABLE_4, "vtab"])
def test_the_cost_of_a_run_is_that_in_the_recipe(name):
    text = (RECIPES / "transfer" / f"{name}.yaml").read_text()
    line = re.search(r"^# exaFLOPs per run .*: (B/32.*)\.$", text, re.M)
    steps = re.search(r"^  steps: (\d+)$", text, re.M)
    assert line is not None
    assert steps is not None
    for entry in line[1].split(", "):
        model, flops = entry.split()
        images = int(steps[1]) * 512
        assert flops_an_image(model, 384) * images / 1e18 == pytest.approx(float(flops), rel=1e-3, abs=6e-4)


@pytest.mark.parametrize("name", ["transfer/imagenet", "vit_b16_i1k", "vit_l16_i21k", "vit_h14_jft300m"])
def test_imagenet_fine_tuning_is_evaluated_with_real_labels_as_in_its_table(name):
    loaded = load(name, [])
    finetuned = []
    for stage in loaded.stages:
        # Exclude pretraining, which may also be on ImageNet, and the grid on a part of it.
        if stage.kind.name == "finetune" and stage.config.data.evaluate == "shards/imagenet1k/validation":
            finetuned.append(stage)
    judged = [stage for stage in loaded.stages if stage.kind.name == "evaluate" and "real" in stage.config.sets]
    assert {stage.config.init for stage in judged} == {f"@{stage.name}" for stage in finetuned}
    for stage in judged:
        assert (stage.config.sets["real"].test, stage.config.protocols) == ("shards/imagenet1k/real", ("real",))
        # With the same preprocessing as the accuracy.
        assert {stage.config.preprocess} == {parent.config.data.preprocess for parent in finetuned}


def hyperrule(images: int, pixels: int) -> tuple[int, list[int], float, tuple[int, int]]:
    """BiT-HyperRule computed by hand: warm-up, steps of the schedule, mixup, image sizes before and after the crop."""
    sides = (160, 128) if pixels < 96 * 96 else (512, 480)
    if images < 20_000:
        return 100, [200, 300, 400, 500], 0.0, sides
    if images < 500_000:
        return 500, [3000, 6000, 9000, 10_000], 0.1, sides
    return 500, [6000, 12_000, 18_000, 20_000], 0.1, sides


def test_bit_hyperrule_has_the_published_settings_for_each_data_set():
    text = (RECIPES / "transfer" / "bit_hyperrule.yaml").read_text()
    lines = re.findall(r"^# (\w+) +([\d,]+)  ([\d.]+)(.*)$", text, re.M)
    assert [line[0] for line in lines] == ["imagenet", "cifar10", "cifar100", "pets", "flowers102"]
    for name, count, _accuracy, overrides in lines:
        loaded = load("transfer/bit_hyperrule", overrides.split())
        images = int(count.replace(",", ""))
        pixels = 32 * 32 if name.startswith("cifar") else 400 * 500
        warmup, steps, mixup, (squash, crop) = hyperrule(images, pixels)
        for seed in (0, 1, 2):
            cfg = loaded.stage(f"finetune.seed-{seed}").config
            schedule = cfg.optim.schedule
            assert (schedule.decay, schedule.warmup_steps) == ("constant", warmup)
            assert [*schedule.drops, cfg.steps] == steps
            assert cfg.mixup == mixup
            assert (cfg.data.augment.crop, cfg.data.augment.squash) == ("random", squash)
            optim = (cfg.optim.name, cfg.optim.lr, cfg.optim.momentum, cfg.optim.weight_decay, cfg.optim.clip)
            assert optim == ("sgd", 0.003, 0.9, 0, 0)
            assert (cfg.batch_size, cfg.loss) == (512, "softmax")
            assert cfg.model["classes"] == TABLE_4[name][3]
            assert name.removesuffix("net") in cfg.data.train
            assert name.removesuffix("net") in cfg.data.evaluate
        assert loaded.stage("resize").config.image_size == crop
