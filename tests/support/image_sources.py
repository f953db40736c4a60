"""Sources of images for tests of `jobs new`: digits as class folders, tars, tables and parquet files."""

import csv
from collections.abc import Callable
from pathlib import Path

from webdataset import ShardWriter

from data.extras.sources.samples import Sample, digits
from jobs.__main__ import main
from jobs.resolved_recipe import Campaign
from tests.support.campaigns import load

NAMES = ("null", "eins", "zwei")  # not in alphabetical order


def three_digits(train: bool = True, most: int = 60) -> list[Sample]:
    """Return the first samples of the digits 0, 1 and 2, about a third of each."""
    chosen = [sample for sample in digits(train=train, image_size=16) if sample.labels[0] < 3]
    return chosen[:most]


def name_of(sample: Sample) -> str:
    return NAMES[sample.labels[0]]


def class_folders(folder: Path, samples: list[Sample]) -> Path:
    for sample in samples:
        path = folder / name_of(sample) / f"{sample.key}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.image)
    return folder


def flat_folder(folder: Path, samples: list[Sample]) -> Path:
    folder.mkdir(parents=True)
    for sample in samples:
        (folder / f"Über {sample.key}.jpg").write_bytes(sample.image)
    return folder


def tars(folder: Path, samples: list[Sample], label: Callable[[Sample], dict[str, object]], name: str = "x") -> Path:
    folder.mkdir(exist_ok=True)
    with ShardWriter(f"{folder}/{name}-%02d.tar", maxcount=25, verbose=0) as writer:
        for sample in samples:
            writer.write({"__key__": sample.key, "jpg": sample.image, **label(sample)})
    return folder


def table(folder: Path, samples: list[Sample]) -> Path:
    class_folders(folder / "images", samples)
    with open(folder / "photos.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "label"])
        for sample in samples:
            writer.writerow([f"images/{name_of(sample)}/{sample.key}.jpg", name_of(sample)])
    return folder / "photos.csv"


def table_without_labels(folder: Path, samples: list[Sample]) -> Path:
    path = table(folder, samples)
    path.write_text("".join(f"{line.rpartition(',')[0]}\n" for line in path.read_text().splitlines()))
    return path


def parquet_without_labels(folder: Path, samples: list[Sample]) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    folder.mkdir()
    write_table(pyarrow.table({"image": [sample.image for sample in samples]}), folder / "images.parquet")
    return folder


def parquet(folder: Path, samples: list[Sample]) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    folder.mkdir()
    for name, part in (("train", samples[:40]), ("test", samples[40:])):
        images = [{"bytes": sample.image, "path": None} for sample in part]
        rows = {"image": images, "label": [name_of(sample) for sample in part]}
        write_table(pyarrow.table(rows), folder / f"{name}-00000-of-00001.parquet")
    return folder


def new(place: object, *words: str) -> Campaign:
    """Write a recipe with `jobs new` in the current folder; return its campaign."""
    assert main(["new", str(place), "--output", "recipe.yaml", "--minutes", "0.01", *words]) == 0
    return load(Path("recipe.yaml"), [])
