"""Records that carry their own digest: JSON whose last entry is the sha256 of all before it.

In:  {"key": "1a2b…", "seconds": 3.2}
Out: {"key": "1a2b…", "seconds": 3.2, "sha256": "9f3c…"}, an entry a line

There is exactly one text for given entries, and `unseal` compares all of it: a changed bit is found wherever it lies,
also in the blanks. A torn file is no JSON, or lacks its end. Whoever reads a record says what to do about a bad one.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


class Unsealed(ValueError):
    """A text is not a record as `seal` makes it; the message says how."""


def seal(entries: Mapping[str, object], indent: int | None = 1) -> str:
    """Return the text of a record: the entries, then their sha256. Without `indent` it is one line."""
    body = json.dumps(entries, indent=indent, default=str)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**entries, "sha256": digest}, indent=indent, default=str)


def unseal(text: bytes, indent: int | None = 1) -> dict[str, Any]:
    """Return the entries of a record. Raises Unsealed where the text is not what `seal` has written."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):  # neither JSON nor UTF-8
        raise Unsealed("it is torn or altered, no JSON") from None
    if not isinstance(entries, dict):
        raise Unsealed("it is torn or altered, no record")
    entries.pop("sha256", None)
    if text != seal(entries, indent).encode():
        raise Unsealed("it does not match its own sha256")
    return entries
