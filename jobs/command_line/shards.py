"""`patchline pack|index|subset` and `patchline data check|stats|repair`: sets made, found, looked at and mended."""

from pathlib import Path
from typing import Annotated

import typer

from data.errors import ExitCode, UsageError
from jobs.command_line.words import Debug, make_group, show

SOURCES = (
    "folder (one sub-folder a class), table (CSV or parquet with columns path and label), tars (WebDataset, "
    "img2dataset), parquet (Hugging Face images), digits; or a known data set of docs/data-sets.md: "
    "imagenet-train, imagenet-validation, imagenet-21k, imagenet-21k-fall11, cifar10, cifar100, pets, "
    "flowers102, objectnet, vtab."
)
TARS = (
    "A folder of WebDataset tars, or the tars themselves; or URLs (s3, gs, az, https) of either, quoted: "
    "s3://bucket/train, 's3://bucket/*/train-*.tar', 'https://host/train-{000000..000999}.tar'."
)

Source = Annotated[str, typer.Argument(help=SOURCES)]
ImagesPath = Annotated[str, typer.Argument(help="Where the images are; - for digits.")]
NewFolder = Annotated[str, typer.Argument(help="Where the shards and their index go.")]
Split = Annotated[str, typer.Option(help="digits, known data sets: train, test, or another that it has.")]
Root = Annotated[str | None, typer.Option(help="table: what its paths are relative to; else the table's folder.")]
Wnids = Annotated[
    str | None, typer.Option(help="imagenet-validation: the devkit, or a text file of one wnid a line; 21k: the file.")
]
ClassList = Annotated[
    str | None, typer.Option("--names", metavar="FILE", help="Class names, one a line, in the order of their ids.")
]
ClassesOf = Annotated[
    str | None, typer.Option(metavar="INDEX", help="Number the classes as another set does, by name.")
]
Rename = Annotated[
    list[str] | None, typer.Option(metavar="NAME=NAME", help="A class of the source, and what the numbering calls it.")
]
Real = Annotated[str | None, typer.Option(help="imagenet-validation: real.json instead, with all labels of each.")]
Task = Annotated[str | None, typer.Option(help="vtab: which of its 19 tasks, caltech101 for one.")]
Partial = Annotated[bool, typer.Option("--partial", help="Known data sets: it is a part on purpose, not refused.")]
ShardSamples = Annotated[int, typer.Option(min=1, help="Samples of a shard, at most.")]
ShardBytes = Annotated[int, typer.Option(min=1, help="Bytes of a shard's images, at most; 1 GiB.")]
Restarts = Annotated[
    bool, typer.Option("--restarts", help="Add restart markers to JPEGs: same pixels, cropped faster.")
]

Tars = Annotated[list[str], typer.Argument(help=TARS)]
Output = Annotated[str | None, typer.Option(help="Folder of the index; else beside the shards, if they are here.")]
Location = Annotated[
    str | None, typer.Option("--at", help="The URL that runs read the shards from, where it is another one.")
]

IndexPath = Annotated[str, typer.Argument(metavar="set", help="An index, or its folder.")]
Page = Annotated[str | None, typer.Option(metavar="FILE.html", help="Write a page that needs nothing else.")]
World = Annotated[int, typer.Option(min=1, help="Workers to give advice for.")]
RepairedFolder = Annotated[str, typer.Argument(help="Where the new set goes; not the old one's folder.")]
Unique = Annotated[bool, typer.Option("--unique", help="Keep each image once.")]

SubsetFolder = Annotated[str, typer.Option(help="Folder of the subset's index and tables: one of its own.")]
Keep = Annotated[list[str] | None, typer.Option(metavar="CLASS", help="A class to keep, by id or name; repeatable.")]
Only = Annotated[
    str | None, typer.Option(metavar="FILE", help="The samples to keep: a key a line, or shard, tab, key; or .json.")
]
But = Annotated[str | None, typer.Option(metavar="FILE", help="Samples to leave out, listed likewise; or leaks.json.")]
Part = Annotated[
    str | None, typer.Option(metavar="FIRST:STOP", help="':98%', '98%:', ':50000' …; with --seed, of a permutation.")
]
Shots = Annotated[int | None, typer.Option(min=1, help="Samples of each class, as the few-shot probe draws them.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Of --shots, or of --part.")]

