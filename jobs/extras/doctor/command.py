"""`patchline data check|stats|repair|list`: check, describe, repair or list the samples of a data set."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data.checks import printable
from data.errors import DataError, ExitCode
from jobs.answer import Answer, Document, Step, report_lines
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

if TYPE_CHECKING:
    from data.extras.doctor.doctor import Report
    from data.index.index import Index

MAX_LABELS = 1000  # maximum number of classes listed per sample
Page = Annotated[str | None, typer.Option(metavar="FILE.html", help="Also write a self-contained HTML report.")]
World = Annotated[int, typer.Option(min=1, help="Number of training workers to assume for the advice.")]
RepairedFolder = Annotated[
    str, typer.Argument(help="Folder for the repaired data set; must not be the folder of the original.")
]
Unique = Annotated[bool, typer.Option("--unique", help="Keep only the first copy of each duplicate image.")]


def check(
    path: IndexPath,
    page: Page = None,
    world: World = 1,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> Answer:
    """Read and decode every sample; exit with code 65 if any sample cannot be used for training."""
    report = examine(path, decode=True, page=page, world=world, workers=workers, cache=cache)
    document = report_document(report, world, page)
    if report.ok:
        return Answer(document, report_lines)
    line = "some samples cannot be read"
    steps: list[Step] = []
    # If no sample is good, `repair` has nothing to write.
    if report.good:
        advice = "to pack the readable ones into a new data set, run python -m jobs data repair"
        line += f"; {advice} {shlex.quote(path)} NEW-FOLDER"
        folder = f"{path.rstrip('/').removesuffix('.index.json')}-repaired"
        command = shlex.join(["python", "-m", "jobs", "data", "repair", path, folder])
        steps.append({"do": "first", "command": command, "text": line, "replaces": path, "writes": folder})
    document["report"].append(line)
    return Answer({**document, "what": line, "next": steps}, report_lines, ExitCode.DATA)


def stats(
    path: IndexPath,
    page: Page = None,
    world: World = 1,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> Answer:
    """Read only headers and labels; print the distributions of image sizes and classes."""
    report = examine(path, decode=False, page=page, world=world, workers=workers, cache=cache)
    document = report_document(report, world, page)
    lines = document["report"]
    # Percentiles, because a single unusual image would determine minimum and maximum.
    percentiles: dict[str, dict[str, float]] = {}
    for name, spread in report.spreads.items():
        low, median, high = map(spread.quantile, (0.01, 0.5, 0.99))
        percentiles[name] = {"1": low, "50": median, "99": high}
        lines.append(f"{name}: 1 % {low:g}, median {median:g}, 99 % {high:g}")
    ranked = report.classes.most_common()
    for end, rows in (("most", ranked[:5]), ("least", ranked[::-1][:5])):
        classes = [f"{printable(report.index.class_name(label))} {count:,}" for label, count in rows]
        lines.append(f"{end}: {', '.join(classes)}")
    counts = {report.index.class_name(label): count for label, count in ranked}
    return Answer({**document, "percentiles": percentiles, "class_counts": counts}, report_lines)


def repair(
    path: IndexPath,
    directory: RepairedFolder,
    unique: Unique = False,
    name: Name = None,
    cache: CacheFolder = None,
    workers: Workers = 1,
    _debug: Debug = False,
) -> Answer:
    """Pack all good samples of a data set into a new data set."""
    from data.extras.doctor.doctor import repair
    from data.index.document import load_index

    folder = Path(directory)
    refuse_file(folder)
    index = load_index(find_set(path))
    # The shards and their index can be in different folders; do not write to either.
    if folder.resolve() in (Path(index.directory), index.tables):
        raise DataError(f"{folder} contains the data set to repair\n  use another folder for the repaired data set")
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
    document = set_document(repaired)
    excluded = index.samples - repaired.samples
    document["report"][0] += f"; {excluded:,} samples excluded"
    return Answer({**document, "excluded": excluded}, report_lines)


def list_samples(
    sets: Annotated[list[str], typer.Argument(help="Index files, or the folders that contain them.")],
    cache: CacheFolder = None,
    _debug: Debug = False,
) -> Answer:
    """Print a line for each sample: key, tar, classes and data set, separated by tabs."""
    from data.index.document import load_index

    indexes = [load_index(find_set(path)) for path in sets]
    return Answer({"samples": samples_in(indexes, cache)}, sample_lines, is_table=True)


def samples_in(indexes: Sequence["Index"], cache: str | None) -> Iterator[dict[str, Any]]:
    """Yield the samples of data sets, one at a time, because there can be millions."""
    from data.images.decode import BadImage
    from data.reader import ShardReader, read_labels

    for index in indexes:
        reader = ShardReader(index, verify=False, cache=cache_config(cache))
        for number, shard in enumerate(index.shards):
            for key, raw in zip(index.keys(number), reader.labels(number), strict=True):
                # A sample without a usable label has no classes.
                classes: list[str] = []
                with suppress(BadImage):
                    classes = list(map(index.class_name, read_labels(raw, index, MAX_LABELS)))
                yield {"key": key, "shard": shard.name, "classes": classes, "set": index.name}


def sample_lines(document: Document) -> Iterator[str]:
    """Yield a line per sample."""
    for sample in document["samples"]:
        row = (sample["key"], sample["shard"], ", ".join(sample["classes"]), sample["set"])
        # A key with a tab would look like two columns; `printable` escapes it.
        yield "\t".join(map(printable, row))


def examine(path: str, *, decode: bool, page: str | None, world: int, workers: int, cache: str | None) -> "Report":
    """Check every sample of a data set, and write the report as HTML to `page`, if given."""
    from data.extras.doctor.doctor import check
    from data.extras.doctor.page import write_page
    from data.index.document import load_index

    index = load_index(find_set(path))
    # If the folder of the HTML report cannot be created, fail now instead of after hours of reading.
    if page:
        Path(page).parent.mkdir(parents=True, exist_ok=True)
    progress = ProgressMeter("shards", len(index.shards))
    report = check(index, decode=decode, workers=workers, report=progress.of, cache=cache_config(cache))
    if page:
        write_page(report, page, world)
    return report


def report_document(report: "Report", world: int, page: str | None) -> dict[str, Any]:
    """Return a document with a report's counts and problems, and its lines of text (`report`)."""
    lines = report.lines(world)
    if page:
        lines.append(f"page: {page}")
    return {
        "set": report.index.name,
        "digest": report.index.digest,
        "shards": len(report.shards),
        "good": report.good,
        "bad": dict(report.bad.counts),
        "problems": {shard.name: shard.problem for shard in report.shards if shard.problem},
        "duplicates": report.duplicates,
        "page": page,
        "report": lines,
    }
