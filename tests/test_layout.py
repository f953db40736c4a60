"""Rules of the package layout: allowed imports between packages, allowed libraries, and no import cycles.

Names of ours used in tests and benchmarks must exist too: most of those lines run only with a GPU, or are slow.
"""

import ast
import functools
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from jobs.__main__ import KINDS

pytestmark = pytest.mark.quick

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
    "huggingface_hub": "data",
    "torchcodec": "data",
}


WALLS = (
    ("pipeline.checkpoints", "pipeline.engine"),
    ("pipeline.evaluation", "pipeline.engine"),
    ("pipeline.evaluation", "pipeline.checkpoints"),
    ("jobs.cluster", "pipeline.checkpoints"),
    ("jobs.cluster", "pipeline.train"),
    ("jobs.cluster", "pipeline.training_config"),
    ("jobs.cluster", "pipeline.health"),
    ("jobs.cluster", "pipeline.start"),
    ("jobs.cluster", "jobs.stages"),
    ("jobs.cluster", "jobs.run"),
)  # the first does not import the second

KIND_MODULES = sorted({place.partition(":")[0] for place in KINDS.values()})


# ----------------------------------------------------------------------------- what the source says


def modules_of(package: str) -> dict[str, Path]:
    """Return the file of every module of a package by dotted name; a folder's `__init__.py` has the folder's name."""
    modules = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    return modules


def imports(source: str) -> list[tuple[int, str]]:
    """Return (line, module) of every import, also inside functions; relative imports begin with a dot."""
    lines_and_names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                lines_and_names.append((node.lineno, alias.name))
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                lines_and_names.append((node.lineno, f"{module}.{alias.name}"))
    return lines_and_names


def targets(source: str, modules: set[str]) -> set[str]:
    """Return the `modules` that the source imports, in any form of import."""
    imported = set()
    for _, name in imports(source):
        for module in modules:
            if f"{name}.".startswith(f"{module}."):
                imported.add(module)
    return imported


def arrows(package: str) -> dict[str, set[str]]:
    """Return, for every module of a package, the modules of the same package that it imports anywhere."""
    modules = modules_of(package)
    arrows_of = {}
    for name, path in modules.items():
        arrows_of[name] = targets(path.read_text(), modules.keys() - {name, package})
    return arrows_of


def wing_of(module: str) -> str:
    """`data.images.decode` → `data.images`, `data.extras.leaks.search` → `data.extras.leaks`.

    A module outside any folder, such as `data.order`, is a separate wing.
    """
    parts = module.split(".")
    depth = 3 if is_extra(module) else 2
    return ".".join(parts[:depth])


def is_extra(module: str) -> bool:
    return module.split(".")[1:2] == ["extras"]


