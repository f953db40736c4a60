"""VTAB-1k: the 19 tasks of task_adaptation (Zhai et al. 2019) as plain data, and the labels it derives (SPEC 5).

Train on the first 800 rows of `train` and the first 200 of `validation`, judge all of `test` after `PREPROCESS`;
the score is the mean over tasks. The paper fine-tunes on the 1,000 at 384 px, batch 512, 2,500 steps, rate 0.01.
Grey images (smallNORB, dSprites with its 0 and 1 stored as 0 and 255) get three equal channels when decoded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TRAIN_SAMPLES, VALIDATION_SAMPLES = 800, 200
PREPROCESS = "resize_tf1({size})"  # data_loader.py:61-69: a squash, without flip or crop; then [-1, 1]


@dataclass(frozen=True)
class Task:
    """Where a task's samples are, in the slices of TensorFlow Datasets: `train[80%:]` is its last fifth."""

    name: str
    group: str  # natural, specialized or structured: the paper's table 9 gives a mean for each
    classes: int
    dataset: str  # its TensorFlow Datasets name, with its configuration
    train: str = "train"
    validation: str = "validation"
    test: str = "test"


def _cut(percent: int) -> tuple[str, str]:
    return f"train[:{percent}%]", f"train[{percent}%:]"


_FIFTHS = ("train[:60%]", "train[60%:80%]", "train[80%:]")
_TENTHS = ("train[:80%]", "train[80%:90%]", "train[90%:]")
_NORB = ("train", "test[:50%]", "test[50%:]")

TASKS = (  # in the order of the paper's table 9
    Task("caltech101", "natural", 102, "caltech101", *_cut(90)),
    Task("cifar100", "natural", 100, "cifar100", *_cut(90)),
    Task("dtd", "natural", 47, "dtd"),
    Task("flowers102", "natural", 102, "oxford_flowers102"),
    Task("pets", "natural", 37, "oxford_iiit_pet", *_cut(80)),
    Task("sun397", "natural", 397, "sun397/tfds"),
    Task("svhn", "natural", 10, "svhn_cropped", *_cut(90)),
    Task("camelyon", "specialized", 2, "patch_camelyon"),
    Task("eurosat", "specialized", 10, "eurosat/rgb", *_FIFTHS),
    Task("resisc45", "specialized", 45, "resisc45", *_FIFTHS),
    Task("retinopathy", "specialized", 5, "diabetic_retinopathy_detection/btgraham-300"),
    Task("clevr_count", "structured", 8, "clevr", *_cut(90), "validation"),  # its test set has no labels
    Task("clevr_distance", "structured", 6, "clevr", *_cut(90), "validation"),
    Task("dmlab", "structured", 6, "dmlab"),
    Task("dsprites_location", "structured", 16, "dsprites", *_TENTHS),
    Task("dsprites_orientation", "structured", 16, "dsprites", *_TENTHS),
    Task("kitti_distance", "structured", 4, "kitti"),
    Task("smallnorb_azimuth", "structured", 18, "smallnorb", *_NORB),
    Task("smallnorb_elevation", "structured", 9, "smallnorb", *_NORB),
)


def rows(split: str, sizes: Mapping[str, int], most: int | None = None) -> tuple[str, range]:
    """The set and its rows that a task's split stands for, at most the first so many of them.

    `rows("train[90%:]", {"train": 50_000}, VALIDATION_SAMPLES)` is "train" and 45,000 … 45,199.
    """
    name, _, part = split.removesuffix("]").partition("[")
    ends = (int(end.rstrip("%") or default) for end, default in zip((part or ":").split(":"), (0, 100), strict=True))
    start, stop = (sizes[name] * end // 100 for end in ends)
    return name, range(start, stop)[:most]


def scores(accuracies: Mapping[str, float]) -> dict[str, float]:
    """Means of natural, specialized, structured and of all 19; ValueError where a task is missing or unknown."""
    if wrong := set(accuracies) ^ {task.name for task in TASKS}:
        raise ValueError(f"VTAB is the mean of exactly 19 tasks; missing or unknown: {', '.join(sorted(wrong))}")
    groups: dict[str, list[float]] = {}
    for task in TASKS:
        groups.setdefault(task.group, []).append(accuracies[task.name])
        groups.setdefault("all", []).append(accuracies[task.name])
    return {name: sum(values) / len(values) for name, values in groups.items()}


# --------------------------------------------------------------------------------- labels that are derived


def clevr_count(objects: int) -> int:
    """3 to 10 objects in the image."""
    return objects - 3


def clevr_distance(depths: Sequence[float]) -> int:
    """Depth of the nearest object, `pixel_coords[:, 2]`: six classes of nearly equal size."""
    return _interval(min(depths), (0.0, 8.0, 8.5, 9.0, 9.5, 10.0))


def kitti_distance(types: Sequence[int], z: Sequence[float]) -> int:
    """Metres to the nearest car, van or truck (types 0 to 2), z of `location`; 3 where there is none."""
    vehicles = [distance for kind, distance in zip(types, z, strict=True) if kind < 3]
    return _interval(min(vehicles, default=1000.0), (-100.0, 8.0, 20.0, 999.0))


def dsprites_location(x_position: int) -> int:
    """32 positions in 16 classes."""
    return x_position // 2


def dsprites_orientation(orientation: int) -> int:
    """40 angles in 16 classes of two or three."""
    return int(orientation // 2.5)


def smallnorb_azimuth(tens_of_degrees: int) -> int:
    """0, 2 … 34 in the distributed files; their elevations 0 … 8 are classes as they stand."""
    return tens_of_degrees // 2


def _interval(value: float, starts: Sequence[float]) -> int:
    """Index of the last start that lies below `value`; a value on a start belongs to the interval before."""
    return bisect_left(starts, value) - 1
