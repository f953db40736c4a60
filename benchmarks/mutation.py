"""Mutation testing: draw random small faults ("mutants") of our code, and run the tests against each.

    pip install --target EXTRA --no-deps cosmic-ray parso stevedore attrs coverage
    PYTHONPATH=EXTRA python -m benchmarks.mutation draw --out FOLDER      # mutants.json, from the seed
    PYTHONPATH=EXTRA python -m benchmarks.mutation measure --out FOLDER   # tests.json: seconds and lines of every test
    PYTHONPATH=EXTRA python -m benchmarks.mutation run --out FOLDER       # results.json; resumes after an interruption

cosmic-ray creates the mutants. The benchmark first draws a place in the code and then one of its mutants; otherwise,
the eleven replacements of one `-` would dominate. Annotations and equivalent programs are excluded. A mutant is applied
to a copy of the repository, so that the workers of a test use it too. The tests that cover its line run against it,
fastest first, until one fails. Coverage does not see lines that only workers run: `WORKER_TESTS` lists the tests for
these, and the mirrored test file of the module always runs. docs/design/tests.md contains the results.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[1]
AGENT = tuple(f"jobs/cluster/{name}.py" for name in ("agent", "supervisor", "worker_group", "worker", "failure"))
SCOPE: tuple[tuple[tuple[str, ...], int], ...] = (  # (patterns of modules, number of mutants to draw from them)
    (("pipeline/evaluation/*.py",), 60),
    (("data/**/*.py",), 100),
    (AGENT, 40),
)
SEED = 23
TEST_TIMEOUT_S = 120
PRELOADED = (
    *("torch", "torch._dynamo", "torch.utils.tensorboard", "deepspeed", "ray", "pyarrow.parquet", "cv2"),
    *("webdataset", "omegaconf", "fsspec", "rich", "typer", "hypothesis", "matplotlib.pyplot"),
    *("PIL.Image", "safetensors.torch", "jinja2", "xxhash", "scipy.stats", "sklearn.linear_model", "sklearn.datasets"),
)

# Tests that run modules in separate processes, which coverage does not see; prefixes of names.
RUNS = "tests/test_checkpoint_runs.py::test_"
ENGINE = "tests/test_pipeline/engine/test_engine.py"
TWIN = "tests/test_twin.py"
SHORT = ("tests/test_short_ways.py", "tests/test_pipeline/test_train.py")
STOPS = (
    f"{RUNS}stop_",
    f"{RUNS}a_signal",
    f"{RUNS}failed_evaluation",
    f"{RUNS}a_stage_does_not_end",
)
SAVES = (f"{RUNS}failed_saves", f"{RUNS}all_ranks_agree", f"{RUNS}too_many_failed", f"{RUNS}a_commit_implies")
OF_CHECKPOINTS = "tests/test_pipeline/checkpoints"
OF_FILES = tuple(f"{OF_CHECKPOINTS}/test_{name}.py" for name in ("stage_checkpoints", "manifest", "restore", "crash"))
CHECKPOINTS = (*SHORT, *OF_FILES, *SAVES)
GOES_BACK = (f"{RUNS}a_stretch", f"{RUNS}run_ends_with_70_if_rolling_back", f"{RUNS}workers_killed")
CAMPAIGN = ("tests/test_jobs/recipe/test_campaign.py::test_a_second_run_skips_all_finished_stages",)
GROUP = "tests/test_jobs/cluster/test_worker_group.py"
WORKER_TESTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(AGENT, (GROUP,)),
    "data/decoder.py": ("tests/test_data/test_loader.py", "tests/test_data/remote"),
    "data/evaluation.py": ("tests/test_data/test_loader.py",),
    "pipeline/batches.py": (*STOPS, *GOES_BACK, *SHORT, TWIN),
    "pipeline/engine/engine.py": (
        ENGINE,
        *SHORT,
        TWIN,
    ),
    "pipeline/engine/exact.py": ("tests/test_pipeline/engine/test_exact.py",),
    "pipeline/start.py": (*STOPS, *GOES_BACK, *SHORT, *CAMPAIGN),
    "pipeline/train.py": (*STOPS, *SAVES, *GOES_BACK, *SHORT, *CAMPAIGN, TWIN),
    "pipeline/health.py": (*GOES_BACK, *SHORT),
    "pipeline/checkpoints/reader.py": GOES_BACK,
    "pipeline/checkpoints/stage_checkpoints.py": CHECKPOINTS,
    "pipeline/checkpoints/saver.py": (*CHECKPOINTS, f"{OF_CHECKPOINTS}/test_disk_space.py"),
    "pipeline/evaluation/in_training.py": (*SHORT, f"{RUNS}failed_evaluation", *CAMPAIGN, TWIN),
    "pipeline/evaluation/evaluator.py": (*STOPS, *SHORT, *CAMPAIGN),
    "pipeline/evaluation/probes.py": (*CAMPAIGN, "tests/test_layout.py::test_a_config_cannot_be_changed"),
    "pipeline/artifacts.py": ("tests/test_pipeline/test_artifacts.py",),
    "pipeline/monitoring/telemetry.py": (
        *SHORT,
        f"{RUNS}a_commit_implies",
        f"{RUNS}unwritable_log",
        f"{RUNS}the_time_of_a_run",
        *CAMPAIGN,
    ),
    "pipeline/monitoring/watchdog.py": (f"{RUNS}hung_run", f"{RUNS}incident_names_the_worker_out_of_memory"),
    "pipeline/optimization.py": (
        ENGINE,
        *SHORT,
        TWIN,
    ),
    "pipeline/engine/deepspeed.py": (
        ENGINE,
        *SHORT,
        TWIN,
    ),
}


@dataclass(frozen=True)
class Mutant:
    number: int
    path: str
    line: int
    operator: str
    occurrence: int
    before: str  # the original line
    after: str  # the replacement lines


# drawing


def annotation_places(tree: ast.AST) -> set[tuple[int, int]]:
    """Return (line, column) of all nodes in type annotations, which are not executed."""
    places = set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            annotation = getattr(node, name, None)
            if annotation is None:
                continue
            for line in range(annotation.lineno, annotation.end_lineno + 1):
                first = annotation.col_offset if line == annotation.lineno else 0
                last = annotation.end_col_offset if line == annotation.end_lineno else 200
                places |= {(line, column) for column in range(first, last)}
    return places


def mutants_of(path: str) -> dict[tuple[Any, str], list[Mutant]]:
    """Return all mutants of a file, not yet numbered, keyed by place and kind of change."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    source = (ROOT / path).read_text()
    tree = ast.parse(source)
    unread = annotation_places(tree)
    by_place: dict[tuple[Any, str], list[Mutant]] = {}
    nodes = list(ast_nodes(get_ast(source)))
    provider = OperatorProvider()
    for name in provider:
        if provider[name].arguments():  # skip the two that replace variables by guesses
            continue
        operator = provider[name]()
        occurrence = -1
        for node in nodes:
            for start, end in operator.mutation_positions(node):
                occurrence += 1
                if start in unread:
                    continue
                kind = name.split("_")[0]
                by_place.setdefault(((start, end), kind), []).append(
                    Mutant(0, path, start[0], name, occurrence, source.splitlines()[start[0] - 1].strip(), "")
                )
    return by_place


