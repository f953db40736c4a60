"""Find the weights named by a command's argument, and check that they exist."""

import glob
import re
import shlex
from pathlib import Path
from typing import Annotated
from zipfile import is_zipfile

import typer

from data.errors import DataError
from jobs.extras.checkpoint_names import names_checkpoint
from jobs.extras.data_commands import near_path
from jobs.named_stages import USE_EXPORTED, find_set, find_stage
from jobs.stage_folders import CHECKPOINTS, stage_at
from models.extras.finite import check_finite_file
from models.weights.folder import CONFIG, THEIR_WEIGHTS
from pipeline.checkpoints.manifest import committed, step_of
from pipeline.values import counted

AnyWeights = Annotated[
    str, typer.Argument(metavar="WEIGHTS", help="RUN/STAGE, a folder of weights, or a file that `import` reads.")
]

# "vit_tiny_patch16_224" or, with the tag of the pretrained weights, "vit_tiny_patch16_224.augreg_in21k_ft_in1k".
TIMM_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+(\.(?!npz|pth|safetensors)\w+)?")
HUB_NAME = re.compile(r"[\w-]+/[\w-]+(\.(?!npz|pth|safetensors)[\w-]+)*")  # "google/vit-base-patch16-224"
LEGACY_PTH = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  # beginning of files that torch writes without zip


def find_weights(path: str) -> str:
    """Return the local path of the weights at a path or URL; weights at a URL are downloaded first.

    Raises DataError if there are no weights, or the errors of `fetch_weights` for a URL.
    """
    if "://" in path:
        from jobs.extras.stored_runs import fetch_weights

        return fetch_weights(path)
    if names_checkpoint(path):
        raise DataError(
            f"{path} is a checkpoint, which has training states instead of a file of weights\n"
            f"  run python -m jobs export {shlex.quote(path)} {USE_EXPORTED}"
        )
    path = find_set(find_stage(path))  # find_set resolves RUN/STAGE/SET, which is refused below as a data set
    check_weights_exist(path)
    return path


def check_weights_exist(path: str) -> None:
    """Raise DataError if there are no weights at a path, or if they are damaged or contain NaN or infinity.

    As in big_vision, `file.npz:img` selects a part of a file.
    """
    if not Path(path).exists() and not Path(path.rpartition(":")[0] or path).exists():
        raise DataError(
            f"no file or folder at {path}{near_path(path)}{same_named(path)}\n"
            "  expected an official .npz, or a folder or .safetensors file from Patchline, timm or transformers"
            f"{how_to_download(path)}"
        )
    folder = Path(path)
    if folder.is_file() and ".npz" not in folder.name and folder.suffix not in (".safetensors", ".pth"):
        raise DataError(
            f"cannot load {path}: the file is not a weights file\n"
            "  expected an official .npz, the .pth of DINOv2 or DINOv3, or a folder or .safetensors file from "
            "Patchline, timm or transformers"
        )
    if folder.is_dir() and not (folder / CONFIG).exists() and not (folder / THEIR_WEIGHTS).exists():
        if (folder / CHECKPOINTS).is_dir():
            text = f"{path} has no exported weights yet\n  wait until its stage has saved a checkpoint"
            for checkpoint in committed(folder / CHECKPOINTS)[:1]:
                checkpoint_path = shlex.quote(f"{path}/step-{step_of(checkpoint)}")
                text = (
                    f"{path} has checkpoints but no exported weights yet\n"
                    f"  instead, run python -m jobs export {checkpoint_path} {USE_EXPORTED}"
                )
            raise DataError(text)
        from data.index.document import SUFFIX

        if any(folder.glob(f"*{SUFFIX}")):
            raise DataError(f"{path} is a data set, not weights\n  give the weights first, then the data sets")
        raise DataError(
            f"cannot load {path}: the folder contains neither {CONFIG} nor {THEIR_WEIGHTS}\n"
            "  a pickled pytorch_model.bin is not supported: convert it to safetensors first"
        )
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]:
        check_complete(file)
        if file.suffix == ".safetensors":
            try:
                check_finite_file(file)
            except ValueError as error:
                raise DataError(f"cannot load {path}: {error}") from None


def how_to_download(path: str) -> str:
    """Return lines with the Python that makes a folder of weights, if a missing path may be a model's name; else ""."""
    name = re.sub(r"^(hf[-_]hub:)?(timm/)?", "", path)
    if TIMM_NAME.fullmatch(name):
        return (
            "\n  names of timm's models are not downloaded; to write one to a folder, run\n"
            f"  python -c \"import timm; timm.models.save_for_hf(timm.create_model('{name}', pretrained=True), "
            "'FOLDER', safe_serialization=True)\""
        )
    if HUB_NAME.fullmatch(name) and not Path(path).parent.exists():
        return (
            "\n  names of models on the Hugging Face Hub are not downloaded; to write one to a folder, run\n"
            f"  python -c \"import huggingface_hub; huggingface_hub.snapshot_download('{name}', local_dir='FOLDER')\""
        )
    return ""


def check_complete(file: Path) -> None:
    """Raise DataError if a file of weights is truncated or in another format, without importing torch.

    Raises OSError if the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    problem = ""
    if file.suffix == ".safetensors":
        try:
            # Open the file first, because safetensors reports a file that it may not read as missing.
            with open(file, "rb"), safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            problem = f" ({error})"
    elif file.suffix in (".npz", ".pth") and not is_zipfile(file):
        with open(file, "rb") as opened:
            is_legacy = file.suffix == ".pth" and opened.read(len(LEGACY_PTH)) == LEGACY_PTH
        if not is_legacy:
            problem = " (it has no zip directory at its end)"
    if problem:
        size = file.stat().st_size
        raise DataError(
            f"{file} is not a complete {file.suffix} file{problem}: {size:,} bytes\n  download or copy it again"
        )


def same_named(path: str) -> str:
    """Return lines that list the runs in the folder `runs` with a finished stage named `path`; "" if there are none."""
    if "/" in path or not path:
        return ""
    addresses = set()
    for folder in Path("runs").glob(f"*/{glob.escape(path)}-*/"):
        stage = stage_at(folder)
        if stage is not None and stage.name == path and stage.is_finished:
            addresses.add(str(folder.parent / path))
    if not addresses:
        return ""
    return f"\n  {path} is a stage of {counted(len(addresses), 'run')}; use one of them:" + "".join(
        f"\n  {address}" for address in sorted(addresses)
    )
