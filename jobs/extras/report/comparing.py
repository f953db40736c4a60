"""What two runs do not have in common, the first step at which they part, and the likeliest cause.

1. `facts` of a stage are flat: config keys, sets down to their tars, code, worlds, hardware, packages.
2. `differences` are the facts that two stages do not share. Each has an effect: on the ORDER of the data, on the FIRST
   loss, on the UPDATE of weights, on the ROUNDING alone, or NONE on what is learned.
3. `part` finds the first step whose losses are not the same bits, and where the ledgers part, which tell whether both
   saw the same samples in the same order.
4. The likeliest cause is the first difference that could have shown there and then: data in another order shows in the
   ledgers; another initial model in the loss of step 1; another learning rate only behind the first update.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from data.index.index import Index
from jobs.extras.report.reading import StageHistory, flat

# Of differences with the same effect, the one to suspect first.
KINDS = ("seed", "data", "config", "world size", "code", "hardware", "packages")
NAMED = 5  # of the tars, and of the classes, that differ in a set
FLAT = 1e-6  # relative change of a loss that has not moved
TINY = 1e-4  # relative difference of two losses that another order of sums can make in one step


class Effect(Enum):
    """What a difference can act on first."""

    ORDER = "which samples are trained on, in which order"
    FIRST = "the loss of the very first step"
    UPDATE = "the weights, from the first update on"
    ROUNDING = "the last bits of a number"
    NONE = "nothing that is learned"


class Fact(NamedTuple):
    """A value and what it acts on."""

    kind: str  # "config", "data", "seed", "code", "world size", "hardware" or "packages"
    value: Any
    effect: Effect


class Difference(NamedTuple):
    """A fact that two stages do not share; "not there" stands for a fact that one of them lacks."""

    kind: str
    name: str
    first: str
    second: str
    effect: Effect


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


@dataclass(frozen=True)
class Parting:
    """Where two stages part; no `step` where they have not within the steps that both have taken."""

    common: int  # steps that both have taken
    step: int | None = None
    losses: tuple[float, float] = (math.nan, math.nan)
    ledger_before: int = 0  # the last step at which the ledgers are known to be equal
    ledger_after: int | None = None  # the first at which they are known to differ
    suspects: Sequence[Difference] = ()  # that could have acted there, the likeliest first
    reason: str = ""


def facts(stage: StageHistory) -> dict[str, Fact]:
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
        gathered[name] = Fact("config", value, effect)
    if "seed" in gathered:
        gathered["seed"] = gathered["seed"]._replace(kind="seed")
    # 2. The data: what the keys of the sets stand for, and the sets themselves.
    for name, value in record.get("forbid", {}).items():
        if name == "content of init":
            gathered[name] = Fact("data", value, Effect.FIRST)
        elif name.startswith("content of "):
            gathered[name] = Fact("data", value, Effect.ORDER)
    for field, value in record.get("eval_inputs", {}).items():
        gathered[f"content of {field}"] = Fact("data", value, Effect.NONE)
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
            gathered[f"set {name}{part}"] = Fact("data", value, effect)
    # 3. Code and machines, as each attempt has recorded them.
    gathered["code"] = Fact("code", stage.task.get("job", {}).get("code"), Effect.ROUNDING)
    environment = dict(stage.provenance.get("environment", {}))
    machine = environment.pop("machine", None)
    # Attempts that are alike are one value: a restart alone is no difference.
    histories: dict[str, list[str]] = {}
    for recorded in [*stage.starts, {"machine": machine}]:
        for key, value in flat(recorded).items():
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
            gathered[name] = Fact(kind, ", then ".join(histories[key]), effect)
    for key, history in sorted(histories.items()):
        if key.startswith("versions.") and history:
            gathered[key.removeprefix("versions.")] = Fact("packages", ", then ".join(history), Effect.ROUNDING)
    for first, last in stage.left_out:
        gathered[f"steps left out from {first} on"] = Fact("data", f"up to {last}", Effect.ORDER)
    return gathered


def differences(first: StageHistory, second: StageHistory) -> list[Difference]:
    """Return what two stages do not share, what matters most first."""
    facts_of_first = facts(first)
    facts_of_second = facts(second)
    nothing = Fact("", "not there", Effect.NONE)
    differing: list[Difference] = []
    many: dict[str, list[Difference]] = {}  # the tars of each set, and its classes
    for name in facts_of_first | facts_of_second:
        left = facts_of_first.get(name, nothing)
        right = facts_of_second.get(name, nothing)
        # As text: 1 is not true. In kind too: a missing fact is none that says so.
        if left.kind == right.kind and repr(left.value) == repr(right.value):
            continue
        known = left
        if left is nothing:
            known = right
        difference = Difference(known.kind, name, str(left.value), str(right.value), known.effect)
        part_of_set = re.match(r"set .*: (tar|class) ", name)
        if part_of_set is None:
            differing.append(difference)
        else:
            many.setdefault(part_of_set[0], []).append(difference)
    # Of a set that was packed anew every tar differs: some are named, the others counted.
    for name, of_set in many.items():
        differing += of_set[:NAMED]
        if len(of_set) > NAMED:
            rest = f"{len(of_set) - NAMED:,} more differ"
            differing.append(Difference("data", f"{name}…", rest, rest, of_set[0].effect))
    effects = list(Effect)
    return sorted(differing, key=lambda difference: effects.index(difference.effect))


def part(first: StageHistory, second: StageHistory, differing: list[Difference]) -> Parting:
    """Find the first step at which the losses of two stages differ, and the likeliest cause of it."""
    # 1. The first step whose losses are not the same bits; two that are not a number are.
    common, of_first, of_second = np.intersect1d(first.steps.step, second.steps.step, return_indices=True)
    losses = first.steps.loss[of_first]
    others = second.steps.loss[of_second]
    parted = np.flatnonzero(losses.view(int) != others.view(int))

    # 2. Where the ledgers part, which are known at reports alone.
    ledger_before = 0
    ledger_after = None
    ledgers = {report["step"]: report["ledger"] for report in second.kept_reports}
    for report in first.kept_reports:
        if ledgers.get(report["step"], report["ledger"]) != report["ledger"]:
            ledger_after = report["step"]
            break
        if report["step"] in ledgers:
            ledger_before = report["step"]
    if not len(parted):
        return Parting(len(common), ledger_before=ledger_before, ledger_after=ledger_after)

    # 3. What could have acted: before the first update only the model and its input, behind it first the updates.
    place = parted[0]
    step = int(common[place])
    at = (float(losses[place]), float(others[place]))
    if place == 0:
        effects = [Effect.FIRST, Effect.ROUNDING]
        reason = "the losses differ before the first update"
    elif np.ptp(losses[:place]) <= FLAT * abs(losses[0]):
        # Weights of a head that are zero hide the model and its input: any sample has the same loss.
        effects = [Effect.FIRST, Effect.UPDATE, Effect.ROUNDING]
        reason = "until then the loss had not moved, so that the parting shows where it could show first"
    else:
        effects = [Effect.UPDATE, Effect.FIRST, Effect.ROUNDING]
        reason = "the losses were the same while they moved, so that the model and its input were the same"
    # The samples may differ at the step where the last equal ledger lies before it.
    if ledger_after is not None and ledger_before < step:
        effects.insert(0, Effect.ORDER)
        reason = f"the ledgers part too, behind step {ledger_before}: other samples, or another order of them"
    elif ledger_after is None:
        reason += "; the ledgers are equal: both saw the same samples in the same order"
    if abs(at[0] - at[1]) < TINY * abs(at[0]):
        reason += "; so small a difference can come of another order of sums alone"
    suspects = [difference for difference in differing if difference.effect in effects]
    # A new seed, or another set, moves keys and digests along: the seed and the config say more than a digest.
    suspects.sort(key=lambda difference: (effects.index(difference.effect), KINDS.index(difference.kind)))
    return Parting(len(common), step, at, ledger_before, ledger_after, suspects, reason)
