"""Options that `plan` and `trial` refuse, and the time until `plan` prints its first line."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.files import import_path
from jobs.__main__ import main

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["plan", "--gpu", "h10"], 78, "--gpu is h10; did you mean 'h100'?"),
        (["plan", "--price", "0"], 78, "--price is 0, expected a finite number above 0"),
        (["plan", "--price=-2.5"], 78, "--price is -2.5, expected a finite number above 0"),
        (["plan", "--price", "inf"], 78, "--price is inf, expected a finite number above 0, for example --price 2.5"),
        (["plan", "--price=-inf"], 78, "--price is -inf, expected a finite number above 0"),
        (["plan", "--price", "nan"], 78, "--price is nan, expected a finite number above 0"),
        (["plan", "--mtbf", "-1"], 78, "--mtbf is -1, expected a finite number above 0"),
        (["plan", "--mtbf", "inf"], 78, "--mtbf is inf, expected a finite number above 0"),
        (["plan", "--mtbf", "nan"], 78, "--mtbf is nan, expected a finite number above 0"),
        (["trial", "--stage", "pretran"], 78, "the recipe has no stage 'pretran'"),
        (["trial", "--stage", "resize"], 78, "resize is a stage of kind resize, which does not train"),
    ],
)
def test_wrong_options_are_refused(words, code, message, recipe, capsys):
    assert main([words[0], str(recipe), *words[1:]]) == code
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_plan_prints_a_line_within_two_seconds(recipe):
    environment = {**os.environ, "PYTHONPATH": import_path()}
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "jobs", "plan", str(recipe)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        seconds = time.monotonic() - began
        process.kill()
    assert first.startswith("plan: reading ")
    assert seconds < 2
