"""Read and write the JSON of an index; every read checks its seal and digest.

    train.index.json         {"schema": 1, "directory": ".", "digest": "9f3c…", "class_counts": [600, 650],
                              "names": ["cat", "dog"], "origin": null,
                              "shards": [["train-000000.tar", 1250, 6543360, "d41d…", "77ab…"]], …, "seal": "e5f0…"}

`names` are class names in the order of their ids; `origin` describes the parent of a subset. The JSON of a small set is
loaded completely. For a large set:
1. the first process of a node checks the JSON and writes its contents as columns (`data.index.shard`) to the node's
   state folder, named by the sha256 of the JSON;
2. every process maps the columns instead of parsing the JSON; a truncated or altered file of columns is recreated;
3. the process that writes columns deletes those not opened for a month.
The JSON remains authoritative: the columns can be deleted at any time.
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

from data.checks import check_file_name, check_sha256
from data.errors import DataError, StorageError
from data.files import error_text, locked, state_folder, write_atomically
from data.index.index import Index, Origin, SkippedCounts, digest_of
from data.index.names import Names
from data.index.shard import MappedShards, Shard, is_image, open_columns, write_columns
from data.seal import check_schema

SCHEMA = 1
SUFFIX = ".index.json"
LARGE = 1 << 20  # bytes of a JSON, about 5,000 shards; from this size on, use mapped columns
UNUSED_S = 30 * 24 * 3600  # after this time without being opened, columns may be deleted
HELD_PER_BYTE = 3.6  # bytes of Python objects per byte of JSON: 139 MiB for 38 MB


def load_index(path: str | os.PathLike[str]) -> Index:
    """Load an index from its JSON file, or from a folder with exactly one index.

    Raises DataError if the index is missing, invalid or altered, or if the folder has several.
    """
    if "://" in str(path):
        raise DataError(f"{path}: an index must be local; create one with `python -m jobs index URL --output FOLDER`")
    path = Path(path)
    if path.is_dir():
        path = json_in(path)
    try:
        is_large = path.stat().st_size >= LARGE
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path}: this index does not exist\n"
            "  expected a folder written by `python -m jobs index` or `python -m jobs pack`, or @stage/set"
        ) from None
    if not path.name.endswith(".json"):
        kind = "an image" if is_image(path) else "a file"
        remedy = "use the folder of a set"
        if path.suffix == ".tar":
            kind = "a tar, one shard of a set"
            remedy = f"run python -m jobs index {quote(str(path.parent))}, then use that folder"
        raise DataError(f"{path} is {kind}\n  expected a data set's *{SUFFIX}, or its folder\n  {remedy}")
    content, shards = read_large(path) if is_large else read_json(path, path.read_bytes())
    directory = content["directory"]
    # Paths in the JSON are relative to the index, so that index and shards can be moved together.
    if "://" not in directory:
        directory = str((path.parent / directory).resolve())
    return Index(
        shards=shards,
        classes=len(content["class_counts"]),
        class_counts=tuple(content["class_counts"]),
        digest=content["digest"],
        directory=directory,
        tables=path.parent.resolve(),
        refused=SkippedCounts(Counter(content["refused"]), content["first_refused"]),
        names=tuple(content["names"]),
        name=path.name.removesuffix(SUFFIX),
        origin=None if content["origin"] is None else Origin(**content["origin"]),
    )


def json_in(folder: Path) -> Path:
    """Return the path of a folder's only index; otherwise raise DataError describing the folder's contents."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if len(paths) == 1:
        return paths[0]
    stopped = sorted(folder.glob(f"*{SUFFIX}.partial"))
    below = sorted(folder.glob(f"*/*{SUFFIX}"))
    first_files = itertools.islice(folder.iterdir(), 100)
    place = quote(str(folder))
    problem = (
        f"expected one *{SUFFIX}, found none, and neither tars nor images\n"
        "  use the folder of a set written by `python -m jobs index` or `python -m jobs pack`"
    )
    if stopped:
        problem = (
            f"expected one *{SUFFIX}, found none\n"
            f"  {stopped[0].name} belongs to an unfinished packing or indexing: run that command again"
        )
    elif paths:
        names = ", ".join(path.name for path in paths)
        problem = f"expected one *{SUFFIX}, found {names}\n  use the path of one of these files"
    elif any(folder.glob("*.tar")):
        problem = f"tars without an index\n  run python -m jobs index {place}"
    elif below:
        folders = ", ".join(str(path.parent) for path in below[:9])
        problem = f"expected one *{SUFFIX}, found none\n  use one of {folders}"
    elif folders_of_images := image_folders(folder):
        shards = quote(f"{folder}-shards")
        problem = (
            f"images in {folders_of_images} folders, which must be packed first\n"
            f"  run python -m jobs pack folder {place} {shards}, then use {shards}"
        )
    elif any(map(is_image, first_files)):
        problem = (
            "images without class folders\n"
            f"  expected one folder per class: use the parent folder, or sort the images, as in {folder}/cat/1.jpg\n"
            "  then run python -m jobs pack folder FOLDER FOLDER-shards, and use FOLDER-shards"
        )
    raise DataError(f"{folder}: {problem}")


