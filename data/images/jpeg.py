"""libjpeg-turbo through a thin binding: decode just a region, at a reduced scale; add restart markers.

`jpeg.cpp` is compiled on first use (under a second, kept in the user's cache folder) against the
libjpeg-turbo inside Pillow's wheel. Where that cannot be, OpenCV decodes the whole image at the same scale
and the region is cut from it: the same pixels, more slowly. `docs/design/decoding.md` has the measurements.
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
COMPILE_TIMEOUT_S = 120  # it takes 0.3 to 1.5 s

# How OpenCV is asked for the same scale; it gives RGB at full scale alone, BGR else.
REDUCED = {
    1: cv2.IMREAD_COLOR_RGB,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
Region = tuple[int, int, int, int]  # y, x, h, w in pixels of the reduced image


# ----------------------------------------------------------------------------- the library


@cache
def library() -> ctypes.CDLL | None:
    """Return the binding, compiled if need be; None where there is no compiler or Pillow is not the wheel."""
    if os.environ.get("PATCHLINE_JPEG") == "opencv":
        return None
    try:
        path = compile_binding()
        binding = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError, PackageNotFoundError) as error:
        reason = f"{type(error).__name__} {error}".strip()
        logging.getLogger(__name__).warning("decoding whole images with OpenCV, which is slower: %s", reason)
        return None
    # The types of the C functions' arguments, as jpeg.cpp declares them; the first two return 0 for success.
    size = ctypes.c_size_t
    pointer = ctypes.c_void_p
    number = ctypes.c_uint
    binding.decode_region.argtypes = [ctypes.c_char_p, size, *[number] * 5, pointer]
    binding.add_restarts.argtypes = [ctypes.c_char_p, size, pointer, pointer]
    binding.release.argtypes = [pointer]
    return binding


def compile_binding() -> Path:
    """Compile unless the cache folder has it; the name holds everything that the result depends on.

    Raises OSError and subprocess.SubprocessError where it cannot be compiled, PackageNotFoundError without Pillow.
    """
    # The libjpeg-turbo of Pillow's wheel.
    libjpeg = None
    for file in files("pillow") or ():
        if file.name.startswith("libjpeg-"):
            libjpeg = Path(str(file.locate())).resolve()
            break
    if libjpeg is None:
        raise FileNotFoundError("this Pillow brings no libjpeg along; install its wheel")
    digest = sha256(SOURCE.read_bytes() + str(libjpeg).encode() + os.uname().machine.encode()).hexdigest()
    path = state_folder() / f"jpeg-{digest[:16]}.so"
    if path.exists():
        return path

    path.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    # rpath, because libjpeg-turbo lies inside Pillow's wheel, where the linker does not look by itself.
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", f"-Wl,-rpath,{libjpeg.parent}"]
    # Other processes compile it at the same moment: each writes a file of its own, and the last one stays.
    with whole_file(path) as temporary:
        command = [compiler, *flags, str(SOURCE), "-o", str(temporary), str(libjpeg)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
    return path


def require_binding() -> None:
    """Raise OSError where the binding cannot be compiled or loaded."""
    if library() is None:
        raise OSError("restart markers need the compiled binding: install a C++ compiler and Pillow's wheel")


# ----------------------------------------------------------------------------- what it does


def decode_region(data: bytes, denominator: int, region: Region) -> np.ndarray | None:
    """Return the region at 1/denominator scale (1, 2, 4 or 8) as RGB (h, w, 3); None where it cannot be read."""
    y, x, h, w = region
    binding = library()
    if binding is not None:
        out = np.empty((h, w, 3), np.uint8)
        failed = binding.decode_region(data, len(data), denominator, x, y, w, h, out.ctypes.data)
        return None if failed else out

    # Without the binding OpenCV decodes all of the image. Nothing is lost but time: the pixels are the same, bit for
    # bit (docs/design/decoding.md).
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), REDUCED[denominator] | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return None
    if image is None:
        return None
    # There is no flag that gives both RGB and a reduced scale.
    if denominator > 1:
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return image[y : y + h, x : x + w]


def add_restarts(data: bytes) -> bytes:
    """Return the same image, to the pixel, with restart markers inside its rows of blocks; unchanged if it cannot.

    Progressive files become sequential, metadata goes; a crop then need not even read what it leaves out.
    Raises OSError without the binding.
    """
    require_binding()
    return rewritten(data) or data


def is_damaged(data: bytes) -> bool:
    """Return whether libjpeg warns of this JPEG, which it decodes all the same; False without the binding."""
    return library() is not None and rewritten(data) is None


def rewritten(data: bytes) -> bytes | None:
    """Return the JPEG with restart markers, or None where libjpeg fails or warns."""
    binding = library()
    assert binding is not None, "the callers have asked for it"
    out = ctypes.c_void_p()
    size = ctypes.c_ulong()
    failed = binding.add_restarts(data, len(data), ctypes.byref(out), ctypes.byref(size))
    jpeg = None if failed else ctypes.string_at(out, size.value)
    # The bytes were allocated by C++, which must free them itself.
    binding.release(out)
    return jpeg
