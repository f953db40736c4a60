"""The sets of VTAB whose labels stand in a table or an annotation of each image: retinopathy, CLEVR, KITTI.

train test trainLabels.csv retinopathy_solution.csv     folders or zips, of Kaggle's contest of 2015
CLEVR_v1.0.zip                                          images, and scenes/CLEVR_{train,val}_scenes.json
data_object_image_2.zip data_object_label_2.zip devkit_object.zip     of KITTI
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.archives.members import file_at, first_present, members, read_members
from data.errors import DataError
from data.vtab import labels
from data.vtab.order import Entry
from data.vtab.tasks import Task
from data.vtab.trees import Tree, in_archive, last_parts

FUNDUS_PAGE = "https://www.kaggle.com/c/diabetic-retinopathy-detection/data"
FUNDUS = {"train": ("train.zip", "train"), "test": ("test.zip", "test")}
# The owners tell apart what their public and their private ranking were made of.
FUNDUS_USAGE = {"validation": "Public", "test": "Private"}

CLEVR_PAGE = "https://cs.stanford.edu/people/jcjohns/clevr/"
CLEVR = ("CLEVR_v1.0.zip", "CLEVR_v1.0")
CLEVR_SCENES = {"train": "CLEVR_train_scenes.json", "validation": "CLEVR_val_scenes.json"}

KITTI_PAGE = "https://www.cvlibs.net/datasets/kitti/eval_object.php"
KITTI_IMAGES = ("data_object_image_2.zip", "data_object_image_2")
KITTI_LABELS = ("data_object_label_2.zip", "data_object_label_2")
KITTI_DEVKIT = ("devkit_object.zip", "devkit_object")
KITTI_SEED = 123
KITTI_SHARE = 10  # per cent of the drives, of the validation part and of the test part


# ------------------------------------------------------------------------------------------------- retinopathy


def fundus_entries(folder: Path, task: Task, split: str) -> list[Entry]:
    """The eyes that the owners' tables grade, from 0 to 4: a line is `10_left,0`."""
    name = "trainLabels.csv" if split == "train" else "retinopathy_solution.csv"
    path = file_at(folder / name, FUNDUS_PAGE)
    entries = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if split == "train" or row["Usage"] == FUNDUS_USAGE[split]:
                entries.append(Entry(row["image"], f"{row['image']}.jpeg", int(row["level"])))
    return entries


def fundus_archive(folder: Path, split: str) -> Path:
    """The archive that holds the images of a split; validation and test are parts of the owners' test images."""
    return first_present(folder, FUNDUS["train" if split == "train" else "test"], FUNDUS_PAGE)


def fundus_image(raw: bytes, name: str) -> tuple[bytes, str]:
    """The image as the contest's winner prepared it."""
    # It imports OpenCV, which nothing else here needs.
    from data.vtab.fundus import fundus

    return fundus(raw, name)


# ------------------------------------------------------------------------------------------------- CLEVR


def clevr_entries(folder: Path, task: Task, split: str) -> list[Entry]:
    """The scenes of a split, with how many objects there are or how near the nearest is."""
    archive = first_present(folder, CLEVR, CLEVR_PAGE)
    name = CLEVR_SCENES[split]
    entries = []
    for scene in json.loads(read_members(archive, [name])[name])["scenes"]:
        objects = scene["objects"]
        if task.name == "clevr_count":
            label = labels.clevr_count(len(objects))
        else:
            # TensorFlow Datasets keeps depths as float32, and the thresholds are compared with these.
            label = labels.clevr_distance([float(np.float32(entry["pixel_coords"][2])) for entry in objects])
        entries.append(Entry(scene["image_filename"], scene["image_filename"], label))
    return entries


# ------------------------------------------------------------------------------------------------- KITTI


def kitti_entries(folder: Path, task: Task, split: str) -> list[Entry]:
    """The labelled images of the drives of a split, with the distance of the nearest vehicle."""
    drives = kitti_drives(folder)
    wanted = set(kitti_split(drives)[split])
    entries = []
    for member in members(first_present(folder, KITTI_LABELS, KITTI_PAGE)):
        stem, _, extension = member.base.rpartition(".")
        if extension != "txt" or not stem.isdigit():
            continue
        if int(stem) >= len(drives):
            raise DataError(f"{folder}: {member.base} has no line in train_rand.txt, which has {len(drives)}")
        if drives[int(stem)] in wanted:
            entries.append(Entry(f"{stem}.png", f"{stem}.png", kitti_label(member.read().decode())))
    return entries


def kitti_label(text: str) -> int:
    """The class of an image from its label file: type, 13 numbers with x, y, z at 11 to 13, rotation; a line each."""
    types = []
    distances = []
    for line in text.splitlines():
        words = line.split()
        # What is far away is marked without an annotation.
        if words and words[0] != "DontCare":
            types.append(labels.KITTI_TYPES.index(words[0]))
            distances.append(float(np.float32(words[13])))
    return labels.kitti_distance(types, distances)


def kitti_drives(folder: Path) -> list[str]:
    """The drive that each labelled image is from: line n of train_rand.txt says which line of train_mapping.txt."""
    files = read_members(first_present(folder, KITTI_DEVKIT, KITTI_PAGE), ["train_rand.txt", "train_mapping.txt"])
    lines = files["train_mapping.txt"].decode().splitlines()
    numbers = [int(number) for number in files["train_rand.txt"].decode().split(",")]
    return [lines[number - 1].split()[1] for number in numbers]


def kitti_split(drives: Sequence[str]) -> dict[str, list[str]]:
    """A tenth of the drives to test on, a tenth to validate on, drawn as TensorFlow Datasets draws them."""
    every = sorted(set(drives))
    count = max(1, KITTI_SHARE * len(every) // 100)
    draws = np.random.RandomState(KITTI_SEED)
    test = draws.choice(every, count, replace=False).tolist()
    others = [drive for drive in every if drive not in test]
    validation = draws.choice(others, count, replace=False).tolist()
    train = [drive for drive in others if drive not in validation]
    return {"train": train, "validation": validation, "test": test}


def kitti_place(name: str) -> str:
    """`training/image_2/000001.png` → `000001.png`; "" for the owners' test images, which have no labels."""
    return name.rpartition("/")[2] if "training/" in name else ""


# ------------------------------------------------------------------------------------------------- the table

SCENES: dict[str, Tree] = {
    "diabetic_retinopathy_detection": Tree(fundus_entries, fundus_archive, last_parts(1), fundus_image),
    "clevr": Tree(clevr_entries, in_archive(CLEVR, CLEVR_PAGE), last_parts(1)),
    "kitti": Tree(kitti_entries, in_archive(KITTI_IMAGES, KITTI_PAGE), kitti_place),
}