Name = Annotated[str | None, typer.Option(help="Of the set; else its folder's name.")]
Classes = Annotated[int | None, typer.Option(min=1, help="Labels must be below; else as many as are found.")]
CacheFolder = Annotated[
    str | None, typer.Option("--cache", help="URLs: folder that shards are fetched to, as a recipe's cache.directory.")
]
Workers = Annotated[int, typer.Option(min=1, help="Shards worked on side by side.")]

commands = make_group()
data_commands = make_group("Check, measure or repair a set of shards.")


@commands.command()
def pack(
    source: Source,
    path: ImagesPath,
    directory: NewFolder,
    split: Split = "train",
    root: Root = None,
    wnids: Wnids = None,
    real: Real = None,
    names: ClassList = None,
    classes_of: ClassesOf = None,
    rename: Rename = None,
    task: Task = None,
    partial: Partial = False,
    shard_samples: ShardSamples = 10_000,
    shard_bytes: ShardBytes = 1 << 30,
    restarts: Restarts = False,
    name: Name = None,
    classes: Classes = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> None:
    """Pack images of many kinds into shards with their index."""
    from jobs.commands.data import pack_images

    # The same words as those of a set in a recipe; a dash stands for none.
    described = {
        "source": source,
        "path": path if path != "-" else None,
        "split": split,
        "root": root,
        "wnids": wnids,
        "real": real,
        "names": names,
        "classes_of": classes_of,
        "rename": pairs(rename or []),
        "task": task,
        "partial": partial,
    }
    summary = pack_images(
        described,
        Path(directory),
        name=name,
        shard_samples=shard_samples,
        shard_bytes=shard_bytes,
        classes=classes,
        restarts=restarts,
        workers=workers,
    )
    show(summary)


def pairs(words: list[str]) -> dict[str, str]:
    """Read `NAME=NAME` words; raises UsageError on one without an equals sign."""
    names = {}
    for word in words:
        before, equals, after = word.partition("=")
        if not (before and equals and after):
            raise UsageError(f"--rename {word}: expected the source's name and the new one\n  type: --rename kitty=cat")
        names[before] = after
    return names


@commands.command()
def index(
    tars: Tars,
    output: Output = None,
    at: Location = None,
    name: Name = None,
    classes: Classes = None,
    names: ClassList = None,
    classes_of: ClassesOf = None,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> None:
    """Index existing WebDataset tars, unchanged; exit 65 where nothing of them can be used."""
    from jobs.commands.data import index_tars

    summary = index_tars(
        tars,
        output=output,
        at=at,
        name=name,
        classes=classes,
        names=names,
        classes_of=classes_of,
        workers=workers,
        cache=cache,
    )
    show(summary)


@commands.command()
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
) -> None:
    """Choose samples of a set, as an index over the same tars: nothing is packed again."""
    from jobs.commands.data import choose_samples

    classes = [int(entry) if entry.isascii() and entry.isdigit() else entry for entry in keep or []]
    show(
        choose_samples(
            path,
            Path(output),
            keep=classes,
            only=only,
            but=but,
            part=part,
            shots=shots,
            seed=seed,
            name=name,
            workers=workers,
            cache=cache,
        )
    )


@data_commands.command()
def check(
    path: IndexPath,
    page: Page = None,
    world: World = 1,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> int:
    """Read and decode every sample; exit 65 where a run would miss one."""
    from jobs.commands.data import check_set

    if check_set(path, page=page, world=world, workers=workers, cache=cache):
        return ExitCode.DONE
    return ExitCode.DATA


@data_commands.command()
def stats(
    path: IndexPath,
    page: Page = None,
    world: World = 1,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> None:
    """Read headers and labels alone, and show how sizes are spread."""
    from jobs.commands.data import measure_set

    measure_set(path, page=page, world=world, workers=workers, cache=cache)


@data_commands.command()
def repair(
    path: IndexPath,
    directory: RepairedFolder,
    unique: Unique = False,
    name: Name = None,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> None:
    """Pack every good sample into a new set."""
    from jobs.commands.data import repair_set

    show(repair_set(path, Path(directory), unique=unique, name=name, workers=workers, cache=cache))
