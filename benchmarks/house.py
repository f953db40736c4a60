"""Counts how plain a tree of Python files is; docs/design/house.md says what each number is for.

    python -m benchmarks.house                       # the four packages, and the tests apart
    python -m benchmarks.house --markdown            # the same as rows of the table in docs/design/house.md
    python -m benchmarks.house OTHER/src OTHER/x.py  # any Python tree; the paths are counted together
    python -m benchmarks.house --centre              # core and extras, what reaches what, and what has no test
    python -m benchmarks.house --centre --names      # the same, with every class name and module that is counted

All rates are per 1,000 lines that are not blank. What each number counts is written at its field of `Counts`.
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
ROOTS = ("jobs.run.session", "pipeline.train", "jobs.cluster.ray_nodes")  # the Ray back end is imported by name
# sitecustomize.py of every process of a small training. Fork servers and their forks, the workers, write down which of
# our modules they import. The server imports nothing in advance, as on a node with GPUs: each worker imports
# what it needs.
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
VAGUE_NAMES = ("found", "one")  # names that say nothing of the value they hold
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Counts:
    """What was counted in a tree of files."""

    lines: int = 0  # that are not blank
    comment_lines: int = 0  # that hold a comment and nothing else
    comprehensions: int = 0  # of lists, sets and dicts, and generator expressions
    conditional_expressions: int = 0  # `a if b else c`
    tuple_assignments: int = 0  # both sides are written as tuples: `a, b = 1, 2`
    vague_names: Counter[str] = field(default_factory=Counter)  # assignments, loop variables and parameters
    public_signatures: int = 0  # functions of modules and classes whose names do not begin with one underscore
    signatures_with_any: int = 0  # those of them with `Any` somewhere in an annotation
    function_lengths: list[int] = field(default_factory=list)  # in lines, the signature included
    functions_returning_text: int = 0  # annotated to return a text or a list of texts, and nothing else
    file_lengths: dict[Path, int] = field(default_factory=dict)  # in lines, blank ones included
    files_in_folder: Counter[Path] = field(default_factory=Counter)  # Python files, sub-folders not included

    def per_1000(self, number: int) -> float:
        """The number as a rate per 1,000 lines that are not blank."""
        return 1000 * number / self.lines

    def rows(self) -> dict[str, str]:
        """The numbers in words, under the names of the rows in docs/design/house.md."""
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
    """The Python files among the paths and in the folders among them, those of hidden folders left out."""
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
    """Count all Python files of the paths together; raises SystemExit where there is none.

    A file that this version of Python cannot parse is named and left out.
    """
    counts = Counts()
    for file in python_files(paths):
        source = file.read_text()
        try:
            tree = ast.parse(source, str(file))
        except SyntaxError as error:
            print(f"left out: {file}: {error.msg}", file=sys.stderr)
            continue
        counts.file_lengths[file] = len(source.splitlines())
        counts.files_in_folder[file.parent] += 1
        counts.lines += sum(1 for line in source.splitlines() if line.strip())
        counts.comment_lines += count_comment_lines(source)
        count_expressions(tree, counts)
        count_signatures(tree, counts)
    if not counts.lines:
        raise SystemExit("these paths hold no line of Python")
    return counts


def count_comment_lines(source: str) -> int:
    """Lines that hold a comment alone; a number sign inside a string is none."""
    number = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        stands_alone = not token.line[: token.start[1]].strip()
        if token.type == tokenize.COMMENT and stands_alone:
            number += 1
    return number


def count_expressions(tree: ast.Module, counts: Counts) -> None:
    """Add what is counted anywhere in the file: expressions, assignments, names, lengths of functions."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            counts.comprehensions += 1
        elif isinstance(node, ast.IfExp):
            counts.conditional_expressions += 1
        elif isinstance(node, ast.Assign):
            has_tuple_target = any(isinstance(target, ast.Tuple) for target in node.targets)
            counts.tuple_assignments += has_tuple_target and isinstance(node.value, ast.Tuple)
        elif isinstance(node, Function):
            assert node.end_lineno is not None, "ast.parse gives every function its last line"
            counts.function_lengths.append(node.end_lineno - node.lineno + 1)
            counts.functions_returning_text += returns_text(node)

        # A vague name is counted where it gets its value, not at every use: a name used often is no worse.
        name = bound_name(node)
        if name in VAGUE_NAMES:
            counts.vague_names[name] += 1


