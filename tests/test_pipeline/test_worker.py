"""The folders of a worker, and how it is stopped."""

import signal
import threading
from pathlib import Path

import pytest

from pipeline.monitoring.watchdog import NODE_FOLDER
from pipeline.worker import Job, StopRequest, handle_sigterm

pytestmark = pytest.mark.quick


def job(run: Path) -> Job:
    return Job(
        run=str(run), directory=str(run / "stage"), attempt=7, key="k", code="c", model={}, train=["/shards/train"]
    )


def test_attempt_has_a_folder_and_its_node_a_stop_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_FOLDER, raising=False)
    assert job(tmp_path).attempt_folder == tmp_path / "stage" / "attempts" / "attempt-000007"
    assert job(tmp_path).stop_file == tmp_path / "stage" / "attempts" / "attempt-000007" / "stop"
    monkeypatch.setenv(NODE_FOLDER, "/node")
    assert job(tmp_path).stop_file == Path("/node/stop")


@pytest.mark.parametrize("reads_file", [True, False])
def test_worker_stops_on_a_signal_or_on_the_stop_file(reads_file: bool, tmp_path: Path) -> None:
    request = StopRequest(tmp_path / "stop", reads_file=reads_file)
    assert not request.is_requested()
    request.file.touch()
    assert request.is_requested() == reads_file
    assert request.is_requested_on_node()
    request.file.unlink()
    assert not request.is_requested_on_node()
    request.signal.set()
    assert request.is_requested()
    assert request.is_requested_on_node()


def test_sigterm_handler_is_installed_only_in_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        asked = threading.Event()
        other = threading.Thread(target=handle_sigterm, args=(asked,))
        other.start()
        other.join()
        assert signal.getsignal(signal.SIGTERM) == before
        handle_sigterm(asked)
        signal.raise_signal(signal.SIGTERM)
        assert asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
