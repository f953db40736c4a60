"""Miniature archives of public data sets, with the folders, file names, lists and stray files of the originals."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from PIL import Image
from scipy.io import savemat

from data.extras.known_sets.known import known_archive
from data.extras.shards.subset import Part, Rule, make_subsets
from data.index.document import load_index
from data.index.index import Index
from data.reader import ShardReader
from jobs.__main__ import main


def picture(value: int, kind: str = ".jpg") -> bytes:
    """Return an image of a single grey value."""
    return cv2.imencode(kind, np.full((8, 8, 3), value % 256, np.uint8))[1].tobytes()


def tar_bytes(files: dict[str, bytes]) -> bytes:
    """Return an uncompressed tar of these files, with a header for every folder, as `tar` writes it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folders: set[str] = set()
        for name, body in files.items():
            folder = name.rpartition("/")[0]
            if folder and folder not in folders:
                folders.add(folder)
                info = tarfile.TarInfo(folder)
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def write_tar_gz(path: Path, files: dict[str, bytes]) -> Path:
    """Write a gzipped tar of these files; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(tar_bytes(files), mtime=0))
    return path


def write_folder(path: Path, files: dict[str, bytes]) -> Path:
    """Write these files below a folder, as unpacking the archive would; return the folder."""
    for name, body in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(body)
    return path


def make_subset(parent: Index, folder: Path, rule: Rule, *, name: str | None = None, **options: Any) -> Index:
    """Make one subset, named like its folder."""
    return make_subsets(parent, [Part(folder, rule, name or folder.name)], **options)[0]


def contents(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    """Return the image and label of every sample of a packed set by key."""
    index = load_index(folder)
    reader = ShardReader(index)
    samples = {}
    for shard, count in enumerate(index.shard_samples):
        for sample in range(count):
            key, image, label = reader.read(shard, sample)
            samples[key] = (image, label)
    return samples


def packed(tmp_path: Path, source: str, path: Path, *options: str) -> dict[str, tuple[bytes, bytes]]:
    """Pack a miniature, accepted although incomplete, with `jobs pack`; the n-th set is in `set{n}`."""
    output = tmp_path / f"set{len(list(tmp_path.glob('set*')))}"
    partial = ["--partial"] if known_archive(source) else []
    assert main(["pack", source, str(path), str(output), *partial, *options]) == 0
    return contents(output)


def gif(value: int) -> bytes:
    """Return a GIF of a single grey value; a few images of Oxford-IIIT Pets are GIFs despite their names."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (value, value, value)).save(buffer, "GIF")
    return buffer.getvalue()


# ----------------------------------------------------------------------------------------- Pets and Flowers

BREEDS = ("Abyssinian", "american_bulldog", "Egyptian_Mau")  # numbered so, in no order of upper and lower case


def pets(folder: Path, per_breed: int = 4) -> Path:
    """Write the two archives of Oxford-IIIT Pets: odd numbers of each breed are for training, even ones for testing."""
    images: dict[str, bytes] = {"images/Abyssinian_100.mat": b"MATLAB 5.0", "images/._Abyssinian_1.jpg": b"\0\5"}
    lists: dict[str, str] = {"list.txt": "#Image CLASS-ID SPECIES BREED ID\n", "trainval.txt": "", "test.txt": ""}
    for label, breed in enumerate(BREEDS):
        for number in range(1, per_breed + 1):
            name = f"{breed}_{number}"
            is_gif = name == "Egyptian_Mau_2"
            images[f"images/{name}.jpg"] = gif(22) if is_gif else picture(40 * label + number)
            line = f"{name} {label + 1} 1 1\n"
            lists["list.txt"] += line
            lists["trainval.txt" if number % 2 else "test.txt"] += line
    images["images/american_bulldog_99.jpg"] = picture(99)  # in none of the lists, as 41 images are
    annotations = {f"annotations/{name}": text.encode() for name, text in lists.items()}
    annotations["annotations/trimaps/._Abyssinian_1.png"] = b"\0\5"
    write_tar_gz(folder / "images.tar.gz", images)
    write_tar_gz(folder / "annotations.tar.gz", annotations)
    return folder


FLOWER_LABELS = (3, 1, 2, 3, 1, 2, 2)  # of image_00001 …, from 1 on
FLOWER_SPLITS = {"trnid": (5, 3), "valid": (1,), "tstid": (2, 4, 6, 7)}


def flowers(folder: Path) -> Path:
    """Write 102flowers.tgz, imagelabels.mat and setid.mat of Oxford Flowers-102, with seven images."""
    write_tar_gz(folder / "102flowers.tgz", {f"jpg/image_{n:05d}.jpg": picture(n) for n in range(1, 8)})
    savemat(folder / "imagelabels.mat", {"labels": np.array([FLOWER_LABELS], np.uint8)})
    savemat(folder / "setid.mat", {name: np.array([ids], np.uint16) for name, ids in FLOWER_SPLITS.items()})
    return folder


# ------------------------------------------------------------------------------------------------ ImageNet

WNIDS = ("n01440764", "n01443537", "n02096294")  # sorted: the ids 0, 1 and 2
DEVKIT_IDS = {"n02096294": 1, "n01443537": 2, "n01440764": 3}  # the devkit counts from 1 on, in another order
TRUTH = ("n01443537", "n01440764", "n02096294", "n01443537")  # of ILSVRC2012_val_00000001 …


