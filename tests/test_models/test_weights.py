"""Weights in and out: the original's arrays, timm and transformers run beside ours, refusals."""

import importlib
import io
import json
import math
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from data.files import whole_file
from models.vit import ACTIVATIONS
from models.weights import timm as weights_timm
from tests.support.golden import GOLDEN, needs_golden

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
CASES = {  # file: tolerance, what the file cannot tell
    "vit_tok_linen": (1e-5, {}),
    "vit_tok_prelinen_rep": (1e-5, {}),
    "vit_gap_smallact": (1e-5, {}),
    "hybrid_r11_linen": (2e-5, {}),
    "bv_gap_sincos_rep": (1e-5, {"image_size": (32, 48)}),
    "bv_map_learn": (1e-5, {}),
    "bit_r8": (2e-5, {}),
}
IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)


def channels_first(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)


@torch.no_grad()
def assert_logits(model, images, expected, atol, rtol=0):
    torch.testing.assert_close(model(images), torch.as_tensor(expected), atol=atol, rtol=0 if atol == 0 else 2e-6)


def equal_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def random_model(name="mu/8", image_size=16, classes=5, **config) -> torch.nn.Module:
    """Every parameter away from its first value, so that a lost one shows."""
    model = models.build(name, image_size, classes, **{"depth": 2, **config} if "BiT" not in name else config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


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
def test_original_checkpoints_go_out_as_they_came_in(case, tmp_path):
    told = CASES[case][1]
    original = models.load(GOLDEN / f"{case}.ckpt.npz", **told)
    models.save(original, tmp_path / "out.npz", format="npz")
    again = models.load(tmp_path / "out.npz", **told)
    assert again.config == original.config and equal_weights(original, again)
    if case not in ("vit_tok_prelinen_rep", "bv_gap_sincos_rep"):  # which come under older names, or a prefix
        stored, written = np.load(GOLDEN / f"{case}.ckpt.npz"), np.load(tmp_path / "out.npz")
        assert set(stored.files) == set(written.files)
        assert all(np.array_equal(stored[key].squeeze(), written[key].squeeze()) for key in stored.files)


@needs_golden
def test_hugging_face_directory_gives_its_logits():
    arrays = np.load(GOLDEN / "hf_vit_cls/io.npz")
    model = models.load(GOLDEN / "hf_vit_cls")
    assert (model.config.activation, model.config.norm_eps, model.config.heads) == ("gelu", 1e-12, 3)
    assert_logits(model, torch.from_numpy(arrays["images_nchw"]), arrays["logits"], 1e-5)


@needs_golden
def test_timm_state_dict_gives_its_logits(tmp_path):
    arrays = np.load(GOLDEN / "timm_vit.npz")
    stored = {k.removeprefix("state_dict/"): torch.from_numpy(arrays[k]) for k in arrays if "state_dict/" in k}
    save_file(stored, tmp_path / "timm.safetensors")
    with pytest.raises(ValueError, match="pass heads="):
        models.load(tmp_path / "timm.safetensors")
    model = models.load(tmp_path / "timm.safetensors", heads=3)
    assert_logits(model, torch.from_numpy(arrays["images_nchw"]), arrays["logits"], 1e-5)


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


@pytest.mark.parametrize("name", ["mu/8", "R26+mu/32", "Axial-mu/8", "BiT-R50x1"])
def test_our_own_directory_round_trip(name, tmp_path):
    model = random_model(name, 64, **({"units": (1, 1), "width": 32} if "BiT" in name else {}))
    models.save(model, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.json", "weights.safetensors"]
    state, config = models.load_weights(tmp_path / "out")
    assert config == model.config and set(state) == set(model.state_dict())
    assert equal_weights(models.load(tmp_path / "out"), model)
    assert models.load(tmp_path / "out", head_bias=-3.0).config.head_bias == -3.0


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    models.save_weights(random_model(), tmp_path)
    before = (tmp_path / "weights.safetensors").read_bytes()

    def fail(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        models.save_weights(random_model(), tmp_path, writing=whole_file)
    assert (tmp_path / "weights.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_what_does_not_fit_is_listed_key_by_key(tmp_path):
    models.save(random_model(), tmp_path / "good.npz", format="npz")
    arrays = dict(np.load(tmp_path / "good.npz"))
    del arrays["Transformer/encoder_norm/bias"]
    arrays["extra/kernel"] = np.zeros((2, 3), np.float32)
    arrays["head/kernel"] = np.zeros((5, 32), np.float32)  # transposed
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError) as refused:
        models.load(tmp_path / "bad.npz")
    for part in (
        "3 keys",
        "missing Transformer/encoder_norm/bias 32",
        "unknown extra/kernel 2x3",
        "head/kernel is 5x32, expected 32x5",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"imagesize": 24}, r"no field 'imagesize'; did you mean 'image_size'\?"),
        ({"image_size": 24}, r"\(24, 24\) has 9 patches and 1 prefix tokens, the file has 5 position entries"),
        ({"heads": 4}, r"query/kernel is 32x2x16, expected 32x4x8"),
    ],
)
def test_what_is_told_of_a_file_must_fit_it(told, message, tmp_path):
    models.save(random_model(), tmp_path / "good.npz", format="npz")
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path / "good.npz", **told)