def between_wings(arrows_of: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between wings, without those inside a wing."""
    folded: dict[str, set[str]] = {}
    for module, imported in arrows_of.items():
        wing = wing_of(module)
        other_wings = {wing_of(name) for name in imported} - {wing}
        folded.setdefault(wing, set()).update(other_wings)
    return folded


def circle(arrows_of: dict[str, set[str]]) -> list[str]:
    """Return the names on an import cycle, with the first repeated at the end; an empty list without a cycle."""
    try:
        TopologicalSorter(arrows_of).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def violations(package: str, name: str, source: str) -> list[str]:
    """Return a line for each import in the file that its package does not allow."""
    problems = []
    for line, module in imports(source):
        top = module.split(".")[0]
        if module.startswith("."):
            problems.append(f"{name}:{line} imports {module}; write the package's name, there are no relative imports")
        elif top in PACKAGES and top not in PACKAGES[package]:
            allowed = ", ".join(sorted(PACKAGES[package]))
            problems.append(f"{name}:{line} imports {module}; {package} may import {allowed}")
        elif HEAVY.get(top, package) != package:
            problems.append(f"{name}:{line} imports {module}; {top} lives in {HEAVY[top]} alone")
        elif top in {"tests", "benchmarks"}:
            problems.append(f"{name}:{line} imports {module}; the product does not know its {top}")
    return problems


# ----------------------------------------------------------------------------- what it may say


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_the_map_allows(package: str) -> None:
    modules = modules_of(package)
    assert modules, f"the package {package} is empty"
    problems = []
    for path in modules.values():
        problems += violations(package, str(path.relative_to(ROOT)), path.read_text())
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_inside_a_package_go_one_way(package: str) -> None:
    names = circle(arrows(package))
    assert not names, f"a circle inside {package}: {' ← '.join(names)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_the_folders_of_a_package_go_one_way(package: str) -> None:
    """Wings must not import each other mutually, even if no two of their modules do."""
    arrows_of = arrows(package)
    names = circle(between_wings(arrows_of))
    culprits = []
    for module, imported in arrows_of.items():
        for other in imported:
            if {wing_of(module), wing_of(other)} <= set(names) and wing_of(module) != wing_of(other):
                culprits.append(f"{module} imports {other}")
    assert not names, "\n".join([f"a circle between the wings of {package}: {' ← '.join(names)}", *culprits])


@pytest.mark.parametrize(("wing", "other"), WALLS)
def test_one_folder_does_not_import_the_other(wing: str, other: str) -> None:
    """The second wing may pass arguments to the first, but the first must not import the second."""
    there = modules_of(other.split(".")[0])
    forbidden = {name for name in there if f"{name}.".startswith(f"{other}.")}
    assert forbidden, f"{other} is not there"
    for module, path in modules_of(wing.split(".")[0]).items():
        if f"{module}.".startswith(f"{wing}."):
            across = targets(path.read_text(), forbidden)
            assert not across, f"{module} imports {min(across)}"


def test_the_core_imports_no_extra() -> None:
    """The table of commands names extras as text."""
    from benchmarks import house  # not in the copies of tests/test_without_extras.py, which collect this file

    assert house.imports_of_extras(house.modules_in(ROOT)) == []


def test_tests_of_core_modules_import_no_extra() -> None:
    """Their files have the path of a core module; files at the top of tests/ run campaigns with everything."""
    importers = set()
    for package in PACKAGES:
        for path in (ROOT / "tests" / f"test_{package}").rglob("*.py"):
            modules = [module for _, module in imports(path.read_text())]
            if "extras" not in path.parts and any(is_extra(module) for module in modules):
                importers.add(str(path.relative_to(ROOT / "tests")))
    assert importers == set()


def test_no_two_classes_share_a_name() -> None:
    """A search for a class name finds a single class."""
    assert shared_class_names() == {}


def shared_class_names() -> dict[str, list[str]]:
    """Return the names shared by several classes, with the modules of these classes."""
    modules: dict[str, list[str]] = {}
    for package in PACKAGES:
        for module, path in modules_of(package).items():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    modules.setdefault(node.name, []).append(module)
    return {name: several for name, several in modules.items() if len(several) > 1}


@pytest.mark.parametrize("module", ["models", "jobs.recipe.campaign", "jobs.run.session", *KIND_MODULES])
def test_a_recipe_is_checked_without_torch(module: str) -> None:
    """Importing torch takes a second, and an error for a wrong key must not wait for it."""
    modules = {name: path for package in PACKAGES for name, path in modules_of(package).items()}
    ways = {module: module}  # the chain of imports to each module that this one imports
    waiting = [module]
    while waiting:
        importer = waiting.pop()
        source = modules[importer].read_text()
        at_the_top = imported_at_the_top(ast.parse(source).body)
        assert "torch" not in {name.split(".")[0] for name in at_the_top}, f"{ways[importer]} → torch"
        # Importing a module also imports its parent packages.
        for name in at_the_top:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                imported = ".".join(parts[:length])
                if imported in modules and imported not in ways:
                    ways[imported] = f"{ways[importer]} → {imported}"
                    waiting.append(imported)


def imported_at_the_top(body: list[ast.stmt]) -> list[str]:
    """Return a module's top-level imports, except those only for type checking."""
    names = []
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Try | ast.With):
            names += imported_at_the_top(node.body)
    return names


