"""What the commands on data sets and weights share: options, suggestions for mistyped paths, and the end by SIGTERM."""

import difflib
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data.errors import Preempted, UsageError
from data.extras.sources.refusals import refusal_lines
from pipeline.values import counted

if TYPE_CHECKING:
    from data.index.index import Index
    from data.remote.config import CacheConfig

IndexPath = Annotated[str, typer.Argument(metavar="set", help="An index file, or the folder that contains it.")]
Name = Annotated[str | None, typer.Option(help="Name of the data set; default: the name of its folder.")]
CacheFolder = Annotated[
    str | None,
    typer.Option("--cache", help="For URLs: folder for downloaded shards, like cache.directory in a recipe."),
]
Workers = Annotated[int, typer.Option(min=1, help="Number of shards processed in parallel.")]


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise Preempted if SIGTERM arrives during the block, so that temporary files are removed, as after Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Preempted("stopped by SIGTERM; finished work is kept, run the same command again to resume")

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def near_path(path: str) -> str:
    """Return "; did you mean 'photos/cat'?" if a file or folder with a similar name exists; otherwise "".

    For a broken symbolic link, return its target.
    """
    if Path(path).is_symlink():
        return f"; it is a symbolic link to {Path(path).readlink()}, which does not exist or leads back to the link"
    near = similar_path(path)
    return "" if near is None else f"; did you mean {str(near)!r}?"


def similar_path(path: str) -> Path | None:
    """Return the existing file or folder whose name is most similar to that of a missing one; None if none is."""
    missing = Path(path)
    rest: list[str] = []
    while not missing.parent.exists():
        rest.insert(0, missing.name)
        missing = missing.parent
    names = {}
    with suppress(OSError):
        for entry in missing.parent.glob("*"):
            names[entry.name.lower()] = entry
    close = difflib.get_close_matches(missing.name.lower(), names, n=1)
    if not close:
        return None
    near = names[close[0]]
    # Append the rest of the path if that exists too.
    if near.joinpath(*rest).exists():
        near = near.joinpath(*rest)
    return near


def refuse_file(target: Path) -> None:
    """Raise UsageError if the output folder or one of its parents is a file."""
    for path in (target, *target.parents):
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file\n  expected a folder for the shards (created if it does not exist)")


def cache_config(folder: str | None) -> "CacheConfig":
    """Return the cache settings for remote shards, as in `data.cache` of a recipe; None selects the default folder."""
    from data.files import with_home  # imports OpenSSL, which would slow down --help
    from data.remote.config import CacheConfig

    if folder is None:
        return CacheConfig()
    return CacheConfig(directory=str(with_home(folder).absolute()))


def set_document(index: "Index", *, with_gap: bool = False) -> dict[str, Any]:
    """Return a data set's size, folder, class names and skipped samples, as fields and as lines of text (`report`).

    If `with_gap` is true and most class ids are unused, one line reports this.
    """
    from data.extras.shards.indexing import decoded_samples
    from data.extras.sources.numbering import gap_in_ids
    from data.index.document import SUFFIX
    from data.index.names import preview

    classes = f"{index.classes} classes" if index.classes else "without labels"
    lines = [
        f"{index.samples:,} samples in {counted(len(index.shards), 'shard')}, {classes}, digest {index.digest[:12]}, "
        f"in {index.tables}"
    ]
    if index.names:
        lines.append(f"class names: {preview(index.names)}")
    lines += refusal_lines(index.refused, "refused: ")
    tried, failed = decoded_samples(index)
    if failed:
        lines.append(f"decoded {tried:,} evenly spaced samples: {failed / tried:.1%} of them are not images")
    gap = gap_in_ids(sum(count > 0 for count in index.class_counts), index.classes)
    if gap and with_gap and not index.names:
        lines.append(gap)
    return {
        "index": str(index.tables / f"{index.name}{SUFFIX}"),
        "name": index.name,
        "samples": index.samples,
        "shards": len(index.shards),
        "classes": index.classes,
        "class_names": list(index.names),
        "digest": index.digest,
        "refused": dict(index.refused.counts),
        "report": lines,
    }
