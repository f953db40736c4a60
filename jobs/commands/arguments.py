"""Arguments and options shared by several commands, suggestions for mistyped paths, and the handling of SIGTERM."""

import difflib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from data.errors import Preempted

# `jobs.__main__.main` handles --debug itself; commands declare it only for --help and shell completion.
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides of recipe keys, such as pretrain.optim.lr=1e-3."),
]
Recipe = Annotated[str, typer.Argument(help="A YAML file, or the name of a built-in recipe, such as digits.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Restart an unfinished stage from step 0 if its settings changed.")
]
Run = Annotated[str, typer.Argument(help="A run directory, or its URL (s3://…), as in the recipe's run: key.")]


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise Preempted if SIGTERM arrives during the block, so that temporary files are removed, as after Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Preempted("stopped by SIGTERM; finished work is kept, run the same command again to resume")

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def near_path(path: str) -> str:
    """Return "; did you mean 'photos/cat'?" if a file or folder with a similar name exists; otherwise "".

    For a broken symbolic link, return its target.
    """
    if Path(path).is_symlink():
        return f"; it is a symbolic link to {os.readlink(path)}, which does not exist or leads back to the link"
    near = similar_path(path)
    return "" if near is None else f"; did you mean {str(near)!r}?"


def similar_path(path: str) -> Path | None:
    """Return the existing file or folder whose name is most similar to that of a missing one; None if none is."""
    missing = Path(path)
    rest: list[str] = []
    while not missing.parent.exists():
        rest.insert(0, missing.name)
        missing = missing.parent
    names = {}
    with suppress(OSError):
        for entry in missing.parent.glob("*"):
            names[entry.name.lower()] = entry
    close = difflib.get_close_matches(missing.name.lower(), names, n=1)
    if not close:
        return None
    near = names[close[0]]
    # Append the rest of the path if that exists too.
    if near.joinpath(*rest).exists():
        near = near.joinpath(*rest)
    return near
