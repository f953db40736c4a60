"""Masked patch prediction: the corrupted patches, the prediction targets, and the export of an ordinary ViT."""

from dataclasses import replace

import pytest
import torch

import models
from models.catalog import normalise
from models.configs import MaskedConfig
from models.extras import masked
from tests.support.weights import random_model


def build(target: str = "mean_color", image_size: int = 32, **config) -> torch.nn.Module:
    return models.build("Masked-mu/8", image_size, depth=2, target=target, **config)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("target", "predicted", "wanted"),
    [
        ("mean_color", (2, 8, 1, 512), (2, 8, 1)),
        ("downsized", (2, 8, 16, 512), (2, 8, 16)),
        ("pixels", (2, 8, 192), (2, 8, 192)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"registers": 1}, {"pool": "gap"}])
def test_predictions_are_loss_ready_and_train_everything(target, predicted, wanted, options):
    model = build(target, **options).train()
    images = torch.rand(2, 3, 32, 32, generator=seeded(0)) * 2 - 1
    predictions, targets = model(images, seeded(1))
    assert (predictions.shape, targets.shape) == (predicted, wanted)
    loss, count = masked.objective(model, images, seeded(1))
    assert count == 2
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_half_the_patches_are_corrupted_80_10_10():
    config = models.config_of("Masked-mu/8", 160)  # 400 patches
    corruption = masked.Corruption(config)
    torch.nn.init.constant_(corruption.token, 7.0)
    patches = torch.arange(400.0).view(1, 400, 1).expand(50, 400, 32) / 1000
    changed, places = corruption(patches, seeded(0))
    assert places.shape == (50, 200)
    assert all(len(set(row.tolist())) == 200 for row in places)
    untouched = torch.ones(50, 400, dtype=torch.bool).scatter(1, places, False)
    assert torch.equal(changed[untouched], patches[untouched])
    before, after = (x[torch.arange(50)[:, None], places, 0] for x in (patches, changed))
    share_masked, share_same = after.eq(7).float().mean().item(), after.eq(before).float().mean().item()
    assert share_masked == pytest.approx(0.8, abs=0.02)
    assert share_same == pytest.approx(0.1, abs=0.02)
    swapped = after[after.ne(7) & after.ne(before)] * 1000
    assert swapped.unique().numel() > 300  # other patches of the image, from all over it


def test_colours_are_three_bits_a_channel():
    config = models.config_of("Masked-mu/8", (16, 24))
    images = torch.full((1, 3, 16, 24), -1.0)
    images[:, :, :8, 8:16] = torch.tensor([1.0, -1.0, 0.01]).view(1, 3, 1, 1)  # 255, 0, 128.8: bins 7, 0, 4
    assert masked.targets(images, config)[0, :, 0].tolist() == [0, 64 * 7 + 4, 0, 0, 0, 0]


def test_colours_do_not_depend_on_the_normalisation_of_pixels():
    pixels = torch.randint(0, 256, (2, 3, 16, 24), generator=seeded(0), dtype=torch.uint8)
    expected = None
    for pixel_mean, pixel_std in (((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))):
        config = models.config_of("Masked-mu/8", (16, 24), pixel_mean=pixel_mean, pixel_std=pixel_std)
        images = normalise(pixels, config, torch.float32, torch.device("cpu"))
        classes = masked.targets(images, config)
        assert expected is None or torch.equal(classes, expected)
        expected = classes


def test_downsized_patches_are_cells_in_reading_order():
    config = models.config_of("Masked-mu/8", (16, 24), target="downsized")
    images = torch.full((1, 3, 16, 24), -1.0)
    images[:, 2, 8 + 2, 16 + 4 : 16 + 6] = images[:, 2, 8 + 3, 16 + 4 : 16 + 6] = 1.0  # last patch, row 1, column 2
    classes = masked.targets(images, config)
    assert classes.shape == (1, 6, 16)
    assert classes.nonzero().tolist() == [[0, 5, 1 * 4 + 2]]
    assert classes.max() == 7


def test_pixels_are_those_of_the_patch():
    config = models.config_of("Masked-mu/8", (16, 24), target="pixels")
    images = torch.randn(1, 3, 16, 24)
    expected = images[0, :, 8:16, 8:16].flatten()
    torch.testing.assert_close(masked.targets(images, config)[0, 4], expected)


