"""Weights in and out of a campaign, with a report of what became of them.

python -m jobs import vit_b16.npz weights/b16                         then in a recipe: init: weights/b16
python -m jobs import sincos.npz weights/s16 'image_size=[224, 224]'  what the file cannot tell
python -m jobs export runs/digits/finetune-1a2b3c4d digits-hf --format hf
"""

import json
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

import models
from data.errors import DataError, UsageError
from data.files import whole_file, write_whole
from jobs.context import code_version
from pipeline.config import differences, require

ORIGINAL = ("gelu_tanh", 1e-6)  # activation and norm_eps of the paper's code (SPEC 1.1)


def import_weights(path: str, directory: str, overrides: Sequence[str] = ()) -> list[str]:
    """Foreign weights into a folder that a recipe's `init:` can name; returns the report."""
    refuse_existing(directory)
    given = overrides_of(overrides)
    model = load(path, given)
    models.save(model, directory, writing=whole_file)
    record = {"imported": str(Path(path).resolve()), "overrides": given, "code": code_version()}
    write_whole(Path(directory) / "provenance.json", json.dumps(record, indent=1))
    return [*described(model, path), *numerics(model), f"written  {directory}"]


def export_weights(directory: str, path: str, format: str) -> list[str]:
    """Our weights into a file or folder of others, read back and compared; returns the report."""
    refuse_existing(path)
    model = load(directory, {})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            models.save(model, path, format, writing=whole_file)
        except ValueError as error:
            raise UsageError(f"{directory} cannot be exported as {format}: {error}") from None
    again = load(path, {"image_size": model.config.image_size} if format == "npz" else {})
    lines = [*described(model, directory), *numerics(model), *(f"INEXACT  {w.message}" for w in warned)]
    lines += read_back(model, again)
    if format in ("timm", "hf"):
        lines.append("open     the folder, not its tensors alone: its config.json selects the activation")
    return [*lines, f"written  {path}"]


def refuse_existing(target: str) -> None:
    """Raises UsageError where something lies already."""
    path = Path(target)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UsageError(f"{target} is there already, nothing was written\n  give another name, or remove it first")


def overrides_of(items: Sequence[str]) -> dict[str, Any]:
    """ "heads=3" → {"heads": 3}; lists in brackets, words as they are."""
    found: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        require(bool(equals), f"{item!r} is not an override\n  expected key=value, for example heads=3")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def load(path: str, overrides: dict[str, Any]) -> Any:
    """models.load, whose every refusal is a DataError that names the file."""
    try:
        return models.load(path, **overrides)
    except (ValueError, OSError, KeyError, TypeError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        raise DataError(f"cannot load {path}: {error}") from None


def described(model: Any, path: str) -> list[str]:
    """What was found, and that every tensor of it has its place."""
    config, state = model.config, model.state_dict()
    height, width = config.image_size
    lines = [
        f"found    {path}: {config.family}, {height}×{width} px, {config.classes} classes, "
        f"{models.parameters_of(config):,} parameters"
    ]
    parts = {name: getattr(config, name, None) for name in ("width", "depth", "heads", "patch", "pool", "positions")}
    parts["representation"] = getattr(config, "representation", None)
    lines.append("model    " + "  ".join(f"{name} {value}" for name, value in parts.items() if value is not None))
    return [*lines, f"mapped   {len(state)} tensors, none missing, none unknown"]


def numerics(model: Any) -> list[str]:
    """How the model computes what the paper's code computes in one way and others in another."""
    found = tuple(getattr(model.config, name, None) for name in ("activation", "norm_eps"))
    if None in found:
        return []
    text = f"computes {found[0]}, norm_eps {found[1]:g}"
    return [text + (" as the paper's code" if found == ORIGINAL else "; the paper's code: gelu_tanh, 1e-06")]


@torch.no_grad()
def read_back(model: Any, again: Any) -> list[str]:
    """What a reader of the export gets instead, in its config and in the outputs for one random image."""
    changed = differences(models.to_dict(model.config), models.to_dict(again.config))
    image = torch.rand(1, 3, *model.config.image_size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    ours, theirs = outputs(model, image), outputs(again, image)
    largest = (ours - theirs).abs().max()
    lines = [f"becomes  {change}" for change in changed]
    return [*lines, f"checked  read back; outputs of one random image differ by {largest:.1e} at most"]


def outputs(model: Any, image: Tensor) -> Tensor:
    """Logits, or features where a masked model has no logits."""
    return model.features(image) if model.config.family == "masked" else model(image)
