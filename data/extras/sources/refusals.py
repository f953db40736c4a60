"""Count the members and samples that reading a tar or an archive skips, by reason.

refusals.add_type("tiff", "a/b.tiff")     counts   {"member type .tiff": 1}
                                          first    {"member type .tiff": "a/b.tiff"}
refusal_lines(refusals)                   ["1 × member type .tiff, first a/b.tiff"]
"""

from __future__ import annotations

from dataclasses import dataclass

from data.checks import printable
from data.index.index import SkippedCounts

MAX_TYPES = 12  # member types counted separately; foreign tars may have any number of types
OTHER_TYPES = "member of another type"
MEMBER_TYPE = "member type ."
MAX_EXTENSION = 16  # maximum displayed length of an extension
MAX_NAME = 160  # maximum stored length of a member's name


@dataclass
class Refusals(SkippedCounts):
    """Counts that grow while a tar or an archive is read."""

    def add(self, reason: str, name: str | bytes, count: int = 1) -> None:
        """Count a skipped member or sample; store its name if it is the first one with this reason."""
        if isinstance(name, bytes):
            name = name.decode("utf-8", "replace")
        # Each shard may have different types; limit the set as a whole to as many lines as one shard.
        is_new_type = reason.startswith(MEMBER_TYPE) and reason not in self.counts
        if is_new_type and sum(known.startswith(MEMBER_TYPE) for known in self.counts) >= MAX_TYPES:
            reason = OTHER_TYPES
        self.counts[reason] += count
        self.first.setdefault(reason, name[:MAX_NAME])

    def add_type(self, extension: str, name: str | bytes) -> None:
        """Count a member with an unsupported extension."""
        self.add(f"{MEMBER_TYPE}{extension[:MAX_EXTENSION]}", name)

    def add_all(self, other: SkippedCounts, shard: str) -> None:
        """Add the counts of a shard, which `shard` names."""
        for reason, count in other.counts.items():
            first = other.first.get(reason, "")
            self.add(reason, f"{first} of {shard}" if first else shard, count)


def refusal_lines(refused: SkippedCounts, label: str = "") -> list[str]:
    """Return one line per reason, most frequent first, safe to print on a terminal."""
    lines = []
    for reason, count in refused.counts.most_common():
        line = f"{label}{count:,} × {reason}"
        if reason in refused.first:
            line += f", first {refused.first[reason]}"
        lines.append(printable(line))
    return lines
