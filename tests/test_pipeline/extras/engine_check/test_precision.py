"""A CPU that computes bf16 in software is reported, with the two times."""

import platform
from pathlib import Path

import pytest
import torch

from pipeline.extras.engine_check import precision
from pipeline.extras.engine_check.precision import slow_precision

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
SECONDS = {torch.float32: 0.001, torch.bfloat16: 0.05}


def test_slow_bf16_is_reported_with_both_times_and_a_remedy(monkeypatch) -> None:
    monkeypatch.setattr(precision, "seconds_of_product", SECONDS.get)
    assert slow_precision("bf16", CPU) == (
        "bf16 is slow on this CPU: a matrix product took 50 times as long as in fp32 (50 and 1 ms); "
        "precision: fp32 is faster here"
    )


@pytest.mark.parametrize(("used", "device"), [("fp32", "cpu"), ("bf16", "cuda")])
def test_other_precisions_and_devices_are_not_timed(monkeypatch, used, device) -> None:
    monkeypatch.setattr(precision, "seconds_of_product", None)
    assert slow_precision(used, torch.device(device)) == ""


def test_fast_bf16_is_not_reported(monkeypatch) -> None:
    monkeypatch.setattr(precision, "seconds_of_product", {torch.float32: 0.001, torch.bfloat16: 0.0006}.get)
    assert slow_precision("bf16", CPU) == ""


def test_the_report_fits_the_instructions_of_this_cpu() -> None:
    """Compared with the flags that Linux lists; CPUs with AVX512 but without its bf16 instructions are in between."""
    described = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not described.exists():
        pytest.skip("needs /proc/cpuinfo of an x86-64 CPU")
    flags = described.read_text().split()
    has_instructions = "avx512_bf16" in flags or "amx_bf16" in flags
    if "avx512f" in flags and not has_instructions:
        pytest.skip("the CPU has AVX512 without bf16")
    assert bool(slow_precision("bf16", CPU)) != has_instructions
