"""Has a step that is traced with fake workers allocate what gloo allocates for a collective between real ones, on CPUs.

gloo reduce-scatters by summing a copy of the whole input, and gathers into a tensor of its own, which it then copies
into the result (torch's ProcessGroupGloo.cpp; tests/test_memory.py counts them). It sums and sends in place.
NCCL takes the tensors that it is given, and buffers which it has from the start and torch's allocator knows nothing of.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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
    """Return the tensors of a collective that gloo has a copy of; `arguments` are those of torch's operator."""
    if name == "c10d::_reduce_scatter_base_":
        _, whole, *_ = arguments
        return [whole]
    if name == "c10d::_allgather_base_":
        whole, *_ = arguments
        return [whole]
    if name == "c10d::allgather_":
        (parts,), *_ = arguments
        return list(parts)
    return []
