"""Which samples are masked, and what the search makes of it; what a masked step gives is in test_reference_loop.py."""

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from data.order import Ids
from jobs.extras.replays.audit import Finding, judge
from pipeline.batches import planned_ids, samples_in_mean
from pipeline.engine.exact import checksum
from pipeline.extras.replays.masking import Mask, ranges_of
from pipeline.extras.replays.search import culprits
from pipeline.extras.replays.spikes import Masking
from pipeline.training_config import TrainConfig

pytestmark = pytest.mark.quick


def test_a_mask_holds_the_samples_of_its_ranges_and_no_others() -> None:
    rng = random.Random(0)
    for _ in range(50):
        ranges = []
        for _ in range(rng.randrange(6)):
            first = rng.randrange(30)
            ranges.append([rng.randrange(3), rng.randrange(5), first, first + rng.randrange(1, 12)])
        shard, sample = (part.ravel() for part in np.mgrid[:6, :45])
        mask = Mask(ranges[:2])
        mask.add(ranges)
        for step in (0, 1, 2, 3, 1):  # a replay goes back
            masked = set()
            for since, of_shard, first, stop in ranges:
                masked |= {(of_shard, place) for place in range(first, stop) if step >= since}
            actual = mask.of(step, shard, sample).tolist()
            assert actual == [pair in masked for pair in zip(shard.tolist(), sample.tolist(), strict=True)], ranges
            single = ranges_of(*np.array(sorted(masked), np.int64).reshape(-1, 2).T)
            assert Mask(single).of(0, shard, sample).tolist() == actual


def test_a_masked_sample_is_counted_neither_in_the_mean_nor_as_itself_in_the_ledger() -> None:
    planned = Ids(np.zeros(4, np.int64), np.array([0, 1, 1, 2]), np.array([5, 0, 7, 7]))
    before, since = (planned_ids(masking(planned, [5, 1, 0, 8]), step) for step in (4, 5))
    assert since.sample.tolist() == [5, -1, -8, 7]
    assert before.sample.tolist() == planned.sample.tolist()
    assert (samples_in_mean(before), samples_in_mean(since)) == (4, 2)
    nothing = planned_ids(masking(planned, *([0, shard, 0, 99] for shard in range(3))), 0)
    assert samples_in_mean(nothing) == 1
    assert planned_ids(masking(planned), 0) is planned


def masking(planned: Ids, *ranges: Sequence[int]) -> Any:
    """Return what of a worker decides on a step's samples: its order, and a hook that masks these ranges."""
    order = SimpleNamespace(batch=lambda step: planned)
    hook = Masking(TrainConfig(steps=10), cast(Any, None), masked=ranges)
    return SimpleNamespace(data=SimpleNamespace(order=order), hooks=[hook])


@pytest.mark.parametrize("value", [math.inf, 40.0])
def test_whatever_its_place_a_single_culprit_is_found_in_twelve_values(value: float) -> None:
    for place in range(0, 1024, 31):
        taken = []

        def without(rows: Sequence[int], place: int = place, taken: list[int] = taken) -> float:
            taken.append(len(rows))
            return (0.0 if place in rows else value) + (1024 - len(rows)) / 1024

        found = culprits(without, 1024, 6.0, most=19, twins_of=lambda row: [row])
        assert (found.rows, found.is_found) == ([place], True)
        assert len(taken) <= 12


def test_copies_are_found_together_and_where_all_are_to_blame_nobody_is_named() -> None:
    copies = {17, 400, 1003}

    def without(rows: Sequence[int]) -> float:
        return 40.0 if copies - set(rows) else 1.0

    found = culprits(without, 1024, 6.0, most=19, twins_of=lambda row: sorted(copies))
    assert (set(found.rows), found.is_found, len(found.twins)) == (copies, True, 2)

    found = culprits(lambda rows: 40.0 * (1024 - len(rows)) / 1024, 1024, 6.0, most=19, twins_of=lambda row: [row])
    assert not found.is_found
    assert 871 <= len(found.rows) < 900  # without 870 of 1,024 it is 6.02


def test_any_flipped_bit_changes_a_checksum() -> None:
    numbers = torch.randn(8, generator=torch.Generator().manual_seed(0))
    for part in (numbers[:7], numbers[1:], numbers.view(2, 4)):
        before = float(checksum(part))
        bits = part.flatten().view(torch.int32)  # of the same memory
        for element in range(len(bits)):
            for bit in range(32):
                flip = -(1 << 31) if bit == 31 else 1 << bit
                bits[element] ^= flip
                assert float(checksum(part)) != before, (element, bit)
                bits[element] ^= flip
        assert float(checksum(part)) == before


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (Finding(10, 15, what="ledger", step=11, size=1e-6, conditions={"threads": [1, 2]}), "other data"),
        (Finding(10, 15, what="loss", step=11, size=1e-6, conditions={"threads": [1, 2]}), "other hardware"),
        (Finding(10, 15, what="loss", step=11, size=1e-2, conditions={"threads": [1, 2]}), "silent corruption"),
        (Finding(10, 15, what="loss", step=12, size=1e-6, conditions={"threads": [1, 2]}), "silent corruption"),
        (Finding(10, 15, what="loss", step=11, size=1e-6), "silent corruption"),
    ],
)
def test_what_a_difference_is_told_by_where_it_begins_and_what_else_differs(finding: Finding, verdict: str) -> None:
    assert judge(finding) == verdict
