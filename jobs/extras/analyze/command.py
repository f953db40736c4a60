"""The command `patchline analyze`, with its arguments and options."""

from pathlib import Path
from typing import Annotated

import typer

from data.errors import UsageError
from jobs.answer import Answer, report_lines
from jobs.commands.arguments import Debug
from jobs.extras.given_images import check_images, wait_without_spinning
from jobs.extras.named_weights import AnyWeights, find_weights
from jobs.named_stages import find_set

Images = Annotated[
    list[str], typer.Argument(help="Image files, folders of images, tar shards, or data sets (RUN/STAGE/SET).")
]
Output = Annotated[str, typer.Option(metavar="DIR", help="Folder for the figures and numbers.")]
Limit = Annotated[
    int,
    typer.Option(min=1, help="Maximum number of images, selected evenly across the file names; the paper uses 128."),
]


def analyze(weights: AnyWeights, images: Images, output: Output, limit: Limit = 128, _debug: Debug = False) -> Answer:
    """Draw the attention and learned features of a ViT: figures 6, 7 and 11 of the paper."""
    weights = find_weights(weights)
    if Path(output).is_file():
        raise UsageError(f"--output {output} is a file\n  expected a folder (created if it does not exist)")
    # Check before importing torch, so that a path without images is reported at once.
    images = list(map(find_set, images))
    check_images(images)
    wait_without_spinning()
    from jobs.extras.analyze import analyze

    return Answer(analyze.analyze(weights, images, output, limit), report_lines)
