"""The line about the bits of a resume, and the deterministic kernels of exact mode on a GPU."""

import os

import pytest
import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.kernels import deterministic_kernels, price_of_determinism
from data.errors import ConfigError
from pipeline.engine.determinism import (
    CUBLAS_VARIABLE,
    Conditions,
    resume_line,
    use_deterministic_kernels,
)

pytestmark = pytest.mark.quick

CPU = {"is_gpu": False, "world": 2, "zero": 2}
GPU = {"is_gpu": True, "world": 2, "zero": 2, "backend": "nccl"}
REPEATS = "resuming with 2 workers at ZeRO 2 on the same hardware is bitwise exact"
DIFFERS = "resuming may change the last bits: "
KERNELS = "GPU kernels may add in any order"
NCCL = "NCCL chooses the order of its sums"
COMPILED = "compiled kernels have not been compared on a GPU"

# Whether the promise holds is tested with whole runs on CPUs in test_resume.py and test_checkpoint_runs.py.
PROMISES = [
    (CPU, REPEATS),
    ({**CPU, "world": 1, "zero": 0}, "resuming with 1 worker at ZeRO 0 on the same hardware is bitwise exact"),
    ({**CPU, "is_compiled": True}, REPEATS),
    ({**CPU, "pools": True}, REPEATS),
    ({**CPU, "exact_parts": 4}, "resuming with 1 to 4 workers on the same hardware is bitwise exact"),
    (
        {**CPU, "exact_parts": 4, "is_compiled": True},
        "resuming with 1 to 4 workers on the same hardware is bitwise exact",
    ),
    ({**GPU, "exact_parts": 4}, f"{REPEATS} (deterministic kernels)"),
    ({**GPU, "exact_parts": 4, "backend": "gloo"}, f"{REPEATS} (deterministic kernels)"),
    (GPU, f"{DIFFERS}{KERNELS}, {NCCL}"),
    ({**GPU, "world": 1}, f"{DIFFERS}{KERNELS}"),
    ({**GPU, "backend": "gloo"}, f"{DIFFERS}{KERNELS}"),
    ({**GPU, "is_compiled": True}, f"{DIFFERS}{KERNELS}, {NCCL}, {COMPILED}"),
    ({**GPU, "exact_parts": 4, "is_compiled": True}, f"{DIFFERS}{COMPILED}"),
    ({**GPU, "exact_parts": 4, "decodes_on_gpu": True}, f"{DIFFERS}the GPU decodes the images"),
    ({**GPU, "exact_parts": 4, "pools": True}, f"{DIFFERS}max pooling may add in any order on a GPU"),
]


@pytest.mark.parametrize(("conditions", "expected"), PROMISES)
def test_resume_line_says_whether_bits_are_repeated(conditions, expected) -> None:
    now = Conditions(**conditions)
    assert resume_line(now) == expected
    assert resume_line(now, before=now) == expected


@pytest.mark.parametrize(
    ("conditions", "before", "expected"),
    [
        (CPU, {"world": 4}, "results may differ bitwise from here on (workers: 4 → 2); "),
        (CPU, {"zero": 3}, "results may differ bitwise from here on (ZeRO: 3 → 2); "),
        (CPU, {"world": 1, "zero": 1}, "results may differ bitwise from here on (workers: 1 → 2, ZeRO: 1 → 2); "),
        ({**CPU, "exact_parts": 4}, {"world": 4, "zero": 3}, ""),
        (GPU, {"world": 4}, "results may differ bitwise from here on (workers: 4 → 2); "),
        ({**GPU, "exact_parts": 4}, {"world": 4}, "results may differ bitwise from here on (workers: 4 → 2); "),
    ],
)
def test_resume_line_reports_a_changed_worker_group(conditions, before, expected) -> None:
    now = Conditions(**conditions)
    assert resume_line(now, Conditions(**{**conditions, **before})) == expected + resume_line(now)


@pytest.fixture
def restored(monkeypatch):
    """Restore torch's settings after the test."""
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    with deterministic_kernels():
        os.environ.pop(CUBLAS_VARIABLE)
        torch.use_deterministic_algorithms(False)
        yield


def test_deterministic_kernels_are_enabled_together_with_the_cublas_variable(restored) -> None:
    use_deterministic_kernels()
    assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    # Otherwise flash attention would only warn.
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert torch._inductor.config.deterministic


def test_deterministic_cublas_value_of_the_user_is_kept(restored, monkeypatch) -> None:
    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")
    use_deterministic_kernels()
    assert os.environ[CUBLAS_VARIABLE] == ":16:8"
    monkeypatch.setenv(CUBLAS_VARIABLE, ":0:0")
    with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0': .*\n  expected :4096:8 or :16:8, "):
        use_deterministic_kernels()


def test_deterministic_context_restores_torchs_settings(restored) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.benchmark = True
    with deterministic_kernels():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cudnn.benchmark


def test_cost_is_the_median_of_alternating_measurements(restored, monkeypatch) -> None:
    modes = []
    # The first two steps warm up. With deterministic kernels a step takes twice as long here.
    clock = iter([0, 9, 10, 28, 30, 31, 32, 34, 40, 43, 44, 50])
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(clock))
    price = price_of_determinism(lambda: modes.append(torch.are_deterministic_algorithms_enabled()), rounds=2)
    assert modes == [False, True] * 3
    assert price == (2, 4)
