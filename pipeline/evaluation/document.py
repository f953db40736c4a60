"""The document of an evaluation, evaluation.json: each value with its interval, and all that it traces back to.

{"schema": 1,
 "weights": {"path": "…/finetune-1a2b3c4d", "digest": "9f3c…", "model": {…}},
 "results": [{
   "code": "77ab…",                                               the version that computed it
   "set": {"name": "test", "path": "…", "digest": "…", "samples": 360, "judged": 360},
   "train": {"path": "…", "digest": "…", "samples": 1437, "used": 1437},          null for protocols of the head
   "protocol": {"name": "fewshot", "fields": {…}, "digest": "…"},
   "values": {"5shot": {"value": 0.91, "low": 0.88, "high": 0.94, "samples": 360, "interval": "…", …}, …},
   "classes": [{"id": 0, "name": "zero", "value": …, "low": …, "high": …, "samples": 36}, …],       of per-class alone
   "shots": {"5shot": {"0": [[shard, sample], …], …}},       of fewshot alone; numbers in the training set's index
   "chosen": {"l2": 0.01, …},                                                                      of logistic alone
   "leaks": "not checked"                                        or {…, "leaked": 7, "values": {…}}: without those
 }, …]}

Nothing in it depends on when, where or on how many workers it was computed, but for the paths. The digest of a set is
its index's; that of a protocol is the sha256 of {"fields": …, "protocol": name} as JSON with sorted keys.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, stdev
from typing import Any

import numpy as np

from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.protocols import Outcome, Protocol

SCHEMA = 1
NAME = "evaluation.json"
CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # 1.96
NOT_CHECKED = "not checked"  # for leaks

Entry = dict[str, Any]  # JSON


# ------------------------------------------------------------------------------------------------ intervals


def wilson(right: int, samples: int) -> tuple[float, float]:
    """Return the Wilson score interval of a share (Wilson 1927), at 95 %; 0 to 1 where there is no sample.

    Unlike the normal interval it stays within 0 … 1, and is no point where all are right.
    """
    if samples == 0:
        return 0.0, 1.0
    share = right / samples
    middle = share + Z**2 / (2 * samples)
    spread = Z * math.sqrt(share * (1 - share) / samples + Z**2 / (4 * samples**2))
    scale = 1 + Z**2 / samples
    # Rounding may lead a hair beyond 0 and 1.
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def share_entry(is_right: np.ndarray) -> Entry:
    """Return the entry of a share: (N,) bool, whether each sample was right."""
    right = int(is_right.sum())
    low, high = wilson(right, len(is_right))
    value = right / max(len(is_right), 1)
    return {"value": value, "low": low, "high": high, "samples": len(is_right), "interval": "Wilson score, 95 %"}


def seeds_entry(of_seeds: Sequence[np.ndarray], seeds: Sequence[int]) -> Entry:
    """Return the entry of a mean over seeds, ± the standard deviation between them; of a single seed, of its share."""
    if len(of_seeds) == 1:
        return {**share_entry(of_seeds[0]), "seeds": {str(seeds[0]): float(of_seeds[0].mean())}}
    values = [int(is_right.sum()) / max(len(is_right), 1) for is_right in of_seeds]
    mean = sum(values) / len(values)
    deviation = stdev(values)
    return {
        "value": mean,
        "low": mean - deviation,
        "high": mean + deviation,
        "samples": len(of_seeds[0]),
        "interval": f"± standard deviation over {len(values)} seeds",
        "sd": deviation,
        "seeds": {str(seed): value for seed, value in zip(seeds, values, strict=True)},
    }


def class_entries(is_right: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> list[Entry]:
    """Return an entry for each class that has samples; a sample with several labels counts in each of their classes."""
    classes = int(labels.max(initial=-1)) + 1
    row, column = np.nonzero(labels >= 0)
    samples = np.bincount(labels[row, column], minlength=classes)
    hits = np.bincount(labels[row, column], weights=is_right[row], minlength=classes)
    entries = []
    for label in np.flatnonzero(samples).tolist():
        count = int(samples[label])
        right = int(hits[label])
        low, high = wilson(right, count)
        name = names[label] if label < len(names) else None
        entry = {"id": label, "name": name, "value": right / count, "low": low, "high": high, "samples": count}
        entries.append(entry)
    return entries


def mean_entry(classes: Sequence[Entry]) -> Entry:
    """Return the entry of the mean over classes, each with the same weight; the interval is the normal one."""
    count = max(len(classes), 1)
    mean = sum(entry["value"] for entry in classes) / count
    variance = sum(entry["value"] * (1 - entry["value"]) / entry["samples"] for entry in classes) / count**2
    spread = Z * math.sqrt(variance)
    return {
        "value": mean,
        "low": max(0.0, mean - spread),
        "high": min(1.0, mean + spread),
        "samples": sum(entry["samples"] for entry in classes),
        "interval": "normal, 95 %, of the mean over classes",
    }


# ------------------------------------------------------------------------------------------------ one result


def result_of(
    outcome: Outcome,
    protocol: Protocol,
    test: FeatureStore,
    train: FeatureStore | None,
    leaked: Sequence[int] | None,
) -> Entry:
    """Return the result of a protocol on a set; `leaked` are numbers of samples, None where there was no leak check."""
    everything = np.ones(len(test.rows), bool)
    values, classes = value_entries(outcome, protocol, test, everything)
    result: Entry = {
        "set": {"digest": test.index.digest, "samples": test.index.samples, "judged": len(test.rows)},
        "train": None,
        "protocol": {"name": protocol.name, "fields": protocol.fields, "digest": protocol.digest},
        "values": values,
        "leaks": NOT_CHECKED,
    }
    if train is not None:
        result["train"] = {"digest": train.index.digest, "samples": train.index.samples, "used": len(train.rows)}
    if classes:
        result["classes"] = classes
    if outcome.shots and train is not None:
        result["shots"] = shots_of(outcome.shots, train)
    if outcome.chosen:
        result["chosen"] = outcome.chosen
    if leaked is not None:
        is_clean = ~np.isin(test.rows, np.asarray(leaked, int))
        values_without, _ = value_entries(outcome, protocol, test, is_clean)
        result["leaks"] = {"leaked": int((~is_clean).sum()), "values": values_without}
    return result


def value_entries(
    outcome: Outcome, protocol: Protocol, test: FeatureStore, chosen: np.ndarray
) -> tuple[dict[str, Entry], list[Entry]]:
    """Return a protocol's values, and the classes of per-class, over the chosen samples of the set: (N,) bool.

    The only place where a value gets its interval.
    """
    values: dict[str, Entry] = {}
    classes: list[Entry] = []
    for name, of_seeds in outcome.right.items():
        picked = [is_right[chosen] for is_right in of_seeds]
        if protocol.kind.interval == "seeds":
            values[name] = seeds_entry(picked, protocol.settings.seeds)
        elif protocol.kind.interval == "classes":
            classes = class_entries(picked[0], test.labels[chosen], test.index.names)
            values[name] = mean_entry(classes)
        else:
            values[name] = share_entry(picked[0])
    return values, classes


def shots_of(shots: Mapping[str, Mapping[str, Sequence[int]]], train: FeatureStore) -> Entry:
    """Return the shots of every value and seed as [shard, sample], numbers within the training set's index."""
    ids: Entry = {}
    for value, of_seeds in shots.items():
        ids[value] = {}
        for seed, numbers in of_seeds.items():
            shards = np.searchsorted(train.starts, numbers, side="right") - 1
            ids[value][seed] = np.stack([shards, np.asarray(numbers) - train.starts[shards]], axis=1).tolist()
    return ids


