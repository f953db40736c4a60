"""What the numbers of a recorded stage may depend on, and what two stages do not share of it.

1. `recorded_facts` of a stage are flat: config keys, sets down to their tars, code, worlds, hardware, packages.
2. `recorded_differences` are the facts that two stages do not share. Each has an effect: on the ORDER of the data, on
   the FIRST loss, on the UPDATE of weights, on the ROUNDING alone, or NONE on what is learned.

The first step at which two stages part, and the likeliest cause, are found by jobs/extras/diff/parting.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from data.index.index import Index
from jobs.extras.diff.facts import Effect, Fact, FactDifference, differences
from jobs.extras.history import StageHistory, flat

NAMED = 5  # of the tars, and of the classes, that differ in a set

# Config keys by how they begin, the first that fits. Other keys that a resume may not change act on the update.
EFFECTS = (
    (("seed",), Effect.ORDER),
    (("data.train", "data.mixture", "data.drop", "data.samples", "data.lanes", "data.shuffle_block"), Effect.ORDER),
    (("data.tail", "batch_size"), Effect.ORDER),
    (("data.evaluate", "data.preprocess", "probe.", "polyak", "passes", "data.max_bad_fraction"), Effect.NONE),
    (("data.augment", "data.max_labels", "data.decode", "model.", "init", "new_head", "objective"), Effect.FIRST),
    (("masked.", "loss", "label_smoothing", "mixup", "precision", "thinning."), Effect.FIRST),
)


# What each attempt has recorded of itself, by its key in the "start" record: (name, kind, effect).
ATTEMPTS = {
    "world": ("world size", "world size", Effect.ROUNDING),
    "hardware": ("hardware", "hardware", Effect.ROUNDING),
    "threads": ("threads of a worker", "hardware", Effect.ROUNDING),
    "drop": ("shards left out", "data", Effect.ORDER),
    "code": ("code of an attempt", "code", Effect.ROUNDING),
    "machine": ("machine", "hardware", Effect.ROUNDING),
}


def recorded_facts(stage: StageHistory) -> dict[str, Fact]:
    """Return what a stage's numbers may depend on, by name."""
    gathered: dict[str, Fact] = {}
    record = stage.record
    # 1. The config, with the model as it was resolved. What a resume may change at will acts on nothing.
    config = flat(record.get("config", {})) | flat(record.get("model") or {}, "model.")
    # A section of "forbid" is as flat as this, but for lists of sections: {"data.mixture": {}}.
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
    # 2. The data: what the keys of the sets stand for, and the sets themselves.
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
    # 3. Code and machines, as each attempt has recorded them.
    gathered["code"] = recorded("code", stage.task.get("job", {}).get("code"), Effect.ROUNDING)
    environment = dict(stage.provenance.get("environment", {}))
    machine = environment.pop("machine", None)
    # Attempts that are alike are one value: a restart alone is no difference.
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
    for first, last in stage.left_out:
        gathered[f"steps left out from {first} on"] = recorded("data", f"up to {last}", Effect.ORDER)
    return gathered


def recorded(kind: str, value: Any, effect: Effect) -> Fact:
    """Return the fact of a recorded value; values are compared as text, in which 1 is not true."""
    return Fact(repr(value), str(value), kind=kind, effect=effect)


def recorded_differences(first: StageHistory, second: StageHistory) -> list[FactDifference]:
    """Return the facts that two stages do not share, the most consequential first."""
    differing: list[FactDifference] = []
    many: dict[str, list[FactDifference]] = {}  # the tars of each set, and its classes
    for difference in differences(recorded_facts(first), recorded_facts(second)):
        part_of_set = re.match(r"set .*: (tar|class) ", difference.name)
        if part_of_set is None:
            differing.append(difference)
        else:
            many.setdefault(part_of_set[0], []).append(difference)
    # Every tar of a set that was packed anew differs: some are named, the others counted.
    for name, of_set in many.items():
        differing += of_set[:NAMED]
        if len(of_set) > NAMED:
            rest = recorded("data", f"{len(of_set) - NAMED:,} more differ", of_set[0].known.effect)
            differing.append(FactDifference(f"{name}…", rest, rest))
    effects = list(Effect)
    return sorted(differing, key=lambda difference: effects.index(difference.known.effect))
