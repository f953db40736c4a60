"""The hook that masks samples."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from data.order import Ids
from pipeline.batches import planned_ids, samples_in_mean
from pipeline.extras.replays.spikes import Masking
from pipeline.training_config import TrainConfig

pytestmark = pytest.mark.quick


def test_masked_sample_is_excluded_from_the_mean_and_marked_in_the_ledger() -> None:
    planned = Ids(np.zeros(4, np.int64), np.array([0, 1, 1, 2]), np.array([5, 0, 7, 7]))
    before, since = (planned_ids(masking(planned, [5, 1, 0, 8]), step) for step in (4, 5))
    assert since.sample.tolist() == [5, -1, -8, 7]
    assert before.sample.tolist() == planned.sample.tolist()
    assert (samples_in_mean(before), samples_in_mean(since)) == (4, 2)
    nothing = planned_ids(masking(planned, *([0, shard, 0, 99] for shard in range(3))), 0)
    assert samples_in_mean(nothing) == 1
    assert planned_ids(masking(planned), 0) is planned


def masking(planned: Ids, *ranges: Sequence[int]) -> Any:
    """Return a fake worker with an order of samples and a hook that masks these ranges."""
    order = SimpleNamespace(batch=lambda step: planned)
    hook = Masking(TrainConfig(steps=10), cast(Any, None), masked=ranges)
    return SimpleNamespace(data=SimpleNamespace(order=order), hooks=[hook])
