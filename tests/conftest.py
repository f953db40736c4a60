"""Tiny shards and a tiny campaign that several test files share; at the end, how long each area took."""

import os
import socketserver
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# Ray reads both variables at its import. Tests of one process start, join and leave clusters of either kind: for all of
# them it stays on the loopback, and sends a token. The processes that tests start see neither.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    patch.setenv("RAY_AUTH_MODE", "token")
    import ray  # noqa: F401

    # Where several processes share the tests, each computes with one thread: threads that wait for one another for a
    # core burn it meanwhile. Torch and numpy read this when they are imported, and processes that tests start do not.
    if "PYTEST_XDIST_WORKER" in os.environ:
        patch.setenv("OMP_NUM_THREADS", "1")
        import torch  # noqa: F401

# Hundreds of short runs would each draw charts; the tests of the page take this back.
os.environ["PATCHLINE_REPORT"] = "off"

from tests.support.recipes import TINY
from tests.support.shards import digits, write_set

# Shutting down a server waits for its current poll to end, by default half a second. Tests stop hundreds of servers:
# ours, and those of the libraries that imitate object stores.
socketserver.BaseServer.serve_forever.__defaults__ = (0.02,)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the digits at 16 px in shards of 100; read-only."""
    folder = tmp_path_factory.mktemp("shards")
    for name in ("train", "test"):
        write_set(digits(train=name == "train", image_size=16), folder / name, name=name, shard_samples=100)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, shards: Path) -> Path:
    """Write the recipe of a campaign with all stages that takes seconds; its run directory is in the same folder."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.format(run=tmp_path / "run", shards=shards))
    return path


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is traced to learn what memory it needs, which takes ten seconds: every step needs 1 GiB and its images.

    tests/test_pipeline/extras/plan/test_memory.py, which is about that, has a fixture of this name that changes
    nothing.
    """
    # Not at the top: the tests of the core must run without this extra.
    if not (Path(__file__).parents[1] / "pipeline" / "extras" / "plan").exists():
        return
    from pipeline.extras.plan.memory_traces import MemoryTrace, Moment

    moment = Moment("backward", (2.0**30, *[0.0] * 4), (0.0, *[2.0**20] * 4))
    trace = MemoryTrace(2**30, (moment,), (moment,))
    monkeypatch.setattr("pipeline.extras.plan.memory.trace_of", lambda step, report: trace)


@pytest.fixture(autouse=True)
def no_typed_recipe() -> None:
    """Forget the recipe that an earlier test loaded: messages name it instead of RECIPE."""
    terminal = sys.modules.get("jobs.terminal")
    if terminal is not None:
        terminal.typed_recipe.clear()


@pytest.fixture(scope="session")
def timm() -> Any:
    import timm  # not at the top: with torchvision it takes two seconds, and few tests need it

    return timm


@pytest.fixture(scope="session")
def transformers() -> Any:
    import transformers

    return transformers


# The files that take longest, longest first. If one of them came last, the other processes would wait for it.
LONG_FILES = (
    "test_checkpoint_runs.py",
    "test_worker_group.py",
    "test_submission.py",
    "test_replays.py",
    "test_resume.py",
    "test_cache.py",
    "test_ray_nodes.py",
    "test_scripting.py",
    "test_campaign.py",
    "test_other_instructions.py",
    "test_new.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; the order within a file stays."""
    place = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where torch sees none."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # not at the top: many tests need none of it

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch.cuda.is_available() is False here; on a GPU machine: make gpu")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the time of each area, and with -vv of each file; setups, calls and teardowns are summed."""
    seconds_of_file: Counter[str] = Counter()
    seconds_of_area: Counter[str] = Counter()  # tests/test_data/… is "data"; files outside folders test whole runs
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                path = Path(report.nodeid.partition("::")[0])
                folder = path.parts[1] if len(path.parts) > 2 else "whole runs"
                seconds_of_file[path.name] += report.duration
                seconds_of_area[folder.removeprefix("test_")] += report.duration
    if len(seconds_of_file) < 2:  # one file's time is in the closing line
        return

    terminalreporter.section("time by area")
    for area, seconds in sorted(seconds_of_area.items()):
        terminalreporter.write_line(f"{area:12} {seconds:7.1f} s")
    if terminalreporter.verbosity > 0:
        for file, seconds in seconds_of_file.most_common():
            terminalreporter.write_line(f"    {file:32} {seconds:7.1f} s")
