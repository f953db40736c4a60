"""The sets of VTAB as their owners hand them out, small: folders, file names, lists and binary formats are true.

Each function writes a miniature below a folder and returns what is in it, by hand: for every split of the set, the key
under which TensorFlow Datasets knows an image, the key that its sample gets here, its class id, and its grey.
"""

import csv
import gzip
import io
import json
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.io import savemat

from tests.archives import picture, write_folder, write_tar_gz


class Image(NamedTuple):
    """An image of a miniature."""

    key: str  # in TensorFlow Datasets
    sample: str  # the key of the sample
    label: int
    grey: int


Splits = dict[str, list[Image]]


def png(grey: int) -> bytes:
    """A PNG of one grey, whatever the file is called: a JPEG would not keep it to the bit."""
    return picture(grey, ".png")


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)


# ------------------------------------------------------------------------------------------------- class folders


def caltech101(folder: Path, per_class: int = 12) -> dict[str, dict[str, int]]:
    """The archive with three of its classes; returns the grey of every file by class, as the split is drawn."""
    files = {}
    greys: dict[str, dict[str, int]] = {}
    for number, name in enumerate(["Faces", "BACKGROUND_Google", "accordion"]):
        for image in range(1, per_class + 1):
            grey = 60 * number + image
            files[f"101_ObjectCategories/{name}/image_{image:04d}.jpg"] = png(grey)
            greys.setdefault(name, {})[f"image_{image:04d}"] = grey
    files["101_ObjectCategories/BACKGROUND_Google/tmp"] = b""  # as it lies in the true archive
    write_tar_gz(folder / "101_ObjectCategories.tar.gz", files)
    return greys


def eurosat(folder: Path) -> Splits:
    images = []
    files = {}
    for label, name in enumerate(["AnnualCrop", "Forest"]):
        for number in range(1, 11):
            grey = 100 * label + number
            files[f"2750/{name}/{name}_{number}.jpg"] = png(grey)
            key = f"{name}_{name}_{number}.jpg"
            images.append(Image(key, f"{name}/{name}_{number}", label, grey))
    write_zip(folder / "EuroSAT.zip", files)
    return {"train": images}


def resisc45(folder: Path) -> Splits:
    images = []
    files = {}
    for label, name in enumerate(["railway", "railway_station"]):
        for number in range(1, 11):
            grey = 100 * label + number
            files[f"{name}/{name}_{number:03d}.jpg"] = png(grey)
            key = f"{name}_{name}_{number:03d}.jpg"
            images.append(Image(key, f"{name}/{name}_{number:03d}", label, grey))
    write_folder(folder / "NWPU-RESISC45", files)
    return {"train": images}


# ------------------------------------------------------------------------------------------------- lists


def dtd(folder: Path) -> Splits:
    """Lists before and behind the images; of ten folds, two."""
    splits: Splits = {"train": [], "validation": [], "test": []}
    files = {"dtd/labels/labels_joint_anno.txt": b"banded/banded_0001.jpg banded \n"}
    grey = 0
    for label, name in enumerate(["banded", "zigzagged"]):
        for number in range(1, 16):
            grey += 1
            split = list(splits)[number % 3]
            files[f"dtd/images/{name}/{name}_{number:04d}.jpg"] = png(grey)
            splits[split].append(Image(f"{name}/{name}_{number:04d}.jpg", f"{name}/{name}_{number:04d}", label, grey))
    for name, split in (("train1", "train"), ("val1", "validation"), ("test1", "test")):
        files[f"dtd/labels/{name}.txt"] = "".join(f"{image.key}\n" for image in splits[split]).encode()
        files[f"dtd/labels/{name[:-1]}2.txt"] = b"banded/banded_0001.jpg\n"
    write_tar_gz(folder / "dtd-r1.0.1.tar.gz", files)
    return splits


