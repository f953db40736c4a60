"""Represent facts about stages, and compare two stages fact by fact.

    differences({"seed": Fact(1, "1")}, {"seed": Fact(2, "2")})  →  [FactDifference("seed", Fact(1, …), Fact(2, …))]

- jobs/extras/diff/meaning.py derives facts from recipes or runs, for `patchline diff`;
- jobs/extras/diff/recorded.py derives facts from the records of a run, for the report that compares runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Effect(Enum):
    """The first quantity affected by a difference."""

    ORDER = "which samples are trained on, and in which order"
    FIRST = "the loss of the first step"
    UPDATE = "the weights, from the first update on"
    ROUNDING = "only rounding errors"
    NONE = "nothing in training"


@dataclass(frozen=True)
class Fact:
    """A property or a setting of a stage."""

    value: Any  # None: unknown; a tuple: the best of these values
    words: str  # text that describes the value
    slack: float = 0.0  # tolerance within which two values count as equal
    keys: Mapping[str, Any] | None = None  # recipe keys and values that set this fact; None: the key of the same name
    kind: str = "config"  # "config", "data", "seed", "code", "world size", "hardware" or "packages"
    effect: Effect = Effect.UPDATE

    def equals(self, other: "Fact") -> bool:
        """Return whether two facts are equal; a tuple is equal to each of its elements."""
        slack = max(self.slack, other.slack)
        if slack:
            return bool(abs(self.value - other.value) <= slack)
        if isinstance(self.value, tuple) and isinstance(other.value, tuple):
            # The best of several values does not depend on their order.
            return sorted(map(repr, self.value)) == sorted(map(repr, other.value))
        if isinstance(self.value, tuple) and not isinstance(other.value, tuple):
            return other.value in self.value
        if isinstance(other.value, tuple) and not isinstance(self.value, tuple):
            return self.value in other.value
        return bool(self.value == other.value)


class FactDifference(NamedTuple):
    """A fact that differs between two stages, or exists in only one of them."""

    name: str
    first: Fact | None
    second: Fact | None

    @property
    def known(self) -> Fact:
        """Return the first stage's fact, or the second stage's if the first stage has none."""
        fact = self.first or self.second
        assert fact is not None
        return fact

    @property
    def words(self) -> tuple[str, str]:
        """Return both facts as text; "absent" stands for a missing fact."""
        first = self.first.words if self.first is not None else "absent"
        second = self.second.words if self.second is not None else "absent"
        return first, second

    @property
    def is_unknown(self) -> bool:
        """Return whether the fact's value is unknown for either stage."""
        return any(fact is not None and fact.value is None for fact in (self.first, self.second))


def differences(first: Mapping[str, Fact], second: Mapping[str, Fact]) -> list[FactDifference]:
    """Return the facts that differ, are unknown, or are missing from one stage, in their original order."""
    differing = []
    for name in {**first, **second}:
        difference = FactDifference(name, first.get(name), second.get(name))
        is_equal = False
        if difference.first is not None and difference.second is not None and not difference.is_unknown:
            is_equal = difference.first.equals(difference.second)
        if not is_equal:
            differing.append(difference)
    return differing
