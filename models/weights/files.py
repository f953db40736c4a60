"""Read and write weights in our own format; `load` and `save` pass other formats on to models/extras/weights.

A directory with model.json, or a file in such a directory, is in our format, unless its name contains .npz.

    load("ViT-B_16.npz").config      ViTConfig(image_size=(224, 224), patch=(16, 16), classes=21843, width=768, ...)
    save(model, "out", "timm")       writes out/model.safetensors and out/config.json, which timm opens

Nothing here executes code from a file. Training uses only our own format.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import catalog
from models.catalog import Model, check_finite, check_weights
from models.configs import ModelConfig, from_dict, to_dict
from models.weights.folder import CLASSES, CONFIG, PREPROCESSING, WEIGHTS, Preprocessing, foreign

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

    `class_names`, if known, are in the order of the outputs; `preprocessing` is the preprocessing for evaluation.
    Raises ValueError if a state dict is passed without its config, or does not fit it.
    """
    if isinstance(model_or_state, nn.Module):
        state = model_or_state.state_dict()
        config = model_or_state.config
    else:
        state = model_or_state
    if config is None:
        raise ValueError(
            "a state dict does not contain the config of its model; call save_weights(state, directory, config)"
        )
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
    """Return the state dict and the config from a directory in our format.

    Raises ValueError if they do not match, or if a value is NaN or infinite.
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

    The architecture is inferred from the keys and shapes, and from a config file next to the weights; `config` sets
    fields that these do not determine. Raises ValueError listing every missing, unknown or wrongly shaped key, or every
    tensor with NaN or infinity.
    """
    file = Path(path)
    directory = file if file.is_dir() else file.parent
    # "in" instead of the suffix: big_vision's `file.npz:img` names a part of a file.
    if ".npz" in file.name or not (directory / CONFIG).is_file():
        return module(*foreign().load(path, config))
    # The caller's fields override saved ones; `module` rejects fields that the tensors do not fit.
    state, saved = load_weights(directory)
    return module(state, from_dict({**to_dict(saved), **config}))


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
    """Save the model so that readers of the format compute the same logits; raise ValueError if that is impossible.

    format: safetensors (our directory); npz or pth (the file formats of vit_jax, and of DINOv2 or DINOv3, which store
    no class names or preprocessing); timm or hf (directories for these libraries). Without `preprocessing`, timm and hf
    record the default of evaluation: squash the image to the model's size. `loss` is the head's training loss, sigmoid
    or softmax; hf stores it as `problem_type`. `form` (from `form_of`) is the architecture from which the weights were
    imported; timm and hf use it if possible.
    """
    path = Path(path)
    if format == "safetensors":
        save_weights(model, path, writing=writing, class_names=class_names, preprocessing=preprocessing)
        return
    foreign().save(model, path, format, writing, class_names, preprocessing, loss, form)
