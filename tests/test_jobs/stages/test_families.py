"""Every model family works in every kind of stage: plan, pretrain, resize, fine-tune and evaluate."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import models
from jobs.__main__ import main
from jobs.commands.campaigns import RECIPES
from pipeline import artifacts
from tests.support.campaigns import load

# name, additional fields, and the input width of its head
FAMILIES = {
    "vit": ("mu/8", "representation: 24", 32),
    "hybrid": ("R+mu/16", "stem_width: 32, representation: 24", 32),
    "bit": ("BiT-R50x1", "units: [1, 1], width: 32", 256),
    "axial": ("Axial-mu/8", "depth: 1, representation: 24", 32),
    "masked": ("Masked-mu/8", "depth: 1", 32),
}
RECIPE = """
run: {run}
cluster: {{workers: 1, backend: processes, backoff_s: 0}}
shards:
  kind: pack
  sets:
    train: {{source: digits, image_size: 32}}
    test: {{source: digits, split: test, image_size: 32}}
parts: {{kind: pack, sets: {{few: {{source: subset, path: "@shards/test", part: ":50", seed: 3}}}}}}
pretrain:
  data: {{train: "@shards/train"}}
  model: {{name: {name}, {fields}, image_size: 32, classes: 10}}
  objective: {objective}
  optim: {{schedule: {{warmup_steps: 1}}}}
  steps: 2
  passes: null
  batch_size: 8
  micro_batch: 4
  precision: fp32
resize: {{init: "@pretrain", image_size: 64}}
finetune:
  init: "@resize"
  data: {{train: "@shards/train", evaluate: "@parts/few"}}
  model: {{classes: 10, dropout: 0.0}}
  optim: {{schedule: {{warmup_steps: 1}}}}
  steps: 2
  batch_size: 8
  micro_batch: 4
  precision: fp32
evaluate: {{init: "@finetune", sets: {{few: {{test: "@parts/few"}}}}, protocols: [top-1]}}
fewshot: {{init: "@pretrain", probe: {{train: "@shards/test", test: "@parts/few", shots: [1]}}}}
"""


@pytest.mark.parametrize(
    "family", [name if name in ("vit", "bit") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_every_stage_works_with_every_model_family(family: str, tmp_path: Path) -> None:
    name, fields, width = FAMILIES[family]
    objective = "masked" if family == "masked" else "classification"
    recipe = tmp_path / "family.yaml"
    recipe.write_text(RECIPE.format(run=tmp_path / "run", name=name, fields=fields, objective=objective))
    assert main(["plan", str(recipe), "--without-data"]) == 0
    assert main(["run", str(recipe)]) == 0
    loaded = load(recipe, [])
    for stage in loaded.stages:
        assert loaded.done(stage) is not None, stage.name

    # The head is new although the number of classes is the same: a single layer.
    before = load_file(loaded.directory(loaded.stage("resize")) / "weights.safetensors")
    after = load_file(loaded.directory(loaded.stage("finetune")) / "weights.safetensors")
    assert {key for key in after if key.startswith(("head.", "pre_logits."))} == {"head.weight", "head.bias"}
    assert after["head.weight"].shape == (10, width)
    # The learning rate is 0 in the first update and 0.03 in the second: pretrained weights hardly change.
    stem = {"vit": "", "masked": "vit."}.get(family, "")
    kept = [key for key in after if not key.startswith("head.") and f"{stem}{key}" in before]
    assert len(kept) == len(after) - 2
    for key in kept:
        assert torch.allclose(after[key], before[f"{stem}{key}"], atol=0.05), key
    # After two SGD steps a new head is still close to zero; a kept head would not be.
    assert after["head.weight"].abs().max() < 0.2
    accuracy = artifacts.read_done(loaded.directory(loaded.stage("evaluate")))["metrics"]["top-1"]
    assert 0 <= accuracy <= 1
    assert accuracy == pytest.approx(round(accuracy * 50) / 50)


@pytest.mark.parametrize("name", ["cifar10", "imagenet", "vtab", "bit_hyperrule"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transfer_recipes_work_with_every_model_family(family: str, name: str, tmp_path: Path) -> None:
    """`dropout: 0.0` in a recipe overrides the ViT's 0.1 and is accepted for ResNets, which have no dropout."""
    fields = {"units": (1, 1), "width": 32} if family == "bit" else {"depth": 1}
    model = models.build(FAMILIES[family][0], 384, 10, **fields)
    models.save_weights(model.state_dict(), tmp_path, model.config)
    loaded = load(RECIPES / "transfer" / f"{name}.yaml", [f"resize.init={tmp_path}"])
    runs = [stage for stage in loaded.stages if stage.kind.trains]
    assert runs
    for stage in runs:
        assert stage.model is not None
        assert stage.model.classes == stage.config.model["classes"]
        assert stage.model.family == ("vit" if family in ("hybrid", "masked") else family)
