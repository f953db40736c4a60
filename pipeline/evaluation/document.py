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
from collections.abc import Sequence
from statistics import NormalDist, stdev
from typing import Any

import numpy as np

from pipeline.evaluation.features import FeatureStore
from pipeline.evaluation.probes import Outcome
from pipeline.evaluation.protocols import Protocol

SCHEMA = 1
NAME = "evaluation.json"
CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # 1.96
NOT_CHECKED = "not checked"  # for leaks

Entry = dict[str, Any]  # JSON


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
        # The shots of every value and seed are [shard, sample], numbers within the training set's index.
        shots: Entry = {}
        for value, of_seeds in outcome.shots.items():
            shots[value] = {}
            for seed, numbers in of_seeds.items():
                shards = np.searchsorted(train.starts, numbers, side="right") - 1
                shots[value][seed] = np.stack([shards, np.asarray(numbers) - train.starts[shards]], axis=1).tolist()
        result["shots"] = shots
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
    interval = protocol.kind.interval
    values: dict[str, Entry] = {}
    classes: list[Entry] = []
    for name, right_of_seeds in outcome.right.items():
        samples = int(chosen.sum())
        shares = []  # of samples that were right: of every seed, or once
        for is_right in right_of_seeds:
            shares.append(int(is_right[chosen].sum()) / max(samples, 1))

        # The mean over several seeds, ± the standard deviation between them.
        if interval == "seeds" and len(shares) > 1:
            mean = sum(shares) / len(shares)
            deviation = stdev(shares)
            values[name] = {
                "value": mean,
                "low": mean - deviation,
                "high": mean + deviation,
                "samples": samples,
                "interval": f"± standard deviation over {len(shares)} seeds",
                "sd": deviation,
            }
        # The mean over classes, each with the same weight; its interval is the normal one.
        elif interval == "classes":
            # An entry for each class that has samples; a sample with several labels counts in each of their classes.
            labels = test.labels[chosen]
            row, column = np.nonzero(labels >= 0)
            of_class = np.bincount(labels[row, column])
            hits = np.bincount(labels[row, column], weights=right_of_seeds[0][chosen][row])
            for label in np.flatnonzero(of_class).tolist():
                class_name = None
                if label < len(test.index.names):
                    class_name = test.index.names[label]
                classes.append({"id": label, "name": class_name, **share_entry(int(hits[label]), int(of_class[label]))})
            count = max(len(classes), 1)
            mean = sum(entry["value"] for entry in classes) / count
            variance = sum(entry["value"] * (1 - entry["value"]) / entry["samples"] for entry in classes) / count**2
            spread = Z * math.sqrt(variance)
            values[name] = {
                "value": mean,
                "low": max(0.0, mean - spread),
                "high": min(1.0, mean + spread),
                "samples": sum(entry["samples"] for entry in classes),
                "interval": "normal, 95 %, of the mean over classes",
            }
        # The share of the samples that were right, also of a single seed.
        else:
            right = int(right_of_seeds[0][chosen].sum())
            values[name] = {**share_entry(right, samples), "interval": "Wilson score, 95 %"}
        if interval == "seeds":
            seeds = map(str, protocol.settings.seeds)
            values[name]["seeds"] = dict(zip(seeds, shares, strict=True))
    return values, classes


def share_entry(right: int, samples: int) -> Entry:
    """Return a share with its Wilson score interval (Wilson 1927) at 95 %; 0 to 1 where there is no sample.

    Unlike the normal interval it stays within 0 … 1, and is no point where all are right.
    """
    share = right / max(samples, 1)
    low = 0.0
    high = 1.0
    if samples:
        middle = share + Z**2 / (2 * samples)
        spread = Z * math.sqrt(share * (1 - share) / samples + Z**2 / (4 * samples**2))
        scale = 1 + Z**2 / samples
        # Rounding may lead a hair beyond 0 and 1.
        low = max(0.0, (middle - spread) / scale)
        high = min(1.0, (middle + spread) / scale)
    return {"value": share, "low": low, "high": high, "samples": samples}


def metrics_with_seeds(result: Entry) -> dict[str, float]:
    """Return {"10shot-seed-0": 0.82, …, "10shot": mean over seeds} of a result (as big_vision fewshot_lsr.py)."""
    metrics: dict[str, float] = {}
    for name, entry in result["values"].items():
        for seed, value in entry.get("seeds", {}).items():
            metrics[f"{name}-seed-{seed}"] = value
        metrics[name] = entry["value"]
    return metrics


# ------------------------------------------------------------------------------------------------ the whole


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
    # Each column is as wide as its widest cell.
    widths = [0] * len(rows[0])
    for row in rows:
        for column, cell in enumerate(row):
            widths[column] = max(widths[column], len(cell))
    lines = []
    for row in rows:
        line = ""
        for cell, width in zip(row, widths, strict=True):
            line += cell.ljust(width) + "  "
        lines.append(line.rstrip())
    return lines


def entries_of(document: Entry) -> dict[str, Entry]:
    """Return the entry of every value by its name, with the set's name in front where there are several sets."""
    names = {result["set"]["name"] for result in document["results"]}
    entries: dict[str, Entry] = {}
    for result in document["results"]:
        for name, entry in result["values"].items():
            full_name = name
            if len(names) > 1:
                full_name = f"{result['set']['name']} {name}"
            entries[full_name] = entry
    return entries
