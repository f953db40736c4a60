"""Look at one tar that is to be indexed: write its table, count its classes, decode a few of its images.

    index_shard(IndexJob(None, "/data", "t.tar", 20480, Path("indexes"), None, ()))
    →   Record(Shard("t.tar", 5, 20480, "13f1…", "77ab…"), {0: 3, 1: 2}, refused "no label": 1, first "k4")

What is passed over is counted by reason (`refusals`). A few samples, evenly spread, are decoded, because a tar whose
offsets and labels are right may still hold pages of errors instead of photographs: `look` says of how many.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from data.checks import printable
from data.errors import DataError
from data.images.decode import MAX_BYTES, BadImage, decode_whole, read_header
from data.index.index import Index
from data.index.names import Names, ids_of, shown, some
from data.index.offsets import write_table
from data.index.refusals import Refusals
from data.index.shard import Shard
from data.index.tar import digest_of_tar, mapped, walk
from data.remote.cache import Cache
from data.shards.journal import Record
from data.shards.labels import parse_labels, text_labels, why_no_label

MAX_CLASSES = 1_000_000  # an id beyond it is taken for a mistake (JFT-300M has 18,291)
LOOKED_AT = 4  # samples of a shard that are decoded
NOT_DECODED = "looked at, and "  # how the reason begins for which one of them is no image


@dataclass(frozen=True)
class IndexJob:
    """One tar to index, for a process of its own."""

    cache: Cache | None  # what fetches it; None where it is here
    directory: str
    name: str
    bytes: int
    output: Path
    classes: int | None
    names: Names


def index_shard(job: IndexJob) -> Record | str:
    """Write one shard's table; returns its record, or what is wrong with it."""
    place = f"{job.directory}/{job.name}"
    try:
        with job.cache.lent(place, job.bytes) if job.cache else open(place, "rb") as file:
            return index_file(file, job)
    # Returned instead of raised, so that the other shards are looked at too.
    except (DataError, OSError) as error:
        return str(error)


def index_file(file: IO[bytes], job: IndexJob) -> Record:
    """Write the table of an open shard; returns its record. Raises DataError where it is no tar, or of a label."""
    with mapped(file) as tar:
        result = walk(tar, job.name)
        table = result.table(tar)
        class_counts = count_classes(tar, table, job, result.refused)
        look_at_images(tar, table, result.refused)
        table_digest = write_table(job.output, job.name, table)
        shard = Shard(job.name, len(table), len(tar), digest_of_tar(tar), table_digest)
    return Record(shard, class_counts, result.refused)


def count_classes(tar: memoryview, table: np.ndarray, job: IndexJob, refused: Refusals) -> Counter[int]:
    """Samples a class; those without a usable label or without an image are counted in `refused`.

    Raises DataError on a label that is beyond the classes or, where the classes have names, is a name of none.
    """
    limit = job.classes or len(job.names) or MAX_CLASSES
    ids = ids_of(job.names)
    counts: Counter[int] = Counter()
    for row in table:
        key = row["key"].decode("utf-8", "replace")
        if not row["image_size"]:
            refused.add("no image", key)
        raw = bytes(tar[row["label"] : row["label"] + row["label_size"]])
        try:
            labels = parse_labels(raw, ids)
        except ValueError:
            check_no_name(raw, job, key)
            # It stays a sample: training replaces it, and counts it as bad.
            refused.add(why_no_label(raw), key)
            continue
        if max(labels) >= limit:
            raise DataError(
                f"{job.name}: sample {printable(key)} has label {max(labels)}, "
                f"but there are {limit} classes (0 … {limit - 1})"
            )
        counts.update(set(labels))  # a label that is repeated counts once
    return counts


def check_no_name(raw: bytes, job: IndexJob, key: str) -> None:
    """Raise DataError where a label is a text that the class list lacks; without a list nobody can tell."""
    names = text_labels(raw)
    if job.names and names:
        raise DataError(
            f"{job.name}: sample {printable(key)} is labelled {shown(names[0])}, which is none of the "
            f"{len(job.names)} class names: {some(job.names)}"
        )


def look_at_images(tar: memoryview, table: np.ndarray, refused: Refusals) -> None:
    """Decode a few samples of a shard, evenly spread, and count in `refused` those that hold no image."""
    for number in looked_at(len(table)):
        row = table[number]
        encoded = bytes(tar[row["image"] : row["image"] + min(int(row["image_size"]), MAX_BYTES + 1)])
        try:
            read_header(encoded)
            decode_whole(encoded)
        except BadImage as error:
            refused.add(f"{NOT_DECODED}{error}", row["key"].decode("utf-8", "replace"))


def looked_at(samples: int) -> list[int]:
    """The numbers of the samples of a shard that are decoded when it is indexed; so few that they cost nothing."""
    count = min(samples, LOOKED_AT)
    return [(2 * number + 1) * samples // (2 * count) for number in range(count)]


def look(index: Index) -> tuple[int, int]:
    """(samples that were decoded when a set was indexed, those of them that hold no image)."""
    tried = sum(len(looked_at(shard.samples)) for shard in index.shards)
    failed = sum(count for reason, count in index.refused.items() if reason.startswith(NOT_DECODED))
    return tried, failed
