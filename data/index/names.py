"""Class names, and the labels that hold them: which class an id stands for, the same in every set used together.

1. A source knows its names (`data.sources`), or a class list gives them (`read_class_list`), in the order of
   their ids.
2. `number` compares them with the names that are to be followed, those of another set, and says which id of the source
   becomes which; what these names lack is refused, renamed by a table, or left out (`keep`).
3. The index keeps the names; `agreed` compares those of several sets, or of a set and of weights.
4. A label holds ids, or a name instead where the set has names (`parse_labels`).

    number(("bird", "kitty"), ("airplane", "bird", "cat"), rename={"kitty": "cat"}).ids    {0: 1, 1: 2}
    b"7", b"3 17", b"[3, 17]", b'{"label": 3}'     labels of class ids
    b"tench", b'{"label": "tench"}'                labels of a name
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.checks import printable
from data.errors import DataError

Names = tuple[str, ...]
LIST_KEYS = ("names", "id2label", "label_names")  # what holds the class names in JSON that holds other things too
NO_NAMES: Mapping[str, int] = {}
MOST_SHOWN = 5  # names that an error shows of many
MOST_DIGITS = 4300  # of a number that int() takes
NO_NAME = "label is a text that no class list has"  # a reason to pass over a sample
MAX_CLASSES = 1_000_000  # an id beyond it is taken for a mistake (JFT-300M has 18,291)


# ------------------------------------------------------------------------------------------- class lists


def read_class_list(path: str | os.PathLike[str]) -> Names:
    """Return the class names of a file, in the order of their ids; raises DataError where it holds none.

    One name a line; or a `.jsonl` of a JSON text, or an object with `name`, a line; or a `.json`: a list of names,
    {"0": name, …} as Hugging Face's `id2label`, or an object that has such as `names` (our indexes), `id2label` or
    `label_names` (config.json of Hugging Face and of timm).
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            content = json.loads(text)
            for key in LIST_KEYS:
                if isinstance(content, dict) and key in content:
                    content = content[key]
            if isinstance(content, dict):
                content = [content.get(str(label)) for label in range(len(content))]
        else:
            content = []
            for line in text.rstrip().splitlines():
                content.append(json.loads(line) if path.suffix == ".jsonl" else line.strip())

        if not isinstance(content, list) or not content:
            raise ValueError("it names no classes")
        names = []
        for label, entry in enumerate(content):
            name = entry.get("name") if isinstance(entry, dict) else entry
            if not isinstance(name, str) or not name:
                raise ValueError(f"class {label} has no name")
            names.append(name)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such class list; expected a file of one class name a line") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}; expected one class name a line, in the order of their ids") from None
    return tuple(names)


def check_unmistakable(names: Sequence[str], path: str) -> None:
    """Raise DataError where a name is a number, and not its own id: as a label it would be taken for another class."""
    for label, name in enumerate(names):
        if name.isascii() and name.isdigit() and int(name) != label:
            raise DataError(
                f"{path}: class {label} is called {name}, which as a label is the id of class {int(name)}\n"
                "  expected names that are no numbers, or ids in the labels: leave the class list out"
            )


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


@dataclass(frozen=True)
class Numbering:
    """How a source's class ids become those that are written."""

    names: Names = ()  # of the ids that are written; none where nobody knows them
    ids: Mapping[int, int] | None = None  # of the source → written; others are left out; None: all, as they are
    known: int | None = None  # ids of the source are below; None: unknown

    def labels(self, labels: Sequence[int], key: str) -> tuple[int, ...]:
        """Return what is written for the labels of a sample; raises DataError on an id that has no name."""
        if self.known is not None and max(labels, default=0) >= self.known:
            raise DataError(
                f"sample {printable(key)} has label {max(labels)}, and there are {self.known} class names\n"
                f"  expected labels from 0 to {self.known - 1}: are these the class names of this set?"
            )
        if self.ids is None:
            return tuple(labels)
        written: list[int] = []
        for label in labels:
            # Two classes that are now one give one label, not two.
            if label in self.ids and self.ids[label] not in written:
                written.append(self.ids[label])
        return tuple(written)


