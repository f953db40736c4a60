"""The work of `patchline diff MINE OTHER`: what differs in meaning, the most consequential first.

1. Each side is a recipe, or a run. The stages that train or evaluate are paired by their names, else by their kind.
2. The facts of a pair (jobs/report/meaning.py) that are not equal are gathered under the subjects of
   jobs/report/subjects.yaml, whose order is that of the output; numbers that are nearly equal come last.
3. Of each difference come both values, the keys to type, what the paper and its code do, and what it cost where a
   source has measured it. Facts that a side does not tell are named at the end.

    2 differences in meaning: mine.yaml (pretrain) and table3/vit_i1k (pretrain)
     1. images seen: 115,306,496, 90 passes; there 384,352,256, 300 passes
        type   pretrain.passes=300
        paper  table 3: …
"""

import math
import shlex
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from data.errors import UsageError
from jobs.named_stages import find_stage
from jobs.report.meaning import Fact, Known, facts_of, of_campaign, of_run
from jobs.report.reading import flat
from jobs.resolved_recipe import Campaign
from jobs.terminal import echo
from pipeline import config
from pipeline.artifacts import TASK
from pipeline.values import flow_yaml

Load = Callable[[str, list[str]], Campaign]  # of a recipe and overrides
SUBJECTS = Path(__file__).parents[1] / "report" / "subjects.yaml"
WIDTH = 120
LINES: dict[str, Any] = {"subsequent_indent": " " * 11, "break_on_hyphens": False, "break_long_words": False}
SLIGHT = 0.05  # relative difference of two numbers below which it comes after all others


def diff(mine: str, other: str, overrides: list[str], load: Load) -> None:
    """Print what differs in meaning between the stages of two recipes or runs.

    `overrides` are put over the second. Raises UsageError where there is nothing to compare.
    """
    stages = stages_of(mine, [], load)
    others = stages_of(other, overrides, load)
    for path, side in ((mine, stages), (other, others)):
        if not side:
            raise UsageError(f"{path} neither trains nor evaluates\n  expected a recipe or a run that does")
    pairs: list[tuple[Known, Known]] = []
    left = list(stages)  # those that have no pair yet
    right = list(others)
    for alike in ("row", "name", "kind"):
        for stage in stages:
            for candidate in others:
                is_free = stage in left and candidate in right
                # Of evaluations that are called otherwise only the single ones of both sides mean each other.
                if alike == "kind" and not stage.kind.trains:
                    of_kind = [known.kind for known in (*left, *right)].count(stage.kind)
                    is_free = is_free and of_kind == 2
                if is_free and getattr(stage, alike) == getattr(candidate, alike):
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


def stages_of(path: str, overrides: list[str], load: Load) -> list[Known]:
    """Return the stages of a run, or one of them, else those of a recipe with overrides on top."""
    folder = Path(path)
    if not folder.is_file() and any((*folder.parent.glob("*/stage.json"), *folder.glob("*/stage.json"))):
        if overrides:
            raise UsageError(f"{path} is a run, which was trained as it is\n  leave out {' '.join(overrides)}")
        is_run = any(folder.glob("*/stage.json"))
        return list(of_run(folder if is_run else Path(find_stage(path, TASK))))
    return list(of_campaign(load(path, overrides)))


