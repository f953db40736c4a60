"""Every script of benchmarks/, and every module of tests/ that no test imports, can be imported.

Most of them run rarely: by hand, on a GPU, or for hours. This test finds their imports of moved names early.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from scipy.stats import binomtest

from benchmarks import leaks, mutation

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
# One process for all of them, which imports torch once; not this one, whose settings a script may change.
IMPORT_ALL = """
import importlib, sys, traceback
failed = 0
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        failed += 1
        print(f"{name}:", file=sys.stderr)
        traceback.print_exc()
sys.exit(failed)
"""


@pytest.mark.slow
def test_every_script_can_be_imported() -> None:
    """tests/test_layout.py checks without imports that the names of ours are there; this one also finds libraries'."""
    names = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        names.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted((ROOT / "tests" / "support").glob("*.py")):
        names.append(f"tests.support.{path.stem}")
    assert len(names) > 30
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tests_named_for_mutants_exist() -> None:
    """The table lists the tests that run modules in separate processes."""
    for module, tests in mutation.WORKER_TESTS.items():
        assert (ROOT / module).exists(), module
        for name in tests:
            path, _, beginning = name.partition("::")
            assert (ROOT / path).exists(), name
            assert not beginning or f"def {beginning}" in (ROOT / path).read_text(), name


@pytest.mark.parametrize(("found", "trials"), [(0, 44_850), (3, 44_850), (1, 20)])
def test_bound_of_false_pairs_equals_scipy(found: int, trials: int) -> None:
    expected = binomtest(found, trials, alternative="less").proportion_ci(0.95, method="exact").high
    assert leaks.bound_of(found, trials) == pytest.approx(expected, rel=1e-6)
    assert leaks.bound_of(0, 300 * 299 // 2) < 7e-5
