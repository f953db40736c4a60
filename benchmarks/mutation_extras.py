"""Mutation testing of the extras: draw random small faults in the `extras/` folders, and run the tests against each.

    python -m benchmarks.mutation_extras draw --out FOLDER [--seed 41] [--count 200] [PREFIX ...]   # mutants.json
    nice python -m benchmarks.mutation_extras run --out FOLDER [PREFIX ...]    # results.json; resumes if interrupted

1. `draw` finds every place that an operator can change: a comparison, an arithmetic operator, a number, a Boolean, a
   condition, a returned value, or a statement that can be dropped. It draws places with a printed seed, and one mutant
   of each. PREFIX restricts the files.
2. `run` applies one mutant at a time to a copy of the repository, and runs the test files of the module: the mirrored
   file first, then those that import the module, then those of the same folder, up to a limit of seconds.
3. Tests that fail without a mutant are excluded and printed, because they would kill every mutant.

benchmarks/mutation.py tests other modules with cosmic-ray and line coverage. docs/design/tests.md has the results.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutation import ROOT, Chosen, copy_of_the_repository, import_what_takes_long, in_a_fork

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
}
DROPPED = (ast.Expr, ast.AugAssign, ast.Continue, ast.Break, ast.Raise)
SECONDS_OF_TESTS = 150.0  # a mutant runs the tests of its module up to this time, as measured without it
TEST_TIMEOUT_S = 120


def changed(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield the replacements of a node; None drops a statement."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new.ops = [COMPARISONS[type(node.ops[0])]()]
        yield new
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        new.op = ARITHMETIC[type(node.op)]()
        yield new
    elif isinstance(node, ast.BoolOp):
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield new.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value / 2 if isinstance(node.value, float) else node.value - 1)
    elif isinstance(node, ast.Return) and node.value is not None and not is_constant(node.value, None):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, DROPPED) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield None


def is_constant(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def places_of(path: str) -> list[tuple[ast.AST, list[ast.AST | None]]]:
    """Return the nodes of a file that can be mutated, outside annotations and f-strings, with their replacements."""
    skipped: set[int] = set()
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        parts = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.JoinedStr):
            parts.append(node)
        for part in parts:
            if part is not None:
                skipped |= {id(child) for child in ast.walk(part)}
    places: list[tuple[ast.AST, list[ast.AST | None]]] = []
    for node in ast.walk(tree):
        replacements = [] if id(node) in skipped else list(changed(node))
        if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
            places.append((node.test, [ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))]))
        if replacements:
            places.append((node, replacements))
    return places


def mutated(path: str, node: Any, replacement: ast.AST | None) -> tuple[str, str]:
    """Return the text of the file with the node replaced, and the text of the replacement."""
    lines = (ROOT / path).read_text().encode().splitlines(keepends=True)
    first = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    last = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    text = "pass" if replacement is None else ast.unparse(ast.fix_missing_locations(replacement))
    if isinstance(replacement, ast.expr):
        text = f"({text})"
    whole = b"".join(lines)
    result = (whole[:first] + text.encode() + whole[last:]).decode()
    ast.parse(result)
    return result, text


def draw(folder: Path, seed: int, count: int, prefixes: list[str]) -> None:
    paths = []
    for file in sorted(ROOT.glob("*/extras/**/*.py")):
        name = str(file.relative_to(ROOT))
        if not prefixes or name.startswith(tuple(prefixes)):
            paths.append(name)
    places = [(path, node, replacements) for path in paths for node, replacements in places_of(path)]
    generator = random.Random(seed)
    generator.shuffle(places)
    (folder / "texts").mkdir(exist_ok=True)
    drawn: list[dict[str, Any]] = []
    for path, node, replacements in places:
        if len(drawn) == count:
            break
        text, after = mutated(path, node, generator.choice(replacements))
        (folder / "texts" / f"{len(drawn)}.py").write_text(text)
        line = node.lineno  # type: ignore[attr-defined]
        before = (ROOT / path).read_text().splitlines()[line - 1].strip()
        drawn.append({"number": len(drawn), "path": path, "line": line, "before": before, "after": after})
    (folder / "mutants.json").write_text(json.dumps(drawn, indent=1))
    print(f"seed {seed}: {len(drawn)} mutants of {len(places)} places in {len(paths)} files")


def test_files_of(path: str) -> list[str]:
    """Return the test files of a module: the mirrored file, files that import it, and files in the same folder."""
    package, *folders, name = Path(path).parts
    mirrored = Path("tests", f"test_{package}", *folders, f"test_{name}")
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    parent, _, last = module.rpartition(".")
    files = [str(mirrored)] if (ROOT / mirrored).exists() else []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        text = test.read_text()
        if module in text or f"from {parent} import {last}" in text:
            files.append(str(test.relative_to(ROOT)))
    files += sorted(str(test.relative_to(ROOT)) for test in (ROOT / mirrored.parent).glob("test_*.py"))
    return list(dict.fromkeys(files))


def baseline_of(file: str, repository: Path, folder: Path) -> dict[str, Any]:
    """Return the seconds of a test file and its failing tests without a mutant, measured once."""
    path = folder / "baseline.json"
    measured: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if file not in measured:

        def run_file() -> list[str]:
            plugin = Chosen([])
            plugin.pytest_collection_modifyitems = lambda items: None  # type: ignore[method-assign, misc, assignment]
            pytest.main(["-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}", file], plugins=[plugin])
            return plugin.all_failed

        start = time.monotonic()
        failed = in_a_fork(repository, run_file, 600)
        seconds = time.monotonic() - start if failed is not None else 1e9
        measured[file] = {"seconds": seconds, "failed": failed or []}
        path.write_text(json.dumps(measured, indent=1))
        if failed or failed is None:
            print(f"excluded, because they fail without a mutant: {failed or file}", flush=True)
    result: dict[str, Any] = measured[file]
    return result


def run(folder: Path, prefixes: list[str]) -> None:
    os.environ.setdefault("PYTHONPATH", "")
    repository = copy_of_the_repository(folder)
    import_what_takes_long()
    results_path = folder / "results.json"
    results: dict[str, Any] = json.loads(results_path.read_text()) if results_path.exists() else {}
    mutants = json.loads((folder / "mutants.json").read_text())
    for mutant in sorted(mutants, key=lambda mutant: mutant["path"]):
        number = str(mutant["number"])
        if number in results or (prefixes and not mutant["path"].startswith(tuple(prefixes))):
            continue
        files: list[str] = []
        excluded: list[str] = []
        planned_s = 0.0
        for file in test_files_of(mutant["path"]):
            baseline = baseline_of(file, repository, folder)
            if not files or planned_s + baseline["seconds"] < SECONDS_OF_TESTS:
                files.append(file)
                excluded += baseline["failed"]
                planned_s += baseline["seconds"]
        # Pytest would fail without running a test, which would count as a kill.
        missing = [file for file in files if not (repository / file).exists()]
        if missing:
            raise FileNotFoundError(f"{', '.join(missing)} are missing in {repository}\n  delete it to copy it again")
        target = repository / mutant["path"]
        original = target.read_text()
        target.write_text((folder / "texts" / f"{number}.py").read_text())
        # Python compares compiled files by whole seconds and size, which two mutants can share.
        os.utime(target, (0, 1_000_000_000 + 2 * mutant["number"]))

        def run_tests(files: list[str] = files, excluded: list[str] = excluded) -> str:
            plugin = Chosen([])
            plugin.pytest_collection_modifyitems = lambda items: None  # type: ignore[method-assign, misc, assignment]
            options = ["-x", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
            code = pytest.main([*options, *(f"--deselect={test}" for test in excluded), *files], plugins=[plugin])
            return plugin.failed or ("" if code in (0, 5) else f"pytest ended with {int(code)}")

        start = time.monotonic()
        failed = in_a_fork(repository, run_tests, 90 + 4 * planned_s) if files else ""
        target.write_text(original)
        os.utime(target, (0, 1_000_000_001 + 2 * mutant["number"]))
        failed = "hang" if failed is None else failed
        results[number] = {"failed": failed, "files": files, "seconds": time.monotonic() - start}
        results_path.write_text(json.dumps(results, indent=1))
        state = f"killed by {failed}" if failed else f"SURVIVED {len(files)} test files"
        print(
            f"{number:>4} {mutant['path']}:{mutant['line']}  {mutant['before']}  ->  {mutant['after']}\n     {state}, "
            f"{results[number]['seconds']:.0f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["draw", "run"])
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX", help="beginnings of the paths of the files to mutate")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--count", type=int, default=200)
    arguments = parser.parse_intermixed_args()
    folder = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.command == "draw":
        draw(folder, arguments.seed, arguments.count, arguments.prefixes)
    else:
        run(folder, arguments.prefixes)


if __name__ == "__main__":
    main()
