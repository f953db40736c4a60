"""Count style metrics of a tree of Python files; docs/design/house.md explains each number.

    python -m benchmarks.house                       # the four packages, and the tests apart
    python -m benchmarks.house --markdown            # the same as rows of the table in docs/design/house.md
    python -m benchmarks.house OTHER/src OTHER/x.py  # any Python tree; the paths are counted together
    python -m benchmarks.house --centre              # core and extras, import closures, and modules without tests
    python -m benchmarks.house --centre --names      # the same, with the names of the counted classes and modules

All rates are per 1,000 non-blank lines. The fields of `Counts` define the numbers.
"""

import argparse
import ast
import io
import os
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.recipes import SMALL

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "data", "pipeline", "jobs")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ROOTS = ("jobs.run.session", "jobs.stages.training", "pipeline.train", "jobs.cluster.ray_nodes")  # found by name
# sitecustomize.py for all processes of a small training run: fork servers and their forks, the workers, record which of
# our modules they import. The server imports nothing in advance, as on a node with GPUs, so each worker imports what it
# needs.
RECORD_IMPORTS = """
import os, sys

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("models", "data", "pipeline", "jobs"):
            with open(os.environ["RECORD_IMPORTS_TO"], "a") as file:
                file.write(name + chr(10))
        return None

if "jobs.cluster.fork_server" in sys.orig_argv:
    sys.argv = [word for word in sys.argv if word != "imports"]
    sys.meta_path.insert(0, Recorder())
"""
VAGUE_NAMES = ("found", "one")  # names that do not describe the value
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Counts:
    """Metrics of a tree of files."""

    lines: int = 0  # non-blank lines
    comment_lines: int = 0  # lines with only a comment
    comprehensions: int = 0  # comprehensions of lists, sets and dicts, and generator expressions
    conditional_expressions: int = 0  # `a if b else c`
    tuple_assignments: int = 0  # both sides are written as tuples: `a, b = 1, 2`
    vague_names: Counter[str] = field(default_factory=Counter)  # assignments, loop variables and parameters
    public_signatures: int = 0  # functions of modules and classes whose names do not begin with one underscore
    signatures_with_any: int = 0  # public signatures with `Any` in an annotation
    function_lengths: list[int] = field(default_factory=list)  # lengths in lines, including the signature
    functions_returning_text: int = 0  # annotated to return a text or a list of texts, and nothing else
    file_lengths: dict[Path, int] = field(default_factory=dict)  # lengths in lines, including blank lines
    files_in_folder: Counter[Path] = field(default_factory=Counter)  # number of Python files, without sub-folders

    def per_1000(self, number: int) -> float:
        """Return a number as a rate per 1,000 non-blank lines."""
        return 1000 * number / self.lines

    def rows(self) -> dict[str, str]:
        """Return the formatted numbers, keyed by the row names in docs/design/house.md."""
        # Ties are broken by the order in which files are read, which is sorted.
        folder, files = self.files_in_folder.most_common(1)[0]
        longest_file = max(self.file_lengths, key=self.file_lengths.__getitem__)
        any_share = self.signatures_with_any / max(self.public_signatures, 1)
        lengths = self.function_lengths or [0]
        all_lines = sum(self.file_lengths.values())
        text_share = self.functions_returning_text / max(len(self.function_lengths), 1)
        rows = {
            "lines": f"{all_lines:,}",
            "lines that are not blank": f"{self.lines:,}",
            "functions": f"{len(self.function_lengths):,}",
            "functions per 1,000 lines": f"{1000 * len(self.function_lengths) / all_lines:.0f}",
            "mean function, lines": f"{statistics.mean(lengths):.0f}",
            "functions that only return text": f"{100 * text_share:.1f} %",
            "median file, lines": f"{statistics.median(self.file_lengths.values()):.0f}",
            "files below 80 lines": f"{sum(length < 80 for length in self.file_lengths.values())}",
            "comprehensions per 1,000 lines": f"{self.per_1000(self.comprehensions):.1f}",
            "conditional expressions per 1,000 lines": f"{self.per_1000(self.conditional_expressions):.1f}",
            "tuple assignments per 1,000 lines": f"{self.per_1000(self.tuple_assignments):.1f}",
            "comment lines": f"{self.per_1000(self.comment_lines) / 10:.1f} %",
            "most files in one flat folder": f"{files} ({folder.name})",
            "public signatures with `Any`": f"{100 * any_share:.0f} %",
        }
        for name in VAGUE_NAMES:
            rows[f"variables named `{name}`"] = f"{self.vague_names[name]}"
        rows["longest file, lines"] = f"{self.file_lengths[longest_file]} ({longest_file.name})"
        rows["median function, lines"] = f"{statistics.median(lengths):.0f}"
        return rows


