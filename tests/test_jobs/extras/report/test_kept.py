"""When the page that a run keeps is renewed."""

import time

from jobs.extras.report import kept, page
from jobs.extras.report.kept import KeptPage


def test_a_page_is_renewed_at_evaluations_and_not_for_every_look(tmp_path, monkeypatch):
    from types import SimpleNamespace

    written = []
    monkeypatch.setattr(page, "write_report", lambda *_, **__: written.append(time.monotonic()))
    monkeypatch.setattr(kept, "LEAST_S", 0.0)
    monkeypatch.setattr(kept, "SHARE", 0.0)
    monkeypatch.delenv(kept.SWITCH)
    (tmp_path / "pretrain-1").mkdir()
    (tmp_path / "pretrain-1" / "stage.json").touch()
    lines: list[str] = []
    keeper = KeptPage()
    keeper.started(SimpleNamespace(run=tmp_path), None, lines.append)
    for evaluation in (None, None, {"step": 8}, {"step": 8}, {"step": 16}):
        keeper.show(SimpleNamespace(stage="pretrain", report={}, evaluation=evaluation, incidents=0))
    assert len(written) == 3
    keeper.ended()
    assert len(written) == 4 and lines == [f"page: {tmp_path / 'report.html'}"]
    keeper.close()
    monkeypatch.setenv(kept.SWITCH, "off")
    keeper = KeptPage()
    keeper.started(SimpleNamespace(run=tmp_path), None, lines.append)
    assert keeper.thread is None
    keeper.ended()
    keeper.close()
    assert len(written) == 4
