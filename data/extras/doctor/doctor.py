"""Look at every sample of a set before a run does: what is bad and why, what there is, how it is spread.

How a set is checked, in order:
1. each shard is a job for a process (`check_shard`): is the tar the one that was indexed, and whole? Is its table?
2. every sample of it is looked at: is it what was indexed, is there an image and a label, do both parse, does the image
   decode?
3. a good sample is measured (sides, shape, bytes, class) and its bytes hashed; a few are kept for the page;
4. `Report` adds the shards up, and the hashes of all of them tell how many images come more than once.

    check(index).lines()   →   6 shards  1,197 good samples  1.9 MB of images
                               shard s2.tar: No such file or directory
                               bad: 2 × not a JPEG, PNG or WebP, first k0 of s0.tar
                               …

`repair` packs what is good into a new set, `data.extras.doctor.page` shows a report as one HTML file. A sample counts
as bad exactly where training with enough `max_labels` would replace it.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b, file_digest, sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np

from data.checks import one_line
from data.errors import DataError, StorageError
from data.extras.doctor.report import Report, ShardReport
from data.images.decode import BadImage, decode, decode_whole, is_damaged, read_header
from data.index.index import Index, Refusals
from data.index.shard import sample_digest
from data.index.tar import mapped, walk
from data.remote.cache import Cache
from data.remote.config import CacheConfig
from data.shards.packing import pack
from data.shards.parallel import Progress, in_parallel
from data.shards.reader import read_labels
from data.sources.samples import RawSample, Sample, kind_of

GRID = 24  # images kept for the page
HASH_PARTS = 256  # files that hashes are kept in, so that one of them fits in memory


# ------------------------------------------------------------------------------------------------- check


def check(
    index: Index,
    *,
    decode: bool = True,
    workers: int = 1,
    report: Progress | None = None,
    cache: CacheConfig | None = None,
) -> Report:
    """Look at every sample; without `decode` only at headers and labels. `report` is told shards done, of how many.

    `cache` is what a run would fetch remote shards by. A shard that the storage does not give is a problem of its own.
    """
    jobs = []
    for number in range(len(index.shards)):
        # Shares of the page's images that add up to GRID: none of most shards where there are many.
        shown_before = number * GRID // len(index.shards)
        shown_after = (number + 1) * GRID // len(index.shards)
        shown = shown_after - shown_before
        jobs.append(partial(check_shard, index.single_shard(number), shown, decode, cache or CacheConfig()))
    whole = Report(index, [])
    repeated = Repeated()
    with in_parallel(jobs, workers, report) as shard_reports:
        for shard_report in shard_reports:
            repeated.add(shard_report.hashes)
            whole.add(shard_report)
    whole.duplicates = repeated.count()
    return whole


class Repeated:
    """Counts what comes again among any number of 64-bit hashes, kept on disk in 256 parts by their last byte."""

    def __init__(self) -> None:
        # On disk, because the hashes of 300 million images are 2.4 GB.
        self.folder = TemporaryDirectory(prefix="patchline-hashes-")

    def add(self, hashes: array[int]) -> None:
        """Append hashes to their parts."""
        values = np.array(hashes, np.uint64)
        parts = values % np.uint64(HASH_PARTS)
        # Equal hashes land in the same part, so that each part can be counted by itself.
        for part in np.unique(parts):
            with open(Path(self.folder.name, str(part)), "ab") as file:
                file.write(values[parts == part].tobytes())

    def count(self) -> int:
        """Count the hashes that had come before, and delete the files."""
        repeated = 0
        with self.folder:
            for path in Path(self.folder.name).iterdir():
                values = np.fromfile(path, np.uint64)
                repeated += len(values) - len(np.unique(values))
        return repeated


def check_shard(index: Index, grid: int, decode: bool, cache: CacheConfig) -> ShardReport:
    """Return the report of an index's only shard, with so many samples kept for the page's `grid`."""
    shard = index.shards[0]
    report = ShardReport(shard.name)
    try:
        with open_shard(index, 0, cache) as file, mapped(file) as tar:
            if len(tar) != shard.bytes:
                report.problem = f"{len(tar)} bytes, the index says {shard.bytes}"
            elif sha256(tar).hexdigest() != shard.sha256:
                report.problem = "its sha256 is not the one in the index"
            # Even of a shard that is not what it was, each sample is looked at: some may be worth repairing.
            for sample in samples_of(tar, index, 0, report):
                if not sample.is_intact:
                    report.bad.add("not the bytes that were indexed", sample.key)
                    continue
                try:
                    header = read_header(sample.image)
                    # As many labels as there are classes are allowed: the report says which `max_labels` a run needs.
                    labels: tuple[int, ...] = ()
                    if index.classes > 0:
                        labels = read_labels(sample.label, index, index.classes)
                    if decode:
                        decode_whole(sample.image, header)
                        # libjpeg decodes some damaged files with no more than a warning; training uses them, so they
                        # are not bad.
                        if header.kind == "jpeg" and is_damaged(sample.image):
                            report.damaged += 1
                except BadImage as error:
                    report.bad.add(str(error), sample.key)
                    continue
                report.add_good(header, sample.image, labels)
                if len(report.grid) < grid:
                    names = index.names
                    classes = ", ".join(names[label] if label < len(names) else str(label) for label in labels)
                    report.grid.append((f"{sample.key[-24:]}: {classes}", sample.image))
    except OSError as error:
        report.problem = str(error.strerror)
    # What is behind a URL may be gone, be another shard or not answer; the report goes on with the others.
    except (DataError, StorageError) as error:
        before = f"{report.problem}; " if report.problem else ""
        report.problem = f"{before}{one_line(str(error))}"
    return report


def open_shard(index: Index, number: int, cfg: CacheConfig) -> BinaryIO:
    """Return a shard where it is, or from the cache; raises OSError, DataError, StorageError."""
    place = index.location(number)
    if "://" not in place:
        return open(place, "rb")
    shard = index.shards[number]
    cache = Cache(cfg)
    file = cache.opened(place, shard)
    if file_digest(file, "sha256").hexdigest() == shard.sha256:
        return file
    # The copy rotted, not the shard: it is fetched again, as a run would do.
    with file:
        cache.drop(shard, os.fstat(file.fileno()).st_ino)
    return cache.opened(place, shard)


def samples_of(tar: memoryview, index: Index, number: int, report: ShardReport) -> Iterator[RawSample]:
    """Give what can be read of a shard, whole or not; how many samples it has and what it lacks goes into the report.

    Of a subset the table alone says which samples of the tar are its own, the others being held out perhaps: without
    it DataError is raised. Of any other set, a table that cannot be used is the shard's problem.
    """
    of_subset = index.origin is not None
    table: np.ndarray | None = None
    try:
        table = index.table(number)
    except DataError as error:
        if of_subset:
            raise
        report.problem = report.problem or one_line(str(error))
    result = walk(tar, report.name, lenient=True)
    if of_subset:
        assert table is not None, "a subset without its table raises DataError"
        places = set(zip(table["image"].tolist(), table["label"].tolist(), strict=True))
        result.rows = [row for row in result.rows if (row.image, row.label) in places]
        result.refused = Refusals()
    report.samples = len(result.rows)
    report.refused = result.refused
    report.problem = report.problem or result.broken
    digests: dict[tuple[int, int], int] = {}  # by the offsets of image and label, as they were indexed
    if table is not None:
        for entry in table:
            digests[int(entry["image"]), int(entry["label"])] = int(entry["digest"])

    for row in result.rows:
        image = bytes(row.image_in(tar))
        label = bytes(row.label_in(tar))
        indexed = digests.get((row.image, row.label))
        is_intact = indexed is None or indexed == sample_digest(image, label)
        yield RawSample(row.key.decode("utf-8", "replace"), image, label, is_intact)


# ------------------------------------------------------------------------------------------------ repair


def repair(
    index: Index,
    directory: str | Path,
    *,
    unique: bool = False,
    cache: CacheConfig | None = None,
    **options: Any,
) -> Index:
    """Pack every good sample into a new set in another folder; with `unique`, each image once.

    Missing shards are left out, of short ones what stands before the cut is kept. `cache` is what a run would fetch
    remote shards by; where the storage does not answer, StorageError is raised. `options` go to `pack`.
    Raises DataError, before anything is packed, where a subset has lost a table: nobody knows its samples without.
    """
    if index.origin is not None:
        for number in range(len(index.shards)):
            index.table(number)
    options.setdefault("classes", index.classes or None)
    options.setdefault("names", index.names)
    return pack(good_samples(index, unique, cache or CacheConfig()), directory, **options)


def good_samples(index: Index, unique: bool, cache: CacheConfig) -> Iterator[Sample]:
    """Give every sample of a set that is whole and can be decoded; with `unique`, each image once."""
    digests: set[bytes] = set()  # of the images so far, if they must be unique
    for number, shard in enumerate(index.shards):
        try:
            file = open_shard(index, number, cache)
        # Repairing excludes a shard that cannot be read, and keeps the others.
        except (OSError, DataError):
            continue
        times_seen: Counter[str] = Counter()
        with file, mapped(file) as tar:
            report = ShardReport(shard.name)
            for key, image, raw_labels, is_intact in samples_of(tar, index, number, report):
                if not is_intact:
                    continue
                try:
                    decode(image)
                    labels = None
                    if index.classes > 0:
                        labels = read_labels(raw_labels, index, index.classes)
                except BadImage:
                    continue
                if unique:
                    # 16 bytes here and 8 in the report: there a chance match is a wrong count, here a lost image.
                    digest = blake2b(image, digest_size=16).digest()
                    if digest in digests:
                        continue
                    digests.add(digest)
                # A key may come twice in a tar that others made; in ours each names one sample.
                times_seen[key] += 1
                if times_seen[key] > 1:
                    key = f"{key}-{times_seen[key]}"
                yield Sample(f"{Path(shard.name).stem}/{key}", image, labels, kind_of(image))
