"""Implements `patchline subset`: select samples of a data set, and write an index of these samples in the same tars.

patchline subset shards/photos/train --shots 10 --seed 0 --output shards/photos/train-10shot
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from data.errors import UsageError
from jobs.answer import Answer, Document
from jobs.commands.arguments import Debug
from jobs.extras.data_commands import (
    CacheFolder,
    IndexPath,
    Name,
    Workers,
    cache_config,
    refuse_file,
    set_document,
    stoppable,
)
from jobs.extras.progress import ProgressMeter
from jobs.named_stages import find_set

SubsetFolder = Annotated[
    list[str], typer.Option(help="Folder for the subset's index and tables; repeat it for each --part.")
]
Keep = Annotated[list[str] | None, typer.Option(metavar="CLASS", help="Class to keep, by id or name; repeatable.")]
Only = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Samples to keep: a text file with KEY or SHARD<tab>KEY per line, or a .json file."
    ),
]
But = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Samples to exclude, in the same format as --only, or a leaks.json."),
]
Part = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIRST:STOP",
        help="Range of samples, for example ':98%', '98%:' or ':50000'; with --seed, in random order. Repeatable, with "
        "one --output per --part; all parts are written in one pass.",
    ),
]
Shots = Annotated[int | None, typer.Option(min=1, help="Samples per class, drawn like those of the few-shot probe.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Random seed for --shots or --part.")]


def subset(
    path: IndexPath,
    output: SubsetFolder,
    keep: Keep = None,
    only: Only = None,
    but: But = None,
    part: Part = None,
    shots: Shots = None,
    seed: Seed = None,
    name: Name = None,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> Answer:
    """Select samples of a data set, and write an index of these samples in the same tars; images are not copied."""
    from data.extras.shards import subset
    from data.index.document import load_index

    ranges: list[str | None] = [*part] if part else [None]
    if len(ranges) != len(output) or (name and len(output) > 1):
        raise UsageError(
            f"found {len(part or [])} --part, {len(output)} --output and {'one' if name else 'no'} --name\n"
            "  expected one --output for each --part, and --name only for a single subset"
        )
    classes = [int(entry) if entry.isascii() and entry.isdigit() else entry for entry in keep or []]
    subsets = []
    for bounds, folder in zip(ranges, map(Path, output), strict=True):
        refuse_file(folder)
        rule = subset.Rule(tuple(classes), only, but, bounds, shots, seed)
        subsets.append(subset.Part(folder, rule, name or folder.name))
    parent = load_index(find_set(path))
    progress = ProgressMeter("shards", len(parent.shards))
    with stoppable():
        made = subset.make_subsets(parent, subsets, workers=workers, cache=cache_config(cache), report=progress.of)
    documents = [{**set_document(index), "report": subset.summary(index, parent)} for index in made]
    return Answer({"subsets": documents}, subset_lines)


def subset_lines(document: Document) -> Iterator[str]:
    """Yield the lines of each subset."""
    for made in document["subsets"]:
        yield from made["report"]
