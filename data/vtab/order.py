"""Which images the thousand of a task are: the order of TensorFlow Datasets, restated.

VTAB takes the first 800 and 200 rows of sets that TensorFlow Datasets has prepared, and these lie in an order that
looks random: that of the MD5 of the split's name and the example's key (its core/hashing.py, core/writer.py). The key
is a file's name or a row's number, which the original archive tells as well. So the same images are chosen from that:

    in_order("train", ["0", "1", …, "49999"])     row 16399 of CIFAR's train.bin first, then 1680, 47917, …

1. A reader lists the entries of a split of a set, in any order;
2. `chosen` counts them, orders them, and takes the rows of the task's split (`data.vtab.tasks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import md5
from typing import NamedTuple

from data.errors import DataError
from data.vtab.tasks import Split, Task


class Entry(NamedTuple):
    """An image of a set: its key in TensorFlow Datasets, where it lies in the archive, and its class id."""

    key: str
    place: str  # a path, or the number of a row
    label: int


def in_order(split: str, entries: Iterable[Entry]) -> list[Entry]:
    """The entries of a split of a set as TensorFlow Datasets orders them."""
    return sorted(entries, key=lambda entry: md5(f"{split}{entry.key}".encode()).digest())


def chosen(task: Task, split: Split, entries_of: Callable[[str], Sequence[Entry]]) -> dict[str, list[Entry]]:
    """The entries of a task's split, by the split of the set that they are from; `entries_of` lists one of these.

    Raises DataError where a split of the set has another size than is published: its rows would be other images.
    """
    ordered: dict[str, list[Entry]] = {}
    taken: dict[str, list[Entry]] = {}
    for set_split, rows in task.rows(split):
        if set_split not in ordered:
            entries = entries_of(set_split)
            check_size(task, set_split, len(entries))
            ordered[set_split] = in_order(set_split, entries)
            taken[set_split] = []
        taken[set_split] += ordered[set_split][rows.start : rows.stop]
    return taken


def check_size(task: Task, set_split: str, samples: int) -> None:
    """Raise DataError unless a split of a set has the size that is published."""
    expected = task.sizes[set_split]
    if samples != expected:
        raise DataError(
            f"{task.dataset}, {set_split}: found {samples:,} images, expected {expected:,}\n"
            f"  the images of {task.name} are chosen by their place among all of them: download the archive again and\n"
            "  compare its size or checksum with its owners'"
        )