def mutated(mutant: Mutant) -> str | None:
    """Return the file's text with the mutant, or None if it is invalid or equivalent."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider

    source = (ROOT / mutant.path).read_text()
    try:
        text = mutate_code(source, OperatorProvider()[mutant.operator](), mutant.occurrence)
        if text is None:
            return None
        tree = ast.parse(text)
    except (AttributeError, SyntaxError):  # cosmic-ray 8.7 cannot replace `except package.Error`
        return None
    return None if ast.dump(tree) == ast.dump(ast.parse(source)) else text


def changed_lines(source: str, text: str) -> str:
    old = source.splitlines()
    new = text.splitlines()
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return " / ".join(line.strip() for line in new)


def draw(folder: Path, seed: int) -> None:
    (folder / "texts").mkdir(exist_ok=True)
    drawn: list[dict[str, Any]] = []
    for patterns, wanted in SCOPE:
        paths = sorted({str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)})
        places = [(path, place, mutants) for path in paths for place, mutants in mutants_of(path).items()]
        places.sort(key=lambda row: (row[0], str(row[1])))
        generator = random.Random(f"{seed} {patterns}")
        generator.shuffle(places)
        made = 0
        for path, _, mutants in places:
            if made == wanted:
                break
            mutant = generator.choice(mutants)
            text = mutated(mutant)
            if text is None:
                continue
            made += 1
            (folder / "texts" / f"{len(drawn)}.py").write_text(text)
            after = changed_lines((ROOT / path).read_text(), text)
            drawn.append(vars(mutant) | {"number": len(drawn), "after": after})
        count = sum(len(mutants) for _, _, mutants in places)
        print(f"{' '.join(patterns)}: {count} mutants at {len(places)} places of {len(paths)} files, {made} drawn")
    (folder / "mutants.json").write_text(json.dumps(drawn, indent=1))


# running tests in a fork of this process, which has already imported the slow packages


class Measuring:
    """pytest plugin that records the seconds of each test, and the lines in scope that this process has covered."""

    def __init__(self, copy: Path) -> None:
        import coverage

        ours = [f"{copy}/{package}/*" for package in ("data", "pipeline", "jobs")]
        self.coverage = coverage.Coverage(data_file=None, include=ours)
        self.copy = copy
        self.seconds: dict[str, float] = {}
        self.not_passed: set[str] = set()
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        start = time.monotonic()
        yield
        self.seconds[item.nodeid] = time.monotonic() - start
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.not_passed.add(report.nodeid)

    def measured(self) -> dict[str, Any]:
        self.coverage.stop()
        data = self.coverage.get_data()
        tests: dict[str, Any] = {}
        for test, seconds in self.seconds.items():
            if test not in self.not_passed:
                tests[test] = {"seconds": seconds, "lines": {}}
        for path in data.measured_files():
            name = str(Path(path).relative_to(self.copy))
            for line, contexts in data.contexts_by_lineno(path).items():
                for test in contexts:
                    if test in tests:
                        tests[test]["lines"].setdefault(name, []).append(line)
        return tests


class Chosen:
    """pytest plugin that runs the given tests in order, and records the first failure."""

    def __init__(self, tests: list[str]) -> None:
        self.place = {test: place for place, test in enumerate(tests)}
        self.failed = ""
        self.all_failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message.splitlines()[0] if crash and crash.message else ""
            self.failed = self.failed or f"{report.nodeid}: {reason}"
            self.all_failed.append(report.nodeid)


def files_of(tests: list[str]) -> list[str]:
    return sorted({test.partition("::")[0] for test in tests})


def in_a_fork(copy: Path, work: Any, limit_s: float) -> Any:
    """Run `work()` in a forked child in the copy's folder, and return its result, or None after the time limit.

    All processes marked as the child's are killed, so that a hung worker does not block the benchmark.
    """
    scratch = copy.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.environ |= {"MUTATION_RUN": mark, "TMPDIR": str(scratch), "PYTHONPATH": f"{copy}:{os.environ['PYTHONPATH']}"}
        os.chdir(copy)
        sys.path[0] = str(copy)
        log = os.open(copy.parent / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            (scratch / "answer.json").write_text(json.dumps(work()))
        finally:
            sys.stdout.flush()
            os._exit(0)
    end = time.monotonic() + limit_s
    while time.monotonic() < end and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.02)
    answer = scratch / "answer.json"
    result = json.loads(answer.read_text()) if answer.exists() else None
    for process in psutil.process_iter():
        try:
            if process.environ().get("MUTATION_RUN") == mark:
                process.kill()
        except psutil.Error:
            continue
    if result is None:
        with contextlib.suppress(ChildProcessError):  # the child has already ended without a result
            os.waitpid(child, 0)
    return result


def copy_of_the_repository(folder: Path) -> Path:
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=skipped, symlinks=True)
    (copy / ".venv").symlink_to(Path(sys.prefix))
    # Tests expect the original's arrays next to the checkout, and are skipped without them.
    shared = folder / "shared"
    if (ROOT.parent / "shared").exists() and not shared.exists():
        shared.symlink_to(ROOT.parent / "shared")
    return copy


def import_what_takes_long() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in PRELOADED:
        importlib.import_module(name)


def measure(folder: Path, files: list[str]) -> None:
    """Write tests.json, skipping test files that it already contains."""
    copy = copy_of_the_repository(folder)
    import_what_takes_long()
    path = folder / "tests.json"
    tests: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for file in files:
        if file in files_of(list(tests)):
            continue

        def run_file(file: str = file) -> dict[str, Any]:
            plugin = Measuring(copy)
            pytest.main(["-p", "no:cacheprovider", file], plugins=[plugin])
            return plugin.measured()

        measured = in_a_fork(copy, run_file, 600) or {}
        tests |= measured
        path.write_text(json.dumps(tests))
        print(
            f"{file:40} {len(measured):4} tests {sum(test['seconds'] for test in measured.values()):7.1f} s", flush=True
        )


def is_in_a_function(mutant: Mutant) -> bool:
    for node in ast.walk(ast.parse((ROOT / mutant.path).read_text())):
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= mutant.line <= (node.end_lineno or 0):
            return True
    return False


def tests_for(mutant: Mutant, tests: dict[str, Any], seconds_a_mutant: float) -> list[str]:
    """Return the tests that cover a mutant's line, fastest first, then the worker tests of its module."""
    reaching = {}
    touching = {}
    for test, measured in tests.items():
        lines = measured["lines"].get(mutant.path, [])
        if mutant.line in lines:
            reaching[test] = measured["seconds"]
        elif lines:
            touching[test] = measured["seconds"]
    # A line that runs at import is covered only by the first importing test, but matters to all of them.
    seconds_of = reaching if is_in_a_function(mutant) else reaching | touching
    chosen = sorted(seconds_of, key=lambda test: seconds_of[test])
    # Keep the tests of a file together, because they may share workers.
    package, *folders, name = Path(mutant.path).parts
    its_own = "/".join(("tests", f"test_{package}", *folders, f"test_{name}"))
    for test in (its_own, *WORKER_TESTS.get(mutant.path, ())):
        chosen += [name for name in tests if name.startswith(test) and name not in chosen]
    kept = []
    seconds = 0.0
    for test in chosen:
        seconds += tests[test]["seconds"]
        if seconds < seconds_a_mutant:
            kept.append(test)
    return kept