def test_jobs_uses_no_private_name_of_ray() -> None:
    """Ray may change private names in any release, and a run would fail at their first use."""
    problems = []
    for path in modules_of("jobs").values():
        for line, name in private_names(path.read_text(), "ray"):
            problems.append(f"{path.relative_to(ROOT)}:{line} uses {name}")
    assert not problems, "\n".join(problems)


def private_names(source: str, library: str) -> list[tuple[int, str]]:
    """Return (line, name) of every name of the library with a leading underscore or from its dashboard or core.

    Such names can be imports, attributes, or parts of strings: of a script, or of a logger's name.
    """
    names = imports(source)
    bound = {}  # "Gauge": "ray.util.metrics.Gauge"
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import ray.util` binds "ray", and `import ray.util as util` binds "util".
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            names.append((node.lineno, f"{bound.get(first, '')}.{rest}"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for word in re.findall(rf"\b{library}(?:\.\w+)+|\b_{library}_\w+", node.value):
                names.append((node.lineno, f"{library}.{word}" if word.startswith("_") else word))
    hidden = []
    for line, name in names:
        parts = name.split(".")
        is_private = any(part.startswith("_") and not part.startswith("__") for part in parts)
        is_inside = len(parts) > 1 and parts[1] in ("dashboard", "core")
        if parts[0] == library and (is_private or is_inside):
            hidden.append((line, name))
    return hidden


def test_a_config_cannot_be_changed() -> None:
    """A changed config would no longer match the keys, digests and log lines computed from it."""
    found = 0
    for package in PACKAGES:
        for name, path in modules_of(package).items():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                    assert not decorators or "dataclass(frozen=True)" in decorators, f"{name}.{node.name}"
                    found += decorators != []
    assert found > 20


def test_no_package_is_reached_by_a_path_trick() -> None:
    """Only the entry point may touch sys.path; anything else would import a file twice on a worker."""
    for package in PACKAGES:
        for path in modules_of(package).values():
            if path.name != "__main__.py":
                assert "sys.path" not in path.read_text(), path.relative_to(ROOT)


def test_a_package_is_not_named_like_a_module_of_the_standard_library() -> None:
    assert not PACKAGES.keys() & sys.stdlib_module_names


# ----------------------------------------------------------------------------- what tests and benchmarks name


def test_names_imported_by_tests_and_benchmarks_exist() -> None:
    """Mypy checks only the packages, and rarely run tests do not notice moved names."""
    problems = []
    for folder in ("tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, name in missing_names(path.read_text()):
                problems.append(f"{path.relative_to(ROOT)}:{line} names {name}")
    assert not problems, "\n".join(problems)


def missing_names(source: str) -> list[tuple[int, str]]:
    """Return (line, name) of imports and attributes in the source that our modules do not define."""
    tree = ast.parse(source)
    missing = []
    modules = {}  # "checkpoint": "pipeline.checkpoints.checkpoint"
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        for alias in node.names:
            name = alias.name
            if isinstance(node, ast.ImportFrom):
                name = f"{node.module}.{alias.name}"
            if not is_there(name):
                missing.append((node.lineno, name))
            elif alias.asname or isinstance(node, ast.ImportFrom) or "." not in name:
                modules[alias.asname or alias.name] = name

    bound_otherwise = bound_in(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        module = modules.get(node.value.id, "")
        is_module = bool(module) and file_of(module) is not None and node.value.id not in bound_otherwise
        if is_module and not is_there(f"{module}.{node.attr}"):
            missing.append((node.lineno, f"{module}.{node.attr}"))
    return missing


def bound_in(tree: ast.AST) -> set[str]:
    """Return the names bound by any assignment or argument, which may therefore not be modules."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def is_there(name: str) -> bool:
    """Return whether a dotted name exists in our modules; names of other libraries always count as existing."""
    if name.split(".")[0] not in {*PACKAGES, "tests", "benchmarks"} or file_of(name) is not None:
        return True
    module, _, attribute = name.rpartition(".")
    # Every module has __file__ and __name__.
    return attribute.startswith("__") or attribute in names_in(module)


@functools.cache
def file_of(module: str) -> Path | None:
    """Return the file of one of our modules, or its folder if it lacks `__init__.py`; None for other names."""
    folder = ROOT.joinpath(*module.split("."))
    for path in (folder.with_suffix(".py"), folder / "__init__.py", folder):
        if path.exists():
            return path
    return None


@functools.cache
def names_in(module: str) -> frozenset[str]:
    """Return the names that one of our modules defines, binds or imports outside its functions."""
    path = file_of(module)
    if path is None or path.is_dir():
        return frozenset()
    names = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # names inside are not the module's
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        if isinstance(node, ast.Name):
            names.add(node.id)
        nodes += ast.iter_child_nodes(node)
    return frozenset(names)


# ----------------------------------------------------------------------------- that the tests above can see


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from pipeline.checkpoints.restore import host_memory", "pipeline.checkpoints.restore.host_memory"),
        (
            "from pipeline.checkpoints import restore\nrestore.host_memory(1)",
            "pipeline.checkpoints.restore.host_memory",
        ),
        ("def test():\n    from data.index import nothing", "data.index.nothing"),
        ("import tests.nothing", "tests.nothing"),
        ("import models\nmodels.nothing", "models.nothing"),
    ],
)
def test_check_reports_a_name_that_was_moved(source: str, name: str) -> None:
    assert missing_names(source) == [(len(source.splitlines()), name)]


def test_existing_name_is_not_reported_as_missing() -> None:
    there = "from pipeline.checkpoints import saver\nimport models as m\nimport torch\n"
    assert missing_names(f"{there}saver.host_memory\nm.ViT\nm.__file__\ntorch.nothing") == []
    shadowed = "from data import files\ndef test(files):\n    files.values()"
    assert missing_names(shadowed) == []


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
    (problem,) = violations(package, "x.py", source)
    assert reason in problem


@pytest.mark.parametrize(
    "source",
    [
        "import ray._raylet",
        "from ray._private.utils import write_ray_address",
        "from ray.dashboard.modules.job.common import JobInfoStorageClient",
        "import ray\nray._private.worker.global_worker",
        "import ray as r\nr._raylet.GcsClient()",
        "from ray import util\nutil.state._printer",
        'KILL = "import ray; ray._private.kill()"',
        "KILL = 'ray.get_actor(\"_ray_internal_job_actor_1\")'",
    ],
)
def test_a_private_name_is_seen_however_it_is_reached(source: str) -> None:
    assert private_names(source, "ray")
    assert private_names("import ray\nray.util.get_node_ip_address()\nray.__version__", "ray") == []


def test_import_cycle_is_found_in_both_forms_of_import() -> None:
    known = {"data.index.index", "data.index.indexing", "data.order", "data.index.tar"}
    both_ways = "from data.index import index\nimport data.order"
    assert targets(both_ways, known) == {"data.index.index", "data.order"}
    assert targets("from data.index.index import Shard", known) == {"data.index.index"}


def test_cycle_between_wings_is_found_even_without_a_cycle_of_modules() -> None:
    arrows_of = {
        "data.images.decode": {"data.index.tar"},
        "data.index.tar": {"data.order"},
        "data.index.subset": {"data.images.decode"},
        "data.order": set(),
    }
    assert not circle(arrows_of)
    assert set(circle(between_wings(arrows_of))) == {"data.images", "data.index"}
