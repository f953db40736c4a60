"""The command `patchline new`, with its arguments and options."""

from typing import Annotated

import typer

from jobs.answer import Answer
from jobs.commands.arguments import Debug


def minutes_of(text: str) -> float:
    """Parse a duration into minutes; a number without a unit is in minutes: 10, 90s, 2min, 1h."""
    from pipeline.values import SECONDS, read_number

    number = read_number(text, "_s", whole=False)
    if number is None:
        raise typer.BadParameter(
            f"{text!r} is not a duration; expected a number of minutes, such as 10, or a number with a unit: 90s, "
            "2min or 1h"
        )
    has_unit = text.strip().endswith(tuple(SECONDS))
    if has_unit:
        number /= 60
    return number


def new(
    images: Annotated[
        list[str],
        typer.Argument(help="Images: class folders, WebDataset tars, parquet files, a CSV, or unlabelled images."),
    ],
    model: Annotated[
        str | None, typer.Option(help="Model, such as S/16; default: selected for the images and this machine.")
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHTS", help="Fine-tune these weights, using the settings published for this type of model."
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE.yaml", help="Recipe to write; default: FOLDER.yaml.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            parser=minutes_of, metavar="MINUTES", help="Training time in minutes; default: 10, or 60 with a GPU."
        ),
    ] = None,
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="Ignore labels, and train by masked patch prediction.")
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Fit a linear classifier to frozen features and train nothing else; requires --init."
        ),
    ] = False,
    leaf_classes: Annotated[
        bool,
        typer.Option("--leaf-classes", help="Use each innermost folder as a class, instead of each top-level folder."),
    ] = False,
    _debug: Debug = False,
) -> Answer:
    """Inspect images, and write a recipe that trains on them."""
    from jobs.extras.new import new

    return new.new(
        images,
        model=model,
        init=init,
        output=output,
        minutes=minutes,
        unlabelled=unlabelled,
        probe=probe,
        leaf_classes=leaf_classes,
    )