def run(folder: Path, paths: list[str], seconds_a_mutant: float) -> None:
    """Write results.json: the test that failed for each mutant, "" if no test failed, or "hang" after a timeout."""
    copy = copy_of_the_repository(folder)
    import_what_takes_long()
    mutants = [Mutant(**row) for row in json.loads((folder / "mutants.json").read_text())]
    tests = json.loads((folder / "tests.json").read_text())
    results_path = folder / "results.json"
    results: dict[str, Any] = json.loads(results_path.read_text()) if results_path.exists() else {}
    for mutant in mutants:
        earlier = results.get(str(mutant.number), {"failed": "", "budget": 0.0})
        if earlier["failed"] or earlier["budget"] >= seconds_a_mutant or (paths and mutant.path not in paths):
            continue
        chosen = tests_for(mutant, tests, seconds_a_mutant)
        target = copy / mutant.path
        original = target.read_text()
        target.write_text((folder / "texts" / f"{mutant.number}.py").read_text())
        # Compiled files are matched by size and mtime in whole seconds, which two mutants may share: set the mtime.
        os.utime(target, (0, 1_000_000_000 + 2 * mutant.number))

        def run_tests(chosen: list[str] = chosen) -> str:
            plugin = Chosen(chosen)
            options = ["-x", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
            code = pytest.main([*options, *files_of(chosen)], plugins=[plugin])
            return plugin.failed or ("" if code in (0, 5) else f"pytest ended with {int(code)}")

        start = time.monotonic()
        limit = 60 + 4 * sum(tests[test]["seconds"] for test in chosen)
        failed = in_a_fork(copy, run_tests, limit) if chosen else ""
        target.write_text(original)
        os.utime(target, (0, 1_000_000_001 + 2 * mutant.number))
        failed = "hang" if failed is None else failed
        seconds = time.monotonic() - start
        results[str(mutant.number)] = {
            "failed": failed,
            "tests": len(chosen),
            "budget": seconds_a_mutant,
            "seconds": seconds,
        }
        results_path.write_text(json.dumps(results, indent=1))
        state = f"killed by {failed}" if failed else f"SURVIVED {len(chosen)} tests"
        print(
            f"{mutant.number:4} {mutant.path}:{mutant.line}  {mutant.after}\n     {state}, {seconds:.0f} s", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["draw", "measure", "run"])
    parser.add_argument("names", nargs="*", help="test files to measure; modules whose mutants to run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="seconds of tests per mutant, as measured without it"
    )
    arguments = parser.parse_intermixed_args()
    folder = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.command == "draw":
        draw(folder, SEED)
    elif arguments.command == "measure":
        every_file = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
        measure(folder, arguments.names or every_file)
    else:
        run(folder, arguments.names, arguments.seconds)


if __name__ == "__main__":
    main()