def test_a_file_that_would_grow_far_past_its_size_is_refused_before_it_does(tmp_path):
    models.save(random_model(), tmp_path / "good.npz", format="npz")
    arrays = dict(np.load(tmp_path / "good.npz"))
    arrays["head/kernel"] = np.zeros(60_000_000, np.float32)
    np.savez_compressed(tmp_path / "bomb.npz", **arrays)
    del arrays
    assert (tmp_path / "bomb.npz").stat().st_size < 1e6
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"would grow from 0\.\d MB to 240 MB, and weights do not"):
        models.load(tmp_path / "bomb.npz")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 5e6


def test_an_array_that_is_not_as_large_as_it_says_is_refused_before_its_memory_is_taken(tmp_path):
    models.save(random_model(), tmp_path / "good.npz", format="npz")
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": (10**13,)})
    with zipfile.ZipFile(tmp_path / "good.npz", "a") as archive:
        archive.writestr("extra/kernel.npy", content.getvalue() + bytes(16))
    with pytest.raises(ValueError, match=r"extra/kernel says that it is \(10000000000000,\) of float32, .* and has 16"):
        models.load(tmp_path / "good.npz")


def test_an_array_that_is_no_weight_is_named(tmp_path):
    models.save(random_model(), tmp_path / "good.npz", format="npz")
    np.savez(tmp_path / "bad.npz", step=np.array(7), **np.load(tmp_path / "good.npz"))
    with pytest.raises(ValueError, match="found step of int64"):
        models.load(tmp_path / "bad.npz")


