"""`patchline import|export`: weights in and out of a campaign, with a report of what became of them.

patchline import vit_b16.npz weights/b16                         then in a recipe: init: weights/b16
patchline import sincos.npz weights/s16 'image_size=[224, 224]'  what the file cannot tell
patchline export runs/digits/finetune-1a2b3c4d digits-hf --format hf
"""

import json
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import safetensors
import typer

import models
from data.errors import DataError, UsageError
from data.files import atomic_file
from data.index.names import preview
from data.sources.numbering import read_class_list
from jobs.commands.arguments import Debug
from jobs.commands.weights import check_weights_exist, find_weights
from jobs.named_stages import stage_at, stages_in
from jobs.terminal import activity, echo
from models.weights.folder import CONFIG
from pipeline import artifacts
from pipeline.architecture import preprocessing_of
from pipeline.config import differences, require
from pipeline.evaluation import any_weights
from pipeline.identity import code_version
from pipeline.training_config import check_ops

if TYPE_CHECKING:  # it takes a second to import, for which a refusal does not wait
    from torch import Tensor

# Whatever refuses a file: torch, numpy, safetensors and our own checks each raise their own.
UNREADABLE = (ValueError, OSError, EOFError, KeyError, TypeError, zipfile.BadZipFile, safetensors.SafetensorError)


ForeignPath = Annotated[
    str, typer.Argument(help="An official .npz; a folder or .safetensors file of ours, timm or transformers.")
]
NewFolder = Annotated[
    str, typer.Argument(help="Where weights.safetensors and model.json go: what a recipe's init: names.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What the file cannot tell, as heads=3.")
]
ClassList = Annotated[
    str | None,
    typer.Option("--names", metavar="FILE", help="Class names, one a line; else those that the file has."),
]
OurFolder = Annotated[
    str, typer.Argument(metavar="WEIGHTS", help="Our weights: RUN/STAGE, a stage's folder, or what `import` wrote.")
]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="The file (npz) or folder to write.")]
Format = Annotated[Literal["safetensors", "npz", "timm", "hf"], typer.Option(help="Whose format.")]
Preprocess = Annotated[
    str | None,
    typer.Option(
        metavar="OPS",
        help="Evaluation ops that timm and hf are told of, as 'resize(224)'; else those recorded with the weights.",
    ),
]


def import_foreign(
    path: ForeignPath,
    directory: NewFolder,
    overrides: Overrides = None,
    class_list: ClassList = None,
    _debug: Debug = False,
) -> None:
    """Write official, timm or transformers weights as ours."""
    check_weights_exist(path)
    refuse_existing(directory)
    # "heads=3" is {"heads": 3}: a value is read as JSON, and is taken as a word where it is none.
    changes: dict[str, object] = {}
    for item in overrides or []:
        field, equals, text = item.partition("=")
        require(bool(equals), f"{item!r} is not an override\n  expected key=value, for example heads=3")
        value: object = text
        with suppress(ValueError):
            value = json.loads(text)
        # JSON has lists where a model's config has tuples.
        changes[field] = tuple(value) if isinstance(value, list) else value
    verification: list[str] = []
    verify(path, verification.append)
    model = load(path, changes)
    names = class_names(path) if class_list is None else read_class_list(class_list)
    if len(names) > model.config.classes:
        raise DataError(
            f"{class_list or path}: {len(names):,} class names, the model has {model.config.classes:,} classes\n"
            "  expected a name for each class, in the order of the outputs: --names FILE"
        )
    preprocessing = any_weights.recorded_preprocessing(path)
    models.save(model, directory, writing=atomic_file, class_names=names, preprocessing=preprocessing)
    record = {"imported": str(Path(path).resolve()), "overrides": changes, "code": code_version()}
    artifacts.record_weights(Path(directory), record)
    report(model, path, names, preprocessing, verification)
    echo(f"written  {directory}")


def export(
    directory: OurFolder, path: Target, format: Format, preprocess: Preprocess = None, _debug: Debug = False
) -> None:
    """Write our weights as official, timm or transformers ones."""
    directory = find_weights(directory)
    if preprocess is not None:
        check_ops(preprocess)
    # 1. What is refused: a name by which readers would not know the format.
    refuse_existing(path)
    if format == "npz" and Path(path).suffix != ".npz":
        raise UsageError(
            f"{path} does not end in .npz, nothing was written\n"
            f"  expected a name by which readers know the format, as {path}.npz"
        )
    if format != "npz" and ".npz" in Path(path).name:
        raise UsageError(
            f"{path} is to be a folder in the format {format}, nothing was written\n"
            "  expected a name without .npz, or --format npz"
        )

    # 2. The weights, written; what the format cannot hold exactly is warned of.
    verification: list[str] = []
    verify(directory, verification.append)
    activity.now(f"export: reading {directory} …")
    model = load(directory, {})
    names = class_names(directory)
    config = model.config
    preprocessing = any_weights.recorded_preprocessing(directory)
    if preprocess is not None:
        preprocessing = preprocessing_of(preprocess, config)
        height, width = config.image_size
        if preprocessing.size != config.image_size:
            raise UsageError(
                f"--preprocess {preprocess!r} makes images of {preprocessing.size[0]}×{preprocessing.size[1]}, nothing "
                f"was written\n  expected the model's {height}×{width}, for example 'resize(({height}, {width}))'"
            )
    with warnings.catch_warnings(record=True) as inexact:
        warnings.simplefilter("always")
        try:
            activity.now(f"export: writing {path} …")
            models.save(model, path, format, writing=atomic_file, class_names=names, preprocessing=preprocessing)
        except ValueError as error:
            raise UsageError(f"{directory} cannot be exported as {format}: {error}") from None

    # 3. Readers of the file must get the same model: it is read back as they would, and compared. An .npz has no
    # config beside it, and cannot tell its image size.
    changes: dict[str, object] = {}
    if format == "npz":
        changes["image_size"] = config.image_size
    activity.now(f"export: reading {path} back, and comparing …")
    exported = load(path, changes)
    if format == "safetensors":
        record = {"exported": str(Path(directory).resolve()), "code": code_version()}
        artifacts.record_weights(Path(path), record)
    report(model, directory, names, preprocessing, verification)
    # How the exported model differs: in its config, and in the outputs for one random image.
    for change in differences(models.to_dict(config), models.to_dict(exported.config)):
        echo(f"becomes  {change}")
    # Values from −1 to 1, as those of normalised images.
    import torch

    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, *config.image_size, generator=generator) * 2 - 1
    with torch.no_grad():
        largest = (outputs(model, image) - outputs(exported, image)).abs().max()
    # What a reader cannot get from the file; where the outputs are equal, the weights are exact.
    label = "note   "
    verdict = ": the weights are exact"
    if largest:
        label = "INEXACT"
        verdict = ""
    remarks = [str(warning.message) for warning in inexact]
    if preprocessing and format == "npz":
        remarks.insert(0, f"an .npz has no place for the preprocessing: tell its readers of {preprocessing.ops}")
    if names and format == "npz":
        remarks.insert(0, "an .npz has no place for class names")
    for remark in remarks:
        echo(f"{label}  {remark}")
    echo(f"checked  read back; outputs of one random image differ by {largest:.1e} at most{verdict}")
    if format in ("timm", "hf"):
        echo("open     the folder, not its tensors alone: its config.json selects the activation")
    echo(f"written  {path}")


