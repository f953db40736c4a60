"""The work of `patchline import|export`: weights in and out of a campaign, with a report of what became of them.

patchline import vit_b16.npz weights/b16                         then in a recipe: init: weights/b16
patchline import sincos.npz weights/s16 'image_size=[224, 224]'  what the file cannot tell
patchline export runs/digits/finetune-1a2b3c4d digits-hf --format hf
"""

import json
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

import models
from data.errors import DataError, UsageError
from data.files import whole_file, write_whole
from data.index.names import read_class_list, some
from models.weights.files import CONFIG
from pipeline import artifacts
from pipeline.config import differences, require
from pipeline.versions import code_version

# Without it transformers' pipelines refuse the folder, or take the mean and deviation of another model.
PREPROCESSOR_FILE = "preprocessor_config.json"

# Whatever refuses a file: torch, numpy, safetensors and our own checks each raise their own.
UNREADABLE = (ValueError, OSError, EOFError, KeyError, TypeError, zipfile.BadZipFile, safetensors.SafetensorError)


def import_weights(
    path: str,
    directory: str,
    log: Callable[[str], None],
    *,
    overrides: Sequence[str] = (),
    class_list: str | None = None,
) -> None:
    """Write foreign weights into a folder that a recipe's `init:` can name; log the report when it is written.

    `class_list` is a file of the class names, in the order of the outputs; without it they are those of the weights'
    own file.
    """
    refuse_existing(directory)
    refuse_missing(path)
    changes = overrides_of(overrides)
    verification: list[str] = []
    verify(path, verification.append)
    model = load(path, changes)
    names = class_names(path) if class_list is None else read_class_list(class_list)
    if len(names) > model.config.classes:
        raise DataError(
            f"{class_list or path}: {len(names):,} class names, the model has {model.config.classes:,} classes\n"
            "  expected a name for each class, in the order of the outputs: --names FILE"
        )
    models.save(model, directory, writing=whole_file, class_names=names)
    record = {"imported": str(Path(path).resolve()), "overrides": changes, "code": code_version()}
    artifacts.record_weights(Path(directory), record)
    describe(model, path, names, verification, log)
    log(f"written  {directory}")


def export_weights(directory: str, path: str, format: str, log: Callable[[str], None]) -> None:
    """Write our weights into a file or folder of others, read it back and compare; log the report when it is there."""
    refuse_existing(path)
    refuse_wrong_suffix(path, format)
    refuse_missing(directory)
    refuse_unfinished(Path(directory))
    verification: list[str] = []
    verify(directory, verification.append)
    model = load(directory, {})
    names = class_names(directory)
    config = model.config
    with warnings.catch_warnings(record=True) as inexact:
        warnings.simplefilter("always")
        try:
            models.save(model, path, format, writing=whole_file, class_names=names)
        except ValueError as error:
            raise UsageError(f"{directory} cannot be exported as {format}: {error}") from None
    if format == "hf":
        write_whole(Path(path) / PREPROCESSOR_FILE, json.dumps(preprocessor(config.image_size), indent=2) + "\n")
    # Whoever reads the file must get the same model: read it back as they would, and compare. An .npz has no config
    # beside it, and cannot tell its image size.
    changes: dict[str, object] = {}
    if format == "npz":
        changes["image_size"] = config.image_size
    exported = load(path, changes)

    if format == "safetensors":
        record = {"exported": str(Path(directory).resolve()), "code": code_version()}
        artifacts.record_weights(Path(path), record)
    describe(model, directory, names, verification, log)
    if names and format == "npz":
        log("INEXACT  an .npz has no place for class names")
    for warning in inexact:
        log(f"INEXACT  {warning.message}")
    # How the exported model differs: in its config, and in the outputs for one random image.
    for change in differences(models.to_dict(config), models.to_dict(exported.config)):
        log(f"becomes  {change}")
    # Values from −1 to 1, as those of normalised images.
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, *config.image_size, generator=generator) * 2 - 1
    largest = (outputs(model, image) - outputs(exported, image)).abs().max()
    log(f"checked  read back; outputs of one random image differ by {largest:.1e} at most")
    if format in ("timm", "hf"):
        log("open     the folder, not its tensors alone: its config.json selects the activation")
    log(f"written  {path}")


def refuse_existing(target: str) -> None:
    """Raise UsageError where the target is a file, or a folder that holds something."""
    path = Path(target)
    holds_something = path.is_file() or (path.is_dir() and any(path.iterdir()))
    if holds_something:
        raise UsageError(f"{target} is there already, nothing was written\n  give another name, or remove it first")


def refuse_missing(source: str) -> None:
    """Raise DataError where there is nothing at the path; `file.npz:img` names a part of a file (big_vision)."""
    if not Path(source).exists() and not Path(source.rpartition(":")[0] or source).exists():
        raise DataError(
            f"there is no file or folder {source}\n"
            "  expected an official .npz, or a folder or .safetensors file of ours, timm or transformers"
        )


