"""Read and write weights: our own directories (folder.py), and by `load` and `save` other libraries' formats.

How `load` recognises a path, first match wins:
1. a name that contains .npz is an official file;
2. a directory with model.json, or a file in such a directory, is in our format;
3. a .pth file is that of DINOv2, of DINOv3, or of a repository with timm's names;
4. a .safetensors file, or a directory with model.safetensors, is timm's or Hugging Face's; config.json or keys tell.

    load("ViT-B_16.npz").config      ViTConfig(image_size=(224, 224), patch=(16, 16), classes=21843, width=768, ...)
    save(model, "out", "timm")       writes out/model.safetensors and out/config.json, which timm opens

Nothing here runs code of a file: only safetensors, plain arrays and pickled tensors are read. Training uses only our
own format, so the modules of other formats are imported when needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import catalog
from models.catalog import Model, check_finite, check_weights
from models.configs import ConfigFields, ModelConfig, ViTConfig, from_dict, to_dict
from models.weights.folder import (
    CLASSES,
    CONFIG,
    PREPROCESSING,
    THEIR_CONFIG,
    THEIR_PREPROCESSOR,
    THEIR_WEIGHTS,
    WEIGHTS,
)
from models.weights.preprocessing import Preprocessing

# How files are written: a context manager takes the final path and yields the path to write to. The default writes in
# place, for notebooks; a run passes `data.files.atomic_file`, so that files are complete or absent.
Writing = Callable[[Path], AbstractContextManager[Path]]


def save_weights(
    model_or_state: Model | dict[str, Tensor],
    directory: str | Path,
    config: ModelConfig | None = None,
    writing: Writing = nullcontext,
    class_names: Sequence[str] = (),
    preprocessing: Preprocessing | None = None,
) -> None:
    """Write a model, or a state dict with its config, to a directory in our format.

    `class_names` are in the order of the outputs, as far as they are known; `preprocessing` is that of the evaluation.
    Raises ValueError if a state dict comes without its config or does not fit it.
    """
    if isinstance(model_or_state, nn.Module):
        state = model_or_state.state_dict()
        config = model_or_state.config
    else:
        state = model_or_state
    if config is None:
        raise ValueError("a state dict does not contain its config: call save_weights(state, directory, config)")
    check_weights(state, config)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Write model.json last: an interrupted save to a new directory has no model.json and is rejected.
    write_tensors(directory / WEIGHTS, state, writing)
    names = list(class_names[: config.classes])
    optional_files = {
        CLASSES: json.dumps(names, indent=0) if names else None,
        PREPROCESSING: json.dumps(asdict(preprocessing), indent=2) if preprocessing else None,
    }
    for name, text in optional_files.items():
        if text is None:
            # Delete the file of earlier weights, or it would be taken to describe these.
            (directory / name).unlink(missing_ok=True)
            continue
        with writing(directory / name) as target:
            target.write_text(text + "\n")
    with writing(directory / CONFIG) as target:
        target.write_text(json.dumps(to_dict(config), indent=2) + "\n")


def write_tensors(path: Path, state: dict[str, Tensor], writing: Writing) -> None:
    """Write a state dict to one safetensors file; tensors are made contiguous and moved to the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    with writing(path) as target:
        try:
            save_file(tensors, target, metadata={"format": "pt"})
        except SafetensorError as error:
            # safetensors reports disk errors as "… (os error 28) at path …": convert them to an OSError with the path.
            code = re.search(r"\(os error (\d+)\)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def load_weights(directory: str | Path) -> tuple[dict[str, Tensor], ModelConfig]:
    """Return state dict and config of a directory in our format.

    Raises ValueError if they do not fit each other, or if a value is NaN or infinite.
    """
    from safetensors.torch import load_file

    directory = Path(directory)
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} contains no {name}; expected {CONFIG} and {WEIGHTS}")
    config = from_dict(json.loads((directory / CONFIG).read_text()))
    state = load_file(directory / WEIGHTS)
    check_weights(state, config)
    check_finite(state)
    return state, config


