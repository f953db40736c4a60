"""Crashes, failing calls and power cuts at every file system call of a save, a prune and a claim."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from data.errors import CheckpointError
from data.storage import Folder
from pipeline.checkpoints.manifest import committed, newest_attempt
from pipeline.checkpoints.reader import verify
from tests.support.faulty import FAIL, FAIL_FROM, KILL, TEAR
from tests.support.powercut import Recording, build
from tests.support.savers import start_from

ROOT = Path(__file__).parents[3]
SEED = int(os.environ.get("FAULT_SEED", "20261120"))


@pytest.fixture(scope="module")
def recorded(request) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder with the trace, and the state left by every interrupted run."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler for the shim between Python and its file system calls")
    memory = Path("/dev/shm")  # fsync is free there, and the simulation models its effect
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    request.addfinalizer(lambda: shutil.rmtree(folder))
    shim = folder / "faults.so"
    source = ROOT / "tests" / "support" / "faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", shim, source, "-ldl"], check=True)
    subprocess.run(
        [sys.executable, "-m", "tests.support.faulty", folder, folder / "outcomes"],
        env={**os.environ, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=True,
    )
    return folder, [json.loads(line) for line in (folder / "outcomes").read_text().splitlines()]


def newest_saved(outcome: dict[str, Any]) -> int:
    return max([30] + [value for kind, value in outcome["reports"] if kind == "saved"])


def check(outcome: dict[str, Any]) -> None:
    """Check that a state can be loaded, lost no reported checkpoint, has no partial set and keeps the attempt."""
    assert outcome["loads"] in (30, 40, 50), outcome
    assert outcome["loads"] >= newest_saved(outcome), outcome
    assert not outcome["complaints"], outcome
    assert outcome["attempt"] >= dict(outcome["reports"]).get("attempt", 1), outcome


def test_crash_at_any_call_loses_no_reported_checkpoint(recorded) -> None:
    crashes = [o for o in recorded[1] if o["how"] == KILL and o["killed"]]
    for outcome in crashes:
        check(outcome)
    calls = len(Recording(*paths(recorded[0])).lines)
    assert [o["at"] for o in crashes] == list(range(1, calls + 1)), "a call was not reached"
    assert calls > 50
    print(f"{calls} of {calls} crash points loadable")


def test_crash_during_any_write_loses_no_reported_checkpoint(recorded) -> None:
    torn = [o for o in recorded[1] if o["how"] == TEAR and o["killed"]]
    for outcome in torn:
        check(outcome)
    assert len(torn) == 7  # the claim, and the two files and the manifest of each save
    print(f"{len(torn)} of {len(torn)} torn writes loadable")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_failing_call_keeps_the_previous_checkpoint_and_training_continues(recorded, error) -> None:
    failures = [o for o in recorded[1] if o["error"] == error]
    for outcome in failures:
        check(outcome)
        said = outcome["reports"]
        assert not outcome["killed"], outcome
        assert not [value for kind, value in said if kind == "raised"], outcome
        kinds = dict(said)
        told = sum(kind in ("failed", "no-start", "not-pruned") for kind, _ in said)
        finished = "no-start" in kinds or sum(kind in ("saved", "failed") for kind, _ in said) == 2
        assert finished, outcome
        assert told <= (1 if outcome["how"] == FAIL else 4), outcome
        if outcome["how"] == FAIL and "no-start" not in kinds and kinds.get("saved") != 50:
            assert said[-2][0] == "failed" or "failed" in kinds, outcome
    assert len(failures) > 50
    unsaved = [o for o in failures if o["how"] == FAIL_FROM and "ready" in dict(o["reports"]) and o["loads"] == 30]
    assert len(unsaved) > 5 or error == errno.EIO  # the disk was full before the first save was complete
    assert all(os.strerror(error) in str(dict(o["reports"])["failed"]) for o in unsaved)
    print(f"{len(failures)} failing calls of {errno.errorcode[error]}: nothing lost")


def paths(folder: Path) -> tuple[Path, Path, str]:
    return folder / "base", folder / "trace", str(folder / "traced")


@pytest.mark.parametrize("states", [2_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_power_cut_loses_no_reported_checkpoint(states, recorded, tmp_path) -> None:
    recording, rng = Recording(*paths(recorded[0])), random.Random(SEED)
    (tmp_path / "store").mkdir()
    seen = set()
    for number in range(states):
        after = rng.randrange(len(recording.lines) + 1)
        known = dict(what[1:] for what in recording.acknowledged if what[0] <= after)
        state = recording.cut(after, rng)
        mark = (tuple(sorted(state.items())), tuple(known.items()))
        if mark in seen:
            continue
        seen.add(mark)
        said = restart(state, tmp_path, known)
        assert not said, f"state {number}, cut after call {after}, FAULT_SEED={SEED}: {said}"
    assert len(seen) > 100
    print(f"{states} power cuts in {len(recording.lines)} calls, {len(seen)} different states, seed {SEED}: none lost")


def restart(state: dict[str, bytes | None], folder: Path, known: dict[str, int]) -> list[str]:
    """Start from a state after `known` was reported; return what is wrong with it, "" if nothing."""
    run = folder / "run"
    build(state, run, folder / "store")
    said: list[str] = []
    try:
        found = start_from(run / "stage" / "checkpoints", 99, said.append)
        if found is None or found.manifest.step < max(30, known.get("saved", 0)):
            said.append(f"loads {found}, acknowledged was {known}")
        if newest_attempt(Folder(run)) < known.get("attempt", 1):
            said.append(f"attempt {newest_attempt(Folder(run))}, acknowledged was {known}")
        for step in committed(run / "stage" / "checkpoints"):  # the older ones must stay valid too
            verify(step)
    except (CheckpointError, OSError) as error:
        said.append(str(error))
    shutil.rmtree(run)
    return said


def test_simulated_power_cut_detects_missing_fsyncs(recorded, tmp_path) -> None:
    """Check the simulation itself: the same run without its fsyncs loses reported checkpoints."""
    recording, rng = Recording(*paths(recorded[0])), random.Random(SEED)
    for operation in (operation for line in recording.lines for operation in line):
        operation.durable = 1 << 30
    (tmp_path / "store").mkdir()
    calls = len(recording.lines)
    lost = sum(bool(restart(recording.cut(calls, rng), tmp_path, {"saved": 50, "attempt": 2})) for _ in range(50))
    assert lost > 25
