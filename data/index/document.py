"""The JSON of an index: read once its seal and digest are compared, and written whole.

    train.index.json         {"schema": 1, "directory": ".", "digest": "9f3c…", "class_counts": [600, 650],
                              "names": ["cat", "dog"], "origin": null,
                              "shards": [["train-000000.tar", 1250, 6543360, "d41d…", "77ab…"]], …, "seal": "e5f0…"}

The names are those of the classes, in the order of their ids; the origin says what a subset was made of. The JSON of a
small set is wholly in memory. Of a large set,
1. the first process of a node that loads it checks its JSON, and writes what it says as columns (`data.index.shard`)
   into the node's state folder, under the sha256 of that JSON, which another JSON does not have;
2. every process maps these instead of reading the JSON; a file that is torn or altered is made anew;
3. the process that makes a file deletes those that have not been opened for a month.
The JSON remains the set's document: the columns follow from it, and can be deleted at any time.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import file_digest, sha256
from pathlib import Path
from shlex import quote
from typing import Any

from data.errors import DataError, StorageError
from data.files import error_text, locked, state_folder, write_atomically
from data.index.index import Index, Origin, Refusals, digest_of
from data.index.names import Names
from data.index.shard import MappedShards, Shard, is_image, open_columns, write_columns

SCHEMA = 1
SUFFIX = ".index.json"
LARGE = 1 << 20  # bytes of a JSON, about 5,000 shards, from which on it is mapped as columns
UNUSED_S = 30 * 24 * 3600  # without being opened, after which a file of columns may go
HELD_PER_BYTE = 3.6  # bytes of Python objects for each byte of a JSON: 139 MiB of 38 MB


def load_index(path: str | os.PathLike[str]) -> Index:
    """Read an index from its JSON, or from a directory that holds just one; raises DataError."""
    if "://" in str(path):
        raise DataError(f"{path}: an index is a folder here; `python -m jobs index URL --output FOLDER` makes one")
    path = Path(path)
    if path.is_dir():
        path = json_in(path)
    try:
        is_large = path.stat().st_size >= LARGE
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path}: there is no such index\n"
            "  expected a folder that `python -m jobs index` or `python -m jobs pack` has written, or @stage/set"
        ) from None
    if not path.name.endswith(".json"):
        kind = "an image" if is_image(path) else "a file"
        way_out = "name the folder of a set"
        if path.suffix == ".tar":
            kind = "a tar, one shard of a set"
            way_out = f"type python -m jobs index {path.parent}, then name that folder"
        raise DataError(f"{path} is {kind}\n  expected a set's *{SUFFIX}, or its folder\n  {way_out}")
    content, shards = read_large(path) if is_large else read_json(path, path.read_bytes())
    directory = content["directory"]
    # A path is kept relative to the index, so that both can be moved together.
    if "://" not in directory:
        directory = str((path.parent / directory).resolve())
    return Index(
        shards=shards,
        classes=len(content["class_counts"]),
        class_counts=tuple(content["class_counts"]),
        digest=content["digest"],
        directory=directory,
        tables=path.parent.resolve(),
        refused=Refusals(Counter(content["refused"]), content["first_refused"]),
        names=tuple(content["names"]),
        name=path.name.removesuffix(SUFFIX),
        origin=None if content["origin"] is None else Origin(**content["origin"]),
    )


def json_in(folder: Path) -> Path:
    """Return the JSON of the one index in a folder; raises DataError saying what the folder holds instead."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if len(paths) == 1:
        return paths[0]
    stopped = sorted(folder.glob(f"*{SUFFIX}.partial"))
    below = sorted(folder.glob(f"*/*{SUFFIX}"))
    first_files = itertools.islice(folder.iterdir(), 100)
    place = quote(str(folder))
    problem = (
        f"expected one *{SUFFIX}, found none, and neither tars nor images\n"
        "  name the folder of a set that `python -m jobs index` or `python -m jobs pack` has written"
    )
    if stopped:
        problem = (
            f"expected one *{SUFFIX}, found none\n"
            f"  {stopped[0].name} is of a packing or indexing that was stopped: run it again to its end"
        )
    elif paths:
        names = ", ".join(path.name for path in paths)
        problem = f"expected one *{SUFFIX}, found {names}\n  name one of the files"
    elif any(folder.glob("*.tar")):
        problem = f"tars without an index\n  type python -m jobs index {place}"
    elif below:
        folders = ", ".join(str(path.parent) for path in below[:9])
        problem = f"expected one *{SUFFIX}, found none\n  name one of {folders}"
    elif folders_of_images := image_folders(folder):
        shards = quote(f"{folder}-shards")
        problem = (
            f"images in {folders_of_images} folders, which are to be packed first\n"
            f"  type python -m jobs pack folder {place} {shards}, then name {shards}"
        )
    elif any(map(is_image, first_files)):
        problem = (
            "images without folders of classes\n"
            f"  expected a folder for each class: name the folder above, or sort the images, as {folder}/cat/1.jpg\n"
            "  then type python -m jobs pack folder FOLDER FOLDER-shards, and name FOLDER-shards"
        )
    raise DataError(f"{folder}: {problem}")


def image_folders(folder: Path) -> int:
    """Return how many folders inside a folder hold images; of each the first files tell."""
    folders = 0
    for child in folder.glob("[!.]*/"):
        # A folder of a million images is not listed for a message.
        files = itertools.islice(child.rglob("[!.]*.*"), 100)
        folders += any(map(is_image, files))
    return folders