def refuse_existing(target: str) -> None:
    """Raise UsageError where the target is a file, a folder that holds something, or a part of a run."""
    path = Path(target)
    for folder in path.absolute().parents:
        if stage_at(folder) is not None or stages_in(folder):
            raise UsageError(
                f"{target} lies in the run {folder}, where names are those of stages; nothing was written\n"
                "  expected what is read first, and then what is written, outside of a run"
            )
    holds_something = path.is_file() or (path.is_dir() and any(path.iterdir()))
    if holds_something:
        raise UsageError(f"{target} is there already, nothing was written\n  give another name, or remove it first")


def verify(path: str, log: Callable[[str], None]) -> None:
    """Compare weights of ours with what their maker wrote, and log it; nothing of foreign ones, which have no digests.

    Raises DataError where they differ.
    """
    file = Path(path)
    folder = file if file.is_dir() else file.parent
    is_ours = (folder / CONFIG).is_file() and ".npz" not in file.name
    if is_ours and artifacts.check_weights(folder, log).is_verified:
        log("verified the sha256 of weights.safetensors and model.json")


def load(path: str, overrides: Mapping[str, object]) -> "models.Model":
    """Load the model behind a path. Raises DataError, which names the file, where it cannot be read."""
    changes: dict[str, Any] = dict(overrides)
    # Only whatever a wrong file raises becomes a DataError; a bug of ours stays what it is.
    try:
        return models.load(path, **changes)
    except UNREADABLE as error:
        raise DataError(f"cannot load {path}: {str(error).removeprefix(f'{path} ')}") from None


def class_names(path: str) -> tuple[str, ...]:
    """Return the class names of the weights behind a path. Raises DataError where they cannot be read."""
    try:
        return models.load_class_names(path)
    except UNREADABLE as error:
        raise DataError(f"cannot read the class names of {path}: {error}") from None


def report(
    model: "models.Model",
    path: str,
    names: Sequence[str],
    preprocessing: "models.Preprocessing | None",
    verification: Sequence[str],
) -> None:
    """Print which model was read, its classes and pixels, the result of its verification, and its numerics."""
    config = model.config
    # 1. The kind of the model. Every tensor has its place: the loader refuses files in which some are left over.
    height, width = config.image_size
    fields = []
    for name in ("width", "depth", "heads", "patch", "pool", "positions", "representation"):
        value = getattr(config, name, None)
        if value is not None:
            fields.append(f"{name} {value}")
    echo(
        f"found    {path}: {config.family}, {height}×{width} px, {config.classes} classes, "
        f"{models.parameters_of(config):,} parameters"
    )
    echo(f"model    {'  '.join(fields)}")
    echo(f"mapped   {len(model.state_dict())} tensors, none missing, none unknown")

    # 2. The names of its classes. Without them the labels of every set are taken on trust.
    if config.classes and not names:
        echo("classes  without names: nobody can tell whether a set numbers them as these weights do")
    elif config.classes:
        line = f"classes  {preview(names)}"
        if len(names) < config.classes:
            line += f"; the other {config.classes - len(names):,} have no names"
        echo(line)
    if preprocessing is not None:
        echo(f"pixels   {preprocessing.ops}, from −1 to 1")
    else:
        echo(f"pixels   not recorded how they are made; exports say resize({config.image_size}), evaluation's default")
    for line in verification:
        echo(line)

    # 3. The activation and norm_eps, in which the paper's code and others differ.
    activation = getattr(config, "activation", None)
    norm_eps = getattr(config, "norm_eps", None)
    if activation is None or norm_eps is None:
        return
    line = f"computes {activation}, norm_eps {norm_eps:g}"
    if (activation, norm_eps) == ("gelu_tanh", 1e-6):  # SPEC 1.1
        echo(f"{line} as the paper's code")
    else:
        echo(f"{line}; the paper's code: gelu_tanh, 1e-06")


def outputs(model: "models.Model", image: "Tensor") -> "Tensor":
    """Return the logits; of a masked model, which has none, the features."""
    config = model.config
    if config.family == "masked":
        features: Any = model.features
        return features(image)
    return model(image)
