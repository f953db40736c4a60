"""What a check of planning is: a row of the table in `checks.py`, and the verdict that it comes to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from data.errors import ExitCode

STAGE = "stage"  # a TrainedFacts: a stage that trains, before anything starts
NODES = "nodes"  # a ClusterFacts: what nodes say of themselves, also if the worker group failed
GROUP = "group"  # a ClusterFacts of a worker group that has measured


class Finding(NamedTuple):
    """The verdict of a check, with its reason and what to type."""

    level: Literal["OK", "WARN", "FAIL"]
    text: str
    remedy: str = ""  # not shown for OK


@dataclass(frozen=True)
class Check:
    """One row: what is checked, on what, and which of the commands show it."""

    name: str
    looks_at: str  # STAGE, NODES or GROUP
    commands: str  # of plan, trial and preflight
    verdict: Callable[[Any], Iterable[Finding]]  # nothing if it does not apply
    exit_code: ExitCode = ExitCode.UNAVAILABLE  # of a FAIL
