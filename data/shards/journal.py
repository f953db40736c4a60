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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from data.errors import DataError
from data.index.document import SUFFIX, write_index
from data.index.index import Index, Refusals
from data.index.names import NO_NAME, Names, preview
from data.index.shard import Shard
from data.seal import Journal

FEW_NAMES = 1000  # of classes, up to which each may have a single image; beyond, texts that hardly repeat are captions


class Record(NamedTuple):
    """What is known about a finished shard."""

    shard: Shard
    class_counts: Mapping[int, int]  # class → samples
    refused: Refusals  # members of the tar that were passed over, and samples that nothing can be made of
    texts: Refusals  # labels that are texts, by the text: names of classes, if the set has no ids


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
        for name, (row, class_counts, *counted) in self.journal.records.items():
            counts = {int(label): samples for label, samples in class_counts.items()}  # JSON's keys are text
            refused, texts = map(restored, counted)
            self.records[name] = Record(Shard(*row), counts, refused, texts)
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.__exit__()

    def has(self, shard: str, size: int) -> bool:
        """Return whether a shard of this name and size in bytes is finished."""
        return shard in self.records and self.records[shard].shard.bytes == size

    def add(self, record: Record) -> None:
        """Record a finished shard."""
        shard = record.shard
        self.records[shard.name] = record
        counted = []
        for refusals in (record.refused, record.texts):
            counted.append(
                {reason: [count, refusals.first.get(reason, "")] for reason, count in refusals.counts.items()}
            )
        self.journal.add(shard.name, [list(vars(shard).values()), dict(record.class_counts), *counted])

    def finish(self, directory: Path | str, names: Names, finished: Iterable[str]) -> Index:
        """Write the index of the finished shards of the set, which lie in `directory`, and delete the journal.

        An earlier try may have recorded shards that the set does not have. `names` are those of the classes, in the
        order of their ids, where they are known. Without them, labels that are texts are the names, where no label is
        an id; raises DataError where these are more than the classes that there may be.
        """
        shards = []
        samples_of_class: Counter[int] = Counter()
        refused = Refusals()
        texts = Refusals()
        # By name, whatever order they were finished in: the numbers of the shards decide the order of samples.
        for name in sorted(finished):
            record = self.records[name]
            shards.append(record.shard)
            samples_of_class.update(record.class_counts)
            refused.add_all(record.refused, name)
            texts.add_all(record.texts, name)

        samples = sum(shard.samples for shard in shards)
        are_captions = len(texts.counts) > max(FEW_NAMES, samples // 2)
        if texts.counts and not samples_of_class and not are_captions:
            names = tuple(sorted(texts.counts))
            if self.classes and len(names) > self.classes:
                raise DataError(
                    f"{self.path}: labels are {len(names)} names, {preview(names)}, and classes are {self.classes}\n"
                    "  expected as many classes as there are names, or none given: leave --classes out"
                )
            for label, name in enumerate(names):
                samples_of_class[label] = texts.counts[name]
        # Beside ids nobody can tell which id a name has.
        else:
            for text, count in texts.counts.items():
                refused.add(NO_NAME, texts.first[text], count)
        classes = self.classes or max(samples_of_class, default=-1) + 1
        class_counts = [samples_of_class[label] for label in range(classes)]
        index = write_index(self.path, directory, shards, class_counts, names, refused)
        self.journal.path.unlink()
        return index


def restored(counted: Mapping[str, Sequence[Any]]) -> Refusals:
    """Return what was counted for a shard, from a line of the journal: reason → how often, and the first."""
    refusals = Refusals()
    for reason, (count, first) in counted.items():
        refusals.counts[reason] = count
        if first:
            refusals.first[reason] = first
    return refusals