def python_files(paths: Iterable[Path]) -> list[Path]:
    """Return the Python files among the paths and in their folders, except in hidden folders."""
    files = []
    for path in paths:
        if path.is_file():
            files.append(path)
            continue
        for file in sorted(path.rglob("*.py")):
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if not is_hidden:
                files.append(file)
    return files


def count(paths: Iterable[Path]) -> Counts:
    """Count metrics over all Python files at the paths together; raises SystemExit if there are none.

    Files that this version of Python cannot parse are reported and skipped.
    """
    counts = Counts()
    for file in python_files(paths):
        source = file.read_text()
        try:
            tree = ast.parse(source, str(file))
        except SyntaxError as error:
            print(f"skipped {file}: {error.msg}", file=sys.stderr)
            continue
        counts.file_lengths[file] = len(source.splitlines())
        counts.files_in_folder[file.parent] += 1
        counts.lines += sum(1 for line in source.splitlines() if line.strip())
        counts.comment_lines += count_comment_lines(source)
        count_expressions(tree, counts)
        count_signatures(tree, counts)
    if not counts.lines:
        raise SystemExit("these paths contain no Python code")
    return counts


def count_comment_lines(source: str) -> int:
    """Return the number of lines with only a comment; a number sign inside a string does not count."""
    number = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        stands_alone = not token.line[: token.start[1]].strip()
        if token.type == tokenize.COMMENT and stands_alone:
            number += 1
    return number


def count_expressions(tree: ast.Module, counts: Counts) -> None:
    """Add the metrics that are counted everywhere in a file: expressions, assignments, names, function lengths."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            counts.comprehensions += 1
        elif isinstance(node, ast.IfExp):
            counts.conditional_expressions += 1
        elif isinstance(node, ast.Assign):
            has_tuple_target = any(isinstance(target, ast.Tuple) for target in node.targets)
            counts.tuple_assignments += has_tuple_target and isinstance(node.value, ast.Tuple)
        elif isinstance(node, Function):
            assert node.end_lineno is not None, "ast.parse sets the last line of every function"
            counts.function_lengths.append(node.end_lineno - node.lineno + 1)
            counts.functions_returning_text += returns_text(node)

        # Count a vague name at its assignment and not at every use.
        name = bound_name(node)
        if name in VAGUE_NAMES:
            counts.vague_names[name] += 1


def returns_text(function: Function) -> bool:
    """Return whether the return annotation is `str` or a list of `str`."""
    if function.returns is None:
        return False
    types = {node.id for node in ast.walk(function.returns) if isinstance(node, ast.Name)}
    return "str" in types and types <= {"str", "list"}


def bound_name(node: ast.AST) -> str | None:
    """Return the name that a node assigns, or None."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    return None


def count_signatures(tree: ast.Module, counts: Counts) -> None:
    """Count the public functions in a module and its classes, and those that use `Any` in annotations."""
    for function in functions_of_modules_and_classes(tree):
        is_dunder = function.name.startswith("__")
        if function.name.startswith("_") and not is_dunder:
            continue
        counts.public_signatures += 1
        counts.signatures_with_any += any(says_any(annotation) for annotation in annotations(function))


