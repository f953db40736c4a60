"""Can this node read a set, and how fast: the first megabytes of a few of its shards, wherever they lie."""

import os
import time
from contextlib import suppress
from typing import TypedDict

from data.checks import redacted
from data.errors import PatchlineError
from data.index.document import load_index
from data.remote.urls import read_range

PIECE_BYTES = 2**22  # of a shard
TIMEOUT_S = 20.0  # of one request to an object store
LONGEST_S = 5.0  # after which no further shard is read


class Reach(TypedDict):
    """What was read of a set; JSON."""

    bytes: int
    seconds: float
    error: str  # why it cannot be read, "" where it can


def read_some(path: str) -> Reach:
    """Read from the first, the middle and the last shard of the set whose index lies at `path`."""
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
                    # What memory holds of it is dropped, or memory's rate would be measured. Not every disk can.
                    with suppress(OSError):
                        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
                    reach["bytes"] += len(file.read(size))
            if time.monotonic() - began > LONGEST_S:
                break
    except PatchlineError as error:
        reach["error"] = str(error).splitlines()[0]
    # Object stores' clients raise many kinds; their texts may hold an address with a secret in it.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        reach["error"] = f"{redacted(place)}: {reason}"
    reach["seconds"] = time.monotonic() - began
    return reach