def refuse_unfinished(directory: Path) -> None:
    """Raise DataError, which names the command that helps, where a stage has checkpoints and no weights yet."""
    if (directory / "checkpoints").is_dir() and not (directory / CONFIG).exists():
        raise DataError(
            f"{directory} is a stage that has not finished: it has checkpoints, and no weights yet\n"
            f"  expected a folder with weights.safetensors and {CONFIG}\n"
            f"  type: python -m jobs checkpoints export {directory} --to FOLDER, then export that folder"
        )


def refuse_wrong_suffix(target: str, format: str) -> None:
    """Raise UsageError where the name does not end as readers of the format expect it: .npz, or a folder's name."""
    is_npz = Path(target).suffix == ".npz"
    if format == "npz" and not is_npz:
        raise UsageError(
            f"{target} does not end in .npz, nothing was written\n"
            f"  expected a name by which readers know the format, as {target}.npz"
        )
    if format != "npz" and ".npz" in Path(target).name:
        raise UsageError(
            f"{target} is to be a folder in the format {format}, nothing was written\n"
            "  expected a name without .npz, or --format npz"
        )


def preprocessor(image_size: tuple[int, int]) -> dict[str, object]:
    """Return the content of transformers' preprocessor_config.json: pixels as our evaluation makes them (SPEC 2.5)."""
    height, width = image_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,  # from −1 to 1
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def overrides_of(items: Sequence[str]) -> dict[str, object]:
    """Return {"heads": 3} of "heads=3"; a value is read as JSON, and is taken as a word where it is none."""
    overrides: dict[str, object] = {}
    for item in items:
        name, equals, text = item.partition("=")
        require(bool(equals), f"{item!r} is not an override\n  expected key=value, for example heads=3")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        # JSON has lists where a model's config has tuples.
        if isinstance(value, list):
            value = tuple(value)
        overrides[name] = value
    return overrides


def verify(path: str, log: Callable[[str], None]) -> None:
    """Compare weights of ours with what their maker wrote, and log it; nothing of foreign ones, which have no digests.

    Raises DataError where they differ.
    """
    file = Path(path)
    folder = file if file.is_dir() else file.parent
    is_ours = (folder / CONFIG).is_file() and ".npz" not in file.name
    if is_ours and artifacts.check_weights(folder, log).is_verified:
        log("verified the sha256 of weights.safetensors and model.json")


def load(path: str, overrides: Mapping[str, object]) -> models.Model:
    """Load the model behind a path. Raises DataError, which names the file, where it cannot be read."""
    changes: dict[str, Any] = dict(overrides)
    # Only whatever a wrong file raises becomes a DataError; a bug of ours stays what it is.
    try:
        return models.load(path, **changes)
    except UNREADABLE as error:
        raise DataError(f"cannot load {path}: {error}") from None


def class_names(path: str) -> tuple[str, ...]:
    """Return the class names of the weights behind a path. Raises DataError where they cannot be read."""
    try:
        return models.load_class_names(path)
    except UNREADABLE as error:
        raise DataError(f"cannot read the class names of {path}: {error}") from None


def describe(
    model: models.Model, path: str, names: Sequence[str], verification: Sequence[str], log: Callable[[str], None]
) -> None:
    """Log which model was read, its class names, the result of its verification, and its numerics."""
    config = model.config
    # 1. The kind of the model. Every tensor has its place: the loader refuses files in which some are left over.
    height, width = config.image_size
    fields = []
    for name in ("width", "depth", "heads", "patch", "pool", "positions", "representation"):
        value = getattr(config, name, None)
        if value is not None:
            fields.append(f"{name} {value}")
    log(
        f"found    {path}: {config.family}, {height}×{width} px, {config.classes} classes, "
        f"{models.parameters_of(config):,} parameters"
    )
    log(f"model    {'  '.join(fields)}")
    log(f"mapped   {len(model.state_dict())} tensors, none missing, none unknown")

    # 2. The names of its classes. Without them the labels of every set are taken on trust.
    if config.classes and not names:
        log("classes  without names: nobody can tell whether a set numbers them as these weights do")
    elif config.classes:
        line = f"classes  {some(names)}"
        if len(names) < config.classes:
            line += f"; the other {config.classes - len(names):,} have no names"
        log(line)
    for line in verification:
        log(line)

    # 3. The activation and norm_eps, in which the paper's code and others differ.
    activation = getattr(config, "activation", None)
    norm_eps = getattr(config, "norm_eps", None)
    if activation is None or norm_eps is None:
        return
    line = f"computes {activation}, norm_eps {norm_eps:g}"
    if (activation, norm_eps) == ("gelu_tanh", 1e-6):  # SPEC 1.1
        log(f"{line} as the paper's code")
    else:
        log(f"{line}; the paper's code: gelu_tanh, 1e-06")


@torch.no_grad()
def outputs(model: models.Model, image: Tensor) -> Tensor:
    """Return the logits; of a masked model, which has none, the features."""
    config = model.config
    if config.family == "masked":
        features: Any = model.features
        return features(image)
    return model(image)