def functions_of_modules_and_classes(tree: ast.Module) -> Iterator[Function]:
    """Yield the top-level functions of a module and the methods of its classes, excluding nested functions."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, Function):
                    yield member


def annotations(function: Function) -> list[ast.expr]:
    """Return all annotations of a signature: parameters and return value."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for variadic in (arguments.vararg, arguments.kwarg):
        if variadic is not None:
            parameters.append(variadic)
    written = [parameter.annotation for parameter in parameters]
    written.append(function.returns)
    return [annotation for annotation in written if annotation is not None]


def says_any(annotation: ast.expr) -> bool:
    """Return whether an annotation contains `Any`."""
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


def own_files_imported_to_train() -> int:
    """Return the number of files in the four packages that are loaded by importing the training loop."""
    # Use a separate process, because modules imported in this process would stay loaded.
    script = (
        "import sys, pipeline.train\n"
        "for module in list(sys.modules.values()):\n"
        "    print(getattr(module, '__file__', None) or '')\n"
    )
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = tuple(f"{ROOT / name}/" for name in PACKAGES)
    return sum(1 for line in printed.splitlines() if line.startswith(folders))


# ------------------------------------------------------------------------------------------------ core and extras


def modules_in(root: Path) -> dict[str, Path]:
    """Return the file of every module of the four packages by its dotted name; a package stands for its __init__.py."""
    modules = {}
    for package in PACKAGES:
        for path in python_files([root / package]):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            modules[name.removesuffix(".__init__")] = path
    return modules


def is_extra(module: str) -> bool:
    """Return whether a module is in the extras of its package."""
    return module.split(".")[1:2] == ["extras"]


