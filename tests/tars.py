"""Tars and pictures made by hand, as those of other people would be."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np

Members = Iterable[tuple[str, bytes]] | Mapping[str, bytes]


def tar_of(members: Members, format: int = tarfile.PAX_FORMAT, **fields: Any) -> bytes:
    """Return a tar of these members, each a name and its bytes; `fields` are set in every header."""
    if isinstance(members, Mapping):
        members = members.items()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def write_tar(path: Path, members: Members) -> Path:
    """Write a tar of these members; return its path."""
    path.write_bytes(tar_of(members))
    return path


def picture(value: int, size: int = 8) -> bytes:
    """Return a grey JPEG of so many pixels a side."""
    return cv2.imencode(".jpg", np.full((size, size, 3), value, np.uint8))[1].tobytes()
