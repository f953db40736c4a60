"""`patchline leaks`: training images that are also in a test set."""

from pathlib import Path
from typing import Annotated

import typer

from jobs.command_line.words import Debug, make_group, show

Train = Annotated[list[str], typer.Argument(help="Indexes, or their folders: what was or will be trained on.")]
Test = Annotated[list[str], typer.Option(help="An index, or its folder, that is judged on; repeatable.")]
Output = Annotated[str, typer.Option(help="Folder of leaks.json, the report and the page.")]
Fits = Annotated[float, typer.Option(min=0.5, max=1.0, help="Likeness from which on two pictures show the same.")]
Weights = Annotated[str | None, typer.Option(help="Also compare features of these weights: ours, .npz, timm, HF.")]
Cosine = Annotated[float, typer.Option(min=0.0, max=1.0, help="With --weights: of two features, at least.")]
CacheFolder = Annotated[str | None, typer.Option("--cache", help="URLs: folder that shards are fetched to.")]
Workers = Annotated[int, typer.Option(min=0, help="Shards worked on side by side; 0: as many as there are cores.")]

commands = make_group()


@commands.command()
def leaks(
    train: Train,
    test: Test,
    output: Output,
    fits: Fits = 0.88,
    weights: Weights = None,
    cosine: Cosine = 0.97,
    cache: CacheFolder = None,
    workers: Workers = 0,
    _debug: Debug = False,
) -> None:
    """Find training images that are also in a test set: copies, crops, mirror images, other encodings."""
    from jobs.commands.leaks import search

    show(search(train, test, Path(output), fits=fits, weights=weights, cosine=cosine, cache=cache, workers=workers))
