"""Builds evaluation.json: every value with its confidence interval and its provenance.

{"schema": 2,
 "weights": {"path": "…/finetune-1a2b3c4d", "digest": "9f3c…", "model": {…},
             "trained_on": {"sets": [{"path": "…", "digest": "…", "part_of": null}, …],    part_of: digest of a set
                            "unknown": ""}},                                               or where the records end
 "results": [{
   "code": "77ab…",                                               the version that computed it
   "set": {"name": "test", "path": "…", "digest": "…", "samples": 360, "judged": 360},
   "train": {"path": "…", "digest": "…", "samples": 1437, "used": 1437},          null for protocols of the head
   "protocol": {"name": "fewshot", "fields": {…}, "digest": "…"},
   "values": {"5shot": {"value": 0.91, "low": 0.88, "high": 0.94, "samples": 360, "interval": "95 %, over 3 draws …",
                        "seeds": {"0": 0.90, …}, "sd": 0.012, "right": "…"}, …},        bits (S, N) in base64
                                                    "note": "…" if something limits the value, as too few shots do
   "classes": [{"id": 0, "name": "zero", "value": …, "low": …, "high": …, "samples": 36}, …],       only of per-class
   "confusions": [[label, predicted class, number of such mistakes], …],       of per-class; the most frequent first
   "shots": {"5shot": {"0": [[shard, sample], …]}, …},       only of fewshot; numbers in the training set's index
   "chosen": {"l2": 0.01, …},                                                                      only of logistic
   "leaks": "not checked"                       or {…, "train": the sets that this one was compared with,
                                                    "checked", "not_checked": of all sets that the weights or the
                                                    protocol learned from, "leaked": 7, "values": {…}}
 }, …]}

Except for the paths, the document does not depend on when, where or on how many workers it was computed. The digest of
a data set is the digest of its index. The digest of a protocol is the sha256 of {"fields": …, "protocol": name} as JSON
with sorted keys.
"""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import stdev
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from pipeline.evaluation import intervals
from pipeline.evaluation.protocols import Protocol
from pipeline.monitoring.telemetry import without_single_seeds

if TYPE_CHECKING:  # these modules import torch
    from pipeline.evaluation.features import FeatureStore
    from pipeline.evaluation.probes import Outcome

SCHEMA = 2  # schema 1 had other intervals
NAME = "evaluation.json"
NOT_CHECKED = "not checked"  # value of "leaks" without a leak check
OUTCOMES = ("evaluate", "evaluate_failed", "evaluate_skipped")  # kinds of records in metrics.jsonl

Entry = dict[str, Any]  # JSON values


# ------------------------------------------------------------------------------------------------ one result


def result_of(
    outcome: "Outcome",
    protocol: Protocol,
    test: "FeatureStore",
    train: "FeatureStore | None",
    leaked: Sequence[int] | None,
) -> Entry:
    """Return the result of a protocol on a data set.

    `leaked` contains the numbers of leaked samples; None if leaks were not checked.
    """
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
    for name, note in outcome.notes.items():
        values[name]["note"] = note
    if classes:
        result["classes"] = classes
    if outcome.shots and train is not None:
        # Shots are [shard, sample] for every value and seed, with numbers in the training set's index.
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
        for entry in values_without.values():
            entry.pop("right", None)
        result["leaks"] = {"leaked": int((~is_clean).sum()), "values": values_without}
    return result


