"""What `bisect` refuses before it looks for a run, and how it finds a shard."""

import math
import random
from collections.abc import Sequence

import pytest

from data.errors import UsageError
from jobs.extras.replays.bisect import bisect, shard_behind

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("shards limit=0.7", "'limit=0.7' is not understood"),
        ("step=3 shards", "expected one of them"),
        ("metric=loss", "expected one of them"),
        ("step=3 shard", "'shard' is not understood"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bisect("run", words.split(), first=None, last=None, output=None)


def test_a_shard_is_found_wherever_it_is_though_to_lack_data_costs_more_than_it_does() -> None:
    rng = random.Random(0)
    # Halves of an odd number differ by a shard, which matters where there are few.
    for count in (2, 4, 6, *range(8, 40)):
        for culprit in range(100, 100 + count):
            taken: list[float] = []

            def value_without(
                shards: Sequence[int], count: int = count, culprit: int = culprit, taken: list[float] = taken
            ) -> float:
                value = 0.9 - 0.1 * len(shards) / count + rng.uniform(-0.004, 0.004)
                if culprit in shards:
                    value += 0.03
                taken.append(value)
                return value

            shard, without_it, with_it = shard_behind(value_without, range(100, 100 + count))
            assert shard == culprit, (count, culprit)
            assert len(taken) <= math.ceil(math.log2(count)) + 1
            assert sorted(taken) == sorted(without_it + with_it)
            assert min(without_it) > max(with_it)
