"""Read the facts that can affect a stage's results from the stage's records, and compare two stages.

1. `recorded_facts` returns a flat dict: config keys, data sets with their tars, code version, world sizes, hardware,
   and packages.
2. `recorded_differences` returns the facts in which two stages differ. Each is labelled with its effect: on the
   ORDER of the data, on the FIRST loss, on the UPDATE of weights, only on ROUNDING, or NONE on training.

jobs/extras/diff/first_difference.py finds the first step at which two stages differ, and the most likely cause.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from data.index.index import Index
from jobs.extras.diff.facts import Effect, Fact, FactDifference, differences
from jobs.extras.history import StageHistory, flat

MAX_LISTED = 5  # maximum number of listed tars or classes that differ in a data set; the others are counted

# Effects of config keys by prefix; the first match wins. Other keys that must not change on resume affect the updates.
EFFECTS = (
    (("seed",), Effect.ORDER),
    (("data.train", "data.mixture", "data.drop", "data.samples", "data.lanes", "data.shuffle_block"), Effect.ORDER),
    (("data.tail", "batch_size"), Effect.ORDER),
    (("data.evaluate", "data.preprocess", "probe.", "polyak", "data.max_bad_fraction"), Effect.NONE),
    (("data.augment", "data.max_labels", "data.decode", "model.", "init", "new_head", "objective"), Effect.FIRST),
    (("masked.", "loss", "label_smoothing", "mixup", "precision", "thinning."), Effect.FIRST),
)


# Fields of an attempt's "start" record → (name, kind, effect).
ATTEMPTS = {
    "world": ("world size", "world size", Effect.ROUNDING),
    "hardware": ("hardware", "hardware", Effect.ROUNDING),
    "threads": ("threads of a worker", "hardware", Effect.ROUNDING),
    "drop": ("excluded shards", "data", Effect.ORDER),
    "code": ("code of an attempt", "code", Effect.ROUNDING),
    "machine": ("machine", "hardware", Effect.ROUNDING),
}


def recorded_facts(stage: StageHistory) -> dict[str, Fact]:
    """Return the facts that can affect a stage's results, by name."""
    gathered: dict[str, Fact] = {}
    record = stage.record
    # 1. The config and the resolved model. Keys that may change freely on resume have no effect.
    config = flat(record.get("config", {})) | flat(record.get("model") or {}, "model.")
    # The keys in "forbid" are flattened like `config`, except for lists of sections: {"data.mixture": {}}.
    relevant = tuple(f"{key}." for key in (*record.get("forbid", {}), *record.get("warn", {})))
    for name, value in config.items():
        effect = Effect.NONE
        if f"{name}.".startswith(relevant):
            effect = Effect.UPDATE
            if name in record.get("warn", {}):
                effect = Effect.ROUNDING
            for prefixes, known in EFFECTS:
                if name.startswith(prefixes):
                    effect = known
                    break
        gathered[name] = recorded("config", value, effect)
    if "seed" in gathered:
        gathered["seed"] = replace(gathered["seed"], kind="seed")
    # 2. The data: digests of the inputs, and details of the data sets.
    for name, value in record.get("forbid", {}).items():
        if name == "content of init":
            gathered[name] = recorded("data", value, Effect.FIRST)
        elif name.startswith("content of "):
            gathered[name] = recorded("data", value, Effect.ORDER)
    for field, value in record.get("eval_inputs", {}).items():
        gathered[f"content of {field}"] = recorded("data", value, Effect.NONE)
    for name, index in stage.sets.items():
        effect = Effect.NONE
        if name.startswith("train"):
            effect = Effect.ORDER
        values: dict[str, Any] = {"": index}
        if isinstance(index, Index):
            values = {": digest": index.digest, ": samples": index.samples}
            for shard in index.shards:
                values[f": tar {shard.name}"] = shard.sha256
            for label, count in enumerate(index.class_counts):
                values[f": class {label}"] = f"{index.class_name(label)}, {count:,} samples"
        for part, value in values.items():
            gathered[f"set {name}{part}"] = recorded("data", value, effect)
    # 3. Code and machines, as recorded by each attempt.
    gathered["code"] = recorded("code", stage.task.get("job", {}).get("code"), Effect.ROUNDING)
    environment = dict(stage.provenance.get("environment", {}))
    machine = environment.pop("machine", None)
    # Merge equal consecutive attempts: a restart without changes is not a difference.
    histories: dict[str, list[str]] = {}
    for start in [*stage.starts, {"machine": machine}]:
        for key, value in flat(start).items():
            if key == "drop":
                value = sorted(value or [])
            history = histories.setdefault(key, [])
            if value is not None and history[-1:] != [str(value)]:
                history.append(str(value))
    for package, version in environment.items():
        if version is not None:
            histories.setdefault(f"versions.{package}", [str(version)])
    for key, (name, kind, effect) in ATTEMPTS.items():
        if histories.get(key):
            gathered[name] = recorded(kind, ", then ".join(histories[key]), effect)
    for key, history in sorted(histories.items()):
        if key.startswith("versions.") and history:
            gathered[key.removeprefix("versions.")] = recorded("packages", ", then ".join(history), Effect.ROUNDING)
    for first, last in stage.excluded_steps:
        gathered[f"excluded steps from {first} on"] = recorded("data", f"up to {last}", Effect.ORDER)
    return gathered


def recorded(kind: str, value: Any, effect: Effect) -> Fact:
    """Return a fact for a recorded value. Values are compared by their repr, so 1 and True differ."""
    return Fact(repr(value), str(value), kind=kind, effect=effect)


def recorded_differences(first: StageHistory, second: StageHistory) -> list[FactDifference]:
    """Return the facts in which two stages differ, ordered by decreasing effect."""
    differing: list[FactDifference] = []
    many: dict[str, list[FactDifference]] = {}  # tars and classes of each data set
    for difference in differences(recorded_facts(first), recorded_facts(second)):
        part_of_set = re.match(r"set .*: (tar|class) ", difference.name)
        if part_of_set is None:
            differing.append(difference)
        else:
            many.setdefault(part_of_set[0], []).append(difference)
    # If a data set was packed again, all its tars differ: list a few and count the others.
    for name, of_set in many.items():
        differing += of_set[:MAX_LISTED]
        if len(of_set) > MAX_LISTED:
            rest = recorded("data", f"{len(of_set) - MAX_LISTED:,} more differ", of_set[0].known.effect)
            differing.append(FactDifference(f"{name}…", rest, rest))
    effects = list(Effect)
    return sorted(differing, key=lambda difference: effects.index(difference.known.effect))
