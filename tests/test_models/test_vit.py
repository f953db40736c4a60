"""The ViT: parameter names, refused inputs, shapes, dropout in training, and the requirements of ZeRO 3."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import models
from models.configs import SWITCHES
from models.vit import DropPath

SMALL = {"image_size": (16, 24), "classes": 5, "depth": 3}
# Switches as in DINOv3, EVA-02 and CLIP, Perception Encoder, AIMv2, and RoPE-ViT; together, they cover all.
DINOV3 = {"positions": "none", "rope": "dinov3", "registers": 2, "layer_scale": 0.1, "qkv_bias": "qv"}
EVA02 = {"rope": "eva02", "rope_grid": (4, 4), "activation": "swiglu", "mlp_norm": True, "attention_norm": True}
PE = {"rope": "pe", "pool": "map", "map_heads": 4, "map_mlp": 40, "registers": 1, "pool_prefix": True}
PE |= {"pre_norm": True, "patch_bias": False, "activation": "quick_gelu"}
AIMV2 = {"norm": "rms", "pool": "gap", "patch_norm": True, "block_bias": False, "qkv_bias": "none"}
MIXED = {"rope": "mixed", "qk_norm": True, "pool": "gap", "last_norm": "pooled", "registers": 1}
SWITCHED = (DINOV3, EVA02, PE, AIMV2, MIXED, {"last_norm": "none"})
IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 24).view(2, 3, 16, 24)


def with_live_head(model: torch.nn.Module) -> torch.nn.Module:
    """Give the head nonzero values: with the initial zeros all gradients below it would be zero."""
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize(
    ("name", "count"),  # SPEC 1.9
    [
        ("Ti/16", 5_717_416),
        ("S/32", 22_878_952),
        ("S/16", 22_050_664),
        ("B/32", 88_224_232),
        ("B/16", 86_567_656),
        ("B/8", 86_576_872),
        ("L/32", 306_535_400),
        ("L/16", 304_326_632),
        ("H/14", 632_045_800),
        ("R+Ti/16", 6_337_704),
        ("R26+S/32", 36_431_912),
        ("R26+B/32", 101_383_976),
        ("R50+B/16", 98_659_112),
        ("R50+ViT-L/32", 328_994_856),
    ],
)
def test_parameter_counts_are_those_of_the_original(name, count):
    assert models.parameters_of(models.config_of(name)) == count


def test_counts_follow_resolution_classes_pooling_and_representation():
    assert models.parameters_of(models.config_of("H/14", 518)) == 633_470_440
    assert models.parameters_of(models.config_of("L/16", 512)) == 305_174_504
    assert models.parameters_of(models.config_of("B/16", classes=21_843, representation=768)) == 103_186_515
    assert models.parameters_of(models.config_of("S/16", pool="gap")) == 22_049_896
    assert models.parameters_of(models.config_of("B/32", classes=0)) == 87_455_232


def test_h14_is_built_without_memory_on_the_meta_device():
    with torch.device("meta"):
        model = models.build("H/14")
    assert sum(p.numel() for p in model.parameters()) == 632_045_800
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("pool", ["token", "gap", "map"])
@pytest.mark.parametrize("class_slot", [True, False])
@pytest.mark.parametrize("at", ["stem", "every", "shared"])
@pytest.mark.parametrize("kind", ["none", "learned", "learned2d", "sincos2d", "relative"])
def test_every_kind_of_position_trains_at_every_place(kind, at, class_slot, pool):
    options = {"positions": kind, "positions_at": at, "class_slot": class_slot, "pool": pool, "registers": 2}
    model = with_live_head(models.build("mu/8", **SMALL, **options)).train()
    logits = model(IMAGES)
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    tables = sum("positions." in name for name, _ in model.named_parameters())
    per_kind = {"none": 0, "learned": 1, "learned2d": 2 + class_slot, "sincos2d": 0, "relative": 1}[kind]
    assert tables == per_kind * (3 if at == "every" else 1)


@pytest.mark.parametrize("kind", ["learned", "learned2d", "sincos2d", "relative"])
@pytest.mark.parametrize("at", ["stem", "every", "shared"])
def test_order_of_patches_matters_unless_positions_are_none(kind, at):
    def moved(positions: str) -> float:
        torch.manual_seed(0)
        options = {"positions": positions, "positions_at": at, "pool": "gap", "position_std": 1.0}
        model = with_live_head(models.build("mu/8", **SMALL, **options))
        patches = model.embed(torch.randn(1, 3, 16, 24))
        with torch.no_grad():
            return (model.encode(patches) - model.encode(patches.flip(1)).flip(1)).abs().max().item()

    assert moved("none") < 1e-5 < 1e-2 < moved(kind)


def test_relative_attention_is_the_bias_of_its_definition():
    model = models.build("mu/8", **SMALL, positions="relative", pool="gap")
    table = model.positions[0]
    q = torch.randn(2, 2, 6, 16)
    bias = table(q)
    for query, key in ((0, 0), (1, 4), (5, 2)):
        expected = (q[:, :, query] * table.table.view(11, 2, 16)[query - key + 5]).sum(-1) / 16**0.5
        torch.testing.assert_close(bias[:, :, query, key], expected)


def test_logits_are_the_head_of_the_features():
    model = with_live_head(models.build("mu/8", **SMALL, representation=7)).eval()
    features = model.features(IMAGES)
    assert features.shape == (2, 7)
    assert features.abs().max() < 1  # tanh
    torch.testing.assert_close(model.head(features), model(IMAGES))


@pytest.mark.parametrize("options", [{}, {"positions": "relative", "registers": 1}, DINOV3, EVA02])
def test_unread_tokens_are_not_computed(options):
    model = with_live_head(models.build("mu/8", **SMALL, **options)).train()
    results = []
    for skip in (True, False):
        model.skip_unread = skip
        model.zero_grad()
        logits = model(IMAGES)
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    for ours, whole in zip(*results, strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-4, rtol=1e-4)


def test_a_new_model_answers_its_head_bias():
    assert models.build("mu/8", **SMALL, head_bias=-10.0)(IMAGES).eq(-10.0).all()


def test_the_same_seed_draws_the_same_bits():
    config = models.config_of("mu/8", **SMALL)
    first, second = (models.from_config(config, torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_only_kernels_have_weight_decay():
    model = models.build("R26+mu/32", 64, 5, pool="map", representation=8, registers=1)
    decayed = models.decayed_parameters(model)
    assert decayed < {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert (name in decayed) == (parameter.ndim in (2, 4)), name
    assert "blocks.0.attention.qkv.weight" in decayed
    assert "map_head.probe" not in decayed


@pytest.mark.parametrize("name", ["mu/8", "Axial-mu/8", "R+mu/16", "BiT-R50x1"])
def test_checkpointed_blocks_give_the_same_gradients(name):
    config = {"depth": 3, "dropout": 0.1} if "mu" in name else {"units": (1, 1), "width": 32}

    def gradients(recomputed_blocks: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = with_live_head(models.build(name, 32, 5, **config)).train()
        model.recomputed_blocks = recomputed_blocks
        model(torch.ones(2, 3, 32, 32)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(0), gradients(2), strict=True))


@pytest.mark.parametrize("options", SWITCHED)
def test_every_switched_model_trains_every_parameter_also_when_recomputed(options):
    gradients = []
    for recomputed_blocks in (0, 2):
        torch.manual_seed(0)
        model = with_live_head(models.build("mu/8", **SMALL, **options)).train()
        model.recomputed_blocks = recomputed_blocks
        model(IMAGES).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, name
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("options", SWITCHED)
def test_dropped_patches_take_their_rotations_with_them(options):
    model = with_live_head(models.build("mu/8", **SMALL, **options)).eval()
    order = torch.tensor([[3, 0, 5, 1, 4, 2], [5, 4, 3, 2, 1, 0]])
    # The order of tokens does not matter to attention; their positions do.
    torch.testing.assert_close(model(IMAGES, order), model(IMAGES), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(IMAGES, order[:, :4]), model(IMAGES), atol=1e-3)


def test_switches_that_are_off_are_not_in_files_or_keys():
    values = models.to_dict(models.config_of("B/16"))
    assert not set(values) & set(SWITCHES)
    assert models.to_dict(models.config_of("B/16", rope="dinov3"))["rope"] == "dinov3"


@pytest.mark.parametrize("options", SWITCHED)
def test_a_switched_model_moves_to_another_size_with_only_its_table_resized(options):
    model = models.build("mu/8", **SMALL, **options)
    target = replace(model.config, image_size=(32, 24))
    _, report = models.transfer(model.state_dict(), model.config, target)
    resized = [name for name, _, _ in report.resized]
    assert resized == ([] if options.get("positions") == "none" else ["positions.0.table"])
    assert not report.new
    assert not report.dropped


def test_dropout_and_stochastic_depth_act_in_training_only():
    model = with_live_head(models.build("mu/8", **SMALL, dropout=0.2, drop_path=0.5))
    assert not torch.equal(model.train()(IMAGES), model(IMAGES))
    assert torch.equal(model.eval()(IMAGES), model(IMAGES))
    assert [block.drop_path.rate for block in model.blocks] == [0.0, 0.25, 0.5]


def test_dropout_acts_where_the_original_has_it():
    model, seen = models.build("mu/8", **SMALL, dropout=0.1).train(), []
    model.skip_unread = False
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[-1]))
    model(IMAGES)
    width, mlp = 32, 128  # after the positions; then in each block after attention, GELU and the second layer
    assert seen == [width] + 3 * [width, mlp, width]


def test_stochastic_depth_keeps_the_mean():
    torch.manual_seed(0)
    dropped = DropPath(0.25).train()(torch.ones(4000, 2, 3))
    assert set(dropped.flatten().unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(dropped.mean().item() - 1) < 0.05
    assert dropped.std(dim=(1, 2)).eq(0).all()  # a sample is dropped as a whole


def test_bfloat16_stays_near_float32():
    model = with_live_head(models.build("mu/8", **SMALL, positions="relative")).eval()
    expected = model(IMAGES)
    assert model.bfloat16()(IMAGES).float().sub(expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("options", [{"positions": "sincos2d"}, {"rope": "axial"}])
def test_evaluation_under_inference_mode_does_not_spoil_training(options):
    model = with_live_head(models.build("mu/8", **SMALL, width=64, heads=4, **options))
    with torch.inference_mode():
        expected = model.eval()(IMAGES)
    logits = model.train()(IMAGES)
    logits.sum().backward()
    assert torch.equal(logits, expected)
    assert model.embedding.weight.grad.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mu/8", "Axial-mu/8"])
def test_compiled_blocks_compute_the_same(name):
    model = with_live_head(models.build(name, 16, 5, depth=3)).train()
    model.recomputed_blocks = 1
    images, names = torch.linspace(-1, 1, 2 * 3 * 256).view(2, 3, 16, 16), list(model.state_dict())
    expected = model(images)
    models.compile_blocks(model)
    logits = model(images)
    logits.sum().backward()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("name", ["mu/8", "Axial-mu/8", "Masked-mu/8", "R+mu/16", "BiT-R50x1"])
def test_autocast_runs_every_family(name):
    config = {"units": (1,), "width": 32} if "BiT" in name else {}
    model = models.build(name, 32, 5, **config).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.ones(2, 3, 32, 32))
    (output[0] if isinstance(output, tuple) else output).float().square().sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("B/16", {"image_size": 230}, "height 230 is not a multiple of the patch stride 16.*224 or 240"),
        ("H/14", {"image_size": 384}, "378 or 392"),
        ("R50+B/16", {"image_size": 24}, "16 or 32"),
        ("B/16", {"heads": 5}, "width 768 is not a multiple of 5 heads"),
        ("B/16", {"pool": "max"}, "pool must be one of token, gap, map; found 'max'"),
        ("B/16", {"dropout": 1.0}, r"dropout must be in \[0, 1\), found 1.0"),
        ("B/16", {"drop_out": 0.1}, "no field 'drop_out'; did you mean 'dropout'"),
        ("B/16", {"classes": -1}, "classes must be a whole number of at least 0"),
        ("B/16", {"image_size": "224"}, "image_size must be one or two positive integers, found '224'"),
        ("B/16", {"depth": True}, "depth must be a whole number of at least 1, found True"),
        ("B/16", {"image_size": True}, "image_size must be one or two positive integers, found True"),
        ("R50+B/16", {"stem": (3, True, 9)}, "stem must have at least one unit in each stage"),
        ("BiT-R50x1", {"units": (3, True)}, "units must have at least one unit in each stage"),
        ("B/16", {"norm_eps": -1e-6}, "norm_eps must be a finite number of at least 0, found -1e-06"),
        ("B/16", {"position_std": float("nan")}, "position_std must be a finite number of at least 0, found nan"),
        ("G-Opt/14", {}, r"unknown size 'G-Opt'; did you mean 'G-opt' or 'g-opt'\?"),
        ("B/0", {}, "patch must be one or two positive integers, found 0"),
        ("BiT-R50x0", {}, "width must be a whole number of at least 1, found 0"),
        ("b/16", {}, r"unknown size 'b'; did you mean 'B'\?"),
        ("X/16", {}, "unknown size 'X'"),
        ("B16", {}, "B16 is not a model name; did you mean B/16"),
        ("R51+B/16", {}, r"unknown stem or stride; expected one of R50\+B/16"),
        ("BiT-R51x1", {}, "no ResNet with 51 layers; expected one of BiT-R50"),
        ("Axial-B/32", {"pool": "token"}, "no prefix tokens"),
        ("Axial-B/32", {"rope": "dinov3"}, "expected rope=none .*, found rope=dinov3"),
        ("Masked-B/16", {"last_norm": "pooled"}, "does not pool its tokens; expected last_norm=tokens"),
        ("B/16", {"rope": "dinov3", "rope_grid": (16, 16)}, "rope_grid requires a rope whose coordinates are"),
        ("B/16", {"rope": "eva02", "heads": 128}, "channels of a head 6 is not a multiple of 4"),
        ("B/16", {"map_heads": 8}, "map_heads and map_mlp require pool=map, found pool=token"),
        ("B/16", {"pool_prefix": True}, "pool_prefix requires pool=gap or map"),
        ("B/16", {"activation": "swiglu", "pool": "map"}, "the MAP head does not support activation=swiglu"),
        ("B/16", {"pre_norm": 1}, "pre_norm must be true or false, found 1"),
    ],
)
def test_bad_value_is_refused_with_a_remedy(name, options, message):
    with pytest.raises(ValueError, match=message):
        models.config_of(name, **options)


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"expected \(batch, 3, 16, 24\)"):
        models.build("mu/8", **SMALL)(torch.zeros(1, 3, 24, 16))


@pytest.mark.parametrize("options", [{}, {"pool": "gap"}, {"pool": "map"}, {"positions": "relative"}])
def test_a_batch_may_be_empty(options):
    assert models.build("mu/8", **SMALL, **options)(torch.zeros(0, 3, 16, 24)).shape == (0, SMALL["classes"])


def test_sizes_may_be_numpys():
    config = models.config_of("mu/8", np.int64(16), 7)
    assert config == models.config_of("mu/8", [16, 16], 7)
    assert json.loads(json.dumps(models.to_dict(config)))["image_size"] == [16, 16]


def test_a_config_survives_json():
    for name in ("B/16", "R50+L/32", "BiT-R152x2", "Axial-B/32", "Masked-B/16"):
        config = models.config_of(name, (64, 96), 7)
        assert models.from_dict(json.loads(json.dumps(models.to_dict(config)))) == config


ZERO3 = """
import torch, models
from pipeline.engine.deepspeed import import_deepspeed
deepspeed = import_deepspeed()
deepspeed.init_distributed("gloo", verbose=False)
losses = []
for stage, recomputed_blocks in ((0, 0), (3, 0), (3, 2)):
    torch.manual_seed(0)
    model = models.build("mu/8", 16, 5, depth=3, registers=1, positions="relative", positions_at="shared",
                         head_bias=-1.0, rope="mixed", layer_scale=0.5, qkv_bias="qv", qk_norm=True)
    model.recomputed_blocks = recomputed_blocks
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={"train_batch_size": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True})
    for step in range(3):
        loss = engine(torch.full((2, 3, 16, 16), 0.1 * step)).square().sum()
        engine.backward(loss)
        engine.step()
    engine.eval()
    losses.append((loss.item(), engine.module.features(torch.ones(1, 3, 16, 16)).sum().item()))
assert losses[1] == losses[2], losses  # recomputing changes no bit
assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=1e-5), losses
assert losses[0][0] > 0, losses
"""


def test_zero3_with_and_without_checkpointing_matches_zero0(tmp_path):
    pytest.importorskip("deepspeed")
    ranks = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    environment = {**os.environ, **ranks, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", ZERO3], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
