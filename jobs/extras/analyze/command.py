"""`patchline analyze`."""

import itertools
from pathlib import Path
from typing import Annotated

import typer

from data.errors import UsageError
from jobs.commands.arguments import Debug
from jobs.commands.weights import AnyWeights, find_weights
from jobs.named_stages import near_path

Images = Annotated[list[str], typer.Argument(help="Image files, folders of them, or tar shards.")]
Output = Annotated[str, typer.Option(metavar="DIR", help="Where the pictures and numbers go.")]
Limit = Annotated[
    int, typer.Option(min=1, help="At most so many, of files evenly over their names; the paper takes 128.")
]


def analyze(weights: AnyWeights, images: Images, output: Output, limit: Limit = 128, _debug: Debug = False) -> None:
    """Draw what a ViT looks at: the paper's figures 6, 7 and 11."""
    weights = find_weights(weights)
    missing = [path for path in images if not Path(path).exists()]
    if missing:
        raise UsageError(
            f"there is no file or folder {', '.join(missing)}{near_path(missing[0])}\n"
            "  expected image files, folders of them or tar shards"
        )
    if Path(output).is_file():
        raise UsageError(f"--output {output} is a file\n  expected a folder, which is made where there is none")
    from data.index.shard import IMAGES

    # Of a path without an image it is told before torch is imported.
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
            f"  expected image files ({', '.join(IMAGES)}), folders of them or tar shards"
        )
    from jobs.extras.analyze import analyze

    analyze.analyze(weights, images, output, limit)
