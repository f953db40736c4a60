"""Our own weights directory: `weights.safetensors` beside `model.json`, whole or not there at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import catalog, transfer

WEIGHTS, CONFIG = "weights.safetensors", "model.json"


def save_weights(
    model_or_state: nn.Module | dict[str, Tensor], directory: str | Path, config: Any = None
) -> None:
    """Write a model, or a state dict with its config; each file appears whole, model.json last."""
    from safetensors.torch import save_file

    if isinstance(model_or_state, nn.Module):
        state, config = model_or_state.state_dict(), model_or_state.config
    elif config is None:
        raise ValueError("a state dict does not name its model: call save_weights(state, directory, config)")
    else:
        state = model_or_state
    transfer.check_weights(state, config)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_whole(directory / WEIGHTS, lambda path: save_file(whole, path, metadata={"format": "pt"}))
    text = json.dumps(catalog.to_dict(config), indent=2) + "\n"
    write_whole(directory / CONFIG, lambda path: path.write_text(text))


def write_whole(path: Path, write: Any) -> None:
    """`write` to a temporary name beside `path`, flush it to the disk, rename it, flush the directory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_weights(directory: str | Path) -> tuple[dict[str, Tensor], Any]:
    """State dict and config of a directory `save_weights` wrote; ValueError where they do not fit."""
    from safetensors.torch import load_file

    directory = Path(directory)
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} holds no {name}; expected {CONFIG} and {WEIGHTS}")
    config = catalog.from_dict(json.loads((directory / CONFIG).read_text()))
    state = load_file(directory / WEIGHTS)
    transfer.check_weights(state, config)
    return state, config


def module(state: dict[str, Tensor], config: Any) -> nn.Module:
    """The float32 module in eval mode that holds these tensors."""
    transfer.check_weights(state, config)
    model = catalog.empty(config)
    model.load_state_dict({name: tensor.to(torch.float32) for name, tensor in state.items()}, assign=True)
    return model.eval()
