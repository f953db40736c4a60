"""Has a step that is traced on fake CPU tensors keep what a GPU would keep for the backward pass.

Three things differ between torch's kernels for CPUs and for CUDA, in what they hold on to:
1. attention: fused there, so that no matrix of tokens × tokens is kept, but a number for every query and head. A bias
   on the attention (relative positions) needs another fused kernel, which keeps the bias;
2. dropout: a mask of one byte an element there, and of the activations' own type on CPUs;
3. AdamW: fused there, without a copy of the state on the way.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from models import layers, vit

HEAD_MULTIPLE = 8  # flash attention pads the width of a head to it
BIAS_MULTIPLE = 16  # and the other kernel a row of the bias


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside the block models, losses and optimizers keep what they would on a GPU with flash attention."""
    with ExitStack() as around:
        around.enter_context(patch.object(layers, "attend", fused_attention))
        around.enter_context(patch.object(vit, "attend", fused_attention))
        around.enter_context(patch.object(torch.optim, "AdamW", fused_adamw))
        around.enter_context(patch.object(F, "dropout", cuda_dropout))
        yield


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Take the place of `models.layers.attend`."""
    # Flash attention takes half precision and no bias; the kernel that torch chooses otherwise takes both.
    if q.dtype == torch.bfloat16 and bias is None:
        width = q.shape[-1]
        missing = -width % HEAD_MULTIPLE
        if missing:
            q, k, v = (F.pad(part, (0, missing)) for part in (q, k, v))
        mixed = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
        return mixed[..., :width]
    if bias is not None:
        length = bias.shape[-1]
        bias = F.pad(bias, (0, -length % BIAS_MULTIPLE))[..., :length].expand(*q.shape[:3], length)
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[0]


def fused_adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
    """Take the place of torch.optim.AdamW."""
    return ADAMW(groups, **{**options, "fused": True})


ADAMW = torch.optim.AdamW


def cuda_dropout(x: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
    """Take the place of `torch.nn.functional.dropout`."""
    if not training or p == 0.0:
        return x
    return torch.ops.aten.native_dropout(x, p, True)[0]