def module(state: dict[str, Tensor], config: ModelConfig) -> Model:
    """Build a module in eval mode with these weights in float32."""
    check_weights(state, config)
    # On the meta device, which skips an initialisation that would be overwritten.
    model = catalog.empty(config)
    # Copy the tensors: those mapped from a safetensors file may start at any byte, and MKL's last bit depends on the
    # alignment, so equal weights would give different bits.
    in_float32 = {name: tensor.to(torch.float32, copy=True) for name, tensor in state.items()}
    model.load_state_dict(in_float32, assign=True)
    return model.eval()


def load(path: str | Path, **config: object) -> Model:
    """Load a model in eval mode and float32 from any supported file or directory.

    The architecture is inferred from keys, shapes and a config file next to them; `config` sets fields that these do
    not tell. Raises ValueError listing every key that is missing, unknown or of the wrong shape,
    or every tensor that contains NaN or infinity.
    """
    file = Path(path)
    directory = file if file.is_dir() else file.parent
    # "in" instead of the suffix: big_vision's `file.npz:img` names a part of a file.
    if ".npz" in file.name:
        from models.weights import npz

        return module(*npz.load(path, config))
    if (directory / CONFIG).is_file():
        # The caller's fields override saved ones; `module` rejects fields that the tensors do not fit.
        state, saved = load_weights(directory)
        return module(state, from_dict({**to_dict(saved), **config}))
    if file.suffix == ".pth":
        from models.weights import pth

        return module(*pth.load(file, config))
    if file.is_dir():
        file = file / THEIR_WEIGHTS
    if file.suffix != ".safetensors" or not file.is_file():
        raise ValueError(
            f"{path} is not a folder with {CONFIG} or {THEIR_WEIGHTS}, nor a .safetensors, .npz or .pth file\n"
            "  convert other files to safetensors first"
        )
    # The file is timm's or Hugging Face's.
    from safetensors.torch import load_file

    from models.weights import hf, timm

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
        return module(*hf.load(stored, described, fields))
    return module(*timm.load(stored, described, fields))


def form_of(path: str | Path) -> dict[str, Any]:
    """Return the form of foreign weights, so that an export can have the same; empty if files do not tell it.

    It is transformers' model_type, or timm's architecture with its arguments.
    """
    from safetensors.torch import load_file

    from models.weights import timm

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
    """Return the mean and deviation by which timm or transformers normalises the pixels of a folder's weights."""
    from models.weights import hf

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
    path: str | Path,
    format: str = "safetensors",
    writing: Writing = nullcontext,
    class_names: Sequence[str] = (),
    preprocessing: Preprocessing | None = None,
    loss: str | None = None,
    form: dict[str, Any] | None = None,
) -> None:
    """Write the model so that readers of the format compute the same logits; ValueError if that is impossible.

    format: safetensors (our directory), npz or pth (files of vit_jax, and of DINOv2 or DINOv3, without class names and
    preprocessing), timm or hf (directories for these libraries). Without `preprocessing`, timm and hf get evaluation's
    default: squash the image to the model's size. `loss`, sigmoid or softmax, trained the head: hf stores it as
    `problem_type`. `form` (`form_of`) is that in which the weights were imported, which timm and hf prefer.
    """
    path = Path(path)
    if format == "safetensors":
        save_weights(model, path, writing=writing, class_names=class_names, preprocessing=preprocessing)
        return
    if format not in ("npz", "timm", "hf", "pth"):
        raise ValueError(f"format is {format!r}, expected one of safetensors, npz, timm, hf, pth")
    from models.weights import hf, npz, timm

    if format == "pth":
        from models.weights import pth

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
        texts = {THEIR_PREPROCESSOR: json.dumps(preprocessing.for_hf(), indent=2) + "\n", THEIR_CONFIG: described}
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / THEIR_WEIGHTS, tensors, writing)
    for name, text in texts.items():
        with writing(path / name) as target:
            target.write_text(text)
