"""Class lists, and the conversion of a source's class ids to the ids of another numbering.

1. A source provides its class names, or a class list does (`data.extras.class_lists`), in the order of their ids.
2. `number` compares them with the names of the target numbering, usually of another data set, and maps each id of the
   source to an id of the target. Names missing from the target are an error, unless they are renamed or excluded.

    number(("bird", "kitty"), ("airplane", "bird", "cat"), rename={"kitty": "cat"}).ids    {0: 1, 1: 2}
"""

from __future__ import annotations

import json
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from data.checks import printable
from data.errors import DataError
from data.index.names import Names, preview

FEW_NAMES = 1000  # up to this many classes may have a single image each; more texts that rarely repeat are captions


def check_unambiguous(names: Sequence[str], path: str) -> None:
    """Raise DataError if a name is a number other than its id: a label with that number would be ambiguous."""
    for label, name in enumerate(names):
        if name.isascii() and name.isdigit() and int(name) != label:
            raise DataError(
                f"{path}: class {label} has the name {name}, but a label {name} would mean class {int(name)}\n"
                "  expected names, not numbers; if the labels are ids, remove the class list"
            )


@dataclass(frozen=True)
class Numbering:
    """A mapping from a source's class ids to the ids written to the data set."""

    names: Names = ()  # names of the written ids; () if unknown
    ids: Mapping[int, int] | None = None  # {source id: written id}, without excluded classes; None: no change
    known: int | None = None  # number of the source's classes; None: unknown

    def labels(self, labels: Sequence[int], key: str) -> tuple[int, ...]:
        """Return the labels to write for a sample; raises DataError for an id without a name."""
        if self.known is not None and max(labels, default=0) >= self.known:
            raise DataError(
                f"sample {printable(key)} has label {max(labels)}, but there are {self.known} class names\n"
                f"  expected labels from 0 to {self.known - 1}; check that these class names belong to this data set"
            )
        if self.ids is None:
            return tuple(labels)
        written: list[int] = []
        for label in labels:
            # Two merged classes result in a single label.
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
    target_name: str = "the class list",
) -> Numbering:
    """Return the numbering from a source's `own` names to the ids of `target`, or to new ids if `target` is empty.

    If the source has no names, its ids are used as ids of `target`. `rename` and `keep` refer to the source's
    classes. `name` and `target_name` are used in messages. Raises DataError if `target` lacks any of the names.
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
        # A class renamed to an existing name joins that class; all others keep their order.
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
        # If two classes share a name (ImageNet has two cranes), use the one with the same id.
        if label < len(target) and target[label] == name_in_target:
            ids[label] = label
        elif times_in_target[name_in_target] == 1:
            ids[label] = label_in_target[name_in_target]
        else:
            lacking.append(name_in_target)
    if lacking:
        check_unicode_forms(lacking, target, name, target_name)
        raise DataError(
            f"{name}: {len(lacking)} of its {len(own)} classes are not in {target_name}: {preview(lacking)}\n"
            f"  expected classes of {target_name}: {preview(target)}\n"
            f"  rename these classes (--rename {shlex.quote(lacking[0] + '=NAME')}; in a recipe rename: "
            f"{{{json.dumps(lacking[0], ensure_ascii=False)}: NAME}}), or pack this data set with a separate numbering"
        )
    is_as_it_was = ids == dict(enumerate(range(len(own))))
    return Numbering(target, None if is_as_it_was else ids, len(own))


def check_unicode_forms(lacking: Sequence[str], target: Sequence[str], name: str, target_name: str) -> None:
    """Raise DataError if a class name looks the same in both data sets but has different Unicode forms (NFC, NFD)."""
    composed = {unicodedata.normalize("NFC", other): other for other in target}
    for class_name in lacking:
        other = composed.get(unicodedata.normalize("NFC", class_name))
        if other is not None and other != class_name:
            forms = [form for form in ("NFC", "NFD") if unicodedata.is_normalized(form, class_name)]
            raise DataError(
                f"{name}: class {preview([class_name])} looks the same in {target_name}, but is stored in another "
                f"Unicode form ({' or '.join(forms) or 'mixed'} here); macOS writes file names in NFD\n"
                f"  rename it: --rename {shlex.quote(class_name + '=' + other)}, or rename the folder"
            )


def kept_ids(
    names: Sequence[str], keep: Sequence[int | str] | None, name: str, classes: int | None = None
) -> list[int] | None:
    """Return the ids of the classes in `keep`, given by id or name, or None to keep all.

    Raises DataError if a class is unknown.
    """
    if keep is None:
        return None
    check_known([entry for entry in keep if isinstance(entry, str)], names, f"{name}: keep")
    classes = classes or len(names)
    ids = set()
    for entry in keep:
        if not isinstance(entry, int):
            continue
        if classes and not 0 <= entry < classes:
            raise DataError(f"{name}: keep contains class {entry}, but there are {classes} classes (0 … {classes - 1})")
        ids.add(entry)
    # If two classes share a name (ImageNet has two cranes), keep both.
    for label, class_name in enumerate(names):
        if class_name in keep:
            ids.add(label)
    return sorted(ids)


def check_known(wanted: Iterable[str], names: Sequence[str], what: str) -> None:
    """Raise DataError unless all wanted names are class names of the source."""
    unknown = [name for name in wanted if name not in names]
    if not unknown:
        return
    expected = f"expected some of its {len(names)} classes: {preview(names)}"
    if not names:
        expected = "its class names are unknown: use class ids, or list the names in a file (names: FILE)"
    raise DataError(f"{what} contains {preview(unknown)}, but this source has no such class\n  {expected}")


# ------------------------------------------------------------------------------------------- unlikely class ids


def gap_in_ids(used: int, classes: int) -> str:
    """Return a note if fewer than half of the class ids below the largest occur in labels; "" otherwise."""
    if used == 0 or classes <= 2 * used:
        return ""
    return (
        f"only {used:,} of the class ids 0 to {classes - 1:,} occur in labels: a model needs {classes:,} outputs; "
        "if the largest id is a mistake, correct it"
    )


def are_captions(texts: int, samples: int) -> bool:
    """Return whether labels with this many distinct texts are captions, which rarely repeat, unlike class names."""
    return texts > max(FEW_NAMES, samples // 2)


def are_pairs(class_counts: Sequence[int], labelled: int) -> bool:
    """Return whether every labelled sample has both class 0 and class 1, and there are no other classes.

    Such labels are one-hot vectors of two elements: `1 0` and `0 1`, which as ids would mean the same.
    """
    return labelled > 1 and list(class_counts) == [labelled, labelled]


PAIRS = (
    "every label consists of the ids 0 and 1, so they are probably one-hot vectors of two elements\n"
    "  expected the id of each sample's class: 0 for `1 0`, and 1 for `0 1`"
)
