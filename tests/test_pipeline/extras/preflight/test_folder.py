"""A node's report on the folder of a run."""

import threading
import time

import pytest

from pipeline.extras.preflight import folder as folders

pytestmark = pytest.mark.quick


def test_driver_answers_requests_and_its_clock_is_measured(tmp_path, monkeypatch) -> None:
    clock = time.time
    here = threading.current_thread()
    # The node's clock is an hour ahead of the driver's; the driver answers in a separate thread.
    monkeypatch.setattr(time, "time", lambda: clock() + 3600 * (threading.current_thread() is here))
    with folders.acting_as_driver(tmp_path):
        found_out = folders.report_on(tmp_path, "3")
    assert found_out["sees_driver"]
    assert found_out["is_answered"]
    assert found_out["skew_s"] == pytest.approx(3600, abs=found_out["uncertainty_s"] + 0.001)
    assert found_out["lacks"] == []
    assert found_out["written_bytes"] == 2**24


def test_folder_without_driver_file_is_not_shared_and_replaced_links_are_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("data.files.SEEN_WITHIN_S", 0.1)
    monkeypatch.setattr(folders, "ANSWERED_WITHIN_S", 0.1)
    assert folders.report_on(tmp_path, "0")["sees_driver"] is False
    (tmp_path / folders.DRIVER_FILE).touch()
    monkeypatch.setattr(folders, "create_exclusively", lambda *_: True)
    alone = folders.report_on(tmp_path, "0")
    assert (alone["sees_driver"], alone["is_answered"], alone["skew_s"]) == (True, False, None)
    assert alone["lacks"] == ["a hard link to an existing name does not fail"]
