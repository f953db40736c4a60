"""The sets of VTAB whose images are rows of an array: CIFAR-100, SVHN, PatchCamelyon, dSprites, smallNORB.

Each file is as its owners distribute it, and lies in the folder that the recipe names. Rows are read one after the
other, so that an array larger than memory (dSprites unpacks to 3 GB) is never in there as a whole; they become PNGs.

    cifar-100-binary.tar.gz                                      train.bin, test.bin
    train_32x32.mat  test_32x32.mat                              SVHN, cropped
    camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5      PatchCamelyon, gunzipped; needs h5py
    dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz
    smallnorb-5x…-{training,testing}-{dat,info}.mat.gz
"""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from data.archives import cifar
from data.archives.images import encode
from data.archives.members import Stream, file_at, first_present, naming_damage, read_members
from data.errors import DataError
from data.index.names import Names
from data.shards.sources import Sample
from data.vtab import labels
from data.vtab.order import Entry
from data.vtab.tasks import Task

CIFAR = ("cifar-100-binary.tar.gz", "cifar-100-binary")
# In bytes: coarse label, fine label, planes of red, green and blue
CIFAR_RECORD = cifar.CIFAR100.binary_label_bytes + cifar.PIXELS

SVHN_PAGE = "http://ufldl.stanford.edu/housenumbers/"

CAMELYON_PAGE = "https://zenodo.org/records/2546921"
CAMELYON_SPLITS = {"train": "train", "validation": "valid", "test": "test"}  # TensorFlow Datasets' → the owners'

DSPRITES_PAGE = "https://github.com/google-deepmind/dsprites-dataset"
DSPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
ORIENTATION = 3  # columns of latents_classes: colour, shape, scale, orientation, x, y
X_POSITION = 4

NORB_PAGE = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
NORB_FILES = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training-{kind}.mat.gz",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing-{kind}.mat.gz",
}
NORB_TYPES: dict[int, np.dtype] = {
    0x1E3D4C55: np.dtype("u1"),
    0x1E3D4C54: np.dtype("<i4"),
}  # magic number → what the matrix holds
ELEVATION = 1  # columns of the info matrix: instance, elevation, azimuth, lighting
AZIMUTH = 2


class Rows(NamedTuple):
    """An array of images: what its rows are labelled, and their pixels."""

    labels: Callable[[Path, Task, str], Sequence[int]]  # of a split of the set, for a task
    pixels: Callable[[Path, str], Iterator[np.ndarray]]  # (H, W, 3) RGB or (H, W) grey, row after row
    key: Callable[[str, int], str] = lambda split, row: str(row)  # a row's in TensorFlow Datasets


def entries(rows: Rows, folder: Path, task: Task, split: str) -> list[Entry]:
    """Every row of a split of a set."""
    listed = []
    for row, label in enumerate(rows.labels(folder, task, split)):
        listed.append(Entry(rows.key(split, row), str(row), int(label)))
    return listed


def samples(rows: Rows, folder: Path, chosen: Mapping[str, Sequence[Entry]]) -> Iterator[Sample]:
    """The chosen rows of each split of a set, in the order of the array."""
    for split, wanted in chosen.items():
        labels_of = {int(entry.place): entry.label for entry in wanted}
        last = max(labels_of, default=-1)
        for row, pixels in enumerate(rows.pixels(folder, split)):
            if row in labels_of:
                yield Sample(f"{split}-{row:06d}", encode(pixels), (labels_of[row],), "png")
            # What follows need not be unpacked.
            if row == last:
                break


# ------------------------------------------------------------------------------------------------- CIFAR-100


def cifar_records(folder: Path, split: str) -> np.ndarray:
    """The records of train.bin or test.bin (N, 3074) uint8; raises DataError where they are no whole number."""
    archive = first_present(folder, CIFAR, cifar.PAGE)
    name = f"{split}.bin"
    content = np.frombuffer(read_members(archive, [name])[name], np.uint8)
    if len(content) % CIFAR_RECORD:
        raise DataError(f"{archive}: {name}: {len(content):,} bytes are no whole number of records; download it again")
    return content.reshape(-1, CIFAR_RECORD)


def cifar_labels(folder: Path, task: Task, split: str) -> list[int]:
    """The fine labels."""
    return cifar_records(folder, split)[:, 1].tolist()


def cifar_pixels(folder: Path, split: str) -> Iterator[np.ndarray]:
    """The images (32, 32, 3)."""
    for record in cifar_records(folder, split):
        yield cifar.image_of(record[2:])


def cifar_names(folder: Path) -> Names:
    """The names of the fine labels, which lie beside the images."""
    name = "fine_label_names.txt"
    return tuple(read_members(first_present(folder, CIFAR, cifar.PAGE), [name])[name].decode().split())


# ------------------------------------------------------------------------------------------------- SVHN


def svhn_array(folder: Path, split: str, name: str) -> np.ndarray:
    """`X` (32, 32, 3, N) or `y` (N, 1) of a split's MATLAB file; raises DataError where it has none."""
    from scipy.io import loadmat

    path = file_at(folder / f"{split}_32x32.mat", SVHN_PAGE)
    try:
        return loadmat(path, variable_names=[name])[name]
    # scipy raises whatever its parser stumbles over in a file that is torn.
    except (ValueError, TypeError, KeyError, NotImplementedError, OSError) as error:
        raise DataError(f"{path}: no array {name!r} ({error}); download it again from {SVHN_PAGE}") from None


def svhn_labels(folder: Path, task: Task, split: str) -> list[int]:
    """The digits; the file calls 0 "10"."""
    return (svhn_array(folder, split, "y").ravel().astype(int) % 10).tolist()


