"""What `bisect` refuses before it looks for a run."""

import pytest

from data.errors import UsageError
from jobs.extras.replays.bisect import bisect

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("step=3 limit=0.7", "unknown argument 'limit=0.7'"),
        ("step=3 shards", "unknown argument 'shards'"),
        ("metric=loss", "the step is missing"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bisect("run", words.split(), output=None)
