"""Shared samples of two sets are counted by position and by content."""

import pytest

from data.extras.shards.packing import pack
from data.extras.shards.subset import Part, Rule, make_subsets
from data.extras.shared_samples import shared_samples
from data.extras.sources.samples import digits

pytestmark = pytest.mark.quick


def test_subset_shares_positions_and_copy_shares_only_bytes(tmp_path) -> None:
    images = list(digits(train=False, image_size=16))[:30]
    whole = pack(images, tmp_path / "whole", shard_samples=10)
    copy = pack(images[:12], tmp_path / "copy", shard_samples=12)
    (part,) = make_subsets(whole, [Part(tmp_path / "part", Rule(part="5:17"), "part")])
    assert shared_samples(part, whole) == (12, 12)
    assert shared_samples(copy, whole) == (0, 12)
    assert shared_samples(copy, part)[0] == 0
