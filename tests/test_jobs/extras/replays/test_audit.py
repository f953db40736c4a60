"""What an audit concludes from the first difference."""

import pytest

from jobs.extras.replays.audit import Finding, judge

pytestmark = pytest.mark.quick


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
