"""`patchline analyze`."""

import itertools
from pathlib import Path
from typing import Annotated

import typer

from data.errors import UsageError
from jobs.commands.arguments import Debug
from jobs.commands.weights import AnyWeights, find_weights
from jobs.named_stages import near_path

Images = Annotated[list[str], typer.Argument(help="Image files, folders of images, or tar shards.")]
Output = Annotated[str, typer.Option(metavar="DIR", help="Folder for the figures and numbers.")]
Limit = Annotated[
    int,
    typer.Option(min=1, help="Maximum number of images, chosen evenly over the file names; the paper uses 128."),
]


def analyze(weights: AnyWeights, images: Images, output: Output, limit: Limit = 128, _debug: Debug = False) -> None:
    """Draw the attention and learned features of a ViT: figures 6, 7 and 11 of the paper."""
    weights = find_weights(weights)
    missing = [path for path in images if not Path(path).exists()]
    if missing:
        raise UsageError(
            f"no such file or folder: {', '.join(missing)}{near_path(missing[0])}\n"
            "  expected image files, folders of images or tar shards"
        )
    if Path(output).is_file():
        raise UsageError(f"--output {output} is a file\n  expected a folder; it is created if it does not exist")
    from data.index.shard import IMAGES

    # Check before importing torch, so that a path without images is reported at once.
    images_or_tars = tuple(f".{suffix}" for suffix in (*IMAGES, "tar"))
    has_images = False
    for path in map(Path, images):
        for file in itertools.chain([path], path.rglob("*.*")):
            if file.name.lower().endswith(images_or_tars):
                has_images = True
                break
    if not has_images:
        raise UsageError(
            f"no images in {', '.join(images)}\n"
            f"  expected image files ({', '.join(IMAGES)}), folders of images or tar shards"
        )
    from jobs.extras.analyze import analyze

    analyze.analyze(weights, images, output, limit)
