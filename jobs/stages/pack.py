"""Pack images into WebDataset shards with their index: python -m jobs.pack recipe.yaml, or `python -m jobs pack`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from data.errors import DataError
from data.shards.index import load_index
from data.shards.packing import pack
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
        require(self.source == "digits" or self.path is not None, f"source {self.source} needs a path")
        labels = [self.wnids, self.real].count(None)
        require(
            self.source != "imagenet-validation" or labels == 1, "imagenet-validation needs wnids or real, one of them"
        )


@dataclass(frozen=True)
class Config:
    sets: dict[str, SetConfig] = field(default_factory=dict)  # one or more, by name
    shard_samples: int = 10_000  # samples that a shard holds at most
    shard_bytes: int = 1 << 30  # of encoded images that a shard holds at most, unless one alone has more
    restarts: bool = False  # restart markers in JPEGs: the same pixels, cropped faster
    workers: int = 1  # threads that write shards

    RESUME: ClassVar[Tags] = tags(forbid="sets shard_samples shard_bytes restarts", free="workers")

    def __post_init__(self) -> None:
        require(bool(self.sets), "sets are empty: name at least one, for example sets.train.path=…")
        require(self.workers >= 1, f"workers is {self.workers}, expected 1 or more")
        require(self.shard_samples >= 1, f"shard_samples is {self.shard_samples}, expected 1 or more")


DEFAULTS: Config | None = None
INPUTS: tuple[str, ...] = ()


SOURCES: dict[str, Callable[[Any], Iterator[Sample]]] = {
    "folder": class_folders,
    "tars": tars,
    "parquet": image_parquet,
    "imagenet-train": imagenet_train,
    "cifar": cifar,
}


def samples_of(cfg: SetConfig) -> Iterator[Sample]:
    """The source's samples, lazily. Raises DataError where there is nothing at its path."""
    if cfg.source == "digits":
        return digits(train=cfg.split == "train", classes=cfg.keep, image_size=cfg.image_size)
    path = cfg.path or ""
    for needed in filter(None, (path, cfg.root, cfg.wnids, cfg.real)):
        if not Path(needed).exists():
            raise DataError(f"source {cfg.source}: there is nothing at {needed}")
    if cfg.source == "table":
        return path_table(path, cfg.root)
    if cfg.source == "imagenet-validation":
        return imagenet_real(path, cfg.real) if cfg.real else imagenet_validation(path, cfg.wnids or "")
    return SOURCES[cfg.source](cifar_files(cfg) if cfg.source == "cifar" else path)


def cifar_files(cfg: SetConfig) -> list[Path]:
    """The binary version's files of a split: CIFAR-10's data_batch_1 … 5 or test_batch, CIFAR-100's train or test."""
    names = {"train": "data_batch_*.bin train.bin", "test": "test_batch.bin test.bin"}[cfg.split]
    found = sorted(file for name in names.split() for file in Path(cfg.path or "").glob(name))
    if not found:
        raise DataError(f"{cfg.path}: no {names.replace(' ', ' or ')}; take CIFAR's binary version")
    return found


def expected(cfg: SetConfig) -> int | None:
    """About how many samples a source will give, where that is soon known."""
    if cfg.source == "folder":
        return sum(path.is_file() for path in Path(cfg.path or "").rglob("*.*"))
    if cfg.source == "table" and cfg.path and Path(cfg.path).suffix == ".csv" and Path(cfg.path).exists():
        with open(cfg.path, "rb") as file:
            return sum(1 for _ in file) - 1
    if cfg.source == "tars" and (index := Path(cfg.path or "", f"{Path(cfg.path or '').name}.index.json")).exists():
        return load_index(index).samples
    if cfg.source == "cifar":
        return sum(file.stat().st_size for file in cifar_files(cfg)) // 3073  # bytes of a record of CIFAR-10
    return {"imagenet-train": 1_281_167, "imagenet-validation": 50_000}.get(cfg.source)


def run(cfg: Config, context: Context) -> dict[str, Any]:
    """Every set in a folder of its own; safe to kill and run again."""
    found = {}
    for name, one in cfg.sets.items():
        progress = Progress(f"samples of {name}", expected(one), say=context.say, every_s=10.0)

        def report(shards: int, samples: int, progress: Progress = progress) -> None:
            progress(samples, f"{shards} shards")

        index = pack(
            samples_of(one),
            context.directory / name,
            name=name,
            shard_samples=cfg.shard_samples,
            shard_bytes=cfg.shard_bytes,
            classes=one.classes,
            restarts=cfg.restarts,
            workers=cfg.workers,
            report=report,
        )
        found[name] = {"samples": index.samples, "shards": len(index.shards), "digest": index.digest}
        context.say(f"{name}: {index.samples} samples in {len(index.shards)} shards, {index.classes} classes")
    return {"sets": found, "samples_seen": sum(s["samples"] for s in found.values())}
