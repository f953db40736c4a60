"""What a search for leaks came to: `leaks.json`, written by `patchline leaks` and read by evaluations and subsets.

    {"schema": 2,
     "train": [{"path": "shards/train", "digest": "9f3c…"}], "test": [{"path": "shards/test", "digest": "51aa…"}],
     "pairs": [{"train": ["train-000021.tar", "n0144"], "test": ["test-000000.tar", "v7"], "kind": "perceptual",
                "distance": 0.04, "train_set": 0, "test_set": 0}],
     "settings": {…}, "looked_at": {…}, "sha256": "e5f0…"}

A pair is of one training sample and one test sample, each by shard and key; `train_set` and `test_set` say of which of
the sets, where there are several. The document ends with the sha256 of its text (data/seal.py); without it is none.

    in_pairs(read_leaks("leaks.json"), load_index("shards/test"), "test")   →   array([False, True, …])
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from data.errors import DataError
from data.files import write_atomically
from data.index.index import Index
from data.seal import Unsealed, seal, unseal

SCHEMA = 2
Kind = Literal["exact", "perceptual", "embedding"]
Side = Literal["train", "test"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class Compared:
    """One of the sets that were compared."""

    path: str
    digest: str


@dataclass(frozen=True)
class Pair:
    """A training sample and a test sample that show the same."""

    train: tuple[str, str]  # name of the shard, as its index has it, and key
    test: tuple[str, str]
    kind: Kind
    distance: float  # 0: the same pixels; otherwise what its kind means by it (docs/leaks.md)
    train_set: int = 0  # which of the document's sets
    test_set: int = 0


@dataclass(frozen=True)
class Leaks:
    """The pairs that were found among sets."""

    train: tuple[Compared, ...]
    test: tuple[Compared, ...]
    pairs: tuple[Pair, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # how they were searched for
    looked_at: Mapping[str, Any] = field(default_factory=dict)  # how many samples, and how many could not be decoded


def numbers_of(leaks: Leaks, index: Index, side: Side) -> set[int]:
    """Return which of the document's sets on a side a set is, or is a subset of."""
    sets: Sequence[Compared] = getattr(leaks, side)
    digests = {index.digest}
    if index.origin is not None:
        digests.add(index.origin.digest)
    return {number for number, compared in enumerate(sets) if compared.digest in digests}


def in_pairs(leaks: Leaks, index: Index, side: Side) -> np.ndarray:
    """Return (N,) whether each sample of a set is on one side of a pair, in the order of the set.

    `index` is one of the sets that were compared, or a subset of one, but no subset of a subset. A key that a shard has
    twice marks both. Raises DataError where it is neither.
    """
    numbers = numbers_of(leaks, index, side)
    if not numbers:
        there = ", ".join(f"{compared.path} ({compared.digest[:12]})" for compared in getattr(leaks, side))
        raise DataError(
            f"{index.tables} (digest {index.digest[:12]}) is none of the {side} sets that were compared: {there}\n"
            f"  expected a leaks.json about this very set\n"
            f"  make one: python -m jobs leaks TRAIN --test {index.tables} --output FOLDER"
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
        # As in most shards, nothing leaks: its table need not be opened.
        if keys:
            leaked[index.rows(number)] = np.isin(index.keys(number), sorted(keys))
    return leaked


# ------------------------------------------------------------------------------------- reading and writing


def read_leaks(path: str | os.PathLike[str]) -> Leaks:
    """Read a leaks.json; raises DataError where there is none, or it is not what was written."""
    try:
        content = unseal(Path(path).read_bytes())
        if content["schema"] != SCHEMA:
            raise DataError(f"{path}: schema {content['schema']}, this version reads {SCHEMA}; run `jobs leaks` again")
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
        raise DataError(f"{path}: there is no such document; `python -m jobs leaks` makes one") from None
    except Unsealed as error:
        raise DataError(f"{path}: {error}\n  expected a leaks.json as it was written; run `jobs leaks` again") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: no leaks.json ({repr(error)[:100]}); run `python -m jobs leaks` again") from None
    for pair in leaks.pairs:
        is_known = pair.train_set in range(len(leaks.train)) and pair.test_set in range(len(leaks.test))
        if not is_known or pair.kind not in get_args(Kind):
            raise DataError(f"{path}: {pair} is of no set or kind that there is; run `python -m jobs leaks` again")
    return leaks


def write_leaks(path: Path, leaks: Leaks) -> None:
    """Write a leaks.json, whole."""
    write_atomically(path, seal({"schema": SCHEMA, **asdict(leaks)}))
