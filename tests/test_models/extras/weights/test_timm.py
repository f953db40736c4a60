"""timm's files: timm's models reproduce our outputs from our exports, and ours reproduce timm's from its files."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import models
from models.extras.weights import timm as weights_timm
from tests.support import timm_models
from tests.support.golden import GOLDEN, needs_golden
from tests.support.weights import assert_logits, random_model

CONSTRAINTS = Path(__file__).parents[4] / "constraints.txt"


@needs_golden
def test_timm_state_dict_gives_its_logits(tmp_path):
    arrays = np.load(GOLDEN / "timm_vit.npz")
    stored = {k.removeprefix("state_dict/"): torch.from_numpy(arrays[k]) for k in arrays if "state_dict/" in k}
    save_file(stored, tmp_path / "timm.safetensors")
    with pytest.raises(ValueError, match="pass heads="):
        models.load(tmp_path / "timm.safetensors")
    model = models.load(tmp_path / "timm.safetensors", heads=3)
    assert_logits(model, torch.from_numpy(arrays["images_nchw"]), arrays["logits"], 1e-5)


def test_the_pinned_torchvision_is_the_one_for_the_pinned_torch():
    pins = dict(line.strip().split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    torch_minor, torchvision_minor = (int(pins[name].split(".")[1]) for name in ("torch", "torchvision"))
    # github.com/pytorch/vision, "Installation": torch 2.0 goes with torchvision 0.15, 2.1 with 0.16, and so on.
    assert torchvision_minor == torch_minor + 15


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "gelu", "image_size": (16, 24)},
        {"pool": "gap", "registers": 2},
        {"pool": "map", "mlp": 100},
        {"class_slot": False, "registers": 1},
        {"positions": "sincos2d"},
        {"positions": "learned2d"},
        {"positions": "none", "pool": "gap"},
        {"classes": 0},
        # Later ViTs in timm's VisionTransformer.
        {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5, "activation": "quick_gelu"},
        {"layer_scale": 0.1, "qk_norm": True, "qkv_bias": "none", "patch_bias": False},
        {"pool": "gap", "last_norm": "pooled", "attention_norm": True, "mlp_norm": True},
        {"last_norm": "none", "registers": 2, "layer_scale": 0.1},
        {"pool": "gap", "norm": "rms", "norm_eps": 1e-5, "activation": "swiglu", "block_bias": False}
        | {"qkv_bias": "none", "patch_norm": True},
        # In timm's Eva.
        {"rope": "dinov3", "layer_scale": 0.1, "qkv_bias": "qv", "norm_eps": 1e-5, "registers": 4, "positions": "none"}
        | {"activation": "gelu"},
        {"rope": "eva02", "rope_grid": (3, 3), "activation": "swiglu", "mlp_norm": True, "attention_norm": True},
        {"rope": "axial", "qkv_bias": "none", "activation": "swiglu", "pool": "gap", "last_norm": "pooled"},
        {"rope": "mixed", "activation": "gelu", "qk_norm": True},
        {"rope": "pe", "pool": "map", "registers": 1, "pool_prefix": True, "map_heads": 4, "map_mlp": 60}
        | {"activation": "gelu", "pre_norm": True, "patch_bias": False},
    ],
)
def test_timm_opens_our_directory_and_agrees(options, timm, tmp_path):
    model = random_model(**options)
    images = torch.linspace(-1, 1, 6 * math.prod(model.config.image_size)).view(2, 3, *model.config.image_size)
    models.save(model, tmp_path / "timm", format="timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    with torch.no_grad():
        assert_logits(model, images, theirs(images), 1e-5, rtol=2e-6)
        assert_logits(models.load(tmp_path / "timm"), images, model(images), 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"img_size": (16, 24), "patch_size": (8, 4), "mlp_ratio": 2.5},
        {"global_pool": "avg", "fc_norm": False},  # with a class token, which the pooling excludes
        {"global_pool": "avg", "fc_norm": False, "reg_tokens": 2, "no_embed_class": True},
        {"global_pool": "avg", "fc_norm": False, "class_token": False},
        {"global_pool": "map", "reg_tokens": 2, "act_layer": "gelu_tanh"},
        {"reg_tokens": 3, "num_classes": 0},
    ],
)
def test_weights_saved_by_timm_load(options, timm, tmp_path):
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    arguments |= options
    theirs = timm.models.VisionTransformer(**arguments).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    described = {"architecture": "vit_base_patch16_224", "model_args": arguments}
    (tmp_path / "config.json").write_text(json.dumps(described))
    ours = models.load(tmp_path)
    images = torch.linspace(-1, 1, 6 * math.prod(ours.config.image_size)).view(2, 3, *ours.config.image_size)
    with torch.no_grad():
        assert_logits(ours, images, theirs(images), 1e-5)


@pytest.fixture
def single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models are faster so, in particular next to other processes
    yield
    torch.set_num_threads(threads)


def test_a_random_tenth_of_timms_architectures_computes_the_same(timm, single_thread):
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # pytest shows it if the test fails
    architectures = list(timm_models.architectures())
    for architecture in random.Random(seed).sample(architectures, len(architectures) // 10):
        outcome = timm_models.compare(architecture, seed, small=True)
        timm_models.check(architecture, outcome)


@pytest.mark.slow
def test_every_architecture_of_timm_computes_the_same_at_its_own_width(timm):
    outcomes = {}
    for architecture in timm_models.architectures():
        outcomes[architecture] = timm_models.compare(architecture)
        timm_models.check(architecture, outcomes[architecture])


@pytest.mark.slow
def test_names_and_shapes_of_at_least_381_pretrained_weights_import_at_their_full_depth(timm):
    imported = 0
    for architecture, weights in timm_models.architectures().items():
        if not timm_models.refusal(architecture):
            imported += weights
    assert imported >= 381


def test_ambiguous_keys_require_the_name_of_the_architecture(timm):
    theirs = timm_models.on_meta("vit_base_patch16_clip_224", depth=1)
    with pytest.raises(ValueError, match="the keys of this timm model do not determine"):
        weights_timm.load(theirs.state_dict(), {}, {})
