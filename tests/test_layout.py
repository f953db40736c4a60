"""The map of the house: which package may import which, and what each may bring along."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "models": {"models"},
    "data": {"data"},
    "pipeline": {"models", "data", "pipeline"},
    "jobs": {"models", "data", "pipeline", "jobs"},
}
HEAVY = {
    "ray": "jobs",
    "deepspeed": "pipeline",
    "omegaconf": "pipeline",
    "webdataset": "data",
    "PIL": "data",
    "cv2": "data",
    "fsspec": "data",
    "s3fs": "data",
    "gcsfs": "data",
    "adlfs": "data",
    "torchcodec": "data",
}


def imports(source: str) -> list[tuple[int, str]]:
    """(line, module) of every import, those inside functions included; a relative one starts with a dot."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def violations(package: str, name: str, source: str) -> list[str]:
    """Every import of the file that its package does not allow, as one line each."""
    found = []
    for line, module in imports(source):
        top = module.split(".")[0]
        if module.startswith("."):
            found.append(f"{name}:{line} imports {module}; write the package's name, there are no relative imports")
        elif top in PACKAGES and top not in PACKAGES[package]:
            found.append(f"{name}:{line} imports {module}; {package} may import {', '.join(sorted(PACKAGES[package]))}")
        elif HEAVY.get(top, package) != package:
            found.append(f"{name}:{line} imports {module}; {top} lives in {HEAVY[top]} alone")
        elif top in {"tests", "benchmarks"}:
            found.append(f"{name}:{line} imports {module}; the product does not know its {top}")
    return found


def arrows(package: str) -> dict[str, set[str]]:
    """For every module of a package, the modules of the same package that it imports anywhere in its text."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / package).rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    return {name: targets(path.read_text(), modules.keys() - {name, package}) for name, path in modules.items()}


def targets(source: str, modules: set[str]) -> set[str]:
    """Those of `modules` that the source imports, whichever way the import is written."""
    return {module for module in modules for _, found in imports(source) if f"{found}.".startswith(f"{module}.")}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_the_map_allows(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"the package {package} is empty"
    found = [line for f in files for line in violations(package, str(f.relative_to(ROOT)), f.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_inside_a_package_the_arrows_go_one_way(package: str) -> None:
    try:
        TopologicalSorter(arrows(package)).prepare()
    except CycleError as error:
        pytest.fail(f"a circle inside {package}: {' ← '.join(error.args[1])}")


def test_no_package_is_reached_by_a_path_trick() -> None:
    """Only the entry point may touch sys.path; anything else would import a file twice on a worker."""
    files = [f for package in PACKAGES for f in (ROOT / package).rglob("*.py") if f.name != "__main__.py"]
    assert not [str(f.relative_to(ROOT)) for f in files if "sys.path" in f.read_text()]


def test_a_package_is_not_named_like_a_module_of_the_standard_library() -> None:
    assert not PACKAGES.keys() & sys.stdlib_module_names


@pytest.mark.parametrize(
    ("package", "source", "reason"),
    [
        ("models", "import data.reader", "models may import models"),
        ("data", "from models.vit import ViT", "data may import data"),
        ("pipeline", "def f():\n    import jobs", "pipeline may import data, models, pipeline"),
        ("pipeline", "import ray.train", "ray lives in jobs alone"),
        ("jobs", "from deepspeed import initialize", "deepspeed lives in pipeline alone"),
        ("models", "from PIL import Image", "PIL lives in data alone"),
        ("data", "from . import reader", "no relative imports"),
        ("jobs", "from tests import worker_functions", "does not know its tests"),
    ],
)
def test_the_map_refuses(package: str, source: str, reason: str) -> None:
    (found,) = violations(package, "x.py", source)
    assert reason in found


def test_a_circle_is_seen_in_either_way_of_writing_an_import() -> None:
    known = {"data.shards.index", "data.shards.indexing", "data.order", "data.shards.tar"}
    both_ways = "from data.shards import index\nimport data.order"
    assert targets(both_ways, known) == {"data.shards.index", "data.order"}
    assert targets("from data.shards.index import Shard", known) == {"data.shards.index"}


def shown_files() -> set[str]:
    """Paths in the README's file map, where "  name.py  comment" stands below the line of its folder, "jobs/" say."""
    file_map = (ROOT / "README.md").read_text().partition("## File map")[2].split("```")[1].strip()
    package = wing = ""
    paths = set()
    for line in file_map.splitlines():
        name = line.split()[0]
        indent = len(line) - len(line.lstrip())
        if name.endswith("/"):
            if indent == 0:
                package, wing = name, ""
            else:
                wing = name
        elif name.endswith(".py"):
            folder = package + wing if indent == 4 else package
            paths.add(folder + name)
    return paths


def test_the_readmes_file_map_names_every_module_and_no_other() -> None:
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert shown_files() == files
