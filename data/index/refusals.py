"""What was passed over in tars: counted by reason, the first of each reason named, a few lines however odd the names.

refusals.add_type("tiff", "a/b.tiff")     counts   {"member type .tiff": 1}
                                          first    {"member type .tiff": "a/b.tiff"}
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from data.checks import printable

MOST_TYPES = 12  # types of members that are counted apart; what others have made may hold any number
OTHER_TYPES = "member of another type"
MEMBER_TYPE = "member type ."
MOST_EXTENSION = 16  # letters of an extension that are shown
MOST_NAME = 160  # letters of a member's name that are kept


@dataclass
class Refusals:
    """Reasons with how often each came, and the first member or sample that it came with."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, name: str | bytes, count: int = 1) -> None:
        """Count something that was passed over; its name is kept where it is the first of its reason."""
        if isinstance(name, bytes):
            name = name.decode("utf-8", "replace")
        # Each shard of a set may have types of its own: the set as a whole has no more lines than one shard.
        is_new_type = reason.startswith(MEMBER_TYPE) and reason not in self.counts
        if is_new_type and sum(known.startswith(MEMBER_TYPE) for known in self.counts) >= MOST_TYPES:
            reason = OTHER_TYPES
        self.counts[reason] += count
        self.first.setdefault(reason, name[:MOST_NAME])

    def add_type(self, extension: str, name: str | bytes) -> None:
        """Count a member whose extension is none of those that are read."""
        self.add(f"{MEMBER_TYPE}{extension[:MOST_EXTENSION]}", name)

    def add_all(self, other: Refusals, shard: str) -> None:
        """Count what was passed over in a shard."""
        for reason, count in other.counts.items():
            first = other.first.get(reason, "")
            self.add(reason, f"{first} of {shard}" if first else shard, count)

    def lines(self) -> list[str]:
        """Return a line a reason, the most frequent first; names are printed so that no terminal acts on them."""
        lines = []
        for reason, count in self.counts.most_common():
            line = f"refused: {count:,} × {reason}"
            if reason in self.first:
                line += f", first {self.first[reason]}"
            lines.append(printable(line))
        return lines