def imported_by(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Return which of our modules a file imports anywhere, including inside functions and for type checking."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            # `from data.order import Order` imports data and data.order; Order is not a module.
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                module = ".".join(parts[:length])
                if module in modules:
                    imported.add(module)
    return imported


def imports_of_extras(modules: Mapping[str, Path]) -> list[str]:
    """Return every import of an extra by the core, as "importer → extra"; packages themselves are not listed."""
    imports = []
    for module, path in modules.items():
        if is_extra(module):
            continue
        for imported in sorted(imported_by(path, modules)):
            if is_extra(imported) and modules[imported].name != "__init__.py":
                imports.append(f"{module} → {imported}")
    return imports


def reachable(roots: Iterable[str], modules: Mapping[str, Path]) -> set[str]:
    """Return the transitive imports of the roots, including the roots."""
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imported_by(modules[module], modules)
    return reached


def classes_by_name(modules: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return the modules that define each top-level class, by class name."""
    places: dict[str, list[str]] = {}
    for module, path in modules.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    return places


def untested_modules(modules: Mapping[str, Path], root: Path) -> list[str]:
    """Return the modules without a test file at the mirrored path: tests/test_a/b/test_c.py for a/b/c.py.

    An `__init__.py` needs no test file.
    """
    untested = []
    for module, path in modules.items():
        package, *folders, name = path.relative_to(root).with_suffix("").parts
        test = root.joinpath("tests", f"test_{package}", *folders, f"test_{name}.py")
        if name != "__init__" and not test.exists():
            untested.append(module)
    return untested


def lines_of(names: Iterable[str], modules: Mapping[str, Path]) -> int:
    """Return the number of lines of these modules, including blank ones."""
    return sum(len(modules[name].read_text().splitlines()) for name in names)


def centre_rows(root: Path, with_names: bool) -> dict[str, str]:
    """Return the rows about core and extras: lines, import closures, repeated class names, and untested modules."""
    modules = modules_in(root)
    core = [module for module in modules if not is_extra(module)]
    rows = {}
    for package in PACKAGES:
        of_package = [module for module in modules if module.split(".")[0] == package]
        of_core = [module for module in of_package if not is_extra(module)]
        all_lines = lines_of(of_package, modules)
        core_lines = lines_of(of_core, modules)
        rows[f"{package}: lines outside extras/, inside"] = f"{core_lines:,}, {all_lines - core_lines:,}"
    core_lines = lines_of(core, modules)
    rows["lines outside extras/, inside"] = f"{core_lines:,}, {lines_of(modules, modules) - core_lines:,}"

    imports = imports_of_extras(modules)
    rows["imports of extras by the core"] = f"{len(imports)}, from {len({name.split()[0] for name in imports})} files"

    reached = reachable(ROOTS, modules)
    rows["own files and lines that `run` and `train` can reach"] = f"{len(reached)}, {lines_of(reached, modules):,}"
    shared = {name: places for name, places in classes_by_name(modules).items() if len(places) > 1}
    rows["names of several classes"] = f"{len(shared)}"
    testable = sum(path.name != "__init__.py" for path in modules.values())
    untested = untested_modules(modules, root)
    rows["modules without a test file at the mirrored path"] = f"{len(untested)} of {testable}"
    if with_names:
        rows |= {f"  {name}": ", ".join(places) for name, places in sorted(shared.items())}
        rows |= {f"  no test: {module}": "" for module in untested}
        rows |= {f"  {arrow}": "" for arrow in imports}
    return rows


def modules_of_a_worker(root: Path) -> set[str]:
    """Return which of our modules a worker in a small training run has imported, itself or through its fork server."""
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        Path(folder, "sitecustomize.py").write_text(RECORD_IMPORTS)
        recipe = Path(folder, "small.yaml")
        recipe.write_text(SMALL)
        record = Path(folder, "imported")
        environment = os.environ | {"PYTHONPATH": folder, "RECORD_IMPORTS_TO": str(record), "OMP_NUM_THREADS": "1"}
        words = [f"run={folder}/run", "cluster.workers=1", "pretrain.steps=4", "pretrain.save_every=2"]
        words.append("pretrain.optim.schedule.warmup_steps=1")
        command = [sys.executable, "-m", "jobs", "run", str(recipe), *words]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the small training ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return set(record.read_text().splitlines())


def table(columns: dict[str, Counts], markdown: bool, more_rows: Mapping[str, str] | None = None) -> str:
    """Format one row per metric and one column per tree, as aligned text or as rows of a Markdown table.

    `more_rows` contains additional metrics for the first column only.
    """
    headings = ["", *columns]
    lines = [headings]
    for label in next(iter(columns.values())).rows():
        lines.append([label, *(counts.rows()[label] for counts in columns.values())])
    for label, number in (more_rows or {}).items():
        lines.append([label, number, *("" for _ in range(len(columns) - 1))])
    if markdown:
        lines.insert(1, ["---", *("--:" for _ in columns)])
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join(f"{cells[0]:42}" + "".join(f"{cell:>24}" for cell in cells[1:]) for cells in lines)


def main() -> None:
    """Print the metrics of the given paths, or of this checkout's packages and tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders, counted together")
    parser.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    parser.add_argument("--centre", action="store_true", help="count core and extras")
    parser.add_argument("--names", action="store_true", help="with --centre: print the counted names")
    parser.add_argument("--root", type=Path, default=ROOT, help="with --centre: another checkout")
    options = parser.parse_args()
    if options.centre:
        rows = centre_rows(options.root.resolve(), options.names)
        modules = modules_in(options.root.resolve())
        loaded = modules_of_a_worker(options.root.resolve()) & modules.keys()
        rows["own modules and lines that a training worker loads"] = f"{len(loaded)}, {lines_of(loaded, modules):,}"
        for label, number in rows.items():
            print(f"| {label} | {number} |" if options.markdown else f"{number:>16}  {label}")
        return
    if options.paths:
        columns = {"paths": count(options.paths)}
        more_rows = {}
    else:
        columns = {"packages": count(ROOT / name for name in PACKAGES), "tests": count([ROOT / "tests"])}
        more_rows = {"own files imported to train": f"{own_files_imported_to_train()}"}
    print(table(columns, options.markdown, more_rows))


if __name__ == "__main__":
    main()
