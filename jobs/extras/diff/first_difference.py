"""Find the first step at which two recorded stages differ, and the most likely cause.

1. `find_first_difference` finds the first step with different losses, compared bit for bit. It also compares the
   ledgers, which show whether both stages saw the same samples in the same order.
2. The most likely cause is the first difference in the records that can have this effect: a different data order
   changes the ledgers, a different initial model changes the loss of step 1, and a different learning rate has an
   effect only after the first update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jobs.extras.diff.facts import Effect, FactDifference
from jobs.extras.history import StageHistory

# Kinds of differences with the same effect, most likely cause first.
KINDS = ("seed", "data", "config", "world size", "code", "hardware", "packages")
FLAT = 1e-6  # relative change below which a loss counts as constant
TINY = 1e-4  # largest relative difference of two losses that another order of summation can cause in one step


@dataclass(frozen=True)
class FirstDifference:
    """The first step at which two stages differ; `step` is None if all common steps have equal losses."""

    common_steps: int  # number of steps trained by both stages
    step: int | None = None
    losses: tuple[float, float] = (math.nan, math.nan)
    ledger_before: int = 0  # last step with equal ledgers
    ledger_after: int | None = None  # first step with different ledgers
    causes: Sequence[FactDifference] = ()  # possible causes, most likely first
    reason: str = ""


def find_first_difference(
    first: StageHistory, second: StageHistory, differing: list[FactDifference]
) -> FirstDifference:
    """Find the first step at which the losses of two stages differ, and its most likely cause among `differing`."""
    # 1. Compare the losses bit for bit, so that two NaNs are equal.
    common, of_first, of_second = np.intersect1d(first.steps.step, second.steps.step, return_indices=True)
    losses = first.steps.loss[of_first]
    others = second.steps.loss[of_second]
    unequal = np.flatnonzero(losses.view(int) != others.view(int))

    # 2. Compare the ledgers, which are recorded only at reports.
    ledger_before = 0
    ledger_after = None
    ledgers = {report["step"]: report["ledger"] for report in second.kept_reports}
    for report in first.kept_reports:
        if ledgers.get(report["step"], report["ledger"]) != report["ledger"]:
            ledger_after = report["step"]
            break
        if report["step"] in ledgers:
            ledger_before = report["step"]
    if not len(unequal):
        return FirstDifference(len(common), ledger_before=ledger_before, ledger_after=ledger_after)

    # 3. Determine possible effects. Before the first update, only the model and its input can differ; later, mainly the
    # updates.
    place = unequal[0]
    step = int(common[place])
    at = (float(losses[place]), float(others[place]))
    if place == 0:
        effects = [Effect.FIRST, Effect.ROUNDING]
        reason = "the losses differ before the first update"
    elif np.ptp(losses[:place]) <= FLAT * abs(losses[0]):
        # If the weights of the head are zero, the loss is the same for every model and input.
        effects = [Effect.FIRST, Effect.UPDATE, Effect.ROUNDING]
        reason = "the loss was constant up to this step, which would hide an earlier difference"
    else:
        effects = [Effect.UPDATE, Effect.FIRST, Effect.ROUNDING]
        reason = "the losses were equal and not constant up to this step, so the model and its input were the same"
    # The samples of this step can differ only if it comes after the last step with equal ledgers.
    if ledger_after is not None and ledger_before < step:
        effects.insert(0, Effect.ORDER)
        reason = f"the ledgers differ too, after step {ledger_before}: other samples, or samples in another order"
    elif ledger_after is None:
        reason += "; the ledgers are equal: both trained on the same samples in the same order"
    if abs(at[0] - at[1]) < TINY * abs(at[0]):
        reason += "; another order of summation can explain such a small difference"
    causes = [difference for difference in differing if difference.known.effect in effects]
    # A new seed or data set also changes keys and digests, so list seed and config first.
    causes.sort(key=lambda difference: (effects.index(difference.known.effect), KINDS.index(difference.known.kind)))
    return FirstDifference(len(common), step, at, ledger_before, ledger_after, causes, reason)
