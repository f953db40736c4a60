"""The command `patchline predict`, with its arguments and options."""

from pathlib import Path
from typing import Annotated

import typer

from data.errors import UsageError
from jobs.answer import Answer, report_lines
from jobs.commands.arguments import Debug
from jobs.extras.given_images import check_images, wait_without_spinning
from jobs.extras.named_weights import AnyWeights, find_weights

Images = Annotated[list[str], typer.Argument(help="Image files, folders of images, or tar shards.")]
Output = Annotated[
    str, typer.Option(metavar="CSV", help="CSV file to write; the HTML page gets the same name with .html.")
]
Top = Annotated[int, typer.Option(min=1, help="Number of classes per image, the most probable first.")]
Batch = Annotated[int, typer.Option(min=1, help="Images per forward pass.")]


def predict(
    weights: AnyWeights,
    images: Images,
    output: Output = "predictions.csv",
    top: Top = 5,
    batch: Batch = 64,
    _debug: Debug = False,
) -> Answer:
    """Predict the classes of images, and write labels and scores to a CSV file and an HTML page."""
    weights = find_weights(weights)
    table = Path(output)
    if table.suffix != ".csv":
        raise UsageError(f"--output {output} does not end in .csv\n  pass --output {table.with_suffix('.csv')}")
    # Check before importing torch, so that a path without images is reported at once.
    check_images(images)
    wait_without_spinning()
    from jobs.extras.predict.predict import predict

    return Answer(predict(weights, images, table, top, batch), report_lines)
