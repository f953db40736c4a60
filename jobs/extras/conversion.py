"""`patchline import|export`: convert weights from and to other formats, and report how tensors were mapped.

patchline import vit_b16.npz weights/b16                         use it in a recipe as init: weights/b16
patchline import sincos.npz weights/s16 'image_size=[224, 224]'  add a setting missing from the file
patchline export runs/digits/finetune digits-hf --format hf
patchline export runs/digits/pretrain/step-50 weights/step-50    a checkpoint, in our format
"""

import json
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import models
from data.errors import DataError, UsageError
from data.extras.class_lists import read_class_list
from data.files import atomic_file, rename, sync, temporary_name
from data.index.names import preview
from jobs.answer import Answer, report_lines
from jobs.commands.arguments import Debug
from jobs.extras.checkpoint_names import names_checkpoint
from jobs.extras.named_weights import check_weights_exist, find_weights
from jobs.extras.stored_runs import opened
from jobs.named_stages import USE_EXPORTED
from jobs.stage_folders import stage_at, stages_in
from jobs.terminal import activity
from models.configs import HALF
from models.weights.folder import CONFIG
from pipeline import artifacts
from pipeline.architecture import preprocessing_of
from pipeline.config import differences, require
from pipeline.evaluation import any_weights
from pipeline.extras.recorded_origin import record_weights, recorded_form, recorded_loss
from pipeline.identity import code_version
from pipeline.training_config import check_ops
from pipeline.variables import restored

if TYPE_CHECKING:  # torch takes a second to import, which would delay usage errors
    from torch import Tensor


ForeignPath = Annotated[
    str,
    typer.Argument(
        help="An official .npz, the .pth of DINOv2 or DINOv3, or a folder or .safetensors file from Patchline, timm or "
        "transformers, such as a folder that timm.models.save_for_hf has written. Names of models are not downloaded."
    ),
]
NewFolder = Annotated[
    str, typer.Argument(help="Folder for weights.safetensors and model.json; use this folder as `init` in a recipe.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Model settings that the file does not contain, such as heads=3."),
]
ClassList = Annotated[
    str | None,
    typer.Option("--names", metavar="FILE", help="File of class names, one per line; default: those in the weights."),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="WEIGHTS",
        help="A finished stage (RUN/STAGE), a checkpoint (RUN/STAGE/step-50), or a folder or file of weights.",
    ),
]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="The file (npz, pth) or folder to write.")]
Format = Annotated[
    Literal["safetensors", "npz", "pth", "timm", "hf"],
    typer.Option(help="safetensors: ours, for `init` and all commands; npz: big_vision; pth: DINOv2; timm; or hf."),
]
Preprocess = Annotated[
    str | None,
    typer.Option(
        metavar="OPS",
        help="Evaluation preprocessing to record for timm and hf, such as 'resize(224)'; default: the one recorded "
        "with the weights.",
    ),
]


def import_foreign(
    path: ForeignPath,
    directory: NewFolder,
    overrides: Overrides = None,
    class_list: ClassList = None,
    _debug: Debug = False,
) -> Answer:
    """Convert official, timm or transformers weights to Patchline's format."""
    check_weights_exist(path)
    refuse_existing(directory)
    # "heads=3" becomes {"heads": 3}. Any value other than valid JSON is a string.
    changes: dict[str, object] = {}
    for item in overrides or []:
        field, equals, text = item.partition("=")
        require(bool(equals), f"{item!r} is not an override\n  expected key=value, for example heads=3")
        value: object = text
        with suppress(ValueError):
            value = json.loads(text)
        # A model's config has tuples instead of JSON's lists.
        changes[field] = tuple(value) if isinstance(value, list) else value
    verification: list[str] = []
    verify(path, verification.append)
    model = any_weights.load(path, changes)
    names = class_names(path) if class_list is None else read_class_list(class_list)
    if len(names) > model.config.classes:
        raise DataError(
            f"{class_list or path} has {len(names):,} class names, but the model has {model.config.classes:,} "
            "classes\n  expected one name per class, in the order of the model's outputs: --names FILE"
        )
    lines: list[str] = []
    preprocessing = foreign_preprocessing(path, model.config, lines.append)
    with atomic_folder(Path(directory)) as made:
        models.save(model, made, writing=atomic_file, class_names=names, preprocessing=preprocessing)
        record: dict[str, object] = {
            "imported": str(Path(path).resolve()),
            "overrides": changes,
            "code": code_version(),
        }
        # Needed by an export: the loss used to train the head, and the original format of the weights.
        origin = {"loss": recorded_loss(path), "form": recorded_form(path)}
        record |= {name: value for name, value in origin.items() if value is not None}
        record_weights(made, record)
    lines += described(model, path, names, preprocessing, verification)
    lines.append(f"written  {directory}")
    return Answer({**facts(model, path, names, preprocessing), "written": directory, "report": lines}, report_lines)


