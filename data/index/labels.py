"""The labels of one sample, parsed and checked against its set: what training, evaluation and the doctor accept.

b"7", b"3 17", b"[3, 17]", b'{"label": 3}'     class ids
b"tench", b'{"label": "tench"}'                a name, where the set's index has names
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from data.images.decode import BadImage
from data.index.index import Index

NO_NAMES: Mapping[str, int] = {}
MAX_CLASSES = 1_000_000  # an id beyond it is taken for a mistake (JFT-300M has 18,291)


def read_labels(raw: bytes, index: Index, most: int) -> tuple[int, ...]:
    """Parse the label bytes of a sample into class ids that its index has classes for, `most` of them at most.

    Raises BadImage, as a broken image would, with a reason that groups well.
    """
    try:
        labels = parse_labels(raw, index.ids)
    except ValueError:
        raise BadImage("no label") from None
    if max(labels) >= index.classes:
        raise BadImage(f"label not below {index.classes}")
    if len(labels) > most:
        raise BadImage(f"more labels than data.max_labels={most}")
    return labels


def parse_labels(raw: bytes, ids: Mapping[str, int] = NO_NAMES) -> tuple[int, ...]:
    """Return class ids of a `.cls` (`7`, `3 17`, `3,17`, `[3, 17]`) or `.json` (`{"labels": [3]}`, `{"label": 3}`).

    `ids` are those of class names: with them a `.cls` may also hold one name (`tench`), and a `.json` any (`["cat"]`).
    Raises ValueError where there is none, or where one is no whole number ≥ 0 and no such name.
    """
    text = raw.decode("utf-8", "replace").strip()
    is_json = text[:1] in ("[", "{")
    values = json_labels(text) if is_json else text.replace(",", " ").split()
    # A name may have spaces and commas in it, as ImageNet's have, so that a text is one name.
    if not is_json and text in ids:
        values = [text]
    labels = []
    for value in values:
        # int() would take `1_000` and `+3`, and digits of other scripts; isinstance would take true for a number.
        is_digits = isinstance(value, str) and value.isascii() and value.isdigit()
        if is_digits or (type(value) is int and value >= 0):
            labels.append(int(value))
        elif isinstance(value, str) and value in ids:
            labels.append(ids[value])
    if not labels or len(labels) < len(values):
        raise ValueError(f"{text[:40]!r} holds no class ids")
    return tuple(labels)


def text_labels(raw: bytes) -> list[str]:
    """Return the class names that a label may be meant to hold: those of its values that are texts with letters."""
    text = raw.decode("utf-8", "replace").strip()
    is_json = text[:1] in ("[", "{")
    try:
        values = json_labels(text) if is_json else [text]
    except ValueError:
        return []
    return [value for value in values if isinstance(value, str) and any(map(str.isalpha, value))]


def why_no_label(raw: bytes) -> str:
    """Return what is wrong with a label that holds no class ids, as a reason that groups well."""
    if text_labels(raw):
        return "label is a text that no class list has"
    return "no label"


def json_labels(text: str) -> list:
    """Return the values that JSON text gives as labels, whatever they are; raises ValueError where it is no JSON."""
    try:
        content = json.loads(text)
    # A few thousand brackets are enough for Python's parser to give up with this, which is no ValueError.
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if isinstance(content, dict):
        content = content.get("labels", content.get("label", content.get("cls", [])))
    return content if isinstance(content, list) else [content]
