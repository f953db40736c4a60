"""Pack images into WebDataset shards with their index, as a stage (`python -m jobs pack` packs a single set)."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from data.checks import at_least, check_name
from data.errors import DataError
from data.shards.index import SUFFIX, load_index, table_name
from data.shards.packing import pack
from data.shards.reader import MOST_LINES, problem_of
from data.shards.sources import (
    Sample,
    cifar,
    class_folders,
    digits,
    image_parquet,
    imagenet_real,
    imagenet_train,
    imagenet_validation,
    path_table,
    tars,
)
from jobs.context import Context
from jobs.progress import Progress
from pipeline.config import Tags, require, tags
from pipeline.handover import DONE


@dataclass(frozen=True)
class SetConfig:
    """One set of shards and where its images come from."""

    source: Literal[
        "folder",  # one sub-folder a class
        "table",  # CSV or parquet with columns path and label
        "tars",  # a folder of WebDataset tars, img2dataset's too
        "parquet",  # Hugging Face image parquet: a file, or a folder of them
        "imagenet-train",  # ILSVRC2012_img_train.tar
        "imagenet-validation",  # ILSVRC2012_img_val.tar, with wnids or real
        "cifar",  # the folder of the binary version
        "digits",  # scikit-learn's, which need no path
    ] = "folder"
    path: str | None = None  # the file or folder that the source reads; digits need none
    root: str | None = None  # table: what its paths are relative to; None: its own folder
    wnids: str | None = None  # imagenet-validation: text file of one wnid a line
    real: str | None = None  # imagenet-validation: real.json of Beyer et al. 2020, all labels of each image
    split: Literal["train", "test"] = "train"  # cifar, digits
    keep: list[int] | None = None  # digits: classes to keep
    image_size: int = 32  # digits: pixels
    classes: int | None = None  # labels must be below; None: as many as are found

    RESUME: ClassVar[Tags] = tags(forbid="source path root wnids real split keep image_size classes")

    def __post_init__(self) -> None:
        at_least(self, 1, "image_size classes")
        require(min(self.keep or [0]) >= 0, f"keep is {self.keep}, expected classes from 0 on")
        require(self.source == "digits" or self.path is not None, f"source {self.source} needs a path")
        if self.source == "imagenet-validation":
            has_one_source_of_labels = (self.wnids is None) != (self.real is None)
            require(has_one_source_of_labels, "imagenet-validation needs wnids or real, one of them")


@dataclass(frozen=True)
class Config:
    """A pack stage: its sets by name, and how large their shards are."""

    sets: dict[str, SetConfig] = field(default_factory=dict)  # one or more, by name
    shard_samples: int = 10_000  # samples that a shard holds at most
    shard_bytes: int = 1 << 30  # of encoded images that a shard holds at most, unless one alone has more
    restarts: bool = False  # restart markers in JPEGs: the same pixels, cropped faster
    workers: int = 1  # threads that write shards

    RESUME: ClassVar[Tags] = tags(forbid="sets shard_samples shard_bytes restarts", free="workers")

    def __post_init__(self) -> None:
        require(bool(self.sets), "sets are empty: name at least one, for example sets.train.path=…")
        for name in self.sets:
            check_name(name, "a set", "rename it, and what reads it as @stage/set")
        at_least(self, 1, "shard_samples shard_bytes workers")


DEFAULTS: Config | None = None
INPUTS: tuple[str, ...] = ()
FILES = ("sets.*.path", "sets.*.root", "sets.*.wnids", "sets.*.real")


# Sources that need no more than their path.
SOURCES: dict[str, Callable[[str], Iterator[Sample]]] = {
    "folder": class_folders,
    "tars": tars,
    "parquet": image_parquet,
    "imagenet-train": imagenet_train,
}
# CIFAR's binary version has fixed file names and fixed records (cs.toronto.edu/~kriz/cifar.html).
CIFAR_FILES = {"train": ("data_batch_*.bin", "train.bin"), "test": ("test_batch.bin", "test.bin")}
CIFAR10_RECORD_BYTES = 1 + 3 * 32 * 32
# Images of ILSVRC 2012 (Russakovsky et al. 2015, table 2).
IMAGENET_IMAGES = {"imagenet-train": 1_281_167, "imagenet-validation": 50_000}


def missing_sources(stage: str, cfg: Config) -> list[str]:
    """Return a message for every path of the stage's sources at which there is nothing."""
    messages = []
    for name, set_config in cfg.sets.items():
        for key, path in paths_of(set_config).items():
            if not Path(path).exists():
                messages.append(f"{stage}.sets.{name}.{key}: source {set_config.source}: there is nothing at {path}")
    return messages


def paths_of(cfg: SetConfig) -> dict[str, str]:
    """Return the fields that name a file or folder of a source, where they are set."""
    if cfg.source == "digits":
        return {}
    paths = {"path": cfg.path, "root": cfg.root, "wnids": cfg.wnids, "real": cfg.real}
    return {key: path for key, path in paths.items() if path is not None}


