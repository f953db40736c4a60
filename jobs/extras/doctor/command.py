"""`patchline data check|stats|repair|list`: check, describe, repair or list the samples of a data set."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.checks import printable
from data.errors import DataError, ExitCode
from jobs.commands.arguments import Debug, stoppable
from jobs.commands.sets import CacheFolder, IndexPath, Name, Workers, cache_config, refuse_file, summary
from jobs.named_stages import find_set
from jobs.progress import ProgressMeter
from jobs.terminal import echo

if TYPE_CHECKING:
    from data.extras.doctor.doctor import Report

MAX_LABELS = 1000  # maximum number of classes listed per sample
Page = Annotated[str | None, typer.Option(metavar="FILE.html", help="Also write a self-contained HTML report.")]
World = Annotated[int, typer.Option(min=1, help="Number of training workers to assume in the advice.")]
RepairedFolder = Annotated[str, typer.Argument(help="Folder for the new data set; must not be the old one's.")]
Unique = Annotated[bool, typer.Option("--unique", help="Keep only the first copy of each duplicate image.")]


def check(
    path: IndexPath,
    page: Page = None,
    world: World = 1,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> int:
    """Read and decode every sample; exit with code 65 if any sample cannot be used for training."""
    report = examine(path, decode=True, page=page, world=world, workers=workers, cache=cache)
    if report.ok:
        return ExitCode.DONE
    line = "some samples cannot be read"
    # If no sample is good, `repair` has nothing to write.
    if report.good:
        line += f"; to pack the readable ones into a new data set, run python -m jobs data repair {path} NEW-FOLDER"
    echo(line)
    return ExitCode.DATA


def stats(
    path: IndexPath,
    page: Page = None,
    world: World = 1,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> None:
    """Read only headers and labels; print the distributions of image sizes and classes."""
    report = examine(path, decode=False, page=page, world=world, workers=workers, cache=cache)
    for name, spread in report.spreads.items():
        # Print percentiles, because a single unusual image would determine minimum and maximum.
        low = spread.quantile(0.01)
        high = spread.quantile(0.99)
        echo(f"{name}: 1 % {low:g}, median {spread.quantile(0.5):g}, 99 % {high:g}")
    ranked = report.classes.most_common()
    for end, rows in (("most", ranked[:5]), ("least", ranked[::-1][:5])):
        classes = [f"{printable(report.index.class_name(label))} {count:,}" for label, count in rows]
        echo(f"{end}: {', '.join(classes)}")


def repair(
    path: IndexPath,
    directory: RepairedFolder,
    unique: Unique = False,
    name: Name = None,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> None:
    """Pack all good samples of a data set into a new data set."""
    from data.extras.doctor.doctor import repair
    from data.index.document import load_index

    folder = Path(directory)
    refuse_file(folder)
    index = load_index(find_set(path))
    # The shards and their index can be in different folders; do not write to either.
    if folder.resolve() in (Path(index.directory), index.tables):
        raise DataError(f"{folder} contains the data set to repair\n  use another folder for the new one")
    progress = ProgressMeter("samples", index.samples)
    with stoppable():
        repaired = repair(
            index,
            folder,
            unique=unique,
            cache=cache_config(cache),
            name=name or folder.name,
            workers=workers,
            report=progress.packed,
        )
    first, *refused = summary(repaired)
    for line in (f"{first}; {index.samples - repaired.samples:,} samples excluded", *refused):
        echo(line)


def list_samples(
    sets: Annotated[list[str], typer.Argument(help="Index files, or the folders that contain them.")],
    cache: CacheFolder = None,
    _debug: Debug = False,
) -> None:
    """Print a line for each sample: key, tar, classes and data set, separated by tabs."""
    from data.images.decode import BadImage
    from data.index.document import load_index
    from data.shards.reader import ShardReader, read_labels

    for path in sets:
        index = load_index(find_set(path))
        reader = ShardReader(index, verify=False, cache=cache_config(cache))
        for number, shard in enumerate(index.shards):
            for key, raw in zip(index.keys(number), reader.labels(number), strict=True):
                # A sample without a usable label has an empty column.
                classes = ""
                with suppress(BadImage):
                    classes = ", ".join(map(index.class_name, read_labels(raw, index, MAX_LABELS)))
                # A key with a tab would look like two columns; `printable` escapes it.
                typer.echo("\t".join(map(printable, (key, shard.name, classes, index.name))))


def examine(path: str, *, decode: bool, page: str | None, world: int, workers: int, cache: str | None) -> "Report":
    """Check every sample of a data set, print a report, and also write the report as HTML to `page`, if given."""
    from data.extras.doctor.doctor import check
    from data.extras.doctor.page import write_page
    from data.index.document import load_index

    index = load_index(find_set(path))
    # If the folder of the HTML report cannot be created, fail now instead of after hours of reading.
    if page:
        Path(page).parent.mkdir(parents=True, exist_ok=True)
    progress = ProgressMeter("shards", len(index.shards))
    report = check(index, decode=decode, workers=workers, report=progress.of, cache=cache_config(cache))
    for line in report.lines(world):
        echo(line)
    if page:
        echo(f"page: {write_page(report, page, world)}")
    return report
