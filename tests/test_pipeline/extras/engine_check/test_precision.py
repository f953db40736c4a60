"""A CPU that computes bf16 in software is reported, with the two times."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.extras.engine_check import precision
from pipeline.extras.engine_check.precision import seconds_of_product, slow_precision

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_timed_product_is_in_the_given_precision(dtype) -> None:
    with Products() as products:
        assert seconds_of_product(dtype) > 0
    assert products.dtypes == [dtype] * precision.REPETITIONS


class Products(TorchDispatchMode):
    """Records the data type of each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))
