"""The lease of a run: whether its holder is alive, without comparing clocks; with real processes, killed and frozen."""

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data.errors import RunOwned
from data.storage import Folder, Storage
from jobs import ownership
from jobs.ownership import Lease, SeenLease, holder_state, newest_lease
from tests.support.leases import PERIOD_S, holders

pytestmark = pytest.mark.quick

LOST_S = ownership.LOST_PERIODS * PERIOD_S


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Start processes that hold the lease of tmp_path / "run"."""
    with holders(tmp_path) as start:
        yield start


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "PERIOD_S", PERIOD_S)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[SeenLease | None]:
    """Return a list to which every reading of the newest lease is appended."""
    reads: list[SeenLease | None] = []
    read = ownership.newest_lease

    def recorded(storage: Storage) -> SeenLease | None:
        reads.append(read(storage))
        return reads[-1]

    monkeypatch.setattr(ownership, "newest_lease", recorded)
    return reads


@pytest.mark.parametrize(
    ("machine", "blow", "state", "waits"),
    [
        ("", None, "held", False),
        ("", signal.SIGKILL, "lost", False),
        ("", signal.SIGSTOP, "lost", True),
        ("another", None, "held", True),
        ("another", signal.SIGKILL, "lost", True),
        ("another", signal.SIGSTOP, "lost", True),
    ],
)
def test_life_of_a_holder_is_known_at_once_here_and_by_watching_elsewhere(
    machine, blow, state, waits, holder, tmp_path, monkeypatch
) -> None:
    process = holder(machine)
    if blow is not None:
        os.kill(process.pid, blow)
        if blow == signal.SIGSTOP:
            time.sleep(LOST_S)
        else:
            process.join()
    reads = count_reads(monkeypatch)
    found, seen = holder_state(Folder(tmp_path / "run"), lambda text: None)
    assert found == state
    assert seen is not None
    assert f"process {process.pid} on " in seen.holder
    assert (len(reads) > 1) == waits, "a watched lease is read again and again"


def test_restarted_unit_does_not_wait_for_the_lease_of_its_last_start(tmp_path, monkeypatch) -> None:
    here = {"this_job": "unit patchline-driver@digits.service", "gethostname": "h0", "this_system": "3d12"}
    storage = Folder(tmp_path / "run")

    def be_at(**changes: str) -> None:
        for name, value in (here | changes).items():
            module = ownership if hasattr(ownership, name) else ownership.socket
            monkeypatch.setattr(module, name, lambda value=value: value)

    be_at()
    last = Lease(storage, print)
    last.record["machine"] = "the last boot of h0"
    last.take()
    # On another unit, host or system, or without a system id, a command watches the lease.
    for change in ({"this_job": "unit b"}, {"gethostname": "h1"}, {"this_system": "77ab"}, {"this_system": ""}, {}):
        be_at(**change)
        with monkeypatch.context() as patch:
            reads = count_reads(patch)
            found = holder_state(storage, print)
        assert found == ("lost", newest_lease(storage))
        assert (len(reads) > 1) == bool(change), change


def test_missing_released_and_torn_leases_are_distinguished(tmp_path) -> None:
    storage = Folder(tmp_path / "run")
    assert holder_state(storage, print) == ("free", None)
    with Lease(storage, print) as first:
        assert first.number == 1
    state, seen = holder_state(storage, print)
    assert state == "free"
    assert seen is not None
    assert seen.is_released
    with Lease(storage, print) as second:
        assert (second.number, second.previous_token) == (2, first.record["token"])
        assert sorted(storage.list("leases")) == ["leases/000002.json"], "older leases are deleted"
    (tmp_path / "run" / "leases" / "000002.json").write_text('{"token": ')
    state, seen = holder_state(storage, print)
    assert state == "lost"
    assert seen is not None
    assert "truncated or altered" in seen.holder


def test_commands_in_the_error_of_an_owned_run_can_be_typed(tmp_path) -> None:
    run = tmp_path / "my run"
    lease = Lease(Folder(run), print)
    lease.take()
    with pytest.raises(RunOwned) as error:
        Lease(Folder(run), print).take()
    _problem, commands, *_ = str(error.value).splitlines()
    for command, words in zip(commands.split("; "), (["status", str(run)], ["stop", str(run)]), strict=True):
        assert shlex.split(command.partition("jobs ")[2]) == words
    lease.renew(is_released=True)


def test_holder_that_lost_the_run_is_informed_once_and_does_not_touch_the_new_lease(tmp_path) -> None:
    said: list[str] = []
    signals: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        with Lease(Folder(tmp_path / "run"), said.append) as lost:
            new = lost.content()
            assert Folder(tmp_path / "run").create_once("leases/000002.json", new)
            lost.thread.join(60)
            assert "another command has taken over the run; this one can no longer commit" in said[-1]
            for refused in (lost.check, lost.check_at_end, lost.confirm):
                with pytest.raises(RunOwned, match=f"run is owned by process {os.getpid()} on"):
                    refused()
        assert (tmp_path / "run" / "leases" / "000002.json").read_bytes() == new
    finally:
        signal.signal(signal.SIGTERM, former)
    assert signals == [signal.SIGTERM]


def test_holder_reads_the_storage_only_after_it_was_frozen(tmp_path, monkeypatch) -> None:
    lease = Lease(Folder(tmp_path / "run"), print)
    lease.take()
    asked: list[float] = []
    monkeypatch.setattr(lease, "check", lambda: asked.append(ownership.clock()))
    monkeypatch.setattr(ownership, "clock", lambda: now)
    now = lease.awake_s
    for gap, expected in ((0.9, 0), (0.9, 0), (1.1, 1), (0.5, 1), (100.0, 2)):
        now += gap * PERIOD_S
        lease.confirm()
        assert len(asked) == expected, gap


def test_lease_is_renewed_on_a_full_disk(tmp_path, monkeypatch) -> None:
    with Lease(Folder(tmp_path / "run"), print) as lease:
        file = tmp_path / "run" / "leases" / "000001.json"
        size = file.stat().st_size
        for count in range(9, 12):
            lease.record["renewals"] = 10**count
            lease.renew()
            assert file.stat().st_size == size
            assert newest_lease(lease.storage).record["renewals"] == 10**count + 1


def test_taking_a_lease_keeps_the_temporary_files_of_other_commands(tmp_path: Path) -> None:
    """Found when twenty commands started at once: one lost its temporary file and ended with an I/O error."""
    leases = tmp_path / "leases"
    leases.mkdir()
    theirs = leases / ".tmp-4194305-1-000001.json"
    theirs.touch()
    with Lease(Folder(tmp_path), print):
        assert theirs.exists()
