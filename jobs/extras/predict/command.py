"""The command `patchline predict`, with its arguments and options."""

from pathlib import Path
from typing import Annotated

import typer

from data.errors import UsageError
from jobs.answer import Answer, report_lines
from jobs.commands.arguments import Debug
from jobs.extras.given_images import check_images, wait_without_spinning
from jobs.extras.named_weights import AnyWeights, find_weights
from jobs.named_stages import find_set
from jobs.os_errors import check_creatable

Images = Annotated[
    list[str], typer.Argument(help="Image files, folders of images, tar shards, or data sets (RUN/STAGE/SET).")
]
Output = Annotated[
    str, typer.Option(metavar="CSV", help="CSV file to write; the HTML page gets the same name with .html.")
]
Top = Annotated[int, typer.Option(min=1, help="Number of classes per image, the most probable first.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the CSV file and the page if they exist.")]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="WEIGHTS", help="Other weights, B: also test which of both is better on these labelled images."
    ),
]
Batch = Annotated[int, typer.Option(min=1, help="Images per forward pass.")]


def predict(
    weights: AnyWeights,
    images: Images,
    output: Output = "predictions.csv",
    top: Top = 5,
    against: Against = None,
    batch: Batch = 64,
    force: Force = False,
    _debug: Debug = False,
) -> Answer:
    """Predict the classes of images, and write labels and scores to a CSV file and an HTML page."""
    weights = find_weights(weights)
    other = None if against is None else find_weights(against)
    table = Path(output)
    if table.suffix != ".csv":
        raise UsageError(f"--output {output} does not end in .csv\n  pass --output {table.with_suffix('.csv')}")
    existing = [str(path) for path in (table, table.with_suffix(".html")) if path.exists()]
    if existing and not force:
        raise UsageError(
            f"{' and '.join(existing)} already exist{'s' if len(existing) == 1 else ''}; nothing was written\n"
            "  add --force to replace the predictions, or pass --output OTHER.csv"
        )
    # Check before importing torch, so that a path without images, or a folder that cannot be written, is reported at
    # once.
    check_creatable(table)
    images = list(map(find_set, images))
    check_images(images)
    if other is not None:
        from jobs.extras.predict.against import check_labels

        check_labels(images)
    wait_without_spinning()
    from jobs.extras.predict.predict import predict

    return Answer(predict(weights, images, table, top, batch, other), report_lines)
