"""Labels that VTAB derives from what a set says of its images (task_adaptation's data/*.py, SPEC 5).

clevr_count(5)                      2: the third class, since scenes hold 3 to 10 objects
kitti_distance([0, 3], [9.5, 2.0])  1: the nearest car is 8 to 20 metres away; a pedestrian does not count
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

CLEVR_DEPTHS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)  # units of the scene; six classes of nearly equal size
KITTI_METRES = (-100.0, 8.0, 20.0, 999.0)  # the last begins where nothing is: its images have no vehicle
NO_VEHICLE_METRES = 1000.0
# The object types of KITTI in TensorFlow Datasets' order; the first three are vehicles.
KITTI_TYPES = ("Car", "Van", "Truck", "Pedestrian", "Person_sitting", "Cyclist", "Tram", "Misc")
KITTI_VEHICLES = 3


def clevr_count(objects: int) -> int:
    """3 to 10 objects of a scene."""
    return objects - 3


def clevr_distance(depths: Sequence[float]) -> int:
    """Depth of the nearest object: the third of its `pixel_coords`."""
    return interval(min(depths), CLEVR_DEPTHS)


def kitti_distance(types: Sequence[int], z: Sequence[float]) -> int:
    """Metres to the nearest car, van or truck, the z of their `location`; 3 where there is none."""
    nearest = NO_VEHICLE_METRES
    for object_type, distance in zip(types, z, strict=True):
        if object_type < KITTI_VEHICLES:
            nearest = min(nearest, distance)
    return interval(nearest, KITTI_METRES)


def dsprites_x_position(position: int) -> int:
    """32 positions in 16 classes."""
    return position // 2


def dsprites_orientation(orientation: int) -> int:
    """40 angles in 16 classes of two or three."""
    return int(orientation // 2.5)


def smallnorb_azimuth(tens_of_degrees: int) -> int:
    """0, 2 … 34 in the distributed files; their elevations 0 … 8 are classes as they stand."""
    return tens_of_degrees // 2


def interval(value: float, starts: Sequence[float]) -> int:
    """The index of the last start below `value`; a value on a start belongs to the interval before it."""
    return bisect_left(starts, value) - 1


# ------------------------------------------------------------------------------------------------- names

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