def samples_of(cfg: SetConfig) -> Iterator[Sample]:
    """Return the source's samples, read one by one. Raises DataError where there is nothing at its path."""
    if cfg.source == "digits":
        return digits(train=cfg.split == "train", classes=cfg.keep, image_size=cfg.image_size)

    assert cfg.path is not None, "every other source has a path: SetConfig sees to it"
    # The sources are generators, which open nothing before the first sample: a wrong path is better named here.
    for path in paths_of(cfg).values():
        if not Path(path).exists():
            raise DataError(f"source {cfg.source}: there is nothing at {path}")
    if cfg.source == "table":
        return path_table(cfg.path, cfg.root)
    if cfg.source == "imagenet-validation" and cfg.real is not None:
        return imagenet_real(cfg.path, cfg.real)
    if cfg.source == "imagenet-validation":
        assert cfg.wnids is not None, "either wnids or real: SetConfig sees to it"
        return imagenet_validation(cfg.path, cfg.wnids)
    if cfg.source == "cifar":
        return cifar(cifar_files(cfg))
    return SOURCES[cfg.source](cfg.path)


def cifar_files(cfg: SetConfig) -> list[Path]:
    """Return the files of a split in the binary version: CIFAR-10's data_batch_1 … 5 or test_batch, CIFAR-100's own."""
    folder = Path(cfg.path or "")
    patterns = CIFAR_FILES[cfg.split]
    files: list[Path] = []
    for pattern in patterns:
        files.extend(folder.glob(pattern))
    if not files:
        raise DataError(f"{cfg.path}: no {' or '.join(patterns)}; take CIFAR's binary version")
    return sorted(files)


def expected_samples(cfg: SetConfig) -> int | None:
    """Estimate how many samples a source will give, for the progress line; None where that takes long to know."""
    path = Path(cfg.path or "")
    if cfg.source == "folder":
        return sum(file.is_file() for file in path.rglob("*.*"))
    if cfg.source == "table" and path.suffix == ".csv" and path.exists():
        with open(path, "rb") as file:
            # A field in quotes may hold a line break; for a progress line the count is near enough.
            lines = sum(1 for _ in file)
        return lines - 1  # the header
    if cfg.source == "tars":
        # Tars without an index would have to be read whole to be counted.
        index_path = path / f"{path.name}.index.json"
        return load_index(index_path).samples if index_path.exists() else None
    if cfg.source == "cifar":
        return sum(file.stat().st_size for file in cifar_files(cfg)) // CIFAR10_RECORD_BYTES
    return IMAGENET_IMAGES.get(cfg.source)


def check_packed(folder: Path, packed: Mapping[str, Mapping[str, Any]], dropped: Sequence[str]) -> None:
    """Raise DataError where an index, table or shard that a finished stage packed is gone, or has another size.

    `packed` is what the stage's done.json says of its sets; shards in `dropped` (`data.drop`) may be lost. The content
    of a shard is compared when it is read.
    """
    problems: dict[Path, str] = {}  # path → what is wrong with it
    unreadable: list[Path] = []  # indexes that packing again would stop at
    for name, record in packed.items():
        index_path = folder / name / f"{name}{SUFFIX}"
        if not index_path.is_file():
            problems[index_path] = "missing"
            continue
        try:
            index = load_index(index_path)
        except DataError:
            problems[index_path] = "torn or altered"
            unreadable.append(index_path)
            continue
        if index.digest != record["digest"]:
            problems[index_path] = "of another set than was packed"
            continue
        for number, shard in enumerate(index.shards):
            place = index.location(number)
            if any(f"/{place}".endswith(f"/{name}") for name in dropped):
                continue
            problem = problem_of(place, shard)
            if problem:
                problems[Path(place)] = problem
            table = index.tables / table_name(shard.name)
            if not table.is_file():
                problems[table] = "missing"
    if not problems:
        return

    # A lost disk takes thousands of shards with it: the message names a few and counts the rest.
    lines = [f"{folder.name} has packed {len(problems)} files that cannot be used:"]
    for path in list(problems)[:MOST_LINES]:
        lines.append(f"  {path}: {problems[path]}")
    if len(problems) > MOST_LINES:
        lines.append(f"  … and {len(problems) - MOST_LINES} more")
    removal = shlex.join(["rm", "-f", *map(str, unreadable), str(folder / DONE)])
    lines.append("  expected the set as the stage packed it")
    lines.append(f"  bring them back from a copy, or {removal}")
    lines.append("  and run its recipe again: the stage packs the same set anew")
    raise DataError("\n".join(lines))


def run(cfg: Config, context: Context) -> dict[str, Any]:
    """Pack every set into a folder of its own; safe to kill and to run again."""
    packed = {}
    samples_seen = 0
    for name, set_config in cfg.sets.items():
        progress = Progress(f"samples of {name}", expected_samples(set_config), say=context.say, every_s=10.0)

        # A default binds the progress of this set now; the name means another one in the next round.
        def report(shards: int, samples: int, progress: Progress = progress) -> None:
            progress(samples, f"{shards} shards")

        # A set whose shards are there already, whole, is not written again: this is how the stage is resumed.
        index = pack(
            samples_of(set_config),
            context.directory / name,
            name=name,
            shard_samples=cfg.shard_samples,
            shard_bytes=cfg.shard_bytes,
            classes=set_config.classes,
            restarts=cfg.restarts,
            workers=cfg.workers,
            report=report,
        )
        packed[name] = {"samples": index.samples, "shards": len(index.shards), "digest": index.digest}
        samples_seen += index.samples
        context.say(f"{name}: {index.samples} samples in {len(index.shards)} shards, {index.classes} classes")
    return {"sets": packed, "samples_seen": samples_seen}
