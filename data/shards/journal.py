"""The record of an index in the making: a killed packing or indexing goes on where it stopped.

1. `with IndexJournal(path, …)` reads `<path>.partial`, if a command of the same setting left one (data/seal.py), and
   clears away the temporary files of killed processes;
2. `has` says which shards need no more work;
3. `add` records each shard as it is finished: its row in the index, its samples a class, and what was passed over
   (`Refusals`), by its name;
4. `finish` writes the index from those that the set has, and deletes the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from data.index.document import SUFFIX, write_index
from data.index.index import Index
from data.index.names import Names
from data.index.shard import Shard
from data.index.tar import Refusals
from data.seal import Journal


class Record(NamedTuple):
    """What is known about a finished shard."""

    shard: Shard
    class_counts: Mapping[int, int]  # class → samples
    refused: Refusals  # members of the tar that were passed over, and samples that nothing can be made of


class IndexJournal:
    """Shards finished so far, for the index at `path`; a context manager.

    `setting` is whatever must be equal for the lines of an earlier command to be of use.
    """

    def __init__(self, path: Path, classes: int | None, setting: str = ""):
        self.path = path
        self.classes = classes
        self.journal = Journal(path.with_name(path.name + ".partial"), [classes, setting])
        self.records: dict[str, Record] = {}  # shard name → record

    def __enter__(self) -> IndexJournal:
        # What killed processes of this machine left half written goes, of this set alone: another host may be at work
        # on another set in the same folder.
        set_name = self.path.name.removesuffix(SUFFIX)
        for path in self.path.parent.glob(".tmp-*-*"):
            _, pid, *_, temporary_of = path.name.split("-", 3)  # see `data.files.temporary_name`
            is_ours = temporary_of.startswith(set_name) and pid.isdigit()
            # A process that lives may still be writing its file.
            if is_ours and not psutil.pid_exists(int(pid)):
                path.unlink(missing_ok=True)

        self.journal.__enter__()
        for name, (row, class_counts, refused) in self.journal.records.items():
            counts = {int(label): samples for label, samples in class_counts.items()}  # JSON's keys are text
            refusals = Refusals()
            for reason, (count, first) in refused.items():
                refusals.counts[reason] = count
                if first:
                    refusals.first[reason] = first
            self.records[name] = Record(Shard(*row), counts, refusals)
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.__exit__()

    def has(self, shard: str, size: int) -> bool:
        """Return whether a shard of this name and size in bytes is finished."""
        return shard in self.records and self.records[shard].shard.bytes == size

    def add(self, shard: Shard, class_counts: Mapping[int, int], refused: Refusals) -> None:
        """Record a finished shard."""
        self.records[shard.name] = Record(shard, class_counts, refused)
        reasons = {reason: [count, refused.first.get(reason, "")] for reason, count in refused.counts.items()}
        self.journal.add(shard.name, [list(vars(shard).values()), dict(class_counts), reasons])

    def finish(self, directory: Path | str, names: Names, finished: Iterable[str]) -> Index:
        """Write the index of the finished shards of the set, which lie in `directory`, and delete the journal.

        An earlier try may have recorded shards that the set does not have. `names` are those of the classes, in the
        order of their ids, where they are known.
        """
        shards = []
        samples_of_class: Counter[int] = Counter()
        refused = Refusals()
        # By name, whatever order they were finished in: the numbers of the shards decide the order of samples.
        for name in sorted(finished):
            record = self.records[name]
            shards.append(record.shard)
            samples_of_class.update(record.class_counts)
            refused.add_all(record.refused, name)

        classes = self.classes or max(samples_of_class, default=-1) + 1
        class_counts = [samples_of_class[label] for label in range(classes)]
        index = write_index(self.path, directory, shards, class_counts, names, refused.counts, refused.first)
        self.journal.path.unlink()
        return index
