"""The command `patchline diff`, with its arguments and options."""

from typing import Annotated

import typer

from jobs.answer import Answer
from jobs.commands.arguments import Debug
from jobs.commands.campaigns import kinds_of


def diff(
    context: typer.Context,
    mine: Annotated[str, typer.Argument(metavar="MINE", help="Recipe or run to compare.")],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Reference: table3/vit_i1k, a recipe file, or a run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of recipe keys of OTHER.")
    ] = None,
    _debug: Debug = False,
) -> Answer:
    """List differences that affect training or evaluation, largest effect first, with the ViT paper's values."""
    from jobs.extras.diff import diff

    return Answer(diff.diff(mine, other, overrides or [], kinds_of(context)), diff.lines)
