"""Read Parquet files with images on the Hugging Face Hub: the schema by byte range, the images from the shard cache.

    remote_parquet("hf://datasets/me/photos@6f1c…/data/*.parquet")   →   [RemoteParquet("…/train-00000.parquet"), …]

Packing first reads the end of every file, which describes its columns, and then one file after another. A file is
downloaded into the cache of remote shards, and compared with the sha256 that the Hub reports.
"""

from __future__ import annotations

from functools import partial
from io import SEEK_CUR, SEEK_END, BufferedReader, RawIOBase
from pathlib import PurePosixPath

from braceexpand import braceexpand

from data.checks import check_sha256, redacted
from data.errors import DataError
from data.extras.sources.listing import list_files
from data.index.shard import Shard
from data.remote.cache import Cache
from data.remote.config import SMALLEST, CacheConfig
from data.remote.urls import Refused

READ_AHEAD = 1 << 20  # bytes requested at once; the description of the columns is nearly always smaller


class RemoteParquet:
    """A Parquet file in a store that reports its sha256."""

    def __init__(self, url: str, size: int, sha256: str, cache: Cache) -> None:
        self.url = url
        self.shard = Shard(url, 0, size, sha256)
        self.cache = cache
        self.stem = PurePosixPath(url).stem

    def __str__(self) -> str:
        return redacted(self.url)

    def by_range(self) -> BufferedReader:
        """Return a file object that reads by range requests; a small or already cached file is opened as a whole."""
        if self.shard.bytes <= SMALLEST or self.cache.has(self.shard):
            return self.downloaded()
        return BufferedReader(RangeFile(self), READ_AHEAD)

    def downloaded(self) -> BufferedReader:
        """Open the file in the cache, downloading it if needed; raises the errors of `Cache.path`."""
        return self.cache.opened(self.url, self.shard)


class RangeFile(RawIOBase):
    """A remote file as a file object; each read is a range request, with the errors of `Cache.with_retries`."""

    def __init__(self, file: RemoteParquet) -> None:
        self.file = file
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        start = {SEEK_CUR: self.position, SEEK_END: self.file.shard.bytes}.get(whence, 0)
        self.position = start + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # BufferedReader passes a memoryview
        stop = min(self.position + len(buffer), self.file.shard.bytes)
        if stop <= self.position:
            return 0
        content = self.file.cache.read(self.file.url, self.position, stop)
        buffer[: len(content)] = content
        self.position += len(content)
        return len(content)


def remote_parquet(source: str) -> list[RemoteParquet]:
    """Return the Parquet files at a URL: a file, a folder, or a pattern with `{000..999}` or `*`.

    Raises StorageError if the store does not respond, or DataError if there are no files or the store does not report
    their sha256.
    """
    if not source.startswith("hf:"):
        raise Refused(
            f"{redacted(source)}: Parquet files can be packed only from hf:// or from a folder; copy them to a folder "
            "first"
        )
    cache = Cache(CacheConfig())
    files = []
    for url in braceexpand(source, escape=False):
        listed = cache.with_retries(url, partial(list_files, url, ".parquet", cache.cfg.timeout_s))
        for place, file in listed.items():
            if not place.endswith(".parquet"):
                continue
            if not file.sha256:
                raise DataError(
                    f"{redacted(place)}: this file is not stored with LFS or Xet, so it has no recorded sha256; copy "
                    "it to a folder first"
                )
            files.append(RemoteParquet(place, file.size, check_sha256(file.sha256, redacted(place)), cache))
    if not files:
        raise DataError(f"{redacted(source)}: found no *.parquet files")
    return files
