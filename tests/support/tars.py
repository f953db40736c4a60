"""Handmade tars and images like those of other people."""

import io
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import cv2
import numpy as np

Members = Iterable[tuple[str, bytes]] | Mapping[str, bytes]


@contextmanager
def open_tar(file: BinaryIO, format: int = tarfile.PAX_FORMAT) -> Iterator[Callable[..., None]]:
    """Open a tar and yield a function that adds a member with a name, bytes and header fields."""
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:

        def add(name: str, body: bytes = b"", **fields: Any) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(body))

        yield add


def tar_of(members: Members, format: int = tarfile.PAX_FORMAT, **fields: Any) -> bytes:
    """Return a tar of these members, each a name and its bytes; `fields` are set in every header."""
    if isinstance(members, Mapping):
        members = members.items()
    buffer = io.BytesIO()
    with open_tar(buffer, format) as add:
        for name, body in members:
            add(name, body, **fields)
    return buffer.getvalue()


def write_tar(path: Path, members: Members) -> Path:
    """Write a tar of these members; return its path."""
    path.write_bytes(tar_of(members))
    return path


def picture(value: int, size: int = 8) -> bytes:
    """Return a grey square JPEG with this side in pixels."""
    return cv2.imencode(".jpg", np.full((size, size, 3), value, np.uint8))[1].tobytes()
