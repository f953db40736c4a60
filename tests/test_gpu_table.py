"""`make gpu`: which parts it has, what its page says, and that it runs from end to end on a CPU."""

from pathlib import Path

import pytest

from benchmarks import gpu
from jobs.cluster_config import ClusterConfig
from pipeline.plan.calibration import Hardware, write_calibration
from tests.test_forecast import made

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


def test_the_page_holds_tests_ratios_forecasts_and_why_a_part_has_no_rows():
    measured = {"model": "B/16", "images": 512, "workers": 2, "zero": 2, "code": "ours", "step_s": 0.5, "to_ours": 1.0}
    ours = {**measured, "memory_gib": 12.0, "forecast_s": 0.4, "forecast_gib": 10.0}
    unforeseen = {**ours, "zero": 3, "forecast_s": None, "no_forecast": "there is no calibration\n  type this"}
    stock = {**measured, "code": "stock DeepSpeed", "to_ours": 1.25, "memory_gib": 14.0}
    timm = {"model": "B/16", "images": 64, "code": "timm", "step_s": 0.125, "to_ours": 1.1, "of_ceiling": 0.4}
    outcomes = [
        gpu.Outcome("step B/16", [timm]),
        gpu.Outcome("step H/14", [], "exit code 1: torch.OutOfMemoryError: CUDA | out of memory"),
        gpu.Outcome("zero B/16 2", [ours, unforeseen, stock]),
    ]
    page = gpu.page(gpu.PLANS["cuda"], ["# On a GPU, 2030-01-01"], gpu.tests_of(REPORT), outcomes)
    assert "## Tests: 1 of 3 passed" in page and "rehearsed" not in page
    assert "| workers talk | failed: assert 'gloo' == 'nccl' | 7.5 |" in page
    assert "| nvjpeg | skipped: TorchCodec is not installed | 0.0 |" in page
    assert "| B/16 | 64 | timm | 0.1250 | 512 | 1.10 | 40% |" in page
    assert "| step H/14 | FAILED: exit code 1: torch.OutOfMemoryError: CUDA \\| out of memory | | | | | |" in page
    # 512 images in 0.5 s; 0.5 s are 1.25 times the forecast, 12 GiB 1.2 times theirs.
    assert "| ours | 0.5000 | 1,024 | 1.00 | 0.4 | 1.25 | 12.00 | 10 | 1.20 |" in page
    assert "| 3 | ours | 0.5000 | 1,024 | 1.00 | no forecast | | 12.00 | 10 | 1.20 |" in page
    assert page.count("no forecast of time: there is no calibration type this") == 1
    assert "GiB a worker: the most that torch had allocated on the GPU of rank 0" in page
    assert "| stock DeepSpeed | 0.5000 | 1,024 | 1.25 | | | 14.00 | | |" in page
    rows = [line for line in page.splitlines() if line.startswith(("| B/16 | 512", "| model | images | workers"))]
    assert len({line.count(" |") for line in rows}) == 1, "as many cells in every row as in the heading"


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


def test_without_a_calibration_there_is_no_forecast_of_time_and_the_page_says_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "calibration_file", lambda: tmp_path / "none.json")
    plan = gpu.PLANS["cpu"]
    cfg = gpu.config_of(plan, "mu/16", 2)
    assert (cfg.batch_size, cfg.micro_batch, cfg.precision, cfg.zero) == (4, 2, "bf16", 2)
    forecast_s, reason = gpu.forecast_step_s(plan, cfg, gpu.models.config_of("mu/16"))
    assert forecast_s is None and "type python -m jobs calibrate" in reason
    assert gpu.calibration_text() == "no calibration"


def test_a_calibration_of_another_machine_or_of_other_workers_forecasts_no_step(monkeypatch, tmp_path):
    path = tmp_path / "calibration.json"
    write_calibration(path, made(driver=Hardware("another", 3, "cpu")))
    monkeypatch.setattr(gpu, "calibration_file", lambda: path)
    plan = gpu.PLANS["cpu"]
    model = gpu.models.config_of("mu/16")
    assert gpu.calibration_text().startswith(f"{path} of 2026-11-22 15:00")

    forecast_s, reason = gpu.forecast_step_s(plan, gpu.config_of(plan, "mu/16", 2), model)
    assert forecast_s is None and reason.startswith(f"{path} was made on another with 3 cores, this is")
    monkeypatch.setattr(gpu, "of_another_machine", lambda *_: "")
    monkeypatch.setattr(gpu, "cluster_of", lambda _: ClusterConfig(workers=2, backend="processes", gpus_per_worker=1))
    forecast_s, reason = gpu.forecast_step_s(plan, gpu.config_of(plan, "mu/16", 2), model)
    assert forecast_s is None and reason.startswith("calibrated for workers that compute on")


def test_a_machine_with_gpus_is_calibrated_once_with_every_stage_that_is_timed(monkeypatch, tmp_path):
    path = tmp_path / "calibration.json"
    monkeypatch.setattr(gpu, "calibration_file", lambda: path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    asked = []

    def calibrate(campaigns, output, say, engines):
        assert campaigns == [] and output == path
        asked.append(engines)
        write_calibration(output, made())

    monkeypatch.setattr(gpu, "calibrate", calibrate)
    gpu.calibrate_once(gpu.PLANS["cpu"])
    assert not asked, "a rehearsal takes no minutes for it"
    gpu.calibrate_once(gpu.PLANS["cuda"])
    assert asked[0].keys() == {1, 4}
    for engines in asked[0].values():
        timed = {kind["zero"] for kind in engines if kind["precision"] == "bf16" and kind["optimizer"] == "adam"}
        assert timed == set(gpu.STAGES)
    gpu.calibrate_once(gpu.PLANS["cuda"])
    assert len(asked) == 1
    path.write_text("{}")  # of an older version, say
    gpu.calibrate_once(gpu.PLANS["cuda"])
    assert len(asked) == 2
