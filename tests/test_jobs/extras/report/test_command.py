"""The command `report`."""

from jobs.__main__ import main
from tests.support.paged_runs import make_restarted_run, make_run


def test_report_writes_a_page_for_one_or_several_runs_and_refuses_wrong_paths(tmp_path, shards, monkeypatch, capsys):
    restarted = make_restarted_run(tmp_path / "run", shards)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(restarted.parent)]) == 0
    assert (restarted.parent / "report.html").exists()
    assert main(["report", str(restarted.parent), str(restarted)]) == 0
    assert (tmp_path / "comparison.html").exists()
    capsys.readouterr()
    assert main(["report", "nowhere"]) == 64
    assert "no run at" in capsys.readouterr().err
    assert main(["report", str(restarted), "--output", "gone/page.html"]) == 64
    assert "the folder gone does not exist" in capsys.readouterr().err


def test_report_of_a_folder_compares_the_runs_in_it(tmp_path, shards, monkeypatch):
    for number in (0, 9, 10):
        make_run(tmp_path / "runs" / f"run-{number}", shards)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "runs"]) == 0
    assert "<h1>3 runs: run-0, run-9, run-10</h1>" in (tmp_path / "comparison.html").read_text()
