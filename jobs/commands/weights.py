"""Which weights a path means to every command that takes some."""

from pathlib import Path
from typing import Annotated

import typer

from data.errors import DataError
from jobs.named_stages import CHECKPOINTS, find_set, find_stage, near_path
from models.weights.folder import CONFIG, THEIR_WEIGHTS

AnyWeights = Annotated[
    str, typer.Argument(metavar="WEIGHTS", help="RUN/STAGE, a folder of weights, or a file that `import` takes.")
]


def find_weights(path: str) -> str:
    """Return the folder or file of weights that a path means; those in a store are fetched. Raises DataError."""
    if "://" in path:
        from jobs.commands.stored_runs import fetch_weights

        return fetch_weights(path)
    path = find_set(find_stage(path))  # a set by its name is refused as one
    check_weights_exist(path)
    return path


def check_weights_exist(path: str) -> None:
    """Raise DataError where no weights are at the path; `file.npz:img` names a part of a file (big_vision)."""
    if not Path(path).exists() and not Path(path.rpartition(":")[0] or path).exists():
        raise DataError(
            f"there is no file or folder {path}{near_path(path)}\n"
            "  expected an official .npz, or a folder or .safetensors file of ours, timm or transformers"
        )
    folder = Path(path)
    if folder.is_file() and ".npz" not in folder.name and folder.suffix != ".safetensors":
        raise DataError(
            f"cannot load {path}: it is no weights\n"
            "  expected an official .npz, or a folder or .safetensors file of ours, timm or transformers\n"
            "  pickled checkpoints (.pth, .bin) are not opened: convert them to safetensors first"
        )
    if folder.is_dir() and not (folder / CONFIG).exists() and not (folder / THEIR_WEIGHTS).exists():
        if (folder / CHECKPOINTS).is_dir():
            raise DataError(
                f"{path} has checkpoints, and no weights yet\n"
                f"  type python -m jobs checkpoints export {path} --to FOLDER, then name FOLDER"
            )
        from data.index.document import SUFFIX

        if any(folder.glob(f"*{SUFFIX}")):
            raise DataError(f"{path} is a set, expected weights first and sets behind them\n  type them in that order")
        raise DataError(
            f"cannot load {path}: it is no folder with {CONFIG} or {THEIR_WEIGHTS}\n"
            "  pickled checkpoints (.pth, .bin) are not opened: convert them to safetensors first"
        )
