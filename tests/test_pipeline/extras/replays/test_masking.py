"""Masks select the right samples; test_reference_loop.py tests the effect on a step."""

import random

import numpy as np
import pytest
import torch

from pipeline.engine.exact import checksum
from pipeline.extras.replays.masking import Mask, ranges_of

pytestmark = pytest.mark.quick


def test_mask_contains_exactly_the_samples_of_its_ranges() -> None:
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
