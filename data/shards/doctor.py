"""Look at every sample of a set before a run does: what is bad and why, what there is, how it is spread.

`check` reads and decodes everything, `repair` packs what is good into a new set, `data.page` shows it as one
HTML file. A sample counts as bad exactly where training with enough `max_labels` would replace it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np

from data.errors import DataError
from data.images.decode import BadImage, decode_whole, read_header
from data.images.jpeg import is_damaged
from data.shards.cache import Cache, CacheConfig
from data.shards.index import Index, mapped
from data.shards.indexing import run_jobs
from data.shards.labels import read_labels
from data.shards.packing import pack
from data.shards.sources import Sample, kind_of
from data.shards.tar import walk

GRID = 24  # images kept for the page


class Spread(Counter[float]):
    """How often each value of some measure came; a few thousand counters, however many the images."""

    def quantile(self, q: float) -> float:
        """The least value that a part `q` of all does not exceed; raises IndexError where there is none."""
        values = sorted(self)
        reached = np.cumsum([self[value] for value in values])
        return values[int(np.searchsorted(reached, q * reached[-1]))]


@dataclass
class ShardReport:
    """What is in one shard; all but `samples` is of the good ones."""

    name: str
    samples: int = 0
    problem: str = ""  # of the shard as a whole: missing, short, changed, no tar
    bad: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    classes: Counter[int] = field(default_factory=Counter)
    most_labels: int = 0  # of one sample
    damaged: int = 0  # JPEGs that decode, with warnings
    first_bad: dict[str, str] = field(default_factory=dict)  # reason → the first key
    good: int = 0
    size: int = 0  # bytes of their images
    spreads: dict[str, Spread] = field(default_factory=dict)
    hashes: array = field(default_factory=lambda: array("Q"))  # of the encoded images, until they are compared
    grid: list[tuple[str, bytes]] = field(default_factory=list)  # key and classes, image


@dataclass
class Report:
    """What is in a set."""

    index: Index
    shards: list[ShardReport]
    classes: Counter[int] = field(default_factory=Counter)
    spreads: dict[str, Spread] = field(default_factory=dict)  # sides, shape and size of the good images
    duplicates: int = 0  # good samples whose very bytes another one has already

    @property
    def bad(self) -> Counter[str]:
        return sum((shard.bad for shard in self.shards), Counter())

    @property
    def good(self) -> int:
        return sum(shard.good for shard in self.shards)

    def add(self, shard: ShardReport) -> None:
        """Keep a shard's report, its counters only as part of the whole set's."""
        self.classes.update(shard.classes)
        for name, spread in shard.spreads.items():
            self.spreads.setdefault(name, Spread()).update(spread)
        shard.classes, shard.spreads, shard.hashes = Counter(), {}, array("Q")
        self.shards.append(shard)

    @property
    def ok(self) -> bool:
        """Whether a run would read every sample."""
        return not self.bad and not any(shard.problem for shard in self.shards)

    def lines(self, world: int = 1) -> list[str]:
        """The report for a terminal: one fact a line, always in the same order; advice for so many workers."""
        classes, size = self.classes, sum(shard.size for shard in self.shards)
        found = [f"{len(self.shards)} shards  {self.good:,} good samples  {size / 1e6:,.1f} MB of images"]
        found += [f"shard {shard.name}: {shard.problem}" for shard in self.shards if shard.problem]
        for reason, count in self.bad.most_common():
            shard = next(shard for shard in self.shards if reason in shard.bad)
            found.append(f"bad: {count} × {reason}, first {shard.first_bad[reason]} of {shard.name}")
        for what, count in sum((shard.refused for shard in self.shards), Counter()).most_common():
            found.append(f"refused: {count} × {what}")
        most = max((shard.most_labels for shard in self.shards), default=1)
        if most > 1:
            found.append(f"labels: up to {most} a sample; a run needs data.max_labels={most}, or replaces the others")
        found.append(f"damaged but decodable: {sum(shard.damaged for shard in self.shards)}")
        found.append(f"duplicates: {self.duplicates}")
        empty = [c for c in range(self.index.classes) if not classes[c]]
        found.append(f"classes: {self.index.classes}, empty {len(empty)}" + (f" (first: {empty[:8]})" if empty else ""))
        if classes:
            counts = sorted(classes.values())
            found.append(f"samples a class: least {counts[0]}, median {counts[len(counts) // 2]}, most {counts[-1]}")
        return found + advice(self.index, world)


def advice(index: Index, world: int = 1) -> list[str]:
    """What would read better, if anything."""
    sizes = np.array([shard.bytes for shard in index.shards])
    found = []
    if len(sizes) > 16 and np.median(sizes) < 32 << 20:
        found.append(f"shards of {np.median(sizes) / 2**20:.0f} MiB are small for a network; 256 MiB – 1 GiB read best")
    if sizes.max(initial=0) > 4 << 30:
        found.append("shards over 4 GiB delay the first batch and the cache; pack with shard_bytes of 1 GiB")
    if world > 1 and len(sizes) < world:
        found.append(f"{len(sizes)} shards for {world} workers: several read one shard, fine on local disks")
    return [f"advice: {line}" for line in found]


def check(
    index: Index, *, decode: bool = True, workers: int = 1, report: Callable[[int, int], None] | None = None
) -> Report:
    """Look at every sample; without `decode` only at headers and labels. `report` is told shards done, of how many."""
    shown = np.diff(np.arange(len(index.shards) + 1) * GRID // max(len(index.shards), 1)).tolist()
    jobs = [
        (replace(index, shards=(shard,), class_counts=()), grid, decode)
        for shard, grid in zip(index.shards, shown, strict=True)
    ]
    found, repeated = Report(index, []), Repeated()
    for shard in run_jobs(check_shard, jobs, workers, report):
        repeated.add(shard.hashes)
        found.add(shard)
    found.duplicates = repeated.count()
    return found


class Repeated:
    """Counts what comes again among any number of 64-bit hashes, kept on disk in 256 parts by their last byte."""

    def __init__(self) -> None:
        self.folder = TemporaryDirectory(prefix="patchline-hashes-")

    def add(self, hashes: array) -> None:
        found = np.array(hashes, np.uint64)
        for part in np.unique(found & np.uint64(255)):
            with open(Path(self.folder.name, str(part)), "ab") as file:
                file.write(found[found & np.uint64(255) == part].tobytes())

    def count(self) -> int:
        """Hashes that came before; this is the end of the files."""
        with self.folder:
            parts = (np.fromfile(path, np.uint64) for path in Path(self.folder.name).iterdir())
            return sum(len(part) - len(np.unique(part)) for part in parts)


def measures(height: int, width: int, size: int) -> dict[str, float]:
    """What is counted of an image, under the names that reports show; coarse enough to repeat."""
    return {
        "height": height,
        "width": width,
        "shorter side": min(height, width),
        "width / height": round(width / height, 2),
        "kB": round(size / 1000, 1),
    }


def check_shard(job: tuple[Index, int, bool]) -> ShardReport:
    """The report of an index's only shard, with so many samples kept for the grid."""
    index, grid, decode = job
    known = index.shards[0]
    report = ShardReport(known.name)
    try:
        with open_shard(index, 0) as file, mapped(file) as tar:
            if len(tar) != known.bytes:
                report.problem = f"{len(tar)} bytes, the index says {known.bytes}"
            elif sha256(tar).hexdigest() != known.sha256:
                report.problem = "its sha256 is not the one in the index"
            for key, image, labels in samples_of(tar, report):
                try:
                    header = read_header(image)
                    found = read_labels(labels, index.classes, index.classes)
                    if decode:
                        decode_whole(image)
                        report.damaged += header.kind == "jpeg" and is_damaged(image)
                except BadImage as error:
                    report.bad[str(error)] += 1
                    report.first_bad.setdefault(str(error), key)
                    continue
                report.classes.update(set(found))
                report.good += 1
                report.most_labels = max(report.most_labels, len(found))
                report.size += len(image)
                for name, value in measures(header.height, header.width, len(image)).items():
                    report.spreads.setdefault(name, Spread())[value] += 1
                report.hashes.frombytes(blake2b(image, digest_size=8).digest())
                if len(report.grid) < grid:
                    report.grid.append((f"{key[-24:]}: {', '.join(map(str, found))}", image))
    except OSError as error:
        report.problem = str(error.strerror)
    except DataError as error:  # of a remote shard: gone, or another one
        report.problem = str(error)
    return report


