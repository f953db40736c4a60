"""Exit codes of errors are those of sysexits.h."""

import os

import pytest

from data import errors
from data.errors import ExitCode, PatchlineError, RolledBack, exit_code

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (ExitCode.USAGE, "EX_USAGE"),
        (ExitCode.DATA, "EX_DATAERR"),
        (ExitCode.UNAVAILABLE, "EX_UNAVAILABLE"),
        (ExitCode.INTERNAL, "EX_SOFTWARE"),
        (ExitCode.OWNED, "EX_CANTCREAT"),
        (ExitCode.IO, "EX_IOERR"),
        (ExitCode.PREEMPTED, "EX_TEMPFAIL"),
        (ExitCode.CONFIG, "EX_CONFIG"),
    ],
)
def test_codes_are_those_of_sysexits(code, name):
    assert code == getattr(os, name)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("x"), 64),
        (errors.MismatchedNodes("x"), 69),
        (KeyboardInterrupt(), 130),
        (FileNotFoundError("x"), 74),
        (ZeroDivisionError(), 70),
    ],
)
def test_every_exception_has_a_code(error, code):
    assert exit_code(error) == code


def test_internal_error_has_an_exit_code_if_it_ends_a_process():
    assert RolledBack.exit_code is None
    assert exit_code(RolledBack("x")) == 70


def test_each_of_our_errors_has_one_of_the_codes():
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PatchlineError)
    ]
    assert len(classes) > 8
    for error in classes:
        assert exit_code(error("x")) in set(ExitCode)
