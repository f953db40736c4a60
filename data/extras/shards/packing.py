"""Pack samples into tar shards and index them; equal samples always result in byte-identical shards.

How samples become a data set, in order:
1. `group_samples` splits the stream of samples into groups, one per shard;
2. `is_done` compares each group with the shard of an earlier, killed run; a matching shard is not written again;
3. `write_shard` checks keys and labels, and writes each tar with its table, in several threads;
4. the journal records every finished shard in order, and finally becomes the index.

A data set with an index is finished and does not change: `restore` compares it with the samples, and writes missing or
damaged shards again. Different samples raise an error.

    pack(digits(True), "shards/digits", name="train", shard_samples=500)
    →   train-000000.tar  train-000000.npy     500 samples: digit0000.jpg, digit0000.cls, …
        train-000001.tar  train-000001.npy     500 samples
        train-000002.tar  train-000002.npy     the remaining samples
        train.index.json
"""

from __future__ import annotations

import ctypes
import os
import shlex
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import file_digest, sha256
from pathlib import Path

import numpy as np

from data.checks import check_name, printable
from data.errors import DataError, Preempted
from data.extras.shards.indexing import count_unreadable
from data.extras.shards.journal import IndexJournal, Record
from data.extras.shards.parallel import Progress, set_on_error
from data.extras.sources.numbering import PAIRS, are_pairs
from data.extras.sources.refusals import Refusals
from data.extras.sources.samples import Sample
from data.extras.sources.tar_offsets import MAX_KEY, mapped, walk
from data.files import atomic_file
from data.images.decode import BadImage, library, read_header
from data.index.document import SUFFIX, load_index
from data.index.index import Index, digest_of
from data.index.names import MAX_CLASSES, Names
from data.index.shard import Shard, table_path, write_table

JPEG_START = b"\xff\xd8"
MAX_SHOWN = 80  # characters of a too long key in a message


def pack(
    samples: Iterable[Sample],
    directory: str | os.PathLike[str],
    *,
    name: str = "train",
    shard_samples: int = 10_000,
    shard_bytes: int = 1 << 30,
    classes: int | None = None,
    names: Names = (),
    restarts: bool = False,
    workers: int = 1,
    report: Progress | None = None,
) -> Index:
    """Write samples to shards, `<name>-000000.tar` and so on, and their index to `<name>.index.json`.

    A shard has at most `shard_samples` samples and `shard_bytes` bytes of images. `names` are class names in the order
    of their ids. `restarts` adds restart markers to JPEGs (`add_restarts`): equal pixels, faster crops. `report`
    is called with the number of finished shards and the number of finished samples. The command can be killed and run
    again with the same samples; finished shards are kept. Raises DataError for a label ≥
    `classes` (None: ≥ a million), for a repeated key in a shard, if there are no samples, or if a finished data set has
    different samples.
    """
    check_name(name, "a set", "give its name: --name train")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    setting = f"{shard_samples} {shard_bytes} {restarts}"
    if restarts:
        # Compile it before the threads start, each of which would otherwise compile it.
        require_binding()
    stopped = threading.Event()
    if (directory / f"{name}{SUFFIX}").exists():
        finished = load_index(directory / f"{name}{SUFFIX}")
        groups = group_samples(samples, shard_samples, shard_bytes)
        return restore(finished, directory, groups, classes, names, restarts, report)
    with (
        IndexJournal(directory / f"{name}{SUFFIX}", classes, setting) as journal,
        ThreadPoolExecutor(workers) as pool,
        set_on_error(stopped),
    ):
        # Start all threads now: they would otherwise start with their first job, and Python 3.11 prints a traceback if
        # an exception such as a stop arrives during the start of a thread.
        together = threading.Barrier(workers)
        for _ in range(workers):
            pool.submit(together.wait)
        running: deque[Future[Record]] = deque()
        shard_names: dict[str, None] = {}  # names in order, used as an ordered set
        finished_samples = 0
        for group in group_samples(samples, shard_samples, shard_bytes):
            path = directory / f"{name}-{len(shard_names):06d}.tar"
            record = journal.records.get(path.name)
            if record is None or not is_done(record.shard, path, group, restarts):
                running.append(pool.submit(write_shard, path, group, classes, restarts, stopped))
            shard_names[path.name] = None
            finished_samples += len(group)
            # Limit memory to one group per thread, and write the journal in the order of the shards.
            while len(running) >= workers:
                journal.add(running.popleft().result())
            if report:
                report(len(shard_names) - len(running), finished_samples)
        # All samples are read, but the last shards are still being written.
        while running:
            journal.add(running.popleft().result())
        if not shard_names:
            raise DataError(f"{directory}: there is nothing to pack, because the source has no samples")
        counts: Counter[int] = Counter()
        for shard_name in shard_names:
            counts.update(journal.records[shard_name].class_counts)
        if not names and are_pairs([counts[label] for label in range(len(counts))], finished_samples):
            raise DataError(f"{directory}: {PAIRS}")

        return journal.finish(directory, names, shard_names)


