"""The work of `patchline pack|index|subset|data`: make shards, index existing ones, look at them and mend them.

patchline pack folder photos/train shards/photos/train --workers 4    resumes after a kill
patchline index shards/theirs --workers 8
patchline index s3://bucket/theirs --output indexes/theirs
patchline subset shards/photos/train --shots 10 --seed 0 --output shards/photos/train-10shot
patchline data check shards/theirs --page report.html
"""

import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from data.checks import printable
from data.errors import DataError, Preempted, UsageError
from data.index.document import load_index
from data.index.index import Index
from data.index.names import Names, check_unmistakable, read_class_list, some
from data.index.refusals import Refusals
from data.remote.cache import CacheConfig
from data.shards.doctor import Report, check, repair
from data.shards.indexing import build_index, decoded_samples
from data.shards.packing import pack
from data.shards.page import write_page
from data.shards.subset import Rule, make_subset
from data.shards.subset import summary as subset_summary
from jobs.progress import Progress
from jobs.stages.sets import SetConfig, expected_samples, numbering_of, samples_of
from pipeline import config


def pack_images(
    source: Mapping[str, object],
    directory: Path,
    *,
    name: str | None,
    shard_samples: int,
    shard_bytes: int,
    classes: int | None,
    restarts: bool,
    workers: int,
) -> list[str]:
    """Pack a source, described as in a recipe, into shards; the same call again goes on after a kill."""
    refuse_file(directory)
    # Checked as a recipe's pack stage is, so that both refuse the same things with the same words.
    if source["source"] == "subset":
        raise UsageError(
            "a subset packs nothing\n  type python -m jobs subset INDEX --shots 10 --seed 0 --output FOLDER"
        )
    cfg = config.build(SetConfig, source, "pack")
    numbering = numbering_of(cfg, name or directory.name)
    with stoppable(), Progress("samples", expected_samples(cfg)) as progress:
        index = pack(
            samples_of(cfg, numbering),
            directory,
            name=name or directory.name,
            names=numbering.names,
            shard_samples=shard_samples,
            shard_bytes=shard_bytes,
            classes=classes,
            restarts=restarts,
            workers=workers,
            report=progress.packed,
        )
    return summary(index)


def index_tars(
    tars: list[str],
    *,
    output: str | None,
    at: str | None,
    name: str | None,
    classes: int | None,
    names: str | None,
    classes_of: str | None,
    workers: int,
    cache: str | None,
) -> list[str]:
    """Index existing tars, unchanged; the same call again goes on after a kill.

    Raises DataError where nothing of them can be used, after the index has been written.
    """
    if output is not None:
        refuse_file(Path(output))
    # The class names are those of a class list or of another set, whichever is given.
    if names and classes_of:
        raise UsageError("--names and --classes-of are two numberings of the classes\n  expected one of them")
    listed: Names = ()
    if names:
        listed = read_class_list(names)
        check_unmistakable(listed, names)
    elif classes_of:
        listed = load_index(classes_of).names
        if not listed:
            raise DataError(f"--classes-of {classes_of}: has no class names\n  expected a set that was made with some")

    # One word that is no tar stands for many: a folder, or a URL with a pattern.
    is_folder_or_pattern = len(tars) == 1 and not tars[0].endswith(".tar")
    with stoppable(), Progress("shards") as progress:
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
        )
    lines = summary(index)
    if not index.names:
        lines.append("class names: none, labels are taken on trust; where they are known, give --names FILE")

    # A set of which nothing can be trained on or judged is refused, with what indexing has to say.
    tried, failed = decoded_samples(index)
    reason = ""
    if index.samples == 0:
        reason = "0 samples"
    elif failed == tried:
        reason = "no image among the samples that were decoded"
    elif not index.classes:
        reason = "no sample has a label that a run could use"
    if reason:
        raise DataError(
            "\n".join([*lines, f"{index.tables}: nothing of it can be used: {reason}"])
            + "\n  expected samples of an image (jpg, png, webp) and a label (cls, json)"
            + "\n  labels that are names are read by a list of them: --names FILE"
        )
    return lines


def choose_samples(
    path: str,
    folder: Path,
    *,
    keep: list[int | str],
    only: str | None,
    but: str | None,
    part: str | None,
    shots: int | None,
    seed: int | None,
    name: str | None,
    workers: int,
    cache: str | None,
) -> list[str]:
    """Write the index of some of a set's samples into a folder of its own."""
    refuse_file(folder)
    rule = Rule(tuple(keep), only, but, part, shots, seed)
    parent = load_index(path)
    with stoppable(), Progress("shards", len(parent.shards)) as progress:
        index = make_subset(
            parent, folder, rule, name=name, workers=workers, cache=cache_config(cache), report=progress.of
        )
    return subset_summary(index, parent)


