"""The JSON of an index: read once its seal and digest are compared, and written whole.

    train.index.json         {"schema": 1, "directory": ".", "digest": "9f3c…", "class_counts": [600, 650],
                              "names": ["cat", "dog"], "origin": null,
                              "shards": [["train-000000.tar", 1250, 6543360, "d41d…", "77ab…"]], …, "seal": "e5f0…"}

The names are those of the classes, in the order of their ids; the origin says what a subset was made of. The JSON of a
small set is wholly in memory; of a large set the columns are mapped instead (`data.index.columns`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.files import write_whole
from data.index.columns import mapped_shards
from data.index.index import Index, Origin, digest_of
from data.index.names import Names
from data.index.refusals import Refusals
from data.index.shard import Shard, shard_row

SCHEMA = 1
SUFFIX = ".index.json"
LARGE = 1 << 20  # bytes of a JSON, about 5,000 shards, from which on it is mapped as columns


def load_index(path: str | os.PathLike[str]) -> Index:
    """Read an index from its JSON, or from a directory that holds just one; raises DataError."""
    if "://" in str(path):
        raise DataError(f"{path}: an index is a folder here; `python -m jobs index URL --output FOLDER` makes one")
    path = Path(path)
    if path.is_dir():
        paths = sorted(path.glob(f"*{SUFFIX}"))
        if len(paths) != 1:
            names = ", ".join(each.name for each in paths) or "none"
            stopped = sorted(path.glob(f"*{SUFFIX}.partial"))
            if stopped:
                way_out = f"{stopped[0].name} is of a packing or indexing that was stopped: run it again to its end"
            elif paths:
                way_out = "name the file"
            else:
                way_out = "run `python -m jobs index` first"
            raise DataError(f"{path}: expected one *{SUFFIX}, found {names}; {way_out}")
        path = paths[0]
    try:
        is_large = path.stat().st_size >= LARGE
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path}: there is no such index; `python -m jobs index` makes one") from None
    content, shards = mapped_shards(path, read_json) if is_large else read_json(path, path.read_bytes())
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
        refused=content["refused"],
        first_refused=content["first_refused"],
        names=tuple(content["names"]),
        name=path.name.removesuffix(SUFFIX),
        origin=origin_of(content),
    )


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
        origin = origin_of(content)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not a Patchline index ({repr(error)[:100]}); run `python -m jobs index` again, "
            "or `python -m jobs subset` if it is a subset"
        ) from None

    # A text that was edited by hand, or cut where it still parses, describes another set than its digest does.
    if seal != seal_of(content) or digest != digest_of(shards, class_counts, names, origin):
        maker = "index" if origin is None else "subset"
        raise DataError(f"{path}: its digest does not match its contents; run `python -m jobs {maker}` again")
    del content["shards"]
    return content, shards


def origin_of(content: Mapping[str, Any]) -> Origin | None:
    """Return what a subset's JSON says that it was made of; None of any other."""
    return None if content["origin"] is None else Origin(**content["origin"])


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
    place = str(directory)
    if "://" not in place:
        place = os.path.relpath(place, path.parent)
    refused = refused or Refusals()
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
        "shards": list(map(shard_row, shards)),
    }
    content["seal"] = seal_of(content)
    write_whole(path, json.dumps(content, indent=1))
    return load_index(path)
