"""`patchline pack|index`: pack images into shards, and index existing tars.

patchline pack folder photos/train shards/photos/train --workers 4    run it again to resume after a kill
patchline index shards/theirs --workers 8
patchline index s3://bucket/theirs --output indexes/theirs
"""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data.errors import ConfigError, DataError, UsageError
from jobs.answer import Answer, report_lines
from jobs.commands.arguments import Debug
from jobs.extras.data_commands import (
    CacheFolder,
    Name,
    Workers,
    cache_config,
    near_path,
    refuse_file,
    set_document,
    stoppable,
)
from jobs.extras.progress import ProgressMeter
from jobs.named_stages import find_set
from jobs.stage_folders import stages_in
from jobs.terminal import echo

if TYPE_CHECKING:
    from data.index.index import Index
    from data.index.names import Names

SOURCES = (
    "folder (one subfolder per class), table (CSV or parquet with columns path and label), tars (WebDataset, "
    "img2dataset), parquet (Hugging Face images, also at hf://datasets/OWNER/NAME), digits; or a known data set "
    "(docs/data-sets.md): imagenet-train, imagenet-validation, imagenet-21k, imagenet-21k-fall11, cifar10, cifar100, "
    "pets, flowers102, objectnet, vtab."
)
TARS = (
    "A folder of WebDataset tars, or the tars; or quoted URLs (s3, gs, az, hf, https): s3://bucket/train, "
    "'s3://bucket/*/train-*.tar', 'hf://datasets/OWNER/NAME/train/*.tar', 'https://host/train-{000000..000999}.tar'."
)

Source = Annotated[str, typer.Argument(help=SOURCES)]
ImagesPath = Annotated[str, typer.Argument(help="Path of the images; use - for digits.")]
NewFolder = Annotated[str, typer.Argument(help="Folder to write the shards and their index to.")]
Split = Annotated[
    str, typer.Option(help="For digits and known data sets: train, test, or another split of the data set.")
]
Root = Annotated[
    str | None, typer.Option(help="For table: base folder of the relative paths; default: the table's folder.")
]
Wnids = Annotated[
    str | None,
    typer.Option(
        help="For imagenet-validation: the devkit, or a text file with one WordNet id per line; for imagenet-21k: "
        "such a text file."
    ),
]
ClassList = Annotated[
    str | None,
    typer.Option("--names", metavar="FILE", help="File of class names, one per line, in the order of their ids."),
]
ClassesOf = Annotated[str | None, typer.Option(metavar="INDEX", help="Use the class numbering of this data set.")]
Rename = Annotated[
    list[str] | None,
    typer.Option(metavar="OLD=NEW", help="Rename a class from the source; repeatable."),
]
Real = Annotated[
    str | None,
    typer.Option(help="For imagenet-validation: real.json, which has all labels of each image; replaces --wnids."),
]
Task = Annotated[str | None, typer.Option(help="For vtab: one of the 19 tasks, such as caltech101.")]
Unlabelled = Annotated[bool, typer.Option("--unlabelled", help="Ignore labels, to train with objective: masked.")]
Partial = Annotated[
    bool, typer.Option("--partial", help="Accept fewer images of a known data set than were published.")
]
ShardSamples = Annotated[int, typer.Option(min=1, help="Maximum number of samples per shard.")]
ShardBytes = Annotated[int, typer.Option(min=1, help="Maximum bytes of encoded images per shard; default: 1 GiB.")]
Restarts = Annotated[
    bool,
    typer.Option(
        "--restarts", help="Add restart markers to JPEGs, which make random crops faster; the pixels stay the same."
    ),
]

Tars = Annotated[list[str], typer.Argument(help=TARS)]
Output = Annotated[
    str | None, typer.Option(help="Folder to write the index to; default: the folder of the shards, if it is local.")
]
Location = Annotated[
    str | None,
    typer.Option("--at", help="URL from which runs read the shards; default: the URL of the indexed shards."),
]

Classes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of classes, which must be greater than every label; default: the largest label plus 1."
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check", help="Then decode every sample, as `data check` does; exit with code 65 if any sample is damaged."
    ),
]


