"""The command `patchline diff`, with its arguments and options."""

from typing import Annotated

import typer

from jobs.answer import Answer
from jobs.commands.arguments import Debug
from jobs.commands.campaigns import kinds_of


def diff(
    context: typer.Context,
    mine: Annotated[
        str,
        typer.Argument(metavar="MINE", help="Recipe, run or stage; or checkpoint (RUN/STAGE/step-50) or weights."),
    ],
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="The same, for example table3/vit_i1k or RUN/STAGE/step-100.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of recipe keys of OTHER.")
    ] = None,
    _debug: Debug = False,
) -> Answer:
    """Compare the settings of two recipes, runs or stages, or the tensors of two checkpoints or weights.

    Settings: the differences that affect training or evaluation, largest effect first, with the ViT paper's values.
    Tensors: how many are equal bit for bit, and the largest difference of each of the others.
    """
    from jobs.extras.diff import diff, tensors

    if tensors.has_tensors(mine) or tensors.has_tensors(other):
        return Answer(tensors.compare(mine, other, overrides or []), tensors.lines)
    return Answer(diff.diff(mine, other, overrides or [], kinds_of(context)), diff.lines)