def test_the_same_generator_gives_the_same_loss():
    model, images = build(), torch.rand(2, 3, 32, 32, generator=seeded(0)) * 2 - 1
    losses = [masked.objective(model, images, seeded(seed))[0].item() for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("target", ["mean_color", "pixels"])
def test_loss_of_no_images_is_0_and_loss_of_two_is_the_sum_of_both(target):
    model = build(target, corrupted=1.0, masked=1.0, swapped=0.0)  # nothing left to chance
    images = torch.rand(2, 3, 32, 32, generator=seeded(0)) * 2 - 1
    parts = [masked.objective(model, images[at], seeded(1))[0] for at in (slice(0, 1), slice(1, 2), slice(0, 0))]
    torch.testing.assert_close(masked.objective(model, images, seeded(1))[0], sum(parts))
    parts[2].backward()
    assert parts[2] == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_the_loss_falls_below_guessing():
    torch.manual_seed(0)
    model = build("mean_color").train()
    images = torch.rand(8, 3, 1, 1, generator=seeded(0)).expand(-1, -1, 32, 32) * 2 - 1  # one colour an image
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = seeded(1)
    for _ in range(60):
        loss, count = masked.objective(model, images, generator)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    assert (loss / count).item() < 1.0 < torch.tensor(512.0).log()


def test_finetuning_extracts_the_vit(tmp_path):
    source = build()
    models.save_weights(source, tmp_path)
    weights, config = models.load_weights(tmp_path)
    state, report = models.transfer(weights, config, models.config_of("mu/8", 48, 5, depth=2))
    assert torch.equal(state["blocks.1.mlp.up.weight"], source.vit.blocks[1].mlp.up.weight)
    assert {name for name, *_ in report.dropped} == {
        "corruption.token",
        "prediction.weight",
        "prediction.bias",
    }
    assert {name for name, *_ in report.new} == {"head.weight", "head.bias"}
    assert [name for name, *_ in report.resized] == ["positions.0.table"]


SWITCHED = {
    "plain": {},
    "dinov2": {"layer_scale": 0.1, "registers": 2},
    "dinov3": {"layer_scale": 0.1, "registers": 2, "rope": "dinov3", "positions": "none", "qkv_bias": "qv"},
    "clip": {"pre_norm": True, "patch_bias": False, "activation": "quick_gelu"},
    "swiglu": {"activation": "swiglu", "qk_norm": True},
    "mean": {"pool": "gap", "class_slot": False},
    "relative": {"positions": "relative"},
}


@pytest.mark.parametrize("switches", SWITCHED.values(), ids=SWITCHED)
def test_masked_training_can_start_from_a_classifier(switches):
    source = random_model("mu/8", 32, 5, **switches)
    config = MaskedConfig.around(source.config)
    state, report = models.transfer(source.state_dict(), source.config, config, generator=seeded(3))
    assert {name for name, *_ in report.new} == {"corruption.token", "prediction.weight", "prediction.bias"}
    assert {name for name, *_ in report.dropped} == {"head.weight", "head.bias"}
    assert not report.resized
    model = models.from_config(config)
    model.load_state_dict(state)
    images = torch.rand(2, 3, 32, 32, generator=seeded(0)) * 2 - 1
    assert torch.equal(model.eval().features(images), source.features(images))
    loss, _ = masked.objective(model.train(), images, seeded(1))
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    # The seed determines the new parameters.
    again, _ = models.transfer(source.state_dict(), source.config, config, generator=seeded(3))
    assert all(torch.equal(state[name], again[name]) for name in state)
    # And back: the classifier's own ViT.
    restored, _ = models.transfer(state, config, replace(source.config, classes=7))
    for name, tensor in source.state_dict().items():
        assert name.startswith("head.") or torch.equal(restored[name], tensor), name


def test_masked_training_drops_head_and_pooling():
    source = random_model("mu/8", 32, 5, pool="map", map_heads=1, map_mlp=48, representation=12)
    target = replace(MaskedConfig.around(source.config), image_size=(48, 48))
    assert (target.pool, target.classes, target.representation) == ("gap", 0, None)
    state, report = models.transfer(source.state_dict(), source.config, target, generator=seeded(3))
    assert {name.partition(".")[0] for name, *_ in report.dropped} == {"map_head", "pre_logits", "head"}
    assert [name for name, *_ in report.resized] == ["positions.0.table"]
    assert state["vit.positions.0.table"].shape[1] == 36


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (models.config_of("Axial-mu/8", 32, 5), "models of family axial do not process a sequence of patches"),
        (models.config_of("BiT-R50x1", 32, 5), "models of family bit do not process a sequence of patches"),
        (models.config_of("R26+mu/32", 64, 5), "its ResNet stem shows the pixels of a patch to the patches around it"),
        (models.config_of("mu/8", 32, 5, pool="gap", last_norm="pooled"), "its last norm is that of the pooled vector"),
    ],
)
def test_other_models_cannot_be_trained_by_masking(config, reason):
    with pytest.raises(ValueError, match=f"masked prediction cannot start from these weights: {reason}"):
        MaskedConfig.around(config)


def test_masked_training_can_move_to_larger_images():
    source = build()
    state, report = models.transfer(source.state_dict(), source.config, models.config_of("Masked-mu/8", 48, depth=2))
    assert [name for name, *_ in report.resized] == ["vit.positions.0.table"]
    assert not report.dropped
    assert state["vit.positions.0.table"].shape == (1, 37, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "colour"}, "target must be one of"),
        ({"pool": "map"}, "pool"),
        ({"corrupted": 0.0}, "corrupted"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        models.config_of("Masked-B/16", **options)


def test_masked_models_are_counted_like_any_other():
    assert models.macs_of(models.config_of("Masked-B/16")) > 0.99 * models.macs_of(models.config_of("B/16"))
    extra = 768 + 768 * 512 + 512
    assert (
        models.parameters_of(models.config_of("Masked-B/16"))
        == models.parameters_of(models.config_of("B/16", classes=0)) + extra
    )
