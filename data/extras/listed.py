"""Lists of samples: read from a file, and looked up in a set.

A list is one of
    a text, one sample a line             n0144; or its shard and key, with a tab between
    a .json of such                       ["n0144", ["train-000021.tar", "n0145"]]
    the leaks.json of `patchline leaks`   those of its samples that lie in this set, of train or of test

A shard is named by the end of its path, as far as it takes to tell it from others. Whatever a list names and the set
lacks is an error: a list of another set would otherwise leave nothing out, in silence. Of a leaks.json the set is one
that was compared, or a subset of one, which of course lacks samples of it.
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

Listed = tuple[str, str]  # shard and key; the shard is "" where the list does not say
MOST_SHOWN = 5  # samples that an error names of many


def listed_rows(path: str, index: Index) -> np.ndarray:
    """Return the rows of a set, numbered through all of its shards, that a file lists.

    Raises DataError where it lists none or cannot be read, and where it is of another set.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content = json.loads(text) if path.endswith(".json") else None
        if isinstance(content, dict) and "pairs" in content:
            return leaked_rows(path, index)
        samples: list[Listed] = []
        if path.endswith(".json"):
            if not isinstance(content, list) or not content:
                raise ValueError("its JSON is no list with samples in it")
            for entry in content:
                shard, key = ("", entry) if isinstance(entry, str) else entry
                if not isinstance(shard, str) or not isinstance(key, str):
                    raise ValueError(f"{str(entry)[:80]} is neither a key nor a shard and a key")
                samples.append((shard, key))
        else:
            for line in text.splitlines():
                shard, _, key = line.rpartition("\t")
                if line.strip():
                    samples.append((shard, key))
            if not samples:
                raise ValueError("it is empty")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such list; expected a file of one sample a line") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no list of samples: {error}\n  expected one key a line, or shard, tab, key") from None
    return rows_listed(index, samples, path)


def leaked_rows(path: str, index: Index) -> np.ndarray:
    """Return the rows of a set that a leaks.json has in a pair, of train or of test: none where nothing of it leaks.

    Raises DataError where neither the set nor the one that it is a subset of was compared, and where a pair names a
    sample that a set which was compared lacks.
    """
    leaks = read_leaks(path)
    leaked = np.zeros(index.samples, bool)
    sides = [side for side in SIDES if numbers_of(leaks, index, side)]
    if not sides:
        digests = [compared.digest[:12] for compared in (*leaks.train, *leaks.test)]
        raise DataError(
            f"{path}: it compares the sets of the digests {', '.join(digests)}, and this one has {index.digest[:12]}\n"
            f"  expected a leaks.json about {index.tables}, or about the set that it was made of"
        )
    for side in sides:
        leaked |= in_pairs(leaks, index, side)
    # Of a subset a pair may name what is not in it; of the very set that was compared all must be there.
    own_samples = set()
    for pair in leaks.pairs:
        if leaks.train[pair.train_set].digest == index.digest:
            own_samples.add(pair.train)
        if leaks.test[pair.test_set].digest == index.digest:
            own_samples.add(pair.test)
    leaked[rows_listed(index, sorted(own_samples), path)] = True
    return np.flatnonzero(leaked)


def rows_listed(index: Index, samples: Sequence[Listed], path: str) -> np.ndarray:
    """Return the rows of a set, numbered through all of its shards, that hold listed samples.

    A key that a shard has twice names both. Raises DataError naming samples that are not there, and keys without a
    shard that several shards have; `path` is the list's.
    """
    numbers = shard_numbers(index, {shard for shard, _ in samples if shard}, path)
    keys_of_shard: dict[int, set[str]] = {}
    anywhere: set[str] = set()  # keys whose shard the list does not say
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
        # As in most shards, where shards are named: there is nothing to look up.
        if named or anywhere:
            keys = index.keys(number)
            present = np.flatnonzero(np.isin(keys, sorted(named | anywhere)))
            rows.append(present + index.starts[number])
            there = set(keys[present].tolist())
            for key in sorted(named - there):
                missing.append(f"{indexed.name} {printable(key)}")
            for key in there & anywhere:
                shards_of_key[key].add(indexed.name)
    ambiguous = []
    for key, shards in shards_of_key.items():
        if not shards:
            missing.append(printable(key))
        elif len(shards) > 1:
            ambiguous.append(f"{printable(key)} ({', '.join(sorted(shards)[:3])})")
    problems = (
        (missing, f"{len(samples):,} samples are not in {index.tables}", "samples of this very set"),
        (ambiguous, "keys are in several shards", "the shard before such a key, with a tab between"),
    )
    for entries, problem, expected in problems:
        if entries:
            first = few(entries, MOST_SHOWN, ", …")
            raise DataError(f"{path}: {len(entries):,} of its {problem}: {first}\n  expected {expected}")
    return np.concatenate(rows)


def shard_numbers(index: Index, names: Iterable[str], path: str) -> dict[str, int]:
    """Return the number of the shard that each name means; raises DataError unless it is exactly one."""
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
                f"{path}: {len(matching)} shards of {index.tables} are called {printable(name)}, expected one\n"
                f"  they are called as {index.location(0)}; type as much of the path as tells them apart"
            )
        numbers[name] = matching[0]
    return numbers