def open_shard(index: Index, number: int) -> BinaryIO:
    """A shard where it is, or from the cache; raises OSError, DataError, StorageError."""
    place = index.location(number)
    return open(Cache(CacheConfig()).path(place, index.shards[number]) if "://" in place else place, "rb")


def samples_of(tar: memoryview, report: ShardReport) -> Iterator[tuple[str, bytes, bytes]]:
    """(key, image, label) of what can be read of a tar, whole or not."""
    found = walk(tar, report.name, lenient=True)
    report.samples, report.refused = len(found.rows), found.refused
    report.problem = report.problem or found.broken
    for key, image, image_size, label, label_size in found.rows:
        name = key.decode("utf-8", "replace")
        yield name, bytes(tar[image : image + image_size]), bytes(tar[label : label + label_size])


def repair(index: Index, directory: str | Path, *, unique: bool = False, **options: Any) -> Index:
    """Pack every good sample into a new set in another folder; with `unique`, each image once.

    Missing shards are left out, of short ones what stands before the cut is kept. `options` go to `pack`.
    """
    return pack(good_samples(index, unique), directory, **{"classes": index.classes} | options)


def good_samples(index: Index, unique: bool) -> Iterator[Sample]:
    seen: set[bytes] = set()
    for number, shard in enumerate(index.shards):
        try:
            file = open_shard(index, number)
        except (OSError, DataError):
            continue
        with file, mapped(file) as tar:
            keys: Counter[str] = Counter()
            for key, image, raw in samples_of(tar, ShardReport(shard.name)):
                try:
                    read_header(image)
                    decode_whole(image)
                    labels = read_labels(raw, index.classes, index.classes)
                except BadImage:
                    continue
                digest = blake2b(image, digest_size=16).digest()
                if unique and digest in seen:
                    continue
                seen |= {digest} if unique else set()
                keys[key] += 1
                key = key if keys[key] == 1 else f"{key}-{keys[key]}"
                yield Sample(f"{Path(shard.name).stem}/{key}", image, labels, kind_of(image))