def value_entries(
    outcome: "Outcome", protocol: Protocol, test: "FeatureStore", chosen: np.ndarray
) -> tuple[dict[str, Entry], list[Entry]]:
    """Return a protocol's values, and for per-class the classes, over the samples marked in `chosen`, (N,) bool.

    The intervals come from intervals.py; `sd` is the standard deviation between seeds.
    """
    interval = protocol.kind.interval
    samples = int(chosen.sum())
    values: dict[str, Entry] = {}
    classes: list[Entry] = []
    for name, right_of_seeds in outcome.right.items():
        right = np.stack(right_of_seeds)[:, chosen]  # (S, N), one row per seed; a single row without seeds
        shares = []
        for is_right in right:
            shares.append(int(is_right.sum()) / max(samples, 1))

        # The mean over classes, with equal weights.
        if interval == "classes":
            # One entry per class with samples; a sample with several labels counts in each of their classes.
            labels = test.labels[chosen]
            row, column = np.nonzero(labels >= 0)
            of_class = np.bincount(labels[row, column])
            hits = np.bincount(labels[row, column], weights=right[0][row])
            for label in np.flatnonzero(of_class).tolist():
                class_name = None
                if label < len(test.index.names):
                    class_name = test.index.names[label]
                classes.append({"id": label, "name": class_name, **share_entry(int(hits[label]), int(of_class[label]))})
            low, high = intervals.mean_over_classes(right[0], labels)
            values[name] = {
                "value": sum(entry["value"] for entry in classes) / max(len(classes), 1),
                "low": low,
                "high": high,
                "samples": len(np.unique(row)),
                "interval": "95 %, over test samples, of the mean over these classes",
            }
            continue
        # The share of correct samples, averaged over the seeds if there are several.
        low, high = intervals.over_draws(right)
        values[name] = {
            "value": sum(shares) / len(shares),
            "low": low,
            "high": high,
            "samples": samples,
            "interval": "95 %, over test samples",
        }
        if interval == "seeds":
            # Seeds that picked the same shots count as one draw; `shots` contains the first of these seeds.
            seeds = list(outcome.shots.get(name, map(str, protocol.settings.seeds)))
            values[name]["seeds"] = dict(zip(seeds, shares, strict=True))
            values[name]["interval"] = "95 %, over test samples; a single draw cannot show the variance between draws"
        if len(shares) > 1:
            values[name]["interval"] = f"95 %, over {len(shares)} draws and test samples"
            values[name]["sd"] = stdev(shares)
        values[name]["right"] = base64.b64encode(np.packbits(right).tobytes()).decode()
    return values, classes


def right_of(entry: Entry) -> np.ndarray:
    """Decode an accuracy's entry into a boolean array (S, N) that marks the correctly classified samples.

    There is one row per seed.
    """
    draws = len(entry.get("seeds", [0]))
    bits = np.unpackbits(np.frombuffer(base64.b64decode(entry["right"]), np.uint8), count=draws * entry["samples"])
    return bits.reshape(draws, entry["samples"]).astype(bool)


def share_entry(right: int, samples: int) -> Entry:
    """Return an entry with the accuracy and its confidence interval."""
    share = right / max(samples, 1)
    low, high = intervals.wilson(share, samples)
    return {"value": share, "low": low, "high": high, "samples": samples}


def notes_of(result: Entry) -> list[str]:
    """Return notes for the log on the limitations of a result: "5shot: 2 of 10 classes have fewer than 5 …"."""
    return [f"{name}: {entry['note']}" for name, entry in result["values"].items() if "note" in entry]


def metrics_with_seeds(result: Entry) -> dict[str, float]:
    """Return a result's metrics, {"10shot-seed-0": 0.82, …, "10shot": mean over seeds}, named as in big_vision."""
    metrics: dict[str, float] = {}
    for name, entry in result["values"].items():
        for seed, value in entry.get("seeds", {}).items():
            metrics[f"{name}-seed-{seed}"] = value
        metrics[name] = entry["value"]
    return metrics


# ------------------------------------------------------------------------------------------------ records


class EvaluationRecord(TypedDict):
    """The metrics.jsonl record of an evaluation during training: its kind, values and log line."""

    kind: str  # one of OUTCOMES
    values: dict[str, Any]
    line: str


def evaluation_record(
    step: int, values: Mapping[str, Any], where: Mapping[str, float | str], remark: str = ""
) -> EvaluationRecord:
    """Return the record of an evaluation; its values include every few-shot seed, its log line only the mean."""
    scores = {name: value for name, value in values.items() if isinstance(value, float)}
    shown = [f"{name} {value:.4f}" for name, value in without_single_seeds(scores).items()]
    line = f"evaluate step {step}  {'  '.join(shown)}{remark}"
    return {"kind": "evaluate", "values": {"step": step, **values, **where}, "line": line}


