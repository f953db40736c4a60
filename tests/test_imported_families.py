"""Every family of imported ViTs goes through every stage, and fine-tunes as timm's own module does in a plain loop.

The images are 16 digits of 32 pixels without augmentation, and every batch holds all of them: a step does not depend on
their order, so the plain loop needs no sampler.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from data.evaluation import EvaluationSet
from data.extras.shards.packing import pack
from data.extras.sources.samples import DIGITS, digits
from data.index.document import load_index
from jobs.__main__ import main
from pipeline.monitoring.telemetry import read_metrics
from tests.support.foreign_vits import CLASSES, TIMM, save_timm

STEPS = 20
RATE = 0.03
IMAGES = 16
QUICK = ("eva02_tiny_patch14_224",)  # the others are slow: 17 campaigns
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TIMM]
RECIPE = """
run: run
cluster: {{workers: 1, backend: processes}}

continue:
  kind: pretrain
  init: {weights}
  data: {{train: {train}, augment: {{crop: none, flip: false}}}}
  optim: {{lr: 1.0e-4, schedule: {{warmup_steps: 0}}}}
  loss: softmax
  steps: 2
  batch_size: {images}
  micro_batch: {images}
  precision: fp32

finetune:
  init: {weights}
  data: {{train: {train}, evaluate: {test}, augment: {{crop: none, flip: false}}}}
  optim: {{lr: {rate}, clip: 0.0, schedule: {{decay: cosine, warmup_steps: 0}}}}
  steps: {steps}
  batch_size: {images}
  micro_batch: {images}
  precision: fp32
  log_every: 5

resize: {{init: "@finetune", image_size: 48}}

fewshot:
  init: "@resize"
  probe: {{train: {train}, test: {test}, shots: [1]}}

evaluate:
  init: "@resize"
  sets: {{digits: {{train: {train}, test: {test}}}}}
  protocols: [top-1, fewshot, knn]
  fewshot: {{shots: [1]}}
  knn: {{k: [1]}}
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """Return a folder with two sets of digits, and the images (N, 3, 32, 32) in 0 … 1 and labels of `train`."""
    folder = tmp_path_factory.mktemp("digits")
    for name in ("train", "test"):
        chosen = [sample for sample in digits(name == "train", image_size=32) if sample.labels[0] < CLASSES]
        pack(iter(chosen[:IMAGES]), folder / name, name=name, shard_samples=IMAGES, names=DIGITS[:CLASSES])
    index = load_index(folder / "train")
    (batch,) = EvaluationSet(index, "central_crop(32)", batch_size=index.samples)
    return folder, batch.images.double() / 255, batch.labels[:, 0]


