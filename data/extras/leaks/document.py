"""Read and write leaks.json, the result of `patchline leaks`, which evaluations and subsets use.

    {"schema": 2,
     "train": [{"path": "shards/train", "digest": "9f3c…"}], "test": [{"path": "shards/test", "digest": "51aa…"}],
     "pairs": [{"train": ["train-000021.tar", "n0144"], "test": ["test-000000.tar", "v7"], "kind": "perceptual",
                "distance": 0.04, "train_set": 0, "test_set": 0}],
     "settings": {…}, "looked_at": {…}, "sha256": "e5f0…"}

A pair is one training sample and one test sample, each named by shard and key; `train_set` and `test_set` are indices
into the lists of sets. The file ends with the sha256 of its text (data/seal.py), and is rejected without it.

    in_pairs(read_leaks("leaks.json"), load_index("shards/test"), "test")   →   array([False, True, …])
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from data.errors import DataError
from data.files import write_atomically
from data.index.index import Index
from data.seal import Unsealed, check_schema, seal, unseal

SCHEMA = 2
Kind = Literal["exact", "perceptual", "embedding"]
Side = Literal["train", "test"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class Compared:
    """A data set compared in the leak search."""

    path: str
    digest: str


@dataclass(frozen=True)
class Pair:
    """A training sample and a test sample with the same image."""

    train: tuple[str, str]  # name of the shard in the index, and key
    test: tuple[str, str]
    kind: Kind
    distance: float  # 0 for equal pixels; otherwise the measure depends on the kind (docs/leaks.md)
    train_set: int = 0  # index into `Leaks.train`
    test_set: int = 0


@dataclass(frozen=True)
class Leaks:
    """All pairs found between training sets and test sets."""

    train: tuple[Compared, ...]
    test: tuple[Compared, ...]
    pairs: tuple[Pair, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # thresholds and versions of the search
    looked_at: Mapping[str, Any] = field(default_factory=dict)  # numbers of compared and of undecodable samples


def numbers_of(leaks: Leaks, index: Index, side: Side) -> set[int]:
    """Return the indices of the data sets on one side of the comparison that equal a given data set or its parent."""
    sets: Sequence[Compared] = getattr(leaks, side)
    digests = {index.digest}
    if index.origin is not None:
        digests.add(index.origin.digest)
    return {number for number, compared in enumerate(sets) if compared.digest in digests}


def in_pairs(leaks: Leaks, index: Index, side: Side) -> np.ndarray:
    """Return a boolean array (N,): whether each sample of a data set occurs on one side of a pair.

    `index` is a compared data set, or a direct subset of one. If a shard contains a key twice, both samples are marked.
    Raises DataError if leaks.json does not cover the data set.
    """
    numbers = numbers_of(leaks, index, side)
    if not numbers:
        sets = ", ".join(f"{compared.path} ({compared.digest[:12]})" for compared in getattr(leaks, side))
        raise DataError(
            f"{index.tables} (digest {index.digest[:12]}) is not one of the {side} sets in leaks.json: {sets}\n"
            f"  expected a leaks.json that covers this data set\n"
            f"  to create one, run python -m jobs leaks TRAIN --test {shlex.quote(str(index.tables))} --output FOLDER"
        )
    keys_of_shard: dict[str, set[str]] = {}
    for pair in leaks.pairs:
        set_number = pair.test_set
        shard, key = pair.test
        if side == "train":
            set_number = pair.train_set
            shard, key = pair.train
        if set_number in numbers:
            keys_of_shard.setdefault(shard, set()).add(key)

    leaked = np.zeros(index.samples, bool)
    for number, indexed in enumerate(index.shards):
        keys = keys_of_shard.get(indexed.name)
        # Most shards have no leaked sample: do not read their tables.
        if keys:
            leaked[index.rows(number)] = np.isin(index.keys(number), sorted(keys))
    return leaked


# ------------------------------------------------------------------------------------- reading and writing


def read_leaks(path: str | os.PathLike[str]) -> Leaks:
    """Read a leaks.json; raises DataError if the file is missing, damaged, or from another version."""
    try:
        content = unseal(Path(path).read_bytes())
        check_schema(path, content["schema"], SCHEMA)
        if content["schema"] != SCHEMA:
            raise DataError(
                f"{path} has schema {content['schema']}, expected {SCHEMA}; run `python -m jobs leaks` again"
            )
        pairs = []
        for entry in content["pairs"]:
            train_shard, train_key = entry["train"]
            test_shard, test_key = entry["test"]
            pair = Pair(
                (str(train_shard), str(train_key)),
                (str(test_shard), str(test_key)),
                entry["kind"],
                float(entry["distance"]),
                int(entry.get("train_set", 0)),
                int(entry.get("test_set", 0)),
            )
            pairs.append(pair)
        leaks = Leaks(
            tuple(Compared(**compared) for compared in content["train"]),
            tuple(Compared(**compared) for compared in content["test"]),
            tuple(pairs),
            content.get("settings", {}),
            content.get("looked_at", {}),
        )
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DataError(f"{path}: file not found; create it with `python -m jobs leaks`") from None
    except Unsealed as error:
        raise DataError(
            f"{path}: {error}\n  expected an unmodified leaks.json; run `python -m jobs leaks` again"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: not a valid leaks.json ({repr(error)[:100]}); run `python -m jobs leaks` again"
        ) from None
    for pair in leaks.pairs:
        is_known = pair.train_set in range(len(leaks.train)) and pair.test_set in range(len(leaks.test))
        if not is_known or pair.kind not in get_args(Kind):
            raise DataError(
                f"{path}: the match {pair} has an unknown data set or kind; run `python -m jobs leaks` again"
            )
    return leaks


def write_leaks(path: Path, leaks: Leaks) -> None:
    """Write a leaks.json atomically."""
    write_atomically(path, seal({"schema": SCHEMA, **asdict(leaks)}))