def metrics_with_seeds(result: Entry) -> dict[str, float]:
    """Return {"10shot-seed-0": 0.82, …, "10shot": mean over seeds} of a result (as big_vision fewshot_lsr.py)."""
    metrics: dict[str, float] = {}
    for name, entry in result["values"].items():
        for seed, value in entry.get("seeds", {}).items():
            metrics[f"{name}-seed-{seed}"] = value
        metrics[name] = entry["value"]
    return metrics


# ------------------------------------------------------------------------------------------------ the whole


def identity_of(result: Entry) -> tuple[str | None, ...]:
    """Return the digests that a result depends on: test set, training set, protocol, leaks."""
    train = result["train"]
    leaks = result["leaks"]
    return (
        result["set"]["digest"],
        train["digest"] if train else None,
        result["protocol"]["digest"],
        leaks["digest"] if leaks != NOT_CHECKED else None,
    )


def table(document: Entry) -> list[str]:
    """Return a document's values as lines: set, value, interval, samples."""
    rows = [("set", "protocol", "value", "interval", "samples", "leaks")]
    for result in document["results"]:
        for name, entry in result["values"].items():
            leaks = NOT_CHECKED
            if result["leaks"] != NOT_CHECKED:
                clean = result["leaks"]["values"][name]
                leaks = f"{clean['value']:.2%} without {result['leaks']['leaked']}"
            interval = f"{entry['low']:.2%} to {entry['high']:.2%}"
            row = (result["set"]["name"], name, f"{entry['value']:.2%}", interval, f"{entry['samples']:,}", leaks)
            rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def entries_of(document: Entry) -> dict[str, Entry]:
    """Return the entry of every value by its name, with the set's name in front where there are several sets."""
    names = {result["set"]["name"] for result in document["results"]}
    entries: dict[str, Entry] = {}
    for result in document["results"]:
        for name, entry in result["values"].items():
            entries[name if len(names) == 1 else f"{result['set']['name']} {name}"] = entry
    return entries


def metrics_of(document: Entry) -> dict[str, float]:
    """Return every value by its name, as `entries_of`."""
    return {name: entry["value"] for name, entry in entries_of(document).items()}