def number(
    own: Names,
    target: Names = (),
    *,
    rename: Mapping[str, str] | None = None,
    keep: Sequence[int | str] | None = None,
    name: str = "the set",
    giver: str = "the class list",
) -> Numbering:
    """Say how a source with its `own` names is numbered as `target` says; without `target`, as it numbers itself.

    Ids of a source without names are taken for those of `target`. `rename` and `keep` speak of the source's classes;
    `name` and `giver` say which sets are meant. Raises DataError naming the classes that `target` lacks.
    """
    rename = rename or {}
    check_known(rename, own, f"{name}: rename")
    if not own:
        kept = kept_ids(target, keep, name)
        unchanged_ids = None if kept is None else dict(zip(kept, kept, strict=True))
        return Numbering(target, unchanged_ids, len(target) or None)

    renamed = [rename.get(entry, entry) for entry in own]
    kept = kept_ids(renamed, keep, name)
    if kept is None:
        kept = list(range(len(own)))
    if not target:
        # A class that was given another's name has become that class; all others keep their order.
        merged: list[str] = []
        for class_name in renamed:
            if class_name not in rename.values() or class_name not in merged:
                merged.append(class_name)
        target = tuple(merged)

    label_in_target = {name_in_target: label for label, name_in_target in enumerate(target)}
    times_in_target = Counter(target)
    ids: dict[int, int] = {}
    lacking = []
    for label in kept:
        name_in_target = renamed[label]
        # Of two classes with one name (ImageNet has two cranes) the class at the same place is meant.
        if label < len(target) and target[label] == name_in_target:
            ids[label] = label
        elif times_in_target[name_in_target] == 1:
            ids[label] = label_in_target[name_in_target]
        else:
            lacking.append(name_in_target)
    if lacking:
        raise DataError(
            f"{name}: {giver} lacks {len(lacking)} of the {len(own)} classes here: {some(lacking)}\n"
            f"  expected classes of {giver}: {some(target)}\n"
            f"  rename them (--rename {shlex.quote(lacking[0] + '=NAME')}; in a recipe rename: "
            f"{{{json.dumps(lacking[0], ensure_ascii=False)}: NAME}}), or pack this set with a numbering of its own"
        )
    is_as_it_was = ids == dict(enumerate(range(len(own))))
    return Numbering(target, None if is_as_it_was else ids, len(own))


def kept_ids(
    names: Sequence[str], keep: Sequence[int | str] | None, name: str, classes: int | None = None
) -> list[int] | None:
    """Return the ids of classes to keep, by id or name; None for all. Raises DataError on an unknown class."""
    if keep is None:
        return None
    check_known([entry for entry in keep if isinstance(entry, str)], names, f"{name}: keep")
    classes = classes or len(names)
    ids = set()
    for entry in keep:
        if not isinstance(entry, int):
            continue
        if classes and not 0 <= entry < classes:
            raise DataError(f"{name}: keep has class {entry}, and there are {classes} classes (0 … {classes - 1})")
        ids.add(entry)
    # Of two classes with one name (ImageNet has two cranes) both are meant.
    for label, class_name in enumerate(names):
        if class_name in keep:
            ids.add(label)
    return sorted(ids)


def check_known(wanted: Iterable[str], names: Sequence[str], what: str) -> None:
    """Raise DataError unless all of these are names of the source."""
    unknown = [name for name in wanted if name not in names]
    if not unknown:
        return
    there_are = f"expected some of its {len(names)} classes: {some(names)}"
    if not names:
        there_are = "nobody knows its class names: give class ids, or the names in a file (names: FILE)"
    raise DataError(f"{what} has {some(unknown)}, no class of this source\n  {there_are}")


# ------------------------------------------------------------------------------------------- comparing


def agreed(named: Iterable[tuple[str, Sequence[str]]], stage: str) -> Names:
    """Return the longest of several lists of names, each with its source; raises DataError where two disagree."""
    longest: Sequence[str] = ()
    place = ""
    for other_place, names in named:
        different = []
        for label, (name, other_name) in enumerate(zip(longest, names, strict=False)):
            if name != other_name:
                different.append(f"class {label} is {some([name])} and {some([other_name])}")
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


def some(names: Sequence[str]) -> str:
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
