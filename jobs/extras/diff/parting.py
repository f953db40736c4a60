"""The first step at which two recorded stages part, and the likeliest cause.

1. `part` finds the first step whose losses are not the same bits, and the step at which the ledgers part, which tells
   whether both saw the same samples in the same order.
2. The likeliest cause is the first difference that could have shown there and then: data in another order shows in the
   ledgers; another initial model in the loss of step 1; another learning rate only after the first update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jobs.extras.diff.facts import Effect, FactDifference
from jobs.extras.history import StageHistory

# Of differences with the same effect, the one to suspect first.
KINDS = ("seed", "data", "config", "world size", "code", "hardware", "packages")
FLAT = 1e-6  # relative change of a loss that has not moved
TINY = 1e-4  # relative difference of two losses that another order of sums can make in one step


@dataclass(frozen=True)
class Parting:
    """Where two stages part; no `step` where they have not within the steps that both have taken."""

    common: int  # steps that both have taken
    step: int | None = None
    losses: tuple[float, float] = (math.nan, math.nan)
    ledger_before: int = 0  # the last step at which the ledgers are known to be equal
    ledger_after: int | None = None  # the first at which they are known to differ
    suspects: Sequence[FactDifference] = ()  # that could have acted there, the likeliest first
    reason: str = ""


def part(first: StageHistory, second: StageHistory, differing: list[FactDifference]) -> Parting:
    """Find the first step at which the losses of two stages differ, and the likeliest cause of it."""
    # 1. The first step whose losses are not the same bits; two that are not a number are.
    common, of_first, of_second = np.intersect1d(first.steps.step, second.steps.step, return_indices=True)
    losses = first.steps.loss[of_first]
    others = second.steps.loss[of_second]
    parted = np.flatnonzero(losses.view(int) != others.view(int))

    # 2. Where the ledgers part, which are known at reports alone.
    ledger_before = 0
    ledger_after = None
    ledgers = {report["step"]: report["ledger"] for report in second.kept_reports}
    for report in first.kept_reports:
        if ledgers.get(report["step"], report["ledger"]) != report["ledger"]:
            ledger_after = report["step"]
            break
        if report["step"] in ledgers:
            ledger_before = report["step"]
    if not len(parted):
        return Parting(len(common), ledger_before=ledger_before, ledger_after=ledger_after)

    # 3. What could have acted: before the first update only the model and its input, behind it first the updates.
    place = parted[0]
    step = int(common[place])
    at = (float(losses[place]), float(others[place]))
    if place == 0:
        effects = [Effect.FIRST, Effect.ROUNDING]
        reason = "the losses differ before the first update"
    elif np.ptp(losses[:place]) <= FLAT * abs(losses[0]):
        # Weights of a head that are zero hide the model and its input: any sample has the same loss.
        effects = [Effect.FIRST, Effect.UPDATE, Effect.ROUNDING]
        reason = "until then the loss had not moved, so that the parting shows where it could show first"
    else:
        effects = [Effect.UPDATE, Effect.FIRST, Effect.ROUNDING]
        reason = "the losses were the same while they moved, so that the model and its input were the same"
    # The samples may differ at the step where the last equal ledger lies before it.
    if ledger_after is not None and ledger_before < step:
        effects.insert(0, Effect.ORDER)
        reason = f"the ledgers part too, behind step {ledger_before}: other samples, or another order of them"
    elif ledger_after is None:
        reason += "; the ledgers are equal: both saw the same samples in the same order"
    if abs(at[0] - at[1]) < TINY * abs(at[0]):
        reason += "; so small a difference can come of another order of sums alone"
    suspects = [difference for difference in differing if difference.known.effect in effects]
    # A new seed, or another set, moves keys and digests along: the seed and the config say more than a digest.
    suspects.sort(key=lambda difference: (effects.index(difference.known.effect), KINDS.index(difference.known.kind)))
    return Parting(len(common), step, at, ledger_before, ledger_after, suspects, reason)
