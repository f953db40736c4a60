"""Weights in and out of files: our own directory (folder.py), and by `load` and `save` those of others.

How `load` finds what a path is, first match wins:
1. a name with .npz in it is an official file;
2. a directory with model.json, or a file in one, is ours;
3. a .safetensors file, or a directory with model.safetensors, is timm's or Hugging Face's: the keys tell which.

    load("ViT-B_16.npz").config      ViTConfig(image_size=(224, 224), patch=(16, 16), classes=21843, width=768, ...)
    save(model, "out", "timm")       writes out/model.safetensors and out/config.json, which timm opens

Nothing here unpickles: only safetensors and plain arrays are opened. Training reads and writes our own directories
alone, so that the modules of the other formats are imported where a file of theirs is met.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from models import catalog
from models.catalog import Model, check_weights
from models.configs import ModelConfig, from_dict, to_dict
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

# How a file comes to its name: given the final one, a context manager yields the name to write to. The default writes
# in place, as a notebook wants it; a run passes `data.files.atomic_file`, so that a file appears whole or not at all.
Writing = Callable[[Path], AbstractContextManager[Path]]


def save_weights(
    model_or_state: Model | dict[str, Tensor],
    directory: str | Path,
    config: ModelConfig | None = None,
    writing: Writing = nullcontext,
    class_names: Sequence[str] = (),
    preprocessing: Preprocessing | None = None,
) -> None:
    """Write a model, or a state dict with its config: the tensors first, model.json last.

    `class_names` are those of the classes, in the order of the outputs, as far as they are known; `preprocessing` says
    how the pixels were made that the weights were judged on. Raises ValueError where the state dict comes without its
    config or does not fit it.
    """
    if isinstance(model_or_state, nn.Module):
        state = model_or_state.state_dict()
        config = model_or_state.config
    else:
        state = model_or_state
    if config is None:
        raise ValueError("a state dict does not name its model: call save_weights(state, directory, config)")
    check_weights(state, config)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # model.json comes last: a save that was cut off in a new directory has none, and is refused.
    write_tensors(directory / WEIGHTS, state, writing)
    names = list(class_names[: config.classes])
    beside = {
        CLASSES: json.dumps(names, indent=0) if names else None,
        PREPROCESSING: json.dumps(asdict(preprocessing), indent=2) if preprocessing else None,
    }
    for name, text in beside.items():
        if text is None:
            # What stands beside the weights that were here before would be taken for these weights'.
            (directory / name).unlink(missing_ok=True)
            continue
        with writing(directory / name) as target:
            target.write_text(text + "\n")
    with writing(directory / CONFIG) as target:
        target.write_text(json.dumps(to_dict(config), indent=2) + "\n")


def write_tensors(path: Path, state: dict[str, Tensor], writing: Writing) -> None:
    """Write a state dict as one safetensors file, every tensor contiguous and on the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    with writing(path) as target:
        try:
            save_file(tensors, target, metadata={"format": "pt"})
        except SafetensorError as error:
            # A refusal of the disk comes as "… (os error 28) at path …", which says neither which file nor what to do.
            code = re.search(r"\(os error (\d+)\)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def load_weights(directory: str | Path) -> tuple[dict[str, Tensor], ModelConfig]:
    """Return state dict and config of a directory `save_weights` wrote; ValueError where they do not fit."""
    from safetensors.torch import load_file

    directory = Path(directory)
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} holds no {name}; expected {CONFIG} and {WEIGHTS}")
    config = from_dict(json.loads((directory / CONFIG).read_text()))
    state = load_file(directory / WEIGHTS)
    check_weights(state, config)
    return state, config


def module(state: dict[str, Tensor], config: ModelConfig) -> Model:
    """Return the float32 module in eval mode that holds these tensors."""
    check_weights(state, config)
    # On meta, so that no first values are drawn that the next lines would replace.
    model = catalog.empty(config)
    # Copied, because a safetensors file is mapped into memory and its tensors may start at any byte. MKL's last bit
    # depends on where they start, so that the same weights would give other bits.
    in_float32 = {name: tensor.to(torch.float32, copy=True) for name, tensor in state.items()}
    model.load_state_dict(in_float32, assign=True)
    return model.eval()


def load(path: str | Path, **config: object) -> Model:
    """Return the module of any supported file or directory, in eval mode and float32.

    The architecture is read from keys, shapes and the config beside them; `config` overrides what they do not
    tell. Raises ValueError naming every key that is missing, unknown or mis-shaped.
    """
    file = Path(path)
    directory = file if file.is_dir() else file.parent
    # "in" and not the suffix: big_vision's `file.npz:img` names a part of a file.
    if ".npz" in file.name:
        from models.weights import npz

        return module(*npz.load(path, config))
    if (directory / CONFIG).is_file():
        # The caller's fields win; `module` then refuses those that the tensors do not fit.
        state, saved = load_weights(directory)
        return module(state, from_dict({**to_dict(saved), **config}))
    if file.is_dir():
        file = file / THEIR_WEIGHTS
    if file.suffix != ".safetensors" or not file.is_file():
        raise ValueError(
            f"{path} is no folder with {CONFIG} or {THEIR_WEIGHTS}, no .safetensors and no .npz file\n"
            "  pickled checkpoints (.pth, .bin) are not opened: convert them to safetensors first"
        )
    # The file is timm's or Hugging Face's.
    from safetensors.torch import load_file

    from models.weights import hf, timm

    stored = {key: tensor.float() for key, tensor in load_file(file).items()}
    config_file = file.parent / THEIR_CONFIG
    # A bare file is read too: then shapes and the other library's defaults tell what config.json would.
    described = {}
    if config_file.is_file():
        described = json.loads(config_file.read_text())
    # This key is in every ViT of transformers, with and without a classifier, and in none of timm.
    if any("embeddings.patch_embeddings.projection." in key for key in stored):
        return module(*hf.load(stored, described, config))
    return module(*timm.load(stored, described, config))


def save(
    model: Model,
    path: str | Path,
    format: str = "safetensors",
    writing: Writing = nullcontext,
    class_names: Sequence[str] = (),
    preprocessing: Preprocessing | None = None,
) -> None:
    """Write the model so that its readers compute the same logits of an image; ValueError where that cannot be.

    format: safetensors (our directory), npz (an official file, which has no place for class names and preprocessing),
    timm or hf (a directory they open). Without `preprocessing` timm and hf are told of evaluation's default: an image
    is squashed to the model's size.
    """
    path = Path(path)
    if format == "safetensors":
        save_weights(model, path, writing=writing, class_names=class_names, preprocessing=preprocessing)
        return
    if format not in ("npz", "timm", "hf"):
        raise ValueError(f"format {format!r} is none of safetensors, npz, timm, hf")
    from models.weights import hf, npz, timm

    if format == "npz":
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as target:
            npz.save(model.state_dict(), model.config, target)
        return
    if preprocessing is None:
        size = model.config.image_size
        preprocessing = Preprocessing(ops=f"resize({size})", size=size, resize=size)
    if format == "timm":
        tensors, described = timm.save(model.state_dict(), model.config, class_names, preprocessing)
        texts = {THEIR_CONFIG: described}
    else:
        tensors, described = hf.save(model.state_dict(), model.config, class_names)
        texts = {THEIR_PREPROCESSOR: json.dumps(preprocessing.for_hf(), indent=2) + "\n", THEIR_CONFIG: described}
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / THEIR_WEIGHTS, tensors, writing)
    for name, text in texts.items():
        with writing(path / name) as target:
            target.write_text(text)