def returns_text(function: Function) -> bool:
    """Whether the annotation of what is returned holds `str`, or a list of it, and no other type."""
    if function.returns is None:
        return False
    types = {node.id for node in ast.walk(function.returns) if isinstance(node, ast.Name)}
    return "str" in types and types <= {"str", "list"}


def bound_name(node: ast.AST) -> str | None:
    """The name that this node gives a value to, if it does."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    return None


def count_signatures(tree: ast.Module, counts: Counts) -> None:
    """Add the public functions of the module and of its classes, and those of them whose annotations say `Any`."""
    for function in functions_of_modules_and_classes(tree):
        is_dunder = function.name.startswith("__")
        if function.name.startswith("_") and not is_dunder:
            continue
        counts.public_signatures += 1
        counts.signatures_with_any += any(says_any(annotation) for annotation in annotations(function))


def functions_of_modules_and_classes(tree: ast.Module) -> Iterator[Function]:
    """Functions at the top of the module and methods of its classes, but no function inside another."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, Function):
                    yield member


def annotations(function: Function) -> list[ast.expr]:
    """Every annotation of a signature: parameters and the returned value."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for variadic in (arguments.vararg, arguments.kwarg):
        if variadic is not None:
            parameters.append(variadic)
    written = [parameter.annotation for parameter in parameters]
    written.append(function.returns)
    return [annotation for annotation in written if annotation is not None]


def says_any(annotation: ast.expr) -> bool:
    """Whether the annotation names `Any`, alone or inside another type."""
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


def own_files_imported_to_train() -> int:
    """Return how many files of the four packages a process has loaded that has imported the training loop."""
    # In a process of its own: this one has imported nothing of the product, and what it imports it could not forget.
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
    """Return whether a module lies in the extras of its package."""
    return module.split(".")[1:2] == ["extras"]


def imported_by(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Return our modules that a file imports anywhere in its text, inside functions and for type checkers too."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            # `from data.order import Order` imports data and data.order; Order is no module.
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                module = ".".join(parts[:length])
                if module in modules:
                    imported.add(module)
    return imported


def imports_of_extras(modules: Mapping[str, Path]) -> list[str]:
    """Return every import of an extra by the core, as "importer → extra"; a folder's modules stand for it."""
    imports = []
    for module, path in modules.items():
        if is_extra(module):
            continue
        for imported in sorted(imported_by(path, modules)):
            if is_extra(imported) and modules[imported].name != "__init__.py":
                imports.append(f"{module} → {imported}")
    return imports


def reachable(roots: Iterable[str], modules: Mapping[str, Path]) -> set[str]:
    """Return the modules that the roots import, and those that these import, and so on; the roots are among them."""
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imported_by(modules[module], modules)
    return reached


def classes_by_name(modules: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return the modules that define a class at their top level, by the name of the class."""
    places: dict[str, list[str]] = {}
    for module, path in modules.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    return places


def untested_modules(modules: Mapping[str, Path], root: Path) -> list[str]:
    """Return the modules without a test file at the mirrored path: tests/test_a/b/test_c.py for a/b/c.py.

    An `__init__.py` needs none.
    """
    untested = []
    for module, path in modules.items():
        package, *folders, name = path.relative_to(root).with_suffix("").parts
        test = root.joinpath("tests", f"test_{package}", *folders, f"test_{name}.py")
        if name != "__init__" and not test.exists():
            untested.append(module)
    return untested


def lines_of(names: Iterable[str], modules: Mapping[str, Path]) -> int:
    """Return how many lines the files of these modules have, blank ones included."""
    return sum(len(modules[name].read_text().splitlines()) for name in names)


def centre_rows(root: Path, with_names: bool) -> dict[str, str]:
    """Return how much of the product is core, what it reaches, and what is named twice or has no test of its own."""
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
    """Return our modules that a worker of a small training has imported, itself or with its fork server."""
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
    """One line a number, one column a tree; aligned text, or rows of a Markdown table.

    `more_rows` hold what was counted for the first column alone.
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
    """Print the numbers of the paths, or of this checkout's packages and tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders, counted together")
    parser.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    parser.add_argument("--centre", action="store_true", help="count core and extras")
    parser.add_argument("--names", action="store_true", help="with --centre: name what is counted")
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