def group_samples(samples: Iterable[Sample], shard_samples: int, shard_bytes: int) -> Iterator[list[Sample]]:
    """Split a stream of samples into groups, one per shard."""
    group: list[Sample] = []
    group_bytes = 0
    for sample in samples:
        is_full = len(group) == shard_samples or group_bytes + sample.size > shard_bytes
        # A sample larger than the limit gets a separate shard.
        if group and is_full:
            yield group
            group = []
            group_bytes = 0
        group.append(sample)
        group_bytes += sample.size
    if group:
        yield group


# ------------------------------------------------------------------------------- shards of an earlier run


def is_done(shard: Shard, path: Path, group: Sequence[Sample], restarts: bool) -> bool:
    """Return whether a finished shard exists and holds exactly these samples, byte for byte."""
    if not path.exists() or path.stat().st_size != shard.bytes:
        return False
    table_file = table_path(path.parent, path.name)
    if not table_file.exists() or sha256(table_file.read_bytes()).hexdigest() != shard.table:
        return False
    table = np.load(table_file, mmap_mode="r", allow_pickle=False)
    if len(table) != len(group):
        return False
    with open(path, "rb") as file, mapped(file) as tar:
        if sha256(tar).hexdigest() != shard.sha256:
            return False
        for row, sample in zip(table, group, strict=True):
            label = tar[row["label"] :][: row["label_size"]]
            if row["key"].decode() != sample.key or bytes(label) != label_of(sample):
                return False
            # Compare bytes, not file times: files of equal names in other folders may be older.
            if tar[row["image"] :][: row["image_size"]] != packed_image(sample, restarts):
                return False
    return True


def restore(
    finished: Index,
    directory: Path,
    groups: Iterable[list[Sample]],
    classes: int | None,
    names: Names,
    restarts: bool,
    report: Progress | None,
) -> Index:
    """Compare a finished data set with the samples, one group per shard; write missing or damaged shards again.

    Raises DataError, before any change, if the data set has other samples, classes or names.
    """
    set_path = directory / f"{finished.name}{SUFFIX}"
    remedy = (
        "\n  a finished data set must not change, because runs may have read it"
        f"\n  use another folder or --name; or delete {finished.name}'s tars and index there if nothing needs them"
    )
    if finished.origin is not None or Path(finished.directory) != directory.resolve():
        raise DataError(
            f"{set_path} is a data set with tars in {finished.directory} (digest {finished.digest}){remedy}"
        )
    # The number of classes that packing these samples would count.
    given = classes or int(np.flatnonzero(finished.class_counts).max(initial=-1)) + 1
    counts = [*finished.class_counts, *[0] * given][:given]
    given_digest = digest_of(finished.shards, counts, names)
    if given_digest != finished.digest:
        raise DataError(
            f"{set_path} is a finished data set with digest {finished.digest}\n"
            "  the class names or number of classes given to this command would change the digest to "
            f"{given_digest}{remedy}"
        )

    expected = {shard.name: shard for shard in finished.shards}
    finished_samples = 0
    for number, group in enumerate(groups):
        path = directory / f"{finished.name}-{number:06d}.tar"
        shard = expected.pop(path.name, None)
        if shard is None:
            raise DataError(
                f"{set_path} is a finished data set without {path.name} (digest {finished.digest}), but the source has "
                f"more samples{remedy}"
            )
        if not is_done(shard, path, group, restarts):
            write_shard(path, group, classes, restarts, threading.Event(), shard)
        finished_samples += len(group)
        if report:
            report(number + 1, finished_samples)
    if expected:
        raise DataError(
            f"{set_path} is a finished data set of {finished.samples:,} samples (digest {finished.digest})\n"
            f"  the source has only {finished_samples:,} samples, so {next(iter(expected))} would be empty{remedy}"
        )
    return finished


# -------------------------------------------------------------------------------------------- a single shard


