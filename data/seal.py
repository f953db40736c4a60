"""Records that carry their own digest: JSON whose last entry is the sha256 of all before it.

In:  {"key": "1a2b…", "seconds": 3.2}
Out: {"key": "1a2b…", "seconds": 3.2, "sha256": "9f3c…"}, an entry a line

The digest is of the text, not of the values: a changed bit is found wherever it lies, also in the blanks, and a torn
file lacks its end. Its reader says what to do about a bad one.

A `Journal` is the record of long work, a sealed line for each piece that is finished: a killed command goes on where it
stopped.
1. `with Journal(path, setting)` reads what an earlier command of the same setting has left (`records`, by key);
2. `add` appends a line when a piece is finished, which a kill then cannot take away:
       {"key": "train-000000.tar", "record": [1250, 6543360, "d41d…"], "sha256": "e5f0…"}
   The first line holds the setting in the same way.
A line that a kill has cut, or in which a bit has changed, ends what is taken over: its piece and those behind it are
made once more.

An entry of a cache is any bytes with their sha256 behind them (`write_entry`); what differs is not given back
(`read_entry`), so that whoever asks makes it anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.files import write_atomically

# The end of a record of several lines, and of one line, behind its last entry.
ENDS = (re.compile(rb',\n "sha256": "([0-9a-f]{64})"(\n\})\Z'), re.compile(rb', "sha256": "([0-9a-f]{64})"(\})\Z'))
LONGEST_END = 100  # bytes of such an end, and some more
DIGEST_BYTES = 32  # of a sha256


class Unsealed(ValueError):
    """A text is not a record as `seal` makes it; the message says how."""


def seal(entries: Mapping[str, object], *, lines: bool = True) -> str:
    """Return the text of a record: the entries, an entry a line or all in one, then the sha256 of their text."""
    assert entries, "a record says something"
    body = json.dumps(entries, indent=1 if lines else None, default=str)
    digest = hashlib.sha256(body.encode()).hexdigest()
    # Put together by hand: the manifest of a thousand workers is 65 MB, which to print once more takes a second.
    if lines:
        return f'{body[:-2]},\n "sha256": "{digest}"\n}}'
    return f'{body[:-1]}, "sha256": "{digest}"}}'


def unseal(text: bytes) -> dict[str, Any]:
    """Return the entries of a record. Raises Unsealed where the text is not what `seal` has written."""
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
    raise Unsealed("it is torn or altered: no record that ends with its sha256")


def write_entry(path: Path, content: bytes) -> None:
    """Keep bytes in a cache, whole, with their sha256 behind them."""
    write_atomically(path, content + hashlib.sha256(content).digest())


def read_entry(path: Path) -> bytes | None:
    """Return the bytes of an entry; None where it is not kept, or is not what was written, which is logged."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    content = text[:-DIGEST_BYTES]
    if hashlib.sha256(content).digest() == text[-DIGEST_BYTES:]:
        return content
    logging.getLogger(__name__).warning("%s: torn or altered, it is made anew", path)
    return None


class Journal:
    """What is finished so far; a context manager. `setting` must be equal for earlier lines to be of use; JSON."""

    def __init__(self, path: Path, setting: object) -> None:
        self.path = path
        self.header = seal({"setting": setting}, lines=False)
        self.records: dict[str, Any] = {}  # JSON: the caller of `add` knows what it is

    def __enter__(self) -> Journal:
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        if lines and lines[0] == self.header.encode():
            for line in lines[1:]:
                try:
                    values = unseal(line)
                except Unsealed:
                    break
                self.records[values["key"]] = values["record"]
        # Written anew instead of appended to: the next line would be glued to one that was cut. All at once: a kill
        # between two of them would lose the rest.
        kept = [self.header]
        for key, record in self.records.items():
            kept.append(seal({"key": key, "record": record}, lines=False))
        write_atomically(self.path, "".join(f"{line}\n" for line in kept))
        self.file = open(self.path, "a")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, key: str, record: Any) -> None:
        """Record a finished piece, by JSON values."""
        line = seal({"key": key, "record": record}, lines=False)
        self.records[key] = json.loads(line)["record"]  # as the next command will read it
        # Flushed line by line, so that a kill costs the pieces at work and no finished one.
        print(line, file=self.file, flush=True)
