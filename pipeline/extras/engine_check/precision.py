"""Warns about a CPU that computes bf16 in software.

A CPU without AVX512-BF16, AMX or their ARM equivalents converts each bf16 operand: a matrix product took 55 times as
long as in fp32 on an AMD EPYC with AVX2 only (torch 2.13, one thread). Training then takes many times as long, and
nothing else shows why.
"""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIDE = 256  # of the square matrices; as large as a small ViT's, and 25 ms at the ratio above
REPETITIONS = 3  # the fastest one counts
MIN_RATIO = 4.0  # of bf16's time to fp32's; 1.5 to 2.0 on a Xeon with AVX512-BF16 instructions but without AMX


def slow_precision(precision: str, device: "torch.device") -> str:
    """Describe how much slower bf16 is than fp32 if the run uses it on a CPU where it is; otherwise return ""."""
    if precision != "bf16" or device.type != "cpu":
        return ""
    import torch  # imported here because checking a recipe does not need torch

    in_fp32 = seconds_of_product(torch.float32)
    in_bf16 = seconds_of_product(torch.bfloat16)
    if in_bf16 < MIN_RATIO * in_fp32:
        return ""
    return (
        f"bf16 is slow on this CPU: a matrix product took {in_bf16 / in_fp32:.0f} times as long as in fp32 "
        f"({in_bf16 * 1e3:.2g} and {in_fp32 * 1e3:.2g} ms); precision: fp32 is faster here"
    )


def seconds_of_product(dtype: "torch.dtype") -> float:
    """Return the CPU-seconds of a matrix product with this data type; the fastest of several."""
    import torch

    matrix = torch.ones(SIDE, SIDE, dtype=dtype)
    fastest = float("inf")
    for _ in range(REPETITIONS):
        began = time.thread_time()
        matrix @ matrix
        fastest = min(fastest, time.thread_time() - began)
    return fastest
