"""Records with their own digest: JSON whose last entry is the sha256 of everything before it.

In:  {"key": "1a2b…", "seconds": 3.2}
Out: {"key": "1a2b…", "seconds": 3.2, "sha256": "9f3c…"}, one entry per line

The digest covers the text, not the values: any changed bit is detected, even in whitespace, and a truncated file lacks
its end. The reader of a record decides what to do if the record is damaged.

A `Journal` records long work, one sealed line per finished piece, so that a killed command resumes where it stopped:
1. `with Journal(path, setting)` reads the records of an earlier command with the same setting (`records`, by key);
2. `add` appends a line after each finished piece; a later kill cannot remove the line:
       {"key": "train-000000.tar", "record": [1250, 6543360, "d41d…"], "sha256": "e5f0…"}
   The first line holds the setting in the same way.
If a line is truncated or altered, its piece and all later pieces are repeated.

A cache entry consists of arbitrary bytes followed by their sha256 (`write_entry`). `read_entry` returns None for an
altered entry, so that the caller recreates it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.files import write_atomically

# The end of a record after its last entry: of a record with several lines, and of a record with one line.
ENDS = (re.compile(rb',\n "sha256": "([0-9a-f]{64})"(\n\})\Z'), re.compile(rb', "sha256": "([0-9a-f]{64})"(\})\Z'))
LONGEST_END = 100  # bytes; a little more than the longest end
DIGEST_BYTES = 32  # length of a sha256


class Unsealed(ValueError):
    """The text is not a record written by `seal`; the message contains the reason."""


def seal(entries: Mapping[str, object], *, lines: bool = True) -> str:
    """Return the text of a record, ending with its sha256; `lines` puts each entry on a separate line."""
    assert entries, "a record needs at least one entry"
    body = json.dumps(entries, indent=1 if lines else None, default=str)
    digest = hashlib.sha256(body.encode()).hexdigest()
    # Append the digest by hand: a manifest of a thousand workers has 65 MB, and a second `json.dumps` takes a second.
    if lines:
        return f'{body[:-2]},\n "sha256": "{digest}"\n}}'
    return f'{body[:-1]}, "sha256": "{digest}"}}'


def unseal(text: bytes) -> dict[str, Any]:
    """Return the entries of a record. Raises Unsealed if `seal` did not write this text."""
    for end in ENDS:
        match = end.search(text, max(len(text) - LONGEST_END, 0))
        if match is None:
            continue
        digest = hashlib.sha256(text[: match.start()])
        digest.update(match[2])
        if digest.hexdigest().encode() == match[1]:
            entries = json.loads(text)
            entries.pop("sha256")
            return entries
        raise Unsealed("it does not match its own sha256")
    raise Unsealed("it is truncated or altered: it does not end with its sha256")


def check_schema(path: str | os.PathLike[str], schema: object, known: int) -> None:
    """Raise DataError if a file has a newer schema than this code knows, or none: its entries may have other names."""
    if not isinstance(schema, int):
        raise DataError(
            f"{path} has schema {schema!r}, expected a whole number up to {known}\n"
            "  restore the file from a copy, or delete it and repeat the command that wrote it"
        )
    if schema > known:
        raise DataError(
            f"{path} was written by a newer Patchline: it has schema {schema}, but this checkout reads up to {known}\n"
            "  expected a file of this version or an older one\n"
            "  update this checkout, or use the checkout that wrote the file"
        )


def write_entry(path: Path, content: bytes) -> None:
    """Write a cache entry atomically: the bytes, then their sha256."""
    write_atomically(path, content + hashlib.sha256(content).digest())


def read_entry(path: Path) -> bytes | None:
    """Return the bytes of a cache entry; None if the entry is missing or altered. An altered entry is logged."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    content = text[:-DIGEST_BYTES]
    if hashlib.sha256(content).digest() == text[-DIGEST_BYTES:]:
        return content
    logging.getLogger(__name__).warning("%s: truncated or altered; it will be created again", path)
    return None


class Journal:
    """Context manager that records finished pieces of work; earlier records are reused if `setting` (JSON) is equal."""

    def __init__(self, path: Path, setting: object) -> None:
        self.path = path
        self.header = seal({"setting": setting}, lines=False)
        self.records: dict[str, Any] = {}  # JSON values, as passed to `add`

    def __enter__(self) -> Journal:
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        if lines and lines[0] == self.header.encode():
            for line in lines[1:]:
                try:
                    values = unseal(line)
                except Unsealed:
                    break
                self.records[values["key"]] = values["record"]
        # Rewrite the file instead of appending, because its last line may be truncated. Write it atomically, because a
        # kill between two lines would lose the rest.
        lines_to_keep = [self.header]
        for key, record in self.records.items():
            lines_to_keep.append(seal({"key": key, "record": record}, lines=False))
        write_atomically(self.path, "".join(f"{line}\n" for line in lines_to_keep))
        self.file = open(self.path, "a")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, key: str, record: Any) -> None:
        """Append the record of a finished piece; `record` must be JSON-serialisable."""
        line = seal({"key": key, "record": record}, lines=False)
        self.records[key] = json.loads(line)["record"]  # as the next command will read it back
        # Flush every line, so that a kill loses only unfinished pieces.
        print(line, file=self.file, flush=True)
