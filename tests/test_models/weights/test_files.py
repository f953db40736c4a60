"""Read and write weights of any format with one call: our folder, the formats' limits, and chains of conversions."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import models
from data.files import atomic_file
from tests.support.weights import equal_weights, random_model


@pytest.mark.parametrize("name", ["mu/8", "R26+mu/32", "Axial-mu/8", "BiT-R50x1"])
def test_our_own_directory_round_trip(name, tmp_path):
    model = random_model(name, 64, **({"units": (1, 1), "width": 32} if "BiT" in name else {}))
    models.save(model, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.json", "weights.safetensors"]
    state, config = models.load_weights(tmp_path / "out")
    assert config == model.config
    assert set(state) == set(model.state_dict())
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
        models.save_weights(random_model(), tmp_path, writing=atomic_file)
    assert (tmp_path / "weights.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (sys.exit, ("the file ran code",))

    np.savez(tmp_path / "bomb.npz", **{"embedding/kernel": np.array([Bomb()], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle"):
        models.load(tmp_path / "bomb.npz")
    torch.save({"blocks.0.norm1.weight": Bomb()}, tmp_path / "bomb.pth")
    with pytest.raises(
        ValueError, match=r"cannot be read as a file of tensors: .*\n.*with other objects are not supported"
    ):
        models.load(tmp_path / "bomb.pth")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.bin")
    with pytest.raises(ValueError, match="convert other files to safetensors first"):
        models.load(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("options", "format", "message"),
    [
        ({"registers": 1}, "npz", "1 registers"),
        ({"positions": "relative"}, "npz", "relative positions"),
        ({"representation": 8}, "timm", "no representation layer"),
        ({"representation": 8}, "hf", "it has one with classes=0"),
        ({"pool": "map"}, "hf", "no pooling by map"),
        ({"layer_scale": 0.1}, "npz", "layer_scale=0.1"),
        ({"classes": 0}, "pth", "DINOv2 has no 2 heads at width 32"),
        ({"name": "Axial-mu/8"}, "timm", "no family axial"),
        ({}, "pickle", "expected one of safetensors, npz, timm, hf, pth"),
    ],
)
def test_model_that_a_format_cannot_store_is_refused(options, format, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        models.save(random_model(**options), tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_approximation_is_reported(tmp_path):
    with pytest.warns(UserWarning, match="gelu_tanh"):
        models.save(random_model(activation="gelu"), tmp_path / "out.npz", format="npz")


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


FORMATS = ("safetensors", "npz", "timm", "hf")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("parameter", "stored_names"),
    [
        (
            "blocks.1.mlp.down.weight",
            {
                "npz": "Transformer/encoderblock_1/MlpBlock_0/Dense_1/kernel",
                "timm": "blocks.1.mlp.fc2.weight",
                "hf": "vit.encoder.layer.1.output.dense.weight",
            },
        ),
        ("head.bias", {"npz": "head/bias", "hf": "classifier.bias"}),
        ("prefix.cls", {"npz": "cls", "timm": "cls_token", "hf": "vit.embeddings.cls_token"}),
    ],
)
def test_weights_with_a_value_that_is_not_finite_are_refused_by_the_name_in_the_file(
    format, value, parameter, stored_names, tmp_path
):
    model = random_model(activation="gelu", norm_eps=1e-6)
    path = tmp_path / ("out.npz" if format == "npz" else "out")
    options = {"image_size": (16, 16)} if format == "npz" else {}
    models.save(model, path, format)
    assert equal_weights(models.load(path, **options), model)
    with torch.no_grad():
        tensor = model.get_parameter(parameter)
        tensor.view(-1)[-1] = value
    models.save(model, path, format)
    name = stored_names.get(format, parameter)
    with pytest.raises(
        ValueError, match=rf"1 of \d+ tensors contain NaN or infinity: {name} \(1 of {tensor.numel():,} "
    ):
        models.load(path, **options)


def test_bfloat16_weights_with_nan_are_refused_and_further_tensors_are_counted(tmp_path):
    state = {name: tensor.bfloat16() for name, tensor in random_model().state_dict().items()}
    models.save_weights(state, tmp_path, random_model().config)
    models.load_weights(tmp_path)
    for tensor in state.values():
        tensor.view(-1)[0] = float("nan")
    models.save_weights(state, tmp_path, random_model().config)
    with pytest.raises(ValueError, match=f"{len(state)} of {len(state)} tensors .* and {len(state) - 5} more"):
        models.load_weights(tmp_path)