def skipped_record(step: int, reason: str) -> EvaluationRecord:
    """Return the record of a step whose evaluation was skipped."""
    line = f"evaluate step {step} SKIPPED: {reason}"
    return {"kind": "evaluate_skipped", "values": {"step": step, "reason": reason}, "line": line}


def recorded_steps(records: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the steps whose evaluation has an outcome in metrics.jsonl: values, an error, or a reason for skipping."""
    steps: set[int] = set()
    for record in records:
        if record["kind"] == "start":
            # An attempt repeats all steps after its first, with their evaluations.
            steps = {step for step in steps if step <= record["step"]}
        elif record["kind"] in OUTCOMES:
            steps.add(record["step"])
    return steps


# ------------------------------------------------------------------------------------------------ the whole document


def log_table(document: Entry, log: Callable[[str], None]) -> None:
    """Log a document's values as a table: data set, value, interval, standard deviation, samples and leaks."""
    rows: list[tuple[str, ...]] = [("set", "protocol", "value", "95 % interval", "sd", "samples", "leaks")]
    trained_on = {compared["digest"] for compared in document["weights"]["trained_on"]["sets"]}
    for result in document["results"]:
        leaks = result["leaks"]
        for name, entry in result["values"].items():
            text = NOT_CHECKED
            if leaks != NOT_CHECKED:
                clean = leaks["values"][name]
                compared = ", ".join(source["digest"][:8] for source in leaks["train"])
                text = f"{clean['value']:.2%} without {leaks['leaked']} samples shared with {compared}"
                # If no training set was compared, a value without leaks would be meaningless.
                if leaks["not_checked"] and not leaks["checked"]:
                    text = f"compared only with {compared}"
                for missed in leaks["not_checked"]:
                    text += f"; {missed['path']} ({missed['digest'][:8]}) {NOT_CHECKED}"
                if document["weights"]["trained_on"]["unknown"]:
                    text += f"; training sets of {document['weights']['trained_on']['unknown']}: {NOT_CHECKED}"
            if result["set"]["digest"] in trained_on:
                text = f"the weights were trained on this set; {text}"
            deviation = "-"
            if "sd" in entry:
                deviation = f"± {entry['sd']:.2%}"
            elif "seeds" in entry:
                deviation = "one draw"
            interval = f"{entry['low']:.2%} to {entry['high']:.2%}"
            samples = f"{entry['samples']:,}"
            rows.append((result["set"]["name"], name, f"{entry['value']:.2%}", interval, deviation, samples, text))
    # Omit columns without information.
    for column, nothing in ((6, NOT_CHECKED), (4, "-")):
        if all(row[column] == nothing for row in rows[1:]):
            rows = [(*row[:column], *row[column + 1 :]) for row in rows]
    # Pad each column to its widest cell.
    widths = [0] * len(rows[0])
    for row in rows:
        for column, cell in enumerate(row):
            widths[column] = max(widths[column], len(cell))
    for row in rows:
        line = ""
        for cell, width in zip(row, widths, strict=True):
            line += cell.ljust(width) + "  "
        log(line.rstrip())
    for result in document["results"]:
        for note in notes_of(result):
            log(f"{result['set']['name']} {note}")


def entries_of(document: Entry) -> dict[str, Entry]:
    """Return {name: entry} for all values; with several data sets, names are prefixed with the data set's name.

    Each entry gets the key "whole": the digest of its data set, or "" if some of its samples could not be read.
    """
    names = {result["set"]["name"] for result in document["results"]}
    entries: dict[str, Entry] = {}
    for result in document["results"]:
        for name, entry in result["values"].items():
            full_name = name
            if len(names) > 1:
                full_name = f"{result['set']['name']} {name}"
            entries[full_name] = {**entry, "whole": ""}
            if entry["samples"] == result["set"]["samples"]:
                entries[full_name]["whole"] = result["set"]["digest"]
    return entries
