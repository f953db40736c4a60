"""The times at which a run updates its page."""

import time

from jobs.extras.report import page, page_watcher
from jobs.extras.report.page_watcher import PageWatcher


def test_the_page_is_updated_at_evaluations_but_not_at_every_poll(tmp_path, monkeypatch):
    from types import SimpleNamespace

    written = []
    monkeypatch.setattr(page, "write_report", lambda *_, **__: written.append(time.monotonic()))
    monkeypatch.setattr(page_watcher, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(page_watcher, "SHARE", 0.0)
    monkeypatch.delenv(page_watcher.SWITCH)
    (tmp_path / "pretrain-1").mkdir()
    (tmp_path / "pretrain-1" / "stage.json").touch()
    lines: list[str] = []
    watcher = PageWatcher()
    watcher.started(SimpleNamespace(run=tmp_path), None, lines.append)
    for evaluation in (None, None, {"step": 8}, {"step": 8}, {"step": 16}):
        watcher.show(SimpleNamespace(stage="pretrain", report={}, evaluation=evaluation, incidents=0))
    assert len(written) == 3
    watcher.ended()
    assert len(written) == 4
    assert lines == [f"page: {tmp_path / 'report.html'}"]
    watcher.close()
    monkeypatch.setenv(page_watcher.SWITCH, "off")
    watcher = PageWatcher()
    watcher.started(SimpleNamespace(run=tmp_path), None, lines.append)
    assert watcher.thread is None
    watcher.ended()
    watcher.close()
    assert len(written) == 4
