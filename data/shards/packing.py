"""Write samples into tar shards, with the index as it goes; the same samples always give the same bytes."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.files import whole_file
from data.images.jpeg import add_restarts, require_binding
from data.shards.index import SUFFIX, Index, Journal, Shard, load_index, mapped, table_name, write_table
from data.shards.sources import Sample
from data.shards.tar import walk


def pack(
    samples: Iterable[Sample],
    directory: str | os.PathLike[str],
    *,
    name: str = "train",
    shard_samples: int = 10_000,
    shard_bytes: int = 1 << 30,
    classes: int | None = None,
    restarts: bool = False,
    workers: int = 1,
    report: Callable[[int, int], None] | None = None,
) -> Index:
    """Write `<name>-000000.tar` … with at most so many samples and image bytes each, and `<name>.index.json`.

    `restarts` adds restart markers to JPEGs (see `data.jpeg`): the same pixels, cropped faster. `report` is
    told the shards and samples finished so far. Safe to kill and run again with the same samples: finished
    shards are kept, and those of another set of this name go. Raises DataError on a label ≥ `classes`, a repeated key
    in a shard, or no samples.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    limits = f"{shard_samples} {shard_bytes} {restarts}"
    if restarts:
        require_binding()  # before threads would compile it side by side
    with (
        Journal(directory / f"{name}{SUFFIX}", classes, limits) as journal,
        ThreadPoolExecutor(workers) as pool,
    ):
        running: deque[Future] = deque()
        shards = finished = 0
        for number, group in enumerate(cut(samples, shard_samples, shard_bytes)):
            path = directory / f"{name}-{number:06d}.tar"
            if not is_done(journal, path, group, restarts):
                running.append(pool.submit(write_shard, path, group, classes, restarts))
            shards, finished = number + 1, finished + len(group)
            while len(running) >= workers:
                journal.add(*running.popleft().result())
            if report:
                report(shards - len(running), finished)
        while running:
            journal.add(*running.popleft().result())
        if not shards:
            raise DataError(f"{directory}: nothing to pack: the source gave no samples")
        journal.keep(f"{name}-{number:06d}.tar" for number in range(shards))
        before = load_index(journal.path).shards if journal.path.exists() else ()
        made = journal.finish(directory)
        for old in {shard.name for shard in before} - {shard.name for shard in made.shards}:
            (directory / old).unlink(missing_ok=True)  # of the set that this one replaces
            (directory / table_name(old)).unlink(missing_ok=True)
        return made


def is_done(journal: Journal, path: Path, group: list[Sample], restarts: bool) -> bool:
    """Whether an earlier try finished this very shard, and no label or image of it has been corrected since.

    With restart markers the images are others than were given: then files are judged by their times alone, and
    images in memory are trusted.
    """
    if not (path.exists() and journal.has(path.name, path.stat().st_size)):
        return False
    table = np.load(path.parent / table_name(path.name), mmap_mode="r", allow_pickle=False)
    written = path.stat().st_mtime
    with open(path, "rb") as file, mapped(file) as tar:

        def part(row: np.void, what: str) -> memoryview:
            return tar[row[what] :][: row[f"{what}_size"]]

        def same(row: np.void, sample: Sample) -> bool:
            if (row["key"].decode(), bytes(part(row, "label"))) != (sample.key, label_of(sample)):
                return False
            if isinstance(sample.image, Path):
                return sample.image.stat().st_mtime <= written
            return restarts or part(row, "image") == sample.image

        return len(table) == len(group) and all(map(same, table, group))


def label_of(sample: Sample) -> bytes:
    """The content of its .cls."""
    return " ".join(map(str, sample.labels)).encode()


def cut(samples: Iterable[Sample], shard_samples: int, shard_bytes: int) -> Iterator[list[Sample]]:
    """Cut a stream of samples where a shard is full."""
    group: list[Sample] = []
    size = 0
    for sample in samples:
        if group and (len(group) == shard_samples or size + sample.size > shard_bytes):
            yield group
            group, size = [], 0
        group.append(sample)
        size += sample.size
    if group:
        yield group


def check_samples(shard: str, group: list[Sample], classes: int | None) -> Counter[int]:
    """Samples per class; raises DataError on keys and labels that cannot be."""
    seen: set[str] = set()
    counts: Counter[int] = Counter()
    for sample in group:
        if sample.key in seen:
            raise DataError(f"{shard}: two samples have the key {sample.key!r}; give each image a name of its own")
        if not sample.key or "." in sample.key.rpartition("/")[2]:
            raise DataError(f"{shard}: key {sample.key!r} is empty or has a dot, where the extension would begin")
        if not sample.labels or min(sample.labels) < 0 or (classes and max(sample.labels) >= classes):
            raise DataError(
                f"{shard}: sample {sample.key} has labels {list(sample.labels)}, expected one or more of "
                f"0 … {classes - 1 if classes else 'the number of classes'}"
            )
        seen.add(sample.key)
        counts.update(set(sample.labels))
    return counts


def write_shard(
    path: Path, group: list[Sample], classes: int | None, restarts: bool
) -> tuple[Shard, Counter[int], Counter[str]]:
    """Write one tar and its table; owner, times and modes are fixed."""
    from webdataset import TarWriter  # importing it takes a second, and only writing needs it

    counts = check_samples(path.name, group, classes)
    with whole_file(path) as temporary, open(temporary, "wb") as new_tar:
        # PAX: its extra headers appear only for names over 100 bytes, so that usual tars stay plain ustar
        writer = TarWriter(new_tar, encoder=False, mtime=0, user="patchline", group="patchline", format="PAX_FORMAT")
        for sample in group:
            image = sample.read()
            if restarts and image[:2] == b"\xff\xd8":
                image = add_restarts(image)
            writer.write({"__key__": sample.key, sample.extension: image, "cls": label_of(sample)})
        writer.close()
    with open(path, "rb") as file, mapped(file) as tar:
        found = walk(tar, path.name)
        write_table(path.parent, path.name, found.table())
        return Shard(path.name, len(found.rows), len(tar), sha256(tar).hexdigest()), counts, found.refused
