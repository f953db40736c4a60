"""`patchline pack|index`: make sets of shards, and index existing ones.

patchline pack folder photos/train shards/photos/train --workers 4    resumes after a kill
patchline index shards/theirs --workers 8
patchline index s3://bucket/theirs --output indexes/theirs
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.errors import ConfigError, DataError, ExitCode, UsageError
from jobs.commands.arguments import Debug, stoppable
from jobs.named_stages import find_set, near_path, stages_in
from jobs.terminal import ProgressMeter, echo
from pipeline.values import counted

if TYPE_CHECKING:
    from data.index.index import Index
    from data.index.names import Names
    from data.remote.config import CacheConfig

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
Unlabelled = Annotated[
    bool, typer.Option("--unlabelled", help="Images alone, labels are not looked at: for objective: masked.")
]
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

Name = Annotated[str | None, typer.Option(help="Of the set; else its folder's name.")]
Classes = Annotated[int | None, typer.Option(min=1, help="Labels must be below; else as many as are found.")]
CacheFolder = Annotated[
    str | None, typer.Option("--cache", help="URLs: folder that shards are fetched to, as a recipe's cache.directory.")
]
Workers = Annotated[int, typer.Option(min=1, help="Shards worked on side by side.")]

Check = Annotated[
    bool, typer.Option("--check", help="Then decode every sample, as data check does; exit 65 for a bad one.")
]


def pack(
    context: typer.Context,
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
    unlabelled: Unlabelled = False,
    shard_samples: ShardSamples = 10_000,
    shard_bytes: ShardBytes = 1 << 30,
    restarts: Restarts = False,
    name: Name = None,
    classes: Classes = None,
    workers: Workers = 1,
    check_all: Check = False,
    _debug: Debug = False,
) -> int:
    """Pack images of many kinds into shards with their index."""
    from data.shards.packing import pack
    from data.sources.numbering import Numbering
    from jobs.sets import SetConfig, check_apart, expected_samples, numbering_of, samples_of
    from pipeline import config

    renamed = {}
    for word in rename or []:
        before, equals, after = word.partition("=")
        if not (before and equals and after):
            raise UsageError(f"--rename {word}: expected the source's name and the new one\n  type: --rename kitty=cat")
        renamed[before] = after
    # The same words as those of a set in a recipe; a dash stands for none.
    described = {
        "source": source,
        "path": path if path != "-" else None,
        "split": split,
        "root": root,
        "wnids": wnids,
        "real": real,
        "names": names,
        "classes_of": classes_of and find_set(classes_of),
        "rename": renamed,
        "task": task,
        "partial": partial,
        "unlabelled": unlabelled,
    }
    folder = Path(directory)
    refuse_file(folder)
    # Checked as a recipe's pack stage is, so that both refuse the same things with the same words.
    if source == "subset":
        raise UsageError(
            "a subset packs nothing\n  type python -m jobs subset INDEX --shots 10 --seed 0 --output FOLDER"
        )
    if source == "shards":
        raise UsageError(f"shards stay where they are, and are indexed\n  type python -m jobs index {path}")
    if stages_in(folder):
        raise UsageError(f"{folder} is a run directory\n  type another folder for the set, as shards/{folder.name}")
    try:
        cfg = config.build(SetConfig, described, "pack")
    except ConfigError as error:  # of what was typed, in the words of a recipe
        raise UsageError(str(error).removeprefix("pack.")) from None
    if path != "-" and "://" not in path and not Path(path).exists() and "*" not in path:
        hint = "\n  expected first what is packed, and then the folder to write" if folder.is_dir() else near_path(path)
        raise DataError(f"there is nothing at {path}{hint}\n  {source} reads images, or a table")
    check_apart(cfg, folder)
    numbering = Numbering()
    if not unlabelled:
        numbering = numbering_of(cfg, name or folder.name)
    progress = ProgressMeter("samples", expected_samples(cfg))
    with stoppable():
        index = pack(
            samples_of(cfg, numbering),
            folder,
            name=name or folder.name,
            names=numbering.names,
            shard_samples=shard_samples,
            shard_bytes=shard_bytes,
            classes=classes,
            restarts=restarts,
            workers=workers,
            report=progress.packed,
        )
    for line in summary(index):
        echo(line)
    if check_all:
        return check(context, index, workers=workers)
    return ExitCode.DONE


def index(
    context: typer.Context,
    tars: Tars,
    output: Output = None,
    at: Location = None,
    name: Name = None,
    classes: Classes = None,
    names: ClassList = None,
    classes_of: ClassesOf = None,
    unlabelled: Unlabelled = False,
    cache: CacheFolder = None,
    workers: Workers = 1,
    check_all: Check = False,
    _debug: Debug = False,
) -> int:
    """Index existing WebDataset tars, unchanged; exit 65 where nothing of them can be used."""
    from data.index.document import load_index
    from data.shards.indexing import build_index, decoded_samples
    from data.sources.numbering import check_unambiguous, read_class_list

    if output is not None:
        refuse_file(Path(output))
    # The class names are those of a class list or of another set, whichever is given; else labels that are texts.
    if unlabelled and (names or classes_of or classes):
        raise UsageError("--unlabelled looks at no label\n  leave out --names, --classes-of and --classes")
    if names and classes_of:
        raise UsageError("--names and --classes-of are two numberings of the classes\n  expected one of them")
    listed: Names = ()
    if names:
        listed = read_class_list(names)
        check_unambiguous(listed, names)
    elif classes_of:
        listed = load_index(find_set(classes_of)).names
        if not listed:
            raise DataError(f"--classes-of {classes_of}: has no class names\n  expected a set that was made with some")

    # One word that is no tar stands for many: a folder, or a URL with a pattern.
    is_folder_or_pattern = len(tars) == 1 and not tars[0].endswith(".tar")
    progress = ProgressMeter("shards")
    with stoppable():
        index = build_index(
            tars[0] if is_folder_or_pattern else tars,
            output=output,
            name=name,
            classes=classes,
            names=listed,
            workers=workers,
            at=at,
            report=progress.of,
            cache=cache_config(cache),
            unlabelled=unlabelled,
        )
    lines = summary(index)
    if not index.names and not unlabelled:
        lines.append("class names: none, labels are taken on trust; where they are known, give --names FILE")

    # A set of which nothing can be trained on or judged is refused, with what indexing has to say.
    tried, failed = decoded_samples(index)
    reason = ""
    if index.samples == 0:
        reason = "0 samples"
    elif failed == tried:
        reason = "no image among the samples that were decoded"
    elif not index.classes and not unlabelled:
        reason = "no sample has a label that a run could use"
    if reason:
        raise DataError(
            "\n".join([*lines, f"{index.tables}: nothing of it can be used: {reason}"])
            + "\n  expected samples of an image (jpg, png, webp) and a label (cls, json)"
            + "\n  images without labels, for objective: masked, are indexed with --unlabelled"
        )
    for line in lines:
        echo(line)
    if check_all:
        return check(context, index, workers=workers, cache=cache)
    return ExitCode.DONE


# ------------------------------------------------------------------------------------------------ shared by commands


def refuse_file(target: Path) -> None:
    """Raise UsageError where the folder to write into is a file, or would lie below one."""
    for path in (target, *target.parents):
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file\n  expected a folder for the set, which is made where there is none")


def check(context: typer.Context, index: "Index", *, workers: int, cache: str | None = None) -> int:
    """Decode every sample of a new set with `data check`, and return that command's exit code."""
    from data.index.document import SUFFIX

    exit_code: int = context.obj.load("data check")(
        str(index.tables / f"{index.name}{SUFFIX}"), cache=cache, workers=workers
    )
    return exit_code


def cache_config(folder: str | None) -> "CacheConfig":
    """Return how remote shards are fetched, into a folder if one is given, as `data.cache` of a recipe says it."""
    from data.remote.config import CacheConfig

    if folder is None:
        return CacheConfig()
    return CacheConfig(directory=str(Path(folder).expanduser().absolute()))


def summary(index: "Index") -> list[str]:
    """Return the lines on a set: its size and place, its classes' names, and what indexing passed over."""
    from data.index.names import preview
    from data.shards.indexing import decoded_samples

    classes = f"{index.classes} classes" if index.classes else "without labels"
    lines = [
        f"{index.samples:,} samples in {counted(len(index.shards), 'shard')}, {classes}, digest {index.digest[:12]}, "
        f"in {index.tables}"
    ]
    if index.names:
        lines.append(f"class names: {preview(index.names)}")
    lines += index.refused.lines("refused: ")
    tried, failed = decoded_samples(index)
    if failed:
        lines.append(f"looked at {tried:,} samples, evenly spread: {failed / tried:.1%} of them are no image")
    return lines
