"""The page of `make gpu`: unfinished runs, failed parts, ratios, goals, and the commit."""

import subprocess

import pytest

from benchmarks.gpu.engines import gaps
from benchmarks.gpu.page import TABLES, commit_of, page
from benchmarks.gpu.parts import parts_of
from benchmarks.gpu.run import Outcome
from benchmarks.gpu.steps import share_of_peak

pytestmark = pytest.mark.quick

MACHINE = Outcome(
    "machine",
    "machine",
    "done",
    12.0,
    rows=[{"what": "GPU", "value": "1 × NVIDIA H100"}, {"what": "copy", "value": 2.5, "unit": "TB/s"}],
)


def text_of(*outcomes: Outcome, device: str = "cuda") -> str:
    return page(outcomes, device=device, date="2030-01-01", command="make gpu", commit="abc1234")


def cells(text: str, beginning: str) -> list[str]:
    """Return the cells of the only line with this beginning."""
    (line,) = [line for line in text.splitlines() if line.startswith(beginning)]
    return [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]


def step(code: str, share: float, seconds: float) -> dict:
    return {"model": "H/14", "images": 64, "code": code, "step_s": seconds, "of_product": share, "of_peak": share / 2}


def engine(zero: int, **values) -> dict:
    row = {"model": "H/14", "images": 64, "workers": 1, "code": "ours", "zero": zero, "compiled": False}
    return {**row, "step_s": 0.25, "memory_gib": 42.0, "of_peak": 0.26, **values}


def test_every_section_of_a_part_has_a_table():
    for device in ("cuda", "cpu"):
        assert {part.section for part in parts_of(device)} <= set(TABLES)


def test_run_that_has_just_started_has_a_page():
    text = text_of(*(Outcome(part.name, part.section) for part in parts_of("cuda")))
    assert "# On a GPU, 2030-01-01" in text
    assert "commit: abc1234" in text
    assert text.count("| not measured |") == 5
    assert "| steps H/14 | waiting | 0 |  |" in text
    assert "## " not in text, "no table without a row"


def test_page_names_the_hardware_and_lists_the_speeds():
    text = text_of(MACHINE)
    assert "- GPU 1 × NVIDIA H100" in text
    assert cells(text, "| copy ") == ["copy", "2.5", "TB/s", ""]
    assert "says nothing" not in text
    assert "say nothing" not in text
    assert "the numbers say nothing about a GPU" in text_of(MACHINE, device="cpu")


def test_failed_part_is_explained_without_breaking_tables():
    text = text_of(Outcome("steps L/16", "steps", "failed", 3.0, "exit code 1: CUDA | out of\nmemory"))
    assert cells(text, "| steps L/16") == ["steps L/16", "failed", "3", "exit code 1: CUDA / out of memory"]


def test_row_of_a_missing_contender_says_that_it_is_not_installed():
    rows = [step("ours", 0.5, 0.4), {"model": "H/14", "images": 64, "code": "timm", "note": "timm is not installed"}]
    text = text_of(Outcome("steps H/14", "steps", "done", 9.0, rows=rows))
    assert cells(text, "| H/14 | 64 | timm") == ["H/14", "64", "timm", "", "", "", "", "", "timm is not installed"]


def test_ratio_to_ours_is_the_ratio_of_speed_shares():
    """The clock ran at half speed for timm; relative to the same matrix product's speed, ours reached 1.2 times."""
    rows = [step("ours, compiled", 0.6, 0.2), step("timm, compiled", 0.5, 0.48), step("ours", 0.4, 0.3)]
    text = text_of(Outcome("steps H/14", "steps", "done", 9.0, rows=rows))
    assert cells(text, "| H/14 | 64 | timm, compiled")[3:8] == ["0.4800", "133", "0.80", "50.0%", "25.0%"]
    assert "| H/14: at least 1.10 times the speed of timm, both compiled | 1.20 |" in text


def test_measured_memory_is_next_to_the_plan_of_the_same_zero_stage():
    planned = [
        {"model": "H/14", "zero": 2, "is_gpu": True, "planned_gib": 40.0},
        {"model": "H/14", "zero": 3, "is_gpu": True, "planned_gib": 84.0},
    ]
    rows = [engine(2), engine(3, of_peak=0.44), engine(2, compiled=True), engine(2, code="stock DeepSpeed")]
    text = text_of(
        Outcome("plan H/14", "plan", "done", rows=planned), Outcome("engine H/14", "engines", "done", rows=rows)
    )
    assert "| memory within 5 % of the plan (0.95 to 1.05) | 0.50 to 1.05 |" in text
    assert "| H/14 at 224 px: at least 43 % of the peak in bf16 | 44.0% |" in text
    compiled = cells(text, "| H/14 | 64 | 1 | ours | 2 | yes")
    heading = cells(text, "| model | images | workers")
    assert compiled[heading.index("planned, GiB")] == "", "no plan traces a compiled step"
    assert compiled[heading.index("images/s")] == "256"
    assert all(len(line.split("|")) == len(heading) + 2 for line in text.splitlines() if line.startswith("| H/14 | 64"))


def test_goals_of_waiting_and_exact_mode_are_read_from_their_rows():
    tars = [{"model": "B/16", "wait": 0.3}, {"model": "H/14", "wait": 0.0151}]
    campaigns = [{"exact": False, "is_equal": False}, {"exact": True, "is_equal": True}]
    text = text_of(Outcome("t", "tars", "done", rows=tars), Outcome("c", "campaigns", "done", rows=campaigns))
    assert "at most 2 % of the time waiting for data | 1.5% |" in text
    assert "a resumed run equals an undisturbed one bit for bit | equal |" in text


def test_share_of_the_peak_uses_the_matrix_products_of_the_step(monkeypatch):
    """By hand: H/14 takes 6 x 167.4 GMACs an image; 64 images in 0.25 s are 257 TFLOP/s, 26 % of an H100's 989."""
    monkeypatch.setattr("benchmarks.gpu.steps.peak_flops", lambda device: 989e12)
    assert share_of_peak(6 * 167.4e9 * 64, 0.25, "cuda") == pytest.approx(0.26, abs=0.005)
    monkeypatch.undo()
    assert share_of_peak(1e12, 0.25, "cpu") is None


def test_idle_share_is_the_time_without_a_kernel():
    assert gaps([]) == 1.0
    assert gaps([(0, 4), (2, 5), (8, 10)]) == pytest.approx(0.3)
    assert gaps([(8, 10), (0, 10), (2, 3)]) == 0.0


def test_commit_comes_from_git_or_from_the_bundle(tmp_path, monkeypatch):
    assert commit_of(tmp_path) == "unknown"
    (tmp_path / ".gpu").mkdir()
    (tmp_path / ".gpu" / "commit").write_text("1234abc\n")
    assert commit_of(tmp_path) == "1234abc"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert commit_of(tmp_path) == "1234abc", "no git on the machine"

    git = ["git", "-c", "user.name=n", "-c", "user.email=e@e"]
    subprocess.run([*git, "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "m"], cwd=tmp_path, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert head.stdout.startswith(commit_of(tmp_path))
    assert len(commit_of(tmp_path)) >= 7
