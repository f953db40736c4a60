"""When the page that a run keeps is renewed."""

import time

from jobs.extras.report import page, page_watcher
from jobs.extras.report.page_watcher import PageWatcher


def test_a_page_is_renewed_at_evaluations_and_not_for_every_look(tmp_path, monkeypatch):
    from types import SimpleNamespace

    written = []
    monkeypatch.setattr(page, "write_report", lambda *_, **__: written.append(time.monotonic()))
    monkeypatch.setattr(page_watcher, "LEAST_S", 0.0)
    monkeypatch.setattr(page_watcher, "SHARE", 0.0)
    monkeypatch.delenv(page_watcher.SWITCH)
    (tmp_path / "pretrain-1").mkdir()
    (tmp_path / "pretrain-1" / "stage.json").touch()
    lines: list[str] = []
    keeper = PageWatcher()
    keeper.started(SimpleNamespace(run=tmp_path), None, lines.append)
    for evaluation in (None, None, {"step": 8}, {"step": 8}, {"step": 16}):
        keeper.show(SimpleNamespace(stage="pretrain", report={}, evaluation=evaluation, incidents=0))
    assert len(written) == 3
    keeper.ended()
    assert len(written) == 4 and lines == [f"page: {tmp_path / 'report.html'}"]
    keeper.close()
    monkeypatch.setenv(page_watcher.SWITCH, "off")
    keeper = PageWatcher()
    keeper.started(SimpleNamespace(run=tmp_path), None, lines.append)
    assert keeper.thread is None
    keeper.ended()
    keeper.close()
    assert len(written) == 4