def flowers102(folder: Path) -> Splits:
    lists = {"train": range(5, 15), "validation": range(15, 25), "test": [*range(1, 5), *range(25, 31)]}
    files = {f"jpg/image_{number:05d}.jpg": png(number) for number in range(1, 31)}
    write_tar_gz(folder / "102flowers.tgz", files)
    class_ids = [1 + number % 5 for number in range(1, 31)]
    savemat(folder / "imagelabels.mat", {"labels": np.array([class_ids], np.uint8)})
    numbers = {mat: np.array([lists[split]]) for mat, split in zip(("trnid", "valid", "tstid"), lists, strict=True)}
    savemat(folder / "setid.mat", numbers)
    splits: Splits = {}
    for split, chosen in lists.items():
        splits[split] = []
        for number in chosen:
            name = f"image_{number:05d}"
            splits[split].append(Image(f"{name}.jpg", name, number % 5, number))
    return splits


def pets(folder: Path) -> Splits:
    splits: Splits = {"train": [], "test": []}
    files = {}
    for label, breed in enumerate(["Abyssinian", "american_bulldog"]):
        for number in range(1, 16):
            split = "train" if number <= 10 else "test"
            name = f"{breed}_{number}"
            grey = 100 * label + number
            files[f"images/{name}.jpg"] = png(grey)
            splits[split].append(Image(f"{name}.jpg", name, label, grey))
    write_tar_gz(folder / "images.tar.gz", files)
    lists = {}
    for name, split in (("trainval", "train"), ("test", "test")):
        lines = [f"{image.sample} {image.label + 1} 1 1\n" for image in splits[split]]
        lists[f"annotations/{name}.txt"] = "".join(lines).encode()
    write_tar_gz(folder / "annotations.tar.gz", lists)
    return splits


def sun397(folder: Path) -> Splits:
    """Greys are multiples of 8, since the images are encoded anew; one of them is in no list."""
    splits: Splits = {"train": [], "validation": [], "test": []}
    files = {"SUN397/README.txt": b"hello", "SUN397/a/abbey/sun_unlisted.jpg": png(1)}
    grey = 0
    for label, scene in enumerate(["/a/abbey", "/c/church/indoor"]):
        for number in range(15):
            grey += 8
            name = f"{scene}/sun_{label}{number:02d}"
            files[f"SUN397{name}.jpg"] = png(grey)
            splits[list(splits)[number % 3]].append(Image(f"{name}.jpg", name.strip("/"), label, grey))
    write_tar_gz(folder / "SUN397.tar.gz", files)
    for name, split in (("tr", "train"), ("va", "validation"), ("te", "test")):
        text = "".join(f"{image.key}\n" for image in splits[split])
        (folder / f"sun397_tfds_{name}.txt").write_text(text)
    return splits


# ------------------------------------------------------------------------------------------------- scenes


