"""In what pieces, and when, gradients are summed over the workers: DeepSpeed's buckets, and what `plan` says of them.

reduction_line({"stage": 2}, parameters=632_045_800, world=8)
→  "13 buckets of 50 million gradients, 190.7 MiB each; the backward pass waits for each (overlap_comm off)"
"""

import math
from collections.abc import Mapping
from typing import Any

from data.files import memory_text

# Elements. A bucket's memory is set apart whole: DeepSpeed's default of 500 million takes 1.9 GiB in fp32 and holds a
# ViT-H/14 in two, so that nothing could be summed while the backward pass goes on. 50 million take 0.2 GiB, and are a
# thirteenth of H/14's backward pass.
MOST_IN_A_BUCKET = 50_000_000


def bucket_size(parameters: int) -> int:
    """Return the elements of a bucket where the user's own DeepSpeed file does not say it."""
    return min(parameters, MOST_IN_A_BUCKET)


def overlaps(zero_optimization: Mapping[str, Any]) -> bool:
    """Return whether sums go on while the backward pass does: at ZeRO 3, or where the user's DeepSpeed file says so."""
    asked = zero_optimization.get("overlap_comm")
    if asked is None:
        return bool(zero_optimization["stage"] == 3)
    return bool(asked)


def reduction_line(zero_optimization: Mapping[str, Any], parameters: int, world: int, exact_parts: int = 0) -> str:
    """Return in what pieces, and when, the gradients of so many parameters are summed over the workers.

    `zero_optimization` is that section of `engine.deepspeed_config`. Returns "" where there is one worker.
    """
    if world == 1:
        return ""
    if exact_parts:
        return "all gradients at once behind the backward pass, in a fixed order (exact_parts)"
    if zero_optimization["stage"] == 0:
        return "all gradients at once behind the backward pass (ZeRO 0)"
    size = zero_optimization.get("reduce_bucket_size", bucket_size(parameters))
    buckets = math.ceil(parameters / size)
    pieces = f"{buckets} buckets of {size / 1e6:,.3g} million gradients"
    if buckets == 1:
        pieces = f"one bucket of {parameters / 1e6:,.3g} million gradients"
    when = "the backward pass waits for each (overlap_comm off)"
    if overlaps(zero_optimization):
        when = "while the backward pass goes on (overlap_comm on)"
    return f"{pieces}, {memory_text(size * 4)} each; {when}"
