"""The runner of `make gpu`: a growing page without partial writes, time limits, the budget, and killed parts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu.parts import Part
from benchmarks.gpu.run import Run, replace

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[3]
# What a part's process runs here, by the part's function; each gets the file of its rows as its argument.
SCRIPTS = {
    "report": "import sys; open(sys.argv[1], 'a').write('{\"value\": 1}\\n')",
    "fail": "import sys; open(sys.argv[1], 'a').write('{\"value\": 2}\\n'); sys.exit('out of | memory')",
    "hang": (
        "import subprocess, sys, time; open(sys.argv[1], 'a').write('{\"value\": 3}\\n{\"half');"
        "print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
    ),
}


def part(name: str, script: str, limit_s: float = 60.0, is_alone: bool = True) -> Part:
    return Part(name, "machine", script, limit_s=limit_s, is_alone=is_alone)


def run_of(folder: Path, parts: list[Part], budget_s: float = 60.0, pages: list[str] | None = None) -> Run:
    def render(outcomes):
        text = "\n".join(f"{o.part}: {o.state} {[row['value'] for row in o.rows]}" for o in outcomes)
        if pages is not None:
            pages.append(text)
        return text

    def command_of(part: Part, rows: Path) -> list[str]:
        return [sys.executable, "-c", SCRIPTS[part.function], str(rows)]

    return Run(
        parts,
        command_of,
        render,
        page=folder / "out" / "page.md",
        folder=folder / "out",
        work=folder / "work",
        budget_s=budget_s,
        slots=2,
    )


def results(folder: Path) -> dict[str, dict]:
    lines = (folder / "out" / "results.jsonl").read_text().splitlines()
    return {record["part"]: record for record in map(json.loads, lines)}


def test_page_grows_with_every_part_and_explains_failures(tmp_path):
    pages: list[str] = []
    outcomes = run_of(tmp_path, [part("a", "report"), part("b", "fail"), part("c", "report")], pages=pages).run()
    assert [outcome.state for outcome in outcomes] == ["done", "failed", "done"]
    assert outcomes[1].reason == "exit code 1: out of | memory"
    assert outcomes[1].rows == [{"value": 2}], "what a part reported before it failed is kept"

    assert pages[0] == "a: waiting []\nb: waiting []\nc: waiting []"
    assert "a: done [1]\nb: running []\nc: waiting []" in pages
    assert pages[-1] == (tmp_path / "out" / "page.md").read_text() == "a: done [1]\nb: failed [2]\nc: done [1]"
    assert list(results(tmp_path)) == ["a", "b", "c"]
    assert results(tmp_path)["b"]["rows"] == [{"value": 2}]
    assert "=== b: failed" in (tmp_path / "out" / "log.txt").read_text()


def test_part_over_its_time_limit_is_killed_with_its_children_and_keeps_its_rows(tmp_path):
    outcomes = run_of(tmp_path, [part("a", "hang", limit_s=2), part("b", "report")]).run()
    assert outcomes[0].state == "stopped"
    assert outcomes[0].reason == "time limit of 2 s"
    assert outcomes[0].rows == [{"value": 3}], "the line that was not complete is left out"
    assert outcomes[1].state == "done"
    child = int((tmp_path / "work" / "a.log").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_parts_without_remaining_time_are_skipped_and_limits_respect_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.run.LEAST_S", 1.0)
    outcomes = run_of(tmp_path, [part("a", "hang"), part("b", "report")], budget_s=2.0).run()
    assert [outcome.state for outcome in outcomes] == ["stopped", "no time left"]
    assert outcomes[0].seconds < 12
    assert results(tmp_path)["b"]["state"] == "no time left"


def test_parts_run_in_parallel_in_free_slots_except_exclusive_ones(tmp_path):
    together = [part(name, "hang", limit_s=1, is_alone=False) for name in ("a", "b", "c")]
    pages: list[str] = []
    run_of(tmp_path, [*together, part("d", "report")], pages=pages).run()
    most = max(page.count("running") for page in pages)
    assert most == 2
    for page in pages:
        assert "d: running" not in page or page.count("running") == 1


def test_file_is_replaced_atomically(tmp_path, monkeypatch):
    """If the write fails halfway, the file keeps its previous content."""
    path = tmp_path / "page.md"
    replace(path, "former")
    write_text = Path.write_text

    def write_half(self, text):
        write_text(self, text[: len(text) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="disk full"):
        replace(path, "new and longer")
    monkeypatch.undo()
    assert path.read_text() == "former"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_rehearsal_keeps_its_finished_parts_on_the_page(tmp_path, number):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(out), "--only", "shards", "plan"]
    with subprocess.Popen([*command, "--work", str(tmp_path / "work")], cwd=ROOT) as process:
        runner = psutil.Process(process.pid)
        try:
            while "plan mu/16" not in states(out) or states(out)["shards"] != "done":
                assert process.poll() is None, "it was to be killed before it had ended"
                time.sleep(0.1)
            children = runner.children(recursive=True)
        finally:
            os.kill(process.pid, number)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    (page,) = out.glob("gpu-*.md")
    assert "| shards | done |" in page.read_text()
    assert "| 200 |" in page.read_text(), "the row of the tars"
    if number == signal.SIGTERM:
        assert states(out)["plan mu/16"] in ("stopped", "done")


def states(out: Path) -> dict[str, str]:
    """Return the states of parts in results.jsonl; every line of it is whole at any moment."""
    path = out / "results.jsonl"
    if not path.exists():
        return {}
    return {record["part"]: record["state"] for record in map(json.loads, path.read_text().splitlines())}
