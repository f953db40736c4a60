"""Commands for which file permissions count, also if the tests run as root."""

import os
import shutil
from collections.abc import Sequence

import pytest


def without_privileges(command: Sequence[str]) -> list[str]:
    """Return a command without root's permission to open every file; skip the test if setpriv is missing."""
    if os.geteuid() != 0:
        return list(command)
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, because the tests run as root")
    return ["setpriv", "--inh-caps=-all", "--bounding-set=-all", *command]
