"""Has a step traced with fake tensors and fake workers allocate what real ones take beside what is seen of them.

1. A collective over gloo, on CPUs: it reduce-scatters by summing a copy of the whole input, and gathers into a tensor
   of its own, which it then copies into the result (torch's ProcessGroupGloo.cpp). It sums and sends in place. What it
   takes for any other collective nobody has counted: a step that calls one cannot be traced.
   NCCL takes the tensors that it is given, and buffers that it has from the start, unknown to torch's allocator.
2. A kernel: the mean squared error, where it is added up, computes every element's into a tensor of its own, and its
   result, one number, keeps the memory of another one for as long as it lives (torch's Loss.cpp).

tests/test_memory.py counts both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

IN_PLACE = ("c10d::allreduce_", "c10d::broadcast_", "c10d::send", "c10d::recv_", "c10d::barrier")
NONE = 0  # torch's numbers for what becomes of the elements' errors
MEAN = 1


class GlooBuffers(TorchDispatchMode):
    """Allocates, inside its block, beside each collective what gloo would, for as long as it lasts."""

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        buffers = []
        for tensor in copied_by_gloo(function.name(), arguments):
            buffers.append(torch.empty_like(tensor))
        return function(*arguments, **(options or {}))


def copied_by_gloo(name: str, arguments: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of a collective that gloo has a copy of; `arguments` are those of torch's operator.

    Raises AssertionError where what gloo allocates is not known.
    """
    if name == "c10d::_reduce_scatter_base_":
        _, whole, *_ = arguments
        return [whole]
    if name == "c10d::_allgather_base_":
        whole, *_ = arguments
        return [whole]
    if name == "c10d::allgather_":
        (parts,), *_ = arguments
        return list(parts)
    is_collective = name.startswith(("c10d::", "_c10d_functional::"))
    assert not is_collective or name in IN_PLACE, f"{name}: what gloo allocates for it has not been counted"
    return []


class KernelBuffers(TorchDispatchMode):
    """Allocates, inside its block, what torch's kernels would."""

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        if function is torch.ops.aten.mse_loss.default:
            return mse_loss(*arguments, **(options or {}))
        return function(*arguments, **(options or {}))


def mse_loss(predictions: Tensor, answers: Tensor, reduction: int = MEAN) -> Tensor:
    """Take the place of torch's kernel: the same shape and type, the same memory, and no right number."""
    result = torch.ops.aten.mse_loss(predictions, answers, NONE)
    if reduction == NONE:
        return result
    errors = torch.empty_like(result)
    del errors
    return result.resize_(())
