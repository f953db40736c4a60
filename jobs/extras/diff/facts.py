"""Facts about two stages, and the one comparison of them.

    differences({"seed": Fact(1, "1")}, {"seed": Fact(2, "2")})  →  [FactDifference("seed", Fact(1, …), Fact(2, …))]

- jobs/extras/diff/meaning.py states what a stage of a recipe or a run means, for `patchline diff`;
- jobs/extras/diff/recorded.py states what the numbers of a run may depend on, for the page that compares runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Effect(Enum):
    """What a difference can act on first."""

    ORDER = "which samples are trained on, in which order"
    FIRST = "the loss of the very first step"
    UPDATE = "the weights, from the first update on"
    ROUNDING = "the last bits of a number"
    NONE = "nothing that is learned"


@dataclass(frozen=True)
class Fact:
    """Something that a stage does or depends on."""

    value: Any  # None: not known; a tuple: the best of these
    words: str  # for people
    slack: float = 0.0  # by which equal values may differ
    keys: Mapping[str, Any] | None = None  # of a recipe, that set it, with their values; None: the key of its name
    kind: str = "config"  # "config", "data", "seed", "code", "world size", "hardware" or "packages"
    effect: Effect = Effect.UPDATE

    def equals(self, other: "Fact") -> bool:
        """Return whether two facts are the same; the best of several values equals any one of them."""
        slack = max(self.slack, other.slack)
        if slack:
            return bool(abs(self.value - other.value) <= slack)
        if isinstance(self.value, tuple) and not isinstance(other.value, tuple):
            return other.value in self.value
        if isinstance(other.value, tuple) and not isinstance(self.value, tuple):
            return self.value in other.value
        return bool(self.value == other.value)


class FactDifference(NamedTuple):
    """A fact that two stages do not share; one of them may lack it."""

    name: str
    first: Fact | None
    second: Fact | None

    @property
    def known(self) -> Fact:
        """Return the fact of the stage that has it."""
        fact = self.first or self.second
        assert fact is not None
        return fact

    @property
    def words(self) -> tuple[str, str]:
        """Return the words of both facts; "not there" for the one that a stage lacks."""
        first = self.first.words if self.first is not None else "not there"
        second = self.second.words if self.second is not None else "not there"
        return first, second

    @property
    def is_unknown(self) -> bool:
        """Return whether a stage has the fact without knowing its value."""
        return any(fact is not None and fact.value is None for fact in (self.first, self.second))


def differences(first: Mapping[str, Fact], second: Mapping[str, Fact]) -> list[FactDifference]:
    """Return the facts that are not known to be equal, in their order."""
    differing = []
    for name in {**first, **second}:
        difference = FactDifference(name, first.get(name), second.get(name))
        is_equal = False
        if difference.first is not None and difference.second is not None and not difference.is_unknown:
            is_equal = difference.first.equals(difference.second)
        if not is_equal:
            differing.append(difference)
    return differing
