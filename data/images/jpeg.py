"""libjpeg-turbo through a thin binding: decode just a region, at a reduced scale; add restart markers.

`jpeg.cpp` is compiled on first use (under a second, kept in the user's cache folder) against the
libjpeg-turbo inside Pillow's wheel. Where that cannot be, OpenCV decodes the whole image at the same scale
and the region is cut from it: the same pixels, more slowly. `docs/decoding.md` has the measurements.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import cv2
import numpy as np

from data.files import state_folder, whole_file

SOURCE = Path(__file__).with_name("jpeg.cpp")
REDUCED = {
    1: cv2.IMREAD_COLOR_RGB,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
Region = tuple[int, int, int, int]  # y, x, h, w in pixels of the reduced image


@cache
def library() -> ctypes.CDLL | None:
    """The binding, compiled if need be; None where there is no compiler or Pillow is not the wheel."""
    if os.environ.get("PATCHLINE_JPEG") == "opencv":
        return None
    try:
        path = compile_binding()
        binding = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError, PackageNotFoundError, StopIteration) as error:
        reason = f"{type(error).__name__} {error}".strip()
        logging.getLogger(__name__).warning("decoding whole images with OpenCV, which is slower: %s", reason)
        return None
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint
    binding.decode_region.argtypes = [ctypes.c_char_p, size, *[number] * 5, pointer]
    binding.add_restarts.argtypes = [ctypes.c_char_p, size, pointer, pointer]
    binding.release.argtypes = [pointer]
    return binding


def compile_binding() -> Path:
    """Compile unless the cache folder has it; the name holds everything that the result depends on."""
    jpeg = next(Path(str(f.locate())) for f in files("pillow") or () if f.name.startswith("libjpeg-"))
    name = sha256(SOURCE.read_bytes() + str(jpeg.resolve()).encode() + os.uname().machine.encode()).hexdigest()
    path = state_folder() / f"jpeg-{name[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-O2", "-std=c++17", "-shared", "-fPIC", f"-Wl,-rpath,{jpeg.resolve().parent}"]
        with whole_file(path) as temporary:
            command = [os.environ.get("CXX", "c++"), *flags, str(SOURCE), "-o", str(temporary), str(jpeg)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
    return path


def decode_region(data: bytes, denominator: int, region: Region) -> np.ndarray | None:
    """The region at 1/denominator scale (1, 2, 4 or 8) as RGB (h, w, 3); None where it cannot be read."""
    y, x, h, w = region
    binding = library()
    if binding is None:
        flags = REDUCED[denominator] | cv2.IMREAD_IGNORE_ORIENTATION
        try:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        except cv2.error:
            return None
        image = image if image is None or denominator == 1 else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        return None if image is None else image[y : y + h, x : x + w]
    out = np.empty((h, w, 3), np.uint8)
    failed = binding.decode_region(data, len(data), denominator, x, y, w, h, out.ctypes.data)
    return None if failed else out


def add_restarts(data: bytes) -> bytes:
    """The same image, to the pixel, with restart markers inside its rows of blocks; unchanged if it cannot.

    Progressive files become sequential, metadata goes; a crop then need not even read what it leaves out.
    """
    require_binding()
    return rewritten(data) or data


def require_binding() -> None:
    """Raise OSError where there is none."""
    if library() is None:
        raise OSError("restart markers need the compiled binding: install a C++ compiler and Pillow's wheel")


def is_damaged(data: bytes) -> bool:
    """Whether libjpeg warns of this JPEG, which it decodes all the same; False without the binding."""
    return library() is not None and rewritten(data) is None


def rewritten(data: bytes) -> bytes | None:
    binding, out, size = library(), ctypes.c_void_p(), ctypes.c_ulong()
    assert binding is not None
    failed = binding.add_restarts(data, len(data), ctypes.byref(out), ctypes.byref(size))
    made = None if failed else ctypes.string_at(out, size.value)
    binding.release(out)
    return made