def test_nothing_is_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (sys.exit, ("the file ran code",))

    np.savez(tmp_path / "bomb.npz", **{"embedding/kernel": np.array([Bomb()], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle"):
        models.load(tmp_path / "bomb.npz")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.pth")
    with pytest.raises(ValueError, match=r"pickled checkpoints .* are not opened"):
        models.load(tmp_path / "model.pth")


@pytest.mark.parametrize(
    ("options", "format", "message"),
    [
        ({"registers": 1}, "npz", "1 registers"),
        ({"positions": "relative"}, "npz", "relative positions at every"),
        ({"representation": 8}, "timm", "no representation layer"),
        ({"representation": 8}, "hf", "it has one with classes=0"),
        ({"pool": "gap"}, "hf", "no pooling by gap"),
        ({"name": "Axial-mu/8"}, "timm", "no family axial"),
        ({}, "pickle", "none of safetensors, npz, timm, hf"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(options, format, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        models.save(random_model(**options), tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("format", "extra", "described", "message"),
    [
        ("timm", {"fc_norm.weight": torch.ones(32)}, {}, "normalises after pooling"),
        ("timm", {"blocks.0.ls1.gamma": torch.ones(32)}, {}, "1 keys: unknown blocks.0.ls1.gamma 32"),
        ("timm", {"norm_pre.weight": torch.ones(32)}, {}, "1 keys: unknown norm_pre.weight 32"),
        ("timm", {}, {"model_args": {"global_pool": "avgmax"}}, "pools by avgmax, which no model here does"),
        ("timm", {}, {"model_args": {"pool_include_prefix": True}}, "has pool_include_prefix"),
        ("hf", {"vit.pooler.dense.bias": torch.ones(32)}, {}, "1 keys: unknown vit.pooler.dense.bias 32"),
        ("hf", {}, {"hidden_act": "relu"}, "hidden_act 'relu' is not one of gelu"),
    ],
)
def test_what_a_foreign_file_has_and_we_have_not_is_refused(format, extra, described, message, tmp_path):
    models.save(random_model(), tmp_path, format=format)
    save_file({**load_file(tmp_path / "model.safetensors"), **extra}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **described}))
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path)


def test_an_approximation_is_said(tmp_path):
    with pytest.warns(UserWarning, match="gelu_tanh"):
        models.save(random_model(activation="gelu"), tmp_path / "out.npz", format="npz")


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
        {"global_pool": "avg", "fc_norm": False},  # with a class token that is not pooled
        {"global_pool": "avg", "fc_norm": False, "reg_tokens": 2, "no_embed_class": True},
        {"global_pool": "avg", "fc_norm": False, "class_token": False},
        {"global_pool": "map", "reg_tokens": 2, "act_layer": "gelu_tanh"},
        {"reg_tokens": 3, "num_classes": 0},
    ],
)
def test_what_timm_saves_comes_to_us(options, timm, tmp_path):
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


@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch16_gap_224",
        "vit_base_patch16_siglip_224",
        "vit_base_patch32_siglip_256",
        "vit_large_patch16_siglip_384",
        "vit_large_patch16_siglip_gap_512",
        "vit_so400m_patch14_siglip_378",
        "vit_so400m_patch16_siglip_gap_256",
        "vit_giantopt_patch16_siglip_384",
        "vit_so150m_patch16_reg4_gap_256",
    ],
)
def test_what_a_name_of_timm_stands_for_is_known(name, timm):
    with torch.device("meta"):
        theirs = timm.create_model(name, depth=1)
    stored = theirs.state_dict()
    _, config = weights_timm.load(
        {key: torch.empty(tensor.shape) for key, tensor in stored.items()}, {"architecture": name}, {}
    )
    block = theirs.blocks[0]
    assert config.heads == block.attn.num_heads
    assert ACTIVATIONS[config.activation] == getattr(block.mlp.act, "approximate", "tanh")
    assert config.pool == weights_timm.POOLS[theirs.global_pool] and config.norm_eps == theirs.norm.eps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "gelu", "norm_eps": 1e-12, "image_size": (16, 24)},
        {"positions": "sincos2d"},
        {"class_slot": False},
        {"classes": 0, "representation": 8},
    ],
)
def test_transformers_opens_our_directory_and_agrees(options, transformers, tmp_path):
    model = random_model(**options)
    images = torch.linspace(-1, 1, 6 * math.prod(model.config.image_size)).view(2, 3, *model.config.image_size)
    models.save(model, tmp_path / "hf", format="hf")
    kind = transformers.ViTForImageClassification if model.config.classes else transformers.ViTModel
    theirs, info = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        out = theirs.eval()(images)
        assert_logits(model, images, out.logits if model.config.classes else out.pooler_output, 1e-5)
        assert_logits(models.load(tmp_path / "hf"), images, model(images), 1e-6, rtol=2e-6)


def test_once_round_all_formats_and_every_bit_is_back(timm, transformers, tmp_path):
    models.save(random_model(), tmp_path / "0.npz", format="npz")
    first = model = models.load(tmp_path / "0.npz")
    for i, format in enumerate(["timm", "safetensors", "hf", "npz"]):
        path = tmp_path / (f"{i}.npz" if format == "npz" else str(i))
        models.save(model, path, format=format)
        model = models.load(path)
        assert model.config == first.config, format
    assert equal_weights(first, model)
    assert (tmp_path / "0.npz").stat().st_size == (tmp_path / "3.npz").stat().st_size


def test_their_own_saves_come_back_to_us(transformers, tmp_path):
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
    )
    for kind in (transformers.ViTForImageClassification, transformers.ViTModel):
        theirs = kind(config).eval()
        theirs.save_pretrained(tmp_path / kind.__name__)
        ours = models.load(tmp_path / kind.__name__)
        with torch.no_grad():
            out = theirs(IMAGES)
            expected = out.logits if hasattr(out, "logits") else out.pooler_output
            assert_logits(ours, IMAGES, expected, 1e-5)
        models.save(ours, tmp_path / "again", format="hf")
        name = "model.safetensors"
        before, after = load_file(tmp_path / kind.__name__ / name), load_file(tmp_path / "again" / name)
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