def write_shard(
    path: Path,
    group: Sequence[Sample],
    classes: int | None,
    restarts: bool,
    stopped: threading.Event,
    expected: Shard | None = None,
) -> Record:
    """Write a tar and its table; the tar's owner, times and modes are constants.

    Raises DataError if a key or label is invalid or the tar differs from the `expected` one, or Preempted if `stopped`
    is set before the tar is complete.
    """
    # Imported here: the import takes a second, and only writing needs it.
    from webdataset import TarWriter

    # Check all samples before writing the first.
    limit = classes or MAX_CLASSES
    keys: set[str] = set()
    class_counts: Counter[int] = Counter()
    for sample in group:
        if sample.key in keys:
            raise DataError(f"{path.name}: two samples have the key {sample.key!r}; give each image a unique name")
        if not sample.key or "." in sample.key.rpartition("/")[2]:
            raise DataError(f"{path.name}: key {sample.key!r} is empty or contains a dot, which starts the extension")
        # The table would not contain the sample.
        key_bytes = len(sample.key.encode())
        if key_bytes > MAX_KEY:
            raise DataError(
                f"{path.name}: the key of a sample has {key_bytes} bytes, expected at most {MAX_KEY}: "
                f"{printable(sample.key[:MAX_SHOWN])}…\n  shorten the names of the file and of its folders"
            )
        keys.add(sample.key)
        if sample.labels is None:
            continue
        # The index counts the samples of every class from 0 on; a single mistyped id would exhaust the memory.
        is_usable = bool(sample.labels) and min(sample.labels) >= 0 and max(sample.labels) < limit
        if not is_usable:
            raise DataError(
                f"{path.name}: sample {printable(sample.key)} has labels {list(sample.labels)}, "
                f"expected one or more of 0 … {limit - 1}"
            )
        class_counts.update(set(sample.labels))  # count a repeated label once

    # Constant mtime, user and group: equal samples must result in equal bytes for any user at any time. PAX adds
    # headers only for names over 100 bytes, so usual tars remain plain ustar.
    fixed = {"encoder": False, "mtime": 0, "user": "patchline", "group": "patchline", "format": "PAX_FORMAT"}
    with atomic_file(path) as temporary:
        with open(temporary, "wb") as new_tar, TarWriter(new_tar, **fixed) as writer:
            for sample in group:
                if stopped.is_set():
                    raise Preempted(f"{path}: stopped before it was complete")
                image = packed_image(sample, restarts)
                members: dict[str, str | bytes] = {"__key__": sample.key, sample.extension: image}
                if sample.labels is not None:
                    members["cls"] = label_of(sample)
                writer.write(members)
        with open(temporary, "rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        if expected is not None and digest != expected.sha256:
            move = shlex.join(["mv", str(path.parent), f"{path.parent}-old"])
            raise DataError(
                f"{path} is a shard of a finished data set, with sha256 {expected.sha256}\n"
                f"  these samples would change its sha256 to {digest}: they differ, or are split differently\n"
                "  a finished data set must not change, because runs may have read it\n"
                f"  use another folder or --name; or move the finished data set away: {move}"
            )
    # Build the table from the tar, as for tars from other tools.
    with open(path, "rb") as file, mapped(file) as tar:
        result = walk(tar, path.name)
        count_unreadable(tar, result)
        shard = write_table(path.parent, result.table(tar), path.name, len(tar), digest)
    return Record(shard, class_counts, result.refused, Refusals())


def packed_image(sample: Sample, restarts: bool) -> bytes:
    """Return a sample's image as stored in a shard."""
    image = sample.read()
    if restarts and image.startswith(JPEG_START) and not is_unmarked_cmyk(image):
        image = add_restarts(image) or image
    return image


def label_of(sample: Sample) -> bytes:
    """Return the content of a sample's .cls file; empty if the sample has no labels."""
    return " ".join(map(str, sample.labels or ())).encode()


# ------------------------------------------------------------------------------------------- restart markers


def require_binding() -> ctypes.CDLL:
    """Return the binding; raises OSError if it cannot be compiled or loaded."""
    binding = library()
    if binding is None:
        raise OSError(
            "restart markers need the compiled JPEG binding; install a C++ compiler, and Pillow from its wheel"
        )
    return binding


def is_unmarked_cmyk(jpeg: bytes) -> bool:
    """Return whether a JPEG has four channels but no Adobe marker: libjpeg would add one, which inverts its colours."""
    try:
        header = read_header(jpeg)
    except BadImage:
        return False
    return header.channels == 4 and not header.has_adobe_marker


def add_restarts(data: bytes) -> bytes | None:
    """Add restart markers inside a JPEG's rows of blocks without changing the pixels; return None if libjpeg warns.

    A decoder can then skip the data outside a crop. Progressive files become sequential, and metadata is removed.
    Raises OSError if the binding is not available.
    """
    binding = require_binding()
    out = ctypes.c_void_p()
    size = ctypes.c_ulong()
    failed = binding.add_restarts(data, len(data), ctypes.byref(out), ctypes.byref(size))
    jpeg = None if failed else ctypes.string_at(out, size.value)
    # C++ allocated the bytes and must free them.
    binding.release(out)
    return jpeg
