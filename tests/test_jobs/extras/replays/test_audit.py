"""The stretches that an audit repeats, and the cause that it derives from the first difference."""

from types import SimpleNamespace
from typing import Any

import pytest

from data.errors import UsageError
from jobs.extras.replays.audit import OTHER_HARDWARE, Finding, choose_stretches, classify

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (Finding(10, 15, what="ledger", step=11, size=1e-6, conditions={"threads": [1, 2]}), "other data"),
        (Finding(10, 15, what="loss", step=11, size=1e-6, conditions={"threads": [1, 2]}), OTHER_HARDWARE),
        (Finding(10, 15, what="loss", step=11, size=1e-2, conditions={"threads": [1, 2]}), "silent corruption"),
        # The first loss can be equal by chance, and a moment can differ before any loss.
        (Finding(10, 15, what="loss", step=12, size=1e-6, conditions={"threads": [1, 2]}), OTHER_HARDWARE),
        (Finding(10, 15, what="state", step=15, conditions={"arithmetic": [{}, {"MKL_CBWR": "SSE2"}]}), OTHER_HARDWARE),
        (Finding(10, 15, what="state", step=15), "silent corruption"),
        (Finding(10, 15, what="loss", step=11, size=1e-6), "silent corruption"),
    ],
)
def test_the_cause_follows_from_the_first_difference_and_the_conditions(finding: Finding, verdict: str) -> None:
    assert classify(finding) == verdict


@pytest.mark.parametrize(("share", "stretches"), [(0.01, 1), (0.1, 1), (0.25, 2), (0.5, 5), (1.0, 10)])
def test_an_audit_repeats_as_many_stretches_as_its_share_has_steps_for(share: float, stretches: int) -> None:
    """A stage of 100 steps with a commit every 10 steps; at least one stretch is repeated."""
    stage: Any = SimpleNamespace(commits=range(10, 101, 10), steps=100, folder=SimpleNamespace(name="pretrain"))
    for seed in range(3):
        chosen = choose_stretches(stage, share, seed)
        starts = [finding.start for finding in chosen]
        assert len(set(starts)) == stretches
        assert starts == sorted(starts)
        assert [finding.last - finding.start for finding in chosen] == [10] * stretches


@pytest.mark.parametrize(("share", "message"), [(0.0, "--share is 0.0"), (1.5, "--share is 1.5"), (0.1, "no commits")])
def test_an_impossible_share_or_a_stage_without_commits_is_refused(share: float, message: str) -> None:
    stage: Any = SimpleNamespace(commits=[], steps=100, folder=SimpleNamespace(name="pretrain"))
    with pytest.raises(UsageError, match=message):
        choose_stretches(stage, share, seed=0)
