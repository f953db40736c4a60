"""Definitions of the 19 VTAB-1k tasks, and the label of each example (Zhai et al. 2019; SPEC 5).

The definitions are the arguments of google-research/task_adaptation, and the labels follow its data/*.py.

A task trains on the first 800 rows of its train part and the first 200 rows of its validation part, and is evaluated on
its whole test part. A part is a slice of a TensorFlow Datasets split in the same notation: `train[80%:]` is the last
fifth of `train`.

    cifar100: rows("validation")            ("train", range(45_000, 50_000))
    cifar100: rows("val200")                ("train", range(45_000, 45_200))
    clevr_count: crop                       False: a crop may remove objects and change the count
    clevr_count: label_of 5 objects         2: the third class, because scenes have 3 to 10 objects

The ViT paper fine-tunes on the 1,000 images at 384 pixels, batch 512, 2,500 steps, learning rate 0.01 (appendix B.1.1),
and reports the mean over all tasks and over each group (table 9). Images are resized to a square without crop or flip:
`resize_tf1` (task_adaptation's data_loader.preprocess_fn).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Group = Literal["natural", "specialized", "structured"]
Split = Literal["train", "validation", "test", "train800", "val200", "train800val200"]

TRAIN_SAMPLES = 800
VALIDATION_SAMPLES = 200

# Number of images in each split, as published by TensorFlow Datasets and asserted by the tests of task_adaptation.
SIZES: dict[str, dict[str, int]] = {
    "caltech101": {"train": 3_060, "test": 6_084},  # 30 images of each of 102 classes
    "cifar100": {"train": 50_000, "test": 10_000},
    "dtd": {"train": 1_880, "validation": 1_880, "test": 1_880},  # the first of its ten folds
    "oxford_flowers102": {"train": 1_020, "validation": 1_020, "test": 6_149},
    "oxford_iiit_pet": {"train": 3_680, "test": 3_669},
    "sun397": {"train": 76_128, "validation": 10_875, "test": 21_750},  # configuration `tfds`
    "svhn_cropped": {"train": 73_257, "test": 26_032},
    "patch_camelyon": {"train": 262_144, "validation": 32_768, "test": 32_768},
    "eurosat": {"train": 27_000},  # configuration `rgb`
    "resisc45": {"train": 31_500},
    "diabetic_retinopathy_detection": {"train": 35_126, "validation": 10_906, "test": 42_670},  # `btgraham-300`
    "clevr": {"train": 70_000, "validation": 15_000},  # the test split has no labels
    "dmlab": {"train": 65_550, "validation": 22_628, "test": 22_735},
    "dsprites": {"train": 737_280},
    "kitti": {"train": 6_347, "validation": 423, "test": 711},
    "smallnorb": {"train": 24_300, "test": 24_300},
}


@dataclass(frozen=True)
class VtabTask:
    """A VTAB-1k task: its data set and parts, number of classes, and the augmentations that preserve its labels."""

    name: str
    group: Group
    classes: int
    dataset: str  # a key of SIZES
    train: str = "train"
    validation: str = "validation"
    test: str = "test"
    # Kolesnikov et al. 2020 (BiT, 3.3) omit flips and crops "where they destroy the label semantics", and mention
    # orientation and position as examples. They do not publish a list: these two columns are our interpretation.
    # The crop is theirs, 7/8 of the sides of the resized image (`augment.crop: random`), and not an Inception crop.
    crop: bool = True
    flip: bool = True

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of images in each split of the task's data set."""
        return SIZES[self.dataset]

    def rows(self, split: Split) -> tuple[tuple[str, range], ...]:
        """Return the rows of a task split, in order, as pairs (split of the data set, range of rows in that split)."""
        if split == "train800val200":
            return (*self.rows("train800"), *self.rows("val200"))
        if split == "train800":
            return (rows_of(self.train, self.sizes, TRAIN_SAMPLES),)
        if split == "val200":
            return (rows_of(self.validation, self.sizes, VALIDATION_SAMPLES),)
        part = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        return (rows_of(part, self.sizes),)

    def samples(self, split: Split) -> int:
        """Return the number of images in a split of the task."""
        return sum(len(rows) for _, rows in self.rows(split))


NINE_TENTHS = ("train[:90%]", "train[90%:]")
FOUR_FIFTHS = ("train[:80%]", "train[80%:]")
FIFTHS = ("train[:60%]", "train[60%:80%]", "train[80%:]")
TENTHS = ("train[:80%]", "train[80%:90%]", "train[90%:]")
NORB = ("train", "test[:50%]", "test[50%:]")

