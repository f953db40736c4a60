"""Read and write the weight formats of other projects: `models.load`, `models.save` and others call this module.

How `load` recognises a path, first match wins:
1. a file whose name contains .npz is an official file;
2. a .pth file comes from DINOv2, from DINOv3, or from a repository that uses timm's names;
3. a .safetensors file, or a directory with model.safetensors, comes from timm or Hugging Face; config.json or the keys
   show which.

    load("ViT-B_16.npz", {})         the state dict, and ViTConfig(image_size=(224, 224), patch=(16, 16), …)

Nothing here executes code from a file: only safetensors, plain arrays and pickled tensors are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from models.catalog import Model, check_finite
from models.configs import ConfigFields, ModelConfig, ViTConfig
from models.extras.weights import hf, npz, pth, timm
from models.extras.weights.preprocessing import for_hf
from models.weights.files import Writing, write_tensors
from models.weights.folder import CONFIG, THEIR_CONFIG, THEIR_PREPROCESSOR, THEIR_WEIGHTS, Preprocessing

loss_of = hf.loss_of


def load(path: str | Path, config: ConfigFields) -> tuple[dict[str, Tensor], ModelConfig]:
    """Load another project's weights: return the state dict and config; `config` sets fields missing from the files.

    Raises ValueError listing every missing, unknown or wrongly shaped key, or every tensor with NaN or infinity.
    """
    file = Path(path)
    if ".npz" in file.name:
        return npz.load(path, config)
    if file.suffix == ".pth":
        return pth.load(file, config)
    if file.is_dir():
        file = file / THEIR_WEIGHTS
    if file.suffix != ".safetensors" or not file.is_file():
        raise ValueError(
            f"{path} is not a folder with {CONFIG} or {THEIR_WEIGHTS}, and not a .safetensors, .npz or .pth file\n"
            "  convert other files to safetensors first"
        )
    # The file is timm's or Hugging Face's.
    stored = {key: tensor.float() for key, tensor in load_file(file).items()}
    # Before the conversion, so that the error has the file's names.
    check_finite(stored)
    config_file = file.parent / THEIR_CONFIG
    # A file without config.json is supported too: shapes and the library's defaults replace it.
    described = {}
    if config_file.is_file():
        described = json.loads(config_file.read_text())
    is_hf = hf.is_hf(stored, described)
    # The caller's fields come last, so that they override those of the files.
    pixels = pixel_fields(file.parent, described, is_hf)
    fields = {**pixels, **config}
    if is_hf:
        return hf.load(stored, described, fields)
    return timm.load(stored, described, fields)


def class_names(described: dict[str, Any]) -> list[str]:
    """Return the class names from a transformers or timm config.json, in the order of the outputs."""
    return hf.class_names(described) or timm.class_names(described)


def form_of(path: str | Path) -> dict[str, Any]:
    """Return the architecture named in another library's files, so that an export can use the same architecture.

    The result contains transformers' model_type, or timm's architecture with its arguments; it is empty if the files
    name neither.
    """
    file = Path(path)
    if file.is_dir():
        file = file / THEIR_WEIGHTS
    config_file = file.parent / THEIR_CONFIG
    if file.suffix != ".safetensors" or not config_file.is_file():
        return {}
    described = json.loads(config_file.read_text())
    if "model_type" in described:
        return {"model_type": described["model_type"]}
    return timm.form_of(load_file(file), described)


def pixel_fields(folder: Path, described: dict[str, Any], is_hf: bool) -> ConfigFields:
    """Return the pixel mean and standard deviation that timm or transformers uses with a folder's weights."""
    values = described.get("pretrained_cfg", {})
    names = ("mean", "std")
    fields: ConfigFields = {}
    if is_hf and described:
        # The values with which the family's published weights were trained.
        fields = hf.pixels_of(described)
        values = {}
        if (folder / THEIR_PREPROCESSOR).is_file():
            values = json.loads((folder / THEIR_PREPROCESSOR).read_text())
        names = ("image_mean", "image_std")
    for ours, theirs in zip(("pixel_mean", "pixel_std"), names, strict=True):
        if values.get(theirs):
            fields[ours] = tuple(values[theirs])
    return fields


def save(
    model: Model,
    path: Path,
    format: str,
    writing: Writing,
    class_names: Sequence[str],
    preprocessing: Preprocessing | None,
    loss: str | None,
    form: dict[str, Any] | None,
) -> None:
    """Write the model in a format of `models.save`; raise ValueError if readers would compute different logits."""
    if format not in ("npz", "timm", "hf", "pth"):
        raise ValueError(f"format is {format!r}, expected one of safetensors, npz, timm, hf, pth")
    if format == "pth":
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as target:
            pth.save(model.state_dict(), model.config, target)
        return
    if format == "npz":
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as target:
            npz.save(model.state_dict(), model.config, target)
        return
    if preprocessing is None:
        size = model.config.image_size
        preprocessing = Preprocessing(ops=f"resize({size})", size=size, resize=size)
    if isinstance(model.config, ViTConfig):
        preprocessing = replace(preprocessing, mean=model.config.pixel_mean, std=model.config.pixel_std)
    if format == "timm":
        tensors, described = timm.save(model.state_dict(), model.config, class_names, preprocessing, form)
        texts = {THEIR_CONFIG: described}
    else:
        family = (form or {}).get("model_type")
        tensors, described = hf.save(model.state_dict(), model.config, class_names, loss, family)
        texts = {THEIR_PREPROCESSOR: json.dumps(for_hf(preprocessing), indent=2) + "\n", THEIR_CONFIG: described}
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / THEIR_WEIGHTS, tensors, writing)
    for name, text in texts.items():
        with writing(path / name) as target:
            target.write_text(text)
