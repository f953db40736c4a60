"""The label of an example of each task of VTAB, some of them derived (task_adaptation's data/*.py, SPEC 5).

clevr_count(5)                      2: the third class, since scenes hold 3 to 10 objects
kitti_distance([0, 3], [9.5, 2.0])  1: the nearest car is 8 to 20 metres away; a pedestrian does not count
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

Values = list[bytes] | list[float] | list[int]  # of a feature of an example

CLEVR_DEPTHS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)  # units of the scene; six classes of nearly equal size
KITTI_METRES = (-100.0, 8.0, 20.0, 999.0)  # the last begins where nothing is: its images have no vehicle
NO_VEHICLE_METRES = 1000.0
KITTI_VEHICLES = 3  # Car, Van and Truck are the first of KITTI's object types in TensorFlow Datasets

# The class names of tasks whose sets have none for them: what an id means, in words of ours.
NAMES: dict[str, tuple[str, ...]] = {
    "svhn": tuple("0123456789"),
    "patch_camelyon": ("no tumour", "tumour"),
    "diabetic_retinopathy": ("none", "mild", "moderate", "severe", "proliferative"),
    "clevr_count": tuple(f"{count} objects" for count in range(3, 11)),
    "clevr_distance": (*(f"nearest up to {depth}" for depth in CLEVR_DEPTHS[1:]), f"nearest beyond {CLEVR_DEPTHS[-1]}"),
    "dsprites_x_position": tuple(f"positions {2 * label} and {2 * label + 1} of 32" for label in range(16)),
    "dsprites_orientation": tuple(f"orientation {label} of 16" for label in range(16)),
    "kitti_distance": ("vehicle up to 8 m", "vehicle up to 20 m", "vehicle beyond 20 m", "no vehicle"),
    "smallnorb_azimuth": tuple(f"azimuth {20 * label} degrees" for label in range(18)),
    "smallnorb_elevation": tuple(f"elevation {30 + 5 * label} degrees" for label in range(9)),
}


def label_of(task: str, example: Mapping[str, Values]) -> int:
    """Return the class id of a prepared example; raises KeyError or IndexError where it lacks a feature."""
    if task == "clevr_count":
        return clevr_count(len(example["objects/size"]))
    if task == "clevr_distance":
        return clevr_distance(third_of_three(example["objects/pixel_coords"]))
    if task == "kitti_distance":
        types = [int(entry) for entry in example["objects/type"]]
        return kitti_distance(types, third_of_three(example["objects/location"]))
    if task == "dsprites_x_position":
        return dsprites_x_position(int(example["label_x_position"][0]))
    if task == "dsprites_orientation":
        return dsprites_orientation(int(example["label_orientation"][0]))
    # TensorFlow Datasets has halved the azimuth already: 0 … 17.
    if task == "smallnorb_azimuth":
        return int(example["label_azimuth"][0])
    if task == "smallnorb_elevation":
        return int(example["label_elevation"][0])
    return int(example["label"][0])


def third_of_three(values: Values) -> list[float]:
    """Return the z of points that lie one after the other: x, y, z, x, y, z, …"""
    return [float(value) for value in values[2::3]]


def clevr_count(objects: int) -> int:
    """Return the class of a scene of 3 to 10 objects."""
    return objects - 3


def clevr_distance(depths: Sequence[float]) -> int:
    """Return the class of the nearest object's depth: the third of its `pixel_coords`."""
    return interval(min(depths), CLEVR_DEPTHS)


def kitti_distance(types: Sequence[int], z: Sequence[float]) -> int:
    """Return the class of the metres to the nearest car, van or truck, the z of its `location`; 3 without any."""
    nearest = NO_VEHICLE_METRES
    for object_type, distance in zip(types, z, strict=True):
        if object_type < KITTI_VEHICLES:
            nearest = min(nearest, distance)
    return interval(nearest, KITTI_METRES)


def dsprites_x_position(position: int) -> int:
    """Return which of 16 classes one of 32 positions is in."""
    return position // 2


def dsprites_orientation(orientation: int) -> int:
    """Return which of 16 classes one of 40 angles is in: two or three angles a class."""
    return int(orientation // 2.5)


def interval(value: float, starts: Sequence[float]) -> int:
    """Return the index of the last start below `value`; a value on a start belongs to the interval before it."""
    return bisect_left(starts, value) - 1
