"""The core without its extras: each extra is deleted from a copy of the tree, and then all at once.

Separate processes use the copies. The editable installation, which finds every module of this checkout, is removed
from their import path.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.recipes import NO_CHECK, SHORT, SMALL
from tests.support.shards import digits, write_set
from tests.test_layout import PACKAGES, ROOT, is_extra, modules_of

EXTRAS = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix()
    for package in PACKAGES
    for path in (ROOT / package / "extras").iterdir()
    if not path.name.startswith("__")
)

# sitecustomize.py of every process, including the run's workers.
WITHOUT_THE_CHECKOUT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
"""

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
"""

# Takes each extra out of the tree in turn, and forks a process that imports the extras anew. Libraries and the core are
# imported once: the core imports no extra (tests/test_layout.py). A fork exits with the code of a command that resolves
# a recipe before it looks for the stage.
WITHOUT_EACH = """
import importlib, os, sys, traceback
from pathlib import Path

def use_core():
    from jobs.__main__ import COMMANDS, main
    assert main(["--help"]) == 0
    for section in COMMANDS.sections.values():
        for words, (function, _summary, _example) in section.items():
            if ".extras." not in function:
                COMMANDS.load(words)
    return main(["run", "small.yaml", "--only", "nothing"])

use_core()
for extra in map(Path, sys.argv[1:]):
    there = extra if extra.is_dir() else extra.with_suffix(".py")
    there.rename(f"{there}.gone")
    if os.fork() == 0:
        with open(".".join(extra.parts), "w") as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        for name in list(sys.modules):
            if "extras" in name.split("."):
                del sys.modules[name]
        importlib.invalidate_caches()
        try:
            assert importlib.util.find_spec(".".join(extra.parts)) is None, "it is still there"
            code = use_core()
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    os.wait()
    Path(f"{there}.gone").rename(there)
"""


def tree_without(folder: Path, extras: list[str]) -> Path:
    """Copy the four packages, and delete extras from the copy."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)
    for extra in extras:
        if (folder / extra).is_dir():
            shutil.rmtree(folder / extra)
        else:
            (folder / f"{extra}.py").unlink()
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(WITHOUT_THE_CHECKOUT)
    return folder


def write_recipe(tree: Path) -> None:
    """Write small.yaml, which trains on existing shards: making shards is an extra."""
    write_set(list(digits(True, image_size=16))[:200], tree / "shards" / "train")
    (tree / "small.yaml").write_text(SHORT.format(data="train: shards/train").replace(NO_CHECK, ""))


def python(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(tree / "site"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree without any extra."""
    return tree_without(tmp_path_factory.mktemp("core"), EXTRAS)


@pytest.mark.quick
def test_without_one_extra_the_commands_and_recipes_of_the_core_work(tmp_path: Path) -> None:
    """A single test covers all extras, so that they share one process with the imported libraries."""
    tree = tree_without(tmp_path, [])
    write_recipe(tree)
    done = python(tree, "-c", WITHOUT_EACH, *EXTRAS)
    assert done.returncode == 0, done.stderr
    outputs = {extra: (tree / extra.replace("/", ".")).read_text() for extra in EXTRAS}
    expected = "\nerror: the recipe has no stage 'nothing'; known: "
    failed = {extra: output for extra, output in outputs.items() if expected not in output}
    assert failed == {}


@pytest.mark.quick
def test_without_extras_every_module_of_the_core_can_be_imported(core: Path) -> None:
    modules = [name for package in PACKAGES for name in modules_of(package) if not is_extra(name)]
    done = python(core, "-c", IMPORT_ALL, *(name for name in modules if name != "jobs.__main__"))
    assert done.returncode == 0, done.stderr
    failed = [line for line in done.stdout.splitlines() if line.partition(":")[0] in modules]
    assert not failed, "\n".join(failed)


@pytest.mark.quick
def test_without_extras_the_tests_of_the_core_are_collected(core: Path) -> None:
    shutil.copytree(ROOT / "tests", core / "tests", dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", core)
    files = ["tests/test_layout.py", "tests/test_command_line.py", "tests/test_jobs/commands"]
    done = python(core, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout
    assert "error" not in done.stdout.splitlines()[-1]


def test_without_extras_a_campaign_runs_and_can_be_read(core: Path) -> None:
    write_recipe(core)
    done = python(core, "-m", "jobs", "run", "small.yaml", "run=run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((core / "run").glob("*/done.json"))) == 1

    status = python(core, "-m", "jobs", "status", "run")
    assert status.returncode == 0, status.stderr
    assert "pretrain" in status.stdout
    assert len(list((core / "run").glob("pretrain-*/checkpoints/step-0000000004"))) == 1
    report = python(core, "-m", "jobs", "report", "run")
    assert report.returncode == 64
    assert "which is not in this checkout" in report.stderr


def test_without_extras_a_stage_that_packs_is_refused_with_the_missing_extra(core: Path) -> None:
    (core / "packs.yaml").write_text(SMALL.replace(NO_CHECK, ""))
    done = python(core, "-m", "jobs", "run", "packs.yaml")
    assert done.returncode == 78
    assert "shards is a pack stage, which needs jobs/extras/packing, but it is not in this checkout" in done.stderr