def plain_loop(module: nn.Module, head: nn.Module, images: Tensor, labels: Tensor) -> Iterator[float]:
    """Fine-tune a module by SGD with momentum and a cosine, with a head of zeros; yield the loss of each step."""
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 + np.cos(np.pi * step / STEPS)) / 2
        loss = nn.functional.cross_entropy(module(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.mark.parametrize("architecture", TIMM)
def test_an_imported_module_fine_tunes_as_timm_s_does(architecture: str, timm: Any, tmp_path: Path) -> None:
    theirs = save_timm(timm, architecture, tmp_path)
    ours = models.load(tmp_path)
    images = torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(IMAGES) % CLASSES
    losses = []
    for module, head in ((ours, ours.head), (theirs, theirs.get_classifier())):
        losses.append(list(plain_loop(module.train(), head, images, labels)))
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=5e-6)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_passes_every_stage_and_fine_tunes_as_timm_does(
    architecture: str, samples: tuple[Path, Tensor, Tensor], timm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = save_timm(timm, architecture, tmp_path / "theirs")
    assert main(["import", "theirs", "weights"]) == 0
    folder, pixels, labels = samples
    values = {"weights": tmp_path / "weights", "train": folder / "train", "test": folder / "test"}
    values |= {"images": IMAGES, "rate": RATE, "steps": STEPS}
    Path("recipe.yaml").write_text(RECIPE.format(**values))
    assert main(["run", "recipe.yaml"]) == 0

    # 1. Fine-tuning equals the plain loop with timm's module.
    config = models.load_weights(tmp_path / "weights")[1]
    mean = torch.tensor(config.pixel_mean, dtype=torch.float64)[:, None, None]
    std = torch.tensor(config.pixel_std, dtype=torch.float64)[:, None, None]
    expected = list(plain_loop(theirs.train(), theirs.get_classifier(), ((pixels - mean) / std).float(), labels))
    (stage,) = Path("run").glob("finetune-*")
    losses = [loss for record in read_metrics(stage) for loss in record["losses"]]
    np.testing.assert_allclose(losses, expected, rtol=2e-4, atol=2e-5)
    assert expected[-1] < expected[0]

    # 2. The export in timm's format equals the plain loop's module.
    assert main(["export", str(stage), "out", "--format", "timm"]) == 0
    exported = timm.create_model("local-dir:out", pretrained=True)
    assert json.loads(Path("out/config.json").read_text())["architecture"] == architecture
    trained = theirs.state_dict()
    assert exported.state_dict().keys() == trained.keys()
    for name, tensor in exported.state_dict().items():
        np.testing.assert_allclose(tensor, trained[name], rtol=2e-4, atol=2e-5, err_msg=name)

    # 3. The other stages have run; the weights at another size have a record of their values.
    for kind in ("continue", "resize", "fewshot", "evaluate"):
        assert list(Path("run").glob(f"{kind}-*/done.json")), kind
    (document,) = Path("run").glob("evaluate-*/evaluation.json")
    results = {entry["protocol"]["name"]: entry["values"] for entry in json.loads(document.read_text())["results"]}
    assert results.keys() == {"top-1", "fewshot", "knn"}
    (resized,) = Path("run").glob("resize-*")
    assert main(["analyze", str(resized), str(folder / "train"), "--output", "figures", "--limit", "2"]) == 0


MASKED = """
run: run
cluster: {{workers: 1, backend: processes}}

mask:
  kind: pretrain
  objective: masked
  init: {weights}
  data: {{train: {train}, augment: {{crop: none, flip: false}}}}
  optim: {{lr: 1.0e-3, schedule: {{warmup_steps: 0}}}}
  steps: 30
  batch_size: 16
  micro_batch: 16
  precision: fp32

finetune:
  init: "@mask"
  model: {{classes: 5}}
  data: {{train: {train}, augment: {{crop: none, flip: false}}}}
  optim: {{lr: 1.0e-3, schedule: {{warmup_steps: 0}}}}
  steps: 2
  batch_size: 16
  micro_batch: 16
  precision: fp32
"""


def test_masked_prediction_starts_from_imported_weights(
    samples: tuple[Path, Tensor, Tensor], timm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_timm(timm, "vit_base_patch14_reg4_dinov2", tmp_path / "theirs")
    assert main(["import", "theirs", "weights"]) == 0
    folder, _, _ = samples
    Path("recipe.yaml").write_text(MASKED.format(weights=tmp_path / "weights", train=folder / "train"))
    assert main(["run", "recipe.yaml"]) == 0
    (stage,) = Path("run").glob("mask-*")
    losses = [loss for record in read_metrics(stage) for loss in record["losses"]]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    imported, config = models.load_weights(tmp_path / "weights")
    trained, masked_config = models.load_weights(stage)
    assert masked_config.vit.layer_scale == config.layer_scale
    assert masked_config.vit.registers == 4
    # The blocks continue from the imported ones: 30 steps move them by less than their size.
    for name in ("blocks.0.attention.qkv.weight", "blocks.1.mlp.up.weight", "positions.0.table"):
        distance = (trained[f"vit.{name}"] - imported[name]).norm()
        assert 0 < distance < 0.5 * imported[name].norm(), name


def test_masked_prediction_from_weights_that_pool_before_the_last_norm_is_refused(
    samples: tuple[Path, Tensor, Tensor],
    timm: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_timm(timm, "eva02_tiny_patch14_224", tmp_path / "theirs")
    assert main(["import", "theirs", "weights"]) == 0
    folder, _, _ = samples
    Path("recipe.yaml").write_text(MASKED.format(weights=tmp_path / "weights", train=folder / "train"))
    capsys.readouterr()
    assert main(["run", "recipe.yaml"]) == 78
    message = capsys.readouterr().err
    assert "masked prediction cannot start from these weights: its last norm is that of the pooled vector" in message
