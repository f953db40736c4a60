"""The tested releases are those that the project's files allow, and a run with others says so."""

import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from pipeline.engine.deepspeed import EXPECTED
from pipeline.extras.engine_check.versions import TESTED, untested_pair
from pipeline.identity import package_versions

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[4]


def test_ranges_begin_and_end_with_tested_releases() -> None:
    """The upper bound of torch leaves room for patch releases."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert TESTED["deepspeed"] == (EXPECTED,)
    assert f"deepspeed=={EXPECTED}" in requirements
    first, *_, last = (Version(release) for release in TESTED["torch"])
    assert f"torch>={first.major}.{first.minor},<{last.major}.{last.minor + 1}" in requirements


def test_installed_pair_and_the_pair_of_the_constraints_are_tested_ones() -> None:
    assert untested_pair(package_versions()) == ""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (pinned,) = [line.removeprefix("torch===") for line in lines if line.startswith("torch=")]
    assert pinned in TESTED["torch"]


@pytest.mark.parametrize("torch", [*TESTED["torch"], "2.13.0+cpu"])
def test_tested_pair_is_not_reported(torch) -> None:
    assert untested_pair({"torch": torch, "deepspeed": EXPECTED}) == ""


@pytest.mark.parametrize(("torch", "deepspeed"), [("2.14.1+cpu", "0.19.8"), ("2.13.0", "0.19.7")])
def test_untested_pair_is_reported_with_the_tested_ones(torch, deepspeed) -> None:
    assert untested_pair({"torch": torch, "deepspeed": deepspeed}) == (
        f"torch {torch.removesuffix('+cpu')} and DeepSpeed {deepspeed} were not tested together; tested: torch 2.11.0, "
        "2.13.0, 2.15.0 with DeepSpeed 0.19.8 (docs/design/engine-check.md)"
    )
