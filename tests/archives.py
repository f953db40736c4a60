"""Archives as the owners of data sets hand them out, small: their folders, file names, lists and leftovers are true."""

import gzip
import io
import tarfile
from pathlib import Path

import cv2
import numpy as np
from PIL import Image
from scipy.io import savemat


def picture(value: int, kind: str = ".jpg") -> bytes:
    """An image of one grey."""
    return cv2.imencode(kind, np.full((8, 8, 3), value % 256, np.uint8))[1].tobytes()


def tar_bytes(files: dict[str, bytes]) -> bytes:
    """A plain tar of these files, with a header for every folder, as tar writes them."""
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


def gif(value: int) -> bytes:
    """A GIF of one grey, as a few of the Pets are behind their names."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (value, value, value)).save(buffer, "GIF")
    return buffer.getvalue()


# ----------------------------------------------------------------------------------------- Pets and Flowers

BREEDS = ("Abyssinian", "american_bulldog", "Egyptian_Mau")  # numbered so, in no order of upper and lower case


def pets(folder: Path, per_breed: int = 4) -> Path:
    """images.tar.gz and annotations.tar.gz of Oxford-IIIT Pets: of each breed the odd numbers train, the even test."""
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
    """102flowers.tgz, imagelabels.mat and setid.mat of Oxford Flowers-102, with seven images."""
    write_tar_gz(folder / "102flowers.tgz", {f"jpg/image_{n:05d}.jpg": picture(n) for n in range(1, 8)})
    savemat(folder / "imagelabels.mat", {"labels": np.array([FLOWER_LABELS], np.uint8)})
    savemat(folder / "setid.mat", {name: np.array([ids], np.uint16) for name, ids in FLOWER_SPLITS.items()})
    return folder
