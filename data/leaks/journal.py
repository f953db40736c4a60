"""The record of a search for leaks that is under way: what was found in each training shard that is finished.

One line of JSON a shard: the sha256 of the rest, and what stands for the shard, its matches and its counts. The first
line is whatever must be equal for the lines of an earlier, killed search to be of use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from data.files import write_whole
from data.index.shard import Shard
from data.shards.leaks import Kind


class Match(NamedTuple):
    """A training sample and a test image that show the same."""

    row: int  # of the training shard
    test: int  # number among all test images
    kind: Kind
    distance: float


class ShardMatches(NamedTuple):
    """What was found in a training shard."""

    matches: list[Match]
    samples: int
    bad: int  # that cannot be decoded
    flat: int  # that have nothing to be recognised by but their pixels


def key_of(shard: Shard) -> str:
    """What stands for a training shard: its tar, and the table of the samples of it that are looked at."""
    return f"{shard.sha256}-{shard.table}"


class Journal:
    """What was found in the shards so far, one line each; a context manager.

    A search of another setting begins anew.
    """

    def __init__(self, path: Path, setting: Sequence[Any]):
        self.path = path
        self.header = json.dumps(setting)
        self.records: dict[str, ShardMatches] = {}  # by `key_of`

    def __enter__(self) -> Journal:
        lines = self.path.read_text(errors="replace").splitlines() if self.path.exists() else []
        if lines and lines[0] == self.header:
            for line in lines[1:]:
                try:
                    digest, content = json.loads(line)
                    if digest != sha256(content.encode()).hexdigest():
                        break  # a changed bit: this shard and those after it are looked through once more
                    key, matches, *counts = json.loads(content)
                # The line that a kill cut.
                except (ValueError, TypeError):
                    break
                self.records[key] = ShardMatches([Match(*match) for match in matches], *counts)
        # Written anew instead of appended to: the next line would be glued to one that was cut.
        kept = [self.header, *(line_of(key, record) for key, record in self.records.items())]
        write_whole(self.path, "".join(f"{line}\n" for line in kept))
        self.file = open(self.path, "a")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, key: str, record: ShardMatches) -> None:
        """Record what was found in a shard."""
        self.records[key] = record
        print(line_of(key, record), file=self.file, flush=True)


def line_of(key: str, record: ShardMatches) -> str:
    """A record as the journal holds it, with its digest."""
    content = json.dumps([key, *record])
    return json.dumps([sha256(content.encode()).hexdigest(), content])
