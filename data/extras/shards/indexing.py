"""Index existing WebDataset tars, on this machine or at URLs, without changing them.

How tars become an index, in order:
1. `local_tars` or `remote_tars` lists them with their sizes, and finds their common folder or URL.
2. An index of other tars, or an unfinished packing, in the same place is an error, so that nothing is overwritten.
3. `index_shard` walks a tar, writes its table and returns its record. Several processes (threads for URLs) do this in
   parallel; a remote tar is deleted as soon as its record exists.
4. The header and end of every image are checked, and a few evenly spaced samples of each tar are decoded: a tar with
   valid offsets and labels may still contain error pages instead of photographs.
5. The journal stores the records, so a killed run can resume; at the end it becomes the index.

    build_index("s3://bucket/train", output="indexes/train")
    →   indexes/train/train.index.json            directory: s3://bucket/train
        indexes/train/train-000000.npy  …         one table per tar
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import file_digest, sha256
from io import BufferedRandom, BufferedReader
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile
from urllib.parse import urlsplit

from braceexpand import braceexpand

from data.checks import check_file_name, check_name, check_sha256, printable, redacted
from data.errors import DataError
from data.extras.shards.journal import IndexJournal, Record
from data.extras.shards.parallel import Progress, in_parallel, set_on_error
from data.extras.sources.listing import RemoteFile, list_tars, size_of
from data.extras.sources.numbering import PAIRS, are_pairs
from data.extras.sources.refusals import Refusals
from data.extras.sources.tar_offsets import DOTTED, Walk, check_nothing_excluded, mapped, walk
from data.extras.sources.walk import matching
from data.images.decode import MAX_BYTES, BadImage, decode, read_header
from data.index.document import SUFFIX, image_folders, load_index
from data.index.index import Index
from data.index.names import (
    MAX_CLASSES,
    NO_LABEL,
    NO_NAME,
    NO_TEXT,
    ONE_HOT,
    Names,
    NoLabel,
    ids_of,
    parse_labels,
    preview,
)
from data.index.shard import SampleRow, Shard, table_path, write_table
from data.optional import load_optional
from data.remote.cache import Cache
from data.remote.config import PIECE, CacheConfig
from data.remote.urls import HUB, check_url, refuse_error_page

MAX_ERRORS = 20  # unusable shards that an error lists individually
DECODED = 4  # samples decoded per shard
NOT_DECODED = "looked at, and "  # prefix of the reason if a decoded sample is not an image
LABEL_REASONS = (NO_LABEL, NO_NAME, NO_TEXT, ONE_HOT)  # reasons why a sample has no class
PACKING_SETTING = r"\d+ \d+ (True|False)"  # the setting in a packing's journal, see `packing.pack`


@dataclass(frozen=True)
class TarList:
    """The tars of one data set: their common folder or URL, and {name below it: size in bytes}.

    `digests` are the sha256 digests reported by the store: {name: sha256}.
    """

    directory: str
    sizes: dict[str, int]
    digests: dict[str, str] = field(default_factory=dict)


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
    keep: bool = False,
) -> Index:
    """Index existing tars, given as a folder, a list of paths, or URLs; if interrupted, repeat the call to resume.

    A URL names one tar, several with `{000..999}` or (except for https) `*`, or a folder; each tar is downloaded,
    examined and deleted. With `keep`, tars whose sha256 the store reports stay in the cache, for training on this
    machine, if the disk has room. The JSON and the tables are written to `output` (default for local tars: their
    folder) as `<name>.index.json` (default: the folder's name). `at` is the URL from which training will read the
    shards, if it differs. `names` are class names in the order of their ids, used to read labels given as names. By
    default, they come from an existing index of the same tars; otherwise, if no label is an id, the sorted label texts
    become the names. With `unlabelled`, labels are ignored. `report` is called with the number of finished shards and
    the total. `cache` sets where tars are kept during indexing, and how downloads are retried. Raises DataError listing
    every unusable tar and every label ≥ `classes`, or StorageError if the storage does not respond.
    """
    # Tars must be all local or all remote.
    sources = list(map(str, source)) if isinstance(source, list) else [str(source)]
    urls = [path for path in sources if "://" in path]
    is_mixed = 0 < len(urls) < len(sources)
    if is_mixed or (urls and output is None):
        raise DataError(
            f"{redacted(urls[0])}: expected only URLs as sources, and a local folder for the index (--output FOLDER)"
        )
    if at and "://" in at:
        check_kept(at)

    stopped = threading.Event()
    fetcher = Cache(cache or CacheConfig(), stopped.is_set)
    if urls:
        assert output is not None, "checked above"
        urls = [pinned(url, Path(output), fetcher) for url in urls]
    tars = remote_tars(urls, fetcher, workers, stopped) if urls else local_tars(source)
    name = name or Path(tars.directory).name
    check_name(name, "a set", "give its name: --name train")
    folder = Path(output or tars.directory)
    folder.mkdir(parents=True, exist_ok=True)
    at = at and pinned(at, folder, fetcher)
    path = folder / f"{name}{SUFFIX}"
    # Indexing a set again must keep its class names and so its digest. But if other tars have replaced the old ones,
    # the old names do not apply.
    if not names:
        with suppress(DataError):
            before = load_index(path)
            if {shard.name: shard.bytes for shard in before.shards} == tars.sizes:
                names = before.names
    check_tables(path, at or tars.directory, tars.sizes)

    # After an unfinished packing, some of its tars are missing.
    partial_path = path.with_name(path.name + ".partial")
    packing_setting = ""
    with suppress(OSError, ValueError, KeyError), open(partial_path) as file:
        _, packing_setting = json.loads(file.readline())["setting"]
    if re.fullmatch(PACKING_SETTING, packing_setting):
        raise DataError(
            f"{partial_path}: a pack command has not finished; run the same `jobs pack` again, "
            "or delete this file to index the existing tars"
        )

    # Shards read with other class names must be read again.
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
                tar_cache = fetcher if urls else None
                digest = tars.digests.get(tar, "") if keep else ""
                job = IndexJob(tar_cache, tars.directory, tar, folder, classes, names, size, unlabelled, digest)
                jobs.append(partial(index_shard, job))
        # Local tars keep the processor busy; remote ones mostly wait for the network, for which threads suffice.
        with (
            in_parallel(jobs, workers, report, in_threads=bool(urls)) as results,
            set_on_error(stopped),
        ):
            for result in results:
                if isinstance(result, Record):
                    journal.add(result)
                else:
                    errors.append(result)
            # Raise after all shards are examined, so that a single run finds all errors.
            if errors:
                lines = errors[:MAX_ERRORS]
                if len(errors) > MAX_ERRORS:
                    lines.append(f"… {len(errors)} shards in total")
                raise DataError("\n".join(lines))
        return journal.finish(at or tars.directory, names, tars.sizes)


# ------------------------------------------------------------------------------------------------ a single tar


@dataclass(frozen=True)
class IndexJob:
    """The arguments of `index_shard` for one tar, which are sent to another process."""

    cache: Cache | None  # downloads the tar; None if it is local
    directory: str
    name: str
    output: Path
    classes: int | None
    names: Names
    bytes: int
    unlabelled: bool
    sha256: str  # of a tar that stays in the cache; empty for others

    def opened(self) -> AbstractContextManager[BufferedReader | BufferedRandom]:
        """Open the tar as a file on this machine, downloading it if it is remote.

        Raises OSError if a local tar cannot be opened, or the errors of `Cache.path`.
        """
        place = f"{self.directory}/{self.name}"
        if self.cache is None:
            return open(place, "rb")
        if self.sha256 and has_disk_for(self.cache, self.bytes):
            return self.cache.opened(place, Shard(self.name, 0, self.bytes, self.sha256))
        return temporary_copy(self.cache, place, self.bytes)


def has_disk_for(cache: Cache, size: int) -> bool:
    """Return whether a file fits within the cache's limit, and leaves a tenth of the disk free."""
    cache.directory.mkdir(parents=True, exist_ok=True)
    disk = shutil.disk_usage(cache.directory)
    return size <= cache.cfg.limit_bytes and disk.free - size > disk.total / 10


@contextmanager
def temporary_copy(cache: Cache, url: str, size: int) -> Iterator[BufferedRandom]:
    """Context manager that yields a temporary local copy of a remote shard that has no index yet."""
    cache.directory.mkdir(parents=True, exist_ok=True)
    cache.make_room(size)
    # A file without a name: the system deletes it when this process ends for any reason.
    with TemporaryFile(dir=cache.directory) as file:
        while file.tell() < size:
            piece = cache.read(url, file.tell(), min(file.tell() + PIECE, size))
            # The store may have given the size of an error page: no tar is such a page.
            if file.tell() == 0:
                refuse_error_page(url, piece)
            file.write(piece)
        file.flush()
        yield file


def index_shard(job: IndexJob) -> Record | str:
    """Write a shard's table; return its record, or an error message."""
    try:
        with job.opened() as file, mapped(file) as tar:
            result = walk(tar, job.name)
            table = result.table(tar)
            texts = Refusals()
            class_counts: Counter[int] = Counter()
            if not job.unlabelled:
                class_counts = count_classes(tar, result.rows, job, result.refused, texts)
            count_unreadable(tar, result)
            # Decode a few evenly spaced samples, to check that the tar contains images at all.
            decoded = min(len(table), DECODED)
            for part in range(decoded):
                row = result.rows[(2 * part + 1) * len(table) // (2 * decoded)]
                encoded = bytes(row.image_in(tar)[: MAX_BYTES + 1])
                try:
                    decode(encoded)
                except BadImage as error:
                    result.refused.add(f"{NOT_DECODED}{error}", row.key)
            file.seek(0)  # a downloaded file is positioned at its end
            digest = file_digest(file, "sha256").hexdigest()
            shard = write_table(job.output, table, job.name, len(tar), digest)
            return Record(shard, class_counts, result.refused, texts)
    # Return the error instead of raising it, so that the other shards are indexed too.
    except (DataError, OSError) as error:
        return str(error)


def count_classes(
    tar: memoryview, rows: Sequence[SampleRow], job: IndexJob, refused: Refusals, texts: Refusals
) -> Counter[int]:
    """Return {class: number of samples}; samples without a usable label are counted in `refused`.

    If class names are unknown, text labels are counted in `texts`. Raises DataError for a label id that is out of
    range or, if class names are known, for a text that is not a class name.
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
                    f"{job.name}: sample {printable(key)} has label {preview(error.texts[:1])}, which is not one of "
                    f"the {len(job.names)} class names: {preview(job.names)}"
                ) from None
            # Without a class list, the texts of all shards together decide whether they are class names.
            if error.are_names:
                for text in set(error.texts):
                    texts.add(text, key)
            # The sample stays in the set: training replaces it and counts it as bad.
            else:
                shown = f"{key} ({error})" if row.label_size else key
                refused.add(error.reason, shown)
            continue
        if max(labels) >= limit:
            raise DataError(
                f"{job.name}: sample {printable(key)} has label {max(labels)}, "
                f"but there are {limit} classes (0 … {limit - 1})"
            )
        counts.update(set(labels))  # count a repeated label once
    return counts


def count_unreadable(tar: memoryview, result: Walk) -> None:
    """Count in `result.refused` the images that lack a valid header or end, or are too large.

    The samples stay in the data set: training replaces them and counts them as bad.
    """
    for row in result.rows:
        try:
            read_header(bytes(row.image_in(tar)[: MAX_BYTES + 1]))
        except BadImage as error:
            result.refused.add(str(error), row.key)


def decoded_samples(index: Index) -> tuple[int, int]:
    """Return (number of samples decoded while indexing, number of failures among them)."""
    tried = 0
    for shard in index.shards:
        tried += min(shard.samples, DECODED)
    failed = 0
    for reason, count in index.refused.counts.items():
        if reason.startswith(NOT_DECODED):
            failed += count
    return tried, failed


def problem_of(index: Index, *, unlabelled: bool) -> str:
    """Return the reason why an indexed data set cannot be used for training, and a remedy; "" if it can be used."""
    tried, failed = decoded_samples(index)
    expected = "expected samples with an image (jpg, png, webp) and a label (cls, json)"
    if index.samples == 0:
        reason = "0 samples"
        if DOTTED in index.refused.counts:
            reason += ", because the key of a sample ends at the first dot of its name, as in webdataset"
            expected = (
                "expected names without other dots, such as IMG_1.jpg for IMG.1.jpg; to rewrite the tars with such "
                "names: python -m jobs pack tars FOLDER NEW-FOLDER"
            )
    elif failed == tried:
        reason = "none of the sampled files could be decoded as an image"
    elif not index.classes and not unlabelled:
        reason = "no sample has a usable label"
        expected += "\n  to index images without labels for objective: masked, add --unlabelled"
    elif not index.names and are_pairs(index.class_counts, labelled_samples(index)):
        return PAIRS
    else:
        return ""
    return f"{reason}\n  {expected}"


def labelled_samples(index: Index) -> int:
    """Return the number of samples with a usable label."""
    return index.samples - sum(index.refused.counts[reason] for reason in LABEL_REASONS)


# ------------------------------------------------------------------------------------- checks before indexing


def check_tables(path: Path, directory: str, shards: Iterable[str]) -> None:
    """Raise DataError if two shards would share a table, or a table would overwrite a table of other tars."""
    # Tables have flat names, so two tars in different folders may map to the same name.
    tables = Counter(table_path(path.parent, shard) for shard in shards)
    for table, count in tables.items():
        if count > 1:
            raise DataError(
                f"two shards would have the same table {table.name}; rename one of them, or index each folder "
                "separately"
            )
    for other_path in path.parent.glob(f"*{SUFFIX}"):
        # This index will be replaced.
        if other_path == path:
            continue
        other = load_index(other_path)
        # The same tars under the name of another data set.
        if other.directory == directory:
            continue
        for shard in other.shards:
            if table_path(path.parent, shard.name) in tables:
                raise DataError(
                    f"{other_path} has a different shard named {shard.name}, whose table would be overwritten; use "
                    "another --output"
                )


def check_kept(url: str) -> None:
    """Raise DataError unless a URL may be read and may be stored in an index."""
    check_url(url)
    if not urlsplit(url).hostname:
        raise DataError(f"{redacted(url)} has no bucket or host; expected a URL like s3://bucket/train")
    if redacted(url) != url:
        raise DataError(
            f"{redacted(url)}: the index would store the password or signature in this URL; pass the "
            "credentials in the environment"
        )
    if "//" in url.partition("://")[2]:
        raise DataError(f"{url}: some clients treat two consecutive slashes as one; store the shards under another key")


# ------------------------------------------------------------------------------------- listing tars


def local_tars(source: str | os.PathLike[str] | list[str]) -> TarList:
    """List the tars in a folder, or the given tars; raises DataError if there are none, or if one is missing."""
    if not isinstance(source, list):
        check_nothing_excluded(source)
        paths = sorted(Path(source).glob("[!.]*.tar"))
    else:
        paths = [path for pattern in source for path in matching(pattern)]
    if not paths:
        if isinstance(source, list):
            reason = "no *.tar was given"
        elif Path(source).is_dir():
            reason = "no *.tar here"
        elif Path(source).exists():
            reason = "not a *.tar file"
        else:
            reason = "this folder does not exist"
        remedy = "; use the folder that contains the shards"
        if not isinstance(source, list) and image_folders(Path(source)):
            shards = quote(f"{source}-shards")
            remedy = f"\n  to pack images into shards, run python -m jobs pack folder {quote(str(source))} {shards}"
        raise DataError(f"{source}: {reason}{remedy}")
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"{len(missing)} of {len(paths)} shards do not exist: {', '.join(missing[:5])}")

    # Resolve paths first: with `..` or links, the common folder would be wrong.
    paths = list(map(Path.resolve, paths))
    tars = TarList(os.path.commonpath({path.parent for path in paths}), {})
    for path in paths:
        tars.sizes[str(path.relative_to(tars.directory))] = path.stat().st_size
    return tars


def remote_tars(urls: Sequence[str], cache: Cache, workers: int, stopped: threading.Event) -> TarList:
    """List the tars at URLs, with the sizes reported by the storage; raises DataError if there are none.

    Each URL names one tar, several with `{000..999}` or `*`, or a folder. `stopped` is set on errors, to end retries.
    """
    timeout_s = cache.cfg.timeout_s
    files: dict[str, RemoteFile] = {}  # by URL
    named: list[str] = []  # individually named tars
    for pattern in urls:
        for url in braceexpand(pattern, escape=False):
            check_kept(url)
            # The Hub's client keeps its listing of a folder, so that named tars need no request each.
            if url.endswith(".tar") and "*" not in url and not url.startswith("hf:"):
                named.append(url)
            else:
                files.update(cache.with_retries(url, partial(list_tars, url, timeout_s)))
    # Requesting a size is one short request that mostly waits, so use more threads.
    with ThreadPoolExecutor(4 * workers) as pool, set_on_error(stopped):
        requests = {url: pool.submit(cache.with_retries, url, partial(size_of, url, timeout_s)) for url in named}
        for url, request in requests.items():
            files[url] = RemoteFile(request.result())
    if not files:
        raise DataError(f"{', '.join(urls)}: found no *.tar files")

    # Find the longest common folder. Compare whole components: `…/train-0` is not a folder.
    shared: list[str] = []  # scheme, empty string, bucket or host, folders
    for parts in zip(*(url.split("/")[:-1] for url in files), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    # An index needs at least the bucket or host in common.
    if len(shared) < 3:
        raise DataError(
            "the shards are in several buckets or on several hosts, which need separate indexes; to train on all of "
            "them, use data.mixture"
        )

    tars = TarList("/".join(shared), {})
    for url, file in files.items():
        name = check_file_name(url.removeprefix(tars.directory + "/"), redacted(tars.directory))
        tars.sizes[name] = file.size
        if file.sha256:
            tars.digests[name] = check_sha256(file.sha256, redacted(url))
    return tars


def pinned(url: str, folder: Path, cache: Cache) -> str:
    """Replace the revision in an `hf://` URL with its commit hash; return any other URL unchanged.

    The files of a commit cannot change. The hash is requested once, and recorded in a folder. Raises the errors of
    `data.extras.hub.pin`.
    """
    if not url.startswith("hf:"):
        return url
    pin = load_optional(HUB + "pin", "hf://")
    result: str = pin(url, folder, cache.with_retries, cache.cfg.timeout_s)
    return result
