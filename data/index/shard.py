"""One tar of a set, as an index knows it.

Shard("train-000000.tar", 1250, 6543360, "d41d…", "77ab…")    whose table is train-000000.npy
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """One tar as it was when indexed; `name` is its path or URL, relative to the index's directory."""

    name: str
    samples: int
    bytes: int
    sha256: str
    table: str = ""  # the sha256 of its table; "" in an index of schema 1


def shard_row(shard: Shard) -> list[str | int]:
    """A shard as the JSON and the journal hold it."""
    return [shard.name, shard.samples, shard.bytes, shard.sha256, shard.table]


def table_name(shard: str) -> str:
    """The file name of a shard's table: flat, so that shards of one name in two folders do not meet."""
    flat = shard.removesuffix(".tar").replace("://", "/").strip("/").replace("/", "--")
    return f"{flat}.npy"