TASKS = (  # in the order of the ViT paper's table 9
    VtabTask("caltech101", "natural", 102, "caltech101", *NINE_TENTHS),
    VtabTask("cifar100", "natural", 100, "cifar100", *NINE_TENTHS),
    VtabTask("dtd", "natural", 47, "dtd"),
    VtabTask("flowers102", "natural", 102, "oxford_flowers102"),
    VtabTask("pets", "natural", 37, "oxford_iiit_pet", *FOUR_FIFTHS),
    VtabTask("sun397", "natural", 397, "sun397"),
    # A mirrored digit is no longer the same digit.
    VtabTask("svhn", "natural", 10, "svhn_cropped", *NINE_TENTHS, flip=False),
    # A patch is positive if the central 32 × 32 of its 96 × 96 pixels contain tumour; a 7/8 crop always includes them.
    VtabTask("patch_camelyon", "specialized", 2, "patch_camelyon"),
    VtabTask("eurosat", "specialized", 10, "eurosat", *FIFTHS),
    VtabTask("resisc45", "specialized", 45, "resisc45", *FIFTHS),
    VtabTask("diabetic_retinopathy", "specialized", 5, "diabetic_retinopathy_detection"),
    # A crop that removes an object changes the count and the nearest distance; scaling also changes the distance.
    VtabTask("clevr_count", "structured", 8, "clevr", *NINE_TENTHS, "validation", crop=False),
    VtabTask("clevr_distance", "structured", 6, "clevr", *NINE_TENTHS, "validation", crop=False),
    VtabTask("dmlab", "structured", 6, "dmlab", crop=False),
    # A crop changes the position, and a flip mirrors it. A crop preserves the orientation, but a flip does not.
    VtabTask("dsprites_x_position", "structured", 16, "dsprites", *TENTHS, crop=False, flip=False),
    VtabTask("dsprites_orientation", "structured", 16, "dsprites", *TENTHS, flip=False),
    VtabTask("kitti_distance", "structured", 4, "kitti", crop=False),
    # A flip changes the azimuth of the camera, but not its elevation.
    VtabTask("smallnorb_azimuth", "structured", 18, "smallnorb", *NORB, flip=False),
    VtabTask("smallnorb_elevation", "structured", 9, "smallnorb", *NORB),
)


def rows_of(part: str, sizes: Mapping[str, int], most: int | None = None) -> tuple[str, range]:
    """Resolve a part to a split and its rows, limited to the first `most` rows.

    `rows_of("train[90%:]", {"train": 50_000}, 200)` is "train" and 45,000 … 45,199.
    """
    split, _, percents = part.removesuffix("]").partition("[")
    start, _, stop = percents.partition(":")
    first = sizes[split] * int(start.rstrip("%") or 0) // 100
    end = sizes[split] * int(stop.rstrip("%") or 100) // 100
    return split, range(first, end)[:most]


# ------------------------------------------------------------------------------------------------ labels

Values = list[bytes] | list[float] | list[int]  # values of one feature of an example

CLEVR_DEPTHS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)  # scene units; six classes of nearly equal size
KITTI_METRES = (-100.0, 8.0, 20.0, 999.0)  # the last class, from 999 m, is for images without a vehicle
NO_VEHICLE_METRES = 1000.0
KITTI_VEHICLES = 3  # Car, Van and Truck are the first of KITTI's object types in TensorFlow Datasets

# Our class names for tasks whose data sets do not provide them.
NAMES: dict[str, tuple[str, ...]] = {
    "svhn": tuple("0123456789"),
    "patch_camelyon": ("no tumour", "tumour"),
    "diabetic_retinopathy": ("none", "mild", "moderate", "severe", "proliferative"),
    "clevr_count": tuple(map("{} objects".format, range(3, 11))),
    "clevr_distance": (*map("nearest up to {}".format, CLEVR_DEPTHS[1:]), f"nearest beyond {CLEVR_DEPTHS[-1]}"),
    "dsprites_x_position": tuple(map("positions {} and {} of 32".format, range(0, 32, 2), range(1, 32, 2))),
    "dsprites_orientation": tuple(map("orientation {} of 16".format, range(16))),
    "kitti_distance": ("vehicle up to 8 m", "vehicle up to 20 m", "vehicle beyond 20 m", "no vehicle"),
    "smallnorb_azimuth": tuple(map("azimuth {} degrees".format, range(0, 360, 20))),
    "smallnorb_elevation": tuple(map("elevation {} degrees".format, range(30, 75, 5))),
}


def label_of(task: str, example: Mapping[str, Values]) -> int:
    """Return the class id of an example for a task; raises KeyError or IndexError if a feature is missing."""
    match task:
        case "clevr_count":  # scenes contain 3 to 10 objects
            return len(example["objects/size"]) - 3
        case "clevr_distance":  # depth of the nearest object; the values are x, y, depth, x, y, depth, …
            return interval(min(map(float, example["objects/pixel_coords"][2::3])), CLEVR_DEPTHS)
        case "kitti_distance":  # distance (z, in metres) to the nearest car, van or truck; class 3 if there is none
            nearest = NO_VEHICLE_METRES
            metres = map(float, example["objects/location"][2::3])
            for object_type, distance in zip(map(int, example["objects/type"]), metres, strict=True):
                if object_type < KITTI_VEHICLES:
                    nearest = min(nearest, distance)
            return interval(nearest, KITTI_METRES)
        case "dsprites_x_position":  # 32 positions, two per class
            return int(example["label_x_position"][0]) // 2
        case "dsprites_orientation":  # 40 angles, two or three per class
            return int(int(example["label_orientation"][0]) // 2.5)
        case "smallnorb_azimuth":  # TensorFlow Datasets already halves the original value: 0 … 17
            return int(example["label_azimuth"][0])
        case "smallnorb_elevation":
            return int(example["label_elevation"][0])
    return int(example["label"][0])


def interval(value: float, starts: Sequence[float]) -> int:
    """Return the index of the last start below `value`; a value equal to a start belongs to the previous interval."""
    return bisect_left(starts, value) - 1
