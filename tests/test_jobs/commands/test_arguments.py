"""The options that commands share."""

from inspect import signature

import pytest

from jobs.commands.arguments import Debug, Run
from jobs.commands.campaigns import run
from jobs.commands.status import status

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("command", [run, status])
def test_a_command_accepts_debug(command) -> None:
    assert signature(command).parameters["_debug"].annotation == Debug


def test_a_run_is_named_by_its_folder_or_url() -> None:
    (argument,) = Run.__metadata__
    assert "s3://" in argument.help
