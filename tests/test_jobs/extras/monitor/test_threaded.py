"""A watcher with a thread shows stages while they wait, run and end, and cannot delay a run."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.extras.monitor import threaded
from jobs.extras.monitor.threaded import ThreadedWatcher
from jobs.run.reading import StageReader, StatusMessage
from tests.support.families import wait_until
from tests.test_jobs.run.test_reading import two_attempts

pytestmark = pytest.mark.quick


class States(ThreadedWatcher):
    """Records the state of every message that it shows."""

    name = "monitoring"

    def __init__(self) -> None:
        super().__init__()
        self.states: list[str] = []

    def show(self, message: StatusMessage) -> None:
        self.states.append(message.state)

    def show_run(self) -> None:
        self.states.append("run")


def context(needs_workers: bool) -> Any:
    return SimpleNamespace(stage=SimpleNamespace(kind=SimpleNamespace(needs_workers=needs_workers)))


def test_a_stage_is_shown_as_waiting_working_and_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(threaded, "SHOW_EVERY_S", 0.01)
    reader = StageReader(two_attempts(tmp_path))
    watcher = States()
    watcher.start(print)
    wait_until(lambda: "run" in watcher.states)  # shown before the first stage and between stages
    watcher.stage(context(needs_workers=True))
    watcher.status(reader.read("waiting"))
    wait_until(lambda: "waiting" in watcher.states)
    watcher.status(reader.read("working", 7))
    wait_until(lambda: "working" in watcher.states)
    watcher.status(reader.read("ended"))
    watcher.close()
    assert watcher.states[-1] == "run", "once more at the end, when the command has written its exit code"
    of_stage = [state for state in watcher.states if state != "run"]
    assert of_stage[-1] == "ended"
    assert set(of_stage) == {"waiting", "working", "ended"}


def test_an_attempt_without_recent_messages_is_shown_as_waiting(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(threaded, "SHOW_EVERY_S", 0.01)
    message = StageReader(two_attempts(tmp_path)).read("working", 7)
    watcher = States()
    watcher.stage(context(needs_workers=True))
    watcher.status(replace(message, time=message.time - 1.1 * threaded.SILENT_S))
    watcher.start(print)
    wait_until(lambda: "waiting" in watcher.states)
    watcher.close()
    assert "working" not in watcher.states


def test_the_end_of_every_stage_is_shown_even_if_it_was_short(tmp_path: Path) -> None:
    reader = StageReader(two_attempts(tmp_path))
    watcher = States()
    watcher.status(reader.read("ended"))
    watcher.stage(context(needs_workers=True))
    for _ in range(3):
        watcher.status(reader.read("ended"))
    watcher.stage(context(needs_workers=False))
    watcher.status(reader.read("ended"))
    watcher.start(print)
    watcher.close()
    assert watcher.states == ["ended", "ended", "ended", "run"], (
        "neither a message before the first stage nor a stage of the driver is shown"
    )


def test_failures_and_hangs_are_logged_once_and_do_not_stop_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(threaded, "SHOW_EVERY_S", 0.01)
    monkeypatch.setattr(threaded, "CLOSE_S", 0.2)
    log: list[str] = []
    shown: list[str] = []
    is_over = threading.Event()

    class Failing(ThreadedWatcher):
        name = "monitoring"

        def show(self, message: StatusMessage) -> None:
            shown.append(message.state)
            if len(shown) < 5:
                raise ConnectionError("the head is away\nand more")
            is_over.wait()

    watcher = Failing()
    watcher.start(log.append)
    watcher.stage(context(needs_workers=True))
    watcher.status(StageReader(two_attempts(tmp_path)).read("working", 7))
    wait_until(lambda: len(shown) == 5)
    began = time.monotonic()
    watcher.close()
    assert time.monotonic() - began < 60, "close must not wait for a call that never returns"
    assert len(log) == 2
    assert log[1].startswith("monitoring: the tracker did not respond within 0.2 s")
    assert log[0].startswith("monitoring: ConnectionError: the head is away; the run continues")
    is_over.set()
