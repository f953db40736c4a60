"""Implements `patchline diff MINE OTHER`: list meaningful differences between two recipes or runs.

For checkpoints and weights, see tensors.py.

1. Each side is a recipe or a run. Stages that train or evaluate are paired by name, otherwise by kind.
2. The facts that differ within a pair (jobs/extras/diff/meaning.py) are grouped by the subjects in
   jobs/extras/diff/subjects.yaml and printed in the order of that file; nearly equal numbers come last.
3. Each difference lists both values, the overrides that remove it, the values in the paper and its code, and the
   measured cost if there is a source for it. Facts that one side does not specify are listed at the end.

    2 differences in meaning: mine.yaml (pretrain) and table3/vit_i1k (pretrain)
     1. images seen: 115,306,496, 90 passes; other: 384,352,256, 300 passes
        set    pretrain.passes=300
        paper  table 3: …
"""

import math
import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from data.errors import UsageError
from jobs.answer import Document
from jobs.commands.campaigns import load_campaign
from jobs.extras.diff.facts import Fact, differences
from jobs.extras.diff.meaning import ComparedStage, facts_of, of_campaign, of_run
from jobs.extras.history import flat
from jobs.named_stages import find_stage
from jobs.resolved_recipe import Kinds
from pipeline import config
from pipeline.artifacts import TASK
from pipeline.values import counted, flow_yaml

SUBJECTS = Path(__file__).with_name("subjects.yaml")
WIDTH = 120
LINES: dict[str, Any] = {"subsequent_indent": " " * 11, "break_on_hyphens": False, "break_long_words": False}
SLIGHT = 0.05  # differences of two numbers below this relative size are listed last


def diff(mine: str, other: str, overrides: list[str], kinds: Kinds) -> Document:
    """Return the meaningful differences between two recipes or runs, stage by stage.

    `overrides` apply to `other`. Raises UsageError if there are no stages to compare.
    """
    stages = stages_of(mine, [], kinds)
    others = stages_of(other, overrides, kinds)
    for path, side in ((mine, stages), (other, others)):
        if not side:
            raise UsageError(
                f"{path} has no stage that trains or evaluates\n  expected a recipe or a run with such a stage"
            )
    pairs = []
    unpaired = list(stages)
    unpaired_others = list(others)
    for alike in ("row", "name", "kind"):
        for stage in stages:
            for candidate in others:
                is_pair = (
                    stage in unpaired
                    and candidate in unpaired_others
                    and getattr(stage, alike) == getattr(candidate, alike)
                )
                # Pair evaluations with different names only if each side has exactly one of this kind.
                if is_pair and alike == "kind" and not stage.kind.trains:
                    is_pair = sum(single.kind is stage.kind for single in (*unpaired, *unpaired_others)) == 2
                if is_pair:
                    pairs.append((stage, candidate))
                    unpaired.remove(stage)
                    unpaired_others.remove(candidate)
    if not pairs:
        raise UsageError(
            f"{mine} has a stage of kind {stages[0].kind.name}, but {other} has one of kind {others[0].kind.name}\n"
            "  expected two stages of the same kind, for example both pretrain or both finetune"
        )
    return {
        "content": "settings",
        "mine": mine,
        "other": other,
        "pairs": [compare_pair(stage, candidate) for stage, candidate in pairs],
        "only_in_mine": [stage.row for stage in unpaired],
        "only_in_other": [stage.row for stage in unpaired_others],
    }


def lines(document: Document) -> Iterator[str]:
    """Yield a paragraph for each difference of each pair of stages, with the notes of subjects.yaml."""
    for pair in document["pairs"]:
        count = counted(len(pair["differences"]), "difference") if pair["differences"] else "no differences"
        names = f"{document['mine']} ({pair['mine']}) and {document['other']} ({pair['other']})"
        yield f"{count} in meaning: {names}"
        for place, difference in enumerate(pair["differences"], start=1):
            texts = []
            for fact in difference["facts"]:
                name = f"{fact['name'].rpartition('.')[2]} " if difference["names_facts"] else ""
                texts.append(f"{name}{fact['mine']}; other: {fact['other']}")
            slight = " (slight)" * difference["slight"]
            yield f"{place:2}. {difference['subject']}: {' · '.join(texts)}{slight}"
            for label in ("set", "note", "paper", "cost"):
                text = shlex.join(difference["set"]) if label == "set" else difference.get(label)
                if text:
                    yield fill(text, WIDTH, initial_indent=f"    {label:6} ", **LINES)
        if pair["unknown"]:
            yield f"not compared, because one side does not specify a value: {', '.join(pair['unknown'])}"
    for side in ("mine", "other"):
        rows = document[f"only_in_{side}"]
        if rows:
            yield f"stages only in {document[side]}, not compared: {', '.join(rows)}"


