"""The journal of an unfinished index: lets a killed packing or indexing resume where it stopped.

1. `with IndexJournal(path, …)` reads `<path>.partial` of an earlier command with the same setting (data/seal.py), and
   deletes temporary files of killed processes.
2. `has` returns whether a shard is finished.
3. `add` records a finished shard: its row in the index, its samples per class, and skipped members (`Refusals`).
4. `finish` writes the index of the data set's shards, and deletes the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from data.errors import DataError
from data.extras.sources.numbering import are_captions
from data.extras.sources.refusals import Refusals
from data.index.document import SUFFIX, write_index
from data.index.index import Index
from data.index.names import NO_NAME, Names, preview
from data.index.shard import Shard
from data.seal import Journal


class Record(NamedTuple):
    """The journal's record of a finished shard."""

    shard: Shard
    class_counts: Mapping[int, int]  # class id → number of samples
    refused: Refusals  # skipped members of the tar, and unusable samples
    texts: Refusals  # text labels: class names, if the set has no ids


class IndexJournal:
    """Context manager that records the finished shards of the index at `path`.

    Records of an earlier command are reused only if `classes` and `setting` are equal.
    """

    def __init__(self, path: Path, classes: int | None, setting: str = ""):
        self.path = path
        self.classes = classes
        self.journal = Journal(path.with_name(path.name + ".partial"), [classes, setting])
        self.records: dict[str, Record] = {}  # shard name → record

    def __enter__(self) -> IndexJournal:
        # Delete temporary files of this machine's killed processes, only of this set: another host may be writing
        # another set to the same folder.
        set_name = self.path.name.removesuffix(SUFFIX)
        for path in self.path.parent.glob(".tmp-*-*"):
            _, pid, *_, temporary_of = path.name.split("-", 3)  # see `data.files.temporary_name`
            is_ours = temporary_of.startswith(set_name) and pid.isdigit()
            # A living process may still be writing its file.
            if is_ours and not psutil.pid_exists(int(pid)):
                path.unlink(missing_ok=True)

        self.journal.__enter__()
        for name, (row, class_counts, *counted) in self.journal.records.items():
            counts = {int(label): samples for label, samples in class_counts.items()}  # JSON keys are strings
            refused, texts = map(restored, counted)
            self.records[name] = Record(Shard(*row), counts, refused, texts)
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.__exit__()
        # A command without a finished shard leaves nothing behind.
        if not self.records:
            self.journal.path.unlink(missing_ok=True)
            with suppress(OSError):  # the folder has other files
                self.path.parent.rmdir()

    def has(self, shard: str, size: int) -> bool:
        """Return whether a shard with this name and size in bytes is finished."""
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
        """Write the index of the `finished` shards in `directory`, and delete the journal.

        Other recorded shards from an earlier attempt are ignored. `names` are class names in the order of their ids, if
        they are known. Without them, text labels become the class names, provided that no label is an id. Raises
        DataError if there are more such names than `classes`.
        """
        shards = []
        samples_of_class: Counter[int] = Counter()
        refused = Refusals()
        texts = Refusals()
        # Sort by name, because the numbers of the shards determine the order of samples.
        for name in sorted(finished):
            record = self.records[name]
            shards.append(record.shard)
            samples_of_class.update(record.class_counts)
            refused.add_all(record.refused, name)
            texts.add_all(record.texts, name)

        samples = sum(shard.samples for shard in shards)
        if texts.counts and not samples_of_class and not are_captions(len(texts.counts), samples):
            names = tuple(sorted(texts.counts))
            if self.classes and len(names) > self.classes:
                raise DataError(
                    f"{self.path}: the labels are {len(names)} names, {preview(names)}, but classes is {self.classes}\n"
                    "  expected the same number of classes and names; remove --classes"
                )
            for label, name in enumerate(names):
                samples_of_class[label] = texts.counts[name]
        # If the set also has ids, it is unknown which id belongs to a name.
        else:
            for text, count in texts.counts.items():
                refused.add(NO_NAME, texts.first[text], count)
        classes = self.classes or max(samples_of_class, default=-1) + 1
        class_counts = [samples_of_class[label] for label in range(classes)]
        index = write_index(self.path, directory, shards, class_counts, names, refused)
        self.journal.path.unlink()
        return index


def restored(counted: Mapping[str, Sequence[Any]]) -> Refusals:
    """Return a shard's counts from a line in the journal, given as {reason: (count, first name)}."""
    refusals = Refusals()
    for reason, (count, first) in counted.items():
        refusals.counts[reason] = count
        if first:
            refusals.first[reason] = first
    return refusals