def read_json(path: Path, text: bytes) -> tuple[dict[str, Any], Sequence[Shard]]:
    """Return (all that an index's JSON says but its shards, its shards), once its seal and digest are compared.

    Raises DataError.
    """
    try:
        content = json.loads(text)
        schema = content["schema"]
        if schema != SCHEMA:
            raise DataError(f"{path}: schema {schema}, this version reads {SCHEMA}; run `python -m jobs index` again")
        shards = tuple(Shard(*row) for row in content["shards"])
        class_counts = tuple(content["class_counts"])
        digest = content["digest"]
        directory = content["directory"]
        if not isinstance(directory, str):
            raise TypeError(f"directory {directory!r}")
        names = tuple(content["names"])
        seal = content["seal"]
        origin = None if content["origin"] is None else Origin(**content["origin"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not a Patchline index ({type(error).__name__}: {str(error)[:80]})\n"
            "  run `python -m jobs index` again, or `python -m jobs subset` if it is a subset"
        ) from None

    # A text that was edited by hand, or cut where it still parses, describes another set than its digest does.
    if seal != seal_of(content) or digest != digest_of(shards, class_counts, names, origin):
        maker = "index" if origin is None else "subset"
        raise DataError(f"{path}: its digest does not match its contents; run `python -m jobs {maker}` again")
    del content["shards"]
    return content, shards


def seal_of(content: Mapping[str, object]) -> str:
    """Return the sha256 of an index's JSON but for its seal, however it is laid out."""
    sealed = {name: value for name, value in content.items() if name != "seal"}
    return sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def write_index(
    path: Path,
    directory: Path | str,
    shards: Sequence[Shard],
    class_counts: Sequence[int],
    names: Names = (),
    refused: Refusals | None = None,
    origin: Origin | None = None,
) -> Index:
    """Write an index's JSON, of shards that lie in `directory`, whose tables lie beside it already; read it back."""
    # A path is kept relative to the index, so that both can be moved or mounted elsewhere together.
    refused = refused or Refusals()
    place = str(directory)
    if "://" not in place:
        place = os.path.relpath(place, path.parent)
    content: dict[str, object] = {
        "schema": SCHEMA,
        "directory": place,
        "samples": sum(shard.samples for shard in shards),
        "digest": digest_of(shards, class_counts, names, origin),
        "refused": dict(refused.counts),
        "first_refused": refused.first,
        "class_counts": list(class_counts),
        "names": list(names),
        "origin": None if origin is None else asdict(origin),
        "shards": [list(vars(shard).values()) for shard in shards],
    }
    content["seal"] = seal_of(content)
    write_atomically(path, json.dumps(content, indent=1))
    return load_index(path)


# -------------------------------------------------------------------------------------------- large sets


def read_large(path: Path) -> tuple[Mapping[str, Any], Sequence[Shard]]:
    """Return what `read_json` does, but the shards mapped; the first process of a node that asks makes the columns.

    Where they cannot be kept, every process holds the shards itself, which is logged. Raises DataError.
    """
    with open(path, "rb") as file:
        columns = state_folder() / "indexes" / f"{file_digest(file, 'sha256').hexdigest()}.columns"
    try:
        shards = open_columns(columns) or make_columns(path, columns)
    except (OSError, StorageError) as error:
        reason = error_text(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        held_mb = HELD_PER_BYTE * path.stat().st_size / 1e6
        logging.getLogger(__name__).warning(
            f"{path}: its columns cannot be kept in {columns.parent} ({reason}): every process holds all of it, "
            f"about {held_mb:.0f} MB; give PATCHLINE_CACHE a folder that can be written"
        )
        return read_json(path, path.read_bytes())
    # The time of last use, as of a shard in the cache; the file may be another user's.
    with suppress(OSError):
        os.utime(shards.path)
    return json.loads(shards.columns["index"].tobytes()), shards


def make_columns(path: Path, columns: Path) -> MappedShards:
    """Write the columns of an index, while the other processes of the node wait for them.

    Raises DataError, and OSError and StorageError where the folder takes nothing.
    """
    columns.parent.mkdir(parents=True, exist_ok=True)
    with locked(columns.with_suffix(".lock")):
        # Another process may have made them while we waited.
        shards = open_columns(columns)
        if shards is not None:
            return shards
        if columns.exists():
            logging.getLogger(__name__).warning(f"{columns}: torn or altered; it is made anew from {path}")
        text = path.read_bytes()
        content, held = read_json(path, text)
        # The JSON may have been replaced since its digest was taken: the columns go by what was read.
        columns = columns.with_name(f"{sha256(text).hexdigest()}.columns")
        write_columns(columns, content, held)
        # What has not been opened for a month goes; who has it mapped keeps it.
        for other in columns.parent.glob("*.columns"):
            # Another process may delete it meanwhile; it may be another user's.
            with suppress(OSError):
                status = other.stat()
                # A process that does not own the file cannot set its time of last use; reading it has renewed the
                # other time.
                if time.time() - max(status.st_mtime, status.st_atime) > UNUSED_S:
                    other.unlink()
                    other.with_suffix(".lock").unlink()
    shards = open_columns(columns)
    if shards is None:
        raise StorageError(f"{columns}: is not what was written a moment ago")
    return shards