def stages_of(path: str, overrides: list[str], kinds: Kinds) -> list[ComparedStage]:
    """Return the stages of a run, one stage of a run, or the stages of a recipe after applying the overrides."""
    folder = Path(path)
    is_run = any(folder.glob("*/stage.json"))
    # The key at the end of a stage folder's name can be omitted: runs/mine/finetune.
    if folder.is_file() or not (is_run or any(folder.parent.glob("*/stage.json"))):
        return list(of_campaign(load_campaign(path, overrides, kinds)))
    if overrides:
        raise UsageError(f"{path} is a run, but overrides apply only to recipes\n  remove {' '.join(overrides)}")
    return list(of_run(folder if is_run else Path(find_stage(path, TASK)), kinds))


def compare_pair(mine: ComparedStage, other: ComparedStage) -> dict[str, Any]:
    """Return the differences between two stages, with the notes of subjects.yaml."""
    # 1. Group the unequal facts by subject.
    other_subject = {"subject": "another field", "facts": "*", "paper": "no value given"}
    subjects = [*yaml.safe_load(SUBJECTS.read_text()), other_subject]
    facts = facts_of(mine, other)
    others = facts_of(other, other)
    differing: dict[tuple[bool, int], list[str]] = {}  # (is slight, index of the subject) → facts
    unknown = []
    for name, fact, other_fact in differences(facts, others):
        if fact is None or other_fact is None:
            continue
        if fact.value is None or other_fact.value is None:
            unknown.append(name)
            continue
        number = 0
        while not any(fnmatchcase(name, pattern) for pattern in subjects[number]["facts"].split()):
            number += 1
        is_slight = False
        if name not in ("seed", "sweep.held_out"):
            is_slight = is_slightly_different(fact.value, other_fact.value)
        differing.setdefault((is_slight, number), []).append(name)

    # 2. An entry for each subject.
    entries = []
    for is_slight, number in sorted(differing):
        subject = subjects[number]
        rows = []
        typed: list[str] = []
        for name in differing[is_slight, number]:
            rows.append({"name": name, "mine": facts[name].words, "other": others[name].words})
            typed += overrides_for(name, mine, other, others[name])
        # 3. Explain values that depend on each other: the weight decay convention, the rate for another batch size.
        note = ""
        if subject["facts"] == "optim.weight_decay":
            decay = mine.config.optim.weight_decay
            other_decay = other.config.optim.weight_decay
            for rate in (other.config.optim.lr, mine.config.optim.lr):
                if math.isclose(decay, other_decay * rate, rel_tol=SLIGHT):
                    note = f"{decay:g} = {other_decay:g} × learning rate {rate:g}, as in big_vision's convention"
        elif subject["facts"] == "batch_size":
            rate = other.config.optim.lr
            ratio = mine.config.batch_size / other.config.batch_size
            note = (
                f"the peak learning rate is {mine.config.optim.lr:g}; other: {rate:g}, which would become "
                f"{rate * ratio:.3g} by linear scaling and {rate * math.sqrt(ratio):.3g} by square-root scaling"
            )
        entry = {
            "subject": subject["subject"],
            "slight": is_slight,
            "facts": rows,
            # A subject that covers several facts shows their names.
            "names_facts": "*" in subject["facts"] or " " in subject["facts"],
            "set": typed,
            "note": note,
        }
        entry |= {label: subject[label] for label in ("paper", "cost") if label in subject}
        entries.append(entry)
    return {"mine": mine.row, "other": other.row, "differences": entries, "unknown": unknown}


def is_slightly_different(value: Any, other: Any) -> bool:
    """Return whether two numbers differ by less than 5 %; for values near 1, such as betas, compare 1 − value."""
    if not (isinstance(value, int | float) and isinstance(other, int | float)):
        return False
    is_slight = math.isclose(value, other, rel_tol=SLIGHT)
    if 0.5 < value <= 1 and 0.5 < other <= 1:
        # A beta of 0.999 averages over 1 / (1 − 0.999) = 1,000 steps, one of 0.95 over 20.
        is_slight = math.isclose(1 - value, 1 - other, rel_tol=SLIGHT)
    return is_slight


def overrides_for(name: str, mine: ComparedStage, other: ComparedStage, fact: Fact) -> Iterator[str]:
    """Yield the overrides that give a fact of `mine` the value in `other`; yield nothing for a data set."""
    written = flat(config.plain(mine.config))
    values = fact.keys
    if name == "images":
        values = {"steps": round(fact.value / mine.config.batch_size)}
        if other.config.passes and mine.samples == other.samples:
            values = {"passes": f"{other.config.passes:g}"}
    elif name == "model.image_size":
        yield f"{mine.size_key}={flow_yaml(fact.value[0])}"
        values = {}
    elif values is None:
        values = {name: flat(config.plain(other.config))[name]}
    for key, value in values.items():
        if key not in written or written[key] != value:
            yield f"{mine.name}.{key}={flow_yaml(value)}"