def diabetic_retinopathy(folder: Path) -> Splits:
    splits: Splits = {"train": [], "validation": [], "test": []}
    trained: dict[str, bytes] = {}
    tested: dict[str, bytes] = {}
    for number in range(1, 11):
        for side in ("left", "right"):
            name = f"{number}_{side}"
            is_trained = number <= 4
            usage = "train" if is_trained else "validation" if number <= 7 else "test"
            (trained if is_trained else tested)[f"{name}.jpeg"] = picture(10 * number)
            splits[usage].append(Image(name, name, number % 5, 10 * number))
    write_folder(folder / "train", trained)
    write_zip(folder / "test.zip", {f"test/{name}": body for name, body in tested.items()})
    with open(folder / "trainLabels.csv", "w", newline="") as file:
        rows = [["image", "level"], *([image.key, image.label] for image in splits["train"])]
        csv.writer(file).writerows(rows)
    with open(folder / "retinopathy_solution.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "level", "Usage"])
        table.writerows([image.key, image.label, "Private"] for image in splits["test"])
        table.writerows([image.key, image.label, "Public"] for image in splits["validation"])
    return splits


# Depths of a scene's objects, and the classes by hand: the count less 3; the nearest in (0, 8], (8, 8.5], …
CLEVR_SCENES = (
    ([9.2, 11.0, 10.4], 0, 3),
    ([8.0, 8.6, 12.0, 9.9], 1, 0),
    ([10.2, 11.5, 12.0, 13.0, 14.0], 2, 5),
    ([8.500000001, 9.0, 9.9, 12.0], 1, 1),  # 8.5 once it is a float32, as which TensorFlow Datasets keeps it
)


def clevr(folder: Path, task: str) -> Splits:
    splits: Splits = {"train": [], "validation": []}
    files = {}
    for split, name, count in (("train", "train", 20), ("validation", "val", 5)):
        scenes = []
        for number in range(count):
            depths, objects, nearest = CLEVR_SCENES[number % 4]
            file_name = f"CLEVR_{name}_{number:06d}.png"
            grey = number + (100 if split == "validation" else 0)
            files[f"CLEVR_v1.0/images/{name}/{file_name}"] = png(grey)
            points = [{"pixel_coords": [17, 4, depth], "shape": "cube"} for depth in depths]
            scenes.append({"image_filename": file_name, "image_index": number, "objects": points})
            label = objects if task == "clevr_count" else nearest
            splits[split].append(Image(file_name, file_name.removesuffix(".png"), label, grey))
        files[f"CLEVR_v1.0/scenes/CLEVR_{name}_scenes.json"] = json.dumps({"info": {}, "scenes": scenes}).encode()
    files["CLEVR_v1.0/images/test/CLEVR_test_000000.png"] = png(200)  # without a scene
    write_zip(folder / "CLEVR_v1.0.zip", files)
    return splits


def kitti_line(kind: str, z: float) -> str:
    """A line of a label file: type, truncated, occluded, alpha, box, size, x, y, z, rotation."""
    return f"{kind} 0.00 0 -1.57 614.24 181.78 727.31 284.77 1.57 1.73 4.15 1.00 1.75 {z:.2f} -1.62\n"


# The annotations of an image, and its class by hand.
KITTI_IMAGES = (
    (kitti_line("Car", 8.0) + kitti_line("Pedestrian", 2.0), 0),
    (kitti_line("Van", 8.01) + kitti_line("Car", 30.0) + kitti_line("DontCare", -1000.0), 1),
    (kitti_line("Truck", 20.5), 2),
    (kitti_line("Tram", 5.0) + kitti_line("Cyclist", 4.0), 3),
)


def kitti(folder: Path) -> Splits:
    """Twenty drives of one to three images; the splits are those that TensorFlow Datasets' draw gives."""
    drives = [f"2011_09_26_drive_{number:04d}_sync" for number in range(20) for _ in range(1 + number % 3)]
    order = np.random.RandomState(0).permutation(len(drives))
    lines = [f"2011_09_26 {drive} {frame:010d}" for frame, drive in enumerate(drives)]
    # Image n is from the line whose number, from 1 on, stands at place n.
    numbers = [int(line) + 1 for line in order]
    mapping = {"mapping/train_rand.txt": ",".join(map(str, numbers)), "mapping/train_mapping.txt": "\n".join(lines)}
    write_zip(folder / "devkit_object.zip", {name: text.encode() for name, text in mapping.items()})

    # With numpy's one global state, as the original has it, and put back behind it.
    state = np.random.get_state()
    np.random.seed(123)
    tested = set(np.random.choice(sorted(set(drives)), 2, replace=False))
    validated = set(np.random.choice(sorted(set(drives) - tested), 2, replace=False))
    np.random.set_state(state)

    splits: Splits = {"train": [], "validation": [], "test": []}
    # The owners' test images have the same numbers, and no labels.
    images = {f"testing/image_2/{number:06d}.png": png(255) for number in range(len(order))}
    annotations = {}
    for number, line in enumerate(order):
        drive = drives[line]
        split = "test" if drive in tested else "validation" if drive in validated else "train"
        text, label = KITTI_IMAGES[number % 4]
        images[f"training/image_2/{number:06d}.png"] = png(number)
        annotations[f"training/label_2/{number:06d}.txt"] = text.encode()
        splits[split].append(Image(f"{number:06d}.png", f"{number:06d}", label, number))
    write_zip(folder / "data_object_image_2.zip", images)
    write_zip(folder / "data_object_label_2.zip", annotations)
    return splits


# ------------------------------------------------------------------------------------------------- arrays


def row_images(labels: Iterable[int], split: str, key: str = "{}") -> list[Image]:
    """Rows whose grey is their number."""
    return [Image(key.format(row), f"{split}-{row:06d}", label, row) for row, label in enumerate(labels)]


def cifar100(folder: Path) -> Splits:
    splits: Splits = {}
    files = {"cifar-100-binary/fine_label_names.txt": "\n".join(f"fine{n}" for n in range(100)).encode()}
    for split, count in (("train", 20), ("test", 10)):
        labels = [(7 * row) % 100 for row in range(count)]
        records = [bytes([row % 20, label]) + bytes([row]) * 3072 for row, label in enumerate(labels)]
        files[f"cifar-100-binary/{split}.bin"] = b"".join(records)
        splits[split] = row_images(labels, split)
    write_tar_gz(folder / "cifar-100-binary.tar.gz", files)
    return splits


def svhn(folder: Path) -> Splits:
    splits: Splits = {}
    for split, count in (("train", 20), ("test", 10)):
        pixels = np.zeros((32, 32, 3, count), np.uint8) + np.arange(count, dtype=np.uint8)
        digits = np.array([[1 + row % 10] for row in range(count)], np.uint8)  # 10 is the digit 0
        savemat(folder / f"{split}_32x32.mat", {"X": pixels, "y": digits})
        splits[split] = row_images([(1 + row) % 10 for row in range(count)], split)
    return splits


def patch_camelyon(folder: Path) -> Splits:
    import h5py

    splits: Splits = {}
    for split, name in (("train", "train"), ("validation", "valid"), ("test", "test")):
        labels = [row % 2 for row in range(10)]
        pixels = np.zeros((10, 96, 96, 3), np.uint8) + np.arange(10, dtype=np.uint8)[:, None, None, None]
        with h5py.File(folder / f"camelyonpatch_level_2_split_{name}_x.h5", "w") as file:
            file["x"] = pixels
        with h5py.File(folder / f"camelyonpatch_level_2_split_{name}_y.h5", "w") as file:
            file["y"] = np.array(labels, np.uint8).reshape(10, 1, 1, 1)
        splits[split] = row_images(labels, split, f"{name}_{{}}")
    return splits


def dsprites(folder: Path, task: str) -> Splits:
    """Rows of which every second is white, 1 in the file; orientation 2 × row, position row."""
    count = 20
    latents = np.zeros((count, 6), np.int64)
    latents[:, 3] = 2 * np.arange(count)
    latents[:, 4] = np.arange(count)
    pixels = np.zeros((count, 64, 64), np.uint8) + (np.arange(count, dtype=np.uint8) % 2)[:, None, None]
    metadata = np.array({"author": "somebody"}, dtype=object)  # pickled, as in the true file
    name = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
    np.savez_compressed(folder / name, metadata=metadata, imgs=pixels, latents_classes=latents)
    positions = [row // 2 for row in range(count)]
    orientations = [0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 12, 13, 14, 15]  # 0, 2 … 38 of 40 in 16
    labels = positions if task == "dsprites_x_position" else orientations
    images = [image._replace(grey=255 * (image.grey % 2)) for image in row_images(labels, "train")]
    return {"train": images}


def norb_matrix(magic: int, array: np.ndarray) -> bytes:
    """A matrix in the format of smallNORB: three sizes at least."""
    sizes = [*array.shape, 1, 1][: max(3, array.ndim)]
    return gzip.compress(struct.pack(f"<ii{len(sizes)}i", magic, array.ndim, *sizes) + array.tobytes())


def smallnorb(folder: Path, task: str) -> Splits:
    splits: Splits = {}
    for split, name, count in (
        ("train", "5x46789x9x18x6x2x96x96-training", 10),
        ("test", "5x01235x9x18x6x2x96x96-testing", 8),
    ):
        info = np.array([[3, row % 9, 2 * ((5 * row) % 18), 1] for row in range(count)], "<i4")
        pairs = np.zeros((count, 2, 96, 96), np.uint8) + 200
        pairs[:, 0] = np.arange(count, dtype=np.uint8)[:, None, None]
        (folder / f"smallnorb-{name}-info.mat.gz").write_bytes(norb_matrix(0x1E3D4C54, info))
        (folder / f"smallnorb-{name}-dat.mat.gz").write_bytes(norb_matrix(0x1E3D4C55, pairs))
        labels = [(5 * row) % 18 if task == "smallnorb_azimuth" else row % 9 for row in range(count)]
        splits[split] = row_images(labels, split)
    return splits


# ------------------------------------------------------------------------------------------------- TFRecords


def varint(value: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    encoded = b""
    while value > 127:
        encoded += bytes([value % 128 + 128])
        value //= 128
    return encoded + bytes([value])


def field(number: int, content: bytes) -> bytes:
    """A field of a message that holds bytes, or another message."""
    return varint(8 * number + 2) + varint(len(content)) + content


def example(**features: list[bytes] | list[int] | list[float]) -> bytes:
    """A `tf.train.Example` with these features, written by hand; two underscores stand for a slash."""
    entries = b""
    for name, values in features.items():
        if isinstance(values[0], bytes):
            feature = field(1, b"".join(field(1, value) for value in values))
        elif isinstance(values[0], float):
            feature = field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            feature = field(3, field(1, b"".join(map(varint, values))))
        entries += field(1, field(1, name.replace("__", "/").encode()) + field(2, feature))
    return field(1, entries)


def tfrecord(examples: Iterable[bytes]) -> bytes:
    """A TFRecord file, by TensorBoard's writer."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for record in examples:
        writer.write(record)
    return buffer.getvalue()


def dmlab(folder: Path) -> Splits:
    splits: Splits = {}
    files = {}
    for split, count in (("train", 10), ("validation", 6), ("test", 5)):
        images = []
        for number in range(count):
            images.append(Image(f"{split}-{number}.jpg", f"{split}-{number:06d}", number % 6, 10 * number))
        half = count // 2
        for file, part in enumerate((images[:half], images[half:])):
            records = [
                example(image=[png(image.grey)], filename=[image.key.encode()], label=[image.label]) for image in part
            ]
            files[f"dmlab-{split}.tfrecord-{file:05d}-of-00002"] = tfrecord(records)
        splits[split] = images
    write_tar_gz(folder / "dmlab.tar.gz", files)
    return splits


def prepare(folder: Path, name: str, splits: dict[str, list[list[bytes]]], config: str | None = None) -> None:
    """A folder as TensorFlow Datasets prepares it: splits of shards of examples."""
    folder.mkdir(parents=True)
    described = []
    for split, shards in splits.items():
        described.append({"name": split, "shardLengths": [str(len(shard)) for shard in shards], "numBytes": "1"})
        for number, shard in enumerate(shards):
            path = folder / f"{name}-{split}.tfrecord-{number:05d}-of-{len(shards):05d}"
            path.write_bytes(tfrecord(shard))
    info = {"name": name, "version": "1.0.0", "fileFormat": "tfrecord", "splits": described}
    (folder / "dataset_info.json").write_text(json.dumps(info | ({"configName": config} if config else {})))
