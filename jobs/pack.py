"""Pack images into WebDataset shards with their index: python -m jobs.pack recipe.yaml, or `python -m jobs pack`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import data
from jobs.stage import Context
from pipeline.config import Tags, require, tags


@dataclass(frozen=True)
class SetConfig:
    """One set of shards and where its images come from."""

    source: Literal["digits", "folder", "table"] = "folder"
    path: str | None = None  # folder: one sub-folder a class; table: CSV or parquet with path and label
    split: Literal["train", "test"] = "train"  # digits
    keep: list[int] | None = None  # digits: classes to keep
    image_size: int = 32  # digits: pixels
    classes: int | None = None  # labels must be below; None: as many as are found

    RESUME: ClassVar[Tags] = tags(forbid="source path split keep image_size classes")

    def __post_init__(self) -> None:
        require(self.source == "digits" or self.path is not None, f"source {self.source} needs a path")


@dataclass(frozen=True)
class Config:
    sets: dict[str, SetConfig] = field(default_factory=dict)
    shard_samples: int = 10_000
    shard_bytes: int = 1 << 30

    RESUME: ClassVar[Tags] = tags(forbid="sets shard_samples shard_bytes")

    def __post_init__(self) -> None:
        require(bool(self.sets), "sets are empty: name at least one, for example sets.train.path=…")
        require(self.shard_samples >= 1, f"shard_samples is {self.shard_samples}, expected 1 or more")


DEFAULTS: Config | None = None
INPUTS: tuple[str, ...] = ()


def samples_of(cfg: SetConfig) -> Iterator[data.Sample]:
    """The source's samples, lazily."""
    if cfg.source == "digits":
        return data.digits(train=cfg.split == "train", classes=cfg.keep, image_size=cfg.image_size)
    assert cfg.path is not None
    return data.class_folders(cfg.path) if cfg.source == "folder" else data.path_table(cfg.path)


def run(cfg: Config, context: Context) -> dict[str, Any]:
    """Every set in a folder of its own; safe to kill and run again."""
    found = {}
    for name, one in cfg.sets.items():
        index = data.pack(
            samples_of(one),
            context.directory / name,
            name=name,
            shard_samples=cfg.shard_samples,
            shard_bytes=cfg.shard_bytes,
            classes=one.classes,
        )
        found[name] = {"samples": index.samples, "shards": len(index.shards), "digest": index.digest}
        context.say(f"{name}: {index.samples} samples in {len(index.shards)} shards, {index.classes} classes")
    return {"sets": found, "samples_seen": sum(s["samples"] for s in found.values())}


if __name__ == "__main__":
    from jobs.__main__ import run_one

    run_one("pack")
