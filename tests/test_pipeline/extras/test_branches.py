"""Config keys of a branch."""

import pytest

from data.errors import ConfigError
from pipeline import config
from pipeline.extras.branches import BranchConfig

pytestmark = pytest.mark.quick


def test_branch_starts_after_its_begin_step() -> None:
    assert BranchConfig(steps=10).first_step == 0
    assert BranchConfig(steps=10, init="@trunk", begin=4).first_step == 4


@pytest.mark.parametrize(
    ("values", "message"), [({"begin": 4}, "init is not set"), ({"begin": 0, "init": "@trunk"}, "begin is 0")]
)
def test_begin_without_init_is_rejected(values, message) -> None:
    with pytest.raises(ConfigError, match=message):
        config.build(BranchConfig, {"steps": 10, **values}, "branch")
