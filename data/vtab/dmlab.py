"""dmlab: frames of DeepMind Lab with the reward of the nearest object and how far it is, as VTAB's authors give it.

    dmlab.tar.gz            or the folder `dmlab` that it was unpacked to
      dmlab-train.tfrecord…        examples of image, filename and label
      dmlab-validation.tfrecord…
      dmlab-test.tfrecord…

The six classes have no names: they are {close, far, very far} × {positive, negative reward}, in an order that the
authors do not write down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data.archives.images import as_image, tell
from data.archives.members import first_present, members
from data.errors import DataError
from data.index.refusals import Refusals
from data.shards.sources import Sample
from data.vtab.order import Entry
from data.vtab.records import Values, features, records
from data.vtab.tasks import Task

PAGE = "https://storage.googleapis.com/dmlab-vtab/dmlab.tar.gz"
ARCHIVES = ("dmlab.tar.gz", "dmlab")


def examples(folder: Path, split: str) -> Iterator[dict[str, Values]]:
    """The examples of a split, file after file."""
    archive = first_present(folder, ARCHIVES, PAGE)
    for member in members(archive):
        if member.base.startswith(f"dmlab-{split}.tfrecord"):
            name = f"{archive}: {member.base}"
            with member.opened() as file:
                for record in records(file, name):
                    yield features(record, name)


def entries(folder: Path, task: Task, split: str) -> list[Entry]:
    """Every frame of a split, by the place at which it lies; raises DataError where an example lacks its name."""
    listed = []
    for place, example in enumerate(examples(folder, split)):
        try:
            filename = example["filename"][0]
            label = int(example["label"][0])
        except (KeyError, IndexError) as error:
            raise DataError(f"{folder}: dmlab-{split}: example {place} lacks {error}; download it again") from None
        key = filename.decode() if isinstance(filename, bytes) else str(filename)
        listed.append(Entry(key, str(place), label))
    return listed


def samples(folder: Path, chosen: Mapping[str, Sequence[Entry]]) -> Iterator[Sample]:
    """The chosen frames, in the order of the files."""
    changed = Refusals()
    for split, wanted in chosen.items():
        labels = {int(entry.place): entry.label for entry in wanted}
        for place, example in enumerate(examples(folder, split)):
            if place not in labels:
                continue
            raw = example.get("image", [b""])[0]
            image, kind = as_image(raw if isinstance(raw, bytes) else b"", f"frame {place} of {split}", changed)
            yield Sample(f"{split}-{place:06d}", image, (labels[place],), kind)
    tell(folder, changed)
