"""Official .npz files: the originals' logits, tensor names of every generation, and misleading files."""

import importlib
import io
import json
import math
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

import models
from models.extras.weights import layout as weights_map
from models.extras.weights import npz as weights_npz
from tests.support.golden import GOLDEN, needs_golden
from tests.support.weights import assert_logits, channels_first, equal_weights, random_model

CASES = {  # file: tolerance, settings missing from the file
    "vit_tok_linen": (1e-5, {}),
    "vit_tok_prelinen_rep": (1e-5, {}),
    "vit_gap_smallact": (1e-5, {}),
    "hybrid_r11_linen": (2e-5, {}),
    "bv_gap_sincos_rep": (1e-5, {"image_size": (32, 48)}),
    "bv_map_learn": (1e-5, {}),
    "bit_r8": (2e-5, {}),
}


@needs_golden
@pytest.mark.parametrize("case", CASES)
def test_original_checkpoints_give_the_original_logits(case):
    atol, told = CASES[case]
    arrays = np.load(GOLDEN / f"{case}.io.npz")
    model = models.load(GOLDEN / f"{case}.ckpt.npz", **told)
    assert not model.training
    assert_logits(model, channels_first(arrays["images"]), arrays["logits"], atol)
    with torch.no_grad():
        features = model.features(channels_first(arrays["images"]))
    torch.testing.assert_close(features, torch.from_numpy(arrays["pre_logits"]), atol=atol, rtol=0)
    if "images_lowcontrast" in arrays:
        assert_logits(model, channels_first(arrays["images_lowcontrast"]), arrays["logits_lowcontrast"], atol)


@needs_golden
@pytest.mark.parametrize("case", [case for case in CASES if case != "bit_r8"])
def test_stations_inside_the_original_agree(case):
    arrays = np.load(GOLDEN / f"{case}.io.npz")
    model = models.load(GOLDEN / f"{case}.ckpt.npz", **CASES[case][1])
    with torch.no_grad():
        patches = model.embed(channels_first(arrays["images"]))
        tokens = model.encode(patches)
    embedded = arrays["embedding_out"] if "embedding_out" in arrays else arrays["stem"]
    encoded = arrays["encoder_norm_out"] if "encoder_norm_out" in arrays else arrays["encoded"]
    expected = torch.from_numpy(embedded).flatten(1, 2)
    torch.testing.assert_close(patches, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(tokens, torch.from_numpy(encoded).view_as(tokens), atol=2e-5, rtol=0)


@needs_golden
@pytest.mark.parametrize("case", CASES)
def test_original_checkpoints_are_exported_unchanged(case, tmp_path):
    told = CASES[case][1]
    original = models.load(GOLDEN / f"{case}.ckpt.npz", **told)
    models.save(original, tmp_path / "out.npz", format="npz")
    again = models.load(tmp_path / "out.npz", **told)
    assert again.config == original.config
    assert equal_weights(original, again)
    if case not in ("vit_tok_prelinen_rep", "bv_gap_sincos_rep"):  # stored under older names or with a prefix
        stored, written = np.load(GOLDEN / f"{case}.ckpt.npz"), np.load(tmp_path / "out.npz")
        assert set(stored.files) == set(written.files)
        assert all(np.array_equal(stored[key].squeeze(), written[key].squeeze()) for key in stored.files)


@needs_golden
@pytest.mark.parametrize(
    ("case", "atol"), [("ViT-B_16_224", 2e-5), ("R26+ViT-S_32_224", 2e-4), ("bit_pytorch_r14x05", 2e-5)]
)
def test_full_size_models_give_the_original_logits(case, atol, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(GOLDEN)
    make_params = importlib.import_module("make_params")
    about = json.loads((GOLDEN / f"full_size/{case}.keys.json").read_text())
    arrays = np.load(GOLDEN / f"full_size/{case}.logits.npz")
    parameters = make_params.params(about)
    np.savez(tmp_path / "full.npz", **parameters)
    model = models.load(tmp_path / "full.npz")
    images = channels_first(make_params.images(about))
    assert_logits(model, images, arrays["logits"], atol)
    if "logits_with_images_times_2e_3" in arrays:
        assert_logits(model, images * 2e-3, arrays["logits_with_images_times_2e_3"], atol)


def test_every_generation_of_official_names_is_read(tmp_path):
    model = random_model(pool="token", representation=8)
    models.save(model, tmp_path / "linen.npz", format="npz")
    plain = dict(np.load(tmp_path / "linen.npz"))
    numbers = {"LayerNorm_1": "LayerNorm_2", "Attention_0": "Attention_1", "MlpBlock_0": "MlpBlock_3"}

    def pre_linen(key: str) -> str:
        for new, old in numbers.items():
            key = key.replace(new, old)
        return key

    layers = "Transformer/encoderblock_{}/"
    scan = {key: array for key, array in plain.items() if "encoderblock_" not in key}
    for key in [key for key in plain if layers.format(0) in key]:
        stacked = np.stack([plain[key.replace("block_0/", f"block_{i}/")] for i in range(2)])
        scan[key.replace("encoderblock_0/", "encoderblock/")] = stacked
    half = {key: torch.from_numpy(array).bfloat16() for key, array in plain.items()}
    versions = {
        "pre_linen": {pre_linen(key): array for key, array in plain.items()},
        "params": {f"params/{key}": array for key, array in plain.items()},
        "target": {f"opt/target/{key}": array for key, array in plain.items()} | {"opt/state/step": np.array(7)},
        "scan": scan,
        "part": {f"params/img/{key}": array for key, array in plain.items()} | {"params/txt/a": np.ones(1)},
        "bf16": {key: tensor.view(torch.uint16).numpy().view("V2") for key, tensor in half.items()},
    }
    for name, arrays in versions.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        read = models.load(str(tmp_path / f"{name}.npz") + (":img" if name == "part" else ""))
        assert read.config == model.config, name
        assert equal_weights(read, model.bfloat16().float() if name == "bf16" else model), name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mu/8", {}),
        ("mu/8", {"pool": "gap"}),
        ("mu/8", {"pool": "map", "class_slot": False}),
        ("mu/8", {"pool": "token", "class_slot": False, "representation": 8}),
        ("mu/8", {"classes": 0}),
        ("R26+mu/32", {"image_size": 64}),
        ("BiT-R50x1", {"units": (2, 1), "width": 32, "image_size": 224}),
        ("BiT-R50x1", {"units": (1, 2), "width": 32, "image_size": 224, "pool_padding": "-inf"}),
    ],
)
def test_npz_round_trip_is_bit_equal(name, options, tmp_path):
    model = random_model(name, **options)
    models.save(model, tmp_path / "model.npz", format="npz")
    again = models.load(tmp_path / "model.npz")
    assert again.config == model.config
    assert equal_weights(model, again)


