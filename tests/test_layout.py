"""The map of the house: which room may import which, and what each may bring along."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
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
    for node in nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those of `if __name__ == "__main__":`, which no importer ever runs."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "__name__ == '__main__'":
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from nodes(child)


def violations(room: str, name: str, source: str) -> list[str]:
    """Every import of the file that its room does not allow, as one line each."""
    found = []
    for line, module in imports(source):
        top = module.split(".")[0]
        if module.startswith("."):
            found.append(f"{name}:{line} imports {module}; write the room's name, there are no relative imports")
        elif top in ROOMS and top not in ROOMS[room]:
            found.append(f"{name}:{line} imports {module}; {room} may import {', '.join(sorted(ROOMS[room]))}")
        elif HEAVY.get(top, room) != room:
            found.append(f"{name}:{line} imports {module}; {top} lives in {HEAVY[top]} alone")
        elif top in {"tests", "benchmarks"}:
            found.append(f"{name}:{line} imports {module}; the product does not know its {top}")
    return found


def arrows(room: str) -> dict[str, set[str]]:
    """For every module of a room, the modules of the same room that it imports anywhere in its text."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / room).rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    return {name: targets(path.read_text(), modules.keys() - {name, room}) for name, path in modules.items()}


def targets(source: str, modules: set[str]) -> set[str]:
    """Those of `modules` that the source imports, whichever way the import is written."""
    return {module for module in modules for _, found in imports(source) if f"{found}.".startswith(f"{module}.")}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_map_allows(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"the room {room} is empty"
    found = [line for f in files for line in violations(room, str(f.relative_to(ROOT)), f.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_inside_a_room_the_arrows_go_one_way(room: str) -> None:
    try:
        TopologicalSorter(arrows(room)).prepare()
    except CycleError as error:
        pytest.fail(f"a circle inside {room}: {' ← '.join(error.args[1])}")


def test_no_room_is_reached_by_a_path_trick() -> None:
    """Only the entry point may touch sys.path; anything else would import a file twice on a worker."""
    files = [f for room in ROOMS for f in (ROOT / room).rglob("*.py") if f.name != "__main__.py"]
    assert not [str(f.relative_to(ROOT)) for f in files if "sys.path" in f.read_text()]


def test_a_room_is_not_named_like_a_module_of_the_standard_library() -> None:
    assert not ROOMS.keys() & sys.stdlib_module_names


@pytest.mark.parametrize(
    ("room", "source", "reason"),
    [
        ("models", "import data.reader", "models may import models"),
        ("data", "from models.vit import ViT", "data may import data"),
        ("pipeline", "def f():\n    import jobs", "pipeline may import data, models, pipeline"),
        ("pipeline", "import ray.train", "ray lives in jobs alone"),
        ("jobs", "from deepspeed import initialize", "deepspeed lives in pipeline alone"),
        ("models", "from PIL import Image", "PIL lives in data alone"),
        ("data", "from . import reader", "no relative imports"),
        ("jobs", "from tests import gangs", "does not know its tests"),
    ],
)
def test_the_map_refuses(room: str, source: str, reason: str) -> None:
    (found,) = violations(room, "x.py", source)
    assert reason in found


def test_what_a_file_imports_as_a_program_is_no_arrow() -> None:
    source = 'import data\n\nif __name__ == "__main__":\n    import jobs\nif data:\n    import pipeline'
    assert [module for _, module in imports(source)] == ["data", "pipeline"]


def test_a_circle_is_seen_in_either_way_of_writing_an_import() -> None:
    assert targets("from data import index\nimport data.order", {"data.index", "data.order", "data.tar"}) == {
        "data.index",
        "data.order",
    }
    assert targets("from data.index import Shard", {"data.index", "data.indexing"}) == {"data.index"}


def test_the_readmes_file_map_names_every_module() -> None:
    shown = (ROOT / "README.md").read_text().partition("## File map")[2]
    files = [f for room in ROOMS for f in (ROOT / room).rglob("*.py") if f.name != "__init__.py"]
    assert not [str(f.relative_to(ROOT)) for f in files if f"  {f.name} " not in shown]