# Names of the same sources in other programs.
OTHER_SOURCES = {
    **dict.fromkeys(("csv", "tsv", "json", "jsonl", "list", "metadata"), "table"),
    **dict.fromkeys(("imagefolder", "folders", "images", "directory", "dir"), "folder"),
    **dict.fromkeys(("webdataset", "wds", "tar"), "tars"),
    **dict.fromkeys(("hf", "huggingface", "datasets"), "parquet"),
}


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
) -> Answer:
    """Pack images into shards with an index. To resume an interrupted command, run it again."""
    from data.extras.shards.indexing import pinned
    from data.extras.shards.packing import pack
    from data.extras.sources.numbering import Numbering
    from data.extras.sources.walk import matching
    from data.remote.cache import Cache
    from jobs.extras.packing.sets import (
        SetConfig,
        check_apart,
        expected_samples,
        missing_paths,
        numbering_of,
        samples_of,
    )
    from pipeline import config

    if source in OTHER_SOURCES:
        raise UsageError(f"source is {source}; did you mean {OTHER_SOURCES[source]!r}?")
    renamed = {}
    for word in rename or []:
        before, equals, after = word.partition("=")
        if not (before and equals and after):
            raise UsageError(
                f"--rename {word} is not OLD=NEW\n"
                "  expected a class name of the source and its new name, for example --rename kitty=cat"
            )
        renamed[before] = after
    # The keys of a data set in a recipe. The path "-" means no path.
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
    # Apply the checks of a recipe's pack stage, so that the command and the stage report the same errors.
    if source == "subset":
        raise UsageError(
            "pack does not make subsets\n  run python -m jobs subset INDEX --shots 10 --seed 0 --output FOLDER"
        )
    if source == "shards":
        raise UsageError(
            f"existing shards need an index, but need not be packed\n  run python -m jobs index {shlex.quote(path)}"
        )
    if stages_in(folder):
        raise UsageError(
            f"{folder} is a run directory\n  use another folder for the shards, for example shards/{folder.name}"
        )
    try:
        cfg = config.build(SetConfig, described, "pack")
    except ConfigError as error:  # remove the name of the recipe section from the message
        raise UsageError(str(error).removeprefix("pack.")) from None
    if path != "-" and "://" not in path and not any(file.exists() for file in matching(path)):
        hint = "\n  give the images first, then the output folder" if folder.is_dir() else near_path(path)
        raise DataError(f"no file or folder at {path}{hint}\n  expected the path of images, or of a table of images")
    check_apart(cfg, folder)
    if cfg.path is not None and "://" in cfg.path and not missing_paths(cfg):
        cfg = replace(cfg, path=pinned(cfg.path, folder, Cache(cache_config(None))))
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
    document = set_document(index, with_gap=classes is None)
    if check_all:
        return check(context, index, document, workers=workers)
    return Answer(document, report_lines)


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
) -> Answer:
    """Index existing WebDataset tars in place; exit with code 65 if no sample is usable."""
    from data.extras.class_lists import read_class_list
    from data.extras.shards.indexing import build_index, problem_of
    from data.extras.sources.numbering import check_unambiguous
    from data.index.document import load_index

    if output is not None:
        refuse_file(Path(output))
    # Class names come from --names, from --classes-of, or from text labels in the tars.
    if unlabelled and (names or classes_of or classes):
        raise UsageError(
            "--unlabelled cannot be combined with --names, --classes-of or --classes, because it ignores labels\n"
            "  omit --unlabelled or the others"
        )
    if names and classes_of:
        raise UsageError("--names and --classes-of both determine the class numbering\n  omit one of them")
    listed: Names = ()
    if names:
        listed = read_class_list(names)
        check_unambiguous(listed, names)
    elif classes_of:
        listed = load_index(find_set(classes_of)).names
        if not listed:
            raise DataError(
                f"--classes-of {classes_of}: the data set has no class names\n  expected a data set with class names"
            )

    # A single argument other than a tar is a folder or a URL with a pattern.
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
    document = set_document(index, with_gap=classes is None)
    lines = document["report"]
    if not index.names and not unlabelled:
        lines.append("no class names, so labels cannot be checked; if you know the names, add --names FILE")

    # Refuse a data set without usable samples; the message includes what indexing reported.
    problem = problem_of(index, unlabelled=unlabelled)
    if problem:
        raise DataError("\n".join([*lines, f"{index.tables} is unusable: {problem}"]))
    if check_all:
        return check(context, index, document, workers=workers, cache=cache)
    return Answer(document, report_lines)


def check(
    context: typer.Context, index: "Index", document: dict[str, Any], *, workers: int, cache: str | None = None
) -> Answer:
    """Decode every sample of a new data set by running `data check`; return its result as part of `document`."""
    for line in document["report"]:
        echo(line)  # before the check, which takes longer
    answer: Answer = context.obj.load("data check")(document["index"], cache=cache, workers=workers)
    checked = answer.content()
    return Answer({**document, "check": checked}, lambda both: report_lines(both["check"]), answer.code)
