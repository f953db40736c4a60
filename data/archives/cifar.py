"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the .tar.gz of the python version or of the binary version.

Both versions hold the same images in the same order, and give the same samples. Of CIFAR-100 the labels are the fine
ones. The class names stand in the archives.

    cifar-100-python.tar.gz
      cifar-100-python/train     pickle: data (50000, 3072) uint8, fine_labels     →   Sample("train-00000", PNG, (19,))
      cifar-100-python/meta      pickle: fine_label_names

A pickle may run anything when it is read. These are read by `ArraysOnly`, which knows arrays and nothing else.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.archives.images import encode
from data.archives.members import members
from data.archives.published import Published
from data.errors import DataError
from data.index.names import Names
from data.shards.sources import Sample

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
SOURCE = "Krizhevsky 2009; the owner's page"
PIXELS = 3 * 32 * 32  # bytes of one image: planes of red, green and blue
ARRAY_MAKER: Any = np.empty(0).__reduce__()[0]  # the function that pickles of arrays name


class Kind(NamedTuple):
    """What the files of one of the two are called."""

    archives: tuple[str, ...]
    batches: dict[str, tuple[str, ...]]  # split → files of the python version; those of the binary one end in .bin
    python_names: tuple[str, str]  # the pickle that holds the class names, and what they are called in it
    binary_names: str
    python_labels: str
    binary_label_bytes: int  # before the pixels of a record; the last of them is the label
    classes: int


