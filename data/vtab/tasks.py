"""The 19 tasks of VTAB-1k as plain data (Zhai et al. 2019; arguments of google-research/task_adaptation, SPEC 5).

A task trains on the first 800 rows of its train part and the first 200 of its validation part, and is judged on all of
its test part. A part is a slice of a set of TensorFlow Datasets, written as there: `train[80%:]` is its last fifth.

    task("cifar100").rows("validation")     ("train", range(45_000, 50_000))
    task("cifar100").rows("val200")         ("train", range(45_000, 45_200))
    task("clevr_count").crop                False: what is cut off is no longer counted

The paper fine-tunes on the 1,000 at 384 pixels, batch 512, 2,500 steps, rate 0.01 (appendix B.1.1), and reports the
mean over tasks, in all and in each group (table 9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from data.errors import UsageError

Group = Literal["natural", "specialized", "structured"]
Split = Literal["train", "validation", "test", "train800", "val200", "train800val200"]

TRAIN_SAMPLES = 800
VALIDATION_SAMPLES = 200
# task_adaptation's data_loader.preprocess_fn: squashed to a square, without crop or flip. Then −1 … 1.
PREPROCESS = "resize_tf1({size})"

# Images of each set and split, as TensorFlow Datasets publishes them and task_adaptation's tests expect them.
SIZES: dict[str, dict[str, int]] = {
    "caltech101": {"train": 3_060, "test": 6_084},  # 30 images of each of 102 classes
    "cifar100": {"train": 50_000, "test": 10_000},
    "dtd": {"train": 1_880, "validation": 1_880, "test": 1_880},  # the first of its ten folds
    "oxford_flowers102": {"train": 1_020, "validation": 1_020, "test": 6_149},
    "oxford_iiit_pet": {"train": 3_680, "test": 3_669},
    "sun397": {"train": 76_128, "validation": 10_875, "test": 21_750},  # its configuration `tfds`
    "svhn_cropped": {"train": 73_257, "test": 26_032},
    "patch_camelyon": {"train": 262_144, "validation": 32_768, "test": 32_768},
    "eurosat": {"train": 27_000},  # its configuration `rgb`
    "resisc45": {"train": 31_500},
    "diabetic_retinopathy_detection": {"train": 35_126, "validation": 10_906, "test": 42_670},  # `btgraham-300`
    "clevr": {"train": 70_000, "validation": 15_000},  # its test split has no labels
    "dmlab": {"train": 65_550, "validation": 22_628, "test": 22_735},
    "dsprites": {"train": 737_280},
    "kitti": {"train": 6_347, "validation": 423, "test": 711},
    "smallnorb": {"train": 24_300, "test": 24_300},
}


@dataclass(frozen=True)
class Task:
    """One task: what is told apart, in which parts of which set, and which distortions leave its labels true."""

    name: str
    group: Group
    classes: int
    dataset: str  # a key of SIZES
    train: str = "train"
    validation: str = "validation"
    test: str = "test"
    # Kolesnikov et al. 2020 (BiT, 3.3) leave out flips and crops "where they destroy the label semantics", and name
    # orientation and position as examples. They publish no list: these two columns are our reading of that rule.
    # A crop is theirs, of 7/8 of the sides of the resized image (`augment.crop: random`), not an inception crop.
    crop: bool = True
    flip: bool = True

    @property
    def sizes(self) -> Mapping[str, int]:
        """Images of each split of its set."""
        return SIZES[self.dataset]

    def rows(self, split: Split) -> tuple[tuple[str, range], ...]:
        """Return the rows of its set that a split stands for, in order: pairs of a split of the set, and its rows."""
        if split == "train800val200":
            return (*self.rows("train800"), *self.rows("val200"))
        if split == "train800":
            return (rows_of(self.train, self.sizes, TRAIN_SAMPLES),)
        if split == "val200":
            return (rows_of(self.validation, self.sizes, VALIDATION_SAMPLES),)
        part = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        return (rows_of(part, self.sizes),)

    def samples(self, split: Split) -> int:
        """Return how many images a split has."""
        return sum(len(rows) for _, rows in self.rows(split))


NINE_TENTHS = ("train[:90%]", "train[90%:]")
FOUR_FIFTHS = ("train[:80%]", "train[80%:]")
FIFTHS = ("train[:60%]", "train[60%:80%]", "train[80%:]")
TENTHS = ("train[:80%]", "train[80%:90%]", "train[90%:]")
NORB = ("train", "test[:50%]", "test[50%:]")

TASKS = (  # in the order of the ViT paper's table 9
    Task("caltech101", "natural", 102, "caltech101", *NINE_TENTHS),
    Task("cifar100", "natural", 100, "cifar100", *NINE_TENTHS),
    Task("dtd", "natural", 47, "dtd"),
    Task("flowers102", "natural", 102, "oxford_flowers102"),
    Task("pets", "natural", 37, "oxford_iiit_pet", *FOUR_FIFTHS),
    Task("sun397", "natural", 397, "sun397"),
    # Mirrored digits are no digits.
    Task("svhn", "natural", 10, "svhn_cropped", *NINE_TENTHS, flip=False),
    # A patch is positive where its central 32 × 32 of 96 × 96 pixels hold tumour: a crop of 7/8 of its sides has them.
    Task("patch_camelyon", "specialized", 2, "patch_camelyon"),
    Task("eurosat", "specialized", 10, "eurosat", *FIFTHS),
    Task("resisc45", "specialized", 45, "resisc45", *FIFTHS),
    Task("diabetic_retinopathy", "specialized", 5, "diabetic_retinopathy_detection"),
    # Counts change where an object is cut off; distances do too, and with the scale as well.
    Task("clevr_count", "structured", 8, "clevr", *NINE_TENTHS, "validation", crop=False),
    Task("clevr_distance", "structured", 6, "clevr", *NINE_TENTHS, "validation", crop=False),
    Task("dmlab", "structured", 6, "dmlab", crop=False),
    # A crop moves what is to be located, a flip mirrors it; an angle survives the crop alone.
    Task("dsprites_x_position", "structured", 16, "dsprites", *TENTHS, crop=False, flip=False),
    Task("dsprites_orientation", "structured", 16, "dsprites", *TENTHS, flip=False),
    Task("kitti_distance", "structured", 4, "kitti", crop=False),
    # A mirrored toy is seen from another azimuth, but from the same elevation.
    Task("smallnorb_azimuth", "structured", 18, "smallnorb", *NORB, flip=False),
    Task("smallnorb_elevation", "structured", 9, "smallnorb", *NORB),
)


def task(name: str) -> Task:
    """Return the task of this name; raises UsageError where there is none."""
    for candidate in TASKS:
        if candidate.name == name:
            return candidate
    raise UsageError(f"VTAB has no task {name!r}\n  expected one of: {', '.join(entry.name for entry in TASKS)}")


def rows_of(part: str, sizes: Mapping[str, int], most: int | None = None) -> tuple[str, range]:
    """Return the split and its rows that a part stands for, at most the first so many of them.

    `rows_of("train[90%:]", {"train": 50_000}, 200)` is "train" and 45,000 … 45,199.
    """
    split, _, percents = part.removesuffix("]").partition("[")
    start, _, stop = percents.partition(":")
    first = sizes[split] * int(start.rstrip("%") or 0) // 100
    end = sizes[split] * int(stop.rstrip("%") or 100) // 100
    return split, range(first, end)[:most]


def means(accuracies: Mapping[str, float]) -> dict[str, float]:
    """Return the mean over tasks of each group, and of all 19 as `all`; raises ValueError on other tasks.

    The mean of all is over tasks, not over groups, as in table 9.
    """
    names = {entry.name for entry in TASKS}
    missing = sorted(names - accuracies.keys())
    unknown = sorted(accuracies.keys() - names)
    if missing or unknown:
        raise ValueError(
            f"VTAB is the mean of exactly 19 tasks; missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}"
        )
    groups: dict[str, list[float]] = {}
    for entry in TASKS:
        groups.setdefault(entry.group, []).append(accuracies[entry.name])
        groups.setdefault("all", []).append(accuracies[entry.name])
    return {name: sum(values) / len(values) for name, values in groups.items()}
