"""Arguments that `bisect` refuses before it reads a run."""

import pytest

from data.errors import UsageError
from jobs.extras.replays.bisect import bisect

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("step=3 limit=0.7", "unknown argument 'limit=0.7'"),
        ("step=3 shards", "unknown argument 'shards'"),
        ("metric=loss", "no step is given"),
    ],
)
def test_wrong_arguments_are_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bisect("run", words.split(), output=None)
