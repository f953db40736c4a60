"""Measures the cost of deterministic kernels: the seconds per step with and without them (docs/exact.md)."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pipeline.engine.determinism import use_deterministic_kernels


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Context manager that uses deterministic kernels in the block and restores the previous setting.

    If CUDA is initialised before the first block, cuBLAS misses its environment variable: the measured time is valid,
    but results are not deterministic.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    had_benchmark = torch.backends.cudnn.benchmark
    had_deterministic_cudnn = torch.backends.cudnn.deterministic
    had_cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    use_deterministic_kernels()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warning)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = had_benchmark
        torch.backends.cudnn.deterministic = had_deterministic_cudnn
        torch.backends.cuda.enable_cudnn_sdp(had_cudnn_attention)


def price_of_determinism(step: Callable[[], object], rounds: int = 5) -> tuple[float, float]:
    """Return the median seconds per step with torch's choice of kernels, and with deterministic kernels.

    Both are measured alternately, because a GPU's clock drifts. The first step of each is a warm-up.
    """
    default_seconds = []
    deterministic_seconds = []
    for _ in range(1 + rounds):
        default_seconds.append(seconds_of_step(step))
        with deterministic_kernels():
            deterministic_seconds.append(seconds_of_step(step))
    return statistics.median(default_seconds[1:]), statistics.median(deterministic_seconds[1:])


def seconds_of_step(step: Callable[[], object]) -> float:
    """Measure a step until the device has finished it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
