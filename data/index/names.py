"""Class names, and the labels that hold them: which class an id stands for, the same in every set used together.

1. A source's names are numbered when it is packed or indexed (`data.sources.numbering`).
2. The index keeps the names; `agreed` compares those of several sets, or of a set and of weights.
3. A label holds ids, or a name instead where the set has names (`parse_labels`).

    b"7", b"3 17", b"[3, 17]", b'{"label": 3}'     labels of class ids
    b"tench", b'{"label": "tench"}'                labels of a name
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from data.checks import printable
from data.errors import DataError

Names = tuple[str, ...]
NO_NAMES: Mapping[str, int] = {}
MOST_SHOWN = 5  # names that an error shows of many
MOST_DIGITS = 4300  # of a number that int() takes
NO_NAME = "label is a text that no class list has"  # a reason to pass over a sample
MAX_CLASSES = 1_000_000  # an id beyond it is taken for a mistake (JFT-300M has 18,291)


# ------------------------------------------------------------------------------------------- class lists


def ids_of(names: Iterable[str]) -> dict[str, int]:
    """Return the ids of names that stand for a single class and are no numbers, which a label means as ids."""
    ids: dict[str, int] = {}
    repeated = set()
    for label, name in enumerate(names):
        if name in ids:
            repeated.add(name)
        ids[name] = label
    for name in list(ids):
        if name in repeated or name.isdigit():
            del ids[name]
    return ids


# ------------------------------------------------------------------------------------- another numbering


# ------------------------------------------------------------------------------------------- comparing


def agreed_names(named: Iterable[tuple[str, Sequence[str]]], stage: str) -> Names:
    """Return the longest of several lists of names, each with its source; raises DataError where two disagree."""
    longest: Sequence[str] = ()
    place = ""
    for other_place, names in named:
        different = []
        for label, (name, other_name) in enumerate(zip(longest, names, strict=False)):
            if name != other_name:
                different.append(f"class {label} is {preview([name])} and {preview([other_name])}")
        if different:
            problem = "; ".join(different[:3])
            if len(different) > 3:
                problem += f", … {len(different)} in all"
            raise DataError(
                f"{stage}: {place} and {other_place} number their classes differently: {problem}\n"
                "  expected one name for each class id\n"
                "  pack or index one again, numbered as the other: --classes-of INDEX (in a recipe classes_of)\n"
                "  or --names FILE (in a recipe names), as the classes.json of weights; weights with other words for\n"
                "  the same classes are imported again with the set's: --names SET.index.json"
            )
        if len(names) > len(longest):
            longest = names
            place = other_place
    return tuple(longest)


def preview(names: Sequence[str]) -> str:
    """Return a few names in quotes, without anything that a terminal would act on, and how many there are."""
    text = ", ".join(f"'{printable(name[:80])}'" for name in names[:MOST_SHOWN])
    if len(names) > MOST_SHOWN:
        text += f", … ({len(names):,} in all)"
    return text


# ------------------------------------------------------------------------------------------- labels


class NoLabel(ValueError):
    """A label holds no class ids. `texts` are the class names that it may be meant to hold; `reason` groups well.

    `are_names` says that the label holds nothing else, so that with these names it would be a label.
    """

    def __init__(self, message: str, texts: list[str], are_names: bool = False):
        super().__init__(message)
        self.texts = texts
        self.are_names = are_names
        self.reason = NO_NAME if texts else "no label"


def parse_labels(raw: bytes, ids: Mapping[str, int] = NO_NAMES) -> tuple[int, ...]:
    """Return class ids of a `.cls` (`7`, `3 17`, `3,17`, `[3, 17]`) or `.json` (`{"labels": [3]}`, `{"label": 3}`).

    `ids` are those of class names: with them a `.cls` may also hold one name (`tench`), and a `.json` any (`["cat"]`).
    Raises NoLabel where there is none, or where one is no whole number ≥ 0 and no such name.
    """
    text = raw.decode("utf-8", "replace").strip()
    is_json = text[:1] in ("[", "{")
    if is_json:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise NoLabel(str(error), []) from None
        # A few thousand brackets are enough for Python's parser to give up with this, which is no ValueError.
        except RecursionError:
            raise NoLabel("nested too deeply", []) from None
        if isinstance(values, dict):
            values = values.get("labels", values.get("label", values.get("cls", [])))
        if not isinstance(values, list):
            values = [values]
    else:
        # A name may have spaces and commas in it, as ImageNet's have, so that a text is one name.
        values = [text] if text in ids else text.replace(",", " ").split()

    labels = []
    for value in values:
        # int() would take `1_000` and `+3`, and digits of other scripts; isinstance would take true for a number.
        is_digits = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS
        if is_digits or (type(value) is int and value >= 0):
            labels.append(int(value))
        elif isinstance(value, str) and value in ids:
            labels.append(ids[value])
    if not labels or len(labels) < len(values):
        texts = []
        parts = values if is_json else [text]
        for value in parts:
            if isinstance(value, str) and any(map(str.isalpha, value)):
                texts.append(value)
        are_names = 0 < len(texts) == len(parts)
        raise NoLabel(f"{text[:40]!r} holds no class ids", texts, are_names)
    return tuple(labels)
