"""Results of operations on fake tensors are those of FakeTensorMode, and share memory as the real ones do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.extras.plan.fake_results import FakeResults, Sharing, sharing_of

aten = torch.ops.aten

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(6, 4),
    "transposed": lambda x: x.transpose(0, 1),
    "transposed matrix": lambda x: x[0].t(),
    "slice with a step": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :1].expand(2, 3, 4),
    "split": lambda x: x.split([1, 2], 1),
    "chunks of a view": lambda x: x[:, 1:].chunk(2, -1),
    "bytes": lambda x: x.view(torch.uint8),
    "detached": lambda x: x.detach(),
    "unsafe view": lambda x: aten._unsafe_view(x, [6, 4]),
    "reshaped copy": lambda x: x.transpose(0, 1).reshape(24),
    "clone that keeps strides": lambda x: x.transpose(0, 1).clone(),
    "contiguous clone": lambda x: x.transpose(0, 1).contiguous(),
    "cast": lambda x: x.to(torch.bfloat16),
    "cast to the same type": lambda x: x.to(torch.float32),
    "sum of two layouts": lambda x: x.transpose(1, 2) + torch.ones(4, 3),
    "sum with a number": lambda x: x + 1,
    "sum with a whole number of integers": lambda x: x.long() + 1,
    "product with a fraction of integers": lambda x: x.long() * 1.5,
    "reduced": lambda x: x.sum((0, 2), keepdim=True),
    "concatenated": lambda x: torch.cat([x, x[:, :1]], 1),
    "matrix product": lambda x: x @ torch.ones(4, 5),
    "layer norm": lambda x: aten.native_layer_norm(x, [4], None, None, 1e-6),
    "in place": lambda x: x.mul_(2),
    "in place, of a part": lambda x: x[0].zero_(),
    "convolution": lambda x: F.conv2d(x.view(1, 2, 3, 4), torch.ones(5, 2, 2, 2)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "maximum and its place": lambda x: x.max(-1),
    "created": lambda x: (x.new_zeros(3), torch.ones(2), torch.zeros_like(x)),
}


class Recorded(TorchDispatchMode):
    """Records the layouts of all results below it, through `FakeResults` if it is given one."""

    def __init__(self, results: FakeResults | None) -> None:
        super().__init__()
        self.results = results
        self.layouts: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if self.results is None:
            result = function(*arguments, **(options or {}))
        else:
            result = self.results.of(function, arguments, options or {})
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue  # mostly the device, which only a fake tensor is asked for by an operation
            storage = leaf.untyped_storage()
            layout = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.storage_offset(), storage.nbytes())
            self.layouts.append((str(function), *layout, type(leaf), storage._cdata in before))
        return result


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_the_fake_mode_at_first_and_later(name: str):
    operation = OPERATIONS[name]
    whole = (3, 24)  # the argument is the second third of a storage, as a weight is in DeepSpeed
    with FakeTensorMode(), Recorded(None) as expected:
        operation(torch.zeros(whole)[1].view(2, 3, 4))
    results = FakeResults()
    mode = FakeTensorMode()
    for attempt in ("first", "second", "third"):
        with mode, Recorded(results) as recorded:
            x = torch.zeros(whole)
            assert isinstance(x, FakeTensor)
            operation(x[1].view(2, 3, 4))
        assert recorded.layouts == expected.layouts, attempt


@pytest.mark.parametrize("name", OPERATIONS)
def test_views_share_the_memory_that_real_views_share(name: str):
    operation = OPERATIONS[name]
    with Recorded(None) as real:
        operation(torch.zeros(2, 3, 4))
    with FakeTensorMode(), Recorded(FakeResults()) as fake:
        operation(torch.zeros(2, 3, 4))
    shares = [(layout[0], layout[-1]) for layout in real.layouts]
    assert [(layout[0], layout[-1]) for layout in fake.layouts] == shares


def test_results_are_new_each_time():
    results = FakeResults()
    with FakeTensorMode():
        x = torch.zeros(4)
        first, second, third = (results.of(aten.mul.Tensor, [x, x], {}) for _ in range(3))
    assert len({part.untyped_storage()._cdata for part in (x, first, second, third)}) == 4


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (aten.view.default, Sharing.VIEW),
        (aten.split.Tensor, Sharing.VIEW),
        (aten.mm.default, Sharing.NONE),
        (aten.add_.Tensor, Sharing.OTHER),
        (aten.resize_.default, Sharing.OTHER),
        (aten.native_batch_norm.out, Sharing.OTHER),
        (torch.ops.c10d.allreduce_.default, Sharing.OTHER),
        (torch.ops.prim.device.default, Sharing.OTHER),
    ],
)
def test_schemas_tell_which_operations_share_memory(function: Any, expected: Sharing):
    assert sharing_of(function) is expected


def test_operations_on_tensors_with_data_are_computed():
    results = FakeResults()
    x = torch.arange(3.0)
    for _ in range(2):
        assert results.of(aten.mul.Tensor, [x, x], {}).tolist() == [0.0, 1.0, 4.0]
        assert results.of(aten.view.default, [x, [3, 1]], {}).shape == (3, 1)
