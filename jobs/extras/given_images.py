"""Read the images named by a command's arguments: image files, folders of images, and tar shards."""

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.errors import UsageError
from data.index.shard import IMAGES
from data.walk import files_below
from jobs.extras.data_commands import near_path


def check_images(paths: Sequence[str]) -> None:
    """Raise UsageError if a path does not exist, or if the paths contain no images. Does not import torch."""
    missing = [path for path in paths if not Path(path).exists()]
    if missing:
        raise UsageError(
            f"no such file or folder: {', '.join(missing)}{near_path(missing[0])}\n"
            "  expected image files, folders of images or tar shards"
        )
    images_or_tars = tuple(f".{suffix}" for suffix in (*IMAGES, "tar"))
    for path in map(Path, paths):
        files = files_below(path, Counter()) if path.is_dir() else [path]
        if any(file.name.lower().endswith(images_or_tars) for file in files):
            return
    raise UsageError(
        f"found no images in {', '.join(paths)}\n"
        f"  expected image files ({', '.join(IMAGES)}), folders of images or tar shards"
    )


def wait_without_spinning() -> None:
    """Let torch's threads sleep while they wait for each other; call this before torch is imported.

    By default, OpenMP's threads spin. On a busy machine, this multiplied the CPU time of small images by 20 (measured).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def encoded_images(paths: Sequence[str], limit: int | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the encoded bytes of each image in these image files, folders and tar shards.

    If there are more than `limit` files, select files at even intervals from the sorted names, because the first files
    may all belong to one class. `limit` also applies to the samples of each shard.
    """
    files: list[Path] = []
    shards: list[Path] = []
    for path in map(Path, paths):
        below = files_below(path, Counter()) if path.is_dir() else [path]
        for file in below:
            suffix = file.suffix[1:].lower()
            if suffix in IMAGES:
                files.append(file)
            elif suffix == "tar":
                shards.append(file)
    count = len(files) if limit is None else min(limit, len(files))
    for number in range(count):
        file = files[number * len(files) // count]
        yield str(file), file.read_bytes()
    from data.extras.sources.tars import tars

    for shard in shards:
        for sample in itertools.islice(tars([str(shard)], unlabelled=True), limit):
            yield f"{shard.name}:{sample.key}", sample.read()