def export(
    source: Source,
    path: Target,
    format: Format = "safetensors",
    preprocess: Preprocess = None,
    _debug: Debug = False,
) -> Answer:
    """Write the weights of a stage, a checkpoint or a folder in our, the official (npz), timm or transformers format.

    The result is read back, and its outputs are compared with those of the source.
    """
    if preprocess is not None:
        check_ops(preprocess)
    # 1. Refuse a target whose name suggests another format to programs that read it.
    refuse_existing(path)
    is_file = format in ("npz", "pth")
    if is_file and Path(path).suffix != f".{format}":
        raise UsageError(
            f"{path} does not end in .{format}, so other programs would not recognise the format; nothing was written\n"
            f"  use {path}.{format}"
        )
    for suffix in ("npz", "pth"):
        if not is_file and f".{suffix}" in Path(path).name:
            raise UsageError(
                f"--format {format} writes a folder, but {path} is named like a .{suffix} file; nothing was written\n"
                f"  expected a name without .{suffix}, or --format {suffix}"
            )

    with weights_of(source, path, format) as (folder, name):
        return converted(folder, name, path, format, preprocess)


@contextmanager
def weights_of(source: str, target: str, format: str) -> Iterator[tuple[str, str]]:
    """Yield the path of the weights to export, and their name in messages and records, also a path.

    The weights of a checkpoint are in a temporary folder next to the target.
    """
    if not names_checkpoint(source):
        try:
            weights = find_weights(source)
        except DataError as error:
            # The advice to export a checkpoint of an unfinished stage, with the target and format of this command.
            raise DataError(str(error).replace(USE_EXPORTED, f"{shlex.quote(target)} --format {format}")) from None
        yield weights, weights
        return

    # From another extra, which may be missing from a checkout.
    from jobs.extras.checkpoints.contents import model_of, newest_verified

    with opened(source) as run:
        folder = newest_verified(run)
        from pipeline.checkpoints.reader import export as weights_in

        Path(target).resolve().parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".tmp-", dir=Path(target).resolve().parent) as temporary:
            model = model_of(folder)
            # Like a finished stage, export class names and preprocessing with the weights.
            exported_with: dict[str, Any] = {}
            address = run.in_words(str(folder))
            record: dict[str, object] = {"exported": address, "code": code_version()}
            task_file = folder.parents[1] / artifacts.TASK
            if task_file.exists():
                task = restored(artifacts.read_record(task_file), task_file)
                exported_with["class_names"] = task["job"].get("class_names", [])
                preprocess = task["config"].get("data", {}).get("preprocess")
                exported_with["preprocessing"] = preprocessing_of(preprocess, model)
                record["loss"] = task["config"]["loss"]
            models.save_weights(weights_in(folder, model), temporary, model, writing=atomic_file, **exported_with)
            # Not the manifest, because its digests do not apply to the exported file.
            record_weights(Path(temporary), record)
            yield temporary, address


