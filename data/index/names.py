"""Class names, and the labels of samples: every class id must mean the same class in all data sets used together.

1. The class names of a source are numbered when it is packed or indexed (`data.extras.sources.numbering`).
2. The index stores the names; `agreed_names` compares the names of several data sets, or of a data set and weights.
3. A label contains class ids, or a name if the data set has names (`parse_labels`).

    b"7", b"3 17", b"[3, 17]", b'{"label": 3}'     labels with class ids
    b"tench", b'{"label": "tench"}'                labels with a name
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from data.checks import printable
from data.errors import DataError

Names = tuple[str, ...]
NO_NAMES: Mapping[str, int] = {}
MAX_SHOWN = 5  # maximum number of names in a message
MAX_DIGITS = 4300  # maximum length of a number that int() accepts
NO_LABEL = "no label"
NO_NAME = "label is a text that no class list has"  # reason for skipping a sample
NO_TEXT = "label is not text"
ONE_HOT = "label is a one-hot vector, not class ids"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NUMBER = re.compile(r"(?<!\w)[-+]?[0-9]*\.?[0-9]+(?!\w)")  # also a negative one, or one with a fraction
INTEGRAL = re.compile(r"[0-9]+\.0+")  # a float with an integral value: 3.0
MAX_CLASSES = 1_000_000  # larger ids count as mistakes (JFT-300M has 18,291 classes)


# ------------------------------------------------------------------------------------------- class lists


def ids_of(names: Iterable[str]) -> dict[str, int]:
    """Return {name: id} for all names except numbers, which labels use as ids, and names shared by several classes."""
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


# ------------------------------------------------------------------------------------------- comparison


def agreed_names(named: Iterable[tuple[str, Sequence[str]]], stage: str) -> Names:
    """Return the longest of several lists of class names; raises DataError if two lists contradict each other."""
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
                "  pack or index one of them again with the other's numbering: --classes-of INDEX (in a recipe\n"
                "  classes_of) or --names FILE (names), such as the classes.json of weights; if weights name\n"
                "  the same classes differently, import them again with the data set's names: --names SET.index.json"
            )
        if len(names) > len(longest):
            longest = names
            place = other_place
    return tuple(longest)


def preview(names: Sequence[str]) -> str:
    """Return a few names in quotes, safe to print on a terminal, and the total number if there are more."""
    text = ", ".join(f"'{printable(name[:80])}'" for name in names[:MAX_SHOWN])
    if len(names) > MAX_SHOWN:
        text += f", … ({len(names):,} in all)"
    return text


# ------------------------------------------------------------------------------------------- labels


class NoLabel(ValueError):
    """A label without class ids. `texts` are its possible class names; `reason` groups such labels in reports.

    `are_names` means that the label consists only of these texts: a class list with these names would make it valid.
    """

    def __init__(self, message: str, texts: Sequence[str] = (), are_names: bool = False, reason: str = NO_LABEL):
        super().__init__(message)
        self.texts = list(texts)
        self.are_names = are_names
        self.reason = NO_NAME if texts else reason


def parse_labels(raw: bytes, ids: Mapping[str, int] = NO_NAMES) -> tuple[int, ...]:
    """Return the class ids of a `.cls` (`7`, `3 17`, `3,17`, `[3, 17]`) or `.json` (`{"labels": [3]}`, `{"label": 3}`).

    `ids` maps class names to ids: with it, a `.cls` may also contain one name (`tench`), a `.json` several (`["cat"]`)
    or one (`"cat"`). An integer may be written as a float (`3.0`), as pandas does for a column with gaps.

    Raises NoLabel if there is no label, if it is not UTF-8 text (an array, a pickle, UTF-16), if a value is neither an
    integer ≥ 0 nor a known name, or if the values are a vector of zeros and ones instead of ids.
    """
    try:
        text = raw.removeprefix(BYTE_ORDER_MARK).decode().strip()
    except UnicodeDecodeError as error:
        raise NoLabel(f"not UTF-8 text at byte {error.start}", reason=NO_TEXT) from None
    # Most labels are a single id.
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return (int(text),)
    if "\0" in text:
        raise NoLabel("label is binary, not text", reason=NO_TEXT)
    is_json = text[:1] in ("[", "{") or (text[:1] == '"' and text[-1:] == '"' and len(text) > 1)
    if is_json:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise NoLabel(str(error)) from None
        # A few thousand nested brackets raise RecursionError, which is not a ValueError.
        except RecursionError:
            raise NoLabel("label JSON is nested too deeply") from None
        if isinstance(values, dict):
            values = values.get("labels", values.get("label", values.get("cls", [])))
        if not isinstance(values, list):
            values = [values]
    else:
        # A name may contain spaces and commas, as in ImageNet, so the whole text is compared first.
        values = [text] if text in ids else text.replace(",", " ").split()

    labels = []
    for value in map(as_integer, values):
        # int() would accept `1_000`, `+3` and digits of other scripts; isinstance would accept true as a number.
        is_digits = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS
        if is_digits or (type(value) is int and value >= 0):
            labels.append(int(value))  # type: ignore[call-overload]
        elif isinstance(value, str) and value in ids:
            labels.append(ids[value])
    if not labels or len(labels) < len(values):
        parts = values if is_json else [text]
        texts = [value for value in parts if is_name(value)]
        are_names = 0 < len(texts) == len(parts)
        expected = ", which are whole numbers from 0" if NUMBER.search(text) else ""
        raise NoLabel(f"{text[:40]!r} contains no class ids{expected}", texts, are_names)
    # Three ids or more out of 0 and 1 repeat one: no list of classes does, but a one-hot or multi-hot vector.
    if len(labels) > 2 and set(labels) <= {0, 1}:
        raise NoLabel(
            f"{text[:40]!r} is a vector of zeros and ones; expected the ids of its classes: "
            f"{[label for label, value in enumerate(labels) if value]}",
            reason=ONE_HOT,
        )
    return tuple(labels)


def as_integer(value: object) -> object:
    """Convert 3.0 to 3, and "3.0" to "3"; return any other value unchanged."""
    if isinstance(value, float) and value.is_integer() and value >= 0:
        return int(value)
    if isinstance(value, str) and INTEGRAL.fullmatch(value):
        return value.partition(".")[0]
    return value


def is_name(value: object) -> bool:
    """Return whether a non-numeric label can be a class name: it has a letter, or it has no digit (🐱, !, +)."""
    if not isinstance(value, str) or not value.strip():
        return False
    return any(map(str.isalpha, value)) or not any(map(str.isdigit, value))
