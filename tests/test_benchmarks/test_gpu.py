"""`make gpu`: which parts it has, what its page says, and that it runs from end to end on a CPU."""

from pathlib import Path

import pytest

from benchmarks import gpu

REPORT = """<testsuites><testsuite>
<testcase name="test_attention_is_flash[cuda]" time="0.25" />
<testcase name="test_workers_talk" time="7.5">
<failure message="assert 'gloo' == 'nccl'&#10;more">text</failure></testcase>
<testcase name="test_nvjpeg" time="0"><skipped message="TorchCodec is not installed">text</skipped></testcase>
</testsuite></testsuites>"""


def test_on_a_gpu_every_model_is_timed_against_its_peers_and_at_every_zero_stage():
    assert gpu.parts_of(gpu.PLANS["cuda"]) == [
        *("step B/16", "step L/16", "step H/14"),
        *("zero B/16 1", "zero B/16 2", "zero B/16 3"),
        *("zero L/16 1", "zero L/16 2", "zero L/16 3"),
        *("zero H/14 1", "zero H/14 2", "zero H/14 3"),
    ]
    assert gpu.CONTENDERS == ["ours", "ours, compiled", "timm", "timm, compiled", "transformers"]


def test_the_page_holds_tests_ratios_plans_and_why_a_part_has_no_rows():
    measured = {"model": "B/16", "images": 512, "workers": 2, "zero": 2, "code": "ours", "step_s": 0.5, "to_ours": 1.0}
    ours = {**measured, "memory_gib": 12.0, "planned_gib": 10.0, "of_peak": 0.275}
    stock = {**measured, "code": "stock DeepSpeed", "to_ours": 1.25, "memory_gib": 14.0, "of_peak": None}
    timm = {"model": "B/16", "images": 64, "code": "timm", "step_s": 0.125, "to_ours": 1.1, "of_ceiling": 0.4}
    outcomes = [
        gpu.Outcome("step B/16", [timm]),
        gpu.Outcome("step H/14", [], "exit code 1: torch.OutOfMemoryError: CUDA | out of memory"),
        gpu.Outcome("zero B/16 2", [ours, stock]),
    ]
    page = gpu.page(gpu.PLANS["cuda"], ["# On a GPU, 2030-01-01"], gpu.tests_of(REPORT), outcomes)
    assert "## Tests: 1 of 3 passed" in page and "rehearsed" not in page
    assert "| workers talk | failed: assert 'gloo' == 'nccl' | 7.5 |" in page
    assert "| nvjpeg | skipped: TorchCodec is not installed | 0.0 |" in page
    assert "| B/16 | 64 | timm | 0.1250 | 512 | 1.10 | 40% |" in page
    assert "| step H/14 | FAILED: exit code 1: torch.OutOfMemoryError: CUDA \\| out of memory | | | | | |" in page
    # 512 images in 0.5 s; 12 GiB are 1.2 times what was planned.
    assert "| 2 | ours | 0.5000 | 1,024 | 1.00 | 28% | 12.00 | 10 | 1.20 |" in page
    assert "GiB a worker: the most that torch had allocated on the GPU of rank 0" in page
    assert "| stock DeepSpeed | 0.5000 | 1,024 | 1.25 | | 14.00 | | |" in page
    rows = [line for line in page.splitlines() if line.startswith(("| B/16 | 512", "| model | images | workers"))]
    assert len({line.count(" |") for line in rows}) == 1, "as many cells in every row as in the heading"


def test_the_share_of_the_peak_is_that_of_the_steps_products(monkeypatch):
    """By hand: H/14 takes 6 x 167.4 GMACs an image; 64 images in 0.25 s are 257 TFLOP/s, 26 % of an H100's 989."""
    monkeypatch.setattr(gpu, "peak_flops", lambda device: 989e12)
    assert gpu.of_peak("H/14", 64, 0.25) == pytest.approx(0.26, abs=0.005)
    monkeypatch.setattr(gpu, "peak_flops", lambda device: None)
    assert gpu.of_peak("H/14", 64, 0.25) is None


def test_without_a_gpu_it_says_how_to_rehearse(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["--device", "cuda"]) == 69
    assert "make gpu DEVICE=cpu" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_benchmarks_are_rehearsed_from_end_to_end_on_a_cpu(tmp_path: Path) -> None:
    """The tests that the command runs too are run by this suite."""
    target = tmp_path / "page.md"
    assert gpu.main(["--device", "cpu", "--no-tests", "--out", str(target)]) == 0
    page = target.read_text()
    assert "No GPU: rehearsed on the CPU" in page and "FAILED" not in page
    for row in ("ceiling", *gpu.CONTENDERS, "stock DeepSpeed"):
        assert f"| {row}" in page
    failed = gpu.in_a_process(gpu.PLANS["cpu"], "step nonsense/16")
    assert not failed.rows and failed.failure.startswith("exit code 1: ") and "nonsense" in failed.failure
