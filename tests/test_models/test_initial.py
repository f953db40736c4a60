"""Initial parameter values, compared with the statistics of the original initialisers."""

import json
import math

import pytest

import models
from models.extras.weights import layout as weights_map
from models.extras.weights import npz as weights_npz
from tests.support.golden import GOLDEN, needs_golden

STATS = GOLDEN / "init_stats.json"
CASES = {
    "vit_jax ViT-B_16 rep": ("B/16", 224, {"depth": 1, "representation": 768}),
    "vit_jax R26+ViT-S_32": ("R26+S/32", 224, {"depth": 1}),
    "big_vision B/16 depth1 map rep": (
        "B/16",
        224,
        {"depth": 1, "pool": "map", "representation": 768, "class_slot": False},
    ),
}


@needs_golden
@pytest.mark.parametrize("case", CASES)
def test_every_parameter_starts_as_in_the_original(case):
    stats = {key.removeprefix("params/"): row for key, row in json.loads(STATS.read_text())[case].items()}
    name, size, options = CASES[case]
    classes = stats["head/kernel"]["shape"][-1]
    model = models.build(name, size, classes, **options)
    drawn = weights_map.write(model.state_dict(), model.config, weights_npz.layout_of(model.config))
    first_layer = {key: row for key, row in stats.items() if "encoderblock_" not in key or "block_0/" in key}
    assert set(drawn) >= set(first_layer)
    for key, row in first_layer.items():
        values = drawn[key].double()
        if tuple(values.shape) != tuple(row["shape"]):
            assert values.numel() == math.prod(row["shape"]), key
        if row["std"] == 0:
            assert values.eq(row["mean"]).all(), key
            continue
        noise = 6 / math.sqrt(values.numel())  # six standard errors of both samples' figures
        assert abs(values.std(correction=0).item() - row["std"]) < noise * row["std"], key
        assert abs(values.mean().item() - row["mean"]) < 2 * noise * row["std"], key
        bounded = not key.endswith(("bias", "pos_embedding"))  # the others are normal: no edge to compare
        if bounded and values.numel() > 2000:
            assert abs(values.max().item() / row["max"] - 1) < 0.03, key


def test_the_packed_projection_is_three_matrices():
    weight = models.build("mu/8", 16, width=256, heads=4).blocks[0].attention.qkv.weight
    bound = math.sqrt(6 / 512)  # of a (256, 256) matrix; packed, it would be sqrt(6 / 1024)
    for part in weight.chunk(3):
        assert 0.98 * bound < part.abs().max() <= bound
