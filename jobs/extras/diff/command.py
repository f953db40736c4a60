"""`patchline diff`."""

from typing import Annotated

import typer

from jobs.commands.arguments import Debug
from jobs.commands.campaigns import kinds_of


def diff(
    context: typer.Context,
    mine: Annotated[str, typer.Argument(metavar="MINE", help="A recipe, or a run.")],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="What it should be: table3/vit_i1k, a file, or a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Over OTHER.")] = None,
    _debug: Debug = False,
) -> None:
    """Name what differs in meaning, the most consequential first, with what the paper and its code do."""
    from jobs.extras.diff import diff

    diff.diff(mine, other, overrides or [], kinds_of(context))
