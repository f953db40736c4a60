"""Write samples into tar shards, with the index as it goes; the same samples always give the same bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

from data.errors import DataError
from data.index import SUFFIX, Index, Journal, Shard, mapped, whole, write_table
from data.sources import Sample
from data.tar import walk


def pack(
    samples: Iterable[Sample],
    directory: str | os.PathLike[str],
    *,
    name: str = "train",
    shard_samples: int = 10_000,
    shard_bytes: int = 1 << 30,
    classes: int | None = None,
) -> Index:
    """Write `<name>-000000.tar` … with at most so many samples and image bytes each, and `<name>.index.json`.

    Safe to kill and run again with the same samples: finished shards are kept. Raises DataError on a label
    ≥ `classes`, on a repeated key inside a shard, and where there are no samples.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    limits = f"{shard_samples} {shard_bytes}"
    with Journal(directory / f"{name}{SUFFIX}", classes, limits) as journal:
        for number, group in enumerate(cut(samples, shard_samples, shard_bytes)):
            shard = f"{name}-{number:06d}.tar"
            path = directory / shard
            if not (path.exists() and journal.has(shard, path.stat().st_size)):
                journal.add(*write_shard(path, group, classes))
        if not journal.records:
            raise DataError(f"{directory}: nothing to pack: the source gave no samples")
        return journal.finish(directory)


def cut(samples: Iterable[Sample], shard_samples: int, shard_bytes: int) -> Iterator[list[Sample]]:
    """Cut a stream of samples where a shard is full."""
    group: list[Sample] = []
    size = 0
    for sample in samples:
        if group and (len(group) == shard_samples or size + len(sample.image) > shard_bytes):
            yield group
            group, size = [], 0
        group.append(sample)
        size += len(sample.image)
    if group:
        yield group


def write_shard(
    path: Path, group: list[Sample], classes: int | None
) -> tuple[Shard, Counter[int], Counter[str]]:
    """Write one tar and its table; owner, times and modes are fixed."""
    from webdataset import TarWriter  # importing it takes a second, and only writing needs it

    seen: set[str] = set()
    counts: Counter[int] = Counter()
    for sample in group:
        if sample.key in seen or not sample.key or "." in sample.key.rpartition("/")[2]:
            raise DataError(
                f"{path.name}: key {sample.key!r} is repeated, empty or has a dot; keys name samples"
            )
        if not sample.labels or min(sample.labels) < 0 or (classes and max(sample.labels) >= classes):
            raise DataError(
                f"{path.name}: sample {sample.key} has labels {list(sample.labels)}, expected one or more of "
                f"0 … {classes - 1 if classes else 'the number of classes'}"
            )
        seen.add(sample.key)
        counts.update(set(sample.labels))
    with whole(path) as file:
        # PAX: its extra headers appear only for names over 100 bytes, so that usual tars stay plain ustar
        writer = TarWriter(
            file, encoder=False, mtime=0, user="patchline", group="patchline", format="PAX_FORMAT"
        )
        for sample in group:
            labels = " ".join(map(str, sample.labels)).encode()
            writer.write({"__key__": sample.key, sample.extension: sample.image, "cls": labels})
        writer.close()
    with open(path, "rb") as file, mapped(file) as tar:
        found = walk(tar, path.name)
        write_table(path.parent, path.name, found.table())
        return Shard(path.name, len(found.rows), len(tar), sha256(tar).hexdigest()), counts, found.refused
