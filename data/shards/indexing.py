"""Make the index of existing WebDataset tars, unchanged: on this machine, or behind URLs, one at a time.

How tars become an index, in order:
1. `local_tars` or `remote_tars` lists them, with the size of each and the folder or URL that holds them all;
2. nothing may be lost: an index of other tars, or a packing that was stopped, in the same place is an error;
3. `index_shard` walks one tar, writes its table and returns its record; several processes, or threads for URLs,
   do so side by side, and a remote tar is deleted as soon as it has been looked at;
4. the journal keeps the records, so that a killed run goes on, and at the end becomes the index.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from braceexpand import braceexpand

from data.checks import check_name
from data.errors import DataError
from data.index.document import SUFFIX, load_index
from data.index.folders import check_nothing_beside
from data.index.index import Index
from data.index.names import Names
from data.index.shard import table_name
from data.remote.cache import Cache, CacheConfig
from data.remote.urls import check_url, list_tars, redacted, size_of
from data.shards.journal import Journal, Record
from data.shards.look import IndexJob, index_shard
from data.shards.side_by_side import setting_at_error, side_by_side

MOST_ERRORS = 20  # shards that are named when they cannot be used
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
    report: Callable[[int, int], None] | None = None,
    cache: CacheConfig | None = None,
) -> Index:
    """Index existing tars: a folder of them, or a list of paths; or URLs. Safe to kill and run again.

    A URL names a tar, many by `{000..999}` or (but for https) `*`, or a folder; each tar is fetched, looked at and
    forgotten. The JSON and the tables go to `output` (default: beside the shards, where these are here) as
    `<name>.index.json` (default: the folder's name); `at` is the URL that the shards will be read from, where that
    is another one. `names` are those of the classes, in the order of their ids, by which labels that are names are
    read; without them, those of the index of the same tars that this one replaces. `report` is told how many shards
    are done, of how many. `cache` says where a tar is kept while it is looked at, and how patient fetching is. Raises
    DataError naming every tar that cannot be used and every label ≥ `classes`, StorageError where the storage does not
    answer.
    """
    urls = urls_among(source, output)
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
    # A set that is indexed again stays the set that it was, with its digest.
    names = names or names_before(path, tars.sizes)
    check_tables(path, at or tars.directory, tars.sizes)
    check_stopped(path.with_name(path.name + ".partial"))

    # A shard that was read by other names is read again.
    setting = tars.directory
    if names:
        setting = f"{tars.directory} {digest_of_names(names)}"
    with Journal(path, classes, setting) as journal:
        jobs = []
        for tar, size in tars.sizes.items():
            if not journal.has(tar, size):
                jobs.append(IndexJob(fetcher if urls else None, tars.directory, tar, size, folder, classes, names))
        # A tar that is here keeps a processor busy; one that is fetched mostly waits, for which threads will do.
        with (
            side_by_side(index_shard, jobs, workers, report, in_threads=bool(urls)) as results,
            setting_at_error(stopped),
        ):
            record_all(results, journal)
        journal.keep(tars.sizes)
        return journal.finish(at or tars.directory, names)


def urls_among(source: str | os.PathLike[str] | list[str], output: str | os.PathLike[str] | None) -> list[str]:
    """The URLs that are to be indexed; none where the tars are here.

    Raises DataError where some are here and some are not, or no folder was given for the index of URLs.
    """
    sources = [str(source)]
    if isinstance(source, list):
        sources = [str(path) for path in source]
    urls = [path for path in sources if "://" in path]
    is_mixed = 0 < len(urls) < len(sources)
    if is_mixed or (urls and output is None):
        raise DataError(f"{redacted(urls[0])}: give URLs alone, and the folder here that the index goes to (--output)")
    return urls


def names_before(path: Path, sizes: Mapping[str, int]) -> Names:
    """The class names of the index that is about to be replaced, where it is of these very tars; otherwise none."""
    try:
        index = load_index(path)
    except DataError:
        return ()
    # Names say nothing of other tars that have come to the same place.
    if {shard.name: shard.bytes for shard in index.shards} != sizes:
        return ()
    return index.names


def digest_of_names(names: Names) -> str:
    """The sha256 of a list of class names."""
    return sha256(json.dumps(names).encode()).hexdigest()


def record_all(results: Iterable[Record | str], journal: Journal) -> None:
    """Add the records to the journal; raises DataError at the end, with the first errors and how many there are."""
    errors = []
    for result in results:
        # Errors are raised when all shards have been looked at: otherwise each run of the command would find one more.
        if isinstance(result, Record):
            journal.add(*result)
        else:
            errors.append(result)
    if errors:
        lines = errors[:MOST_ERRORS]
        if len(errors) > MOST_ERRORS:
            lines.append(f"… {len(errors)} shards in all")
        raise DataError("\n".join(lines))


# ------------------------------------------------------------------------------------- what is refused


def check_tables(path: Path, directory: str, shards: Iterable[str]) -> None:
    """Raise DataError where two shards would share a table, or one would replace that of other tars."""
    # Tables have flat names, so two tars of different folders could come to the same one.
    tables = Counter(map(table_name, shards))
    for table, count in tables.items():
        if count > 1:
            raise DataError(f"two shards would share the table {table}; rename one, or index their folders apart")
    for other_path in path.parent.glob(f"*{SUFFIX}"):
        # The index that this one replaces.
        if other_path == path:
            continue
        other = load_index(other_path)
        # These very tars, under another name.
        if other.directory == directory:
            continue
        for shard in other.shards:
            if table_name(shard.name) in tables:
                raise DataError(
                    f"{other_path} has a {shard.name} of {other.directory}: its table would go; give another --output"
                )


def check_stopped(partial: Path) -> None:
    """Raise DataError where a packing was stopped: not all of its tars are there."""
    setting = ""
    with suppress(OSError, ValueError), open(partial) as file:
        setting = json.loads(file.readline())[2]
    if re.fullmatch(PACKING_SETTING, setting):
        raise DataError(
            f"{partial}: a packing was stopped here; run the same `jobs pack` again to its end, "
            "or delete this file to index the tars that there are"
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
    """Tars of a folder, or those that are listed; raises DataError where there are none, or one is missing."""
    if not isinstance(source, list):
        check_nothing_beside(source)
    paths = list(map(Path, source)) if isinstance(source, list) else sorted(Path(source).glob("[!.]*.tar"))
    if not paths:
        raise DataError(f"{source}: {why_no_tars(source)}; name the folder that holds the shards")
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"missing, {len(missing)} of {len(paths)} shards: {', '.join(missing[:5])}")

    # Resolved, or a `..` or a link would hide which folder they have in common.
    paths = [path.resolve() for path in paths]
    tars = TarList(os.path.commonpath({path.parent for path in paths}), {})
    for path in paths:
        tars.sizes[str(path.relative_to(tars.directory))] = path.stat().st_size
    return tars


def why_no_tars(source: str | os.PathLike[str] | list[str]) -> str:
    """Say why a source that is here holds no tars."""
    if isinstance(source, list):
        return "no *.tar is named"
    if Path(source).is_dir():
        return "no *.tar here"
    if Path(source).exists():
        return "a file that is no *.tar"
    return "there is no such folder"


def remote_tars(urls: Sequence[str], cache: Cache, workers: int, stopped: threading.Event) -> TarList:
    """Tars behind URLs, with the sizes that the storage tells; raises DataError where there are none.

    Each URL names one tar, several by a `{000..999}` or a `*`, or a folder. `stopped` ends the cache's patience.
    """
    timeout_s = cache.cfg.timeout_s

    def listed(url: str) -> dict[str, int]:
        return cache.patiently(url, lambda: list_tars(url, timeout_s))

    def asked_size(url: str) -> int:
        return cache.patiently(url, lambda: size_of(url, timeout_s))

    sizes: dict[str, int] = {}  # URL → bytes
    named: list[str] = []  # tars that the user names one by one
    for pattern in urls:
        for url in braceexpand(pattern):
            check_kept(url)
            if url.endswith(".tar") and "*" not in url:
                named.append(url)
            else:
                sizes.update(listed(url))
    # Asking for a size is one short request, most of which is waiting.
    with ThreadPoolExecutor(4 * workers) as pool, setting_at_error(stopped):
        sizes.update(zip(named, pool.map(asked_size, named), strict=True))
    if not sizes:
        raise DataError(f"{', '.join(urls)}: no *.tar there")

    tars = TarList(common_folder(list(sizes)), {})
    for url, bytes_there in sizes.items():
        tars.sizes[url.removeprefix(tars.directory + "/")] = bytes_there
    return tars


def common_folder(urls: Sequence[str]) -> str:
    """The longest URL of a folder that holds all of these; raises DataError where they share no bucket or host."""
    # By whole folders, not by letters: `…/train-0` is no folder.
    shared = urls[0].split("/")[:-1]  # scheme, nothing, bucket or host, folders
    for url in urls[1:]:
        folders = url.split("/")[:-1]
        same = 0
        while same < min(len(shared), len(folders)) and folders[same] == shared[same]:
            same += 1
        shared = shared[:same]
    # The first three parts are the scheme, nothing, and the bucket or host, which an index needs to find its shards.
    if len(shared) < 3:
        raise DataError("shards of several buckets or hosts need an index each; data.mixture trains on them together")
    return "/".join(shared)