def show_pair(mine: Known, other: Known, title: str) -> None:
    """Print the differences of two stages, each with what is known of it."""
    subjects = [*yaml.safe_load(SUBJECTS.read_text()), {"subject": "another field", "facts": "*", "paper": "not told"}]
    facts = facts_of(mine, other)
    others = facts_of(other, other)
    differing: dict[tuple[bool, int], list[str]] = {}  # (slight, number of the subject) → facts
    unknown = []
    for name in [name for name in facts if name in others]:
        left = facts[name]
        right = others[name]
        if left.value is None or right.value is None:
            unknown.append(name)
        elif not left.equals(right):
            patterns = [subject["facts"].split() for subject in subjects]
            number = 0
            while not any(fnmatchcase(name, pattern) for pattern in patterns[number]):
                number += 1
            are_numbers = isinstance(left.value, int | float) and isinstance(right.value, int | float)
            is_slight = are_numbers and math.isclose(left.value, right.value, rel_tol=SLIGHT)
            differing.setdefault((is_slight and name != "seed", number), []).append(name)

    echo(f"{len(differing) or 'no'} difference{'' if len(differing) == 1 else 's'} in meaning: {title}")
    for place, (is_slight, number) in enumerate(sorted(differing), start=1):
        names = differing[is_slight, number]
        subject = subjects[number]
        texts = []
        for name in names:
            label = f"{name.rpartition('.')[2]} " if "*" in subject["facts"] or " " in subject["facts"] else ""
            texts.append(f"{label}{facts[name].words}; there {others[name].words}")
        echo(f"{place:2}. {subject['subject']}: {' · '.join(texts)}{' (slight)' if is_slight else ''}")
        typed: list[str] = []
        for name in names:
            typed += keys_to_type(name, mine, other, others[name])
        lines = {"type": shlex.join(typed), "note": note_on(names[0], mine, other), **subject}
        for line in ("type", "note", "paper", "cost"):
            if lines.get(line):
                echo(fill(lines[line], WIDTH, initial_indent=f"    {line:6} ", **LINES))
    if unknown:
        echo(f"not compared, for a side does not tell: {', '.join(unknown)}")


def keys_to_type(name: str, mine: Known, other: Known, fact: Fact) -> Iterator[str]:
    """Iterate the overrides that give a recipe what another one says of a fact; none where a set has to be given."""
    written = flat(config.plain(mine.config))
    values: dict[str, Any] = {}
    for key, value in flat(config.plain(other.config)).items():
        is_of_schedule = name.endswith("schedule.decay") and key.startswith("optim.schedule.") and "warmup" not in key
        is_of_decay = name == "optim.weight_decay" and key.endswith("weight_decay")
        if (key == name or is_of_schedule or is_of_decay) and value != written.get(key):
            values[key] = value
    if name == "images":
        values["steps"] = round(fact.value / mine.config.batch_size)
        if other.config.passes and mine.samples == other.samples:
            values = {"passes": f"{other.config.passes:g}"}
    elif name in other.choices:
        values = {f"sweep.grid.{name}": other.choices[name]}
    elif name == "sweep.seeds":
        values = {name: list(range(fact.value))}
    elif name == "model.image_size":
        yield f"{mine.size_key}={flow_yaml(fact.value[0])}"
    elif name.startswith("model."):
        values = {name: None if fact.value == "none" else fact.value}
    elif name == "data.evaluate" or name.startswith(("content.", "data.mixture", "init")):
        values = {}
    for key, value in values.items():
        yield f"{mine.name}.{key}={flow_yaml(value)}"


def note_on(name: str, mine: Known, other: Known) -> str:
    """Say what two values mean together: a decay in another convention, the rate for another batch."""
    if name not in ("optim.weight_decay", "batch_size"):
        return ""
    decay = mine.config.optim.weight_decay
    there = other.config.optim.weight_decay
    rate = other.config.optim.lr
    if name == "optim.weight_decay":
        for peak in (mine.config.optim.lr, rate):
            if math.isclose(decay, there * peak, rel_tol=SLIGHT):
                return f"{decay:g} is {there:g} times the rate {peak:g}: it is in big_vision's convention"
    if name == "batch_size":
        ratio = mine.config.batch_size / other.config.batch_size
        return (
            f"the peak rate is {mine.config.optim.lr:g} here and {rate:g} there, which the linear rule would make "
            f"{rate * ratio:.3g}, and that of the square root {rate * math.sqrt(ratio):.3g}"
        )
    return ""
