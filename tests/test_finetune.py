"""Fine-tuning follows the original step by step: published weights, transfer, loss, schedule and SGD."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from models.extras.weights import layout as weights_map
from models.extras.weights import npz as weights_npz
from pipeline.losses import LOSSES, dense_targets
from pipeline.optimization import OptimConfig, ScheduleConfig, build_optimizer, learning_rate
from tests.support.golden import GOLDEN

pytestmark = pytest.mark.quick

softmax_loss = LOSSES["softmax"]


@pytest.fixture(scope="module")
def arrays():
    if not (GOLDEN / "finetune_e2e.io.npz").exists():
        pytest.skip("golden data is absent: ../shared/golden/finetune_e2e.io.npz")
    return np.load(GOLDEN / "finetune_e2e.io.npz")


def settings_of(arrays) -> dict:
    return json.loads(str(arrays["config_json"]))


def batch(arrays, step: int) -> tuple[Tensor, Tensor]:
    images = torch.from_numpy(arrays["images"][step]).permute(0, 3, 1, 2)
    labels = torch.from_numpy(arrays["labels"][step])[:, None]
    return images, dense_targets(labels, settings_of(arrays)["finetune_classes"])


def start(arrays) -> nn.Module:
    """Return the pretrained model at the new size, with a new head."""
    pretrained = models.load(GOLDEN / "finetune_e2e.pretrained.npz")
    size, classes = settings_of(arrays)["finetune_res"], settings_of(arrays)["finetune_classes"]
    target = replace(pretrained.config, image_size=(size, size), classes=classes, representation=None)
    state, _ = models.transfer(pretrained.state_dict(), pretrained.config, target)
    model = models.from_config(target)
    model.load_state_dict(state)
    return model


def in_their_names(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, np.ndarray]:
    stored = weights_map.write(tensors, model.config, weights_npz.layout_of(model.config))
    return {key: tensor.numpy() for key, tensor in stored.items()}


def eval_logits(model: nn.Module, arrays) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(arrays["eval_images"]).permute(0, 3, 1, 2))


def test_new_size_starts_from_resized_positions_and_a_zero_head(arrays):
    model = start(arrays)
    table = model.positions[0].table.detach()
    np.testing.assert_allclose(table, arrays["pos_embedding_at_start"], atol=1e-5, rtol=0)
    assert not eval_logits(model, arrays).any()
    assert not arrays["logits_at_start"].any()


def test_first_gradient_of_every_parameter_matches_the_original(arrays):
    model = start(arrays)
    model.head.weight.data = torch.from_numpy(arrays["gradcheck_head_kernel"]).T.clone()
    images, targets = batch(arrays, 0)
    loss = softmax_loss(model(images), targets).mean()
    loss.backward()
    assert loss.item() == pytest.approx(float(arrays["gradcheck_loss"]), abs=1e-5)
    gradients = in_their_names({name: p.grad for name, p in model.named_parameters()}, model)
    assert {f"gradcheck/{key}" for key in gradients} == {key for key in arrays.files if key.startswith("gradcheck/")}
    for key, gradient in gradients.items():
        np.testing.assert_allclose(gradient, arrays[f"gradcheck/{key}"], atol=1e-5, rtol=1e-5, err_msg=key)


def test_losses_and_final_weights_match_the_original(arrays):
    settings = settings_of(arrays)
    model = start(arrays)
    schedule = ScheduleConfig(decay="cosine", warmup_steps=settings["warmup_steps"])
    cfg = OptimConfig(
        name="sgd",
        lr=settings["base_lr"],
        momentum=settings["momentum"],
        weight_decay=0,
        clip=settings["clip"],
        schedule=schedule,
    )
    optimizer = build_optimizer(model, models.decayed_parameters(model), cfg)
    losses, rates = [], []
    for step in range(settings["steps"]):
        images, targets = batch(arrays, step)
        parts = zip(images.chunk(settings["accum_steps"]), targets.chunk(settings["accum_steps"]), strict=True)
        optimizer.zero_grad()
        losses.append(0.0)
        for micro_images, micro_targets in parts:  # accumulated as means of equal parts
            loss = softmax_loss(model(micro_images), micro_targets).mean() / settings["accum_steps"]
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        rates.append(learning_rate(step, settings["steps"], cfg.lr, cfg.schedule))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.step()
    np.testing.assert_allclose(rates, arrays["lrs"], rtol=1e-5, atol=3e-8 * cfg.lr)
    np.testing.assert_allclose(losses, arrays["losses"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(eval_logits(model, arrays), arrays["logits_at_end"], atol=1e-5, rtol=0)
    final = in_their_names(model.state_dict(), model)
    kept = [key.removeprefix("final/") for key in arrays.files if key.startswith("final/")]
    for key in kept:
        np.testing.assert_allclose(final[key], arrays[f"final/{key}"], atol=1e-5, rtol=0, err_msg=key)
    assert len(kept) == 6
