"""The record of long work, a line for each piece that is finished: a killed command goes on where it stopped.

1. `with Journal(path, setting)` reads what an earlier command of the same setting has left (`records`, by key);
2. `add` appends a line when a piece is finished, which a kill then cannot take away:
       {"key": "train-000000.tar", "record": [1250, 6543360, "d41d…"], "sha256": "e5f0…"}
   The first line holds the setting in the same way (data/seal.py).
A line that a kill has cut, or in which a bit has changed, ends what is taken over: its piece and those behind it are
made once more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.files import write_whole
from data.seal import Unsealed, seal, unseal


class Journal:
    """What is finished so far; a context manager. `setting` must be equal for earlier lines to be of use; JSON."""

    def __init__(self, path: Path, setting: object) -> None:
        self.path = path
        self.header = seal({"setting": setting}, lines=False)
        self.records: dict[str, Any] = {}  # JSON: whoever adds a record knows what it is

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
        write_whole(self.path, "".join(f"{line}\n" for line in kept))
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
