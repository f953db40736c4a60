"""One tar of a set as an index knows it, and its table: a row a sample, where in the tar it lies, and a digest of it.

    Shard("train-000000.tar", 1250, 6543360, "d41d…", "77ab…")
    train-000000.npy         image, image_size, label, label_size, digest, key (`data.index.tar`)

The table lies beside the index's JSON, which has its sha256. It is mapped, and stays so while its shard is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import numpy as np

from data.files import write_whole
from data.index.tar import Row


@dataclass(frozen=True)
class Shard:
    """One tar as it was when indexed; `name` is its path or URL, relative to the index's directory."""

    name: str
    samples: int
    bytes: int
    sha256: str
    table: str = ""  # the sha256 of its table


def shard_row(shard: Shard) -> list[str | int]:
    """Return a shard as the JSON and the journal hold it."""
    return [shard.name, shard.samples, shard.bytes, shard.sha256, shard.table]


def table_name(shard: str) -> str:
    """Return the file name of a shard's table: flat, so that shards of one name in two folders do not meet."""
    flat = shard.removesuffix(".tar").replace("://", "/").strip("/").replace("/", "--")
    return f"{flat}.npy"


class WrongTable(ValueError):
    """A file is not the table of the shard that an index has; the message says in what."""


def open_table(path: Path, shard: Shard) -> np.ndarray:
    """Map the table of a shard: (samples,) of `data.index.tar.FIELDS` and `key`.

    Raises WrongTable where it is missing, was altered, or belongs to another shard.
    """
    try:
        digest = sha256(path.read_bytes()).hexdigest()
        if digest != shard.table:
            raise ValueError(f"its sha256 is {digest[:12]}…, the index says {shard.table[:12]}…: altered or replaced")
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # over what is no table, numpy raises many kinds: ValueError, EOFError, TokenError
        raise WrongTable(f"no table of {shard.name}: {error}") from None
    has_all_columns = set(Row._fields) <= set(table.dtype.names or ())
    if not has_all_columns or len(table) != shard.samples:
        raise WrongTable(f"{len(table)} rows of {table.dtype.names}, the index says {shard.samples}")
    return table


def write_table(output: Path, shard: str, table: np.ndarray) -> str:
    """Save a shard's table in the folder of its index; returns the sha256 of the file."""
    content = BytesIO()
    np.save(content, table, allow_pickle=False)
    write_whole(output / table_name(shard), content.getvalue())
    return sha256(content.getvalue()).hexdigest()
