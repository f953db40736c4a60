"""Tars made by hand, as those of other people would be."""

import io
import tarfile
from pathlib import Path


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Write a tar of these members, each a name and its bytes; return its path."""
    with tarfile.open(path, "w") as tar:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return path
