"""Make the index of existing WebDataset tars, unchanged: on this machine, or behind URLs, one at a time.

How tars become an index, in order:
1. `local_tars` or `remote_tars` lists them, with the size of each and the folder or URL that holds them all;
2. nothing may be lost: an index of other tars, or a packing that was stopped, in the same place is an error;
3. `index_shard` walks one tar, writes its table and returns its record; several processes, or threads for URLs,
   do so in parallel, and a remote tar is deleted as soon as its record is made;
4. the header and the end of every image are looked at, and a few samples of each tar, evenly spread, are decoded: a tar
   whose offsets and labels are right may still hold pages of errors instead of photographs;
5. the journal keeps the records, so that a killed run goes on, and at the end becomes the index.

    build_index("s3://bucket/train", output="indexes/train")
    →   indexes/train/train.index.json            directory: s3://bucket/train
        indexes/train/train-000000.npy  …         one table a tar
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit

from braceexpand import braceexpand

from data.checks import check_name, printable, redacted
from data.errors import DataError
from data.images.decode import MAX_BYTES, BadImage, decode, read_header
from data.index.document import SUFFIX, image_folders, load_index
from data.index.index import Index, Refusals
from data.index.names import MAX_CLASSES, Names, NoLabel, ids_of, parse_labels, preview
from data.index.shard import SampleRow, table_path, write_table
from data.index.tar import Walk, check_nothing_excluded, mapped, walk
from data.remote.cache import Cache
from data.remote.config import CacheConfig
from data.remote.urls import check_url, list_tars, size_of
from data.shards.journal import IndexJournal, Record
from data.shards.parallel import Progress, in_parallel, setting_at_error

MOST_ERRORS = 20  # shards that are named when they cannot be used
DECODED = 4  # samples of a shard that are decoded
NOT_DECODED = "looked at, and "  # how the reason begins for which a decoded sample is no image
PACKING_SETTING = r"\d+ \d+ (True|False)"  # how the journal of a packing begins, see `packing.pack`


@dataclass(frozen=True)
class TarList:
    """Tars that are to be one set: the folder or URL that holds them, and bytes by name below it."""

    directory: str
    sizes: dict[str, int]


def build_index(
    source: str | os.PathLike[str] | list[str],
    *,
    output: str | os.PathLike[str] | None = None,
    name: str | None = None,
    classes: int | None = None,
    names: Names = (),
    workers: int = 1,
    at: str | None = None,
    report: Progress | None = None,
    cache: CacheConfig | None = None,
    unlabelled: bool = False,
) -> Index:
    """Index existing tars: a folder of them, or a list of paths; or URLs. Safe to kill and run again.

    A URL names a tar, many by `{000..999}` or (but for https) `*`, or a folder; each tar is fetched, looked at and
    forgotten. The JSON and the tables go to `output` (default: beside the shards, where these are here) as
    `<name>.index.json` (default: the folder's name); `at` is the URL that the shards will be read from, where that
    is another one. `names` are those of the classes, in the order of their ids, by which labels that are names are
    read; without them, those of the index of the same tars that this one replaces, and else the texts themselves, in
    the order of the alphabet, where no label is an id. Labels of an `unlabelled` set are not looked at. `report` is
    told how many shards are done, of how many. `cache` says where a tar is kept while it is looked at, and how patient
    fetching is. Raises DataError naming every tar that cannot be used and every label ≥ `classes`, StorageError where
    the storage does not answer.
    """
    # The tars are all here, or all behind URLs.
    sources = list(map(str, source)) if isinstance(source, list) else [str(source)]
    urls = [path for path in sources if "://" in path]
    is_mixed = 0 < len(urls) < len(sources)
    if is_mixed or (urls and output is None):
        raise DataError(f"{redacted(urls[0])}: give URLs alone, and the folder here that the index goes to (--output)")
    if at and "://" in at:
        check_kept(at)

    stopped = threading.Event()
    fetcher = Cache(cache or CacheConfig(), stopped.is_set)
    tars = remote_tars(urls, fetcher, workers, stopped) if urls else local_tars(source)
    name = name or Path(tars.directory).name
    check_name(name, "a set", "give its name: --name train")
    folder = Path(output or tars.directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{SUFFIX}"
    # A set that is indexed again stays the set that it was, with its digest; but names say nothing of other tars that
    # have come to the same place.
    if not names:
        with suppress(DataError):
            before = load_index(path)
            if {shard.name: shard.bytes for shard in before.shards} == tars.sizes:
                names = before.names
    check_tables(path, at or tars.directory, tars.sizes)

    # Where a packing was stopped, not all of its tars are there.
    partial_path = path.with_name(path.name + ".partial")
    packing_setting = ""
    with suppress(OSError, ValueError, KeyError), open(partial_path) as file:
        _, packing_setting = json.loads(file.readline())["setting"]
    if re.fullmatch(PACKING_SETTING, packing_setting):
        raise DataError(
            f"{partial_path}: a packing was stopped here; run the same `jobs pack` again to its end, "
            "or delete this file to index the tars that there are"
        )

    # A shard that was read by other names is read again.
    setting = tars.directory
    if names:
        setting = f"{tars.directory} {sha256(json.dumps(names).encode()).hexdigest()}"
    if unlabelled:
        setting += " unlabelled"
    errors = []
    with IndexJournal(path, classes, setting) as journal:
        jobs = []
        for tar, size in tars.sizes.items():
            if not journal.has(tar, size):
                lender = fetcher if urls else None
                job = IndexJob(lender, tars.directory, tar, folder, classes, names, size, unlabelled)
                jobs.append(partial(index_shard, job))
        # A tar that is here keeps a processor busy; one that is fetched mostly waits, for which threads will do.
        with (
            in_parallel(jobs, workers, report, in_threads=bool(urls)) as results,
            setting_at_error(stopped),
        ):
            for result in results:
                if isinstance(result, Record):
                    journal.add(result)
                else:
                    errors.append(result)
            # Raised when all shards have been looked at: otherwise each run of the command would find one more.
            if errors:
                lines = errors[:MOST_ERRORS]
                if len(errors) > MOST_ERRORS:
                    lines.append(f"… {len(errors)} shards in all")
                raise DataError("\n".join(lines))
        return journal.finish(at or tars.directory, names, tars.sizes)


# ------------------------------------------------------------------------------------------------ one tar


@dataclass(frozen=True)
class IndexJob:
    """One tar to index, for a process of its own."""

    cache: Cache | None  # what fetches it; None where it is here
    directory: str
    name: str
    output: Path
    classes: int | None
    names: Names
    bytes: int
    unlabelled: bool


def index_shard(job: IndexJob) -> Record | str:
    """Write one shard's table; returns its record, or what is wrong with it."""
    place = f"{job.directory}/{job.name}"
    try:
        with job.cache.lent(place, job.bytes) if job.cache else open(place, "rb") as file, mapped(file) as tar:
            result = walk(tar, job.name)
            table = result.table(tar)
            texts = Refusals()
            class_counts: Counter[int] = Counter()
            if not job.unlabelled:
                class_counts = count_classes(tar, result.rows, job, result.refused, texts)
            count_unreadable(tar, result)
            # A few samples, evenly spread, are decoded: whether there are images in the tar at all.
            decoded = min(len(table), DECODED)
            for part in range(decoded):
                row = result.rows[(2 * part + 1) * len(table) // (2 * decoded)]
                encoded = bytes(row.image_in(tar)[: MAX_BYTES + 1])
                try:
                    decode(encoded)
                except BadImage as error:
                    result.refused.add(f"{NOT_DECODED}{error}", row.key)
            file.seek(0)  # a tar that was fetched has just been written
            digest = file_digest(file, "sha256").hexdigest()
            shard = write_table(job.output, table, job.name, len(tar), digest)
            return Record(shard, class_counts, result.refused, texts)
    # Returned instead of raised, so that the other shards are indexed too.
    except (DataError, OSError) as error:
        return str(error)


def count_classes(
    tar: memoryview, rows: Sequence[SampleRow], job: IndexJob, refused: Refusals, texts: Refusals
) -> Counter[int]:
    """Return the samples a class; those without a usable label are counted in `refused`.

    Where nobody knows the names of the classes, labels that are texts are counted in `texts`.

    Raises DataError on a label that is beyond the classes or, where the classes have names, is a name of none.
    """
    limit = job.classes or len(job.names) or MAX_CLASSES
    ids = ids_of(job.names)
    counts: Counter[int] = Counter()
    for row in rows:
        key = row.key.decode("utf-8", "replace")
        try:
            labels = parse_labels(bytes(row.label_in(tar)), ids)
        except NoLabel as error:
            if job.names and error.texts:
                raise DataError(
                    f"{job.name}: sample {printable(key)} is labelled {preview(error.texts[:1])}, which is none of the "
                    f"{len(job.names)} class names: {preview(job.names)}"
                ) from None
            # Without a class list the texts of all shards tell, in the end, whether they are names.
            if error.are_names:
                for text in set(error.texts):
                    texts.add(text, key)
            # It stays a sample: training replaces it, and counts it as bad.
            else:
                refused.add(error.reason, key)
            continue
        if max(labels) >= limit:
            raise DataError(
                f"{job.name}: sample {printable(key)} has label {max(labels)}, "
                f"but there are {limit} classes (0 … {limit - 1})"
            )
        counts.update(set(labels))  # a label that is repeated counts once
    return counts


def count_unreadable(tar: memoryview, result: Walk) -> None:
    """Count as refused the samples whose image has no header or no end, or is too large, by the reader's reasons.

    They stay samples: training replaces them, and counts them as bad.
    """
    for row in result.rows:
        try:
            read_header(bytes(row.image_in(tar)[: MAX_BYTES + 1]))
        except BadImage as error:
            result.refused.add(str(error), row.key)


def decoded_samples(index: Index) -> tuple[int, int]:
    """Return (samples that were decoded when a set was indexed, those of them that hold no image)."""
    tried = 0
    for shard in index.shards:
        tried += min(shard.samples, DECODED)
    failed = 0
    for reason, count in index.refused.counts.items():
        if reason.startswith(NOT_DECODED):
            failed += count
    return tried, failed


# ------------------------------------------------------------------------------------- what is refused


def check_tables(path: Path, directory: str, shards: Iterable[str]) -> None:
    """Raise DataError where two shards would share a table, or one would replace that of other tars."""
    # Tables have flat names, so two tars of different folders could come to the same one.
    tables = Counter(table_path(path.parent, shard) for shard in shards)
    for table, count in tables.items():
        if count > 1:
            raise DataError(f"two shards would share the table {table.name}; rename one, or index their folders apart")
    for other_path in path.parent.glob(f"*{SUFFIX}"):
        # The index that this one replaces.
        if other_path == path:
            continue
        other = load_index(other_path)
        # These very tars, under another name.
        if other.directory == directory:
            continue
        for shard in other.shards:
            if table_path(path.parent, shard.name) in tables:
                raise DataError(
                    f"{other_path} has a {shard.name} of {other.directory}: its table would go; give another --output"
                )


def check_kept(url: str) -> None:
    """Raise DataError unless a URL may be read, and be written into an index."""
    check_url(url)
    if not urlsplit(url).hostname:
        raise DataError(f"{redacted(url)}: names no bucket or host, expected one, as in s3://bucket/train")
    if redacted(url) != url:
        raise DataError(f"{redacted(url)}: a key in the URL would stay in the index; give it by the environment")
    if "//" in url.partition("://")[2]:
        raise DataError(f"{url}: two slashes in a row are one to some clients; keep the shards under another key")


# ------------------------------------------------------------------------------------- which tars there are


def local_tars(source: str | os.PathLike[str] | list[str]) -> TarList:
    """List the tars of a folder, or those that are named; raises DataError where there are none, or one is missing."""
    if not isinstance(source, list):
        check_nothing_excluded(source)
        paths = sorted(Path(source).glob("[!.]*.tar"))
    else:
        paths = list(map(Path, source))
    if not paths:
        if isinstance(source, list):
            reason = "no *.tar is named"
        elif Path(source).is_dir():
            reason = "no *.tar here"
        elif Path(source).exists():
            reason = "a file that is no *.tar"
        else:
            reason = "there is no such folder"
        way_out = "; name the folder that holds the shards"
        if not isinstance(source, list) and image_folders(Path(source)):
            shards = quote(f"{source}-shards")
            way_out = f"\n  images are packed into some: python -m jobs pack folder {quote(str(source))} {shards}"
        raise DataError(f"{source}: {reason}{way_out}")
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"missing, {len(missing)} of {len(paths)} shards: {', '.join(missing[:5])}")

    # Resolved, or a `..` or a link would hide which folder they have in common.
    paths = list(map(Path.resolve, paths))
    tars = TarList(os.path.commonpath({path.parent for path in paths}), {})
    for path in paths:
        tars.sizes[str(path.relative_to(tars.directory))] = path.stat().st_size
    return tars


def remote_tars(urls: Sequence[str], cache: Cache, workers: int, stopped: threading.Event) -> TarList:
    """List the tars behind URLs, with the sizes that the storage tells; raises DataError where there are none.

    Each URL names one tar, several by a `{000..999}` or a `*`, or a folder. `stopped` ends the cache's patience.
    """
    timeout_s = cache.cfg.timeout_s
    sizes: dict[str, int] = {}  # URL → bytes
    named: list[str] = []  # tars that the user names one by one
    for pattern in urls:
        for url in braceexpand(pattern):
            check_kept(url)
            if url.endswith(".tar") and "*" not in url:
                named.append(url)
            else:
                sizes.update(cache.patiently(url, partial(list_tars, url, timeout_s)))
    # Asking for a size is one short request, most of which is waiting.
    with ThreadPoolExecutor(4 * workers) as pool, setting_at_error(stopped):
        requests = {url: pool.submit(cache.patiently, url, partial(size_of, url, timeout_s)) for url in named}
        for url, request in requests.items():
            sizes[url] = request.result()
    if not sizes:
        raise DataError(f"{', '.join(urls)}: no *.tar there")

    # The longest folder that holds all, by whole folders and not by letters: `…/train-0` is no folder.
    shared: list[str] = []  # scheme, nothing, bucket or host, folders
    for parts in zip(*(url.split("/")[:-1] for url in sizes), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    # An index needs the bucket or host to find its shards.
    if len(shared) < 3:
        raise DataError("shards of several buckets or hosts need an index each; data.mixture trains on them together")

    tars = TarList("/".join(shared), {})
    for url, bytes_there in sizes.items():
        tars.sizes[url.removeprefix(tars.directory + "/")] = bytes_there
    return tars
