"""Records that carry their own digest: JSON whose last entry is the sha256 of all before it.

In:  {"key": "1a2b…", "seconds": 3.2}
Out: {"key": "1a2b…", "seconds": 3.2, "sha256": "9f3c…"}, an entry a line

The digest is of the text, not of the values: a changed bit is found wherever it lies, also in the blanks, and a torn
file lacks its end. Whoever reads a record says what to do about a bad one.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

# The end of a record of several lines, and of one line, behind its last entry.
ENDS = (re.compile(rb',\n "sha256": "([0-9a-f]{64})"(\n\})\Z'), re.compile(rb', "sha256": "([0-9a-f]{64})"(\})\Z'))
LONGEST_END = 100  # bytes of such an end, and some more


class Unsealed(ValueError):
    """A text is not a record as `seal` makes it; the message says how."""


def seal(entries: Mapping[str, object], *, lines: bool = True) -> str:
    """Return the text of a record: the entries, an entry a line or all in one, then the sha256 of their text."""
    assert entries, "a record says something"
    body = json.dumps(entries, indent=1 if lines else None, default=str)
    digest = hashlib.sha256(body.encode()).hexdigest()
    # Put together by hand: the manifest of a thousand workers is 65 MB, which to print once more takes a second.
    if lines:
        return f'{body[:-2]},\n "sha256": "{digest}"\n}}'
    return f'{body[:-1]}, "sha256": "{digest}"}}'


def unseal(text: bytes) -> dict[str, Any]:
    """Return the entries of a record. Raises Unsealed where the text is not what `seal` has written."""
    for end in ENDS:
        found = end.search(text, max(len(text) - LONGEST_END, 0))
        if found is None:
            continue
        digest = hashlib.sha256(text[: found.start()])
        digest.update(found[2])
        if digest.hexdigest().encode() == found[1]:
            entries = json.loads(text)
            entries.pop("sha256")
            return entries
        raise Unsealed("it does not match its own sha256")
    raise Unsealed("it is torn or altered: no record that ends with its sha256")
