"""`patchline new`."""

from typing import Annotated

import typer

from jobs.commands.arguments import Debug


def minutes_of(text: str) -> float:
    """Return a time in minutes, which may be written with a unit, as 90s, 2min or 1h."""
    from pipeline.values import SECONDS, read_number

    number = read_number(text, "_s", whole=False)
    if number is None:
        raise typer.BadParameter(f"{text!r} is no time, expected minutes, as 10, or with a unit: 90s, 2min, 1h")
    has_unit = text.strip().endswith(tuple(SECONDS))
    if has_unit:
        number /= 60
    return number


def new(
    images: Annotated[
        list[str], typer.Argument(help="Class folders, WebDataset tars, parquet, a CSV, or images alone.")
    ],
    model: Annotated[str | None, typer.Option(help="S/16, for one; else what images and machine are good for.")] = None,
    init: Annotated[str | None, typer.Option(metavar="WEIGHTS", help="Fine-tune these instead.")] = None,
    output: Annotated[str | None, typer.Option(metavar="FILE.yaml", help="The recipe; else FOLDER.yaml here.")] = None,
    minutes: Annotated[
        float | None, typer.Option(parser=minutes_of, metavar="MINUTES", help="Time to train; else 10, with a GPU 60.")
    ] = None,
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="Overlook labels: masked patch prediction.")] = False,
    _debug: Debug = False,
) -> None:
    """Look at images and write a recipe that trains on them as it is."""
    from jobs.extras.new import new

    new.new(images, model=model, init=init, output=output, minutes=minutes, unlabelled=unlabelled)
