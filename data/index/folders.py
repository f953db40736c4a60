"""Which tars a folder holds; whatever lies beside them and would be left out is an error, not a silence."""

from __future__ import annotations

import os
from pathlib import Path

from data.errors import DataError
from data.index.names import some

# What tars are called when they have been compressed; they are read from the middle, which no compression allows.
COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2", ".tar.lz4")


def check_nothing_beside(folder: str | os.PathLike[str]) -> None:
    """Raise DataError where a folder of tars has compressed ones too, or folders with tars in them."""
    if not Path(folder).is_dir():
        return
    compressed = [path.name for path in compressed_in(folder)]
    below = []
    for path in sorted(Path(folder).glob("[!.]*")):
        if path.is_dir():
            below += [f"{path.name}/{tar.name}" for tar in sorted(path.glob("[!.]*.tar"))]
    if compressed:
        raise DataError(
            f"{folder}: {some(compressed)} would be left out: compressed tars\n"
            "  expected tars that samples can be read from the middle of: uncompress them (gzip -d, zstd -d), "
            f"or name those that you mean: {folder}/*.tar"
        )
    if below:
        raise DataError(
            f"{folder}: {some(below)} would be left out: they lie in folders of their own\n"
            f"  expected tars in the folder itself; name them all: {folder}/*.tar {folder}/*/*.tar"
        )


def compressed_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The compressed tars of a folder, sorted; none where it is none."""
    return [path for path in sorted(Path(folder).glob("[!.]*")) if path.name.endswith(COMPRESSED) and path.is_file()]
