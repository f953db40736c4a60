"""Check every sample of a data set before training, and report bad samples with reasons, statistics, and duplicates.

The check runs in this order:
1. each shard is checked in a worker process (`check_shard`): do the tar and its index table match the index, and are
   both complete?
2. each sample is checked: does its digest match the index, are image and label present, do both parse, does the image
   decode?
3. good samples are measured (sides, shape, bytes, class) and hashed; a few become thumbnails of the HTML page;
4. `Report` combines the shards, and counts duplicate images by the hashes of all shards.

    check(index).lines()   →   6 shards  1,197 good samples  1.9 MB of images
                               shard s2.tar: No such file or directory
                               bad: 2 × not a JPEG, PNG or WebP, first k0 of s0.tar
                               …

`repair` packs the good samples into a new data set, and `data.extras.doctor.page` writes a report as one HTML file. A
sample counts as bad if and only if training, with a sufficient `max_labels`, would replace it.
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
from data.extras.shards.packing import add_restarts, pack
from data.extras.shards.parallel import Progress, in_parallel
from data.extras.sources.refusals import Refusals
from data.extras.sources.samples import RawSample, Sample, kind_of
from data.extras.sources.tar_offsets import mapped, walk
from data.images.decode import BadImage, decode, decode_whole, library, read_header
from data.index.index import Index
from data.index.shard import sample_digest
from data.reader import read_labels
from data.remote.cache import Cache
from data.remote.config import CacheConfig

GRID = 24  # number of thumbnails on the page
HASH_PARTS = 256  # files that the hashes are split into, so that each file fits in memory


# ------------------------------------------------------------------------------------------------- check


def check(
    index: Index,
    *,
    decode: bool = True,
    workers: int = 1,
    report: Progress | None = None,
    cache: CacheConfig | None = None,
) -> Report:
    """Check every sample of a data set and return the report.

    With `decode=False`, only image headers and labels are checked. `report` is called with the number of finished
    shards and the total. `cache` configures downloads of remote shards, as in training. If a shard cannot be
    downloaded, the report lists this as a problem of the shard.
    """
    jobs = []
    for number in range(len(index.shards)):
        # Split the GRID thumbnails evenly over the shards; if there are more shards than thumbnails, most get none.
        shown_before = number * GRID // len(index.shards)
        shown_after = (number + 1) * GRID // len(index.shards)
        shown = shown_after - shown_before
        jobs.append(partial(check_shard, index.single_shard(number), shown, decode, cache or CacheConfig()))
    set_report = Report(index, [])
    duplicates = DuplicateCounter()
    with in_parallel(jobs, workers, report) as shard_reports:
        for shard_report in shard_reports:
            duplicates.add(shard_report.hashes)
            set_report.add(shard_report)
    set_report.duplicates = duplicates.count()
    return set_report


class DuplicateCounter:
    """Count duplicates among any number of 64-bit hashes, stored on disk in 256 files by their last byte."""

    def __init__(self) -> None:
        # On disk because the hashes of 300 million images take 2.4 GB.
        self.folder = TemporaryDirectory(prefix="patchline-hashes-")

    def add(self, hashes: array[int]) -> None:
        """Append each hash to the file for its last byte."""
        values = np.array(hashes, np.uint64)
        parts = values % np.uint64(HASH_PARTS)
        # Equal hashes go to the same file, so each file can be counted separately.
        for part in np.unique(parts):
            with open(Path(self.folder.name, str(part)), "ab") as file:
                file.write(values[parts == part].tobytes())

    def count(self) -> int:
        """Return the number of repeated hashes, and delete the files."""
        duplicates = 0
        with self.folder:
            for path in Path(self.folder.name).iterdir():
                values = np.fromfile(path, np.uint64)
                duplicates += len(values) - len(np.unique(values))
        return duplicates


def check_shard(index: Index, grid: int, decode: bool, cache: CacheConfig) -> ShardReport:
    """Check the shard of a single-shard index and return its report, with up to `grid` thumbnails for the page."""
    shard = index.shards[0]
    report = ShardReport(shard.name)
    try:
        with open_shard(index, 0, cache) as file, mapped(file) as tar:
            if len(tar) != shard.bytes:
                report.problem = f"{len(tar)} bytes, but the index lists {shard.bytes}"
            elif sha256(tar).hexdigest() != shard.sha256:
                report.problem = "sha256 differs from the index"
            # Check the samples even if the shard has changed: `repair` may still save some of them.
            for sample in samples_of(tar, index, 0, report):
                if not sample.is_intact:
                    report.bad.add("bytes changed since indexing", sample.key)
                    continue
                try:
                    header = read_header(sample.image)
                    # Allow as many labels as there are classes: the report prints the `max_labels` that a run needs.
                    labels: tuple[int, ...] = ()
                    if index.classes > 0:
                        labels = read_labels(sample.label, index, index.classes)
                    if decode:
                        decode_whole(sample.image, header)
                        # libjpeg decodes some damaged files with only a warning. Training uses them, so they do not
                        # count as bad.
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
    # A remote shard may be deleted, replaced or unreachable. Report it and continue with the other shards.
    except (DataError, StorageError) as error:
        before = f"{report.problem}; " if report.problem else ""
        report.problem = f"{before}{one_line(str(error))}"
    return report


def open_shard(index: Index, number: int, cfg: CacheConfig) -> BinaryIO:
    """Open a local shard directly, or a remote one through the cache.

    Raises OSError, DataError or StorageError if the shard cannot be read.
    """
    place = index.location(number)
    if "://" not in place:
        return open(place, "rb")
    shard = index.shards[number]
    cache = Cache(cfg)
    file = cache.opened(place, shard)
    if file_digest(file, "sha256").hexdigest() == shard.sha256:
        return file
    # The cached copy is corrupt: download the shard again, as training would.
    with file:
        cache.drop(shard, os.fstat(file.fileno()).st_ino)
    return cache.opened(place, shard)


def samples_of(tar: memoryview, index: Index, number: int, report: ShardReport) -> Iterator[RawSample]:
    """Yield the readable samples of a shard, even if it is truncated; add their number and all problems to `report`.

    Only a subset's table records which samples in the tar belong to the subset (the others may be held out), so an
    unreadable table raises DataError. For any other set, an unreadable table is reported as a problem of the shard.
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
    digests: dict[tuple[int, int], int] = {}  # (image offset, label offset) → digest in the index
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
    """Pack every good sample into a new data set in another folder; with `unique`, pack each image only once.

    Missing shards are skipped, and truncated shards contribute their complete samples. `cache` configures downloads of
    remote shards, as in training. `options` are passed to `pack`. Raises StorageError if the storage does not respond.
    Raises DataError, before packing starts, if a subset has lost a table, which is the only record of its samples.
    """
    if index.origin is not None:
        for number in range(len(index.shards)):
            index.table(number)
    options.setdefault("classes", index.classes or None)
    options.setdefault("names", index.names)
    return pack(good_samples(index, unique, cache or CacheConfig()), directory, **options)


def good_samples(index: Index, unique: bool, cache: CacheConfig) -> Iterator[Sample]:
    """Yield every intact sample whose image decodes; with `unique`, yield each image only once."""
    digests: set[bytes] = set()  # digests of the images yielded so far, if `unique`
    for number, shard in enumerate(index.shards):
        try:
            file = open_shard(index, number, cache)
        # Skip an unreadable shard and repair the others.
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
                    # 16 bytes here but 8 in the report: a collision there is a wrong count, here it loses an image.
                    digest = blake2b(image, digest_size=16).digest()
                    if digest in digests:
                        continue
                    digests.add(digest)
                # Tars from other tools may repeat a key; in a packed set each key must be unique.
                times_seen[key] += 1
                if times_seen[key] > 1:
                    key = f"{key}-{times_seen[key]}"
                # With the folders of the tar, because tars in different folders may have equal names and keys.
                yield Sample(f"{shard.name.removesuffix('.tar')}/{key}", image, labels, kind_of(image))


def is_damaged(data: bytes) -> bool:
    """Return whether libjpeg decodes this JPEG only with warnings; False if the binding is not available."""
    return library() is not None and add_restarts(data) is None
