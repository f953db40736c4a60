"""`patchline data check|stats|repair`: read every sample of a set, and pack the good ones again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.checks import printable
from data.errors import DataError, ExitCode
from jobs.commands.arguments import Debug, stoppable
from jobs.commands.sets import CacheFolder, Name, Workers, cache_config, refuse_file, summary
from jobs.named_stages import find_set
from jobs.terminal import ProgressMeter, echo

if TYPE_CHECKING:
    from data.extras.doctor.doctor import Report

IndexPath = Annotated[str, typer.Argument(metavar="set", help="An index, or its folder.")]
Page = Annotated[str | None, typer.Option(metavar="FILE.html", help="Write a page that needs nothing else.")]
World = Annotated[int, typer.Option(min=1, help="Workers to give advice for.")]
RepairedFolder = Annotated[str, typer.Argument(help="Where the new set goes; not the old one's folder.")]
Unique = Annotated[bool, typer.Option("--unique", help="Keep each image once.")]


def check(
    path: IndexPath,
    page: Page = None,
    world: World = 1,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> int:
    """Read and decode every sample; exit 65 where a run would miss one."""
    from data.extras.doctor.page import write_page

    report = examine(path, decode=True, page=page, workers=workers, cache=cache)
    for line in report.lines(world):
        echo(line)
    if page:
        echo(f"page: {write_page(report, page, world)}")
    if report.ok:
        return ExitCode.DONE
    line = "not all of it can be read"
    # Repairing keeps the good samples: without any there is no set to make.
    if report.good:
        line += f"; a set that can: python -m jobs data repair {path} NEW-FOLDER"
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
    """Read headers and labels alone, and show how sizes are spread."""
    from data.extras.doctor.page import write_page

    report = examine(path, decode=False, page=page, workers=workers, cache=cache)
    for line in report.lines(world):
        echo(line)
    for name, spread in report.spreads.items():
        # One in a hundred at each end, not the very ends: a single odd image would say nothing of the set.
        low = spread.quantile(0.01)
        high = spread.quantile(0.99)
        echo(f"{name}: 1 % {low:g}, median {spread.quantile(0.5):g}, 99 % {high:g}")
    ranked = report.classes.most_common()
    for end, rows in (("most", ranked[:5]), ("least", ranked[::-1][:5])):
        classes = [f"{printable(report.index.class_name(label))} {count:,}" for label, count in rows]
        echo(f"{end}: {', '.join(classes)}")
    if page:
        echo(f"page: {write_page(report, page, world)}")


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
    from data.extras.doctor.doctor import repair
    from data.index.document import load_index

    folder = Path(directory)
    refuse_file(folder)
    index = load_index(find_set(path))
    # The shards and their index may lie in two folders; neither may be written into.
    if folder.resolve() in (Path(index.directory), index.tables):
        raise DataError(f"{folder} holds the set that is to be repaired\n  give another folder")
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
    for line in (f"{first}; {index.samples - repaired.samples:,} samples left out", *refused):
        echo(line)


def examine(path: str, *, decode: bool, page: str | None, workers: int, cache: str | None) -> "Report":
    """Look at every sample of a set."""
    from data.extras.doctor.doctor import check
    from data.index.document import load_index

    index = load_index(find_set(path))
    # A page that cannot be written is found out now, not after hours of looking.
    if page:
        Path(page).parent.mkdir(parents=True, exist_ok=True)
    progress = ProgressMeter("shards", len(index.shards))
    return check(index, decode=decode, workers=workers, report=progress.of, cache=cache_config(cache))
