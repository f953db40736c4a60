"""Run the tests that need a GPU, and report one row per test as soon as the test ends."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import Context

ROOT = Path(__file__).parents[2]
FILES = ["tests/test_pipeline/test_on_gpu.py", "tests/test_data/extras/test_gpu_decoding.py"]
TEST_LIMIT_S = 150  # of one test


class Reporter:
    """A pytest plugin that reports every test as a row."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.seconds: dict[str, float] = {}  # by test, its setup included

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report a test that has run, or that was skipped or failed during its setup."""
        test = report.nodeid
        self.seconds[test] = self.seconds.get(test, 0.0) + report.duration
        has_result = report.when == "call" or report.outcome != "passed"
        if has_result:
            name = test.partition("::")[2].removeprefix("test_").replace("_", " ")
            self.context.report(test=name, outcome=report.outcome, seconds=self.seconds[test], note=reason_of(report))


def reason_of(report: pytest.TestReport) -> str:
    """Return the first line of the reason that a test was skipped or failed."""
    if isinstance(report.longrepr, tuple):  # path, line and reason of a skipped test
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return crash.message.splitlines()[0][:200]
    return report.longreprtext.splitlines()[0][:200] if report.longrepr else ""


def run_tests(context: Context) -> None:
    """Run the tests; ends the process with pytest's exit code."""
    os.chdir(ROOT)
    limit_s = context.size.patience * TEST_LIMIT_S
    options = ["-p", "no:cacheprovider", "-m", context.size.test_marker, f"--timeout={limit_s:.0f}"]
    sys.exit(pytest.main([*options, *FILES], plugins=[Reporter(context)]))
