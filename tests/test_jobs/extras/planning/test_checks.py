"""The table of checks: the commands that show each check, and the results of verdicts."""

from typing import Any, cast

import pytest

from data.errors import ExitCode
from jobs.extras.planning import checks
from jobs.extras.planning.checks import CHECKS, GROUP, NODES, STAGE, Check, results
from jobs.extras.planning.stage_checks import CheckVerdict

pytestmark = pytest.mark.quick


def test_every_command_shows_checks_and_every_check_is_shown() -> None:
    commands = set()
    for check in CHECKS:
        shown_by = set(check.commands.split())
        assert shown_by, check.name
        assert check.needs in (STAGE, NODES, GROUP)
        commands |= shown_by
    assert commands == {"plan", "trial", "preflight"}


def test_only_failures_have_an_exit_code_and_only_problems_a_remedy(monkeypatch) -> None:
    findings = [
        CheckVerdict("OK", "fine", "nothing"),
        CheckVerdict("WARN", "slow", "buy"),
        CheckVerdict("FAIL", "gone", "find"),
    ]
    rows = (
        Check("disk", GROUP, "preflight", lambda _: findings, ExitCode.IO),
        Check("cores", STAGE, "preflight", lambda _: findings),
        Check("feed", GROUP, "plan", lambda _: findings),
    )
    monkeypatch.setattr(checks, "CHECKS", rows)
    shown = results("preflight", cast(Any, None), GROUP)
    assert {result.subject for result in shown} == {"disk"}
    assert [result.remedy for result in shown] == ["", "buy", "find"]
    assert [result.exit_code for result in shown] == [ExitCode.DONE, ExitCode.DONE, ExitCode.IO]