def test_old_groupnorms_of_four_axes_are_read(tmp_path):
    model = random_model("R+mu/16", 32)
    models.save(model, tmp_path / "new.npz", format="npz")
    arrays = {k: a.reshape(1, 1, 1, -1) if "gn_" in k else a for k, a in np.load(tmp_path / "new.npz").items()}
    np.savez(tmp_path / "old.npz", **arrays)
    assert equal_weights(models.load(tmp_path / "old.npz"), model)


def test_file_that_would_unpack_to_far_more_than_its_size_is_refused_unread(tmp_path):
    models.save(random_model(), tmp_path / "good.npz", format="npz")
    arrays = dict(np.load(tmp_path / "good.npz"))
    arrays["head/kernel"] = np.zeros(60_000_000, np.float32)
    np.savez_compressed(tmp_path / "bomb.npz", **arrays)
    del arrays
    assert (tmp_path / "bomb.npz").stat().st_size < 1e6
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"would unpack from 0\.\d MB to 240 MB, far more than real weights would"):
        models.load(tmp_path / "bomb.npz")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 5e6


def test_array_that_contradicts_its_header_is_refused_before_memory_is_allocated(tmp_path):
    models.save(random_model(), tmp_path / "good.npz", format="npz")
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": (10**13,)})
    with zipfile.ZipFile(tmp_path / "good.npz", "a") as archive:
        archive.writestr("extra/kernel.npy", content.getvalue() + bytes(16))
    with pytest.raises(
        ValueError, match=r"extra/kernel: its header describes \(10000000000000,\) of float32, .* has 16"
    ):
        models.load(tmp_path / "good.npz")


def test_error_names_an_array_that_is_not_a_weight(tmp_path):
    models.save(random_model(), tmp_path / "good.npz", format="npz")
    np.savez(tmp_path / "bad.npz", step=np.array(7), **np.load(tmp_path / "good.npz"))
    with pytest.raises(ValueError, match="found step of int64"):
        models.load(tmp_path / "bad.npz")


def test_a_siglip_of_big_vision_is_read_as_its_images_tower(tmp_path):
    model = random_model(pool="map", classes=0, class_slot=False)
    models.save(model, tmp_path / "tower.npz", format="npz")
    arrays = {}
    with np.load(tmp_path / "tower.npz") as tower:
        for key in tower.files:
            arrays[f"params/img/{key}"] = tower[key]
    text = {"params/txt/Embed_0/embedding": np.zeros((4, 8), np.float32)}
    np.savez(
        tmp_path / "both.npz",
        **arrays,
        **text,
        **{"params/t": np.ones(1, np.float32), "params/b": np.ones(1, np.float32)},
    )
    for path in ("both.npz", "both.npz:img"):
        assert equal_weights(models.load(str(tmp_path / path), image_size=16), model)


STATS = GOLDEN / "init_stats.json"
INITIAL_CASES = {
    "vit_jax ViT-B_16 rep": ("B/16", 224, {"depth": 1, "representation": 768}),
    "vit_jax R26+ViT-S_32": ("R26+S/32", 224, {"depth": 1}),
    "big_vision B/16 depth1 map rep": (
        "B/16",
        224,
        {"depth": 1, "pool": "map", "representation": 768, "class_slot": False},
    ),
}


@needs_golden
@pytest.mark.parametrize("case", INITIAL_CASES)
def test_every_parameter_starts_as_in_the_original(case):
    stats = {key.removeprefix("params/"): row for key, row in json.loads(STATS.read_text())[case].items()}
    name, size, options = INITIAL_CASES[case]
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
