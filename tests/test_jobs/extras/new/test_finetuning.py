"""New recipes use the fine-tuning settings published for their kind of weights."""

import pytest

import models
from jobs.extras.new.finetuning import image_size_of, settings_of

IMAGENET = {"pixel_mean": (0.485, 0.456, 0.406), "pixel_std": (0.229, 0.224, 0.225)}
CLIP = {"pixel_mean": (0.48145466, 0.4578275, 0.40821073), "pixel_std": (0.26862954, 0.26130258, 0.27577711)}


@pytest.mark.parametrize(
    ("fields", "form", "source"),
    [
        ({}, None, "ViT paper, table 4"),  # AugReg, and pretraining of this project
        ({"classes": 0, "pool": "map"}, {"model_type": "siglip"}, "WiSE-FT"),
        ({"pre_norm": True, "patch_bias": False, **CLIP}, None, "WiSE-FT"),
        ({"classes": 0, "layer_scale": 1.0, **IMAGENET}, {"model_type": "dinov2"}, "DINOv2"),
        ({"classes": 0, "rope": "dinov3", "positions": "none", **IMAGENET}, None, "DINOv2"),
        ({"classes": 0, "activation": "gelu", **IMAGENET}, {"model_type": "vit_mae"}, "MAE"),
        ({"classes": 1000, "layer_scale": 1.0, **IMAGENET}, {"architecture": "deit3_base_patch16_224"}, "DeiT III"),
        ({"classes": 1000, "registers": 1, **IMAGENET}, {"model_type": "deit"}, "DeiT III"),
    ],
)
def test_the_source_of_the_settings_fits_the_weights(fields, form, source):
    settings = settings_of(models.config_of("B/16", **fields), form)
    assert source in settings.source
    assert settings.lr_at(4 * settings.batch_size) == pytest.approx(2 * settings.lr)


def test_the_mean_rate_of_masked_pretraining_is_that_of_its_layers():
    settings = settings_of(models.config_of("B/16", classes=0, **IMAGENET), None)
    # MAE's FINETUNE.md: ViT-B has blr 5e-4 for 256 images and 0.65 for each layer, 12 of them.
    by_layer = [5e-4 * 1024 / 256 * 0.65**layer for layer in range(1, 13)]
    assert (settings.batch_size, settings.lr) == (1024, pytest.approx(sum(by_layer) / 12))


def test_very_large_images_are_fine_tuned_at_the_size_of_their_evaluation():
    assert image_size_of(models.config_of("B/14", image_size=518)) == (224, 224)
    assert image_size_of(models.config_of("B/16", image_size=384)) == (384, 384)