def svhn_pixels(folder: Path, split: str) -> Iterator[np.ndarray]:
    """The images (32, 32, 3)."""
    return iter(np.moveaxis(svhn_array(folder, split, "X"), -1, 0))


# ------------------------------------------------------------------------------------------------- PatchCamelyon


def camelyon_file(folder: Path, split: str, part: str) -> Path:
    """The file of a split's images (part "x") or labels ("y"); raises DataError where it is missing or compressed."""
    name = f"camelyonpatch_level_2_split_{CAMELYON_SPLITS[split]}_{part}.h5"
    compressed = folder / f"{name}.gz"
    if compressed.is_file() and not (folder / name).is_file():
        raise DataError(f"{compressed} is compressed, and HDF5 is read in any order\n  type: gunzip -k {compressed}")
    return file_at(folder / name, CAMELYON_PAGE)


def hdf5() -> ModuleType:
    """The module that reads HDF5; raises DataError where it is not installed."""
    try:
        import h5py
    except ImportError:
        raise DataError(
            "PatchCamelyon's files are HDF5, which h5py reads, and it is not installed\n"
            "  type: pip install h5py\n"
            "  or give the folder that TensorFlow Datasets has prepared of it (docs/vtab.md)"
        ) from None
    return h5py


def camelyon_labels(folder: Path, task: Task, split: str) -> list[int]:
    """1 where the middle 32 × 32 pixels hold tumour; the file has them as (N, 1, 1, 1)."""
    path = camelyon_file(folder, split, "y")
    with hdf5().File(path, "r") as file:
        return np.asarray(file["y"]).ravel().astype(int).tolist()


def camelyon_pixels(folder: Path, split: str) -> Iterator[np.ndarray]:
    """The patches (96, 96, 3)."""
    path = camelyon_file(folder, split, "x")
    with hdf5().File(path, "r") as file:
        for row in range(len(file["x"])):
            yield np.asarray(file["x"][row])


# ------------------------------------------------------------------------------------------------- dSprites


def dsprites_labels(folder: Path, task: Task, split: str) -> list[int]:
    """The position or orientation, in 16 classes."""
    path = file_at(folder / DSPRITES, DSPRITES_PAGE)
    with naming_damage(str(path)), np.load(path, allow_pickle=False) as arrays:
        latents = arrays["latents_classes"]
    if task.name == "dsprites_x_position":
        return [labels.dsprites_x_position(int(value)) for value in latents[:, X_POSITION]]
    return [labels.dsprites_orientation(int(value)) for value in latents[:, ORIENTATION]]


def dsprites_pixels(folder: Path, split: str) -> Iterator[np.ndarray]:
    """The images (64, 64), whose 0 and 1 become 0 and 255."""
    path = file_at(folder / DSPRITES, DSPRITES_PAGE)
    with naming_damage(str(path)), zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        for image in rows_of_stream(file, shape, dtype, path):
            yield image * np.uint8(255)


def rows_of_stream(file: Stream, shape: Sequence[int], dtype: np.dtype, path: Path) -> Iterator[np.ndarray]:
    """The rows of an array that follows in a stream; raises DataError where the stream ends before it."""
    row_shape = tuple(shape[1:])
    row_bytes = int(np.prod(row_shape)) * dtype.itemsize
    for row in range(shape[0]):
        content = file.read(row_bytes)
        if len(content) < row_bytes:
            raise DataError(f"{path}: ends in row {row:,} of {shape[0]:,}; download it again")
        yield np.frombuffer(content, dtype).reshape(row_shape)


# ------------------------------------------------------------------------------------------------- smallNORB


def norb_rows(folder: Path, split: str, kind: str) -> Iterator[np.ndarray]:
    """The rows of a matrix of smallNORB, whose format stands on its page.

    Little-endian: a magic number, the number of dimensions, their sizes (three at least, the rest 1), the values.
    Raises DataError where it is something else.
    """
    path = file_at(folder / NORB_FILES[split].format(kind=kind), NORB_PAGE)
    with naming_damage(str(path)), gzip.open(path) as file:
        magic, dimensions = np.frombuffer(file.read(8), "<i4").tolist()
        if magic not in NORB_TYPES or not 1 <= dimensions <= 8:
            raise DataError(f"{path}: no matrix of smallNORB: it begins with {magic:#x}; download it again")
        sizes = np.frombuffer(file.read(4 * max(3, dimensions)), "<i4").tolist()
        yield from rows_of_stream(file, sizes[:dimensions], NORB_TYPES[magic], path)


def norb_labels(folder: Path, task: Task, split: str) -> list[int]:
    """The azimuth in 18 classes, or the elevation in 9."""
    info = list(norb_rows(folder, split, "info"))
    if task.name == "smallnorb_azimuth":
        return [labels.smallnorb_azimuth(int(row[AZIMUTH])) for row in info]
    return [int(row[ELEVATION]) for row in info]


def norb_pixels(folder: Path, split: str) -> Iterator[np.ndarray]:
    """The images (96, 96) of the first of the two cameras."""
    for pair in norb_rows(folder, split, "dat"):
        yield pair[0]


# ------------------------------------------------------------------------------------------------- the table

ROWS: dict[str, Rows] = {
    "cifar100": Rows(cifar_labels, cifar_pixels),
    "svhn_cropped": Rows(svhn_labels, svhn_pixels),
    "patch_camelyon": Rows(camelyon_labels, camelyon_pixels, lambda split, row: f"{CAMELYON_SPLITS[split]}_{row}"),
    "dsprites": Rows(dsprites_labels, dsprites_pixels),
    "smallnorb": Rows(norb_labels, norb_pixels),
}