def converted(directory: str, name: str, path: str, format: str, preprocess: str | None) -> Answer:
    """Write the weights in a folder, called `name` in messages, to `path`; compare both, and return the answer."""
    is_file = format in ("npz", "pth")
    # 1. Write the weights; collect warnings about values that the format cannot store exactly.
    verification: list[str] = []
    verify(directory, verification.append)
    activity.now(f"export: reading {name} …")
    model = any_weights.load(directory, {})
    names = class_names(directory)
    config = model.config
    preprocessing = any_weights.recorded_preprocessing(directory)
    loss = recorded_loss(directory)
    form = recorded_form(directory)
    if preprocess is not None:
        preprocessing = preprocessing_of(preprocess, config)
        height, width = config.image_size
        if preprocessing.size != config.image_size:
            raise UsageError(
                f"--preprocess {preprocess!r} produces images of {preprocessing.size[0]}×{preprocessing.size[1]}; "
                f"nothing was written\n  expected the model's image size, {height}×{width}, for example "
                f"'resize(({height}, {width}))'"
            )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) if is_file else atomic_folder(target) as made:
        with warnings.catch_warnings(record=True) as inexact:
            warnings.simplefilter("always")
            try:
                activity.now(f"export: writing {path} …")
                models.save(
                    model,
                    made,
                    format,
                    writing=atomic_file,
                    class_names=names,
                    preprocessing=preprocessing,
                    loss=loss,
                    form=form,
                )
            except ValueError as error:
                raise UsageError(f"{name} cannot be exported as {format}: {error}") from None

        # 2. Read the weights back as other programs would, and compare the models. A single file does not contain the
        # image size.
        changes: dict[str, object] = {}
        if is_file:
            changes["image_size"] = config.image_size
        activity.now(f"export: reading {path} back to compare …")
        try:
            exported = any_weights.load(str(made), changes)
        except DataError as error:
            raise DataError(str(error).replace(str(made), path)) from None
        if format == "safetensors":
            record: dict[str, object] = {
                "exported": name if "://" in name else str(Path(name).resolve()),
                "code": code_version(),
            }
            origin: dict[str, object] = {"loss": loss, "form": form}
            record |= {name: value for name, value in origin.items() if value is not None}
            record_weights(made, record)
    lines = described(model, name, names, preprocessing, verification)
    # 3. Report differences between the configs, and between the outputs for one random image.
    for change in differences(models.to_dict(config), models.to_dict(exported.config)).values():
        lines.append(f"becomes  {change}")
    # Pixel values from −1 to 1, as in normalised images.
    import torch

    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, *config.image_size, generator=generator) * 2 - 1
    with torch.no_grad():
        largest = (outputs(model, image) - outputs(exported, image)).abs().max()
    # If the outputs are equal, warnings about the format are only notes.
    label = "note   "
    verdict = ": the weights are exact"
    if largest:
        label = "INEXACT"
        verdict = ""
    remarks = [str(warning.message) for warning in inexact]
    if preprocessing and is_file:
        remarks.insert(0, f"an .{format} file cannot store the preprocessing; tell its users: {preprocessing.ops}")
    if names and is_file:
        remarks.insert(0, f"an .{format} file cannot store class names")
    for remark in remarks:
        lines.append(f"{label}  {remark}")
    lines.append(
        f"checked  exported weights read back; outputs for one random image differ by at most {largest:.1e}{verdict}"
    )
    if format in ("timm", "hf"):
        lines.append("open     load the whole folder, not only the tensors: its config.json selects the activation")
    if format == "hf" and config.classes > 1 and loss is None:
        lines.append(
            "loss     unknown whether the head was trained with sigmoid or softmax; transformers assumes softmax; "
            'for sigmoid, set "problem_type": "multi_label_classification" in config.json'
        )
    lines.append(f"written  {path}")
    document = {
        **facts(model, name, names, preprocessing),
        "written": path,
        "format": format,
        "largest_difference": float(largest),
        "remarks": remarks,
        "report": lines,
    }
    return Answer(document, report_lines)


def refuse_existing(target: str) -> None:
    """Raise UsageError if the target is a file, a non-empty folder or a path inside a run directory."""
    path = Path(target)
    for folder in path.absolute().parents:
        if stage_at(folder) is not None or stages_in(folder):
            raise UsageError(
                f"{target} is inside the run directory {folder}, which is reserved for stages; nothing was written\n"
                "  give the source first, then a target outside the run directory"
            )
    is_occupied = path.is_file() or (path.is_dir() and any(path.iterdir()))
    if is_occupied:
        raise UsageError(
            f"{target} already exists; nothing was written\n"
            "  use another name, or remove the existing file or folder first"
        )


def verify(path: str, log: Callable[[str], None]) -> None:
    """Verify Patchline's weights against their recorded digests, and log the result; other weights have no digests.

    Raises DataError if a digest differs.
    """
    file = Path(path)
    folder = file if file.is_dir() else file.parent
    is_ours = (folder / CONFIG).is_file() and ".npz" not in file.name
    if is_ours and artifacts.check_weights(folder, log).is_verified:
        log("verified the sha256 of weights.safetensors and model.json")


def foreign_preprocessing(
    path: str, config: "models.ModelConfig", log: Callable[[str], None]
) -> "models.Preprocessing | None":
    """Return the preprocessing recorded with weights, adapted to the model's image size; None if there is none.

    Logs a note if the preprocessing cannot be used, or if it is for another image size.
    """
    with warnings.catch_warnings(record=True) as unused:
        warnings.simplefilter("always")
        preprocessing = any_weights.recorded_preprocessing(path)
    for warning in unused:
        log(f"note     {warning.message}")
    if Path(path).suffix == ".pth" and isinstance(config, models.ViTConfig):
        from models.extras.weights import pth

        preprocessing = pth.preprocessing_of(config)
    if preprocessing is None:
        return None
    if isinstance(config, models.ViTConfig):
        preprocessing = replace(preprocessing, mean=config.pixel_mean, std=config.pixel_std)
    if preprocessing.size == config.image_size:
        return preprocessing
    try:
        scaled = preprocessing.at_size(config.image_size)
    except ValueError as error:
        log(f"note     the recorded preprocessing is not used: {error}")
        return None
    log(f"note     the recorded preprocessing, {preprocessing.ops}, is scaled to the image size of the weights")
    return scaled