def image_folders(folder: Path) -> int:
    """Count the sub-folders with images, judging by the first files in each."""
    folders = 0
    for below in folder.glob("[!.@#$]*/"):  # neither hidden folders nor those of storage devices
        files = (Path(name) for _, _, names in os.walk(below) for name in names)
        folders += any(map(is_image, itertools.islice(files, 100)))
    return folders


def read_json(path: Path, text: bytes) -> tuple[dict[str, Any], Sequence[Shard]]:
    """Parse an index's JSON and check its seal and digest; return (all entries except the shards, the shards).

    Raises DataError if the JSON is invalid or has been altered.
    """
    try:
        content = json.loads(text)
        schema = content["schema"]
        check_schema(path, schema, SCHEMA)
        if schema != SCHEMA:
            raise DataError(f"{path} has schema {schema}, expected {SCHEMA}; run `python -m jobs index` again")
        shards = tuple(Shard(*row) for row in content["shards"])
        class_counts = tuple(content["class_counts"])
        digest = content["digest"]
        directory = content["directory"]
        if not isinstance(directory, str) or "\0" in directory:
            raise TypeError(f"directory {directory!r}")
        names = tuple(content["names"])
        seal = content["seal"]
        origin = None if content["origin"] is None else Origin(**content["origin"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not a Patchline index ({type(error).__name__}: {str(error)[:80]})\n"
            "  run `python -m jobs index` again, or `python -m jobs subset` if it is a subset"
        ) from None

    # A JSON that still parses after being edited or truncated no longer matches its digest.
    if seal != seal_of(content) or digest != digest_of(shards, class_counts, names, origin):
        maker = "index" if origin is None else "subset"
        raise DataError(f"{path}: its digest does not match its contents; run `python -m jobs {maker}` again")
    # Digests become file names in the cache, and names become paths; a seal does not authenticate the writer.
    for shard in shards:
        check_sha256(shard.sha256, str(path))
        place = shard.name.partition("://")[2] if isinstance(shard.name, str) and "://" in shard.name else shard.name
        check_file_name(place.lstrip("/") if isinstance(place, str) else place, str(path))
    del content["shards"]
    return content, shards


def seal_of(content: Mapping[str, object]) -> str:
    """Return the sha256 of an index's JSON without its seal, independent of formatting."""
    sealed = {name: value for name, value in content.items() if name != "seal"}
    return sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def write_index(
    path: Path,
    directory: Path | str,
    shards: Sequence[Shard],
    class_counts: Sequence[int],
    names: Names = (),
    refused: SkippedCounts | None = None,
    origin: Origin | None = None,
) -> Index:
    """Write the index JSON for shards in `directory`, whose tables already exist; return the loaded index."""
    # Store the directory relative to the index, so that both can be moved or mounted elsewhere together.
    refused = refused or SkippedCounts()
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


# -------------------------------------------------------------------------------------------- large data sets


def read_large(path: Path) -> tuple[Mapping[str, Any], Sequence[Shard]]:
    """Load an index as `read_json` does, but with memory-mapped shards.

    The first process on each node writes the column files. If they cannot be written, every process loads all shards
    and a warning is logged. Raises the errors of `read_json`.
    """
    with open(path, "rb") as file:
        columns = state_folder() / "indexes" / f"{file_digest(file, 'sha256').hexdigest()}.columns"
    try:
        shards = open_columns(columns) or make_columns(path, columns)
    except (OSError, StorageError) as error:
        reason = error_text(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        held_mb = HELD_PER_BYTE * path.stat().st_size / 1e6
        logging.getLogger(__name__).warning(
            f"{path}: cannot store its columns in {columns.parent} ({reason}): every process needs about "
            f"{held_mb:.0f} MB for its own copy of the index; set PATCHLINE_CACHE to a writable folder"
        )
        return read_json(path, path.read_bytes())
    # Record the time of last use; this fails if the file belongs to another user.
    with suppress(OSError):
        os.utime(shards.path)
    return json.loads(shards.columns["index"].tobytes()), shards


def make_columns(path: Path, columns: Path) -> MappedShards:
    """Write the columns of an index, while other processes on the node wait for the lock.

    Raises the errors of `read_json`, or OSError or StorageError if the columns cannot be written.
    """
    columns.parent.mkdir(parents=True, exist_ok=True)
    with locked(columns.with_suffix(".lock")):
        # Another process may have written them while we waited.
        shards = open_columns(columns)
        if shards is not None:
            return shards
        if columns.exists():
            logging.getLogger(__name__).warning(f"{columns} is truncated or altered; creating it again from {path}")
        text = path.read_bytes()
        content, parsed = read_json(path, text)
        # The JSON may have been replaced since it was hashed: name the columns by the text just read.
        columns = columns.with_name(f"{sha256(text).hexdigest()}.columns")
        write_columns(columns, content, parsed)
        # Delete columns not opened for a month; existing mappings are not affected.
        for other in columns.parent.glob("*.columns"):
            # Another process may delete it meanwhile, or it may belong to another user.
            with suppress(OSError):
                status = other.stat()
                # A process that does not own the file cannot update its mtime, but reading the file has updated its
                # atime.
                if time.time() - max(status.st_mtime, status.st_atime) > UNUSED_S:
                    other.unlink()
                    other.with_suffix(".lock").unlink()
    shards = open_columns(columns)
    if shards is None:
        raise StorageError(f"{columns}: the file was just written, but cannot be read back; check the disk")
    return shards
