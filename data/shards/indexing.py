"""Make the index of existing WebDataset tars, unchanged: on this machine, or behind URLs, one at a time."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import IO

import numpy as np
from braceexpand import braceexpand

from data.errors import DataError
from data.shards.cache import Cache, CacheConfig
from data.shards.index import SUFFIX, Index, Journal, Shard, load_index, mapped, table_name, write_table
from data.shards.remote import check_url, list_tars, redacted, size_of
from data.shards.tar import parse_labels, walk

MAX_CLASSES = 1_000_000  # an id beyond it is taken for a mistake (JFT-300M has 18,291)
LIMITS = r"\d+ \d+ (True|False)"  # how the journal of a packing begins
Found = tuple[str, dict[str, int]]  # the folder or URL that holds some tars, and {name below it: bytes}


def build_index(
    source: str | os.PathLike[str] | list[str],
    *,
    output: str | os.PathLike[str] | None = None,
    name: str | None = None,
    classes: int | None = None,
    workers: int = 1,
    at: str | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Index:
    """Index existing tars: a folder of them, or a list of paths; or URLs. Safe to kill and run again.

    A URL names a tar, many by `{000..999}` or (but for https) `*`, or a folder; each tar is fetched, looked at and
    forgotten. The JSON and the tables go to `output` (default: beside the shards, where these are here) as
    `<name>.index.json` (default: the folder's name); `at` is the URL that the shards will be read from, where that
    is another one. `report` is told how many shards are done, of how many. Raises DataError naming every tar that
    cannot be used and every label ≥ `classes`, StorageError where the storage does not answer.
    """
    given = [str(one) for one in source] if isinstance(source, list) else [str(source)]
    urls = [one for one in given if "://" in one]
    if urls and (len(urls) < len(given) or output is None):
        raise DataError(f"{redacted(urls[0])}: give URLs alone, and the folder here that the index goes to (--output)")
    if at and "://" in at:
        check_kept(at)
    cache = Cache(CacheConfig())
    directory, sizes = remote_tars(urls, cache, workers) if urls else local_tars(source)
    folder = Path(output or directory)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name or Path(directory).name}{SUFFIX}"
    check_tables(target, at or directory, sizes)
    check_stopped(target.with_name(target.name + ".partial"))
    with Journal(target, classes, directory) as journal:
        todo = [shard for shard, size in sizes.items() if not journal.has(shard, size)]
        jobs = [(cache if urls else None, directory, shard, sizes[shard], folder, classes) for shard in todo]
        errors = []
        for record in run_jobs(index_shard, jobs, workers, report, ThreadPoolExecutor if urls else ProcessPoolExecutor):
            if isinstance(record, str):
                errors.append(record)
            else:
                journal.add(*record)
        if errors:
            raise DataError("\n".join(errors[:20] + [f"… {len(errors)} shards in all"] * (len(errors) > 20)))
        journal.keep(sizes)
        return journal.finish(at or directory)


def check_tables(target: Path, directory: str, shards: Iterable[str]) -> None:
    """Raise DataError where two shards would share a table, or one would replace that of other tars."""
    tables = Counter(map(table_name, shards))
    if meeting := [table for table, count in tables.items() if count > 1]:
        raise DataError(f"two shards would share the table {meeting[0]}; rename one, or index their folders apart")
    for path in set(target.parent.glob(f"*{SUFFIX}")) - {target}:
        other = load_index(path)
        if other.directory == directory:  # these very tars under another name
            continue
        if meeting := [shard.name for shard in other.shards if table_name(shard.name) in tables]:
            raise DataError(
                f"{path} has a {meeting[0]} of {other.directory}: its table would go; give another --output"
            )


def check_stopped(partial: Path) -> None:
    """Raise DataError where a packing was stopped, whose tars are not all there."""
    with suppress(OSError, ValueError):
        with open(partial) as file:
            setting = json.loads(file.readline())[2]
        if re.fullmatch(LIMITS, setting):
            raise DataError(
                f"{partial}: a packing was stopped here; run the same `jobs pack` again to its end, "
                "or delete this file to index the tars that there are"
            )


def check_kept(url: str) -> None:
    """Raise DataError unless a URL may be read, and be written into an index."""
    check_url(url)
    if redacted(url) != url:
        raise DataError(f"{redacted(url)}: a key in the URL would stay in the index; give it by the environment")
    if "//" in url.partition("://")[2]:
        raise DataError(f"{url}: two slashes in a row are one to some clients; keep the shards under another key")


def local_tars(source: str | os.PathLike[str] | list[str]) -> Found:
    """Tars of a folder, or those that are listed."""
    paths = [Path(path) for path in source] if isinstance(source, list) else sorted(Path(source).glob("[!.]*.tar"))
    if not paths:
        raise DataError(f"{source}: no *.tar here; name the folder that holds the shards")
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"missing, {len(missing)} of {len(paths)} shards: {', '.join(missing[:5])}")
    paths = [path.resolve() for path in paths]
    directory = os.path.commonpath([path.parent for path in paths])
    return directory, {str(path.relative_to(directory)): path.stat().st_size for path in paths}


def remote_tars(urls: list[str], cache: Cache, workers: int) -> Found:
    """Tars behind URLs, with the sizes that the storage tells."""
    named: list[str] = []
    sizes: dict[str, int] = {}
    for url in (one for pattern in urls for one in braceexpand(pattern)):
        check_kept(url)
        if url.endswith(".tar") and "*" not in url:
            named.append(url)
        else:
            sizes |= cache.patiently(url, lambda url=url: list_tars(url, cache.cfg.timeout_s))  # type: ignore[misc]
    with ThreadPoolExecutor(4 * workers) as pool:
        asked = pool.map(lambda url: cache.patiently(url, lambda: size_of(url, cache.cfg.timeout_s)), named)
        sizes |= zip(named, asked, strict=True)
    if not sizes:
        raise DataError(f"{', '.join(urls)}: no *.tar there")
    columns = takewhile(
        lambda column: len(set(column)) == 1, zip(*(url.split("/")[:-1] for url in sizes), strict=False)
    )
    shared = [column[0] for column in columns]
    if len(shared) < 3:
        raise DataError("shards of several buckets or hosts need an index each; data.mixture trains on them together")
    directory = "/".join(shared)
    return directory, {url.removeprefix(directory + "/"): size for url, size in sizes.items()}


def run_jobs(
    function: Callable,
    jobs: list,
    workers: int,
    report: Callable[[int, int], None] | None = None,
    executor: Callable[[int], Executor] = ProcessPoolExecutor,
) -> Iterator:
    """Apply a function to each job, in order, here or in some processes (or threads)."""
    with executor(workers) if workers > 1 else nullcontext() as pool:
        for done, result in enumerate(pool.map(function, jobs) if pool else map(function, jobs), start=1):
            yield result
            if report:
                report(done, len(jobs))


def index_shard(
    job: tuple[Cache | None, str, str, int, Path, int | None],
) -> tuple[Shard, Counter[int], Counter[str]] | str:
    """Write one shard's table; returns its record, or what is wrong with it."""
    cache, directory, name, size, output, classes = job
    place = f"{directory}/{name}"
    try:
        with cache.lent(place, size) if cache else open(place, "rb") as file:
            return look(file, name, output, classes)
    except (DataError, OSError) as error:
        return str(error)


def look(file: IO[bytes], name: str, output: Path, classes: int | None) -> tuple[Shard, Counter[int], Counter[str]]:
    """Write the table of an open shard; returns its record."""
    with mapped(file) as tar:
        found = walk(tar, name)
        table = found.table()
        counts, bad = count_classes(tar, table, name, classes)
        write_table(output, name, table)
        return Shard(name, len(table), len(tar), sha256(tar).hexdigest()), counts, found.refused + bad


def count_classes(
    tar: memoryview, table: np.ndarray, name: str, classes: int | None
) -> tuple[Counter[int], Counter[str]]:
    """Samples a class, and those without a usable label; raises DataError on a label ≥ `classes`."""
    counts: Counter[int] = Counter()
    bad: Counter[str] = Counter()
    for row in table:
        try:
            labels = parse_labels(bytes(tar[row["label"] : row["label"] + row["label_size"]]))
        except ValueError:
            bad["no label"] += 1
            continue
        if max(labels) >= (classes or MAX_CLASSES):
            raise DataError(
                f"{name}: sample {row['key'].decode('utf-8', 'replace')} has label {max(labels)}, "
                f"but there are {classes or MAX_CLASSES} classes (0 … {(classes or MAX_CLASSES) - 1})"
            )
        counts.update(set(labels))
    return counts, bad
