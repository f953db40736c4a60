"""`patchline import|export`, and which weights a path means to every command that takes some."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from data.errors import DataError
from jobs.commands.arguments import Debug
from jobs.named_stages import CHECKPOINTS, find_set, find_stage, near_path
from models.weights.folder import CONFIG, THEIR_WEIGHTS

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
AnyWeights = Annotated[
    str, typer.Argument(metavar="WEIGHTS", help="RUN/STAGE, a folder of weights, or a file that `import` takes.")
]


def import_foreign(
    path: ForeignPath,
    directory: NewFolder,
    overrides: Overrides = None,
    names: ClassList = None,
    _debug: Debug = False,
) -> None:
    """Write official, timm or transformers weights as ours."""
    refuse_missing(path)
    from jobs.commands.conversion import import_weights

    import_weights(path, directory, overrides=overrides or [], class_list=names)


def export(
    directory: OurFolder, path: Target, format: Format, preprocess: Preprocess = None, _debug: Debug = False
) -> None:
    """Write our weights as official, timm or transformers ones."""
    directory = find_weights(directory)
    if preprocess is not None:
        from pipeline.training_config import check_ops

        check_ops(preprocess)
    from jobs.commands.conversion import export_weights

    export_weights(directory, path, format, preprocess)


def find_weights(path: str) -> str:
    """Return the folder or file of weights that a path means; those in a store are fetched. Raises DataError."""
    if "://" in path:
        from jobs.commands.stored_runs import fetch_weights

        return fetch_weights(path)
    path = find_set(find_stage(path))  # a set by its name is refused as one
    refuse_missing(path)
    return path


def refuse_missing(path: str) -> None:
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
