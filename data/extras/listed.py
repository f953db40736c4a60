"""Read a list of samples from a file, and look them up in a data set.

A list has one of these formats:
    a text file, one sample per line      n0144, or the shard, a tab and the key
    a .json file with the same entries    ["n0144", ["train-000021.tar", "n0145"]]
    the leaks.json of `patchline leaks`   the samples of its pairs, training or test, that are in this data set

A shard is named by the end of its path, long enough to be unambiguous. A listed sample missing from the data set is an
error: otherwise a list for a different data set would silently exclude nothing. With a leaks.json, the data set must be
one of the compared data sets or a subset of one; a subset need not contain every leaked sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from data.checks import few, printable
from data.errors import DataError
from data.extras.leaks.document import SIDES, in_pairs, numbers_of, read_leaks
from data.index.index import Index, shards_called

Listed = tuple[str, str]  # shard and key; the shard is "" if the list does not name it
MAX_SHOWN = 5  # samples named in an error


def listed_rows(path: str, index: Index) -> np.ndarray:
    """Return the row numbers of the samples that a file lists, counted over all shards of the data set.

    Raises DataError if the list is empty, unreadable, or made for a different data set.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content = json.loads(text) if path.endswith(".json") else None
        if isinstance(content, dict) and "pairs" in content:
            return leaked_rows(path, index)
        samples: list[Listed] = []
        if path.endswith(".json"):
            if not isinstance(content, list) or not content:
                raise ValueError("the JSON value is not a list, or the list is empty")
            for entry in content:
                shard, key = ("", entry) if isinstance(entry, str) else entry
                if not isinstance(shard, str) or not isinstance(key, str):
                    raise ValueError(f"{str(entry)[:80]} is neither a key nor a pair of shard and key")
                samples.append((shard, key))
        else:
            for line in text.splitlines():
                shard, _, key = line.rpartition("\t")
                if line.strip():
                    samples.append((shard, key))
            if not samples:
                raise ValueError("the file is empty")
    except FileNotFoundError:
        raise DataError(f"{path}: file not found; expected a text file with one sample per line") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: invalid UTF-8 at byte {error.start}; save it as UTF-8") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: not a list of samples: {error}\n"
            "  expected one sample per line: a key, or a shard, a tab and a key"
        ) from None
    return rows_listed(index, samples, path)


def leaked_rows(path: str, index: Index) -> np.ndarray:
    """Return the row numbers of the samples in any pair of a leaks.json, whether as training or as test sample.

    Raises DataError if leaks.json covers neither the data set nor its parent, or if a pair names a sample that is not
    in the compared data set.
    """
    leaks = read_leaks(path)
    leaked = np.zeros(index.samples, bool)
    sides = [side for side in SIDES if numbers_of(leaks, index, side)]
    if not sides:
        digests = [compared.digest[:12] for compared in (*leaks.train, *leaks.test)]
        raise DataError(
            f"{path}: the list is for data sets with the digests {', '.join(digests)}, but the digest of this one is "
            f"{index.digest[:12]}\n  expected a leaks.json for {index.tables}, or for its parent data set"
        )
    for side in sides:
        leaked |= in_pairs(leaks, index, side)
    # A pair may name samples outside a subset, but a compared set must contain all samples of its pairs.
    own_samples = set()
    for pair in leaks.pairs:
        if leaks.train[pair.train_set].digest == index.digest:
            own_samples.add(pair.train)
        if leaks.test[pair.test_set].digest == index.digest:
            own_samples.add(pair.test)
    leaked[rows_listed(index, sorted(own_samples), path)] = True
    return np.flatnonzero(leaked)


def rows_listed(index: Index, samples: Sequence[Listed], path: str) -> np.ndarray:
    """Return the row numbers of listed samples, counted over all shards of the data set.

    If a shard contains a key twice, both rows are returned. Raises DataError if samples are missing from the data set,
    or if a key without a shard occurs in several shards. Errors name `path`, the file with the list.
    """
    numbers = shard_numbers(index, {shard for shard, _ in samples if shard}, path)
    keys_of_shard: dict[int, set[str]] = {}
    anywhere: set[str] = set()  # keys without a shard
    for shard, key in samples:
        if shard:
            keys_of_shard.setdefault(numbers[shard], set()).add(key)
        else:
            anywhere.add(key)

    rows = [np.empty(0, np.int64)]
    shards_of_key: dict[str, set[str]] = {key: set() for key in anywhere}
    missing: list[str] = []
    for number, indexed in enumerate(index.shards):
        named = keys_of_shard.get(number, set())
        # If the list names shards, most shards have no listed sample: do not read their keys.
        if named or anywhere:
            keys = index.keys(number)
            present = np.flatnonzero(np.isin(keys, sorted(named | anywhere)))
            rows.append(present + index.starts[number])
            present_keys = set(keys[present].tolist())
            for key in sorted(named - present_keys):
                missing.append(f"{indexed.name} {printable(key)}")
            for key in present_keys & anywhere:
                shards_of_key[key].add(indexed.name)
    ambiguous = []
    for key, shards in shards_of_key.items():
        if not shards:
            missing.append(printable(key))
        elif len(shards) > 1:
            ambiguous.append(f"{printable(key)} ({', '.join(sorted(shards)[:3])})")
    problems = (
        (missing, f"{len(samples):,} listed samples are not in {index.tables}", "only samples of this set"),
        (ambiguous, "listed keys are in several shards", "the shard and a tab before each of these keys"),
    )
    for entries, problem, expected in problems:
        if entries:
            first = few(entries, MAX_SHOWN, ", …")
            raise DataError(f"{path}: {len(entries):,} of the {problem}: {first}\n  expected {expected}")
    return np.concatenate(rows)


def shard_numbers(index: Index, names: Iterable[str], path: str) -> dict[str, int]:
    """Return the shard number for each shard name; raises DataError unless a name matches exactly one shard."""
    numbers = {}
    for name in names:
        matching = []
        if name in index.numbers:
            matching.append(index.numbers[name])
        else:
            for places in shards_called(name, [index]).values():
                for _, number in places:
                    matching.append(number)
        if len(matching) != 1:
            raise DataError(
                f"{path}: {len(matching)} shards of {index.tables} match {printable(name)}, expected exactly one\n"
                f"  shard paths look like {index.location(0)}; use enough of the end of the path to identify one shard"
            )
        numbers[name] = matching[0]
    return numbers
