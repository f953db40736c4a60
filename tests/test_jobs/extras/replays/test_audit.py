"""The cause that an audit derives from the first difference."""

import pytest

from jobs.extras.replays.audit import OTHER_HARDWARE, Finding, classify

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
