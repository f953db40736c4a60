"""Attention and positions of the paper's figures 6, 7 and 11, compared with arrays from the original's weights."""

import numpy as np
import pytest
import torch

import models
from models.extras import analysis
from tests.support.golden import GOLDEN

pytestmark = pytest.mark.quick

IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 24).view(2, 3, 16, 24)


@pytest.fixture(scope="module")
def case():
    """Return the model, its attention weights, the original's intermediate arrays and the derived arrays."""
    if not GOLDEN.is_dir():
        pytest.skip("the golden data is not beside this checkout")
    expected = np.load(GOLDEN / "attention_analysis.npz")
    source = str(expected["source_case"])
    stations = np.load(GOLDEN / f"{source}.io.npz")
    model = models.load(GOLDEN / f"{source}.ckpt.npz")
    images = torch.from_numpy(stations["images"]).permute(0, 3, 1, 2)
    return model, analysis.attention_weights(model, images), stations, expected


def test_attention_weights_are_those_of_the_original(case):
    model, weights, stations, _ = case
    assert len(weights) == model.config.depth
    for i, layer in enumerate(weights):
        np.testing.assert_allclose(layer, stations[f"block{i}_attn_weights"], atol=1e-5, rtol=0)


def test_rollout_with_and_without_the_residual(case):
    _, weights, _, expected = case
    mixed = analysis.rollout(weights)
    np.testing.assert_allclose(mixed, expected["rollout_with_identity"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(
        analysis.rollout(weights, identity=False), expected["rollout_without_identity"], atol=1e-5, rtol=0
    )


def test_the_attention_map_is_the_class_tokens_row_on_the_grid(case):
    model, weights, _, expected = case
    rows = expected["rollout_cls_to_patches"]
    largest = rows.max((1, 2), keepdims=True)
    computed = analysis.attention_map(weights, model.config).numpy()
    np.testing.assert_allclose(computed * largest, rows, atol=1e-5, rtol=0)


def test_attention_distance_with_the_class_token_dropped_either_way(case):
    model, weights, _, expected = case
    raw, renormalised = analysis.attention_distances(weights, model.config)
    np.testing.assert_allclose(raw, expected["attn_distance_raw"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(renormalised, expected["attn_distance_renormalised"], atol=1e-5, rtol=0)


def test_position_similarity(case):
    model, _, _, expected = case
    np.testing.assert_allclose(analysis.position_similarity(model), expected["posemb_cosine"], atol=1e-5, rtol=0)


def test_uniform_attention_reaches_the_mean_distance_of_a_grid_that_is_not_square():
    config = models.config_of("mu/8", image_size=(16, 24), classes=0, pool="gap")
    places = np.array([(y, x) for y in (0, 8) for x in (0, 8, 16)], float)
    expected = np.linalg.norm(places[:, None] - places, axis=-1).mean()
    for computed in analysis.attention_distances([torch.full((1, 2, 6, 6), 1 / 6)], config):
        torch.testing.assert_close(computed, torch.full((1, 2), expected, dtype=torch.float64))


@pytest.mark.parametrize(
    "config",
    [
        {"pool": "gap", "positions": "sincos2d"},
        {"pool": "map", "class_slot": False},
        {"registers": 3},
        {"positions": "relative"},
        {"positions": "learned2d", "positions_at": "every"},
        {"pre_norm": True, "patch_bias": False},
        {"layer_scale": 0.1},
        {"pool": "gap", "last_norm": "pooled"},
        {"qk_norm": True, "qkv_bias": "none"},
        {"activation": "swiglu", "mlp_norm": True},
        {"rope": "dinov3", "positions": "none", "qkv_bias": "qv"},
        {"rope": "mixed", "registers": 2},
        {"norm": "rms", "patch_norm": True, "block_bias": False, "attention_norm": True},
        {"registers": 2, "pool": "gap", "pool_prefix": True},
    ],
)
def test_recomputed_weights_reproduce_the_attention_output(config):
    model = models.build("mu/8", (16, 24), 3, depth=2, **config).eval()
    seen = []
    last = model.blocks[-1].attention
    handle = last.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    projected = []
    for block in model.blocks:
        block.attention.qkv.register_forward_pre_hook(lambda *_: projected.append(1))
    weights = analysis.attention_weights(model, IMAGES)
    handle.remove()
    assert len(projected) == 2, "one projection per block"
    x, output = seen[0]
    v = last.qkv(x).chunk(3, dim=-1)[2].unflatten(-1, (last.heads, -1)).transpose(1, 2)
    mixed = (weights[-1] @ v).transpose(1, 2).flatten(2)
    if model.config.attention_norm:
        mixed = last.norm(mixed)
    torch.testing.assert_close(last.out(mixed)[:, :1], output)  # the last block computes only one token
    assert analysis.attention_map(weights, model.config).shape == (2, 2, 3)
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)
    assert not any("project" in vars(block.attention) for block in model.blocks)


def test_the_attention_map_counts_registers_that_are_pooled():
    """Two registers and two patches; every token attends to itself, the first register to the second patch."""
    config = models.config_of("mu/8", (8, 16), 0, pool="gap", registers=2)
    attention = torch.eye(4)[None, None].clone()
    attention[0, 0, 0] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    # By rollout, half of the first register's output comes from the second patch, and each patch from itself.
    for pool_prefix, expected in ((False, [1.0, 1.0]), (True, [1 / 1.5, 1.0])):
        pooled = models.from_dict({**models.to_dict(config), "pool_prefix": pool_prefix})
        torch.testing.assert_close(
            analysis.attention_map([attention], pooled), torch.tensor([[expected]], dtype=torch.float64)
        )


def test_components_rebuild_the_filters_they_come_from():
    model = models.build("mu/4", 8, 0)
    components, explained = analysis.embedding_components(model, count=48)
    filters = model.embedding.weight.detach().double().flatten(1)
    centred = filters - filters.mean(0)
    basis = components.flatten(1)
    torch.testing.assert_close(centred @ basis.T @ basis, centred)
    assert explained.sum().item() == pytest.approx(1)
    assert (explained.diff() <= 0).all()
    assert components.shape == (32, 3, 4, 4)  # at most the number of filters
    # Figure 7 of the paper shows 28.
    first, explained_by_first = analysis.embedding_components(model)
    assert torch.equal(first, components[:28])
    assert torch.equal(explained_by_first, explained[:28])


def test_masked_models_are_analysed_and_models_without_attention_refused():
    masked = models.build("Masked-mu/8", 16).eval()
    assert len(analysis.attention_weights(masked, IMAGES[..., :16])) == 1
    assert analysis.position_similarity(masked).shape == (2, 2, 2, 2)
    with torch.device("meta"):
        bit, axial = models.build("BiT-R50x1"), models.build("Axial-mu/8", 16)
        hybrid, bare = models.build("R26+S/32"), models.build("mu/8", 16, positions="none")
    with pytest.raises(ValueError, match="found a BiT"):
        analysis.attention_weights(bit, IMAGES)
    with pytest.raises(ValueError, match="family axial"):
        analysis.attention_weights(axial, IMAGES)
    with pytest.raises(ValueError, match="the output of a ResNet stem"):
        analysis.embedding_components(hybrid)
    with pytest.raises(ValueError, match="found positions=none"):
        analysis.position_similarity(bare)