def class_tars(per_class: int = 3) -> dict[str, bytes]:
    """Return the tars inside ILSVRC2012_img_train.tar, one per class, unordered."""
    tars = {}
    for label in (2, 0, 1):
        images = {f"{WNIDS[label]}_{n}.JPEG": picture(50 * label + n) for n in range(per_class)}
        tars[f"{WNIDS[label]}.tar"] = tar_bytes(images)
    return tars


def validation_images() -> dict[str, bytes]:
    """Return the files inside ILSVRC2012_img_val.tar, unordered."""
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in (3, 1, 4, 2)]
    return {name: picture(int(name[15:23])) for name in names}


def devkit(path: Path) -> Path:
    """Write ILSVRC2012_devkit_t12.tar.gz: meta.mat with classes and their parent synsets, and the ground truth."""
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
    rows = [(number, wnid, f"words of {wnid}", "gloss", 0) for wnid, number in DEVKIT_IDS.items()]
    rows.append((4, "n00001740", "entity", "gloss", 3))
    synsets = np.empty((len(rows), 1), fields)
    for number, row in enumerate(rows):
        synsets[number, 0] = row
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets})
    truth = "".join(f"{DEVKIT_IDS[wnid]}\n" for wnid in TRUTH)
    root = "ILSVRC2012_devkit_t12"
    files = {
        f"{root}/readme.txt": b"ILSVRC 2012",
        f"{root}/data/meta.mat": meta.getvalue(),
        f"{root}/data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
    }
    return write_tar_gz(path, files)


# --------------------------------------------------------------------------------------------------- CIFAR


class CifarImages(NamedTuple):
    """The images of a miniature, by batch: pixels (N, 3072) uint8, planes of red, green and blue, and labels."""

    pixels: dict[str, np.ndarray]
    labels: dict[str, list[int]]
    coarse: dict[str, list[int]]


def cifar_images(batches: tuple[str, ...], classes: int, per_batch: int = 3) -> CifarImages:
    """Return random images, a few per batch."""
    draws = np.random.default_rng(0)
    pixels = {name: draws.integers(0, 256, (per_batch, 3072), dtype=np.uint8) for name in batches}
    labels = {name: draws.integers(0, classes, per_batch).tolist() for name in batches}
    coarse = {name: draws.integers(0, 20, per_batch).tolist() for name in batches}
    return CifarImages(pixels, labels, coarse)


class Cifar(NamedTuple):
    """The file names and sizes of the binary version of a CIFAR data set."""

    batches: tuple[str, ...]  # in the order of the archive
    names: tuple[str, ...]
    names_file: str


CIFAR = {
    "cifar-10": Cifar(
        ("data_batch_4", "test_batch", "data_batch_1", "data_batch_2", "data_batch_3", "data_batch_5"),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        "batches.meta.txt",
    ),
    "cifar-100": Cifar(("test", "train"), tuple(f"fine{label}" for label in range(100)), "fine_label_names.txt"),
}


def cifar(folder: Path, name: str, images: CifarImages) -> Path:
    """Write the binary version of a CIFAR archive; records of CIFAR-100 begin with the coarse label."""
    files = {CIFAR[name].names_file: "\n".join([*CIFAR[name].names, "", ""]).encode()}
    for batch in CIFAR[name].batches:
        columns = [np.array(images.labels[batch], np.uint8), images.pixels[batch]]
        if name == "cifar-100":
            columns.insert(0, np.array(images.coarse[batch], np.uint8))
        files[f"{batch}.bin"] = np.column_stack(columns).tobytes()
    return write_tar_gz(folder / f"{name}-binary.tar.gz", {f"{name}-bin/{key}": body for key, body in files.items()})


# ----------------------------------------------------------------------------------------------- ObjectNet


def bordered(value: int, is_red: bool = True) -> bytes:
    """Return a grey RGBA PNG with a border of two pixels, like ObjectNet's images."""
    pixels = np.full((12, 16, 4), (0, 0, 255 if is_red else 254, 255), np.uint8)  # BGRA
    pixels[2:-2, 2:-2, :3] = value
    return cv2.imencode(".png", pixels)[1].tobytes()


def objectnet(folder: Path) -> Path:
    """Write objectnet-1.0 with three objects, two of them in ImageNet; this ImageNet has five classes."""
    images = {
        "images/alarm_clock/aa.png": bordered(10),
        "images/alarm_clock/bb.v2.png": bordered(20),
        "images/banana/cc.png": bordered(30, is_red=False),
        "images/wine_glass_2/dd.png": bordered(40),
    }
    folders = {"alarm_clock": "Alarm clock", "banana": "Banana", "wine_glass_2": "Wineglass"}
    to_imagenet = {"Alarm clock": "analog clock; digital clock, of numbers", "Banana": "banana"}
    # The lines are in the devkit's order; the other file says which class each of them is, from 0 on.
    lines = ["digital clock, of numbers", "crane", "banana", "analog clock", "crane"]
    line_of = {"0": 1, "1": 3, "2": 4, "3": 0, "4": 2}
    mappings = {
        "mappings/folder_to_objectnet_label.json": json.dumps(folders).encode(),
        "mappings/objectnet_to_imagenet_1k.json": json.dumps(to_imagenet).encode(),
        "mappings/imagenet_to_label_2012_v2": "\n".join(lines).encode() + b"\n",
        "mappings/pytorch_to_imagenet_2012_id.json": json.dumps(line_of).encode(),
    }
    return write_folder(folder, {"README": b"for testing alone", **images, **mappings})
