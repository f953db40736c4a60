"""Arguments and options that several commands share, and what lets SIGTERM end a command."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from data.errors import Preempted

# `jobs.__main__.main` looks for --debug itself; the commands declare it only for their help and for completion.
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]

Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="For example pretrain.optim.lr=1e-3.")]
Recipe = Annotated[str, typer.Argument(help="A YAML file, or the bare name of one that ships: digits.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start a half-done stage over where its config changed.")]
Run = Annotated[str, typer.Argument(help="Run directory, or s3://…, as the recipe's run: says.")]


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM end the block with Preempted, so that nothing half written stays; Ctrl-C does so by itself."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Preempted("stopped by SIGTERM; what is finished is kept, run the same command again to go on")

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