CIFAR10 = Kind(
    archives=("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"),
    batches={"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)},
    python_names=("batches.meta", "label_names"),
    binary_names="batches.meta.txt",
    python_labels="labels",
    binary_label_bytes=1,
    classes=10,
)
CIFAR100 = Kind(
    archives=("cifar-100-python.tar.gz", "cifar-100-binary.tar.gz"),
    batches={"train": ("train",), "test": ("test",)},
    python_names=("meta", "fine_label_names"),
    binary_names="fine_label_names.txt",
    python_labels="fine_labels",
    binary_label_bytes=2,  # the coarse label, then the fine one
    classes=100,
)
PUBLISHED_10 = {"train": Published(50_000, 10, SOURCE), "test": Published(10_000, 10, SOURCE)}
PUBLISHED_100 = {"train": Published(50_000, 100, SOURCE), "test": Published(10_000, 100, SOURCE)}


def cifar10_samples(path: Path, split: str) -> Iterator[Sample]:
    """The images of a split of CIFAR-10."""
    return samples(path, split, CIFAR10)


def cifar10_classes(path: Path) -> Names:
    """The class names that CIFAR-10's archive holds."""
    return classes(path, CIFAR10)


def cifar100_samples(path: Path, split: str) -> Iterator[Sample]:
    """The images of a split of CIFAR-100, with the fine labels."""
    return samples(path, split, CIFAR100)


def cifar100_classes(path: Path) -> Names:
    """The names of the fine classes that CIFAR-100's archive holds."""
    return classes(path, CIFAR100)


def samples(path: Path, split: str, kind: Kind) -> Iterator[Sample]:
    """The images of a split, batch after batch; raises DataError where a batch is missing or damaged."""
    batches = kind.batches[split]
    contents = files_of(path, kind, [*batches, *(f"{batch}.bin" for batch in batches)])
    for batch in batches:
        if batch in contents:
            labels, pixels = python_batch(contents[batch], f"{path}: {batch}", kind.python_labels)
        elif f"{batch}.bin" in contents:
            labels, pixels = binary_batch(contents[f"{batch}.bin"], f"{path}: {batch}.bin", kind.binary_label_bytes)
        else:
            raise DataError(f"{path}: has no {batch} and no {batch}.bin\n  download {kind.archives[0]} from {PAGE}")
        yield from samples_of(batch, labels, pixels)


def classes(path: Path, kind: Kind) -> Names:
    """The class names, in the order of their ids; raises DataError where the archive holds none."""
    pickled, key = kind.python_names
    contents = files_of(path, kind, [pickled, kind.binary_names])
    if pickled in contents:
        return tuple(map(str, unpickled(contents[pickled], f"{path}: {pickled}")[key]))
    if kind.binary_names in contents:
        return tuple(contents[kind.binary_names].decode().split())
    raise DataError(
        f"{path}: has no {pickled} and no {kind.binary_names}, which name the classes\n"
        f"  download {kind.archives[0]} from {PAGE}"
    )


def files_of(path: Path, kind: Kind, bases: Sequence[str]) -> dict[str, bytes]:
    """Those of these files that an archive has, or a folder that it was unpacked to, or one that it was loaded to."""
    for name in kind.archives:
        if (path / name).is_file():
            path = path / name
    return {member.base: member.read() for member in members(path) if member.base in bases}


def image_of(row: np.ndarray) -> np.ndarray:
    """(3072,) uint8, planes of red, green and blue, → (32, 32, 3)."""
    return row.reshape(3, 32, 32).transpose(1, 2, 0)


def samples_of(batch: str, labels: Sequence[int], pixels: np.ndarray) -> Iterator[Sample]:
    """A sample for each row of `pixels`, (N, 3072) uint8: planes of red, green and blue, each 32 rows of 32."""
    for number, (label, row) in enumerate(zip(labels, pixels, strict=True)):
        yield Sample(f"{batch}-{number:05d}", encode(image_of(row)), (int(label),), "png")


# ------------------------------------------------------------------------------------------------- versions


def binary_batch(content: bytes, name: str, label_bytes: int) -> tuple[list[int], np.ndarray]:
    """Labels and pixels, (N, 3072), of a file of records; raises DataError where it is no whole number of them."""
    record_bytes = label_bytes + PIXELS
    if len(content) % record_bytes:
        raise DataError(f"{name}: {len(content)} bytes are no whole number of records; take the binary version")
    records = np.frombuffer(content, np.uint8).reshape(-1, record_bytes)
    return records[:, label_bytes - 1].tolist(), records[:, label_bytes:]


def python_batch(content: bytes, name: str, key: str) -> tuple[list[int], np.ndarray]:
    """Labels and pixels, (N, 3072), of a pickle; raises DataError where it does not hold them."""
    batch = unpickled(content, name)
    labels = batch.get(key)
    pixels = batch.get("data")
    if isinstance(labels, list) and isinstance(pixels, np.ndarray):
        are_ids = all(isinstance(label, int) for label in labels)
        if are_ids and pixels.dtype == np.uint8 and pixels.shape == (len(labels), PIXELS):
            return labels, pixels
    raise DataError(f"{name}: expected data, uint8 of (N, {PIXELS}), and {key}, a list of N; download it again")


class ArraysOnly(pickle.Unpickler):
    """Reads pickles of numpy arrays, texts, numbers, lists and dicts; anything else in one is refused, and not run."""

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle may name: what makes an array, and how Python 3 writes bytes for Python 2."""
        allowed: dict[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): ARRAY_MAKER,
            ("numpy._core.multiarray", "_reconstruct"): ARRAY_MAKER,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): as_bytes,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and only arrays may be in it")
        return allowed[module, name]


def as_bytes(text: str, encoding: str) -> bytes:
    """The bytes of a text that a pickle holds in place of them."""
    return text.encode("latin1")


def unpickled(content: bytes, name: str) -> dict[str, Any]:
    """The dict of a pickle that Python 2 wrote, as CIFAR's are; raises DataError where it is torn or holds more."""
    try:
        value = ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    # A torn pickle raises whatever the instruction does that lies where it was torn.
    except Exception as error:
        raise DataError(f"{name}: cannot be read as a pickle of arrays ({error})\n  download it again") from None
    if not isinstance(value, dict):
        raise DataError(f"{name}: expected a dict, found a {type(value).__name__}; download it again")
    return value


# ------------------------------------------------------------------------- any folder of the binary version


def cifar(files: Sequence[str | os.PathLike[str]]) -> Iterator[Sample]:
    """CIFAR-10 or -100 from `.bin` files of the binary version, whichever of them are given; nothing is compared.

    Raises DataError where a file is no whole number of records.
    """
    for path in map(Path, files):
        # CIFAR-100's files are called train.bin and test.bin; each record has a coarse label before the fine one.
        kind = CIFAR100 if path.stem in ("train", "test") else CIFAR10
        labels, pixels = binary_batch(path.read_bytes(), str(path), kind.binary_label_bytes)
        yield from samples_of(path.stem, labels, pixels)


def cifar_classes(folder: str | os.PathLike[str]) -> Names:
    """The class names that lie beside the `.bin` files; none where they have been left out."""
    for name in (CIFAR10.binary_names, CIFAR100.binary_names):
        path = Path(folder, name)
        if path.is_file():
            return tuple(path.read_text().split())
    return ()
