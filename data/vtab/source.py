"""A task of VTAB-1k as a source of samples: from its owners' archives, or from what TensorFlow Datasets has prepared.

    samples(task("dtd"), Path("downloads"), "train800val200")      1,000 samples, in the order of the archive
    VTAB["dtd"].published["test"]                                   1,880 samples of 47 classes

1. A folder with a dataset_info.json is TensorFlow Datasets' own: its rows are taken as they lie (`data.vtab.prepared`);
2. any other holds the archives: their entries are listed, ordered as there, chosen (`data.vtab.order`), and read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from data.archives.published import Published
from data.archives.sources import Archive
from data.errors import DataError
from data.index.names import Names
from data.shards.sources import Sample
from data.vtab import arrays, dmlab, labels, prepared, trees
from data.vtab.order import Entry, chosen
from data.vtab.scenes import SCENES
from data.vtab.tasks import TASKS, Split, Task
from data.vtab.trees import CLASS_NAMES, TREES

SPLITS: tuple[Split, ...] = ("train800", "val200", "train800val200", "test")
SOURCE = "Zhai et al. 2019, table 2; task_adaptation's tests"
# Why the thousand images that are taken from an archive are others than the original's.
OTHER_IMAGES = {
    "caltech101": (
        "the original's 30 images of a class were drawn from their order in a file system, which the archive does not "
        "tell: train and test are other images than the original's, numbers are comparable and not the same"
    ),
}


class Reader(NamedTuple):
    """What reads a set from its owners' archives."""

    entries: Callable[[Path, Task, str], list[Entry]]  # of a split of the set, for a task
    samples: Callable[[Path, Mapping[str, Sequence[Entry]]], Iterator[Sample]]  # of chosen entries


def readers() -> dict[str, Reader]:
    """What reads each set, by its name."""
    by_set = {"dmlab": Reader(dmlab.entries, dmlab.samples)}
    for name, tree in (TREES | SCENES).items():
        by_set[name] = Reader(tree.entries, partial(trees.samples, tree))
    for name, rows in arrays.ROWS.items():
        by_set[name] = Reader(partial(arrays.entries, rows), partial(arrays.samples, rows))
    return by_set


READERS = readers()


def samples(task: Task, path: Path, split: str) -> Iterator[Sample]:
    """The samples of a task's split; raises DataError where what lies at the path is not what the task is made of."""
    part = cast(Split, split)  # checked by whoever read the recipe: VTAB names the splits
    if prepared.is_prepared(path):
        yield from prepared.samples(path, task, part)
        return
    if task.name in OTHER_IMAGES:
        logging.getLogger(__name__).warning("%s, %s: %s", task.name, split, OTHER_IMAGES[task.name])
    taken = chosen(task, part, partial(listed, path, task))
    yield from READERS[task.dataset].samples(path, taken)


def listed(path: Path, task: Task, split: str) -> list[Entry]:
    """The entries of a split of a set; raises DataError where its lists or annotations are not what they should be."""
    try:
        return READERS[task.dataset].entries(path, task, split)
    # Text, JSON and tables in some hundred thousand files: what is odd in one of them is told, not foreseen.
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise DataError(
            f"{path}: the {split} part of {task.dataset} is not as its owners distribute it: {error!r}\n"
            "  expected the files that docs/vtab.md names: download them again and compare their sizes or checksums"
        ) from error


def classes(task: Task, path: Path) -> Names:
    """The class names of a task, in the order of their ids; none where neither its set nor we have any."""
    if task.name in labels.NAMES:
        return labels.NAMES[task.name]
    if prepared.is_prepared(path):
        return prepared.names_of(path, task)
    if task.dataset in CLASS_NAMES:
        return CLASS_NAMES[task.dataset](path)
    return arrays.cifar_names(path) if task.dataset == "cifar100" else ()


def archive_of(task: Task) -> Archive:
    """A task as the sources of a pack stage know data sets."""
    published: dict[str, Published] = {}
    for split in SPLITS:
        published[split] = Published(task.samples(split), task.classes, SOURCE)
    return Archive(partial(samples, task), partial(classes, task), published)


VTAB: dict[str, Archive] = {task.name: archive_of(task) for task in TASKS}