def class_names(path: str) -> tuple[str, ...]:
    """Return the class names stored with weights. Raises DataError if they cannot be read."""
    try:
        return models.load_class_names(path)
    except any_weights.UNREADABLE as error:
        raise DataError(f"cannot read the class names in {path}: {error}") from None


def described(
    model: "models.Model",
    path: str,
    names: Sequence[str],
    preprocessing: "models.Preprocessing | None",
    verification: Sequence[str],
) -> list[str]:
    """Return lines that describe a model: architecture, class names, preprocessing, verification and numerics."""
    lines = []
    config = model.config
    # 1. The architecture. The loader refuses files with missing or unknown tensors, so all tensors were mapped.
    height, width = config.image_size
    fields = []
    for name in ("width", "depth", "heads", "patch", "pool", "positions", "representation"):
        value = getattr(config, name, None)
        if value is not None:
            fields.append(f"{name} {value}")
    lines.append(
        f"found    {path}: {config.family}, {height}×{width} px, {config.classes} classes, "
        f"{models.parameters_of(config):,} parameters"
    )
    lines.append(f"model    {'  '.join(fields)}")
    lines.append(f"mapped   {len(model.state_dict())} tensors; none are missing or unknown")

    # 2. The class names. Without them, the class order of data sets cannot be checked.
    if config.classes and not names:
        lines.append("classes  no names, so the class order of data sets cannot be checked against these weights")
    elif config.classes:
        line = f"classes  {preview(names)}"
        if len(names) < config.classes:
            line += f"; the remaining {config.classes - len(names):,} classes have no names"
        lines.append(line)
    values = "values from −1 to 1"
    mean = getattr(config, "pixel_mean", HALF)
    std = getattr(config, "pixel_std", HALF)
    if (mean, std) != (HALF, HALF):
        values = f"mean {', '.join(f'{value:.4g}' for value in mean)}, std {', '.join(f'{value:.4g}' for value in std)}"
    if preprocessing is not None:
        lines.append(f"pixels   {preprocessing.ops}, {values}")
    else:
        default = f"resize({config.image_size})"
        lines.append(f"pixels   {values}; preprocessing not recorded; exports use the evaluation default, {default}")
    lines += verification

    # 3. The activation and norm_eps, which differ between the paper's code and other implementations.
    activation = getattr(config, "activation", None)
    norm_eps = getattr(config, "norm_eps", None)
    if activation is None or norm_eps is None:
        return lines
    line = f"computes {activation}, norm_eps {norm_eps:g}"
    if (activation, norm_eps) == ("gelu_tanh", 1e-6):  # SPEC 1.1
        lines.append(f"{line}, as in the paper's code")
    else:
        lines.append(f"{line}; the paper's code uses gelu_tanh and 1e-06")
    return lines


def facts(
    model: "models.Model", path: str, names: Sequence[str], preprocessing: "models.Preprocessing | None"
) -> dict[str, Any]:
    """Return a document with a model's architecture, number of parameters, class names and preprocessing."""
    return {
        "weights": path,
        "model": models.to_dict(model.config),
        "parameters": models.parameters_of(model.config),
        "class_names": list(names),
        "preprocessing": None if preprocessing is None else preprocessing.ops,
    }


def outputs(model: "models.Model", image: "Tensor") -> "Tensor":
    """Return a model's logits or, for a masked model without logits, its features."""
    config = model.config
    if config.family == "masked":
        features: Any = model.features
        return features(image)
    return model(image)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary folder to fill; on success its files appear in the new folder `path`.

    `path` must not exist yet, or be an empty folder. If the block raises, the temporary folder is removed and `path` is
    unchanged, so that the same command can run again. The files must be flushed by their writer.
    """
    final = path.resolve()
    # An existing folder may be a mount point, which cannot be replaced: its files are renamed one by one.
    is_new = not final.exists()
    temporary = temporary_name(final if is_new else final / "new")
    try:
        temporary.mkdir(parents=True)
        try:
            yield temporary
        except OSError as error:
            if isinstance(error.filename, str | Path):
                error.filename = str(error.filename).replace(str(temporary), str(path))
            raise
        if is_new:
            rename(temporary, final)
        else:
            for file in sorted(temporary.iterdir(), key=lambda file: file.stat().st_mtime_ns):
                rename(file, final / file.name)
            temporary.rmdir()
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(final.parent if is_new else final)
