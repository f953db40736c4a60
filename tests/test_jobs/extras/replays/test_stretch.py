"""The steps that a replay may begin and end at; test_replays.py repeats them."""

from types import SimpleNamespace

import pytest

from data.errors import UsageError
from jobs.extras.replays.stretch import Replays

pytestmark = pytest.mark.quick


@pytest.fixture
def replays() -> Replays:
    """Replays of a run with commits of steps 8 and 16."""
    replays = Replays.__new__(Replays)
    replays.stage = SimpleNamespace(bounds=[0, 8, 16])  # type: ignore[assignment]
    replays.name = "pretrain"
    return replays


@pytest.mark.parametrize(("first", "last"), [(0, 8), (0, 16), (8, 16)])
def test_steps_between_two_commits_can_be_repeated(first, last, replays) -> None:
    assert replays.between(first, last) == (first, last)


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (4, 16, "--from is 4 and --to is 16, expected the steps of two committed checkpoints of pretrain: 0, 8, 16"),
        (8, 12, "--from is 8 and --to is 12, expected the steps of two committed checkpoints"),
        (None, 16, "--from is None and --to is 16, expected the steps of two committed checkpoints"),
        (8, None, "--from is 8 and --to is None, expected the steps of two committed checkpoints"),
        (0, 0, "--from is 0 and --to is 0, expected the steps of two committed checkpoints"),
        (8, 8, "--from is 8 and --to is 8, expected a later step"),
        (16, 8, "--from is 16 and --to is 8, expected a later step"),
    ],
)
def test_other_steps_are_refused(first, last, message, replays) -> None:
    with pytest.raises(UsageError) as error:
        replays.between(first, last)
    assert message in str(error.value)
