"""Weights in and out of files: our own directory, and by `load` and `save` those of others.

    weights.safetensors + model.json    ours: what passes from stage to stage
    *.npz                               vit_jax, big_vision, BiT
    model.safetensors + config.json     timm, Hugging Face

Nothing here unpickles: only safetensors and plain arrays are opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import catalog
from models.transfer import check_weights
from models.weights import hf as weights_hf
from models.weights import npz as weights_npz
from models.weights import timm as weights_timm

WEIGHTS, CONFIG = "weights.safetensors", "model.json"
THEIR_WEIGHTS, THEIR_CONFIG = "model.safetensors", "config.json"
# How a file comes to its name: given the final one, a context manager yields the name to write to. The default writes
# in place, as a notebook wants it; a run passes `data.files.whole_file`, so that a file appears whole or not at all.
Writing = Callable[[Path], AbstractContextManager[Path]]
DIRECTORIES = {"timm": weights_timm, "hf": weights_hf}


def save_weights(
    model_or_state: nn.Module | dict[str, Tensor],
    directory: str | Path,
    config: Any = None,
    writing: Writing = nullcontext,
) -> None:
    """Write a model, or a state dict with its config: the tensors first, model.json last."""
    if isinstance(model_or_state, nn.Module):
        state, config = model_or_state.state_dict(), model_or_state.config
    elif config is None:
        raise ValueError("a state dict does not name its model: call save_weights(state, directory, config)")
    else:
        state = model_or_state
    check_weights(state, config)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / WEIGHTS, state, writing)
    with writing(directory / CONFIG) as target:
        target.write_text(json.dumps(catalog.to_dict(config), indent=2) + "\n")


def write_tensors(path: Path, state: dict[str, Tensor], writing: Writing) -> None:
    """Write a state dict as one safetensors file, every tensor contiguous and on the CPU."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    with writing(path) as target:
        save_file(tensors, target, metadata={"format": "pt"})


def load_weights(directory: str | Path) -> tuple[dict[str, Tensor], Any]:
    """State dict and config of a directory `save_weights` wrote; ValueError where they do not fit."""
    from safetensors.torch import load_file

    directory = Path(directory)
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} holds no {name}; expected {CONFIG} and {WEIGHTS}")
    config = catalog.from_dict(json.loads((directory / CONFIG).read_text()))
    state = load_file(directory / WEIGHTS)
    check_weights(state, config)
    return state, config


def module(state: dict[str, Tensor], config: Any) -> nn.Module:
    """The float32 module in eval mode that holds these tensors."""
    check_weights(state, config)
    model = catalog.empty(config)
    model.load_state_dict({name: tensor.to(torch.float32) for name, tensor in state.items()}, assign=True)
    return model.eval()


def load(path: str | Path, **config: Any) -> nn.Module:
    """The module of any supported file or directory, in eval mode and float32.

    The architecture is read from keys, shapes and the config beside them; `config` overrides what they do not
    tell. Raises ValueError naming every key that is missing, unknown or mis-shaped.
    """
    file, beside = Path(path), Path(path) if Path(path).is_dir() else Path(path).parent
    if ".npz" in file.name:
        return module(*weights_npz.load(path, config))
    if (beside / CONFIG).is_file():
        state, saved = load_weights(beside)
        return module(state, catalog.from_dict({**catalog.to_dict(saved), **config}))
    file = file / THEIR_WEIGHTS if file.is_dir() else file
    if file.suffix != ".safetensors" or not file.is_file():
        raise ValueError(
            f"{path} is no directory with {CONFIG} or {THEIR_WEIGHTS}, no .safetensors and no .npz file; "
            "pickled checkpoints (.pth, .bin) are not opened, convert them to safetensors first"
        )
    return module(*load_foreign(file, config))


def load_foreign(file: Path, overrides: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """State dict and config of a timm or Hugging Face safetensors file, with the config.json beside it."""
    from safetensors.torch import load_file

    stored = {key: tensor.float() for key, tensor in load_file(file).items()}
    described = file.parent / THEIR_CONFIG
    fields = json.loads(described.read_text()) if described.is_file() else {}
    hugging_face = any("embeddings.patch_embeddings.projection." in key for key in stored)
    return (weights_hf if hugging_face else weights_timm).load(stored, fields, overrides)


def save(model: nn.Module, path: str | Path, format: str = "safetensors", writing: Writing = nullcontext) -> None:
    """Write the model so that its readers compute the same logits; ValueError where that cannot be.

    format: safetensors (our directory), npz (an official file), timm or hf (a directory they open).
    """
    state, config, path = model.state_dict(), model.config, Path(path)
    if format == "safetensors":
        return save_weights(model, path, writing=writing)
    if format == "npz":
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as target:
            weights_npz.save(state, config, target)
        return None
    if format not in DIRECTORIES:
        raise ValueError(f"format {format!r} is none of safetensors, npz, {', '.join(DIRECTORIES)}")
    tensors, described = DIRECTORIES[format].save(state, config)
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / THEIR_WEIGHTS, tensors, writing)
    with writing(path / THEIR_CONFIG) as target:
        target.write_text(described)
    return None
