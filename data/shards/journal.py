"""The record of an index in the making: a killed packing or indexing goes on where it stopped.

How it is used, in order:
1. `with Journal(path, …)` reads `<path>.partial`, if a run of the same setting left one, and clears away the
   temporary files of killed processes;
2. `has` says which shards need no more work;
3. `add` appends each shard as it is finished, one line of JSON:
       [["train-000000.tar", 1250, 6543360, "d41d…", "77ab…"], {"0": 600, "1": 650},
        {"member type .txt2": [3, "a.txt2"]}, "e5f0…"]
   its row in the index, its samples a class, what was passed over (`refusals`), and the sha256 of these;
4. `finish` writes the index from all of them and deletes the journal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import psutil

from data.files import write_whole
from data.index.document import SUFFIX, write_index
from data.index.index import Index
from data.index.names import Names
from data.index.refusals import Refusals
from data.index.shard import Shard, shard_row

JOURNAL_SCHEMA = 2  # as the header of a journal begins


class Record(NamedTuple):
    """What is known about a finished shard."""

    shard: Shard
    class_counts: Mapping[int, int]  # class → samples
    refused: Refusals  # members of the tar that were passed over, and samples that nothing can be made of


class Journal:
    """Shards finished so far, for the index at `path`; a context manager.

    `setting` is whatever must be equal for the lines of an earlier run to be of use.
    """

    def __init__(self, path: Path, classes: int | None, setting: str = ""):
        self.path = path
        self.classes = classes
        self.partial = path.with_name(path.name + ".partial")
        self.header = json.dumps([JOURNAL_SCHEMA, classes, setting])
        self.records: dict[str, Record] = {}  # shard name → record

    def __enter__(self) -> Journal:
        lines = self.partial.read_text(errors="replace").splitlines() if self.partial.exists() else []
        # The records of another setting, with shards cut elsewhere say, are of no use here.
        is_ours = bool(lines) and lines[0] == self.header
        self.delete_temporaries()
        if is_ours:
            self.take_over(lines[1:])
        # Written anew instead of appended to: its last line may be one that a kill cut, and the next would be glued
        # to it. All records at once: a kill between two of them would lose the rest.
        kept_lines = [self.header, *map(line_of, self.records.values())]
        write_whole(self.partial, "".join(f"{line}\n" for line in kept_lines))
        self.file = open(self.partial, "a")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def delete_temporaries(self) -> None:
        """Delete what killed processes of this machine left half written, of this set alone.

        Another host may be at work on another set in the same folder, and its processes are not ours to judge.
        """
        set_name = self.path.name.removesuffix(SUFFIX)
        for path in self.path.parent.glob(".tmp-*-*"):
            _, pid, *_, name = path.name.split("-", 3)  # see `data.files.temporary_name`
            is_ours = name.startswith(set_name) and pid.isdigit()
            # A process that lives may still be writing its file.
            if is_ours and not psutil.pid_exists(int(pid)):
                path.unlink(missing_ok=True)

    def take_over(self, lines: Iterable[str]) -> None:
        """Take what an earlier run recorded."""
        for line in lines:
            try:
                row, class_counts, refused, digest = json.loads(line)
            except (ValueError, TypeError):
                return  # the line that the kill cut
            # The index would be sealed with what a changed bit says; a shard without a line is made once more.
            if digest != digest_of_content([row, class_counts, refused]):
                return
            counts = {int(label): samples for label, samples in class_counts.items()}  # JSON's keys are text
            shard = Shard(*row)
            self.records[shard.name] = Record(shard, counts, Refusals.from_json(refused))

    def has(self, shard: str, size: int) -> bool:
        """Whether a shard of this name and size in bytes is finished."""
        return shard in self.records and self.records[shard].shard.bytes == size

    def add(self, shard: Shard, class_counts: Mapping[int, int], refused: Refusals) -> None:
        """Record a finished shard."""
        record = Record(shard, class_counts, refused)
        self.records[shard.name] = record
        # Flushed line by line, so that a kill costs the shards at work and no finished one.
        print(line_of(record), file=self.file, flush=True)

    def keep(self, shards: Iterable[str]) -> None:
        """Forget shards that an earlier try wrote but this one does not have."""
        self.records = {name: self.records[name] for name in shards}

    def finish(self, directory: Path | str, names: Names = ()) -> Index:
        """Write the index of all recorded shards, which lie in `directory`, and delete the journal.

        `names` are those of the classes, in the order of their ids, where they are known.
        """
        shards = []
        samples_of_class: Counter[int] = Counter()
        refused = Refusals()
        # By name, whatever order they were finished in: the numbers of the shards decide the order of samples.
        for _, record in sorted(self.records.items()):
            shards.append(record.shard)
            samples_of_class.update(record.class_counts)
            refused.add_all(record.refused, record.shard.name)

        classes = self.classes or max(samples_of_class, default=-1) + 1
        class_counts = [samples_of_class[label] for label in range(classes)]
        index = write_index(self.path, directory, shards, class_counts, names, refused)
        self.partial.unlink()
        return index


def line_of(record: Record) -> str:
    """A record as the journal holds it, with its digest."""
    content = [shard_row(record.shard), dict(record.class_counts), record.refused.as_json()]
    return json.dumps([*content, digest_of_content(content)])


def digest_of_content(content: Sequence[object]) -> str:
    """The sha256 of a line of the journal but for its digest."""
    # Through JSON once more: its keys are text, and the class ids of a line that is being written are not yet.
    return sha256(json.dumps(json.loads(json.dumps(content))).encode()).hexdigest()
