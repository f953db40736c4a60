"""Read the class names of a data set from a file, in the formats of other programs.

read_class_list("names.txt")    →   ("airplane", "bird", "cat"), in the order of the class ids
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from data.errors import DataError
from data.index.names import Names

LIST_KEYS = ("names", "id2label", "label_names")  # keys of the class names in larger JSON documents


def read_class_list(path: str | os.PathLike[str]) -> Names:
    """Return the class names of a file, in the order of their ids; raises DataError if the file is invalid.

    Formats: one name per line; `.jsonl` with a JSON string, or an object with `name`, per line; `.json` with a list of
    names, {"0": name, …} as in Hugging Face's `id2label`, or an object with either as `names` (our indexes), `id2label`
    or `label_names` (the config.json of a Hugging Face or timm model).
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
                content = names_by_id(content)
        else:
            content = []
            for line in text.rstrip().splitlines():
                content.append(json.loads(line) if path.suffix == ".jsonl" else line.strip())

        if not isinstance(content, list) or not content:
            raise ValueError("it contains no class names")
        names = []
        for label, entry in enumerate(content):
            name = entry.get("name") if isinstance(entry, dict) else entry
            if not isinstance(name, str) or not name:
                raise ValueError(f"class {label} has no name")
            names.append(name)
    except FileNotFoundError:
        raise DataError(f"{path}: class list not found; expected a file with one class name per line") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}; expected one class name per line, in the order of their ids") from None
    return tuple(names)


def names_by_id(content: Mapping[str, object]) -> list[object]:
    """Return the names in a mapping, ordered by their ids.

    The mapping is {"0": name, …}, or {name: 0, …} like torchvision's class_to_idx. Raises ValueError if the ids of the
    second form are not 0, 1, 2, ….
    """
    ids = list(content.values())
    if not all(type(label) is int for label in ids):
        return [content.get(str(label)) for label in range(len(content))]
    if sorted(ids) != list(range(len(ids))):  # type: ignore[type-var]
        raise ValueError(f"the class ids are not 0 to {len(ids) - 1}")
    return sorted(content, key=content.__getitem__)  # type: ignore[arg-type]