def refuse_file(target: Path) -> None:
    """Raise UsageError where the folder to write into is a file, or would lie below one."""
    for path in (target, *target.parents):
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file\n  expected a folder for the set, which is made where there is none")


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM end the block with Preempted, so that nothing half written stays; Ctrl-C does so by itself."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Preempted("stopped by SIGTERM; what is finished is kept, run the same command again to go on")

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def cache_config(folder: str | None) -> CacheConfig:
    """What remote shards are fetched by, into a folder if one is given, as `data.cache` of a recipe says it."""
    if folder is None:
        return CacheConfig()
    return CacheConfig(directory=str(Path(folder).expanduser().absolute()))


def check_set(path: str, *, page: str | None, world: int, workers: int, cache: str | None) -> bool:
    """Print what reading and decoding every sample shows; False where a run would trip over something."""
    report = examine(path, decode=True, page=page, workers=workers, cache=cache)
    print("\n".join(report.lines(world)))
    if page:
        print(f"page: {write_page(report, page, world)}")
    if report.ok:
        return True
    line = "not all of it can be read"
    # Repairing keeps the good samples: without any there is no set to make.
    if report.good:
        line += f"; a set that can: python -m jobs data repair {path} NEW-FOLDER"
    print(line)
    return False


def measure_set(path: str, *, page: str | None, world: int, workers: int, cache: str | None) -> None:
    """Print what headers and labels alone show, and how sizes and classes are spread."""
    report = examine(path, decode=False, page=page, workers=workers, cache=cache)
    print("\n".join(report.lines(world)))
    for name, spread in report.spreads.items():
        # One in a hundred at each end, not the very ends: a single odd image would say nothing of the set.
        low = spread.quantile(0.01)
        high = spread.quantile(0.99)
        print(f"{name}: 1 % {low:g}, median {spread.quantile(0.5):g}, 99 % {high:g}")
    ranked = report.classes.most_common()
    for end, rows in (("most", ranked[:5]), ("least", ranked[::-1][:5])):
        classes = [f"{printable(report.index.class_name(label))} {count:,}" for label, count in rows]
        print(f"{end}: {', '.join(classes)}")
    if page:
        print(f"page: {write_page(report, page, world)}")


def examine(path: str, *, decode: bool, page: str | None, workers: int, cache: str | None) -> Report:
    index = load_index(path)
    # A page that cannot be written is found out now, not after hours of looking.
    if page:
        Path(page).parent.mkdir(parents=True, exist_ok=True)
    with Progress("shards", len(index.shards)) as progress:
        return check(index, decode=decode, workers=workers, report=progress.of, cache=cache_config(cache))


def repair_set(
    path: str, directory: Path, *, unique: bool, name: str | None, workers: int, cache: str | None
) -> list[str]:
    """Pack every good sample into a new set. Raises DataError where that would overwrite the old one."""
    refuse_file(directory)
    index = load_index(path)
    # The shards and their index may lie in two folders; neither may be written into.
    if directory.resolve() in (Path(index.directory), index.tables):
        raise DataError(f"{directory} holds the set that is to be repaired\n  give another folder")
    with stoppable(), Progress("samples", index.samples) as progress:
        repaired = repair(
            index,
            directory,
            unique=unique,
            cache=cache_config(cache),
            name=name or directory.name,
            workers=workers,
            report=progress.packed,
        )
    first, *refused = summary(repaired)
    return [f"{first}; {index.samples - repaired.samples:,} samples left out", *refused]


def summary(index: Index) -> list[str]:
    """Say what a set holds and where it lies, what its classes are called, and what indexing passed over."""
    lines = [
        f"{index.samples:,} samples in {len(index.shards)} shards, {index.classes} classes, "
        f"digest {index.digest[:12]}, in {index.tables}"
    ]
    if index.names:
        lines.append(f"class names: {some(index.names)}")
    lines += Refusals(Counter(index.refused), index.first_refused).lines()
    tried, failed = decoded_samples(index)
    if failed:
        lines.append(f"looked at {tried:,} samples, evenly spread: {failed / tried:.1%} of them are no image")
    return lines
