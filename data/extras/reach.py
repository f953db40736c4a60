"""Check that this node can read a local or remote data set, and measure the speed, by reading parts of a few shards."""

import os
import time
from contextlib import suppress
from typing import TypedDict

from data.checks import redacted
from data.errors import PatchlineError
from data.index.document import load_index
from data.remote.urls import read_range

PIECE_BYTES = 2**22  # bytes read from the beginning of each shard
TIMEOUT_S = 20.0  # time limit of a request to an object store
LONGEST_S = 5.0  # do not read another shard after this time


class Reach(TypedDict):
    """Result of the read test, JSON-serialisable."""

    bytes: int
    seconds: float
    error: str  # why the set cannot be read, or ""


def measure_reads(path: str) -> Reach:
    """Read the beginning of the first, middle and last shards of the data set with the index `path`, and time it."""
    reach: Reach = {"bytes": 0, "seconds": 0.0, "error": ""}
    began = time.monotonic()
    place = path
    try:
        index = load_index(path)
        count = len(index.shards)
        for number in sorted({0, count // 2, count - 1} & set(range(count))):
            place = index.location(number)
            size = min(PIECE_BYTES, index.shards[number].bytes)
            if "://" in place:
                reach["bytes"] += len(read_range(place, 0, size, TIMEOUT_S))
            else:
                with open(place, "rb", buffering=0) as file:
                    # Drop the file from the page cache, to measure the disk. Not every file system supports this.
                    with suppress(OSError):
                        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
                    reach["bytes"] += len(file.read(size))
            if time.monotonic() - began > LONGEST_S:
                break
    except PatchlineError as error:
        reach["error"] = str(error).splitlines()[0]
    # Clients of object stores raise many kinds of exceptions, and their texts may contain a URL with a secret.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        reach["error"] = f"{redacted(place)}: {reason}"
    reach["seconds"] = time.monotonic() - began
    return reach
