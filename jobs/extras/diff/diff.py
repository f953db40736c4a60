"""The work of `patchline diff MINE OTHER`: what differs in meaning, the most consequential first.

1. Each side is a recipe, or a run. The stages that train or evaluate are paired by their names, else by their kind.
2. The facts of a pair (jobs/extras/diff/meaning.py) that are not equal are gathered under the subjects of
   jobs/extras/diff/subjects.yaml, whose order is that of the output; numbers that are nearly equal come last.
3. Of each difference come both values, the keys to type, what the paper and its code do, and what it cost where a
   source has measured it. Facts that a side does not tell are named at the end.

    2 differences in meaning: mine.yaml (pretrain) and table3/vit_i1k (pretrain)
     1. images seen: 115,306,496, 90 passes; there 384,352,256, 300 passes
        type   pretrain.passes=300
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
from jobs.commands.campaigns import load_campaign
from jobs.extras.diff.facts import Fact, differences
from jobs.extras.diff.meaning import ComparedStage, facts_of, of_campaign, of_run
from jobs.extras.history import flat
from jobs.named_stages import find_stage
from jobs.resolved_recipe import Kinds
from jobs.terminal import echo
from pipeline import config
from pipeline.artifacts import TASK
from pipeline.values import counted, flow_yaml

SUBJECTS = Path(__file__).with_name("subjects.yaml")
WIDTH = 120
LINES: dict[str, Any] = {"subsequent_indent": " " * 11, "break_on_hyphens": False, "break_long_words": False}
SLIGHT = 0.05  # relative difference of two numbers below which it comes after all others


def diff(mine: str, other: str, overrides: list[str], kinds: Kinds) -> None:
    """Print what differs in meaning between the stages of two recipes or runs.

    `overrides` are put over the second. Raises UsageError where there is nothing to compare.
    """
    stages = stages_of(mine, [], kinds)
    others = stages_of(other, overrides, kinds)
    for path, side in ((mine, stages), (other, others)):
        if not side:
            raise UsageError(f"{path} neither trains nor evaluates\n  expected a recipe or a run that does")
    pairs = []
    left = list(stages)  # those that have no pair yet
    right = list(others)
    for alike in ("row", "name", "kind"):
        for stage in stages:
            for candidate in others:
                is_pair = stage in left and candidate in right and getattr(stage, alike) == getattr(candidate, alike)
                # Of evaluations that are called otherwise only the single ones of both sides mean each other.
                if is_pair and alike == "kind" and not stage.kind.trains:
                    is_pair = sum(single.kind is stage.kind for single in (*left, *right)) == 2
                if is_pair:
                    pairs.append((stage, candidate))
                    left.remove(stage)
                    right.remove(candidate)
    if not pairs:
        raise UsageError(
            f"{mine} has a stage of the kind {stages[0].kind.name}, {other} one of the kind {others[0].kind.name}\n"
            "  expected two that do the same, both pretrain or both finetune"
        )
    for stage, candidate in pairs:
        show_pair(stage, candidate, f"{mine} ({stage.row}) and {other} ({candidate.row})")
    for path, alone in ((mine, left), (other, right)):
        if alone:
            echo(f"in {path} alone, and not compared: {', '.join(stage.row for stage in alone)}")


def stages_of(path: str, overrides: list[str], kinds: Kinds) -> list[ComparedStage]:
    """Return the stages of a run, or one of them, else those of a recipe with overrides on top."""
    folder = Path(path)
    is_run = any(folder.glob("*/stage.json"))
    # A stage may be named without the key behind its name: runs/mine/finetune.
    if folder.is_file() or not (is_run or any(folder.parent.glob("*/stage.json"))):
        return list(of_campaign(load_campaign(path, overrides, kinds)))
    if overrides:
        raise UsageError(f"{path} is a run, which was trained as it is\n  leave out {' '.join(overrides)}")
    return list(of_run(folder if is_run else Path(find_stage(path, TASK)), kinds))


def show_pair(mine: ComparedStage, other: ComparedStage, title: str) -> None:
    """Print the differences of two stages, each with what is known of it."""
    # 1. The facts that differ, by their subjects.
    subjects = [*yaml.safe_load(SUBJECTS.read_text()), {"subject": "another field", "facts": "*", "paper": "not told"}]
    facts = facts_of(mine, other)
    others = facts_of(other, other)
    differing: dict[tuple[bool, int], list[str]] = {}  # (slight, number of the subject) → facts
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
        if isinstance(fact.value, int | float) and isinstance(other_fact.value, int | float) and name != "seed":
            is_slight = math.isclose(fact.value, other_fact.value, rel_tol=SLIGHT)
        differing.setdefault((is_slight, number), []).append(name)

    # 2. A paragraph for each.
    count = counted(len(differing), "difference") if differing else "no differences"
    echo(f"{count} in meaning: {title}")
    for place, (is_slight, number) in enumerate(sorted(differing), start=1):
        subject = subjects[number]
        texts = []
        typed: list[str] = []
        for name in differing[is_slight, number]:
            text = f"{facts[name].words}; there {others[name].words}"
            # A subject of several facts says which of them it is.
            if "*" in subject["facts"] or " " in subject["facts"]:
                text = f"{name.rpartition('.')[2]} {text}"
            texts.append(text)
            typed += keys_to_type(name, mine, other, others[name])
        echo(f"{place:2}. {subject['subject']}: {' · '.join(texts)}{' (slight)' * is_slight}")
        # 3. What two values mean together: a decay in another convention, the rate for another batch.
        note = ""
        if subject["facts"] == "optim.weight_decay":
            decay = mine.config.optim.weight_decay
            decay_there = other.config.optim.weight_decay
            for rate in (other.config.optim.lr, mine.config.optim.lr):
                if math.isclose(decay, decay_there * rate, rel_tol=SLIGHT):
                    note = f"{decay:g} is {decay_there:g} times the rate {rate:g}: it is in big_vision's convention"
        elif subject["facts"] == "batch_size":
            rate = other.config.optim.lr
            ratio = mine.config.batch_size / other.config.batch_size
            note = (
                f"the peak rate is {mine.config.optim.lr:g} here and {rate:g} there, which the linear rule would make "
                f"{rate * ratio:.3g}, and that of the square root {rate * math.sqrt(ratio):.3g}"
            )
        for line, text in {"type": shlex.join(typed), "note": note, **subject}.items():
            if line in ("type", "note", "paper", "cost") and text:
                echo(fill(text, WIDTH, initial_indent=f"    {line:6} ", **LINES))
    if unknown:
        echo(f"not compared, for a side does not tell: {', '.join(unknown)}")


def keys_to_type(name: str, mine: ComparedStage, other: ComparedStage, fact: Fact) -> Iterator[str]:
    """Iterate the overrides that give a recipe what another one says of a fact; none where a set has to be given."""
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
